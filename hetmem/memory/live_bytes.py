"""Watches every operator of a traced step: how much device memory is not chunks, and whether a GPU would have failed.

It only observes: it reports bytes to its owner and raises what a GPU would have raised. It decides nothing.

Note "backward": autograd saves the thread's modes when a backward starts and restores them around every node, so a mode
cannot be switched on for a backward from outside. `watch_backward` therefore registers a hook before and after each
node of the graph, in watched steps only.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch

from hetmem import torch_private
from hetmem.errors import DeviceAccessError
from hetmem.memory.interrupts import HELD_BACK
from hetmem.torch_private import TorchDispatchMode, temporarily_clear_interpreter_stack, tree_leaves

_transform: Any = torch_private.transform_level
_inference = torch.is_inference_mode_enabled
_dispatch_modes: Any = torch_private.dispatch_modes_around
_function_modes: Any = torch_private.function_modes_around

NAMED_BYTES = 1 << 16
"""Smaller tensors are not listed at the peak, as they do not fill a device."""


@dataclass(slots=True, eq=False)
class Made:
    """Device memory of one tensor: the `operator` that made it, in the innermost call of the module with that `id` (0:
    in none). `saved`: it has outlived the forward that made it."""

    nbytes: int
    operator: str
    module: int
    saved: bool = False


class PeakTensors:
    """The tensors of at least NAMED_BYTES that were alive at the peak of everything watched: see `reached`."""

    def __init__(self) -> None:
        self.alive: dict[Made, None] = {}
        self.tensors: list[Made] = []
        """The tensors at the peak."""
        self.nbytes = self.step = 0
        self.segment = ""

    def outlived_forward(self) -> None:
        """Mark what is alive as saved for a backward."""
        for made in self.alive:
            made.saved = True

    def reached(self, live_bytes: int, step: int) -> None:
        """Record that `live_bytes` are alive now, which may be the peak, in the step with that number."""
        if live_bytes > self.nbytes:
            self.nbytes, self.step = live_bytes, step
            self.segment = "forward" if torch_private.current_node() is None else "backward"
            self.tensors = list(self.alive)


class DeviceMonitor(TorchDispatchMode):
    """Counts the live bytes of every tensor on devices like `device` that operators make or use, except chunk memory.

    `is_device_memory(address)` and `is_home_memory(address)` tell chunk slots and homes from all other memory.
    `grown(operator, live_bytes)` is called whenever the live bytes have grown, before anything uses the new tensor.
    `transformed` says that a `torch.func` transform is around the forward: it has wrapped parameters before the model
    was called, so they are read at home. `left`: the model has left the device within the running function of torch, or
    node, which may be many operators; a GPU would have refused memory and run it again with the weights at home. With
    `strict`, an operator that reads or writes home memory raises `DeviceAccessError`, unless the model has `left`.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile under this mode, as `torch.cond` does by itself; compiled code runs under it."""
        return True

    def __init__(
        self,
        is_home_memory: Callable[[int], bool],
        is_device_memory: Callable[[int], bool],
        grown: Callable[[str, int], None],
        device: torch.device,
        *,
        strict: bool,
    ) -> None:
        super().__init__()
        self._device_type = device.type
        self._live_bytes = 0
        self._dead: deque[tuple[int, Made | None]] = deque()
        self.peak = PeakTensors()
        self.paused = False
        self.own = False
        """Whether a hook of hetmem's runs that no mode or transform sees: then nothing has to ask again."""
        self._pause = _Paused(self)
        self.transformed = False
        self.left = False
        self._is_home = is_home_memory
        self._is_device = is_device_memory
        self._grown = grown
        self._strict = strict
        self._sizes: dict[int, tuple[int, Made | None]] = {}

    @property
    def live_bytes(self) -> int:
        """Bytes alive now, read on the thread that computes: tensors die on any thread, also in the middle of a sum of
        this one, and only queue their bytes."""
        while self._dead:
            nbytes, made = self._dead.popleft()
            self._live_bytes -= nbytes
            if made is not None:
                self.peak.alive.pop(made, None)
        return self._live_bytes

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context that counts nothing and hides hetmem's own work from modes and `torch.func` transforms: a
        mode that caches results for a recomputation, say, would return them in place of hetmem's copies."""
        if self.paused:  # modes and transforms were left when that began
            return _AS_IT_IS
        transformed = _transform() is not None
        inference = _inference()  # its views could not be written to outside
        modes = _modes_are_around()
        if transformed or inference or modes:
            return self._outside(transformed=transformed, inference=inference, modes=modes)
        return self._pause

    def own_work(self) -> AbstractContextManager[None]:
        """Return `unwatched` for work that may follow from anything: it also makes no graph, and calls no functions of
        subclasses. Within most backwards only the last of these changes anything."""
        if (self.own or self.paused or is_unseen()) and not torch.is_grad_enabled():
            return torch_private.NoFunctionsOfSubclasses()  # type: ignore[no-any-return]
        return self._own_work()

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        with self.unwatched(), torch.no_grad(), torch_private.NoFunctionsOfSubclasses():
            yield

    @contextmanager
    def _outside(self, *, transformed: bool, inference: bool, modes: bool) -> Iterator[None]:
        with (
            self._pause,
            torch_private.NoDispatch() if modes else nullcontext(),
            torch_private.NoFunctions() if modes else nullcontext(),
            torch.inference_mode(False) if inference else nullcontext(),
            temporarily_clear_interpreter_stack() if transformed else nullcontext(),
        ):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or _accumulates():
            return func(*args, **kwargs)
        if isinstance(func, torch_private.HigherOrderOperator):  # its arguments include functions
            result = func(*args, **kwargs)
            self.count(func, tree_leaves(result))
            return result
        if self._strict and not (self.transformed or self.left or operator_of(func).only_views or func in _METADATA):
            self._check(func, _tensors(args))
            self._check(func, _tensors(kwargs.values()))
        if torch.is_inference_mode_enabled() and _is_of_several(func):
            with torch_private.without_dispatch_keys(torch_private.DispatchKey.ADInplaceOrView, False):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self.count(func, _tensors((result,)))
        return result

    @HELD_BACK
    def count(self, operator: Any, tensors: Iterable[Any]) -> None:
        """Add the storages of `tensors` that are not counted yet; they leave the count when they die. `operator`, or a
        description of it, has made them."""
        before, came = self.live_bytes, dict[Made, None]()
        for tensor in tensors:
            if not _has_memory(tensor) or tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            address = _address_of(storage)
            if not address or self._is_home(address) or self._is_device(address):
                continue
            nbytes = storage.nbytes()
            made = Made(nbytes, _name(operator), _calling_module()) if nbytes >= NAMED_BYTES else None
            self._sizes[key] = nbytes, made
            self._live_bytes += nbytes
            weakref.finalize(storage, _forget, weakref.ref(self), key).atexit = False
            if made is not None:
                came[made] = None
        grown = self.live_bytes > before
        self.peak.alive.update(came)  # after removing those that have died
        if grown:
            self._grown(str(operator), self.live_bytes)

    def _check(self, func: Any, leaves: Iterable[Any]) -> None:
        for tensor in leaves:
            if _has_memory(tensor) and tensor.numel() and self._is_home(_address_of(tensor.untyped_storage())):
                raise DeviceAccessError(
                    f"{func} met a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} in home memory; on a "
                    f"GPU it would have failed. A weight was used where hetmem could not see it: please report the "
                    f"operator and the module"
                )

    def watch_backward(self, outputs: Any) -> None:
        """Watch every node of the autograd graph behind `outputs`, those of a forward that has ended, while it runs."""
        if torch.is_grad_enabled():
            self.peak.outlived_forward()
        for node in nodes_behind(outputs):
            if not hasattr(node, "variable"):  # accumulation runs the program's hooks, which may read homes
                node.register_prehook(self._enter_node)
                node.register_hook(self._leave_node)

    def _enter_node(self, grad_outputs: Sequence[Any]) -> None:
        self.__enter__()
        if not self.paused:
            self.count("gradients of a node", grad_outputs)

    def _leave_node(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
        self.__exit__(None, None, None)
        self.left = False
        if not self.paused:
            self.count("gradients of a node", grad_inputs)


def is_unseen() -> bool:
    """Return whether no mode or transform is active: `DeviceMonitor.unwatched` would change nothing."""
    return not (_dispatch_modes() or _function_modes() or _inference() or _transform() is not None)


def places_alone() -> bool:
    """Return whether the one mode that is active is torch's default device, which sees nothing but factories."""
    if _dispatch_modes() or _inference() or _transform() is not None or _function_modes() != 1:
        return False
    return torch_private.is_default_device(torch_private.function_mode_stack()[0])


def _modes_are_around() -> bool:
    """Return whether any mode is active."""
    return bool(_dispatch_modes() or _function_modes())


def nodes_behind(outputs: Any) -> Iterator[Any]:
    """Yield every node of the autograd graph behind `outputs`, which are tensors or edges, once."""
    ends = [leaf.grad_fn if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(outputs)]
    stack: list[Any] = [end for end in ends if hasattr(end, "next_functions")]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions if following is not None)


