"""How torch tells the runtime what it uses: module hooks, a function mode, and saved-tensor hooks. No logic of its own.

Note "operator faults": outside operators a parameter is its home. A function mode looks at the arguments of each
torch function: a managed parameter is bound to its device copy for that one call. Modes and saved-tensor hooks are
entered by the forward hook of whichever module is called first and left when that returns.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from hetmem.memory.chunk import ManagedParameter
from hetmem.runtime.gradients import GradientSink
from hetmem.runtime.runtime import Runtime
from hetmem.runtime.segments import Segments, in_backward, signature
from hetmem.runtime.share import ResidentShare


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps of a weight: where it is, not the memory it had."""

    managed: ManagedParameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    conj: bool
    neg: bool
    version: int


class Interception:
    """The hooks of one managed module, and what is entered while one of its modules runs."""

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self.runtime = runtime
        self.segments = Segments(runtime)
        self.gradients = GradientSink(runtime, self.segments)
        self.share = ResidentShare(runtime, self.gradients)
        self._stack: list[torch.nn.Module] = []
        self._faults = OperatorFaults(runtime, self.gradients)
        self._entered: list[Callable[[], None]] = []
        self._handles: list[Any] = []
        self.arranged, self.removed = False, False
        before, after = BeforeForward(self), AfterForward(self)
        for part in module.modules():
            self._handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(part.register_forward_hook(after, always_call=True))
        reading = BeforeStateDict(self)
        for part in module.modules():
            self._handles.append(part.register_state_dict_pre_hook(reading))
            self._handles.append(part._register_load_state_dict_pre_hook(reading))
        self._buffers = weakref.WeakMethod(module.buffers)
        if runtime.memory.streams:
            for managed in runtime.parameters:
                self.gradients.install(managed)

    def remove(self) -> None:
        """Take all hooks off."""
        self.removed = True
        self.reset()
        self.gradients.remove()
        for handle in self._handles:
            handle.remove()

    # ---- forward -----------------------------------------------------------------------------------------------

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """`module` is about to run; the outermost one enters the modes. Returns what to call it with, if not this.

        With mixed precision float32 inputs are cast to what the module computes in, as FSDP2 does it.
        """
        if self._stack and self._stack[0] is module and _calls_running(module) < 2:
            self.reset()  # the last call ended by an interrupt, which runs no hooks
        self._stack.append(module)
        if len(self._stack) > 1:
            return None
        try:
            dtype = self.runtime.memory.mixed_precision
            if dtype is not None:
                args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            self._enter(module, args, kwargs)
        except BaseException:
            self.reset()
            raise
        return None if dtype is None else (args, kwargs)

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime = self.runtime
        measured = runtime.sanitize
        if not in_backward():
            with runtime.unwatched():
                runtime.writes.notice_all()
            for managed in runtime.parameters:
                if managed.parameter.requires_grad and not managed.grad_hooked and runtime.memory.streams:
                    self.gradients.install(managed)
            measured = self.segments.begin_forward(signature(module, args, kwargs))
        if measured and runtime.memory.device.watched:
            buffers = self._buffers()
            with runtime.unwatched():
                runtime.monitor.count("inputs", tree_leaves((args, kwargs)))
                runtime.monitor.count("buffers", buffers() if buffers is not None else ())
            self._push_mode(runtime.monitor)
            runtime.monitor.transformed = torch._C._functorch.maybe_current_level() is not None
            runtime.monitor.forward_runs = lambda: _calls_running(module) > 0
        if not runtime.memory.streams and not (measured and self.share.may_leave_device):
            return
        self._push_mode(self._faults)
        autograd: Any = torch._C._autograd
        if autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(True) is None:
            # Never on top of a checkpoint's own: it counts what is saved. There, storages hold what is needed.
            autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
            self._entered.append(autograd._pop_saved_tensors_default_hooks)

    def _push_mode(self, mode: Any) -> None:
        mode.__enter__()
        self._entered.append(lambda: _leave_mode(mode))

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """`module` has returned or raised; the outermost one leaves the modes."""
        if not self._stack or self._stack[-1] is not module:
            return
        self._stack.pop()
        if self._stack:
            return
        measured = self.runtime.monitor in _get_current_dispatch_mode_stack()
        self.reset()
        if measured and not in_backward():
            self.runtime.monitor.watch_backward(output)

    def at_rest(self) -> bool:
        """Whether no forward or backward of the model runs on this thread: then every parameter is its home."""
        if self._stack and not _calls_running(self._stack[0]):
            self.reset()  # an interrupt ended it
        return not self._stack and not in_backward()

    def reset(self) -> None:
        """No module of the model is running."""
        self._stack.clear()
        self.runtime.monitor.forward_runs = None
        while self._entered:
            self._entered.pop()()
        self.runtime.bindings.go_home()

    # ---- saved tensors -----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to keep instead of `tensor`."""
        managed = self.runtime.bindings.of_storage(tensor)
        if managed is None:
            return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version
        whole = tensor.untyped_storage().data_ptr() == managed.rest.untyped_storage().data_ptr()
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if whole and managed.rest is not managed.home:
            stride = managed.stride
        version = managed.parameter._version
        return Saved(managed, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg(), version)

    def unpack(self, packed: Any) -> torch.Tensor:
        """What autograd gets back."""
        if self.runtime.memory.streams:
            self.segments.on_backward()
        if not isinstance(packed, Saved):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(_modified(f"a tensor of shape {list(tensor.shape)}", tensor._version, version))
            return tensor  # type: ignore[no-any-return]
        managed = packed.managed
        device = self.runtime.saved(managed)  # may wait for an update of it
        if managed.parameter._version != packed.version:
            raise RuntimeError(_modified(managed.name, managed.parameter._version, packed.version))
        if packed.size == managed.shape and packed.stride == managed.stride and packed.dtype == device.dtype:
            return device
        with self.runtime.unwatched():
            base = device if packed.dtype == device.dtype else device.view(packed.dtype)
            tensor = torch.as_strided(base, packed.size, packed.stride, packed.offset)
            tensor = torch.conj(tensor) if packed.conj else tensor
            return torch._neg_view(tensor) if packed.neg else tensor


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


