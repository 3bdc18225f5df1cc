"""Callables, and collections, that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return `method`, which is bound, for a part of its owner to call: it does not keep the owner alive, and returns
    None when that is gone."""
    bound: Any = method
    owner, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: P.args, **keywords: P.kwargs) -> T | None:
        alive = owner()
        return None if alive is None else function(alive, *args, **keywords)

    return call


class WeakOnes(Generic[T]):
    """Objects that are held elsewhere, in the order in which they came. To go through a few of them at each gradient
    takes a quarter of what a `WeakSet` does."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, one: T) -> None:
        """`one` is among them for as long as it lives."""
        alive = [reference for reference in self._references if reference() is not None and reference() is not one]
        self._references = [*alive, weakref.ref(one)]

    def discard(self, one: T) -> None:
        """`one` is not among them any more, if it was."""
        self._references = [reference for reference in self._references if reference() not in (None, one)]

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            one = reference()
            if one is not None:
                yield one
