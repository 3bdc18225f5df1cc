"""Collects the content of a checkpoint by name: the tensors of a model and an optimizer themselves, not copies.

Knows torch's modules and optimizers. Must not know files, nor where the memory of a tensor is.

Python values (states of schedulers, generators, counters) are stored as JSON, and tensors in them apart. Decoding makes
the plain types below only, so a file cannot run code. JSON's own types, with floats bit for bit, stand for themselves;
every other type is an object with a single key that names it.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from hetmem.base import schema
from hetmem.base.json_files import check_name
from hetmem.base.schema import anything, or_null, record, shown, whole
from hetmem.checkpoint.coded import CodedWeight, coded_weight
from hetmem.checkpoint.layout import EXTRA, OPTIMIZER, malformed_refused
from hetmem.errors import CheckpointError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.intercept.watched import detached
from hetmem.memory.interrupts import HELD_BACK
from hetmem.optim.optimizer import OffloadedOptimizer
from hetmem.torch_private import is_traceable_wrapper_subclass

_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in (_MAPPINGS | _SEQUENCES).items()}
_NUMPY_KINDS = "biufc"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Encoder:
    """Encodes values as JSON; `tensors` collects the tensors in them, by the names to store them under."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, place: str) -> Any:
        """Return `value` as JSON types; tensors in it are named after its `place` ("extra:scheduler").

        Raises `CheckpointError`, which names the place of a value that cannot be stored.
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
        place = place.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")  # other programs take no others
        name, count = place if ":" in place else f"{place}:", 1
        while name in self.tensors:
            count += 1
            name = f"{place}:#{count}"
        self.tensors[name] = tensor
        return name


def _is_plain(value: Any) -> bool:
    """Return whether an array or a number of numpy consists of its elements alone; a masked array does not."""
    return value.dtype.kind in _NUMPY_KINDS and not isinstance(value, np.ma.MaskedArray)


def decode(value: Any, tensor: Callable[[str], Any], place: str) -> Any:
    """Return the value that was encoded; `tensor` gives the tensor of a name. Raises `CheckpointError`, which names its
    `place` in the file, if it is malformed."""
    with malformed_refused(f"{place} in the checkpoint is not understood"):
        return _decode(value, tensor)


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if (tag in _MAPPINGS or tag in _SEQUENCES) and type(body) is not list:
        raise ValueError(f"a {tag} of {shown(body)}")
    if tag in _MAPPINGS:
        made = {_decode(key, tensor): _decode(part, tensor) for key, part in body}
        if len(made) < len(body):
            raise ValueError("a key comes twice")
        return _MAPPINGS[tag](made)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode(part, tensor) for part in body])
    if tag == "tensor":
        return tensor(body)
    if tag == "complex":
        real, imag = body
        return complex(float(real), float(imag))
    if tag in ("bytes", "bytearray"):
        data = base64.b64decode(body, validate=True)
        return data if tag == "bytes" else bytearray(data)
    if tag == "dtype":
        return _DTYPES[body]
    if tag in ("array", "scalar"):
        name, shape, data = body
        if not re.fullmatch(f"[<>=|]?[{_NUMPY_KINDS}][0-9]{{1,2}}", name) or (tag == "scalar" and shape):
            raise ValueError(f"an {tag} of {shown(name)} and shape {shown(shape)}")
        array = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(name)).reshape(shape).copy()
        return array if tag == "array" else array[()]
    raise ValueError(f"unknown kind {shown(tag)}")


@dataclass(frozen=True, slots=True)
class ModelState:
    """The `state_dict` of a model: its `tensors` by their first names; the first name by each other one (`tied`); and
    values that its modules make for a state dict (`made`: extra state). `coded` has the quantised weights, whose
    `tensors` are their bytes."""

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    made: dict[str, Any]
    coded: dict[str, CodedWeight]

    @property
    def names(self) -> set[str]:
        """All keys of the state dict."""
        return {*self.tensors, *self.tied, *self.made}

    @property
    def aliases(self) -> dict[str, list[str]]:
        """All names of each tensor, by the first."""
        found = {name: [name] for name in self.tensors}
        for name, first in self.tied.items():
            found[first].append(name)
        return found


_SHOWN = 5
"""The most names in a message."""


def other_model(what: str, problems: list[str], *ways_out: str) -> CheckpointError:
    """Return the error that says why `what` ("the checkpoint is") of another model."""
    more = [f"… {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return CheckpointError(f"{what} of another model: {'; '.join([*problems[:_SHOWN], *more, *ways_out])}")


@contextmanager
def all_of(model: Any, what: str) -> Iterator[None]:
    """Keep other threads from computing with `model` during the block; `of_model` refuses what is no module."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    with registry.turn_with(model.parameters(), what):
        yield


