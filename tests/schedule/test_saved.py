"""Which saved storages leave: none where all fit, those with the longest gap first, only what helps."""

from __future__ import annotations

from tests.schedule.tested import NEVER, SavedInterval, SavedRound, to_leave

LAYERS = 4


def layered(sizes: list[int]) -> tuple[list[SavedInterval], list[int]]:
    """Storages that are saved one after the other, and used in the reverse order, and what each tick needs."""
    last = 2 * len(sizes)
    saved = [SavedInterval(size, at + 1, at + 1, last - at) for at, size in enumerate(sizes)]
    needed = [sum(each.nbytes for each in saved if each.saved_at <= tick <= each.used_at) for tick in range(last + 1)]
    return saved, needed


def test_where_all_fit_none_leaves() -> None:
    saved, needed = layered([10] * LAYERS)
    assert to_leave(saved, needed, 40) == set()


def test_those_saved_first_leave_until_the_rest_fits() -> None:
    saved, needed = layered([10] * LAYERS)
    assert to_leave(saved, needed, 39) == {0}
    assert to_leave(saved, needed, 21) == {0, 1}
    assert to_leave(saved, needed, 0) == {0, 1, 2}, "the last is used at once"


def test_none_leaves_that_is_there_when_room_is_short() -> None:
    """The first is used before the tick that has too little room, the second is held by the program until then."""
    saved = [SavedInterval(10, 1, 1, 3), SavedInterval(10, 2, 5, 8), SavedInterval(10, 3, 3, 7)]
    needed = [0, 10, 20, 30, 20, 40, 20, 20, 10]
    assert to_leave(saved, needed, 30) == {2}
    assert to_leave(saved, needed, 25) == {2}, "no other helps"


def test_where_copies_are_made_beside_compute_those_that_leave_are_spread() -> None:
    """Every other one, but those that would not be gone when most is needed."""
    saved, needed = layered([10] * 20)
    assert to_leave(saved, needed, 110, 2) == set(range(0, 17, 2))
    assert to_leave(saved, needed, 200, 2) == set()
    assert to_leave(saved, needed, 0, 2) == set(range(17)), "all that help"


def test_a_round_says_places_of_what_leaves_and_not_of_what_the_program_holds() -> None:
    recorded = SavedRound()
    for number, size in ((7, 10), (8, 20), (9, 10)):
        recorded.save(number, ("forward", number - 7), size, 0)
        recorded.need(sum(each.nbytes for each in recorded.intervals.values()))
        if number != 7:
            recorded.free(number)
    recorded.save(10, ("forward", 3), 5, 45)
    for number in (10, 9, 8, 7):
        recorded.use(number, 0)
    assert recorded.intervals[7].free_at == NEVER
    assert recorded.to_leave(45) == set()
    assert recorded.to_leave(40) == {("forward", 1)}
