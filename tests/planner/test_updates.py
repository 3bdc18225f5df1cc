"""Updates on the simulator's clock: exact times of small programs, and that a run of them loses no byte."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetmem.base.hardware import HardwareProfile
from hetmem.errors import CapacityError
from tests.planner.test_planner import HARDWARE, workload
from tests.planner.test_simulator import traffic, use
from tests.planner.tested import (
    MIB,
    Capacities,
    CopyState,
    Judged,
    NoRoom,
    Rate,
    Rehearsal,
    Setting,
    SimulatedTraffic,
    SimulatedUpdates,
    Staged,
    StepResult,
    ThreadCosts,
    Tier,
    Update,
    Updating,
    arrange,
    deciding,
    judge,
    rehearse,
)
from tests.schedule.invariants import check_invariants

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def updates(simulated: SimulatedTraffic, cores: int = 4, *, one: float = 0.0, copied: float = 1e9) -> SimulatedUpdates:
    notes: Any = SimpleNamespace(staged=lambda block, *, reads: None)
    host = replace(
        HARDWARE.host,
        cores=cores,
        copy_bytes_per_second=copied,
        update_bytes_per_second=1.0,
        update_core_bytes_per_second=one,
    )
    return SimulatedUpdates(simulated, host, notes)


def update(
    seconds: float,
    *,
    number: int = 0,
    thread: float = 0.0,
    staged: tuple[int, ...] = (),
    operand: int | None = None,
    ready: bool = True,
) -> Update:
    parts = tuple(Staged(block, load=True, changes=True) for block in staged)
    return Update(number, operand, parts, thread, seconds, 0.0, ready=lambda: ready)


def test_updates_come_one_after_the_other_and_each_is_prepared_while_the_last_is_computed() -> None:
    simulated = traffic(0, [])
    made = updates(simulated)
    for _ in range(3):
        made.add(update(8.0, thread=2.0))
    made.finish()
    # The first is prepared alone; of the 2 s that two others take, a fourth of the workers was missing.
    assert simulated.now == 2.0 + 3 * 8.0 + 2 * 2.0 / 4
    assert made.seconds == simulated.now - 2.0  # one or the other is computed all the time
    assert made.idle


def test_what_was_begun_behind_compute_is_waited_for_only_as_far_as_it_is_not_over() -> None:
    simulated = traffic(0, [])
    made = updates(simulated)
    for _ in range(2):
        made.add(update(3.0))
        made.pump()  # three of four workers: 4 s each
    simulated.now += 6.0
    made.finish()
    assert (simulated.now, simulated.stall_seconds) == (8.0, 2.0)


def test_the_thread_takes_longer_beside_updates_than_after_them() -> None:
    simulated = traffic(0, [], host=replace(HARDWARE.host, beside_updates=4.0))
    made = updates(simulated)
    made.add(update(6.0))
    made.pump()  # three of four workers: 8 s
    simulated.takes(1.0)
    assert simulated.now == 4.0
    simulated.takes(3.0)  # one second of it beside the rest of the update
    assert simulated.now == 8.0 + 2.0


def test_what_links_carry_beside_updates_delays_them() -> None:
    """They share the host's memory."""
    ended = []
    for beside in (False, True):
        simulated = traffic(0, [])
        made = updates(simulated, copied=50.0)
        if not beside:
            simulated.send_beside(300, 0, lambda: None)
        made.add(update(6.0))
        made.pump()
        if beside:
            simulated.send_beside(300, 0, lambda: None)
        made.add(update(6.0))
        made.pump()
        ended.append(simulated.updating_until)
    assert ended == [16.0, 16.0 + 300 / 100.0]


def test_one_core_less_updates_as_fast_as_the_others_can() -> None:
    simulated = traffic(0, [])
    made = updates(simulated, one=0.5)
    made.add(update(6.0))
    made.pump()
    assert simulated.now == 0.0
    assert simulated.updating_until == 6.0  # three cores reach more than memory does


def test_what_the_next_update_needs_is_read_while_one_is_computed() -> None:
    simulated = traffic(0, [NVME] * 3, staging=3, nvme_read=Rate(100.0), nvme_write=Rate(1e9))
    made = updates(simulated)
    for block in range(3):
        made.add(update(5.0, staged=(block,)))
    made.finish()
    assert simulated.now == pytest.approx(1.0 + 3 * 5.0)
    assert simulated.nvme_read.load.bytes == 300
    simulated.drain()
    assert simulated.nvme_write.load.bytes == 300
    check_invariants(simulated.residency)


