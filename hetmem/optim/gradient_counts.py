"""How many gradients of each parameter have arrived in a step, and whether these are all. It counts, no more.

How often gradients of a parameter arrive in a step is learned from the steps before: the most that was ever seen. The
first step overlaps nothing.
"""

from __future__ import annotations

from collections import Counter

from hetmem.memory.chunk import ManagedParameter


class Arrivals:
    """Of one optimizer's gradients on one runtime. `sees_all`: whether it is told of all in the step that begins."""

    def __init__(self, *, sees_all: bool) -> None:
        self._now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._expected: dict[int, int] = {}
        """After which the backward that runs has no more, where that was counted: see `intercept.backward`."""
        self._sees_all = sees_all

    def __bool__(self) -> bool:
        """Whether any has arrived in this step."""
        return bool(self._now)

    @property
    def learned(self) -> bool:
        """Whether a step has shown how many there are."""
        return bool(self._most)

    def expect(self, managed: ManagedParameter, more: int) -> None:
        """So many `more` of `managed` come in the backward that begins."""
        self._expected[id(managed)] = self._now[id(managed)] + more

    def count(self, managed: ManagedParameter) -> None:
        """One of `managed` has arrived."""
        self._now[id(managed)] += 1

    def of(self, managed: ManagedParameter) -> int:
        """Those of `managed` in this step."""
        return self._now[id(managed)]

    def complete(self, managed: ManagedParameter) -> bool:
        """Whether all of `managed` that a step ever had are there, and all that are expected."""
        usual = self._most[id(managed)] or max(self._most.values(), default=1)  # for one that never had any
        return self._now[id(managed)] >= max(usual, self._expected.get(id(managed), 0))

    def end_step(self, *, sees_all: bool) -> None:
        """What was counted is learned; a step begins."""
        if self._sees_all:
            for key, count in self._now.items():
                self._most[key] = max(self._most[key], count)
        self._sees_all = sees_all
        self._now.clear()
        self._expected.clear()
