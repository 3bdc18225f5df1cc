"""Micro-batches that are counted and not rehearsed: what is left out, and that the step comes to the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from hetmem.schedule.hardware import HardwareProfile
from tests.planner.test_planner import HARDWARE, workload
from tests.planner.tested import (
    MIB,
    Capacities,
    Rate,
    Rehearsal,
    Setting,
    StepResult,
    Updating,
    arranged,
    micro_batches,
    rehearse,
    simulated_trace,
)

# No figure is a multiple of another one: of ends at the same time the last bits of sums say which is first.
UNEVEN = replace(
    HARDWARE,
    host_to_device=Rate(1.013e9, 1.3e-4),
    device_to_host=Rate(0.917e9, 1.1e-4),
    nvme_read=Rate(1.019e9),
    nvme_write=Rate(0.713e9),
    both_ways_bytes_per_second=1.31e9,
    nvme_both_ways_bytes_per_second=1.103e9,
)
ROOMS = {
    "host": Capacities(17 * MIB, 80 * MIB),
    "some homes on the device": Capacities(40 * MIB, 100 * MIB, 256 * MIB),
    "states on nvme": Capacities(20 * MIB, 40 * MIB, 256 * MIB, 8 * MIB),
    "all on nvme": Capacities(64 * MIB, 20 * MIB, 128 * MIB, 5 * MIB),
}


class Clock:
    """Counts as `SimulatedTraffic` does, of micro-batches that take `seconds`."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.now = self.stall_seconds = 0.0
        self.links = {name: SimpleNamespace(load=SimpleNamespace(bytes=0, seconds=0.0)) for name in "abcd"}
        self.residency = SimpleNamespace(counts=SimpleNamespace(fetches=Counter(), faults=Counter()))
        self._seconds = iter(seconds)
        self.rehearsed = 0

    def rehearse(self) -> None:
        self.now += next(self._seconds)
        self.rehearsed += 1


def left_out(count: int, seconds: Iterable[float], settled: Iterable[bool] = ()) -> list[tuple[int, int, float]]:
    """(after which one, how many, seconds of all) of `count` micro-batches that take `seconds`."""
    clock, found, quiet = Clock(seconds), [], chain(settled, repeat(True))
    _, more = micro_batches(
        count,
        clock,  # type: ignore[arg-type]
        clock.rehearse,
        lambda skipped: found.append((clock.rehearsed, skipped)),
        lambda: next(quiet),
    )
    return [(*one, more) for one in found]


def test_the_mean_of_four_stands_for_the_others_but_the_first_and_the_last() -> None:
    assert left_out(100, [9.0] * 4 + [2.0, 3.0, 2.0, 3.0, 7.0]) == [(8, 91, 91 * 2.5)]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_of_a_few_every_one_is_rehearsed(count: int) -> None:
    assert left_out(count, [1.0] * count) == []


def test_while_updates_are_under_way_nothing_is_left_out() -> None:
    assert left_out(20, [9.0] * 3 + [1.0] * 9, [False, False, True]) == [(10, 9, 9.0)]


def steps(room: Capacities, count: int, how: Updating, on: HardwareProfile) -> StepResult:
    setting = Setting(room, MIB, updating=how)
    made = arranged(workload(13), setting)
    return rehearse(workload(13), made, room, on, micro_batches=count, updating=how)


@pytest.mark.pairs
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS.keys())
@pytest.mark.parametrize("how", [Updating(), Updating(overlapped=True)], ids=["in the step", "in the backward"])
@pytest.mark.parametrize("count", [12, 20])
def test_a_step_comes_to_what_it_does_with_all_of_them_rehearsed(
    room: Capacities, how: Updating, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = steps(room, count, how, UNEVEN)
    monkeypatch.setattr(simulated_trace, "_REHEARSED", 99)
    whole = steps(room, count, how, UNEVEN)
    assert quick.events < whole.events
    for seconds, exact in [
        (quick.seconds, whole.seconds),
        (quick.stall_seconds, whole.stall_seconds),
        *zip(quick.terms.values(), whole.terms.values(), strict=True),
    ]:
        assert seconds == pytest.approx(exact, abs=0.002 * whole.seconds)
    assert quick.bytes == pytest.approx(whole.bytes, rel=0.01)
    assert (quick.fetches, quick.faults) == pytest.approx((whole.fetches, whole.faults), rel=0.02, abs=2)
    assert quick.device_peak_bytes == whole.device_peak_bytes


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS.keys())
def test_many_micro_batches_take_no_more_rehearsing_than_a_few(
    room: Capacities, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Rehearsal(workload(13), arranged(workload(13), Setting(room, MIB)), room, UNEVEN, micro_batches=512)
    real, seen = Rehearsal._micro_batch, list[int]()

    def counted(self: Rehearsal) -> None:
        seen.append(1)
        real(self)

    monkeypatch.setattr(Rehearsal, "_micro_batch", counted)
    for _ in range(4):
        seen.clear()
        result = run.step()
        assert len(seen) == 9
    assert result.seconds >= 512 * workload(13).compute_seconds(UNEVEN.device)
    assert result.bytes["device_to_host"] == 512 * 13 * MIB or room is ROOMS["some homes on the device"]
