"""The stories a residency tells, command by command, and that prefetching costs nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import Trace, gpt, optimum, replay
from hetmem.errors import CapacityError, StateError
from hetmem.plan.cache import Block, CopyState
from hetmem.plan.commands import Command, Drop, Fetch, Write
from hetmem.plan.policy import NextUse
from hetmem.plan.residency import Residency
from hetmem.plan.trace import Schedule, Tier, Uses

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def residency(
    *blocks: Tier | Block, device: int = 0, host: int = 0, lookahead: int = 0, in_flight: int = 2
) -> Residency:
    """With `blocks` numbered from 0, given by their homes where the span is 1."""
    made = Residency({DEVICE: device, HOST: host}, lookahead=lookahead, in_flight=in_flight)
    for number, block in enumerate(blocks):
        made.add(block if isinstance(block, Block) else Block(f"block {number}", block))
    return made


def up(block: int, slot: int) -> Fetch:
    """From host memory to the device."""
    return Fetch(block, HOST, DEVICE, slot)


def read(block: int, slot: int) -> Fetch:
    """From NVMe to staging."""
    return Fetch(block, NVME, HOST, slot)


def use(r: Residency, block: int, tier: Tier) -> list[Command]:
    """The next use in the schedule is of `block`: what acquiring it commands."""
    r.reach((block,), tier)
    return r.acquire(block, tier)


def bring(r: Residency, block: int, tier: Tier) -> None:
    """Acquire `block` and answer everything until it is there."""
    pending = use(r, block, tier)
    while pending:
        command = pending.pop(0)
        if not isinstance(command, Drop):
            pending += r.done(command)
    r.slot(block, tier)


def visit(r: Residency, block: int, tier: Tier, *, dirty: bool = False) -> None:
    """Use `block` once; it stays behind idle."""
    bring(r, block, tier)
    assert r.release(block, tier, dirty=dirty) == []


def fetches(r: Residency) -> tuple[int, int]:
    return r.counts.fetches[DEVICE], r.counts.fetches[HOST]


# --- hits, misses, evictions ----------------------------------------------------------------------------------------


def test_a_miss_is_one_fetch_and_a_hit_is_nothing() -> None:
    r = residency(HOST, device=2)
    assert r.acquire(0, DEVICE) == [up(0, 0)]
    assert r.state(0, DEVICE) is CopyState.LOADING
    assert r.done(up(0, 0)) == []
    assert (r.state(0, DEVICE), r.slot(0, DEVICE)) == (CopyState.VALID, 0)
    assert r.acquire(0, DEVICE) == r.release(0, DEVICE) == r.release(0, DEVICE) == []
    assert (fetches(r), r.counts.acquires, r.counts.faults[DEVICE]) == ((1, 0), 2, 1)


def test_two_uses_of_a_copy_that_is_loading_share_one_fetch() -> None:
    r = residency(HOST, device=1)
    assert r.acquire(0, DEVICE) == [up(0, 0)]
    assert r.acquire(0, DEVICE) == []
    assert r.done(up(0, 0)) == []
    assert (r.uses(0, DEVICE), fetches(r)) == (2, (1, 0))


def test_a_clean_copy_is_dropped_for_another_and_nothing_else_moves() -> None:
    r = residency(HOST, HOST, device=1)
    visit(r, 0, DEVICE)
    assert r.acquire(1, DEVICE) == [Drop(0, DEVICE, 0), up(1, 0)]
    assert (fetches(r), r.counts.writes, r.counts.evictions[DEVICE]) == ((2, 0), 0, 1)


def test_a_dirty_copy_is_dropped_only_once_its_write_is_done() -> None:
    r = residency(NVME, NVME, host=1)
    visit(r, 0, HOST, dirty=True)
    assert r.acquire(1, HOST) == [Write(0, 0)]
    assert r.state(0, HOST) is CopyState.VALID
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]
    assert (fetches(r), r.counts.writes) == ((0, 2), 1)


def test_while_a_write_makes_room_no_second_one_is_started() -> None:
    r = residency(NVME, NVME, NVME, host=2)
    visit(r, 0, HOST, dirty=True)
    visit(r, 1, HOST, dirty=True)
    assert r.acquire(2, HOST) == [Write(0, 0)]
    assert r.limit(HOST, 2) == []
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), read(2, 0)]
    assert r.dirty(1)


def test_a_copy_on_its_way_home_is_neither_given_up_nor_written_again() -> None:
    r = residency(NVME, NVME, Block("large", NVME, span=2), host=2)
    visit(r, 0, HOST, dirty=True)
    visit(r, 1, HOST)
    assert r.settle(0) == [Write(0, 0)]
    assert r.acquire(2, HOST) == [], "the place of the large one holds bytes that are not home yet"
    assert r.state(0, HOST) is CopyState.VALID
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), Drop(1, HOST, 1), read(2, 0)]


@pytest.mark.parametrize("far", [True, False])
def test_staging_waits_for_a_write_only_where_what_is_clean_is_needed_soon(far: bool) -> None:
    r = residency(NVME, NVME, NVME, host=2)
    visit(r, 0, HOST, dirty=True)
    visit(r, 1, HOST)
    r.expect(HOST, Schedule([(2,), (0,), (1,)] if far else [(1,), (2,), (0,)], periodic=False))
    assert r.settle(0) == [Write(0, 0)]
    assert r.acquire(2, HOST) == ([Drop(1, HOST, 1), read(2, 1)] if far else [])


def test_what_is_on_its_way_home_is_used_where_it_is_and_not_read_from_there() -> None:
    r = residency(NVME, host=1)
    visit(r, 0, HOST, dirty=True)
    assert r.settle(0) == [Write(0, 0)]
    assert r.limit(HOST, 0) == [], "it keeps its slot until then"
    assert r.acquire(0, HOST) == []
    assert (r.slot(0, HOST), fetches(r)) == (0, (0, 1))


def test_a_copy_in_use_is_waited_for() -> None:
    r = residency(HOST, HOST, device=1)
    bring(r, 0, DEVICE)
    assert r.acquire(1, DEVICE) == []
    assert r.state(1, DEVICE) is CopyState.WAITING
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0), up(1, 0)]


def test_without_room_or_hope_a_request_is_withdrawn_and_leaves_nothing_behind() -> None:
    r = residency(HOST, Block("large", HOST, span=2), device=1)
    bring(r, 0, DEVICE)
    assert r.acquire(1, DEVICE) == []
    assert r.acquire(1, DEVICE) == []
    for uses_left in (1, 0):
        error = r.withdraw(1, DEVICE)
        assert isinstance(error, CapacityError)
        assert "no room on DEVICE for large: it needs 2 slot(s), 1 may be used, 1 are" in str(error)
        assert r.uses(1, DEVICE) == uses_left
        r.check()
    assert r.state(1, DEVICE) is None
    assert r.release(0, DEVICE) == []
    assert r.state(0, DEVICE) is CopyState.VALID, "what cannot help is not given up"


# --- three tiers ----------------------------------------------------------------------------------------------------


def test_a_block_on_nvme_comes_through_staging() -> None:
    r = residency(NVME, device=1, host=1)
    assert r.acquire(0, DEVICE) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]
    assert r.done(up(0, 0)) == []
    assert (r.state(0, HOST), r.uses(0, HOST), fetches(r)) == (CopyState.VALID, 0, (1, 1))


def test_a_staged_copy_is_not_read_again() -> None:
    r = residency(NVME, NVME, device=1, host=2)
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert r.acquire(0, DEVICE) == [Drop(1, DEVICE, 0), up(0, 0)]
    assert fetches(r) == (3, 2)


def test_staging_is_kept_while_it_feeds_the_device() -> None:
    r = residency(NVME, NVME, device=1, host=1)
    assert r.acquire(0, DEVICE) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]
    assert r.uses(0, HOST) == 1
    assert r.acquire(1, HOST) == []
    assert r.done(up(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]


def test_a_dirty_staged_copy_feeds_the_device_before_it_is_written() -> None:
    r = residency(NVME, device=1, host=1)
    visit(r, 0, HOST, dirty=True)
    assert r.acquire(0, DEVICE) == [up(0, 0)]
    assert r.settle(0) == [Write(0, 0)]
    assert r.settle(0) == [], "one write at a time"
    assert r.done(Write(0, 0)) == []
    assert (r.dirty(0), r.uses(0, HOST), r.done(up(0, 0))) == (False, 1, [])


def test_a_request_for_the_device_reloads_a_stale_staged_copy() -> None:
    r = residency(NVME, device=1, host=1)
    bring(r, 0, HOST)
    assert r.invalidate(0, HOST) == []
    assert r.acquire(0, DEVICE) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]


def test_staged_copies_that_the_device_holds_too_go_first() -> None:
    r = residency(NVME, NVME, NVME, device=1, host=2)
    assert r.expect(HOST, Schedule([(0,), (1,), (2,)])) == []
    visit(r, 1, HOST)
    visit(r, 0, DEVICE)
    assert r.acquire(2, HOST) == [Drop(0, HOST, 1), read(2, 1)], "although staging uses 0 before 1"


# --- copies that are overwritten or superseded ----------------------------------------------------------------------


def test_two_requests_do_not_take_staging_from_each_other() -> None:
    r = residency(NVME, NVME, HOST, device=1, host=1)
    bring(r, 2, DEVICE)
    assert r.acquire(0, DEVICE) == [read(0, 0)]
    assert r.done(read(0, 0)) == r.acquire(1, DEVICE) == [], "0 is staged and waits for its slot on the device"
    assert r.release(2, DEVICE) == [Drop(2, DEVICE, 0), up(0, 0)]
    assert r.done(up(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]


def test_what_will_be_overwritten_is_not_read() -> None:
    r = residency(NVME, host=1)
    assert r.acquire(0, HOST, load=False) == []
    assert r.state(0, HOST) is CopyState.VALID
    assert r.release(0, HOST, dirty=True) == []
    assert r.settle(0) == [Write(0, 0)]
    assert (fetches(r), r.counts.writes) == ((0, 0), 1)


def test_what_should_have_been_overwritten_and_was_not_is_forgotten() -> None:
    r = residency(NVME, host=1)
    assert r.acquire(0, HOST, load=False) == []
    assert r.release(0, HOST) == [Drop(0, HOST, 0)], "its slot holds whatever was there before"
    assert r.acquire(0, HOST) == [read(0, 0)]


def test_one_use_that_needs_the_content_is_enough_to_load_it() -> None:
    r = residency(NVME, NVME, host=1)
    bring(r, 0, HOST)
    assert r.acquire(1, HOST, load=False) == r.acquire(1, HOST, load=True) == []
    assert r.release(0, HOST) == [Drop(0, HOST, 0), read(1, 0)]


def test_an_idle_superseded_copy_goes_at_once_and_one_in_use_when_it_is_released() -> None:
    r = residency(HOST, device=1)
    visit(r, 0, DEVICE)
    assert r.invalidate(0, DEVICE) == [Drop(0, DEVICE, 0)]
    bring(r, 0, DEVICE)
    assert r.invalidate(0, DEVICE) == []
    assert r.state(0, DEVICE) is CopyState.STALE
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0)]


def test_a_stale_copy_in_use_is_reloaded_where_it_is() -> None:
    r = residency(HOST, HOST, device=2)
    visit(r, 1, DEVICE)
    bring(r, 0, DEVICE)
    assert r.invalidate(0, DEVICE) == []
    assert r.acquire(0, DEVICE) == [up(0, 1)]
    assert r.done(up(0, 1)) == []
    assert (r.slot(0, DEVICE), r.uses(0, DEVICE)) == (1, 2)


def test_taking_back_a_reload_leaves_the_stale_copy_to_its_user() -> None:
    r = residency(NVME, NVME, device=1, host=1)
    bring(r, 0, DEVICE)
    bring(r, 1, HOST)
    assert r.invalidate(0, DEVICE) == []
    assert r.acquire(0, DEVICE) == [], "there is no staging to load it through"
    assert isinstance(r.withdraw(0, DEVICE), CapacityError)
    assert (r.state(0, DEVICE), r.uses(0, DEVICE)) == (CopyState.STALE, 1)
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0)]


# --- spans and limits -----------------------------------------------------------------------------------------------


def test_a_large_block_takes_the_place_whose_blocks_are_needed_last() -> None:
    r = residency(NVME, NVME, NVME, NVME, Block("large", NVME, span=2), host=4)
    for block in range(4):
        visit(r, block, HOST)
    assert r.expect(HOST, Schedule([(3,), (1,), (0,), (2,)], periodic=False)) == []
    assert r.acquire(4, HOST) == [Drop(0, HOST, 0), Drop(1, HOST, 1), read(4, 0)]


def test_a_large_block_takes_the_slots_of_those_that_are_needed_last_wherever_they_lie_on_the_device() -> None:
    r = residency(HOST, HOST, HOST, HOST, Block("large", HOST, span=2), device=4)
    for block in range(4):
        visit(r, block, DEVICE)
    assert r.expect(DEVICE, Schedule([(3,), (1,), (0,), (2,)], periodic=False)) == []
    assert r.acquire(4, DEVICE) == [Drop(2, DEVICE, 2), Drop(0, DEVICE, 0), up(4, 4)]
    assert (r.used_slots(DEVICE), r.free_slots(DEVICE)) == (4, [0, 2, 6])


def test_blocks_in_use_leave_a_large_one_all_the_room_that_they_do_not_take_on_the_device() -> None:
    r = residency(*[HOST] * 6, Block("large", HOST, span=3), device=6)
    for block in range(6):
        visit(r, block, DEVICE)
    for block in (0, 2, 4):
        bring(r, block, DEVICE)
    assert r.acquire(6, DEVICE) == [*(Drop(block, DEVICE, block) for block in (1, 3, 5)), up(6, 6)]


def test_a_large_block_waits_for_the_dirty_ones_in_its_place() -> None:
    r = residency(NVME, NVME, Block("large", NVME, span=2), host=2)
    visit(r, 0, HOST, dirty=True)
    visit(r, 1, HOST, dirty=False)
    assert r.acquire(2, HOST) == [Write(0, 0)]
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), Drop(1, HOST, 1), read(2, 0)]


def test_a_limit_drops_what_is_needed_last_at_once_and_what_is_in_use_later() -> None:
    r = residency(HOST, HOST, HOST, device=3)
    bring(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    visit(r, 2, DEVICE)
    assert r.expect(DEVICE, Schedule([(1,), (2,), (0,)])) == []
    assert r.limit(DEVICE, 2) == [Drop(2, DEVICE, 2)]
    assert r.limit(DEVICE, 0) == [Drop(1, DEVICE, 1)]
    assert r.used_slots(DEVICE) == 1
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0)]
    assert r.acquire(1, DEVICE) == []
    assert r.limit(DEVICE, 1) == [up(1, 0)]


def test_a_limit_writes_the_dirty_and_drops_the_clean_in_one_go() -> None:
    r = residency(NVME, NVME, NVME, host=3)
    visit(r, 0, HOST, dirty=True)
    visit(r, 1, HOST, dirty=True)
    visit(r, 2, HOST)
    assert r.limit(HOST, 0) == [Drop(2, HOST, 2), Write(0, 0), Write(1, 1)]
    assert r.done(Write(1, 1)) == [Drop(1, HOST, 1)]
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0)]


# --- prefetching ----------------------------------------------------------------------------------------------------


def test_what_comes_next_is_fetched_ahead_a_few_at_a_time() -> None:
    r = residency(HOST, HOST, HOST, HOST, device=4, lookahead=3)
    assert r.expect(DEVICE, Schedule([(0,), (1,), (2,), (3,)])) == [up(0, 0), up(1, 1)]
    assert r.done(up(1, 1)) == [up(2, 2)]
    assert r.done(up(0, 0)) == r.done(up(2, 2)) == [], "the fourth is further away than the lookahead"
    assert use(r, 0, DEVICE) == [up(3, 3)]
    assert (fetches(r), r.counts.faults[DEVICE]) == ((4, 0), 0)


def test_a_prefetch_gives_up_only_what_is_needed_later() -> None:
    r = residency(HOST, HOST, HOST, device=2, lookahead=4)
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert r.expect(DEVICE, Schedule([(0,), (1,), (2,)], periodic=False)) == []
    assert use(r, 0, DEVICE) == [], "0 is in use, and 1 is used before 2"
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0), up(2, 0)]


def test_a_prefetch_waits_for_the_copy_that_demand_would_give_up() -> None:
    """0 is used once more and then not for long: giving up 1 for 2 now would fetch 1 once more than needed."""
    r = residency(HOST, HOST, HOST, device=2, lookahead=4)
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert r.expect(DEVICE, Schedule([(0,), (2,), (1,), (2,), (1,), (0,)], periodic=False)) == []
    assert use(r, 0, DEVICE) == []
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0), up(2, 0)]


def test_staging_prefetches_never_take_turns_in_one_slot() -> None:
    """Found as a read without end: each gave up the other, which was needed sooner."""
    r = residency(NVME, NVME, host=1, lookahead=2)
    assert r.expect(HOST, Schedule([(0,), (1,)], periodic=False)) == [read(0, 0)]
    assert r.done(read(0, 0)) == []
    assert use(r, 0, HOST) == []
    assert r.release(0, HOST) == [Drop(0, HOST, 0), read(1, 0)]


def test_a_prefetch_touches_neither_dirty_copies_nor_copies_in_use() -> None:
    r = residency(NVME, NVME, host=1, lookahead=2)
    visit(r, 0, HOST, dirty=True)
    assert r.expect(HOST, Schedule([(1,)], periodic=False)) == []
    assert r.settle(0) == [Write(0, 0)]
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]
    in_use = residency(HOST, HOST, device=1, lookahead=2)
    bring(in_use, 0, DEVICE)
    assert in_use.expect(DEVICE, Schedule([(1,)], periodic=False)) == in_use.prefetch(1, DEVICE) == []


def test_nothing_behind_the_barrier_is_prefetched_but_it_counts_for_eviction() -> None:
    r = residency(HOST, HOST, HOST, device=2, lookahead=8)
    assert r.expect(DEVICE, Schedule([(0,), (1,), (2,)], barrier=1)) == [up(0, 0)]
    assert r.done(up(0, 0)) == []
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert use(r, 2, DEVICE) == [Drop(1, DEVICE, 1), up(2, 1)], "block 0 comes sooner in the next lap"


def test_a_waiting_request_goes_before_any_prefetch() -> None:
    r = residency(HOST, Block("large", HOST, span=2), HOST, device=2, lookahead=2)
    bring(r, 0, DEVICE)
    assert use(r, 1, DEVICE) == []
    assert r.expect(DEVICE, Schedule([(2,), (0,)])) == r.prefetch(2, DEVICE) == [], "not even into the free slot"
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0), up(1, 2)]


def test_what_no_schedule_names_is_prefetched_into_free_slots_only() -> None:
    r = residency(HOST, HOST, HOST, device=2)
    visit(r, 0, DEVICE)
    assert r.prefetch(1, DEVICE) == [up(1, 1)]
    assert r.done(up(1, 1)) == r.prefetch(2, DEVICE) == []


def test_a_prefetch_from_nvme_is_two_steps() -> None:
    r = residency(NVME, device=1, host=1, lookahead=1)
    assert r.expect(DEVICE, Schedule([(0,)])) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]
    assert r.done(up(0, 0)) == []
    assert use(r, 0, DEVICE) == []
    assert r.counts.faults[DEVICE] == 0


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_fetch_that_nobody_waits_for_leaves_no_copy_and_can_be_tried_again() -> None:
    r = residency(HOST, device=1)
    assert r.prefetch(0, DEVICE) == [up(0, 0)]
    assert r.failed(up(0, 0)) == [Drop(0, DEVICE, 0)]
    assert (r.state(0, DEVICE), r.in_flight()) == (None, 0)
    assert r.acquire(0, DEVICE) == [up(0, 0)]


def test_a_failed_fetch_keeps_its_slot_until_those_who_wanted_it_let_go() -> None:
    r = residency(HOST, device=1)
    assert r.acquire(0, DEVICE) == [up(0, 0)]
    assert r.failed(up(0, 0)) == []
    assert (r.state(0, DEVICE), r.uses(0, DEVICE)) == (CopyState.STALE, 1)
    assert r.acquire(0, DEVICE) == [up(0, 0)], "trying again is a use of its own"
    assert r.done(up(0, 0)) == r.release(0, DEVICE) == []
    assert (r.state(0, DEVICE), r.uses(0, DEVICE)) == (CopyState.VALID, 1)


def test_a_failed_reload_does_not_take_the_slot_from_a_stale_copys_user() -> None:
    r = residency(HOST, HOST, device=1)
    bring(r, 0, DEVICE)
    assert r.invalidate(0, DEVICE) == []
    assert r.acquire(0, DEVICE) == [up(0, 0)]
    assert r.failed(up(0, 0)) == r.release(0, DEVICE) == []
    assert r.acquire(1, DEVICE) == [], "the other user still looks at the slot"
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0), up(1, 0)]


def test_a_failed_write_leaves_the_only_copy_dirty_and_in_its_slot() -> None:
    r = residency(NVME, host=1)
    visit(r, 0, HOST, dirty=True)
    assert r.settle(0) == [Write(0, 0)]
    assert r.failed(Write(0, 0)) == []
    assert (r.dirty(0), r.writing(0), r.slot(0, HOST)) == (True, False, 0)
    assert r.settle(0) == [Write(0, 0)]
    assert r.done(Write(0, 0)) == []
    assert not r.dirty(0)


def test_a_failed_feed_gives_the_staged_copy_back_and_reads_nothing_again() -> None:
    r = residency(NVME, device=1, host=1)
    assert r.acquire(0, DEVICE) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]
    assert r.failed(up(0, 0)) == []
    assert (r.uses(0, HOST), r.state(0, HOST)) == (0, CopyState.VALID)
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0)]
    assert r.acquire(0, DEVICE) == [up(0, 0)]


def test_answers_nobody_waits_for_are_refused_with_the_blocks_history() -> None:
    r = residency(HOST, NVME, device=1, host=1)
    bring(r, 0, DEVICE)
    visit(r, 1, HOST, dirty=True)
    calls: list[Callable[[], object]] = [
        lambda: r.done(up(0, 0)),
        lambda: r.failed(up(0, 0)),
        lambda: r.done(Write(1, 0)),
        lambda: r.invalidate(1, HOST),
        lambda: r.release(0, DEVICE, dirty=True),
        lambda: r.release(1, HOST),
        lambda: r.withdraw(0, DEVICE),
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"history: .*valid on"):
            call()
        assert (r.in_flight(), r.uses(0, DEVICE), r.dirty(1)) == (0, 1, True)
        r.check()


def test_a_copy_on_its_way_home_must_not_be_changed_and_the_use_is_still_there_after_the_refusal() -> None:
    r = residency(NVME, host=1)
    visit(r, 0, HOST, dirty=True)
    bring(r, 0, HOST)
    assert r.settle(0) == [Write(0, 0)]
    with pytest.raises(StateError, match="release"):
        r.release(0, HOST, dirty=True)
    assert r.uses(0, HOST) == 1


# --- prefetching costs no fetch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("renewed", [False, True], ids=["kept", "renewed"])
@pytest.mark.parametrize("slots", [2, 5, 8, 13])
def test_a_gpt_is_fetched_as_rarely_as_the_optimum_and_hardly_ever_waited_for(
    slots: int, renewed: bool, delay: int
) -> None:
    trace = gpt(16, operators=4, tied=True, straddling=True)
    limits = [slots] * len(trace.uses)
    fetched, waits = replay(trace, limits, NextUse(), delay=delay, renewed=renewed, steps=4)
    assert fetched <= 1.05 * optimum(trace, limits, renewed=renewed, steps=4)
    assert waits <= (1 if slots > 2 else 4 * trace.blocks)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True).map(tuple), min_size=1, max_size=40),
    st.integers(2, 6),
    st.integers(0, 5),
)
def test_prefetching_along_any_schedule_costs_no_fetch_that_demand_would_not(
    uses: list[tuple[int, ...]], slots: int, delay: int
) -> None:
    trace, limits = Trace("any", tuple(uses), (0,) * len(uses)), [slots] * len(uses)
    fetched, _ = replay(trace, limits, NextUse(), delay=delay, renewed=False, steps=4)
    least = optimum(trace, limits, renewed=False, steps=4)
    assert fetched <= least + 8, "what is fetched ahead of the end is all there may be more"


# ---- what is overwritten ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_what_a_use_overwrites_is_not_read_ahead_nor_for_the_uses_behind_it(lookahead: int) -> None:
    """Block 1 is written as a whole and read after that: it comes by itself. The others have to be read."""
    r = residency(NVME, NVME, NVME, host=3, lookahead=lookahead)
    ahead = r.expect(HOST, Schedule(Uses([(0,), (1,), (1,), (2,)], overwritten=[1])))
    assert ahead == ([read(0, 0), read(2, 1)] if lookahead == 4 else [read(0, 0)])
    for command in ahead:
        assert r.done(command) == []
    visit(r, 0, HOST)
    r.reach((1,), HOST)
    r.acquire(1, HOST, load=False)
    assert r.state(1, HOST) is CopyState.VALID
    r.release(1, HOST, dirty=True)
    r.reach((1,), HOST)
    r.acquire(1, HOST)
    assert r.counts.fetches[HOST] == 2


def test_what_was_overwritten_and_given_up_is_read_for_its_next_use() -> None:
    r = residency(NVME, NVME, host=2, lookahead=2)
    assert r.expect(HOST, Schedule(Uses([(0,), (1,), (0,)], overwritten=[0]))) == [read(1, 0)]
    r.reach((0,), HOST)
    r.acquire(0, HOST, load=False)
    assert r.release(0, HOST, dirty=True) == []
    assert r.settle(0) == [Write(0, 1)]
    r.done(Write(0, 1))
    assert r.invalidate(0, HOST) == [Drop(0, HOST, 1)]
    assert r.done(read(1, 0)) == [read(0, 1)]
