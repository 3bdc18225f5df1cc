"""Of many micro-batches only a few are rehearsed, and the step comes to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetmem.base.hardware import HardwareProfile
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
    rehearse,
    step_program,
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
KEEPS = ("host", "some homes on the device")
"""Have room for the sums of gradients until the last backward."""


def steps(room: Capacities, count: int, how: Updating, on: HardwareProfile) -> StepResult:
    setting = Setting(room, MIB, hardware=on, micro_batches=count, updating=how)
    return rehearse(workload(13), arranged(workload(13), setting), setting)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("how", "room"),
    [
        *(pytest.param(Updating(), room, id=f"in the step, {name}") for name, room in ROOMS.items()),
        *(pytest.param(Updating(overlapped=True), ROOMS[name], id=f"in the backward, {name}") for name in KEEPS),
    ],
)
@pytest.mark.parametrize("count", [12, 20])
def test_a_step_comes_to_what_it_does_with_all_of_them_rehearsed(
    room: Capacities, how: Updating, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = steps(room, count, how, UNEVEN)
    monkeypatch.setattr(step_program, "_REHEARSED", (4, 99))
    whole = steps(room, count, how, UNEVEN)
    for seconds, exact in [
        (quick.seconds, whole.seconds),
        (quick.stall_seconds, whole.stall_seconds),
        *zip(quick.terms.values(), whole.terms.values(), strict=True),
    ]:
        assert seconds == pytest.approx(exact, abs=0.002 * whole.seconds)
    assert quick.bytes == pytest.approx(whole.bytes, rel=0.01)
    assert quick.device_peak_bytes == whole.device_peak_bytes


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS.keys())
def test_many_micro_batches_take_no_more_rehearsing_than_a_few(
    room: Capacities, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Rehearsal._micro_batch, list[int]()

    def counted(self: Rehearsal) -> None:
        seen.append(1)
        real(self)

    monkeypatch.setattr(Rehearsal, "_micro_batch", counted)
    result = steps(room, 512, Updating(), UNEVEN)
    assert len(seen) <= 4 * 12
    assert result.seconds >= 512 * workload(13).compute_seconds(UNEVEN.device)
    assert result.bytes["device_to_host"] == 512 * 13 * MIB or room is ROOMS["some homes on the device"]
