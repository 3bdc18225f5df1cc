"""Callables that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """`method`, which is bound, for those whom its owner must not outlive; it does nothing when that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **keywords: P.kwargs) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **keywords)

    return call
