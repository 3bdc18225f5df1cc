"""Binds weights that a function meets unbound: each is on the device for the length of that function.

Note "classes": while something computes, a parameter that is not bound for a call of a module gets a
subclass with a `__torch_function__`, so only functions that meet such a parameter cost anything. A bound one gets a
subclass without it, whose `.data` is a property, as writes through that count no versions. The object and `isinstance`
stay as they are; torch does the same to parameters without a shape (`torch.nn.parameter.UninitializedParameter`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.gradients import GradientSink
from hetmem.engine.runtime import Runtime, in_backward
from hetmem.errors import ManageError
from hetmem.intercept.async_params import hands_out, is_in_place
from hetmem.intercept.dynamo import set_compiler, skipped
from hetmem.intercept.saved_tensors import SavedTensors
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK

_get_compiler: Any = torch_private.eval_frame.get_eval_frame_callback
_AsItIs: Any = torch_private.NoFunctionsOfSubclasses


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
_POINTERS = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    *_getters("__cuda_array_interface__"),
}
"""What says where a weight lies: it stays there until the call of the module around that is over. The handle of a
storage is one for all that ask for it, and who holds that is not counted."""
_SET_DATA = _TENSOR.data.__set__
_GET_DATA = _TENSOR.data.__get__
_CALL_NO_FUNCTION = {_SET_DATA, torch.tensor, torch.Tensor.new_tensor, torch.ops.aten.set_.source_Tensor}


def _writes_to(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """What `func`, which is in place, may write to: the first of `args`, but all where it has several outputs, as
    `_fused_adam_` has."""
    return (*args, *kwargs.values()) if kwargs or func.__name__.startswith("_") else args[:1]


class Faults:
    """Binds managed parameters of one model to their device copies for the length of each function that meets them."""

    def __init__(self, runtime: Runtime, gradients: GradientSink, saved: SavedTensors, around: Any) -> None:
        self._runtime, self._gradients, self._saved = runtime, gradients, saved
        self._around: Callable[[], Any] = weakref.ref(around)
        """The `Interception`, which knows what computes around a function: it imports this."""
        self._by_id = runtime.bindings.by_id
        with runtime.unwatched():
            self._on_device = torch.empty(0, device=runtime.memory.device.torch_device)
        self._kinds: dict[type, tuple[type, type]] = {}
        for managed in runtime.parameters:
            managed.kind = type(managed.parameter)
            managed.bound_kind, managed.unbound_kind = self._kinds_of(managed.kind)
            if managed.kind is torch.nn.Parameter:
                saved.kinds.add(managed.bound_kind)

    def _kinds_of(self, kind: type) -> tuple[type, type]:
        if kind not in self._kinds:
            own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "hetmem_faults": weakref.ref(self)}
            bound = type(kind.__name__, (_Bound, kind), dict(own))
            self._kinds[kind] = bound, type(kind.__name__, (_Unbound, kind), dict(own))
        return self._kinds[kind]

    def _bound(self, parameter: Any) -> ManagedParameter | None:
        """What `parameter` is, or works for, whose `.data` the program asks for: see `WorkingWeights.serve`."""
        around = self._around()
        if around is not None:
            around.working.serve = False
        managed = self._by_id.get(id(parameter))
        return around.working.parameter_of(parameter) if managed is None and around is not None else managed

    def data_of_bound(self, parameter: Any) -> torch.Tensor:
        """Return `parameter.data`, through which the program may write."""
        managed = self._bound(parameter)
        if managed is not None:
            managed.data_taken = True
        found: torch.Tensor = _GET_DATA(parameter)
        return found

    def set_data_of_bound(self, parameter: Any, value: torch.Tensor) -> None:
        """`parameter.data = value`, from here on, and at home."""
        if value is parameter:  # as `Module.to` sets it, which is no write
            return
        managed = self._bound(parameter)
        if managed is None:
            _SET_DATA(parameter, value)
            return
        if managed.parameter is not parameter:
            raise ManageError(
                f"{managed.name}.data is set within a forward for the first time: call the model again, which keeps it "
                f"from now on, or write with torch.no_grad() and .copy_(value)"
            )
        with HELD_BACK, torch.no_grad():
            value = value.data if isinstance(value, _Unbound) else value
            self._runtime.uses.set_bound(managed, value)

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`, where a parameter that is not bound is among the arguments."""
        asks = _ASKS.get(func)
        if asks is _Asks.FACT or self._runtime.monitor.paused:
            with _AsItIs():
                return func(*args, **kwargs)
        used: list[ManagedParameter] = []
        self._find(args, used)
        if kwargs:
            self._find(kwargs.values(), used)
        if not used:  # a copy of a parameter, with its class
            with _AsItIs():
                return func(*args, **kwargs)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs, used)
        around = self._around()
        if around is None or not around.computes():
            return self._at_home(func, args, kwargs, used)
        if asks is not None:
            return self._answer(asks, func, used[0], args, kwargs)
        with HELD_BACK:
            return self._operator(func, args, kwargs, used, around)

    def _find(self, values: Iterable[Any], used: list[ManagedParameter]) -> None:
        """Add the parameters among `values` (lists and tuples within included) that are not bound to `used`, once."""
        for value in values:
            if isinstance(value, _Unbound):
                managed = self._by_id.get(id(value))
                if managed is not None and managed not in used:
                    used.append(managed)
            elif isinstance(value, (list, tuple)):  # or one with names
                self._find(value, used)
            elif isinstance(value, dict):
                self._find(value.values(), used)

    def _answer(
        self, asks: _Asks, func: Any, managed: ManagedParameter, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """No operator, and often asked: a model looks at a shape more often than it computes something."""
        if asks is _Asks.LAYOUT:
            return func(managed.home, *args[1:], **kwargs)
        if asks is _Asks.PLACE:
            return func(self._on_device, *args[1:], **kwargs)
        dtype = managed.chunk.compute_dtype
        return dtype if asks is _Asks.DTYPE else dtype.is_floating_point

    def _operator(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], used: list[ManagedParameter], around: Any
    ) -> Any:
        if func == _SET_DATA and used[0].parameter is args[0]:
            return self._set_data(used[0], args[1])
        if self._gradients.within_step or in_backward():
            self._gradients.use_again(used)
        if in_backward():
            self._saved.enter_node()
        works = around.meets_unbound(hands_out=func == _GET_DATA)
        self._runtime.uses.use(_name(func), used)
        stays, displaced, casts = False, self._saved.displace_others(used), self._saved.casts
        left, alone = casts.leave_cache(), works and self._saved.enter_function()
        try:
            casts.renew(used)
            return run_again([self._runtime], func, args, kwargs)
        finally:
            self._saved.restore_others(displaced)
            if alone:
                self._saved.leave_function()
            if left is not None:
                casts.enter_cache_again(left)
            stays = func in _POINTERS and around.keep(used)
            if not stays:
                written = used if is_in_place(func) and self._are_among(used, _writes_to(func, args, kwargs)) else ()
                self._runtime.uses.end_use(used, untracked=func in (_SET_DATA, _GET_DATA), writes=written)
                casts.drop(used)

    def _are_among(self, used: list[ManagedParameter], values: Iterable[Any]) -> bool:
        parameters = {id(managed.parameter) for managed in used}
        return any(
            id(value) in parameters or (isinstance(value, (list, tuple)) and self._are_among(used, value))
            for value in values
        )

    def _backward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], used: list[ManagedParameter]) -> Any:
        """No operator, though it is called as one: it runs nodes, and the user's hooks between them."""
        for managed in used:
            managed.parameter.__class__ = managed.kind
        self._gradients.sent_home += used  # where `backwards` is told they rest again
        try:
            return func(*args, **kwargs)
        finally:
            self._gradients.rest_again()

    def _at_home(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], used: list[ManagedParameter]) -> Any:
        """Call `func` outside of compute, as a hook of the user in a backward does: with parameters at home, as the
        last step left them. On another thread than that of the compute this waits for the turn."""
        bindings = self._runtime.bindings
        with self._runtime.turn.held("reading a weight"):
            with HELD_BACK:
                self._gradients.use_again(used)
                for managed in used:
                    self._runtime.uses.read_at_home(managed)
            there = [managed for managed in used if bindings.send_home(managed)]
            try:
                result = func(*args, **kwargs)
                self._runtime.writes.kept.update(managed for managed in used if hands_out(managed, func, result))
                return result
            finally:
                with HELD_BACK:
                    self._runtime.uses.rest_again(there)

    def _set_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within a forward: the value goes home."""
        if value is managed.parameter:  # as `Module.to` sets it, which is no write
            return
        with torch.no_grad():
            if isinstance(value, _Unbound):  # which may have no values now
                value = value.data
            self._runtime.uses.data_set(managed, value)


def refuse_to_hand_out(func: Any, args: Sequence[Any]) -> None:
    """Raise `ManageError` for `other.data = weight`, `torch.tensor(weight)` and the like, which call no
    `__torch_function__` for the weight: where no mode is around they would get its stand-in."""
    if func not in _CALL_NO_FUNCTION or not isinstance(args[-1], _Unbound):
        return
    if func != _SET_DATA or not isinstance(args[0], (_Unbound, _Bound)):
        raise ManageError(
            f"{_name(func)} of torch was given a weight itself within a forward, where that is on the device only for "
            f"functions that torch tells of: write other.data = weight.data, or other = weight.detach().clone()"
        )


def run_again(runtimes: Sequence[Runtime], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`; once more with the memory of idle chunks of `runtimes` where the device has none left,
    unless `func` may have written."""
    try:
        return func(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        if is_in_place(func) or "out" in kwargs:
            raise _explained(runtimes, error) from None
        for runtime in runtimes:
            runtime.uses.out_of_memory()
    try:
        return func(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        raise _explained(runtimes, error) from None


def _explained(runtimes: Sequence[Runtime], error: Exception) -> Exception:
    """`error`, which also says who holds what."""
    said = [runtime.room.refusals.said for runtime in runtimes if runtime.room.refusals.said]
    if said:
        error.args = ("\n".join([str(error), *said]),)
    return error


def _name(func: Any) -> str:
    name: str | None = getattr(func, "__name__", None)
    return str(func) if name is None else name


class _Bound:
    """Is the first base of the class of a parameter bound for a call of a module; the second is the class it had."""

    hetmem_faults: Callable[[], Faults | None]

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor."""
        faults = self.hetmem_faults()
        found: torch.Tensor = _GET_DATA(self) if faults is None else faults.data_of_bound(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        faults = self.hetmem_faults()
        if faults is None:
            _SET_DATA(self, value)
        else:
            faults.set_data_of_bound(self, value)

    def __deepcopy__(self, memo: Any) -> Any:
        return _as_plain(self, "__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self, "__reduce_ex__", protocol)


def _as_plain(parameter: Any, method: str, argument: Any) -> Any:
    """What the parameter's own class makes of it, which is of that class."""
    bound = type(parameter)
    parameter.__class__ = bound.__mro__[2]  # behind `_Bound`
    try:
        return getattr(parameter, method)(argument)
    finally:
        parameter.__class__ = bound


class _Unbound:
    """Is the first base of the class of an unbound parameter during compute; the second is the class that it had."""

    hetmem_faults: Callable[[], Faults | None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never called, as none is made of this class. A class with such a method is traced by no compiler: where a
        function that is compiled by itself meets one, the graph ends."""
        raise AssertionError(f"{func} was dispatched to a parameter")

    @classmethod
    @skipped
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # never true where this runs
            torch._dynamo.graph_break("a weight that hetmem manages, in a function that is compiled by itself")
            return func(*args, **(kwargs or {}))
        faults = cls.hetmem_faults()
        if faults is None:
            with _AsItIs():
                return func(*args, **(kwargs or {}))
        compiler = _get_compiler()
        if compiler is not None:
            set_compiler(None)
        try:
            return faults(func, args, kwargs or {})
        finally:
            if compiler is not None:
                set_compiler(compiler)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._as_it_was("__deepcopy__", memo)

    def as_subclass(self, cls: Any) -> Any:
        """Return what torch does, which calls no `__torch_function__` for it."""
        return self._as_it_was("as_subclass", cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_it_was("__reduce_ex__", protocol)

    def _as_it_was(self, method: str, argument: Any) -> Any:
        """What the parameter's own class does, as if that were a function of torch's."""

        def call(parameter: Any) -> Any:
            return getattr(super() if isinstance(parameter, _Unbound) else parameter, method)(argument)

        faults = type(self).hetmem_faults()
        return call(self) if faults is None else faults(call, (self,), {})
