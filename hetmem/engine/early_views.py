"""Views of weights that a module keeps from before it is managed: they show what is not the weight any more.

`self.turned = self.weight.T` in an `__init__` is a view of the memory that the weight has then, and `manage` moves that
elsewhere. So such a view is refused, wherever the module has it: in an attribute, a buffer, a container, a function
that it has made. What others hold (a `state_dict`, the tensor that weights were made of) computes nothing in the
module, and keeps what it shows.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from hetmem.engine.param_views import storage_references
from hetmem.errors import ManageError
from hetmem.torch_private import is_traceable_wrapper_subclass

_OBJECTS_DEEP = 2
"""So far beyond a module objects are looked into that are neither modules nor containers: a cache, a configuration."""
_AT_MOST = 100_000
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype, torch.device)


def refuse_early_views(module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise `ManageError` for a view of one of `parameters` that `module`, whose they are, keeps."""
    of_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        of_storage.setdefault(parameter.untyped_storage()._cdata, []).append(name)
    held = {
        key: names
        for key, names in of_storage.items()
        if storage_references(parameters[names[0]]) > len(names) + 1 and parameters[names[0]].data_ptr()
    }
    own = {id(parameter) for parameter in parameters.values()}
    for path, tensor in _tensors_of(module) if held else ():
        if id(tensor) in own or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            continue
        for name in held.get(tensor.untyped_storage()._cdata, ()):
            if _overlap(tensor, parameters[name]):
                raise ManageError(
                    f"{path} is a view of {name} that was made before hetmem.manage, and would go on showing what the "
                    f"weight is now: make it in forward, where it is needed, or delete it before hetmem.manage"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (start, end), (other_start, other_end) = _span(one), _span(other)
    return start < other_end and other_start < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.itemsize


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `module` leads to, and how."""
    found: deque[tuple[str, Any, int]] = deque((name, part, 0) for name, part in module.named_modules())
    seen = {id(part) for part in module.modules()}
    for _ in range(_AT_MOST):
        if not found:
            return
        path, value, deep = found.popleft()
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        is_object = not isinstance(value, _CONTAINERS)
        if is_object and deep > _OBJECTS_DEEP:
            continue
        for name, part in _parts(value):
            if not isinstance(part, _LEAVES) and id(part) not in seen:
                seen.add(id(part))
                found.append((f"{path}{name}".lstrip("."), part, deep + is_object))


_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` holds, and how it is written behind what leads to `value`."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        kept = ((f" (its {name})", cell.cell_contents) for name, cell in cells if _is_full(cell))
        yield from itertools.chain(kept, ((" (a default)", value.__defaults__), (" (a default)", value.__kwdefaults__)))
    elif isinstance(value, np.ndarray):
        yield "", value.base
    elif isinstance(value, torch.nn.Module):
        computed = {getattr(hook, "name", None) for hook in value._forward_pre_hooks.values()}  # torch's spectral_norm
        attributes = {**vars(value), **value._buffers, **value._parameters}
        yield from ((f".{name}", part) for name, part in attributes.items() if name not in computed | _OF_MODULES)
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