def end_saves(model: Any) -> list[Interception]:
    """Wait until no save of `model` runs in the background; return those that manage its parameters. Raises the error
    of one that failed, if nothing has yet."""
    managed = registry.managed_among(model.parameters()) if isinstance(model, torch.nn.Module) else {}
    for each in managed:
        each.runtime.outgoing.wait_for_all()
        each.runtime.outgoing.raise_error()
    return [*managed]


def refuse_other_than_modules(model: Any) -> None:
    """Raise `CheckpointError` unless `model` is a module, as where it was given in the place of the path."""
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(f"expected (path, model, …) with a torch.nn.Module as model, got {type(model).__name__}")


def of_model(model: torch.nn.Module) -> ModelState:
    """Return the state of `model`. Raises `CheckpointError` within its forward or backward, and for reserved names."""
    _refuse_running(model)
    own = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    first: dict[int, str] = {}
    state = ModelState({}, {}, {}, {})
    for name, value in model.state_dict(keep_vars=True).items():
        if name.startswith((OPTIMIZER, EXTRA)) or name == "__metadata__":
            raise CheckpointError(
                f"the model has a tensor called {name!r}, a name that a checkpoint keeps for itself: rename it"
            )
        try:
            check_name(name)
        except ValueError as error:
            raise CheckpointError(f"{error}, which a checkpoint cannot have: rename that part of the model") from error
        if torch.nn.parameter.is_lazy(value):
            raise CheckpointError(f"{name} has no shape yet: call the model once before")
        if id(value) not in own:
            state.made[name] = value
        elif id(value) in first:
            state.tied[name] = first[id(value)]
        else:
            first[id(value)] = name
            if (coded := coded_weight(value)) is None:
                state.tensors[name] = detached(value)
            else:
                state.coded[name], state.tensors[name] = coded, coded.codes
    return state


