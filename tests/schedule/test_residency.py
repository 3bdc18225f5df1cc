"""The stories a residency tells, command by command: uses of copies that come, wait, go and are superseded."""

from __future__ import annotations

import pytest

from hetmem.errors import CapacityError
from tests.schedule.invariants import check_invariants
from tests.schedule.stories import DEVICE, HOST, NVME, bring, fetches, read, residency, up, visit
from tests.schedule.tested import Block, CopyState, Drop, Schedule, Write

# --- hits, misses, evictions ----------------------------------------------------------------------------------------


def test_a_miss_is_one_fetch_and_a_hit_is_nothing() -> None:
    r = residency(HOST, device=2)
    assert r.acquire(0, DEVICE) == [up(0, 0)]
    assert r.state(0, DEVICE) is CopyState.LOADING
    assert r.done(up(0, 0)) == []
    assert (r.state(0, DEVICE), r.slot(0, DEVICE)) == (CopyState.VALID, 0)
    assert r.acquire(0, DEVICE) == r.release(0, DEVICE) == r.release(0, DEVICE) == []
    assert (fetches(r), r.counts.faults[DEVICE]) == ((1, 0), 1)


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
    assert (fetches(r), r.counts.evictions[DEVICE]) == ((2, 0), 1)


def test_a_dirty_copy_is_dropped_only_once_its_write_is_done() -> None:
    r = residency(NVME, NVME, host=1)
    visit(r, 0, HOST, dirty=True)
    assert r.acquire(1, HOST) == [Write(0, 0)]
    assert r.state(0, HOST) is CopyState.VALID
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]
    assert fetches(r) == (0, 2)


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
    r.expect({HOST: Schedule([(2,), (0,), (1,)] if far else [(1,), (2,), (0,)])})
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
        check_invariants(r)
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
    assert r.expect({DEVICE: Schedule([(0,), (1,)], barrier=0)}) == []
    visit(r, 1, HOST)
    visit(r, 0, DEVICE)
    assert r.acquire(2, HOST) == [Drop(0, HOST, 1), read(2, 1)], "although the device uses 0 before 1"


def test_a_use_in_host_memory_counts_for_what_the_device_holds_too() -> None:
    r = residency(NVME, NVME, NVME, device=1, host=2)
    assert r.expect({HOST: Schedule([(0,), (1,), (2,)])}) == []
    visit(r, 1, HOST)
    visit(r, 0, DEVICE)
    assert r.acquire(2, HOST) == [Drop(1, HOST, 0), read(2, 0)], "0 would be read again, and sooner"


def test_two_requests_do_not_take_staging_from_each_other() -> None:
    r = residency(NVME, NVME, HOST, device=1, host=1)
    bring(r, 2, DEVICE)
    assert r.acquire(0, DEVICE) == [read(0, 0)]
    assert r.done(read(0, 0)) == r.acquire(1, DEVICE) == [], "0 is staged and waits for its slot on the device"
    assert r.release(2, DEVICE) == [Drop(2, DEVICE, 0), up(0, 0)]
    assert r.done(up(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]


# --- copies that are overwritten or superseded ----------------------------------------------------------------------


def test_what_will_be_overwritten_is_not_read() -> None:
    r = residency(NVME, host=1)
    assert r.acquire(0, HOST, load=False) == []
    assert r.state(0, HOST) is CopyState.VALID
    assert r.release(0, HOST, dirty=True) == []
    assert r.settle(0) == [Write(0, 0)]
    assert fetches(r) == (0, 0)


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
    assert r.expect({HOST: Schedule([(3,), (1,), (0,), (2,)])}) == []
    assert r.acquire(4, HOST) == [Drop(0, HOST, 0), Drop(1, HOST, 1), read(4, 0)]


def test_a_large_block_takes_the_slots_of_those_that_are_needed_last_wherever_they_lie_on_the_device() -> None:
    r = residency(HOST, HOST, HOST, HOST, Block("large", HOST, span=2), device=4)
    for block in range(4):
        visit(r, block, DEVICE)
    assert r.expect({DEVICE: Schedule([(3,), (1,), (0,), (2,)])}) == []
    assert r.acquire(4, DEVICE) == [Drop(2, DEVICE, 2), Drop(0, DEVICE, 0), up(4, 4)]
    assert (r.taken[DEVICE].used, r.free_slots(DEVICE)) == (4, [0, 2, 6])


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


def test_nothing_goes_for_a_large_block_that_has_no_room_even_so() -> None:
    r = residency(NVME, NVME, NVME, NVME, Block("large", NVME, span=2), host=4)
    for block in range(4):
        bring(r, block, HOST)
    r.release(0, HOST)
    assert (r.release(1, HOST), r.invalidate(1, HOST)) == ([], [Drop(1, HOST, 1)])
    assert r.limit(HOST, 3) == []
    assert r.acquire(4, HOST) == []


def test_a_limit_drops_what_is_needed_last_at_once_and_what_is_in_use_later() -> None:
    r = residency(HOST, HOST, HOST, device=3)
    bring(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    visit(r, 2, DEVICE)
    assert r.expect({DEVICE: Schedule([(1,), (2,), (0,)])}) == []
    assert r.limit(DEVICE, 2) == [Drop(2, DEVICE, 2)]
    assert r.limit(DEVICE, 0) == [Drop(1, DEVICE, 1)]
    assert r.taken[DEVICE].used == 1
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
