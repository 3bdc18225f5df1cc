"""Checks what a Hugging Face configuration file says before a part of its model is built.

Every family of models has names of its own for its sizes, so keys are told by their words, in the file and in all
objects within it (`text_config`, `vision_config`). Of the 800 families of transformers 5.23 none has a default that is
refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetmem.base.json_files import parse_any_numbers
from hetmem.base.schema import SchemaError, Shape, list_of, number, or_null, shown, text
from hetmem.base.whole_files import read_regular
from hetmem.planner.model import MOST_PARAMETERS
from hetmem.planner.plan import PlanError

_MOST_BYTES = 16 << 20
_MOST_BLOCKS = 10_000
_MOST_LISTED = 1_000_000
"""The most of what a family may make an object, or a line of a table, each: experts, labels, codebooks."""
_MOST = 100_000_000
_WORDS = re.compile("[a-z]+")
_BLOCKS = frozenset("layers blocks depth depths stages".split())
_SINGLE = frozenset("layer block stage expert head".split())
_COUNTED = frozenset("n num number".split())
_LISTED = frozenset("experts heads labels classes codebooks quantizers".split())
_NO_SIZES = frozenset("id ids index theta val value limit clipping frequency seed base scale".split())
"""Words of keys whose numbers size nothing, and may be large."""


def check_file(path: Path) -> dict[str, Any]:
    """Return the content of the configuration file `path`. Raises `PlanError`, with the name of the key, for a number
    that no model has (more than 10,000 layers, fewer than none), code that would have to be fetched, and
    `architectures` that are no names; and for what is no JSON object."""
    try:
        config = parse_any_numbers(read_regular(path, _MOST_BYTES).decode("utf-8"))  # limits may be Infinity
    except ValueError as error:
        raise PlanError(f"{path} is no Hugging Face configuration: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path} is no Hugging Face configuration: expected an object, got {shown(config)}")
    try:
        _shape(("architectures",), or_null(list_of(text(200))), config.get("architectures"))
        for place, value in _entries(config):
            _check(place, value)
    except SchemaError as error:
        raise PlanError(f"{path}: {error}") from error
    return config


_Place = tuple[str, ...]


def _entries(config: dict[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """Yield the keys that lead to each entry of `config` and of all objects in it, and its value, a list as a whole."""
    left: list[tuple[_Place, Any]] = [((), config)]
    while left:
        above, value = left.pop()
        if isinstance(value, dict):
            for key, each in value.items():
                yield (*above, key), each
                left.append(((*above, key), each))
        elif isinstance(value, list):
            left += [(above, each) for each in value if isinstance(each, (dict, list))]


def _check(place: _Place, value: Any) -> None:
    """Raise `SchemaError` if `value` is impossible for the last key of `place`."""
    key = place[-1]
    if "_implementation" in key:
        for each in _leaves(list(value.values()) if isinstance(value, dict) else value):
            _shape(place, _refuse_code, each)
    words = _WORDS.findall(key.lower())
    numbers = [each for each in _leaves(value) if type(each) in (int, float)]
    if not words or not numbers or _NO_SIZES.intersection(words):
        return
    counted = words[0] in _COUNTED
    if words[-1] in _BLOCKS or (counted and words[-1] in _SINGLE):
        for each in numbers:
            _shape(place, number(0, _MOST_BLOCKS, "a number of layers"), each)
    elif counted or words[-1] in _LISTED:
        least = 0 if words[-1] in _LISTED else -1
        for each in numbers:
            _shape(place, number(least, _MOST_LISTED, "a number"), each)
    for each in numbers:
        _shape(place, number(-_MOST, _MOST, "a size"), each)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield `value`, or what the lists in it hold."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        else:
            yield each


def _refuse_code(value: Any) -> None:
    if isinstance(value, str) and "/" in value:
        problem = (
            f"expected an implementation that transformers has, got {shown(value)}, which would have to be fetched"
        )
        raise SchemaError(problem)


def _shape(place: _Place, shape: Shape, value: Any) -> None:
    try:
        shape(value)
    except SchemaError as error:
        for key in reversed(place):
            error.within(key)
        raise


def check_parameters(config: Any, path: Path) -> None:
    """Raise `PlanError` if the least that `config`, or a part of it, describes is more than `MOST_PARAMETERS`: a square
    weight of its hidden size for each layer, and a row of it for each token of the vocabulary.

    A configuration of transformers gives these three by one name, whatever its family calls them.
    """
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]
    for part in parts:
        hidden, layers, tokens = (
            value if type(value := getattr(part, name, 0)) is int else 0
            for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        least = layers * hidden**2 + tokens * hidden
        if least > MOST_PARAMETERS:
            raise PlanError(
                f"{path}: hidden_size {hidden:,} with {layers:,} layers and a vocab_size of {tokens:,} makes at least "
                f"{least:.2g} parameters: expected at most {MOST_PARAMETERS:.0e}"
            )