def _refuse_running(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        found = registry.of_parameter(parameter)
        if found is not None and not found[0].at_rest():
            raise CheckpointError("the model is running: save and load it after forward and backward, not within")


@HELD_BACK
def refuse_half_stepped(model: torch.nn.Module, way_out: str, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise `CheckpointError` if a step has begun to change weights of `model` and has not ended; weights of
    `optimizer` are exempt. Without `optimizer`, wait for updates and transfers in flight first; one that failed raises
    its error."""
    own = {id(each) for each in parameters_of(optimizer)} if isinstance(optimizer, OffloadedOptimizer) else set[int]()
    found = filter(None, map(registry.of_parameter, model.parameters()))
    for interception in dict.fromkeys(interception for interception, _ in found):
        for listener in list(interception.gradients.listeners):
            if not own:
                listener.synchronize()
            if any(id(managed.parameter) not in own for managed in listener.begun()):
                raise CheckpointError(f"some weights are one step further than others: {way_out}")


def parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its `id`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def encode_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, encoder: Encoder) -> dict[str, Any]:
    """Return `optimizer.state_dict()` by names of parameters instead of numbers. Raises `CheckpointError` for a value
    that cannot be stored, and a parameter that `model` does not have."""
    beside = None
    if isinstance(optimizer, OffloadedOptimizer):
        beside = optimizer.beside_states()
    names = name_numbers(optimizer, model)
    found = optimizer.state_dict()
    groups = []
    for place, group in enumerate(found["param_groups"]):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {
                "params": [names[number] for number in group["params"]],
                "options": encoder.encode(options, f"{OPTIMIZER}:group {place}"),
            }
        )
    state, others = {}, {}
    for number, values in found["state"].items():
        if number in names:
            state[names[number]] = encoder.encode(values, f"{OPTIMIZER}{names[number]}")
        else:
            others[number] = values
    return {
        "groups": groups,
        "state": state,
        "others": encoder.encode(others, f"{OPTIMIZER}:others"),
        "defaults": sorted(map(str, optimizer.defaults)),
        "strides": _strides(optimizer, names, found["state"]),
        "beside": encoder.encode(beside, f"{OPTIMIZER}:beside"),
    }


def _strides(optimizer: torch.optim.Optimizer, names: dict[int, str], state: dict[Any, Any]) -> dict[str, list[int]]:
    """Return the strides of parameters with states of other shapes: these may be in the order of the memory."""
    return {
        names[number]: strides_of(parameter)
        for number, parameter in enumerate(parameters_of(optimizer))
        for shapes in [{value.shape for value in state.get(number, {}).values() if isinstance(value, torch.Tensor)}]
        if shapes - {parameter.shape, torch.Size()}
    }


def cannot_fill(name: str, tensor: torch.Tensor) -> Iterator[str]:
    """Yield why values cannot be loaded into `tensor`, which the model has as `name`; nothing if they can."""
    if tensor.is_meta:
        yield f"{name} is on the meta device in the model, without memory to load into"
    elif tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        yield f"{name} is no dense tensor in the model, but a {type(tensor).__name__} of {tensor.layout}"
    elif any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        yield f"{name} is expanded in the model, so that elements share memory: give the model a clone() of it"


def strides_of(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions of `tensor` with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def name_numbers(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[int, str]:
    """Return the first name of each parameter of `optimizer`, by its number in `state_dict`. Raises `CheckpointError`
    for one that `model` does not have."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    names = parameter_names(model)
    found = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in names:
            raise CheckpointError(
                f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, is not one of the model"
            )
        found[number] = names[id(parameter)][0]
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters of `optimizer` in the order of their numbers in `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_option(name: str, value: Any, own: Any = ...) -> None:
    """Raise `CheckpointError` if `value`, saved for an option that the optimizer has as `own`, is of another kind than
    that or a number that is not finite. Without `own` it may be anything else."""
    expected = None
    if _is_real(value) and not math.isfinite(value) and not (_is_real(own) and float(value) == float(own)):
        expected = "a finite number"
    elif isinstance(own, bool) and not isinstance(value, (bool, type(None))):
        expected = "true, false or none"
    elif _is_real(own) and not isinstance(own, bool) and (not _is_real(value) or isinstance(value, bool)):
        expected = "a number"
    elif isinstance(own, (tuple, list)) and not (isinstance(value, (tuple, list)) and len(value) == len(own)):
        expected = f"{len(own)} values"
    elif isinstance(own, str) and not isinstance(value, (str, type(None))):
        expected = "text or none"
    elif own is None and not (value is None or isinstance(value, str) or _is_real(value)):
        expected = "a number, text, true, false or none"
    if expected:
        raise CheckpointError(f"{name} in the checkpoint: expected {expected}, got {shown(value)}")
    if isinstance(value, (tuple, list)):
        each_own = own if isinstance(own, (tuple, list)) else [...] * len(value)
        for part, own_part in zip(value, each_own, strict=True):
            refuse_option(name, part, own_part)


def refuse_state(place: str, state: dict[Any, Any]) -> None:
    """Raise `CheckpointError` if the saved `state` of a parameter has other keys than names, or a step count that is
    none."""
    for key in state:
        if type(key) is not str:
            raise CheckpointError(f"{place} in the checkpoint: expected names of states, got {shown(key)}")
    step = state.get("step", 0)
    if not (_is_real(step) and math.isfinite(step) and step >= 0):
        raise CheckpointError(f"{place} in the checkpoint: expected a step count, got {shown(step)}")


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float))


_BESIDE = or_null(
    record(
        {
            "loss_scale": or_null(record({"value": anything, "skipped": whole(), "finite_in_a_row": whole()})),
            "seed": or_null(whole(-schema.MOST)),
        }
    )
)


def check_beside(beside: Any) -> None:
    """Raise `CheckpointError` for what `load_beside_states` of an optimizer would not take."""
    try:
        _BESIDE(beside)
        scale = beside and beside["loss_scale"] and beside["loss_scale"]["value"]
        if scale is not None and not (_is_real(scale) and math.isfinite(scale) and scale > 0):
            raise schema.expected("a finite number above zero", scale).within("value").within("loss_scale")
    except schema.SchemaError as error:
        raise CheckpointError(f"the loss scale or seed in the checkpoint is not understood: {error}") from error
