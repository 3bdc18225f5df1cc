"""The simulator: exact times of small programs that can be worked out by hand, and the same ones every time."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hetmem.base.hardware import HardwareProfile
from hetmem.errors import CapacityError
from hetmem.schedule.blocks import EvictionPolicy
from tests.planner.tested import (
    FIFO,
    LRU,
    Block,
    Capacities,
    CopyState,
    LinkQueue,
    NextUse,
    NoRoom,
    Notes,
    Rate,
    Schedule,
    SimulatedTraffic,
    Tier,
)
from tests.schedule.invariants import check_invariants
from tests.schedule.test_hardware import profile


def machine(**links: Rate) -> HardwareProfile:
    """Links of 100 bytes a second without latency, unless given."""
    from dataclasses import replace

    names = ("host_to_device", "device_to_host", "nvme_read", "nvme_write")
    return replace(profile(), **{**dict.fromkeys(names, Rate(100.0)), **links})


def traffic(device: int, homes: list[Tier], *, staging: int = 0, policy: EvictionPolicy | None = None, **links: Any):
    """Blocks of 100 bytes each."""
    made = SimulatedTraffic({Tier.DEVICE: device, Tier.HOST: staging}, machine(**links), policy)
    for number, home in enumerate(homes):
        made.add(Block(f"block {number}", home), 100)
    return made


def use(simulated: SimulatedTraffic, block: int, seconds: float) -> None:
    simulated.residency.reach((block,), Tier.DEVICE)
    simulated.acquire(block, Tier.DEVICE)
    simulated.now += seconds
    simulated.release(block, Tier.DEVICE)


def test_a_link_is_a_queue() -> None:
    link = LinkQueue(Rate(100.0, 0.5))
    assert [link.send(0.0, 100), link.send(0.0, 50), link.send(10.0, 100)] == [1.5, 2.5, 11.5]
    assert (link.load.bytes, link.load.seconds) == (250, 4.0)


@pytest.mark.parametrize(
    ("both_ways", "expected"),
    [
        (0.0, (4.0, 2.0, 8.0)),  # nobody knows: each as if alone
        (200.0, (4.0, 4.0, 8.0)),  # as long as the slower one takes
        (400 / 3, (4.0, 6.0, 10.0)),  # one request at a time: both after each other
        (160.0, (4.0, 5.0, 8.5)),  # half of what is quicker is hidden
        (100.0, (4.0, 4 + 2 * 4 / 3, 4 + 6 * 4 / 3)),  # to change between both takes time
    ],
    ids=["not measured", "two engines", "by turns", "between", "worse than turns"],
)
def test_a_disk_reads_and_writes_at_once_as_fast_as_was_measured(
    both_ways: float, expected: tuple[float, float, float]
) -> None:
    """400 bytes each way, at 100 and 200 a second alone; then as much is read again."""
    from dataclasses import replace

    rates = replace(machine(nvme_read=Rate(100.0), nvme_write=Rate(200.0)), nvme_both_ways_bytes_per_second=both_ways)
    simulated = SimulatedTraffic({Tier.DEVICE: 0, Tier.HOST: 0}, rates)
    read, write = simulated.nvme_read, simulated.nvme_write
    assert (read.send(0.0, 400), write.send(0.0, 400), read.send(0.0, 400)) == pytest.approx(expected)
    busy = expected[2], expected[1]  # all the time, as a report would say
    assert (read.load.seconds, write.load.seconds) == pytest.approx(busy)
    assert write.send(20.0, 400) == 22.0


def test_nothing_to_transfer_takes_no_time_where_a_disk_takes_turns() -> None:
    from dataclasses import replace

    simulated = SimulatedTraffic(
        {Tier.DEVICE: 0, Tier.HOST: 0}, replace(machine(), nvme_both_ways_bytes_per_second=100.0)
    )
    assert simulated.nvme_read.send(0.0, 100) == 1.0
    assert simulated.nvme_write.send(0.0, 0) == 1.0


def test_a_fault_waits_for_the_whole_transfer() -> None:
    simulated = traffic(1, [Tier.HOST])
    use(simulated, 0, 2.0)
    assert (simulated.now, simulated.stall_seconds) == (3.0, 1.0)


def test_a_copy_that_is_there_costs_nothing() -> None:
    simulated = traffic(1, [Tier.HOST])
    use(simulated, 0, 0.0)
    use(simulated, 0, 0.0)
    assert (simulated.now, simulated.host_to_device.load.bytes) == (1.0, 100)


def test_what_the_schedule_expects_is_fetched_behind_compute() -> None:
    simulated = traffic(2, [Tier.HOST] * 2)
    simulated.execute(simulated.residency.expect({Tier.DEVICE: Schedule([(0,), (1,)])}))
    use(simulated, 0, 5.0)
    use(simulated, 1, 1.0)
    assert (simulated.now, simulated.stall_seconds) == (7.0, 1.0)


def test_from_nvme_a_block_passes_through_host_memory() -> None:
    simulated = traffic(1, [Tier.NVME], staging=1, nvme_read=Rate(50.0))
    use(simulated, 0, 0.0)
    assert simulated.now == 3.0
    assert (simulated.nvme_read.load.seconds, simulated.host_to_device.load.seconds) == (2.0, 1.0)


def test_a_dirty_staged_copy_is_written_before_its_slot_is_used_again() -> None:
    simulated = traffic(0, [Tier.NVME] * 2, staging=1)
    simulated.open_staged(0, load=False)
    simulated.release(0, Tier.HOST, dirty=True)
    assert simulated.now == 0.0
    simulated.open_staged(1, load=True)
    assert simulated.now == 2.0
    assert (simulated.nvme_write.load.bytes, simulated.nvme_read.load.bytes) == (100, 100)


def test_a_copy_on_its_way_home_is_not_changed() -> None:
    simulated = traffic(0, [Tier.NVME], staging=1)
    simulated.open_staged(0, load=False)
    simulated.release(0, Tier.HOST, dirty=True)
    simulated.execute(simulated.residency.settle(0))
    simulated.open_staged(0, load=True)
    assert simulated.now == 1.0


def test_gradients_on_their_way_leave_before_there_is_no_room() -> None:
    simulated = traffic(1, [Tier.HOST])
    ground: Any = SimpleNamespace(slot_bytes=100, device_slots=1, chunks=[SimpleNamespace(span=1)])
    notes = Notes(simulated, Capacities(300, 0), ground, 0)
    notes.begin(("backward",))
    notes.moment("mm", (0,), 100)
    simulated.acquire(0, Tier.DEVICE)
    for _ in range(3):
        simulated.send_gradient(0, 100, 60)
    began = simulated.now
    notes.grew(120)
    assert (simulated.now, simulated.gradient_bytes()) == (began + 2.0, 60), "one has room beside it"
    assert notes.peaks.device_peak_bytes == 100 + 120 + 60
    with pytest.raises(NoRoom):
        notes.grew(201)
    assert simulated.gradient_bytes() == 0


@pytest.mark.parametrize(("on_its_way", "left"), [(60, 0), (0, 60)])
def test_a_copy_gets_the_room_that_gradients_leave_on_their_way(on_its_way: int, left: int) -> None:
    """And no more: the second of the two copies has none beside what stays."""
    simulated = traffic(2, [Tier.HOST, Tier.HOST])
    ground: Any = SimpleNamespace(slot_bytes=100, device_slots=2, chunks=[SimpleNamespace(span=1)] * 2)
    notes = Notes(simulated, Capacities(300, 300), ground, 0)
    notes.begin(("backward",))
    simulated.send_gradient(0, 100, on_its_way)
    notes.moment("mm", (0, 1), 100 + left)
    assert simulated.residency.allowed_slots(Tier.DEVICE) == 1
    notes.acquire(0, 100 + left)
    with pytest.raises(CapacityError) if left else nullcontext():
        notes.acquire(1, 100 + left)
    assert simulated.residency.allowed_slots(Tier.DEVICE) == 2 - bool(left)


def test_what_a_segment_needs_before_its_first_moment_has_room_when_it_comes_again() -> None:
    simulated = traffic(2, [Tier.HOST, Tier.HOST])
    ground: Any = SimpleNamespace(slot_bytes=100, device_slots=2, chunks=[SimpleNamespace(span=1)] * 2)
    notes = Notes(simulated, Capacities(300, 300), ground, 0)
    for _ in range(2):
        notes.begin(("backward",))
        notes.grew(150)
        assert simulated.residency.allowed_slots(Tier.DEVICE) == 1
        notes.moment("mm", (0,), 100)
        assert simulated.residency.allowed_slots(Tier.DEVICE) == 2
        notes.end()


@pytest.mark.parametrize(("bytes_in_flight", "sent"), [(400, 4), (150, 1), (0, 1)])
def test_gradients_are_on_their_way_up_to_so_many_bytes_and_at_least_one(bytes_in_flight: int, sent: int) -> None:
    simulated = SimulatedTraffic({Tier.DEVICE: 1, Tier.HOST: 0}, machine(), device_bytes=16 * bytes_in_flight)
    for chunk in range(5):
        simulated.send_gradient(chunk, 100, 60)
    assert simulated.now == 5.0 - sent
    assert simulated.gradient_bytes() == sent * 60
    simulated.wait_for_gradients()
    assert (simulated.now, simulated.gradient_bytes()) == (5.0, 0)


def test_without_an_engine_whoever_needs_a_copy_makes_it() -> None:
    simulated = traffic(2, [Tier.HOST] * 2, host_to_device=Rate(100.0, by_the_caller=True))
    use(simulated, 0, 0.0)
    assert (simulated.now, simulated.residency.in_flight()) == (1.0, 0)


def test_an_end_is_noticed_only_when_somebody_looks() -> None:
    simulated = traffic(2, [Tier.HOST])
    simulated.execute(simulated.residency.prefetch([0], Tier.DEVICE))
    simulated.now = 5.0
    assert simulated.residency.state(0, Tier.DEVICE) is CopyState.LOADING
    simulated.poll()
    assert simulated.residency.state(0, Tier.DEVICE) is CopyState.VALID


def test_what_cannot_be_had_is_refused_and_nothing_stays_in_use() -> None:
    simulated = traffic(1, [Tier.HOST] * 2)
    simulated.acquire(0, Tier.DEVICE)
    with pytest.raises(CapacityError):
        simulated.acquire(1, Tier.DEVICE)
    assert simulated.residency.uses(1, Tier.DEVICE) == 0
    check_invariants(simulated.residency)


@pytest.mark.parametrize(("policy", "fetches"), [(NextUse(), 9), (LRU(), 12), (FIFO(), 12)])
def test_every_policy_drives_the_real_residency(policy: EvictionPolicy, fetches: int) -> None:
    simulated = traffic(3, [Tier.HOST] * 4, policy=policy)
    if isinstance(policy, NextUse):
        simulated.execute(simulated.residency.expect({Tier.DEVICE: Schedule([(b,) for b in range(4)])}))
    for _ in range(3):
        for block in range(4):
            use(simulated, block, 0.0)
    check_invariants(simulated.residency)
    counted = simulated.residency.counts.fetches[Tier.DEVICE]
    assert counted == simulated.host_to_device.load.bytes // 100
    assert counted <= fetches


def test_the_same_program_takes_the_same_time() -> None:
    def program() -> tuple[float, float, int]:
        simulated = traffic(3, [Tier.HOST, Tier.NVME] * 4, staging=2)
        schedule = Schedule([(b,) for b in (*range(8), *reversed(range(8)))])
        for _ in range(3):
            simulated.execute(simulated.residency.expect({Tier.DEVICE: schedule}))
            for block in (*range(8), *reversed(range(8))):
                use(simulated, block, 0.3)
        return simulated.now, simulated.stall_seconds, simulated.host_to_device.load.bytes

    assert program() == program()
