"""The resident share: idle bytes, and which chunks move into them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.tested import MARGIN_SHARE, Candidate, choose, idle_bytes

CANDIDATES = st.lists(st.builds(Candidate, st.integers(1, 100), st.integers(0, 1)), max_size=12)


@given(CANDIDATES, st.integers(-10, 400))
def test_what_is_chosen_fits_and_nothing_that_fits_beside_it_is_left(candidates: list[Candidate], idle: int) -> None:
    chosen = choose(candidates, idle)
    left = idle - sum(candidates[at].device_bytes for at in chosen)
    assert len(set(chosen)) == len(chosen)
    assert left >= 0 or not chosen
    assert all(candidates[at].device_bytes > left for at in set(range(len(candidates))) - set(chosen))


def test_what_lies_on_nvme_moves_first_and_then_what_is_used_first() -> None:
    candidates = [Candidate(16), Candidate(16, 4), Candidate(16, 16), Candidate(16, 4), Candidate(32, 30)]
    assert choose(candidates, 112) == [2, 4, 1, 3, 0]
    assert choose(candidates, 40) == [2, 1]
    assert choose(candidates, 15) == []


def test_idle_is_what_neither_copies_nor_the_peak_of_everything_else_nor_the_margin_take() -> None:
    assert idle_bytes(1600, 1600, 500, 300) == 1600 - 500 - 300 - int(1600 * MARGIN_SHARE)
    assert idle_bytes(1600, 700, 500, 300) == 400  # chunks may have 700
    assert idle_bytes(1600, 1600, 1200, 300) <= 0  # not all copies fit