def test_three_updates_are_under_way_at_once_each_opened_once_those_before_have_places() -> None:
    simulated = traffic(0, [NVME] * 4, staging=4, nvme_read=Rate(100.0))
    made = updates(simulated)
    for block in range(4):
        made.add(update(5.0, staged=(block,)))
    made.pump()
    assert simulated.nvme_read.load.bytes == 300  # all three are on their way, and none waits for another's end
    made.finish()
    check_invariants(simulated.residency)


def test_an_update_does_not_open_while_one_before_waits_for_a_place() -> None:
    simulated = traffic(0, [NVME] * 4, staging=2, nvme_read=Rate(100.0))
    made = updates(simulated)
    for staged in ((0,), (1, 2), (3,)):
        made.add(update(5.0, staged=staged))
    made.pump()  # 0 and 1 have the two places, 2 waits for one
    assert [simulated.residency.state(block, HOST) for block in (1, 2, 3)] == [
        CopyState.LOADING,
        CopyState.WAITING,
        None,
    ]
    made.finish()
    simulated.drain()
    assert simulated.nvme_write.load.bytes == 400
    check_invariants(simulated.residency)


def test_all_updates_of_a_step_are_queued_before_the_first_goes_on() -> None:
    """While the thread does that, the drive has nothing to do; what an update takes later goes on beside the drive."""
    slow = replace(SLOW, nvme_read=Rate(1e7), nvme_write=Rate(1e7))
    free, queued, updated = (
        step(ON_NVME, overlapped=False, on=replace(slow, thread=costs)).seconds
        for costs in (ThreadCosts(), ThreadCosts(queue_seconds=0.01), ThreadCosts(update_seconds=0.01))
    )
    assert queued == pytest.approx(free + 8 * 0.01)
    assert updated < free + 3 * 0.01


def test_with_staging_for_one_update_each_waits_until_the_last_is_written() -> None:
    simulated = traffic(0, [NVME] * 2, staging=1, nvme_read=Rate(100.0), nvme_write=Rate(100.0))
    made = updates(simulated)
    for block in range(2):
        made.add(update(5.0, staged=(block,)))
    made.finish()
    assert simulated.now == 1.0 + 5.0 + 1.0 + 1.0 + 5.0


def test_an_update_that_finds_no_room_in_staging_says_so() -> None:
    simulated = traffic(0, [NVME] * 2, staging=1)
    made = updates(simulated)
    made.add(update(1.0, staged=(0, 1)))
    with pytest.raises(CapacityError, match="no room on HOST"):
        made.finish()


def test_an_update_begins_only_once_its_gradients_are_at_home() -> None:
    simulated = traffic(0, [])
    made = updates(simulated)
    there: list[bool] = []
    waits = update(1.0)
    waits.ready = lambda: bool(there)
    made.add(waits)
    made.pump()
    assert not simulated.busy()
    there.append(True)
    made.pump()
    assert simulated.busy()


def test_an_update_goes_on_wherever_the_thread_takes_note_of_what_has_ended() -> None:
    simulated = traffic(0, [])
    made = updates(simulated)
    there: list[bool] = []
    waits = update(1.0)
    waits.ready = lambda: bool(there)
    made.add(waits)
    simulated.later(1.0, lambda: there.append(True))
    simulated.now = 2.0
    simulated.poll()
    assert simulated.busy()


def test_nothing_fetches_what_is_being_updated_and_its_copy_comes_back_afterwards() -> None:
    simulated = traffic(2, [HOST] * 2)
    use(simulated, 0, 0.0)
    made = updates(simulated, cores=1)
    made.add(update(5.0, operand=0))
    assert simulated.residency.state(0, DEVICE) is None
    simulated.execute(simulated.residency.prefetch([0], DEVICE))
    assert simulated.residency.state(0, DEVICE) is None
    made.finish()
    assert simulated.residency.state(0, DEVICE) is CopyState.LOADING
    simulated.drain()
    assert simulated.now == 1.0 + 5.0 + 1.0


def test_a_use_of_what_is_being_updated_waits_for_that() -> None:
    simulated = traffic(2, [HOST] * 2)
    made = updates(simulated, cores=1)
    made.add(update(5.0, operand=0))
    use(simulated, 0, 0.0)
    assert simulated.now == 5.0 + 1.0


@pytest.mark.parametrize(("first", "then", "updated"), [(0, 1, 2), (0, 2, 3)], ids=["in order", "one between"])
def test_updates_take_turns_by_number(first: int, then: int, updated: int) -> None:
    simulated = traffic(3, [HOST] * 3)
    made = updates(simulated, cores=1)
    for number in (2, 1, 0):
        made.add(update(5.0, number=number, operand=number))
    use(simulated, first, 0.0)
    assert simulated.now == 5.0 + 1.0
    use(simulated, then, 0.0)
    assert simulated.now == updated * 5.0 + 1.0


