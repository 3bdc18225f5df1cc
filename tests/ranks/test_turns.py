"""The turns of ranks that add gradients: whatever the order of events, a backward ends on all, with sums in order. And
waits that cannot end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, defaultdict

import pytest

from hetmem.errors import PeerError
from hetmem.ranks import words as shared
from hetmem.ranks.waits import Waits
from hetmem.schedule.turns import RankTurns


class Words:
    def __init__(self, ranks: int, parameters: int) -> None:
        self.entered, self.ended, self.finished = [0] * ranks, [0] * ranks, [0] * ranks
        self.passed = [[0] * parameters for _ in range(ranks)]
        self.filled = [0] * parameters


class Rank:
    """A rank in a backward that makes `plan`, and what it has in flight; `step` does one thing, if it can."""

    def __init__(self, number: int, turns: RankTurns, added: dict[int, list[int]]) -> None:
        self.number, self.turns, self.added = number, turns, added
        self.plan: list[int] = []
        self.flying: list[int] = []
        self.state = "outside"

    def enter(self, plan: list[int]) -> None:
        self.plan, self.state = plan, "entering"

    def step(self, chance: random.Random) -> bool:
        if self.state == "entering":
            self.turns.begin()
            self.state = "inside"
            return True
        can = []
        if self.state == "inside":
            can.append(self.make if self.plan else self.end)
        if self.state in ("inside", "ended"):
            can += [self.add] * bool(self.turns.due()) + [self.arrive] * bool(self.flying)
            if self.state == "ended" and self.turns.is_over():
                self.state = "over"
                return True
        if not can:
            return False
        chance.choice(can)(chance)
        return True

    def make(self, _: random.Random) -> None:
        self.turns.made(self.plan.pop())

    def end(self, _: random.Random) -> None:
        self.turns.end()
        self.state = "ended"

    def add(self, chance: random.Random) -> None:
        parameter = chance.choice(self.turns.due())
        self.flying += [parameter] * self.turns.add(parameter)

    def arrive(self, chance: random.Random) -> None:
        parameter = self.flying.pop(chance.randrange(len(self.flying)))
        assert self.turns.is_filled(parameter) == bool(self.added[parameter])
        self.added[parameter].append(self.number)
        self.turns.arrived(parameter)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_order_of_events_ends_with_sums_in_the_order_of_ranks(ranks: int) -> None:
    """In backwards with unused parameters, several gradients of one, and more of them than before."""
    for seed in range(60):
        chance = random.Random(seed)
        count = chance.randint(1, 5)
        words, added = Words(ranks, count), defaultdict[int, list[int]](list)
        group = [Rank(number, RankTurns(number, ranks, count, words), added) for number in range(ranks)]
        most: list[Counter[int]] = [Counter() for _ in range(ranks)]
        for _ in range(4):
            added.clear()
            plans = [[p for p in range(count) for _ in range(chance.choice((0, 1, 1, 1, 2)))] for _ in group]
            for rank, plan in zip(group, plans, strict=True):
                chance.shuffle(plan)
                rank.enter([*plan])
            while any(rank.state != "over" for rank in group):
                sweeps = [rank for _ in range(3) for rank in chance.sample(group, ranks)]  # one may only publish
                assert any(rank.step(chance) for rank in sweeps), "a circle"
            for parameter in range(count):
                made = [plan.count(parameter) for plan in plans]
                assert Counter(added[parameter]) == +Counter(dict(enumerate(made)))
                first = sum(most[rank][parameter] == 0 or n <= most[rank][parameter] for rank, n in enumerate(made))
                if first == ranks:  # none came late: one after the other
                    assert added[parameter] == sorted(added[parameter])
                else:
                    falls = sum(a > b for a, b in zip(added[parameter], added[parameter][1:], strict=False))
                    assert falls <= 1, "a first and a second round, each in the order of ranks"
            for known, plan in zip(most, plans, strict=True):
                known |= Counter(plan)


def test_a_rank_waits_for_lower_ranks_and_begins_when_all_are_there() -> None:
    words = Words(2, 1)
    low, high = (RankTurns(rank, 2, 1, words) for rank in range(2))
    low.begin()
    low.made(0)
    assert low.due() == []  # the other may still read its gradients of the backward before
    high.begin()
    high.made(0)
    assert (low.due(), high.due()) == ([0], [])
    low.add(0)
    low.end()
    assert high.due() == []  # it is in flight
    low.arrived(0)
    assert high.due() == [0]
    high.end()
    assert not low.is_over() and not high.is_over()
    high.add(0)
    high.arrived(0)
    assert high.is_over() and low.is_over()


def test_ranks_that_wait_for_each_other_are_an_error_that_says_where_they_are() -> None:
    memory = memoryview(bytearray(shared.Words(None, 2, 1, 1).nbytes))
    errors: list[str] = []

    def wait(rank: int, what: str) -> None:
        waits = Waits(shared.Words(memory, 2, 1, 1), rank, [os.getpid()] * 2, patience=60.0)
        with pytest.raises(PeerError) as raised, waits.at("a test"):
            waits.until(lambda: False, what)
        errors.append(str(raised.value))
        waits.close()

    began = time.monotonic()
    threads = [threading.Thread(target=wait, args=each) for each in enumerate(("a save", "a turn"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "all ranks wait for each other. rank 0: a test, awaits a save" in errors[0]
    assert "takes no part any more, as it raised PeerError: all ranks wait" in errors[1]
    assert 1.0 <= time.monotonic() - began < 4.0
