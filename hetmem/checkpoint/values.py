"""Values of Python as JSON and back, beside the tensors in them: what a scheduler, a generator or a counter keeps.

Reading makes the plain types below and nothing else: no code of the file's choice ever runs. JSON's own types, with
floats bit for bit, stand for themselves; every other one is an object of a single key that names it.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hetmem.errors import CheckpointError

_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_TAGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"} | {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_NUMPY_KINDS = "biufc"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Encoder:
    """Encodes values; `tensors` has those that were in them, by the names under which they are to be stored."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, place: str) -> Any:
        """`value` for JSON; its tensors are named after `place`, where it is ("extra:scheduler").

        Raises `CheckpointError` that names the place of what cannot be stored.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(part, f"{place}:{number}") for number, part in enumerate(value)]
        if kind in _MAPPINGS.values():
            return {_TAGS[kind]: [self._item(key, part, place) for key, part in value.items()]}
        if kind in _TAGS:
            return {_TAGS[kind]: [self.encode(part, f"{place}:{number}") for number, part in enumerate(value)]}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (bytes, bytearray):
            return {kind.__name__: base64.b64encode(value).decode("ascii")}
        if kind is torch.dtype:
            return {"dtype": str(value)}
        if isinstance(value, (np.ndarray, np.generic)) and _is_plain(value):
            array = "array" if isinstance(value, np.ndarray) else "scalar"
            data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
            return {array: [value.dtype.str, list(value.shape), data]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._store(value, place)}
        raise CheckpointError(
            f"cannot save {place.replace(':', ' → ')}, a {kind.__module__}.{kind.__qualname__}: a checkpoint has "
            f"numbers, text, bytes, tensors, arrays, and lists, tuples, sets and dicts of them, as loading runs no code"
        )

    def _item(self, key: Any, value: Any, place: str) -> list[Any]:
        return [self.encode(key, f"{place}:key"), self.encode(value, f"{place}:{key}")]

    def _store(self, tensor: torch.Tensor, place: str) -> str:
        name, count = place if ":" in place else f"{place}:", 1
        while name in self.tensors:
            count += 1
            name = f"{place}:#{count}"
        self.tensors[name] = tensor
        return name


def _is_plain(value: Any) -> bool:
    """Whether an array, or a number, of numpy is no more than its elements: a masked one is."""
    return value.dtype.kind in _NUMPY_KINDS and not isinstance(value, np.ma.MaskedArray)


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """What was encoded; `tensor` gives those of a name. Raises `CheckpointError` for what no encoder makes."""
    try:
        return _decode(value, tensor)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a value in the checkpoint is not understood: {error!r}") from error


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({_decode(key, tensor): _decode(part, tensor) for key, part in body})
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode(part, tensor) for part in body])
    if tag == "tensor":
        return tensor(body)
    if tag == "complex":
        return complex(*body)
    if tag in ("bytes", "bytearray"):
        data = base64.b64decode(body, validate=True)
        return data if tag == "bytes" else bytearray(data)
    if tag == "dtype":
        return _DTYPES[body]
    if tag in ("array", "scalar"):
        dtype, shape, data = np.dtype(body[0]), body[1], base64.b64decode(body[2], validate=True)
        if dtype.kind not in _NUMPY_KINDS:
            raise ValueError(f"arrays of {dtype}")
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        return array if tag == "array" else array[()]
    raise ValueError(f"unknown kind {tag!r}")
