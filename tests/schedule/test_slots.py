"""Occupancy of a pool's slots, against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.tested import PlaceMap, SlotMap


@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=30))
def test_slots_are_found_exactly_when_aligned_ones_are_free_in_a_row(count: int, steps: list[tuple[bool, int]]) -> None:
    slots = SlotMap(count)
    owners: list[int | None] = [None] * count
    places: list[tuple[int, int]] = []
    for block, (takes, span) in enumerate(steps):
        places_left = [
            at for at in range(0, count - span + 1, span) if all(owner is None for owner in owners[at : at + span])
        ]
        found = slots.find(span)
        assert found == (None if not places_left else places_left[0] if span == 1 else places_left[-1])
        if takes and found is not None:
            assert slots.take(span, block) == found
            owners[found : found + span] = [block] * span
            places.append((found, span))
        elif not takes and places:
            at, width = places.pop(span % len(places))
            slots.give(at, width)
            owners[at : at + width] = [None] * width
        assert slots.free() == [at for at, owner in enumerate(owners) if owner is None]
        assert slots.used == count - owners.count(None)


def test_of_the_places_that_may_become_free_the_last_used_goes_and_all_its_blocks() -> None:
    slots = SlotMap(7)
    for slot, span, block in ((0, 1, 10), (1, 1, 11), (4, 2, 12), (2, 2, 13)):
        assert slots.take(span, block) == slot
    assert slots.cheapest_row({10: (3,), 11: (2,), 12: (1,)}, 2) == [10, 11]
    assert slots.cheapest_row({10: (3,), 11: (1,), 12: (1,), 13: (1,)}, 2) == [12]
    assert slots.cheapest_row({10: (3,), 12: (1,)}, 3) == []
    assert slots.cheapest_row({12: (1,), 13: (9,)}, 3) == [13, 12]


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 23), max_size=40))
def test_blocks_of_one_span_never_fragment(span: int, places: int, picks: list[int]) -> None:
    slots = SlotMap(span * places)
    taken: list[int] = []
    for block, pick in enumerate(picks):
        found = slots.take(span, block)
        assert (found is None) == (len(taken) == places)
        if found is not None:
            taken.append(found)
        if pick % 2 and taken:
            slots.give(taken.pop(pick % len(taken)), span)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 23)), max_size=60))
def test_places_of_their_own_never_fragment(count: int, steps: list[tuple[int, int]]) -> None:
    """As long as so many slots are free there is a place, whatever was taken and given before; no two share a slot."""
    places = PlaceMap(count)
    taken: dict[int, int] = {}
    for block, (span, pick) in enumerate(steps):
        if places.used + span <= count:
            found = places.take(span, block)
            assert found is not None and not any(at < found + span and found < at + s for at, s in taken.items())
            taken[found] = span
        if pick % 2 and taken:
            at = sorted(taken)[pick % len(taken)]
            places.give(at, taken.pop(at))
        assert not taken.keys() & set(places.free())
        assert places.used == sum(taken.values())
