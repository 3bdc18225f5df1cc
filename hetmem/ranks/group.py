"""The part of a rank in its group, once that shares memory: which work is its own, and where ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hetmem.cpu.workers import TILE_ELEMENTS
from hetmem.errors import ManageError, PeerError
from hetmem.ranks.figures import Figures
from hetmem.ranks.memory import SharedPool
from hetmem.ranks.saves import Saves
from hetmem.ranks.updates import SharedUpdates
from hetmem.ranks.waits import Waits, in_words, never
from hetmem.ranks.words import Words

if TYPE_CHECKING:
    from hetmem.ranks.drive import SharedDrive
    from hetmem.ranks.machines import Machines  # imports torch.distributed, which one process does without

T = TypeVar("T")
_FAILED = "failed: "


class Ranks:
    """`rank` of `count` that train one model, whose homes are in `pool`, with those of other `machines` if there are
    any."""

    def __init__(
        self, rank: int, count: int, words: Words, waits: Waits, pool: SharedPool, machines: Machines | None = None
    ) -> None:
        self.rank, self.count = rank, count
        self.words, self.waits, self.pool = words, waits, pool
        self.saves = Saves(rank, words, waits)
        self.figures = Figures(words, rank)
        self.updates = SharedUpdates(rank, words, waits.end_part)
        waits.updates = self.updates.under_way
        self.machines = machines
        self.drive: SharedDrive | None = None
        """That of the machine, if the group uses one."""

    @property
    def of_all(self) -> int:
        """The number of ranks of all machines."""
        return self.count if self.machines is None else self.count * self.machines.count

    def own(self, chunk: int, start: int, end: int) -> list[slice]:
        """Return the parts of elements [start, end) of `chunk` that this rank computes, counted from `start`: tile j of
        chunk c is computed by rank (c + j) mod the number of ranks."""
        tiles = range(start // TILE_ELEMENTS, -(-end // TILE_ELEMENTS))
        return [
            slice(max(0, tile * TILE_ELEMENTS - start), min(end, (tile + 1) * TILE_ELEMENTS) - start)
            for tile in tiles
            if self.owns(chunk, tile)
        ]

    def owns(self, chunk: int, tile: int) -> bool:
        """Return whether this rank computes `tile` of `chunk`."""
        return (chunk + tile) % self.count == self.rank

    def meet(self, what: str, said: str = "", serve: Callable[[], object] = never) -> None:
        """Wait until all ranks have come to this meeting. Raises `PeerError` if one says something else there."""
        texts = self._hear(self._come(f"{what}\n{said}"), what, serve)
        for rank, theirs in enumerate(texts):
            if theirs != texts[0]:
                raise self._differ(rank, texts)

    def summed(self) -> None:
        """Wait until all ranks have written their part of a sum of all machines; also within a meeting."""
        self._all_count(self.words.summed, "the sum of gradients of all machines")

    def brought(self, what: str) -> None:
        """Wait until all ranks have done `what` with the writes of the program; also within a meeting."""
        self._all_count(self.words.brought, what)

    def _all_count(self, counts: Any, what: str) -> None:
        self.waits.sign()
        counts[self.rank] += 1
        number = int(counts[self.rank])
        self.waits.until(lambda: bool((counts >= number).all()), what)

    def together(self, what: str, do: Callable[[], T], said: Callable[[T], str] = str) -> T:
        """Return `do()`, once all ranks have done it. Raises its error, or `PeerError` for that of another rank, or if
        it is something else there, as `said` puts it in words; the ranks go on together after these."""
        with self.waits.at(what, ends=False):
            try:
                result = do()
            except BaseException as error:
                self._come(f"{_FAILED}{in_words(error)}")
                if self.machines is not None and isinstance(error, Exception):
                    with suppress(PeerError):
                        self.machines.refuse_verdicts(what, "")
                raise
        with self.waits.at(what):
            texts = self._hear(self._come(f"{what}\n{said(result)}"), what, never)
            refused = self._refusal(what, texts)
            if self.machines is not None:
                found = self.machines.refuse_verdicts(what, "" if refused else texts[0])
                refused = refused or found
        if refused is not None:
            raise refused
        return result

    def _refusal(self, what: str, texts: list[str]) -> PeerError | None:
        """Return the error for `texts` that ranks say in `what`, of which one has failed or differs."""
        for rank, theirs in enumerate(texts):
            if theirs.startswith(_FAILED):
                return PeerError(f"rank {self.waits.first + rank} has failed in {what}: {theirs.removeprefix(_FAILED)}")
        return next((self._differ(rank, texts) for rank, theirs in enumerate(texts) if theirs != texts[0]), None)

    def _differ(self, rank: int, texts: list[str]) -> PeerError:
        first = self.waits.first
        return PeerError(f"ranks {first} and {first + rank} do not do the same: {_difference(texts[0], texts[rank])}")

    def _come(self, text: str) -> int:
        """Come to the next meeting with `text`; return its number."""
        number = int(self.words.met[self.rank]) + 1
        self.words.say(number, self.rank, text)
        self.waits.sign()
        self.words.met[self.rank] = number
        return number

    def _hear(self, number: int, what: str, serve: Callable[[], object]) -> list[str]:
        """Wait until all ranks have come to meeting `number`; return what each says."""
        met = self.words.met
        self.waits.until(lambda: bool((met >= number).all()), what, serve)
        return [self.words.said(number, rank) for rank in range(self.count)]

    def compare_gradients(self, names: list[str]) -> None:
        """Raise `PeerError` if `p.grad` was there on one rank and not on another, as these entered what they are in."""
        given = self.words.has_gradient
        for rank in range(1, self.count):
            if (given[rank] != given[0]).any():
                at = int((given[rank] != given[0]).argmax())
                ranks = (0, rank) if given[0, at] else (rank, 0)
                ranks = self.waits.first + ranks[0], self.waits.first + ranks[1]
                raise PeerError(
                    f"{names[at]}.grad is there on rank {ranks[0]} and None on rank {ranks[1]}: clear gradients alike"
                )

    def leave(self) -> None:
        """End this rank's part, as its model is released."""
        self.words.has_left[self.rank] = 1
        self.waits.close()


def _difference(one: str, other: str) -> str:
    for mine, theirs in zip(one.splitlines(), other.splitlines(), strict=False):
        if mine != theirs:
            return f"{mine!r} and {theirs!r}"
    return "one of them does more"


def not_yet(what: str) -> ManageError:
    """Return the error for `what` a group of several ranks does not do."""
    return ManageError(
        f"{what} is not possible for a group of several ranks yet: see docs/ranks.md. For a model of its own in each "
        f"process, give hetmem.manage group=False"
    )