def test_what_an_update_has_opened_gives_way_to_somebody_who_can_go_on_only_so() -> None:
    simulated = traffic(0, [NVME] * 4, staging=2)
    made = updates(simulated)
    simulated.open_staged(2, load=True)
    made.add(update(1.0, staged=(0, 1)))
    made.pump()  # block 0 has the second slot, block 1 waits for the first
    simulated.open_staged(3, load=True)
    assert simulated.residency.state(0, HOST) is not CopyState.VALID
    for block in (2, 3):
        simulated.release(block, HOST)
    made.finish()
    assert made.idle
    check_invariants(simulated.residency)


# ---- in a rehearsal ----------------------------------------------------------------------------------------------

SLOW = replace(
    HARDWARE,
    host=replace(HARDWARE.host, update_bytes_per_second=1e8),
    device=replace(HARDWARE.device, matrix_flops={"float32": 1e10}),
)
IN_HOST, ON_NVME = Capacities(12 * MIB, 64 * MIB), Capacities(12 * MIB, 24 * MIB, 64 * MIB)


def step(
    room: Capacities, *, overlapped: bool, micro_batches: int = 1, steps: int = 4, on: HardwareProfile = SLOW
) -> StepResult:
    return judge(workload(), Setting(room, MIB, updating=Updating(overlapped)), on, micro_batches, steps=steps).result


def test_of_updates_behind_the_backward_only_the_last_is_seen() -> None:
    result = step(IN_HOST, overlapped=True)
    one = 28 * 256 * 1024 / 1e8 * 32 / 31
    sent = MIB / 1e9
    assert result.seconds == pytest.approx(result.terms["compute"] + sent + one, rel=1e-3)
    assert step(IN_HOST, overlapped=False).seconds == pytest.approx(result.terms["compute"] + 8 * 0.0734, rel=1e-3)


def test_the_first_step_does_not_know_when_all_gradients_of_a_chunk_are_there() -> None:
    first, plain = step(IN_HOST, overlapped=True, steps=1), step(IN_HOST, overlapped=False, steps=1)
    assert first.loaned_bytes == 2 * MIB  # of eight chunks, of which six have what was set aside
    assert replace(first, loaned_bytes=0) == plain


@pytest.mark.parametrize(("room", "micro_batches"), [(IN_HOST, 1), (IN_HOST, 3), (ON_NVME, 1)])
def test_behind_the_backward_the_same_is_updated_and_written(room: Capacities, micro_batches: int) -> None:
    plain = step(room, overlapped=False, micro_batches=micro_batches)
    early = step(room, overlapped=True, micro_batches=micro_batches)
    assert early.terms["update"] == pytest.approx(plain.terms["update"] * 32 / 31, rel=1e-2)  # a worker is missing
    assert early.bytes["device_to_host"] == plain.bytes["device_to_host"] == micro_batches * 8 * MIB
    assert early.bytes["nvme_write"] <= plain.bytes["nvme_write"]
    assert early.seconds < plain.seconds
    assert early.device_peak_bytes <= room.device_bytes


@pytest.mark.parametrize("overlapped", [False, True])
def test_after_a_step_parameters_are_on_nvme_and_states_may_be_on_their_way(overlapped: bool) -> None:
    room = Capacities(12 * MIB, 10 * MIB, 64 * MIB)
    made = arrange(workload(), room, MIB)
    assert set(made.homes["param"].values()) == {HOST, NVME}
    drive = replace(SLOW, nvme_write=Rate(3e7))
    run = Rehearsal(workload(), made, Setting(room, None, hardware=drive, updating=Updating(overlapped)))
    for _ in range(3):
        run.step()
        for (role, _), block in run._blocks.items():
            assert role != "param" or not run._traffic.residency.dirty(block)
    assert run._traffic.busy()


def test_with_several_micro_batches_updates_go_behind_the_last_one() -> None:
    """Were they begun in an earlier one, more of them than the last would be hidden by what comes after."""
    slow = replace(SLOW, host=replace(SLOW.host, update_bytes_per_second=2e7))  # 0.37 s each: longer than a backward
    one, three = (step(IN_HOST, overlapped=True, micro_batches=m, on=slow) for m in (1, 3))
    assert three.seconds - three.terms["compute"] == pytest.approx(one.seconds - one.terms["compute"], rel=1e-2)


