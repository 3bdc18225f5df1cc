"""The stories a residency tells of what it fetches ahead, and that this costs hardly a fetch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.read_ahead import simulate
from benchmarks.replay import Trace, gpt, optimum, replay
from tests.pairs import examples
from tests.schedule.stories import DEVICE, HOST, NVME, bring, fetches, read, residency, up, use, visit
from tests.schedule.tested import Block, CopyState, Drop, NextUse, Schedule, UseSequence, Write


def test_what_comes_next_is_fetched_ahead_a_few_at_a_time_by_the_uses_that_have_not_come() -> None:
    r = residency(HOST, HOST, HOST, HOST, device=4, lookahead=3)
    assert r.expect({DEVICE: Schedule([(0,), (1,), (2,), (3,)])}) == [up(0, 0), up(1, 1)]
    assert r.done(up(1, 1)) == r.done(up(0, 0)) == [], "when they arrive begins nothing"
    assert use(r, 0, DEVICE) == [up(2, 2)]
    assert use(r, 1, DEVICE) == [up(3, 3)]
    assert (fetches(r), r.counts.faults[DEVICE]) == ((4, 0), 0)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("count", [40, 120])
def test_what_is_missing_far_ahead_is_fetched_as_soon_as_it_is_in_sight(count: int, when: str) -> None:
    far = count - 10
    r = residency(*[HOST] * count, device=count, lookahead=4)
    for block in range(count):
        visit(r, block, DEVICE)
    if when == "before":
        r.invalidate(far, DEVICE)
    assert r.expect({DEVICE: Schedule([(block,) for block in range(count)])}) == []
    assert use(r, 0, DEVICE) == []
    if when == "meanwhile":
        r.invalidate(far, DEVICE)
    began = []
    for block in range(1, far):
        r.release(block - 1, DEVICE)
        began += [block] * bool(use(r, block, DEVICE))
    assert began == [far - 4]  # the four uses behind this one end with it
    assert r.state(far, DEVICE) is CopyState.LOADING


def test_a_prefetch_gives_up_only_what_is_needed_later() -> None:
    r = residency(HOST, HOST, HOST, device=2, lookahead=4)
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert r.expect({DEVICE: Schedule([(0,), (1,), (2,)])}) == []
    assert use(r, 0, DEVICE) == [], "0 is in use, and 1 is used before 2"
    assert r.release(0, DEVICE) == [], "the next use begins as soon"
    assert use(r, 1, DEVICE) == [Drop(0, DEVICE, 0), up(2, 0)]


def test_a_prefetch_waits_for_the_copy_that_demand_would_give_up() -> None:
    """0 is used once more and then not for long: giving up 1 for 2 now would fetch 1 once more than needed."""
    r = residency(HOST, HOST, HOST, device=2, lookahead=4)
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert r.expect({DEVICE: Schedule([(0,), (2,), (1,), (2,), (1,), (0,)])}) == []
    assert use(r, 0, DEVICE) == []
    assert r.release(0, DEVICE) == []
    assert use(r, 2, DEVICE) == [Drop(0, DEVICE, 0), up(2, 0)]


def test_staging_prefetches_never_take_turns_in_one_slot() -> None:
    """Found as a read without end: each gave up the other, which was needed sooner."""
    r = residency(NVME, NVME, host=1, lookahead=2)
    assert r.expect({HOST: Schedule([(0,), (1,)])}) == [read(0, 0)]
    assert r.done(read(0, 0)) == []
    assert use(r, 0, HOST) == []
    assert r.release(0, HOST) == [Drop(0, HOST, 0), read(1, 0)]


def test_a_prefetch_touches_neither_dirty_copies_nor_copies_in_use() -> None:
    r = residency(NVME, NVME, host=1, lookahead=2)
    visit(r, 0, HOST, dirty=True)
    assert r.expect({HOST: Schedule([(1,)])}) == []
    assert r.settle(0) == [Write(0, 0)]
    assert r.done(Write(0, 0)) == [Drop(0, HOST, 0), read(1, 0)]
    in_use = residency(HOST, HOST, device=1, lookahead=2)
    bring(in_use, 0, DEVICE)
    assert in_use.expect({DEVICE: Schedule([(1,)])}) == in_use.prefetch([1], DEVICE) == []


def test_nothing_behind_the_barrier_is_prefetched_but_it_counts_for_eviction() -> None:
    r = residency(HOST, HOST, HOST, device=2, lookahead=8)
    assert r.expect({DEVICE: Schedule([(0,), (1,), (2,)], barrier=1)}) == [up(0, 0)]
    assert r.done(up(0, 0)) == []
    visit(r, 0, DEVICE)
    visit(r, 1, DEVICE)
    assert use(r, 2, DEVICE) == [Drop(1, DEVICE, 1), up(2, 1)], "block 0 comes sooner in the next lap"


def test_a_waiting_request_goes_before_any_prefetch() -> None:
    r = residency(HOST, Block("large", HOST, span=2), HOST, device=2, lookahead=2)
    bring(r, 0, DEVICE)
    assert use(r, 1, DEVICE) == []
    assert r.expect({DEVICE: Schedule([(2,), (0,)])}) == r.prefetch([2], DEVICE) == [], "not even into the free slot"
    assert r.release(0, DEVICE) == [Drop(0, DEVICE, 0), up(1, 2)]


def test_what_is_brought_without_a_use_leaves_free_slots_to_what_is_used_sooner() -> None:
    """A copy that an update has made stale, say: 2 would take the place of 3, and be fetched twice."""
    r = residency(HOST, HOST, HOST, HOST, device=3, lookahead=1)
    assert r.expect({DEVICE: Schedule([(0,), (1,), (2,), (3,)])}) == [up(0, 0)]
    assert r.prefetch([3], DEVICE) == [], "1 and 2 need the slots"
    assert r.prefetch([2], DEVICE) == [up(2, 1)], "there is another one for 1"


def test_what_no_schedule_names_is_prefetched_into_free_slots_only() -> None:
    r = residency(HOST, HOST, HOST, device=2)
    visit(r, 0, DEVICE)
    assert r.prefetch([1], DEVICE) == [up(1, 1)]
    assert r.done(up(1, 1)) == r.prefetch([2], DEVICE) == []


def test_a_prefetch_from_nvme_is_two_steps() -> None:
    r = residency(NVME, device=1, host=1, lookahead=1)
    assert r.expect({DEVICE: Schedule([(0,)])}) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]
    assert r.done(up(0, 0)) == []
    assert use(r, 0, DEVICE) == []
    assert r.counts.faults[DEVICE] == 0


# --- what is overwritten ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_what_a_use_overwrites_is_not_read_ahead_nor_for_the_uses_behind_it(lookahead: int) -> None:
    """Block 1 is written as a whole and read after that: it comes by itself. The others have to be read."""
    r = residency(NVME, NVME, NVME, host=3, lookahead=lookahead)
    ahead = r.expect({HOST: Schedule(UseSequence([(0,), (1,), (1,), (2,)], overwritten=[1]))})
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


def test_what_is_late_to_be_overwritten_is_not_read_ahead() -> None:
    """A gradient arrives behind the use that came after it in the last step: its home is old."""
    r = residency(NVME, NVME, NVME, host=3, lookahead=4)
    ahead = r.expect({HOST: Schedule(UseSequence([(0,), (1,), (0,), (1,), (2,)], overwritten=[0, 1]), segment=5)})
    assert ahead == []
    for load in (False, True):  # 0 is written and read before 1 is written
        r.reach((0,), HOST)
        ahead += r.acquire(0, HOST, load=load)
        ahead += r.release(0, HOST, dirty=not load)
    assert ahead == [read(2, 1)]
    r.reach((1,), HOST)
    r.acquire(1, HOST, load=False)
    assert r.counts.fetches[HOST] == 1


def test_what_was_late_and_has_been_overwritten_is_read_ahead_again() -> None:
    schedule = Schedule(UseSequence([(0,), (1,), (0,)], overwritten=[0]))
    r = residency(NVME, NVME, host=2)
    r.expect({HOST: schedule})
    for block, again in ((1, False), (0, True)):
        r.reach((block,), HOST)
        assert schedule.reads(5) == again


def test_what_was_overwritten_and_given_up_is_read_for_its_next_use() -> None:
    r = residency(NVME, NVME, host=2, lookahead=2)
    assert r.expect({HOST: Schedule(UseSequence([(0,), (1,), (0,)], overwritten=[0]))}) == [read(1, 0)]
    r.reach((0,), HOST)
    r.acquire(0, HOST, load=False)
    assert r.release(0, HOST, dirty=True) == []
    assert r.settle(0) == [Write(0, 1)]
    r.done(Write(0, 1))
    assert r.invalidate(0, HOST) == [Drop(0, HOST, 1)]
    assert r.done(read(1, 0)) == [read(0, 1)]


# --- prefetching costs no fetch -------------------------------------------------------------------------------------


@pytest.mark.each
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


@pytest.mark.parametrize("slots", [3, 6, 12])
def test_rounds_without_a_way_back_are_fetched_beside_compute_for_a_fetch_more(slots: int) -> None:
    rounds = Trace("rounds", tuple((block,) for block in range(24) for _ in range(4)), (0,) * 96)
    limits = [slots] * 96
    fetched, waits = replay(rounds, limits, NextUse(), delay=3, renewed=False, steps=6)
    assert fetched <= optimum(rounds, limits, renewed=False, steps=6) + 2 * 6 + 2, "two are ahead of the end"
    assert waits <= 6, "the block that is in use is what MIN would give up: waiting for it means waiting at every block"


@settings(max_examples=examples(60))
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


@pytest.mark.parametrize("slots", [48, 72])
@pytest.mark.parametrize("compute", [0.3, 0.5])
def test_a_scan_keeps_the_link_busy_all_the_way(slots: int, compute: float) -> None:
    """Forwards alone through 96 blocks: what is kept is spread over a pass, as the misses of MIN would gather."""
    seconds, reads = simulate((slots, 0), compute, backward=False)
    assert reads <= 96 - slots + 3
    assert seconds < 1.15
