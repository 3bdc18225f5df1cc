"""Micro-batches that are counted and not rehearsed: what is left out, and that the step comes to the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from hetmem.plan.hardware import HardwareProfile, Rate
from hetmem.plan.placement import Capacities
from hetmem.plan.planner import Setting, arranged
from hetmem.plan.rehearsal import Rehearsal, rehearse
from hetmem.plan.repetition import Repetition
from hetmem.plan.result import StepResult
from hetmem.plan.updating import Updating
from hetmem.units import MIB
from tests.plan.test_planner import HARDWARE, workload

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


def left_out(count: int, seconds: Iterable[float], states: Iterable[object]) -> list[tuple[int, int, float]]:
    """(after which one, how many, seconds of each) of `count` micro-batches that take `seconds` and leave `states`."""
    clock = [0.0]
    repetition, found = Repetition(count, lambda: (clock[0],)), []
    for at, (took, state) in enumerate(zip(seconds, states, strict=False), 1):
        clock[0] += took
        repeated = repetition.ended(lambda state=state: state)  # type: ignore[misc]
        if repeated is not None:
            found.append((at, repeated.count, repeated.each[0]))
    return found


def test_what_comes_again_is_left_out_but_for_the_last_one() -> None:
    assert left_out(32, [9.0, 2.0, 3.0, 3.0], ["a", "b", "b", "b"]) == [(3, 28, 3.0)]


def test_what_comes_again_by_turns_is_left_out_by_whole_turns() -> None:
    assert left_out(12, [9.0, 2.0, 3.0, 5.0], ["a", "b", "c", "b"]) == [(4, 6, 4.0)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_a_few_every_one_is_rehearsed(count: int) -> None:
    assert left_out(count, [1.0] * count, ["a"] * count) == []


def test_where_nothing_comes_again_the_later_half_stands_for_the_others() -> None:
    assert left_out(100, [9.0] * 4 + [2.0, 3.0, 2.0, 3.0], range(8)) == [(8, 91, 2.5)]


def test_while_updates_are_under_way_nothing_is_compared() -> None:
    assert left_out(100, [1.0] * 6, [None] * 6) == []


def steps(room: Capacities, micro_batches: int, how: Updating, on: HardwareProfile) -> StepResult:
    setting = Setting(room, MIB, updating=how)
    made = arranged(workload(13), setting)
    return rehearse(workload(13), made, room, on, micro_batches=micro_batches, updating=how)


@pytest.mark.pairs
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS.keys())
@pytest.mark.parametrize("how", [Updating(), Updating(overlapped=True)], ids=["in the step", "in the backward"])
@pytest.mark.parametrize("micro_batches", [7, 12])
def test_a_step_comes_to_what_it_does_with_all_of_them_rehearsed(
    room: Capacities, how: Updating, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = steps(room, micro_batches, how, UNEVEN)
    monkeypatch.setattr(Repetition, "ended", lambda self, state: None)
    whole = steps(room, micro_batches, how, UNEVEN)
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
    seen: list[int] = []
    real = Repetition.ended

    def counted(self: Repetition, state: object) -> object:
        seen.append(1)
        return real(self, state)  # type: ignore[arg-type]

    monkeypatch.setattr(Repetition, "ended", counted)
    for _ in range(4):
        seen.clear()
        result = run.step()
        assert len(seen) <= 9
    assert result.seconds >= 512 * workload(13).compute_seconds(UNEVEN.device)
    assert result.bytes["device_to_host"] == 512 * 13 * MIB or room is ROOMS["some homes on the device"]
