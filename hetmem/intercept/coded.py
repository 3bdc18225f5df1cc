"""Functions that get a quantised weight between calls of the model: they get its decoded values, in memory of their
own, and may not write to these.

Note "quantised weights": the `.data` of such a weight is a stand-in without memory, of the true shape and dtype, that
reads as NaN; its class stays that of watched parameters, so each torch function that gets it comes here. Within compute
it is bound to its copy as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.param_views import is_in_place, set_data
from hetmem.engine.write_check import refused_write
from hetmem.memory.chunk import ManagedParameter

_AsItIs: Any = torch_private.NoFunctionsOfSubclasses
_TENSOR: Any = torch.Tensor
_FREEZE = {torch.Tensor.requires_grad_, _TENSOR.requires_grad.__set__}
_SIZES = {torch.Tensor.size, torch.Tensor.dim}
_ADDRESSES = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    _TENSOR.__dlpack__,
    *(getattr(torch.Tensor, name).__get__ for name in ("__cuda_array_interface__",) if hasattr(torch.Tensor, name)),
}
"""Functions whose results would refer to decoded values that nothing holds."""


def refuse_to_train(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], managed: ManagedParameter) -> None:
    """Raise `ManageError` if `func` has `managed` require gradients."""
    if func in _FREEZE and bool([*args[1:], *kwargs.values(), True][0]):
        raise refused_write(managed, "requires_grad = True")


def at_home(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    used: Sequence[ManagedParameter],
    exchanged: Callable[[dict[int, torch.Tensor]], tuple[Sequence[Any], dict[str, Any]]],
) -> Any:
    """Call `func` with decoded values in the place of `used`; `exchanged` puts them there. Raises `ManageError` for a
    write, and for a function that would hand out an address."""
    if func in _SIZES:
        with _AsItIs():
            return func(*args, **kwargs)
    if func == set_data and args[0] is args[1]:  # as `Module.to` does; no write
        return None
    among = {id(managed.parameter): managed for managed in used}
    for value in _written(func, args, kwargs):
        if id(value) in among:
            raise refused_write(among[id(value)], f"{_name(func)} of it")
    if func in _ADDRESSES:
        raise refused_write(used[0], f"{_name(func)}(), which would refer to values that nothing holds,")
    with torch.inference_mode(False):
        given = {key: torch.nn.Parameter(managed.decoded(), requires_grad=False) for key, managed in among.items()}
    before = {key: value._version for key, value in given.items()}
    args, kwargs = exchanged({**given})
    result = func(*args, **kwargs)
    for key, value in given.items():
        if value._version != before[key]:
            raise refused_write(among[key], f"{_name(func)}, which writes to it,")
    return next((among[key].parameter for key, value in given.items() if result is value), result)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield what `func` may write to without counting a version: its first argument, or all of a fused optimizer."""
    if func == set_data or is_in_place(func):
        yield from _leaves((*args, *kwargs.values()) if _name(func).startswith("_fused") else args[:1])


def _leaves(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _name(func: Any) -> str:
    if func == set_data:
        return "p.data = tensor"
    name: str | None = getattr(func, "__name__", None)
    return str(func) if name is None else name