def _accumulates() -> bool:
    """Return whether a gradient is being accumulated: then the program's hooks run, which may read homes. A checkpoint
    runs a backward of its own within a watched node, whose mode is on."""
    return hasattr(torch_private.current_node(), "variable")


class _Paused:
    """Pauses `monitor`; not a generator, as it is entered several times in each operator."""

    __slots__ = ("_monitor",)

    def __init__(self, monitor: DeviceMonitor) -> None:
        self._monitor = weakref.proxy(monitor)

    def __enter__(self) -> None:
        self._monitor.paused = True

    def __exit__(self, *_: object) -> None:
        self._monitor.paused = False


_AS_IT_IS = nullcontext()


def _forget(monitor: weakref.ref[DeviceMonitor], key: int) -> None:
    """Queue the bytes of a storage that died. A strong reference would keep a model alive as long as the storage."""
    alive = monitor()
    if alive is not None:
        alive._dead.append(alive._sizes.pop(key, (0, None)))


def _calling_module() -> int:
    """Return the `id` of the module whose call is innermost on this thread; 0 if there is none, as in a backward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != torch.autograd.__name__:  # it runs backwards
        if frame.f_code is _CALL:
            return id(frame.f_locals["self"])
        frame = frame.f_back
    return 0


_CALL = torch.nn.Module.__call__.__code__


@cache
def _name(operator: Any) -> str:
    """Return the common name of `operator`."""
    return str(operator).removeprefix("aten.").partition(".")[0].strip("_")


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among `values`, arguments or results of an operator, alone or in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_memory(value: Any) -> bool:
    """Return whether `value` is a tensor with accessible memory (not one inside a `torch.func` transform, or of a
    backward of many gradients at once)."""
    return (
        isinstance(value, torch.Tensor)
        and not torch_private.is_of_a_transform(value)
        and not torch_private.is_of_an_old_transform(value)
        and value.layout is torch.strided
        and not value.is_meta
        and not value._is_zerotensor()
    )


def _address_of(storage: Any) -> int:
    """Return the address of `storage`; 0 for a symbolic one in code that is being traced."""
    try:
        return storage.data_ptr()  # type: ignore[no-any-return]
    except RuntimeError:
        return 0


class Operator(NamedTuple):
    """An operator of torch, its common name, and facts of its schema: whether it only makes views of its arguments,
    without touching elements, and whether it declares no aliases."""

    func: Any
    name: str
    only_views: bool
    is_pure: bool


_operators: dict[int, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Return the `Operator` of `func`, looked up by identity: its hash is Python, and a trace needs ten thousand."""
    found = _operators.get(id(func))
    if found is None:
        schema = func._schema
        given, returned = ([value.alias_info for value in some] for some in (schema.arguments, schema.returns))
        writes = any(alias is not None and alias.is_write for alias in given)
        views = any(alias is not None for alias in returned) and not writes
        pure = all(alias is None for alias in (*given, *returned))
        found = _operators[id(func)] = Operator(func, _name(func), views, pure)
    return found


@cache
def _is_of_several(func: Any) -> bool:
    """Return whether `func` is composed of other operators. In inference mode a mode gets it as a whole, and views made
    in it do not know their base; torch then computes a product with a view of a weight in another order. Otherwise a
    mode gets only the parts. Not `chunk` and `narrow`: their own ADInplaceOrView kernels record the base before a mode
    runs."""
    has, name = torch_private.has_kernel, func.name()
    return bool(has(name, "CompositeImplicitAutograd") and not has(name, "ADInplaceOrView"))


_METADATA = {
    torch.ops.aten.is_same_size.default,
    torch.ops.aten.is_non_overlapping_and_dense.default,
    torch.ops.aten._has_compatible_shallow_copy_type.default,
}
