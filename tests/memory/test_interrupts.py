"""Ctrl-C within `HELD_BACK` comes when that is left, or where something is waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.memory.tested import HELD_BACK, Link, SimDevice, TransferEngine


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = signal.default_int_handler  # not that of a forward of another test which ended without a word
    signal.signal(signal.SIGINT, before)
    HELD_BACK.segments = 0
    yield
    assert signal.getsignal(signal.SIGINT) == before
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_one_within_comes_at_the_end() -> None:
    done = []

    @HELD_BACK
    def work() -> None:
        ctrl_c()
        done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
    with HELD_BACK:
        pass  # and not again


def test_one_within_what_is_within_comes_at_the_end_of_all() -> None:
    done = []

    @HELD_BACK
    def work() -> None:
        with HELD_BACK:
            ctrl_c()
        done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]


def test_an_error_on_the_way_is_what_the_interrupt_was_raised_in() -> None:
    @HELD_BACK
    def work() -> None:
        ctrl_c()
        raise ValueError("on the way")

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, ValueError)


def test_the_second_of_two_comes_at_once() -> None:
    done = []

    @HELD_BACK
    @HELD_BACK
    def work() -> None:
        ctrl_c()
        done.append("after the first")
        ctrl_c()
        done.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after the first"]

    @HELD_BACK
    def work() -> None:
        ctrl_c()
        done.append("held back again")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after the first", "held back again"]


def test_a_handler_of_the_users_is_called_once_at_the_end() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with HELD_BACK:
            ctrl_c()
            seen.append("within")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["within", "handled"]


def test_a_handler_of_the_users_that_counts_sees_both_of_two() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with HELD_BACK:
            ctrl_c()
            ctrl_c()
            seen.append("within")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["handled", "handled", "within"]


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HELD_BACK:
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_within_stays() -> None:
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        with HELD_BACK:
            signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_another_thread_holds_nothing_back() -> None:
    def hold() -> None:
        with HELD_BACK:
            held.set()
            go_on.wait()

    held, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    finally:
        go_on.set()
        thread.join()
    with HELD_BACK:
        pass


def engine() -> TransferEngine:
    return TransferEngine(SimDevice().copier, None)


def from_another_thread(act: Callable[[], None]) -> None:
    threading.Timer(0.05, act).start()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_who_waits_for_a_transfer_is_interrupted_and_takes_none(when: str) -> None:
    transfers, main = engine(), threading.main_thread().ident
    assert main is not None
    with HELD_BACK:
        if when == "before":
            ctrl_c()
        else:
            from_another_thread(lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            transfers.take(wait=True)
        transfers.reporter("one")()
        finished = transfers.take(wait=True)
        assert finished is not None and finished.tag == "one"
        assert transfers.take(wait=False) is None
    transfers.close()


def test_who_does_not_wait_is_not_interrupted_and_what_came_is_not_lost() -> None:
    transfers = engine()
    transfers.reporter("one")()

    @HELD_BACK
    def work() -> None:
        ctrl_c()
        finished = transfers.take(wait=False)
        assert finished is not None and finished.tag == "one"

    with pytest.raises(KeyboardInterrupt):
        work()
    transfers.close()


def test_a_transfer_that_ends_as_the_interrupt_comes_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of the wait and what is done with it there is no instruction that it could be lost at."""
    transfers = engine()

    class Ends:
        def __init__(self, of: Any) -> None:
            self._of = of

        def __getattr__(self, name: str) -> Any:
            return getattr(self._of, name)

        def get(self, timeout: float | None) -> Any:
            transfers.copy("one", Link.HOST_TO_DEVICE, lambda: None, 0)
            item = self._of.get(timeout=timeout)
            ctrl_c()
            return item

    monkeypatch.setattr(transfers, "_finished", Ends(transfers._finished))
    monkeypatch.setattr(transfers._copier, "_finished", transfers._finished.put)

    taken: list[Any] = []

    @HELD_BACK
    def work() -> None:
        taken.append(transfers.take(wait=True))
        taken.append(transfers.take(wait=False))  # what woke nobody is nothing that has finished

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [finished and finished.tag for finished in taken] == ["one", None]
    transfers.close()


def test_a_segment_that_was_forgotten_holds_back_under_a_handler_that_came_later() -> None:
    HELD_BACK.begin_segment()  # and the forward is dropped
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with HELD_BACK:
            ctrl_c()
            assert not came
        assert came == [signal.SIGINT]
    finally:
        HELD_BACK.segments = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_one_within_a_segment_comes_at_the_end_of_its_next_hook_also_after_a_handler_that_has_not_raised() -> None:
    came: list[int] = []

    def hook() -> None:
        if HELD_BACK.came:
            HELD_BACK.leave()

    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    HELD_BACK.begin_segment()
    try:
        for count in (1, 2):
            ctrl_c()
            assert len(came) == count - 1, "it waits for a hook"
            with HELD_BACK:
                hook()
                assert len(came) == count - 1, "that is within nothing else"
            hook()
            assert len(came) == count
        ctrl_c()
    finally:
        HELD_BACK.end_segment()
        signal.signal(signal.SIGINT, before)
    assert len(came) == 3, "or for the end of the segment"


def test_the_second_of_two_within_a_segment_comes_at_once() -> None:
    HELD_BACK.begin_segment()
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
