"""Decides in which order the ranks of a group add their gradients to the home that they share: that of the ranks. Pure.

A backward is one of all ranks. Each parameter has turns of its own: rank r may add once all ranks have entered the
backward, and all lower ranks have passed their turn of that parameter. So a rank waits for lower ranks of the same
backward only, and nothing can wait in a circle, in whatever order each rank makes its gradients.

A rank passes its turn of a parameter once as many gradients have arrived at home as the parameter has had at most in a
backward before, at the latest as its own backward ends. Gradients that come later than that, as there are more of them
than ever before, are added in a second round, once all ranks have ended the first: again in the order of ranks.

With ranks of several machines there is no second round: late gradients are for a backward of their own, as the sums of
the first may be those of all machines by then. And what no backward has given a gradient yet is passed at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

_UNKNOWN = 1 << 30


class TurnWords(Protocol):
    """The words that ranks share; each rank writes its own row. All are numbers of backwards, from 1."""

    entered: Any
    """By rank, the last backward that it has entered."""
    ended: Any
    """By rank, the last backward whose first round it has ended."""
    finished: Any
    """By rank, the last backward in which it has added everything."""
    passed: Any
    """By rank and parameter, the last backward in which it has passed its turn."""
    filled: Any
    """By parameter, the last backward in which its home got a gradient, written by the rank whose turn it is."""


class RankTurns:
    """The turns of `rank`, one of `ranks`, in backwards over `parameters`, which have numbers."""

    def __init__(self, rank: int, ranks: int, parameters: int, words: TurnWords, *, leaves_late: bool = False) -> None:
        """`leaves_late`: late gradients are left to a backward of their own."""
        self._rank, self._all, self._words = rank, range(ranks), words
        self._parameters, self._leaves_late = parameters, leaves_late
        self._usual: dict[int, int] = {}
        """By parameter, the most gradients that it has had in a backward."""
        self.backward = 0
        """The number of the backward that runs, or of the last one."""
        self._ends = False
        self.is_of_late = False
        """Whether the backward that runs is that of gradients that came late: no turn of it passes before its end."""
        self.passes_unused = False
        """Whether it has passed what no backward has given a gradient yet."""
        self._made, self._waiting, self._adding, self._late = (Counter[int]() for _ in range(4))

    def begin(self, *, is_of_late: bool = False) -> None:
        """Enter a backward; `is_of_late`: that of gradients that came late in the last one."""
        self.backward += 1
        self._ends, self.is_of_late = False, is_of_late
        for count in (self._made, self._waiting, self._adding, self._late):
            count.clear()
        self.passes_unused = self._leaves_late and not is_of_late and bool(self._words.filled.any())
        if self.passes_unused:
            self._words.passed[self._rank][self._words.filled == 0] = self.backward
        self._words.entered[self._rank] = self.backward

    def made(self, parameter: int) -> None:
        """Record that a gradient of `parameter` was made, and waits."""
        self._made[parameter] += 1
        is_late = self._has_passed(parameter) or self._made[parameter] > self._most_of(parameter)
        (self._late if is_late else self._waiting)[parameter] += 1

    def due(self) -> list[int]:
        """Return the parameters whose waiting gradients may be added now."""
        self._publish()
        if not (self._waiting or self._late) or not self.all_entered():
            return []
        found = [parameter for parameter in self._waiting if self._is_turn(parameter)]
        if not self._leaves_late and not self._waiting and not self._adding and self._second_round():
            found += self._late
        return found

    def add(self, parameter: int) -> int:
        """Return how many gradients of `parameter`, which is due, are added now; `arrived` is called for each."""
        late = parameter not in self._waiting
        count = (self._late if late else self._waiting).pop(parameter)
        self._adding[parameter] += count
        return count

    def late(self) -> list[int]:
        """Return the parameters with gradients that came late, and wait."""
        return [*self._late]

    @property
    def waits(self) -> bool:
        """Whether any gradient waits for a turn of the first round."""
        return bool(self._waiting)

    def is_filled(self, parameter: int) -> bool:
        """Return whether the home of `parameter` has got a gradient in this backward."""
        return bool(self._words.filled[parameter] == self.backward)

    def filled(self) -> Any:
        """Return whether the home of each parameter has got a gradient in this backward, as an array."""
        return self._words.filled == self.backward

    def arrived(self, parameter: int) -> None:
        """Record that a gradient of `parameter` has been added at home."""
        self._words.filled[parameter] = self.backward
        self._adding[parameter] -= 1
        if not self._adding[parameter]:
            del self._adding[parameter]
            self._pass(parameter)

    def end(self) -> None:
        """Record that this backward makes no more gradients."""
        self._ends = True
        for parameter in range(self._parameters):
            self._pass(parameter)
        for parameter, count in self._made.items():
            self._usual[parameter] = max(count, self._usual.get(parameter, 0))

    def is_over(self) -> bool:
        """Return whether this backward has ended on all ranks."""
        self._publish()
        return all(self._words.finished[rank] >= self.backward for rank in self._all)

    def is_called(self) -> bool:
        """Return whether another rank has entered a backward that this one has not."""
        return any(self._words.entered[rank] > self.backward for rank in self._all)

    def all_entered(self) -> bool:
        """Return whether all ranks have entered this backward."""
        return all(self._words.entered[rank] >= self.backward for rank in self._all)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._ends and not (self._waiting or self._adding):
            self._words.ended[self._rank] = self.backward
            if self._leaves_late or not self._late:
                self._words.finished[self._rank] = self.backward

    def _is_turn(self, parameter: int) -> bool:
        return all(self._words.passed[rank][parameter] >= self.backward for rank in self._all[: self._rank])

    def _second_round(self) -> bool:
        """Return whether this rank may add gradients that came late."""
        words, number = self._words, self.backward
        return all(words.ended[rank] >= number for rank in self._all) and all(
            words.finished[rank] >= number for rank in self._all[: self._rank]
        )

    def _has_passed(self, parameter: int) -> bool:
        return bool(self._words.passed[self._rank][parameter] >= self.backward)

    def _pass(self, parameter: int) -> None:
        """Pass the turn of `parameter`, unless a gradient of it is on its way or may come."""
        if parameter in self._waiting or parameter in self._adding or self._has_passed(parameter):
            return
        if self._ends or self._made[parameter] >= self._most_of(parameter):
            self._words.passed[self._rank][parameter] = self.backward

    def _most_of(self, parameter: int) -> int:
        """Return how many gradients of `parameter` this backward adds before its end."""
        return _UNKNOWN if self.is_of_late else self._usual.get(parameter, _UNKNOWN)