def _modified(what: str, version: int, expected: int) -> str:
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is "
        f"at version {version}; expected version {expected} instead"
    )


def _leave_mode(mode: Any) -> None:
    """Pop `mode` if it is on top; after an interrupt something else may be, and then it does no more harm there."""
    stack: Sequence[Any] = (
        _get_current_function_mode_stack()
        if isinstance(mode, TorchFunctionMode)
        else _get_current_dispatch_mode_stack()
    )
    if stack and stack[-1] is mode:
        mode.__exit__(None, None, None)


def _calls_running(module: torch.nn.Module) -> int:
    """How many calls of `module` are on this thread's stack."""
    code, calls = torch.nn.Module._call_impl.__code__, 0
    frame = sys._getframe()
    while frame is not None:
        calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls


class BeforeForward:
    """A forward pre-hook that survives pickling and copying, as a hook of nothing."""

    def __init__(self, interception: Interception | None = None) -> None:
        self._interception = weakref.ref(interception) if interception is not None else _nothing

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        interception = self._interception()
        if interception is not None:
            return interception.before_forward(module, args, kwargs)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class AfterForward:
    """The forward hook beside it."""

    def __init__(self, interception: Interception | None = None) -> None:
        self._interception = weakref.ref(interception) if interception is not None else _nothing

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        interception = self._interception()
        if interception is not None:
            interception.after_forward(module, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class BeforeStateDict:
    """A pre-hook of state dicts beside them: what users read, or write over, is what the last step made."""

    def __init__(self, interception: Interception | None = None) -> None:
        self._interception = weakref.ref(interception) if interception is not None else _nothing

    def __call__(self, *args: Any) -> None:
        interception = self._interception()
        if interception is not None:
            interception.runtime.traffic.wait_for_updates()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


def _nothing() -> None:
    return None


def _getters(names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names.split() if hasattr(torch.Tensor, name)}


_TENSOR: Any = torch.Tensor
_METADATA: set[Any] = {
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
}
"""What is asked of a parameter without touching its elements."""

_LAYOUT = {torch.Tensor.stride, torch.Tensor.is_contiguous}
"""What a stand-in, which takes no memory, would say wrongly."""

_PLACES = {
    *_getters("device is_cuda is_cpu"),
    torch.Tensor.get_device,
}
"""What says where a parameter is: for operators, on the device."""

_DTYPE = _TENSOR.dtype.__get__
_IS_FLOATING = {torch.Tensor.is_floating_point, torch.is_floating_point}
_SET_DATA = _TENSOR.data.__set__
_GET_DATA = _TENSOR.data.__get__


def _writes(func: Any) -> bool:
    """Whether `func` is in place by its name; some of those (the `_foreach_` ones) count no versions."""
    name: str = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _writes_to(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """What `func` may write to: the first of `args`, but all where it has several outputs, as `_fused_adam_` has."""
    if not _writes(func):
        return ()
    return (*args, *kwargs.values()) if kwargs or func.__name__.startswith("_") else args[:1]


class OperatorFaults(TorchFunctionMode):
    """Binds managed parameters to their device copies for the length of each operator that uses them."""

    def __init__(self, runtime: Runtime, gradients: GradientSink) -> None:
        super().__init__()
        self._runtime = runtime
        self._gradients = gradients
        self._by_id = runtime.bindings.by_id
        self._stand_in = torch.empty(0, device=runtime.memory.device.torch_device)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
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
        if func in _LAYOUT:
            return func(used[0].home, *args[1:], **kwargs)
        if func in _METADATA:
            return func(*args, **kwargs)
        if func == _DTYPE:
            return used[0].chunk.compute_dtype
        if func in _IS_FLOATING:
            return used[0].chunk.compute_dtype.is_floating_point
        if func == _SET_DATA:
            return self._set_data(used[0], args[1])
        if func in _PLACES:
            return func(self._stand_in, *args[1:], **kwargs)
        if in_backward():
            self._gradients.recompute_with(used)
        self._runtime.use(getattr(func, "__name__", str(func)), used)
        try:
            return self._run(func, args, kwargs)
        finally:
            written: list[ManagedParameter] = []
            self._find(_writes_to(func, args, kwargs), written)
            self._runtime.end_use(used, untracked=func == _GET_DATA, writes=bool(written))

    def _stand_by(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The model is whole on the device, where operators find it, until there is no memory for one of them."""
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if _writes(func) or "out" in kwargs:
                raise
            self._runtime.out_of_memory()
            if not self._runtime.memory.streams:
                raise self._explained(error) from None
        return self.__torch_function__(func, types, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Once more with the memory of idle chunks where the device has none left, unless `func` may have written."""
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if _writes(func) or "out" in kwargs:
                raise self._explained(error) from None
            self._runtime.out_of_memory()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> Exception:
        """`error`, which also says who holds what."""
        if self._runtime.refusal:
            error.args = (f"{error}\n{self._runtime.refusal}",)
        return error

    def _find(self, values: Iterable[Any], used: list[ManagedParameter]) -> None:
        """Add the managed parameters among `values` (lists and tuples within included) to `used`, each once."""
        by_id = self._by_id
        for value in values:
            managed = by_id.get(id(value))
            if managed is not None:
                if managed not in used:
                    used.append(managed)
            elif type(value) in (list, tuple):
                self._find(value, used)

    def _set_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within a forward: the value goes home."""
        with torch.no_grad():
            self._runtime.data_set(managed, value)