def test_preparing_updates_takes_the_thread_that_runs_the_backward() -> None:
    costs = replace(SLOW, thread=ThreadCosts(update_seconds=0.5))
    assert step(IN_HOST, overlapped=True, on=costs).seconds == pytest.approx(
        step(IN_HOST, overlapped=True).seconds + 8 * 0.5
    )


@pytest.mark.parametrize("room", [IN_HOST, ON_NVME], ids=["host", "nvme"])
def test_updates_that_trail_are_hidden_by_the_next_forward_too(room: Capacities) -> None:
    """The backward hides some of them; the same is updated, moved and written."""
    slow = replace(SLOW, host=replace(SLOW.host, update_bytes_per_second=2e7))  # 0.37 s a chunk of a MiB
    early, trailing = (
        judge(
            workload(), Setting(room, MIB, updating=Updating(overlapped=True, into_forward=into_forward)), slow, 1
        ).result
        for into_forward in (False, True)
    )
    assert trailing.seconds < 0.97 * early.seconds
    assert trailing.seconds >= max(trailing.terms.values())
    assert trailing.terms["update"] == pytest.approx(early.terms["update"], rel=1e-2)
    assert trailing.bytes["device_to_host"] == early.bytes["device_to_host"]
    assert trailing.bytes["nvme_write"] == early.bytes["nvme_write"]


def test_a_backward_waits_for_homes_of_gradients_that_updates_hold() -> None:
    """Six chunks have some at a time; updates slower than the backward hold all of them, and nobody gets one more."""
    slow = replace(SLOW, host=replace(SLOW.host, update_bytes_per_second=2e7))
    room = Capacities(24 * MIB, 54 * MIB, 0, 12 * MIB)
    made = arrange(workload(16), room, MIB, Updating(overlapped=True))
    how = Updating(overlapped=True)
    run = Rehearsal(workload(16), made, Setting(room, None, hardware=slow, updating=how))
    held: list[int] = []
    retire = run._sink.retire

    def retired(chunk: int) -> None:
        held.append(sum(map(run._sink.waits, range(16))))
        retire(chunk)

    run._sink.retire = retired  # type: ignore[method-assign]
    for _ in range(3):
        result = run.step()
    assert made.set_aside == (MIB,) * 6
    assert held[16:] == ([3, 4, 5] + [6] * 8 + [5, 4, 3, 2, 1]) * 2  # the first waits until all are taken
    assert not result.new_bytes
    assert run.arrangement.bytes_by_role(HOST)["grad"] == 6 * MIB


@pytest.mark.parametrize(("into_forward", "expected"), [(True, 20), (False, 30)])
def test_steps_with_updates_that_trail_are_taken_in_the_mean(
    into_forward: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are long and short by turns, and what one leaves to be written the next one writes."""
    steps, taken = Rehearsal.step, 0

    def by_turns(run: Rehearsal) -> StepResult:
        nonlocal taken
        taken += 1
        written = 1000 if taken <= 4 and into_forward else 30 if taken % 2 == 0 else 10
        return replace(steps(run), seconds=1e3 * written, stall_seconds=written, bytes={"nvme_write": written})

    monkeypatch.setattr(Rehearsal, "step", by_turns)
    arrangement = arrange(workload(), ON_NVME, MIB)
    how = Updating(overlapped=True, into_forward=into_forward)
    result = rehearse(workload(), arrangement, Setting(ON_NVME, None, hardware=SLOW, updating=how))
    assert (result.bytes["nvme_write"], result.stall_seconds, result.seconds) == (expected, expected, 1e3 * expected)


def test_two_budgets_differ_where_gradients_take_what_homes_leave_and_are_rehearsed_once_where_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, seen = rehearse, list[int]()

    def counted(*of: Any) -> StepResult:
        seen.append(1)
        return real(*of)

    monkeypatch.setattr(deciding, "rehearse", counted)
    how = Updating(overlapped=True)

    def with_room(host: int, nvme: int) -> Judged | NoRoom:
        room = Capacities(20 * MIB, host * MIB, nvme * MIB, 8 * MIB)
        return deciding.judged(workload(8), Setting(room, MIB, hardware=SLOW, updating=how))

    found = [with_room(7, nvme) for nvme in (25, 29)]  # where none can be lent a home
    assert isinstance(found[0], NoRoom) and found[0].tier is Tier.NVME
    assert isinstance(found[1], Judged) and found[1].result.new_bytes == {"nvme": 8 * MIB}
    seen.clear()
    found = [with_room(14, nvme) for nvme in (20, 24)]
    assert isinstance(found[0], Judged) and isinstance(found[1], Judged)
    assert found[0].result is found[1].result
    assert len(seen) == 1
