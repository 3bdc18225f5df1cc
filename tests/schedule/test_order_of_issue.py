"""Which copies are fetched and evicted, and in what order, follows from the schedule and the uses alone.

For weights whose homes are in host memory. What is read from NVMe is begun by the ends of other reads, so that the
drive never waits for a use; see docs/adr/0028-one-decision-for-run-and-plan.md.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.pairs import examples
from tests.schedule.stories import DEVICE, HOST
from tests.schedule.tested import Block, Command, CopyState, Drop, Fetch, Residency, Schedule, Write

BLOCKS = 6
uses = st.lists(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=2, unique=True).map(tuple), max_size=14)
orders = st.lists(st.integers(0, 9), min_size=1, max_size=40)


class Program:
    """Uses of weights one after the other; how many transfers end meanwhile, and which, is what `ends` says."""

    forgets = False
    """What is missing, and that there is no room for it, is found anew at each event."""

    def __init__(self, slots: int, lookahead: int, at_once: int, spans: list[int], ends: list[int]) -> None:
        self.residency = Residency({DEVICE: slots}, lookahead=lookahead, in_flight=at_once)
        for number, span in enumerate(spans):
            self.residency.add(Block(f"block {number}", HOST, span))
        self.issued: list[Command] = []
        self.in_flight: list[Fetch | Write] = []
        self.ends, self.turn = ends, 0

    def issue(self, commands: list[Command]) -> None:
        if self.forgets:
            for cache in self.residency._caches:
                cache.prefetch_at = cache.complete = 0
        self.issued += commands
        self.in_flight += [command for command in commands if not isinstance(command, Drop)]

    def end_one(self) -> None:
        self.turn += 1
        command = self.in_flight.pop(self.ends[self.turn % len(self.ends)] % len(self.in_flight))
        self.issue(self.residency.done(command))

    def end_some(self) -> None:
        self.turn += 1
        for _ in range(min(len(self.in_flight), self.ends[self.turn % len(self.ends)] % 4)):
            self.end_one()

    def run(self, used: list[tuple[int, ...]], updated: set[int], kept: frozenset[int] = frozenset()) -> list[Command]:
        """Those of the uses `kept` go on for three more."""
        residency, longer = self.residency, list[tuple[int, list[int]]]()
        for at, blocks in enumerate(used):
            while longer and longer[0][0] <= at:
                for block in longer.pop(0)[1]:
                    self.issue(residency.release(block, DEVICE))
            taken = self.begin(blocks)
            for block in blocks if not taken else ():
                self.end_some()
                self.issue(residency.acquire(block, DEVICE))
                while residency.state(block, DEVICE) is not CopyState.VALID and self.in_flight:
                    self.end_one()
                if residency.state(block, DEVICE) is CopyState.VALID:
                    taken.append(block)
                else:
                    residency.withdraw(block, DEVICE)
            if at in kept:
                longer.append((at + 4, taken))
            for block in taken if at not in kept else ():
                self.end_some()
                self.issue(residency.release(block, DEVICE))
            if at in updated and not residency.uses(blocks[0], DEVICE):
                self.update(blocks[0])
        for _, taken in longer:
            for block in taken:
                self.issue(residency.release(block, DEVICE))
        return self.issued

    def begin(self, blocks: tuple[int, ...]) -> list[int]:
        """Reach a use of `blocks`; return those that are acquired together."""
        self.residency.reach(blocks, DEVICE)
        return []

    def update(self, block: int) -> None:
        residency = self.residency
        residency.suspend([block])
        while residency.state(block, DEVICE) is CopyState.LOADING:
            self.end_one()
        self.issue(residency.invalidate(block, DEVICE))
        self.end_some()
        self.issue(residency.resume([block]))
        self.end_some()


class Together(Program):
    """Blocks whose copies are all valid are acquired together, `in_one` event with the begin of their use or not."""

    in_one = True

    def begin(self, blocks: tuple[int, ...]) -> list[int]:
        if not self.in_one:
            self.residency.reach(blocks, DEVICE)
        commands = self.residency.use(dict.fromkeys(blocks, 1), DEVICE, reached=blocks if self.in_one else ())
        self.issue(commands or [])
        return [] if commands is None else [*blocks]


@settings(max_examples=examples(120))
@given(
    expected=uses,
    others=uses,
    spans=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=BLOCKS, max_size=BLOCKS),
    slots=st.integers(2, 8),
    lookahead=st.integers(1, 6),
    at_once=st.integers(1, 4),
    updated=st.sets(st.integers(0, 14), max_size=3),
    orders=st.tuples(orders, orders),
)
def test_in_whatever_order_transfers_end_the_same_copies_are_fetched_and_evicted(
    expected: list[tuple[int, ...]],
    others: list[tuple[int, ...]],
    spans: list[int],
    slots: int,
    lookahead: int,
    at_once: int,
    updated: set[int],
    orders: tuple[list[int], list[int]],
) -> None:
    issued = []
    for ends in orders:
        program = Program(slots, lookahead, at_once, spans, ends)
        program.issue(program.residency.expect({DEVICE: Schedule(expected)}))
        program.run(expected, updated)
        program.run(others, updated)  # it leaves its trace
        issued.append(program.run(expected, set()))
    assert issued[0] == issued[1]


@settings(max_examples=examples(100))
@given(
    expected=uses.filter(lambda found: len(found) > 4),
    others=uses,
    spans=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=BLOCKS, max_size=BLOCKS),
    slots=st.integers(2, 5),
    lookahead=st.integers(2, 8),
    at_once=st.integers(1, 4),
    updated=st.sets(st.integers(0, 14), max_size=3),
    kept=st.frozensets(st.integers(0, 14), max_size=2),
)
@example([(1,), (3,), (0,), (0, 1), (1,)], [], [1, 1, 1, 2, 1, 1], 3, 2, 1, set(), frozenset())
@example([(3,), (4, 2), (0,), (0,), (0,)], [(1, 4)], [1, 1, 1, 1, 1, 1], 4, 2, 1, set(), frozenset())
@example([(0,), (0,), (0,), (1,), (1, 2), (3,), (1, 0)], [(3,), (1,)], [2, 1, 1, 1, 1, 1], 2, 2, 1, set(), frozenset())
@example([(1,), (3,), (0,), (0,), (0, 1)], [(2,), (1, 0)], [1, 1, 1, 1, 1, 1], 2, 2, 1, set(), frozenset())
@example([(0,), (0, 5), (0, 2), (0,), (0, 1)], [], [1, 1, 1, 1, 1, 2], 2, 2, 1, set(), frozenset())
@example([(1,), (1,), (1,), (3,), (0,), (0,), (2,), (4, 0)], [], [1, 1, 2, 1, 1, 1], 3, 7, 3, set(), frozenset([3]))
@example([(0,), (0,), (2,), (1,), (0,)], [(2,), (1, 2)], [1, 1, 1, 1, 1, 1], 2, 2, 1, set(), frozenset())
def test_what_is_remembered_of_what_could_not_be_fetched_changes_no_decision(
    expected: list[tuple[int, ...]],
    others: list[tuple[int, ...]],
    spans: list[int],
    slots: int,
    lookahead: int,
    at_once: int,
    updated: set[int],
    kept: frozenset[int],
) -> None:
    issued = []
    for forgets in (True, False):
        program = Program(slots, lookahead, at_once, spans, [1])
        program.forgets = forgets
        program.issue(program.residency.expect({DEVICE: Schedule(expected)}))
        program.run(expected + expected, updated, kept)
        program.issue(program.residency.limit(DEVICE, max(2, slots - 1)))
        program.run(others + expected, updated)
        program.issue(program.residency.limit(DEVICE, slots))
        issued.append(program.run(expected, set(), kept))
    assert issued[0] == issued[1]


@settings(max_examples=examples(100))
@given(
    expected=uses,
    others=uses,
    slots=st.integers(2, 5),
    lookahead=st.integers(1, 6),
    ends=orders,
    kept=st.frozensets(st.integers(0, 14), max_size=2),
)
@example([(0,), (1,), (0, 1), (2,), (3,)], [(2, 3)], 2, 2, [0, 1], frozenset())
def test_a_use_that_begins_in_the_same_event_moves_the_same(
    expected: list[tuple[int, ...]],
    others: list[tuple[int, ...]],
    slots: int,
    lookahead: int,
    ends: list[int],
    kept: frozenset[int],
) -> None:
    issued = []
    for in_one in (True, False):
        program = Together(slots, lookahead, 2, [1] * BLOCKS, ends)
        program.in_one = in_one
        program.issue(program.residency.expect({DEVICE: Schedule(expected)}))
        program.run(expected, set(), kept)
        program.run(others, set())
        issued.append(program.run(expected, set()))
    assert issued[0] == issued[1]
