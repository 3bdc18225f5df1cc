"""The stories of weights whose homes are on NVMe: read into host staging ahead of the device, by one clock."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.schedule.invariants import check_invariants
from tests.schedule.stories import DEVICE, HOST, NVME, read, residency, up, use
from tests.schedule.tested import (
    NEVER,
    STEP,
    Command,
    Drop,
    Moment,
    Residency,
    Schedule,
    SegmentTrace,
    TraceBook,
    UseSequence,
)


def book(device: dict[str, Iterable[int]], host: Iterable[int] = (), step: Iterable[int] = ()) -> TraceBook:
    """Segments that use one block at a time on the device, and a step that follows and uses `step` in host memory. The
    first one uses `host` there."""
    made = TraceBook()
    keys = [*device, STEP]
    for key, follower in zip(keys, [*keys[1:], keys[0]], strict=True):
        moments = tuple(Moment("operator", (block,)) for block in device.get(key, ()))
        used = host if key == keys[0] else step if key == STEP else ()
        made.put(SegmentTrace(key, moments, tuple(used)))
        made.follows(key, follower)
    return made


def answer(r: Residency, commands: list[Command]) -> list[Command]:
    """Carry out `commands` and what follows from them; returns all."""
    every, pending = list(commands), list(commands)
    while pending:
        command = pending.pop(0)
        if not isinstance(command, Drop):
            more = r.done(command)
            every += more
            pending += more
    return every


def reads(commands: Iterable[Command]) -> list[int]:
    """The blocks that `commands` read from NVMe."""
    return [c.block for c in commands if not isinstance(c, Drop) and c == read(c.block, c.slot)]


def visit(r: Residency, block: int) -> list[Command]:
    """A use on the device, with all it commands."""
    return answer(r, use(r, block, DEVICE)) + answer(r, r.release(block, DEVICE))


# --- ahead of the device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", [1, 3])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_forward_alone_reads_its_weights_ahead_once_it_is_known(delay: int, operators: int) -> None:
    """Staging is full of what was read before, which is never used there."""
    count, passes = 16, 4
    r = residency(*[NVME] * count, device=3, host=6, lookahead=3)
    uses = [block for block in range(count) for _ in range(operators)]
    known = TraceBook()
    known.put(SegmentTrace("forward", tuple(Moment("operator", (block,)) for block in uses)))
    known.follows("forward", "forward")
    late: list[Command] = []
    on_demand = []
    for number in range(passes):
        late += r.expect(known.schedules("forward") if number else {})
        for block in uses:
            for command in late[: len(late) if not delay else 2]:
                late.remove(command)
                if not isinstance(command, Drop):
                    late += r.done(command)
            on_demand += [number] * (r.state(block, DEVICE) is None and r.state(block, HOST) is None)
            late += use(r, block, DEVICE)
            answer(r, late)
            late = r.release(block, DEVICE)
        answer(r, late)
        late = []
    assert on_demand.count(0) == count
    assert on_demand[count:] == []
    assert r.counts.fetches[HOST] <= r.counts.fetches[DEVICE] + 6, "what is staged at the end is all there may be more"
    check_invariants(r)


def test_the_disk_goes_on_four_lookaheads_ahead_and_no_farther() -> None:
    r = residency(*[NVME] * 24, device=1, host=24, lookahead=2)
    schedule = Schedule([(block,) for block in range(24)])
    assert reads(answer(r, r.expect({DEVICE: schedule}))) == list(range(8))
    assert reads(visit(r, 0)) == [8]
    assert reads(visit(r, 1)) == [9]


def test_the_disk_goes_on_while_the_device_has_all_it_uses_next() -> None:
    """What comes next is there for longer than the lookahead: it used to be read only once that ended."""
    r = residency(*[HOST] * 6, NVME, NVME, device=7, host=2, lookahead=2)
    visit(r, 6)  # so that it is known that the device is fed from NVMe
    for block in range(6):
        visit(r, block)
    answer(r, r.invalidate(6, HOST))
    answer(r, r.invalidate(6, DEVICE))
    r.expect({DEVICE: Schedule([(block,) for block in (*range(6), 0, 1, 2, 6, 7)])})
    began = [at for at, block in enumerate((*range(6), 0, 1, 2)) if 6 in reads(visit(r, block))]
    assert began == [1]  # then it is the eighth use from the next one on


def test_nothing_is_fed_from_behind_the_barrier_or_from_a_home_that_is_rewritten() -> None:
    r = residency(*[NVME] * 4, device=1, host=4, lookahead=4)
    assert reads(answer(r, r.expect({DEVICE: Schedule([(0,), (1,), (2,), (3,)], barrier=2)}))) == [0, 1]
    r = residency(*[NVME] * 4, device=1, host=4, lookahead=4)
    r.suspend([1])
    assert reads(answer(r, r.expect({DEVICE: Schedule([(0,), (1,), (2,), (3,)])}))) == [0, 2, 3]
    assert reads(answer(r, r.resume([1]))) == [1]


def test_what_the_device_is_fed_goes_on_when_its_first_read_is_what_tells_that_it_is_fed() -> None:
    """Two reads are on their way for the optimizer: nothing could begin, and it was not known yet that more is to."""
    r = residency(*[NVME] * 5, device=1, host=5, lookahead=1)
    assert r.expect({HOST: Schedule([(3,)])}) == [read(3, 0)]
    assert r.prefetch([4], HOST) == [read(4, 1)]
    assert r.expect({DEVICE: Schedule([(0,), (1,), (2,)])}) == []
    assert r.done(read(3, 0)) == [read(0, 2)]


# --- one clock ------------------------------------------------------------------------------------------------------


def test_the_clock_counts_the_blocks_that_are_used_anew_on_either_tier() -> None:
    made = TraceBook()
    moments = [(0,), (0,), (0, 1), (2,)]
    made.put(SegmentTrace("forward", tuple(Moment("operator", blocks) for blocks in moments), (5, 6)))
    made.put(SegmentTrace(STEP, (), (5, 6, 7)))
    made.follows("forward", STEP)
    made.follows(STEP, "forward")
    first = made.schedules("forward")
    # three turns on the device (0; 1; 2) and two in host memory take five; then three in the step
    assert [first[DEVICE].time(at) for at in range(9)] == [0, 1, 1, 3, 8, 9, 9, 11, 16]
    assert [first[HOST].time(at) for at in range(7)] == [0, 2, 5, 6, 7, 8, 10]
    second = made.schedules(STEP)
    assert [second[HOST].time(at) for at in range(6)] == [0, 1, 2, 3, 5, 8]
    assert [second[DEVICE].time(at) for at in range(5)] == [3, 4, 4, 6, 11]
    assert Schedule().time(0) == first[HOST].time(NEVER) == NEVER


def test_a_use_in_host_memory_counts_as_one_on_the_device_does() -> None:
    """0 is used by the step next and then on the device, 1 on the device alone and later than the step."""
    r = residency(NVME, NVME, NVME, device=3, host=2, lookahead=1)
    for block in (0, 1):
        answer(r, r.prefetch([block], HOST))
    known = book({"forward": (2, 2, 1)}, step=(0,))
    assert r.expect(known.schedules(STEP)) == []
    assert r._caches[HOST].victims(1, ()) == [1], "1 comes later than the step"
    r = residency(NVME, NVME, NVME, device=3, host=2, lookahead=1)
    for block in (0, 1):
        answer(r, r.prefetch([block], HOST))
    commands = r.expect(known.schedules("forward"))
    assert commands[0] == Drop(0, HOST, 0), "the step comes behind the forward"


def test_both_schedules_are_known_before_anything_begins() -> None:
    """By the schedule of the segment before 0 would be used in host memory long after 1 is on the device."""
    r = residency(*[NVME] * 8, device=1, host=2, lookahead=1)
    for block in (0, 1):
        answer(r, r.prefetch([block], HOST))
    assert r.expect({HOST: Schedule(UseSequence([(0,), (1,)], (), [100, 101], 102))}) == []
    known = book({"forward": (2, 3, 3, 4, 5, 6, 7, 1)}, host=(0, 0))
    assert r.expect(known.schedules("forward"))[0] == Drop(1, HOST, 1)


def test_what_the_step_reads_waits_until_the_clock_comes_near_and_comes_then_with_nothing_else() -> None:
    """Staging has room, and what the device uses is there: no transfer ends that could begin another."""
    blocks, lookahead = 12, 2
    r = residency(*[NVME] * (blocks + 1), device=blocks, host=2, lookahead=lookahead)
    for block in range(blocks):
        visit(r, block)
    for block in r.resident(HOST):
        answer(r, r.invalidate(block, HOST))
    known = book({"forward": range(blocks)}, step=(blocks,))
    assert answer(r, r.expect(known.schedules("forward"))) == []
    began = [block for block in range(blocks) if blocks in reads(visit(r, block))]
    assert began == [blocks - 2 * lookahead - 1]  # the next use then is that far before the step


def test_staging_ranks_what_is_passed_over_on_the_device_anew() -> None:
    """A use of 0 began and failed before it was asked for: its next one is a round away."""
    r = residency(*[NVME] * 3, device=1, host=2, lookahead=1)
    for block in (0, 1):
        answer(r, r.prefetch([block], HOST))
    r.suspend([0])
    r.expect({DEVICE: Schedule([(0,), (2,), (1,)])})
    r.reach((0,), DEVICE)
    assert r._caches[HOST].victims(1, ()) == [1]
    r.reach((2,), DEVICE)
    assert r._caches[HOST].victims(1, ()) == [0]


def test_ups_and_reads_are_two_steps() -> None:
    r = residency(NVME, NVME, device=1, host=1, lookahead=1)
    assert r.expect({DEVICE: Schedule([(0,), (1,)])}) == [read(0, 0)]
    assert r.done(read(0, 0)) == [up(0, 0)]
    assert r.done(up(0, 0)) == [Drop(0, HOST, 0), read(1, 0)], "the device has no room, staging has"
