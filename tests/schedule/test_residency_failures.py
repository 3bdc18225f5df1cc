"""The stories a residency tells of what failed, or should not have been asked: nothing is lost, nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetmem.errors import StateError
from tests.schedule.invariants import check_invariants
from tests.schedule.stories import DEVICE, HOST, NVME, bring, read, residency, up, visit
from tests.schedule.tested import CopyState, Drop, Write


def test_a_failed_fetch_that_nobody_waits_for_leaves_no_copy_and_can_be_tried_again() -> None:
    r = residency(HOST, device=1)
    assert r.prefetch([0], DEVICE) == [up(0, 0)]
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


def test_answers_that_nothing_waits_for_are_refused_and_the_copies_described() -> None:
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
        with pytest.raises(StateError, match=r"copies are .*Copy\("):
            call()
        assert (r.in_flight(), r.uses(0, DEVICE), r.dirty(1)) == (0, 1, True)
        check_invariants(r)


def test_a_copy_on_its_way_home_must_not_be_changed_and_the_use_is_still_there_after_the_refusal() -> None:
    r = residency(NVME, host=1)
    visit(r, 0, HOST, dirty=True)
    bring(r, 0, HOST)
    assert r.settle(0) == [Write(0, 0)]
    with pytest.raises(StateError, match="release"):
        r.release(0, HOST, dirty=True)
    assert r.uses(0, HOST) == 1
