"""Whose turn it is, by number."""

from __future__ import annotations

from tests.schedule.tested import Turns


def mostly(*waiting: tuple[int, str]) -> Turns[tuple[int, str]]:
    made: Turns[tuple[int, str]] = Turns(lambda one: one[0])
    for one in waiting:
        made.add(one)
    return made


def everybody(_: tuple[int, str]) -> bool:
    return True


def order(made: Turns[tuple[int, str]]) -> str:
    found = ""
    while (one := made.next(everybody)) is not None:
        found += made.take(one)[1]
    assert not made.waiting
    return found


def test_the_lowest_number_is_next_and_of_equal_ones_the_first_that_came() -> None:
    made = mostly((3, "d"), (1, "b"), (2, "c"), (1, "B"), (0, "a"))
    assert [one[1] for one in made] == ["a", "b", "B", "c", "d"]
    assert order(made) == "abBcd"


def test_who_is_not_ready_is_passed_over() -> None:
    made = mostly((0, "a"), (1, "b"))
    assert made.next(lambda one: one[1] != "a") == (1, "b")
    assert made.next(lambda one: False) is None
    assert len(made.waiting) == 2


def test_who_is_waited_for_goes_first_once() -> None:
    made = mostly((0, "a"), (1, "b"), (2, "c"))
    made.put_first(2)
    assert order(made) == "cab"
    for one in ((2, "c"), (0, "a")):
        made.add(one)
    assert order(made) == "ac"


def test_who_is_waited_for_and_not_ready_holds_nobody_up() -> None:
    made = mostly((0, "a"), (2, "c"))
    made.put_first(2)
    assert made.next(lambda one: one[1] != "c") == (0, "a")
    assert made.next(everybody) == (2, "c")


def test_who_is_waited_for_and_does_not_wait_here_changes_nothing() -> None:
    made = mostly((1, "b"), (2, "c"))
    made.put_first(7)
    made.add((7, "h"))  # the next step's, for which nobody waits yet
    assert order(made) == "bch"
