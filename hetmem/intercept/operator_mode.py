"""Parameters on the device for the length of each operator that uses them: a function mode, and what it knows of torch.

Note "operator faults": outside operators a parameter is its home. The mode looks at the arguments of each torch
function: a managed parameter is bound to its device copy for that one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch

from hetmem.engine.gradients import GradientSink, hide_gradients, show_gradient
from hetmem.engine.running import in_backward
from hetmem.engine.runtime import Runtime
from hetmem.intercept.saved_tensors import SavedTensors
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK


class _Asks(Enum):
    """What a function asks of a parameter without touching its elements."""

    FACT = auto()
    """What its home says as well."""
    LAYOUT = auto()
    """What a stand-in, which takes no memory, would say wrongly."""
    PLACE = auto()
    """Where it is: for operators, on the device."""
    DTYPE = auto()
    IS_FLOATING = auto()


def _getters(names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names.split() if hasattr(torch.Tensor, name)]


_TENSOR: Any = torch.Tensor
_FACTS = [
    *_getters(
        "shape requires_grad grad grad_fn is_leaf layout ndim is_sparse is_quantized is_meta is_mkldnn "
        "is_nested output_nr _version retains_grad name names volatile _backward_hooks _post_accumulate_grad_hooks "
        "_base _grad"
    ),
    *(
        getattr(torch.Tensor, name)
        for name in (
            "size dim numel nelement ndimension storage_offset register_hook "
            "register_post_accumulate_grad_hook requires_grad_ __hash__ __len__ is_same_size retain_grad"
        ).split()
    ),
    _TENSOR.grad.__set__,
    _TENSOR.requires_grad.__set__,
    torch.numel,
    torch.is_same_size,
]
_ASKS: dict[Any, _Asks] = {
    **dict.fromkeys(_FACTS, _Asks.FACT),
    **dict.fromkeys((torch.Tensor.stride, torch.Tensor.is_contiguous), _Asks.LAYOUT),
    **dict.fromkeys((*_getters("device is_cuda is_cpu"), torch.Tensor.get_device), _Asks.PLACE),
    _TENSOR.dtype.__get__: _Asks.DTYPE,
    **dict.fromkeys((torch.Tensor.is_floating_point, torch.is_floating_point), _Asks.IS_FLOATING),
}

_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}

_SET_DATA = _TENSOR.data.__set__
_GET_DATA = _TENSOR.data.__get__


def _name(func: Any) -> str:
    name: str | None = getattr(func, "__name__", None)
    return str(func) if name is None else name


def _writes(func: Any) -> bool:
    """Whether `func` is in place by its name; some of those (the `_foreach_` ones) count no versions."""
    name: str = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _writes_to(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """What `func`, which is in place, may write to: the first of `args`, but all where it has several outputs, as
    `_fused_adam_` has."""
    return (*args, *kwargs.values()) if kwargs or func.__name__.startswith("_") else args[:1]


class OperatorFaults:
    """Binds managed parameters to their device copies for the length of each operator that uses them."""

    def __init__(self, runtime: Runtime, gradients: GradientSink, saved: SavedTensors) -> None:
        self._saved, self._around = saved, saved.others()
        self._runtime = runtime
        self._gradients = gradients
        self._by_id = runtime.bindings.by_id
        self._half_stepped = gradients.half_stepped
        with runtime.unwatched():
            self._stand_in = torch.empty(0, device=runtime.memory.device.torch_device)

    def __call__(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`."""
        asks = _ASKS.get(func)
        if asks is not None:
            return self._answer(asks, func, args, kwargs)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs)
        with HELD_BACK:
            return self._operator(func, types, args, kwargs)

    def _answer(self, asks: _Asks, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """No operator, and often asked: a model looks at a shape more often than it computes something."""
        managed = None if asks is _Asks.FACT else self._by_id.get(id(args[0] if args else next(iter(kwargs.values()))))
        if managed is None or not self._runtime.memory.streams:
            return func(*args, **kwargs)
        if asks is _Asks.LAYOUT:
            return func(managed.home, *args[1:], **kwargs)
        if asks is _Asks.PLACE:
            return func(self._stand_in, *args[1:], **kwargs)
        dtype = managed.chunk.compute_dtype
        return dtype if asks is _Asks.DTYPE else dtype.is_floating_point

    def _operator(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._runtime.memory.streams:
            return self._stand_by(func, types, args, kwargs)
        used: list[ManagedParameter] = []
        self._find(args, used)
        if kwargs:
            self._find(kwargs.values(), used)
        if not used:
            result = self._run(func, args, kwargs)
            self._runtime.notice_writes_to_views()
            return result
        sets = func == _SET_DATA
        if sets and used[0].parameter is args[0]:
            return self._set_data(used[0], args[1])
        if self._half_stepped or in_backward():
            self._gradients.use_again(used)
        self._runtime.use(_name(func), used)
        try:
            return self._run(func, args, kwargs)
        finally:
            written: list[ManagedParameter] = []
            if _writes(func):
                self._find(_writes_to(func, args, kwargs), written)
            self._runtime.end_use(used, untracked=sets or func == _GET_DATA, writes=used if written else ())

    def weights(self, module: torch.nn.Module) -> list[ManagedParameter]:
        """Those of `module` that are brought to the device for operators."""
        if not self._runtime.memory.streams:
            return []
        return [self._by_id[id(parameter)] for parameter in module.parameters() if id(parameter) in self._by_id]

    def begin_region(self, name: str, used: list[ManagedParameter]) -> Any:
        """`used` are bound until `end_region` is called with what this returns; see note "regions"
        in `compile_regions`."""
        if self._half_stepped or in_backward():
            self._gradients.use_again(used)
        if used:
            self._runtime.use(name, used)
        self._saved.region = name, used
        return self._saved.displace_others(self._around), hide_gradients(used)

    def end_region(self, used: list[ManagedParameter], begun: Any) -> None:
        """On the thread of `begin_region`, or on any if that one was interrupted."""
        others, hidden = begun
        self._saved.region = None
        self._saved.restore_others(others)
        self._runtime.end_region(used)
        for parameter, gradient in hidden:
            show_gradient(parameter, gradient)

    def _stand_by(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The model is whole on the device, where operators find it, until there is no memory for one of them."""
        over_others = self._saved.enter_over_others(self._around, aliases=False)
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if _writes(func) or "out" in kwargs:
                raise
            self._runtime.out_of_memory()
            if not self._runtime.memory.streams:
                raise self._explained(error) from None
        finally:
            self._runtime.monitor.left = False
            if over_others:
                self._saved.leave()
        return self(func, types, args, kwargs)

    def _backward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """No operator, though it is called as one: it runs nodes, and the user's hooks between them."""
        with HELD_BACK:
            self._saved.watch_functions((args, kwargs), forward_is_over=False)
        try:
            return func(*args, **kwargs)
        finally:
            with HELD_BACK:
                self._runtime.notice_writes_by_hooks()

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Once more with the memory of idle chunks where the device has none left, unless `func` may have written."""
        over_others = self._saved.enter_over_others(self._around)
        try:
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                if _writes(func) or "out" in kwargs:
                    raise self._explained(error) from None
                self._runtime.out_of_memory()
            return self._again(func, args, kwargs)
        finally:
            if over_others:
                self._saved.leave()

    def _again(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> Exception:
        """`error`, which also says who holds what."""
        if self._runtime.room.refusals.said:
            error.args = (f"{error}\n{self._runtime.room.refusals.said}",)
        return error

    def _find(self, values: Iterable[Any], used: list[ManagedParameter]) -> None:
        """Add the managed parameters among `values` (lists and tuples within included) to `used`, each once."""
        by_id = self._by_id
        for value in values:
            managed = by_id.get(id(value))
            if managed is not None:
                if managed not in used:
                    used.append(managed)
            elif isinstance(value, (list, tuple)):  # or one with names
                self._find(value, used)

    def _set_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within a forward: the value goes home."""
        with torch.no_grad():
            if id(value) in self._by_id:  # which may have no values now
                value = self(torch.clone, (), (value,), {})
            self._runtime.data_set(managed, value)
