"""Functions that get a quantised weight between calls of the model: they get its decoded values, in memory of their
own, and may not write to these. So do functions that get what `state_dict()` has of such a weight.

Note "quantised weights": the `.data` of such a weight is a stand-in without memory, of the true shape and dtype, that
reads as NaN; its class stays that of watched parameters, so each torch function that gets it comes here. Within compute
it is bound to its copy as any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.param_views import is_in_place, set_data
from hetmem.engine.write_check import refused_write
from hetmem.errors import ManageError
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
_FACTS = {
    *(getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, _TENSOR.__len__, _TENSOR.__hash__),
}
"""Functions that are right for a stand-in."""


class ReadLater(torch.Tensor):
    """What `state_dict()` has of a quantised weight, `parameter`, in place of its values: it takes no memory, and each
    function that gets it is called with the parameter, which is decoded then. So writes are refused as there. After
    `hetmem.release` it has the values of the parameter, and once the model is gone, an error.

    Its `.data` is NaN, in case C++ takes that (`other.data = value`). A function that asks for its address gets that of
    values which it keeps from there on.
    """

    parameter: torch.nn.Parameter
    kept: torch.Tensor | None

    @staticmethod
    def __new__(cls, parameter: torch.nn.Parameter, stand_in: torch.Tensor) -> ReadLater:
        """Make one of the shape and dtype of `stand_in`."""
        made: ReadLater = torch_private.make_subclass(cls, stand_in)
        made.parameter, made.kept = parameter, None
        return made

    def __init__(self, parameter: torch.nn.Parameter, stand_in: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [each for each in torch_private.tree_leaves((args, kwargs)) if type(each) is cls]
        if func in _FACTS:
            with _AsItIs():
                return func(*args)
        if func in _ADDRESSES:
            return func(found[0].keep(), *args[1:], **(kwargs or {}))
        given = {id(each): each.parameter for each in found}
        args, kwargs = torch_private.tree_map(lambda each: given.get(id(each), each), (args, kwargs or {}))
        result = func(*args, **kwargs)
        return next((each for each in found if result is each.parameter), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, of C++, with decoded values: `torch.tensor(value)` calls no other function."""
        found = [each for each in torch_private.tree_leaves((args, kwargs)) if type(each) is cls]
        given = {id(each): each.values() for each in found}
        args, kwargs = torch_private.tree_map(lambda each: given.get(id(each), each), (args, kwargs or {}))
        result = func(*args, **kwargs)
        if any(value._version for value in given.values()):
            raise _written_later(func)
        return result

    def set_(self, *_: Any, **__: Any) -> Any:
        """Raise `ManageError`; torch's method calls no `__torch_function__`."""
        raise _written_later("set_")

    def _use_count(self) -> int:
        """Raise `ManageError` for `torch.utils.swap_tensors`."""
        raise _written_later("torch.utils.swap_tensors")

    def values(self) -> torch.Tensor:
        """Return the decoded values, in memory of their own."""
        with torch.no_grad():
            return self.parameter.clone()

    def keep(self) -> torch.Tensor:
        """Return the decoded values, which are kept."""
        if self.kept is None:
            self.kept = self.values()
        return self.kept

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return repr(self.values())


def _written_later(what: object) -> ManageError:
    return ManageError(f"{what} of what state_dict() has of a quantised weight: write to a clone() of it")


def _saves_state() -> bool:
    """Return whether `Module.state_dict()` calls, rather than code of the program."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith("hetmem."):
        frame = frame.f_back
    return frame is not None and frame.f_code is torch_private.SAVES_STATE


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
            raise refused_write(among[id(value)], _name(func) if func == set_data else f"{_name(func)} of it")
    if func in _ADDRESSES:
        raise refused_write(used[0], f"{_name(func)}(), which would refer to values that nothing holds,")
    if func == torch.Tensor.detach and _saves_state():
        return ReadLater(used[0].parameter, used[0].home)
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
