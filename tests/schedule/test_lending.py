"""Places that are lent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.tested import Lending, set_aside

SIZES = st.lists(st.integers(1, 5), max_size=6)


@given(SIZES, st.lists(st.integers(1, 6), max_size=20))
def test_whoever_asks_gets_the_smallest_free_place_that_is_large_enough(sizes: list[int], asked: list[int]) -> None:
    """Where there is none, the place that is out longest comes back."""
    lending, free, out = Lending(sizes), sorted(sizes), list[int]()
    for nbytes in asked:
        large = [size for size in free if size >= nbytes]
        assert lending.lends(nbytes) == (nbytes <= max(sizes, default=0))
        place = lending.take(nbytes)
        assert place == (min(large) if large else None)
        if place is not None:
            free.remove(place)
            out.append(place)
        elif out:
            lending.give(out[0])
            free.append(out.pop(0))
        assert lending.free_bytes == sum(free)


def test_places_are_set_aside_for_the_six_largest_chunks_as_far_as_memory_goes() -> None:
    assert set_aside([1, 9, 3, 7, 5, 2, 8], 100) == (9, 8, 7, 5, 3, 2)
    assert set_aside([7, 9, 8], 17) == (9, 8)
    assert set_aside([7, 9, 8], 16) == (9, 7)
    assert set_aside([9], 8) == ()
