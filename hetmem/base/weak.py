"""Bound methods and collections that hold weak references only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_not
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Wrap the bound `method` so that it does not keep its owner alive; it returns None once the owner is collected."""
    bound: Any = method
    owner, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: P.args, **keywords: P.kwargs) -> T | None:
        alive = owner()
        return None if alive is None else function(alive, *args, **keywords)

    return call


_IS_THERE: Any = partial(is_not, None)


class WeakList(Generic[T]):
    """A list of weak references, without duplicates. To iterate over a few takes a quarter of a `WeakSet`'s time."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, one: T) -> None:
        """Add `one` at the end, until it is collected."""
        alive = [reference for reference in self._references if reference() is not None and reference() is not one]
        self._references = [*alive, weakref.ref(one)]

    def discard(self, one: T) -> None:
        """Remove `one`, if it is in the list."""
        self._references = [reference for reference in self._references if reference() not in (None, one)]

    def __iter__(self) -> Iterator[T]:
        return filter(_IS_THERE, map(weakref.ref.__call__, self._references))


class Referable:
    """Has a slot for weak references, which a dataclass with slots has none of before Python 3.11."""

    __slots__ = ("__weakref__",)
