"""Updates on the device with states brought there, on the simulator's clock: exact times, bytes and slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetmem.base.hardware import HardwareProfile
from tests.planner.test_planner import HARDWARE, workload
from tests.planner.test_simulator import traffic, use
from tests.planner.tested import (
    MIB,
    Capacities,
    Decision,
    LinkQueue,
    Notes,
    Rate,
    Setting,
    SimulatedDeviceUpdates,
    SimulatedTraffic,
    SimulatedUpdates,
    StepResult,
    StreamingGain,
    Tier,
    Update,
    Workload,
    arrange,
    decide,
    fits,
    format_seconds,
    judge,
)

HOST, DEVICE = Tier.HOST, Tier.DEVICE
ROOM = Capacities(64 * MIB, 64 * MIB, 0, 16 * MIB)
"""Eight copies of a MiB, and two slots of four."""


def streaming(simulated: SimulatedTraffic, slots: int = 100) -> tuple[SimulatedDeviceUpdates, SimulatedUpdates]:
    made = arrange(workload(), ROOM, MIB)
    updates = SimulatedUpdates(simulated, 4, Notes(simulated, ROOM, made.ground, 0))
    updates.streamed.take_slots(slots)
    return updates.streamed, updates


def sent(
    there: int, home: int, *, seconds: float = 0.0, ready: Callable[[], bool] = lambda: True, operand: int | None = None
) -> Update:
    return Update(0, operand, (), 0.0, 0.0, seconds, ready=ready, crossing=(there, home))


def on_host(seconds: float) -> Update:
    return Update(0, None, (), 0.0, seconds, 0.0, ready=lambda: True)


def test_states_come_are_updated_and_go_home_one_after_the_other() -> None:
    simulated = traffic(0, [])
    streamed, updates = streaming(simulated)
    updates.add(sent(400, 300, seconds=2.0))
    updates.finish()
    assert simulated.now == 4.0 + 2.0 + 3.0
    assert (simulated.host_to_device.load.bytes, simulated.device_to_host.load.bytes) == (400, 300)
    assert (streamed.sent_home_bytes, updates.seconds) == (300, 0.0)  # a report does not see when a device computes


def test_while_one_goes_home_the_next_one_is_brought_and_the_third_waits_for_a_slot() -> None:
    simulated = traffic(0, [], host_to_device=Rate(100.0), device_to_host=Rate(50.0))
    _, updates = streaming(simulated)
    for _ in range(3):
        updates.add(sent(400, 300))
    updates.finish()
    # there at 4, home at 10 and 16; the third is brought from 10 on, is there at 14, and home 6 s after the second
    assert simulated.now == 22.0


def test_the_host_updates_others_meanwhile() -> None:
    simulated = traffic(0, [])
    _, updates = streaming(simulated)
    updates.add(sent(400, 300))
    updates.add(on_host(5.0))
    updates.finish()
    assert simulated.now == 7.0
    assert updates.idle


def test_what_is_brought_waits_for_its_gradients() -> None:
    simulated = traffic(0, [])
    there: list[bool] = []
    _, updates = streaming(simulated)
    updates.add(sent(100, 100, ready=lambda: bool(there)))
    updates.pump()
    assert not simulated.busy()
    there.append(True)
    updates.finish()
    assert simulated.now == 2.0


def test_a_16_bit_copy_is_made_there_and_crosses_no_link() -> None:
    """That of what users may write to behind the update crosses for the next forward."""
    simulated = traffic(1, [HOST])
    simulated.own.add(0)
    use(simulated, 0, 0.0)
    before = simulated.host_to_device.load.bytes
    _, updates = streaming(simulated)
    updates.add(sent(400, 300, operand=0))
    assert simulated.residency.state(0, DEVICE) is None
    updates.finish()
    assert simulated.residency.state(0, DEVICE) is not None
    assert simulated.host_to_device.load.bytes == before + 400


def test_both_directions_together_have_no_more_than_the_link_has() -> None:
    up, down = LinkQueue(Rate(100.0)), LinkQueue(Rate(80.0))
    down.beside = (up, 20.0)  # of 120 a second
    assert up.send(0.0, 400) == 4.0
    assert down.send(0.0, 160) == 4.0 + (160 - 4 * 20) / 80
    assert down.send(0.0, 80) == 6.0
    simulated = traffic(0, [])
    assert simulated.host_to_device.beside is None  # 100 and 100 are less than the profile's 70 GB/s
    both = SimulatedTraffic({DEVICE: 0, HOST: 0}, HARDWARE)
    assert both.host_to_device.beside is None
    slow = SimulatedTraffic({DEVICE: 0, HOST: 0}, replace(HARDWARE, both_ways_bytes_per_second=1.5e9))
    assert slow.host_to_device.beside == (slow.device_to_host, 0.5e9)


# ---- in a rehearsal ----------------------------------------------------------------------------------------------


def slow_host(**links: Rate) -> HardwareProfile:
    return replace(HARDWARE, host=replace(HARDWARE.host, update_bytes_per_second=1e8), **links)


def step(
    room: Capacities = ROOM, *, streamed: bool = True, on: HardwareProfile | None = None, steps: int = 4
) -> StepResult:
    return judge(
        workload(), Setting(room, MIB).updated(streamed_states=streamed), on or slow_host(), 1, steps=steps
    ).result


def test_a_streamed_step_moves_every_role_once_each_way_and_its_slots_are_the_devices() -> None:
    without, result = step(streamed=False), step()
    assert (without.streamed_updates, without.update_slot_bytes) == (0.0, 0)
    assert (result.streamed_updates, result.update_slot_bytes) == (1.0, 2 * 4 * MIB)
    copies = 8 * MIB  # users may write to what is sent home
    assert result.bytes["host_to_device"] == 8 * 4 * MIB + copies
    assert result.bytes["device_to_host"] == 8 * MIB + 8 * 3 * MIB
    assert result.chunk_peak_bytes == 8 * MIB + 2 * 4 * MIB
    assert result.seconds < 0.2 * without.seconds


def test_the_part_is_the_one_that_makes_the_slowest_fastest() -> None:
    """28 bytes of the host at 7 against 16 of the link at 8, with 4 of each gradient and renewed copy: 7/11, which is
    five of eight chunks."""
    rate = Rate(8e6)
    on = replace(
        HARDWARE, host_to_device=rate, device_to_host=rate, host=replace(HARDWARE.host, update_bytes_per_second=7e6)
    )
    assert step(on=on).streamed_updates == 5 / 8
    assert step(on=on, steps=6).streamed_updates == 5 / 8  # what streaming sends home is no gradient


@pytest.mark.parametrize(
    "room",
    [
        Capacities(12 * MIB, 64 * MIB),
        Capacities(64 * MIB, 64 * MIB, 0, 15 * MIB),
        Capacities(64 * MIB, 20 * MIB, 64 * MIB, 16 * MIB),
        Capacities(128 * MIB, 64 * MIB),
    ],
    ids=["copies do not fit", "no room for slots", "NVMe", "all on the device"],
)
def test_nothing_is_streamed_where_a_run_would_not(room: Capacities) -> None:
    assert step(room) == step(room, streamed=False)


def test_a_run_with_a_drive_streams_nothing_also_of_chunks_that_are_whole_in_host_memory() -> None:
    room = Capacities(128 * MIB, 127 * MIB, 256 * MIB, 48 * MIB)
    made = arrange(workload(32), room, MIB)
    assert any(fits(made, workload(32), chunk) for chunk in range(32))
    result, without = (
        judge(workload(32), Setting(room, MIB).updated(streamed_states=streamed), slow_host(), 1).result
        for streamed in (True, False)
    )
    assert result == without


def test_what_slots_leave_of_the_device_is_filled_with_homes() -> None:
    result = step(replace(ROOM, device_chunk_bytes=21 * MIB))
    assert (result.device_updates, result.streamed_updates) == (1 / 8, 7 / 8)
    assert result.device_peak_bytes <= 64 * MIB
    assert result.chunk_peak_bytes == (8 + 2 * 4 + 4) * MIB


# ---- chosen ------------------------------------------------------------------------------------------------------


def decided(room: Capacities = ROOM, on: HardwareProfile | None = None, of: Workload | None = None) -> Decision:
    return decide(of or workload(), room, on or slow_host(), chunk_bytes=MIB)


def test_streaming_is_chosen_where_it_is_faster_and_both_times_are_said() -> None:
    decision = decided()
    best = decision.candidate
    assert best is not None
    assert best.setting.updating.streamed_states
    alone = judge(workload(), best.setting.updated(streamed_states=False), slow_host(), 1).result.seconds
    assert best.streaming == StreamingGain(1.0, best.result.seconds, alone)
    numbers = f"a step takes {format_seconds(best.result.seconds)}, not {format_seconds(alone)}"
    assert any("hardware=…" in advice and numbers in advice for advice in decision.advice)


@pytest.mark.parametrize(
    ("room", "on"),
    [
        (ROOM, HARDWARE),
        (ROOM, slow_host(device_to_host=Rate(1e6))),
        (ROOM, slow_host(host_to_device=Rate(1e9, by_the_caller=True))),
        (Capacities(12 * MIB, 64 * MIB), slow_host()),
        (Capacities(64 * MIB, 20 * MIB, 64 * MIB, 16 * MIB), slow_host()),
        (Capacities(128 * MIB, 64 * MIB), slow_host()),
    ],
    ids=["fast host", "slow link", "no engine that copies", "copies do not fit", "NVMe", "all on the device"],
)
def test_streaming_is_not_chosen_elsewhere(room: Capacities, on: HardwareProfile) -> None:
    decision = decided(room, on)
    assert decision.candidate is not None
    assert not decision.candidate.setting.updating.streamed_states
    assert not any("hardware=…" in advice for advice in decision.advice)
