"""Waits of a rank for others, none without an end and a name: it ends as soon as another rank is dead, has ended its
part by an error, or all wait for each other, and after a time in which none of the others gives a sign.

Knows the words that ranks share, and nothing of what they wait for.

Note "several models": the ranks of a group have words of their own for each model. A rank that waits in one is said to
wait in all of them, so that ranks that come to two models in another order see that they wait for each other.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident

from hetmem.errors import PeerError
from hetmem.memory.interrupts import HELD_BACK
from hetmem.ranks.figures import Figures
from hetmem.ranks.words import Words, fence

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
_LOOK_SECONDS = 0.02
"""How often a rank that waits looks for those that will not come."""
_CIRCLE_SECONDS = 1.0
"""How long all wait for each other until that is an error."""
_ALL_WAIT = "all ranks wait for each other"


def _ended(rank: int, error: str) -> str:
    return f"rank {rank} takes no part any more, as it raised {error}"


def in_words(error: BaseException) -> str:
    """Return the class and the text of `error`."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def never() -> bool:
    """Return False: nothing is under way."""
    return False


_here: list[weakref.ref[Waits]] = []
"""Those of all models of this process."""


class Waits:
    """The waits of `rank` for the others, whose processes are `processes`, for at most `patience` seconds. `first`: the
    number of rank 0 of these in errors, as the ranks of other machines have numbers too."""

    def __init__(self, words: Words, rank: int, processes: Sequence[int], patience: float, first: int = 0) -> None:
        self._words, self._rank, self._patience, self.first = words, rank, patience, first
        self._processes, self._thread = [*processes], get_ident()
        """The thread is the one that was last at a place."""
        self._others = [other for other in range(len(processes)) if other != rank]
        self._deaths = select.poll()
        self._rank_of: dict[int, int] = {}
        for other in self._others:
            descriptor = os.pidfd_open(processes[other])
            self._rank_of[descriptor] = other
            self._deaths.register(descriptor, select.POLLIN)
        self._figures = Figures(words, rank)
        self.place = "outside of backwards and steps"
        words.set_place(rank, self.place)
        self._circle: tuple[float, list[int], list[int]] | None = None
        self.saves: Callable[[], bool] = never
        """Whether this rank writes a file in the background, which others may wait for."""
        self.updates: Callable[[], bool] = never
        """Whether it computes updates, which others may wait for."""
        _here[:] = [each for each in _here if each() is not None] + [weakref.ref(self)]

    def close(self) -> None:
        """Watch the others no more."""
        while self._rank_of:
            os.close(self._rank_of.popitem()[0])

    def sign(self) -> None:
        """Show the others that this rank goes on, once what it has written is there for them."""
        fence()
        self._words.signs[self._rank] += 1

    def refuse_ended(self) -> None:
        """Raise `PeerError` if an error has ended the part of any rank."""
        for rank in range(len(self._words.signs)):
            if error := self._words.error(rank):
                raise PeerError(f"{_ended(self.first + rank, error)}. {self.where()}")

    @contextmanager
    def at(self, place: str, *, ends: bool = True, alone: bool = False) -> Iterator[None]:
        """Have this rank be at `place` in the body. An error there `ends` its part. Raises `PeerError` if one has ended
        that of any rank, unless this one does `alone` what it does there."""
        if not alone:
            self.refuse_ended()
        before, self.place, self._thread = (self.place, self._words.place(self._rank)), place, get_ident()
        self._words.set_place(self._rank, place)
        try:
            yield
        except BaseException as error:
            if ends:
                self.end_part(error)
            raise
        finally:
            self.place = before[0]
            self._words.set_place(self._rank, before[1])

    def end_part(self, error: BaseException) -> None:
        """Tell the others that this rank takes part in nothing any more."""
        if not self._words.error(self._rank):
            self._words.set_error(self._rank, f"{in_words(error).splitlines()[0]} (in {self.place})")

    def until(
        self,
        reached: Callable[[], bool],
        what: str,
        serve: Callable[[], object] = never,
        busy: Callable[[], bool] = never,
    ) -> None:
        """Wait until `reached()`, and call `serve` meanwhile; `busy`: whether something of this rank is under way that
        may bring it about. Raises `PeerError` if it cannot come, with where each rank is."""
        if reached():
            fence()
            return
        words, rank = self._words, self._rank
        all_here = self._of_all_models()
        before = [each._words.place(rank) for each in all_here]  # perhaps of a wait that serves this one
        for each in all_here:
            where = self.place if each is self else f"{self.place} of another model"
            each._words.set_place(rank, f"{where}, awaits {what}")
        pause, since = _FIRST_PAUSE, time.monotonic()
        polled = since
        looks, seen = since + _LOOK_SECONDS, [*words.signs]
        try:
            while not reached():
                HELD_BACK.raise_here()
                serve()
                under_way = busy()
                for each in all_here:
                    each._words.waiting[rank] = not (under_way or each.saves() or each.updates())
                    each._words.polls[rank] += 1
                time.sleep(pause)
                pause, now = min(2 * pause, _LONGEST_PAUSE), time.monotonic()
                self._figures.waited(self.place, now - polled)
                polled = now
                if now >= looks:
                    looks = now + _LOOK_SECONDS
                    if (signs := [*words.signs]) != seen:
                        seen, since = signs, now
                    if (why := self._why(now, now - since)) and not reached():
                        error = PeerError(f"{why}. {self.where()}")
                        for each in all_here if why == _ALL_WAIT else ():
                            each.end_part(error)
                        raise error
        finally:
            for each, place in zip(all_here, before, strict=True):
                each._words.waiting[rank] = 0
                each._words.set_place(rank, place)
            self._circle = None
        fence()

    def where(self) -> str:
        """Return where each rank is."""
        words = self._words
        ranks = range(len(words.signs))
        counts = (f"after {words.entered[rank]} backwards and {words.steps[rank]} steps" for rank in ranks)
        return "; ".join(
            f"rank {self.first + rank}: {words.place(rank)}, {count}" for rank, count in zip(ranks, counts, strict=True)
        )

    # ---- inside ------------------------------------------------------------------------------------------------

    def _of_all_models(self) -> list[Waits]:
        """Return those of the models that this thread trains with the same ranks."""
        alive = (each() for each in _here)
        others = (each for each in alive if each is not None and each is not self and each._rank_of)
        mine = self._processes, self._thread
        return [self, *(each for each in others if (each._processes, each._thread) == mine)]

    def _why(self, now: float, quiet: float) -> str:
        """Return why others will not come; "" if they may."""
        words = self._words
        for other in self._others:
            if error := words.error(other):
                return _ended(self.first + other, error)
            if words.has_left[other]:
                return f"rank {self.first + other} has released its model"
        for descriptor, _ in self._deaths.poll(0):
            return f"rank {self.first + self._rank_of[descriptor]} has died or ended"
        if self._is_circle(now):
            return _ALL_WAIT
        if quiet > self._patience:
            return f"no other rank gave a sign for {self._patience:g} s (HETMEM_RANK_TIMEOUT)"
        return ""

    def _is_circle(self, now: float) -> bool:
        """Return whether all wait, have looked again since, and none has given a sign."""
        words = self._words
        if not all(words.waiting):
            self._circle = None
            return False
        signs, polls = [*words.signs], [*words.polls]
        if self._circle is None or self._circle[1] != signs:
            self._circle = now, signs, polls
            return False
        began, _, before = self._circle
        looked = all(count - old > 2 for count, old in zip(polls, before, strict=True))  # one that is stopped has not
        return looked and now - began > _CIRCLE_SECONDS
