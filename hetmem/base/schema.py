"""Checks values that were read from a file against what may be there: types, ranges, required and unknown keys.

A *shape* is a function that raises `SchemaError` for a value it does not allow; those below make shapes out of shapes.
Pure: it reads no files, and those who do turn `SchemaError` into the error of their kind of file.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

Shape = Callable[[Any], None]

MOST = 2**63 - 1
"""The largest whole number of a file, if nothing else is said."""


class SchemaError(ValueError):
    """A value is not one that its shape allows. The text is one line of printable characters: the path of the value in
    the file (`tiers.host[1]`), what was expected, and what it is."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._path = ""

    def within(self, key: Any) -> SchemaError:
        """Return this error with its path prefixed by `key` of the enclosing object, or list for an int."""
        plain = isinstance(key, str) and key.isascii() and key.replace("-", "_").replace(" ", "_").isidentifier()
        step = key if plain else f"[{shown(key)}]"
        self._path = step + ("." if self._path and not self._path.startswith("[") else "") + self._path
        return self

    def __str__(self) -> str:
        between = ": " if str(self.args[0]).startswith("expected") else " "
        return f"{self._path}{between}{self.args[0]}" if self._path else str(self.args[0])


def shown(value: Any) -> str:
    """Return `value` for a message: its `repr`, shortened, which has no control characters."""
    with suppress(ValueError):  # a number of more digits than Python writes
        return _Short().repr(value)
    return f"a {type(value).__name__} of thousands of digits"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60


def expected(what: str, value: Any) -> SchemaError:
    """Return the error for `value`, where `what` was expected."""
    return SchemaError(f"expected {what}, got {shown(value)}")


def whole(least: int = 0, most: int = MOST) -> Shape:
    """Return the shape of whole numbers from `least` to `most`."""
    between = f"a whole number from {least} to {most}" if most != MOST else f"a whole number, {least} or more"

    def check(value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise expected(between, value)

    return check


def number(least: float = 0.0, most: float = 1e300, what: str = "a number") -> Shape:
    """Return the shape of finite numbers from `least` to `most`; `what` names their unit in the message."""

    def check(value: Any) -> None:
        if type(value) not in (int, float) or not least <= value <= most:  # NaN is not
            raise expected(f"{what}, {least:g} to {most:g}" if most < 1e300 else f"{what}, {least:g} or more", value)

    return check


def text(longest: int = 10_000) -> Shape:
    """Return the shape of strings of at most `longest` characters."""

    def check(value: Any) -> None:
        if type(value) is not str or len(value) > longest or "\0" in value:
            raise expected(f"text of at most {longest} characters", value)

    return check


def one_of(*choices: Any) -> Shape:
    """Return the shape of exactly `choices`, which are strings, numbers, bools or None."""
    listed = ", ".join("null" if choice is None else repr(choice) for choice in choices)

    def check(value: Any) -> None:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise expected(listed if len(choices) == 1 else f"one of {listed}", value)

    return check


FLAG = one_of(True, False)
"""The shape of true and false."""


def anything(value: Any) -> None:
    """Allow every value: the shape of what another function checks."""


def or_null(shape: Shape) -> Shape:
    """Return the shape of null and of what `shape` allows."""

    def check(value: Any) -> None:
        if value is not None:
            shape(value)

    return check


def list_of(shape: Shape, least: int = 0, most: int = MOST) -> Shape:
    """Return the shape of lists of `least` to `most` values, each of `shape`."""

    def check(value: Any) -> None:
        if type(value) is not list or not least <= len(value) <= most:
            size = f" of {least}" if least == most else f" of {least} to {most}" if most != MOST else ""
            raise expected(f"a list{size}", value)
        _check_each((index, shape, each) for index, each in enumerate(value))

    return check


def row(*shapes: Shape) -> Shape:
    """Return the shape of lists of one value of each of `shapes`, in their order."""

    def check(value: Any) -> None:
        if type(value) is not list or len(value) != len(shapes):
            raise expected(f"a list of {len(shapes)}", value)
        _check_each(zip(range(len(shapes)), shapes, value, strict=True))

    return check


def table_of(shape: Shape, keys: Collection[str] | None = None) -> Shape:
    """Return the shape of objects with any keys, or some of `keys`, and values of `shape`."""

    def check(value: Any) -> None:
        if not isinstance(value, Mapping):
            raise expected("an object", value)
        for key in value:
            if type(key) is not str or (keys is not None and key not in keys):
                raise _unknown(key, keys)
        _check_each((key, shape, each) for key, each in value.items())

    return check


def record(
    required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, *, others: bool = False
) -> Shape:
    """Return the shape of objects with all of `required`, any of `optional`, and (`others`) keys that are not named."""
    known = {**required, **(optional or {})}

    def check(value: Any) -> None:
        if not isinstance(value, Mapping):
            raise expected("an object", value)
        for key in value:
            if key not in known and not others:
                raise _unknown(key, known)
        for key in required:
            if key not in value:
                raise SchemaError("is missing").within(key)
        _check_each((key, shape, value[key]) for key, shape in known.items() if key in value)

    return check


def _check_each(parts: Iterable[tuple[Any, Shape, Any]]) -> None:
    """Check the parts of a value, each with its key and shape."""
    key: Any = None
    try:
        for key, shape, each in parts:  # noqa: B007 - the error needs the last one
            shape(each)
    except SchemaError as problem:
        raise problem.within(key) from None


def _unknown(key: Any, known: Collection[str] | None) -> SchemaError:
    if known is None:
        return expected("a string as key", key)
    return SchemaError(f"has no key {shown(key)}; expected {', '.join(known)}")
