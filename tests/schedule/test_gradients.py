"""Gradients on their way home, on made-up links: what is sent and where it goes, however long transfers take."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairs import examples
from tests.schedule.tested import GradientSends, Lending, Send, wait_until

MADE = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30)


class Links:
    """Carries sends out, and ends one of them whenever `chance` says so; each chunk is updated, which gives its place
    back, once it has all its gradients."""

    def __init__(self, made: list[tuple[int, int]], places: list[int], most_bytes: int, chance: Random) -> None:
        self.sends: GradientSends[int] = GradientSends(self, most_bytes)
        self.issued: list[tuple[int, int, str]] = []
        self._lending, self._most_bytes, self._chance = Lending(places), most_bytes, chance
        self._left = [chunk for chunk, _ in made]
        self._under_way: deque[tuple[int, Send]] = deque()
        self._place: dict[int, str] = {}
        self._lent: dict[int, int] = {}
        for chunk, nbytes in made:
            self._left.remove(chunk)
            self._make(chunk, nbytes)
        while self.busy():
            self.wait_for_one()

    def _make(self, chunk: int, nbytes: int) -> None:
        if chunk not in self._place:
            self.sends.find_place(chunk, self)
        send = self.sends.send(chunk, nbytes)
        self.issued.append((send.number, chunk, self._place[chunk]))
        self._under_way.append((chunk, send))
        assert self.sends.arriving(chunk)
        self.sends.wait_for_room()
        in_flight = [send.nbytes for _, send in self._under_way]
        assert len(in_flight) <= 1 or sum(in_flight) <= self._most_bytes

    def poll(self) -> None:
        while self._under_way and self._chance.random() < 0.5:
            self._end(self._chance.randrange(len(self._under_way)))

    def pump(self) -> None:
        """Updates begin as gradients arrive."""

    def busy(self) -> bool:
        return bool(self._under_way)

    def wait_for_one(self) -> None:
        self._end(self._chance.randrange(len(self._under_way)))

    def make_way(self, *, again: bool) -> bool:
        return False

    def hurry(self) -> bool:
        return False

    def _end(self, at: int) -> None:
        chunk, send = self._under_way[at]
        del self._under_way[at]
        self.sends.arrived(chunk, send)
        if chunk not in self._left and not self.sends.arriving(chunk) and chunk in self._lent:
            self._lending.give(self._lent.pop(chunk))

    def keep(self, chunk: int) -> bool:
        if chunk == 5:
            self._place[chunk] = "device"
        return chunk == 5

    def lend(self, chunk: int) -> bool:
        place = self._lending.take(1)
        if place is not None:
            self._lent[chunk] = place
            self._place[chunk] = "lent"
        return place is not None

    def may_lend(self, chunk: int) -> bool:
        return self._lending.lends(1)

    def give_own(self, chunk: int) -> None:
        self._place[chunk] = "own"


class Updates:
    """Updates that read into all memory that is free, too little to run, and let go of it when they are asked."""

    def __init__(self) -> None:
        self.free, self._reads = 1, False

    def poll(self) -> None:
        """Nothing ends."""

    def pump(self) -> None:
        self._reads, self.free = self._reads or bool(self.free), 0

    def busy(self) -> bool:
        return self._reads

    def wait_for_one(self) -> None:
        assert self._reads, "nothing is under way"
        self._reads = False

    def make_way(self, *, again: bool) -> bool:
        self.free = 0 if again else 1
        return not again


@pytest.mark.parametrize("useful", [True, False])
def test_who_waits_ends_where_memory_that_is_let_go_does_not_help(useful: bool) -> None:
    updates = Updates()
    updates.pump()
    assert wait_until(updates, lambda: useful and updates.free > 0) is useful


@settings(max_examples=examples(200))
@given(MADE, st.lists(st.just(1), max_size=3), st.integers(0, 20), st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_in_whatever_order_transfers_end_the_same_gradients_are_sent_to_the_same_places(
    made: list[tuple[int, int]], places: list[int], most_bytes: int, one: int, other: int
) -> None:
    first, second = (Links(made, places, most_bytes, Random(seed)) for seed in (one, other))
    assert first.issued == second.issued
    assert [number for number, _, _ in first.issued] == list(range(len(made)))
    assert not first.sends.under_way
