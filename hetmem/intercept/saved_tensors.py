"""What autograd keeps of weights from forward to backward: where they are, not the memory that they had."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction

from hetmem.engine.live_bytes import nodes_behind
from hetmem.engine.runtime import Runtime
from hetmem.intercept.dynamo import called_by_autograd, uncompiled
from hetmem.intercept.forward_scope import Compute, Hook
from hetmem.intercept.phases import Segments
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK

_AUTOGRAD: Any = torch._C._autograd


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
    data_sets: int | None
    """None for the parameter itself: torch too keeps that, and not the memory it had."""


class Recomputes(Protocol):
    """Who is told that a part of a forward may be computed once more."""

    def computes(self) -> bool:
        """Whether a forward, or a part of one, is computed on this thread now."""
        ...

    def recomputing(self) -> AbstractContextManager[None]:
        """Within."""
        ...

    def recomputes_until_node_ends(self) -> None:
        """Until the node of autograd that runs now has run."""


class SavedTensors:
    """The hooks for what autograd saves in the forwards of one model: weights are saved by name, and fetched again.

    Note "hooks of others": a checkpoint, or whoever else has hooks of its own on top, gets to see what is saved in
    its place. It may keep the very tensor, and a parameter is its home again once its operator is over; so it gets an
    alias of the memory that the parameter is bound to, which stays on the device for as long as that is kept. What a
    function of the user's saves is saved at its end, between operators, and so by `_Over`, which is in the place of
    those hooks from the first operator in such a function on; hetmem is told of the backward of that by the graph.
    """

    def __init__(self, runtime: Runtime, segments: Segments, recomputes: Recomputes) -> None:
        self._runtime, self._segments, self._recomputes = runtime, segments, recomputes
        self._by_id = runtime.bindings.by_id
        self._met_others = False
        self.region: tuple[str, list[ManagedParameter]] | None = None
        """The one that runs, see note "regions", and the weights that are on the device for it."""

    def enter(self, compute: Compute) -> None:
        """Autograd calls these hooks until the end of `compute`, unless there are others."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if not _AUTOGRAD._saved_tensors_hooks_is_enabled() or not (top is None or _is_ours(top)):
            return  # a checkpoint counts what is saved, and another's hooks see everything
        _AUTOGRAD._push_saved_tensors_default_hooks(_Pack(self, compute), _unpack)

    @staticmethod
    def others() -> Any:
        """What identifies somebody else's hooks, if those are on top."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        return None if top is None or _is_ours(top) else top[0]

    def enter_over_others(self, around: Any, *, aliases: bool = True) -> bool:
        """For one operator: whoever else has hooks gets `aliases` of weights, and computes again as the forward did,
        unless their hooks, `around`, are around the whole of it. Whether `leave` is to be called."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if top is None or isinstance(top[0], _Pack):  # as in `_is_ours`: this is asked at every function of torch's
            return False
        self._met_others = True
        if isinstance(top[0], _Over) and top[0].is_of(self):
            return False
        pack, unpack = self._over(top, around, aliases=aliases)
        if aliases and not torch.is_grad_enabled():  # what saves next may be the function of the user's that this is in
            _AUTOGRAD._pop_saved_tensors_default_hooks()
            _AUTOGRAD._push_saved_tensors_default_hooks(_Over(self, top[0]), unpack)
            return False
        _AUTOGRAD._push_saved_tensors_default_hooks(pack, unpack)
        return True

    def displace_others(self, around: Any) -> Any:
        """The same for a whole region, until `restore_others` is called with what this returns. It is in the place of
        their hooks, which they take away in our place if an interrupt ends the region."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if top is None or _is_ours(top):
            return None
        _AUTOGRAD._pop_saved_tensors_default_hooks()
        self._met_others = True
        over = self._over(top, around, aliases=True)
        _AUTOGRAD._push_saved_tensors_default_hooks(*over)
        return over[0], top

    @staticmethod
    def restore_others(displaced: Any) -> None:
        """The region is over."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if displaced is not None and top is not None and top[0] is displaced[0]:
            _AUTOGRAD._pop_saved_tensors_default_hooks()
            _AUTOGRAD._push_saved_tensors_default_hooks(*displaced[1])

    def _over(self, others: tuple[Any, Any], around: Any, *, aliases: bool) -> tuple[Any, Any]:
        pack: Callable[[torch.Tensor], Any]
        unpack: Callable[[Any], torch.Tensor]
        pack, unpack = others

        @uncompiled
        def unpack_again(packed: Any) -> torch.Tensor:
            with self._recomputes.recomputing():
                return unpack(packed)

        @uncompiled
        def pack_alias(tensor: torch.Tensor) -> Any:
            return pack(self.alias(tensor))

        return pack_alias if aliases else pack, unpack if pack is around else unpack_again

    @staticmethod
    def leave() -> None:
        """The operator is over."""
        _AUTOGRAD._pop_saved_tensors_default_hooks()

    def watch_functions(self, outputs: Any, *, forward_is_over: bool) -> None:
        """A forward is over, or a backward within another begins: functions of the user's behind `outputs`, of whose
        saved tensors others may have been told, compute again as the forward did."""
        met, self._met_others = self._met_others, self._met_others and not forward_is_over
        for node in nodes_behind(outputs) if met else ():
            if isinstance(node, BackwardCFunction):
                node.register_prehook(_FunctionBegins(self))

    def function_begins(self) -> None:
        """One of them is at its backward now."""
        if self._runtime.memory.streams:
            self._segments.on_backward()
        self._recomputes.recomputes_until_node_ends()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """What others get in the place of `tensor`: of a weight, one of its copy on the device."""
        managed = self._by_id.get(id(tensor))
        if managed is None:
            return tensor
        with torch._C.DisableTorchFunction():
            bound = managed.device is not None and tensor.data_ptr() == managed.device.data_ptr()
            there = tensor if bound or not self._recomputes.computes() else self._runtime.saved(managed)
            return torch.nn.Parameter(there.detach(), tensor.requires_grad)

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """What autograd is to keep instead of `tensor`."""
        managed = self._runtime.bindings.of_storage(tensor)
        if managed is None or (managed.data_sets and _is_view_of_copy(tensor, managed)):
            return _kept(tensor)
        return self._place_of(managed, tensor)

    def _place_of(self, managed: ManagedParameter, tensor: torch.Tensor) -> Saved:
        whole = tensor.untyped_storage().data_ptr() == managed.rest.untyped_storage().data_ptr()
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if whole and managed.rest is not managed.home:
            if self.region is not None and managed not in self.region[1]:
                raise RuntimeError(_is_elsewhere(managed.name, self.region[0]))
            stride = managed.stride
        version, sets = managed.parameter._version, None if tensor is managed.parameter else managed.data_sets
        return Saved(managed, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg(), version, sets)

    def unpack(self, packed: Saved | torch.Tensor) -> torch.Tensor:
        """What autograd gets back."""
        if not self._segments.in_backward and self._runtime.memory.streams:
            self._segments.on_backward()
        if isinstance(torch._C._current_autograd_node(), BackwardCFunction):
            self._recomputes.recomputes_until_node_ends()
        if isinstance(packed, torch.Tensor):
            return packed
        managed = packed.managed
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is not None:
            self._recomputes.recomputes_until_node_ends()  # create_graph=True: the node saves what it computes with
        device = self._runtime.saved(managed)  # may wait for an update of it
        if managed.parameter._version != packed.version:
            raise RuntimeError(_modified(managed.name, managed.parameter._version, packed.version))
        if packed.data_sets not in (None, managed.data_sets):
            raise RuntimeError(_set_since(managed.name))
        if packed.size == managed.shape and packed.stride == managed.stride and packed.dtype == device.dtype:
            return device
        with self._runtime.unwatched():
            base = device if packed.dtype == device.dtype else _flat(device, managed).view(packed.dtype)
            tensor = torch.as_strided(base, packed.size, packed.stride, packed.offset)
            tensor = torch.conj(tensor) if packed.conj else tensor
            return torch._neg_view(tensor) if packed.neg else tensor


class _FunctionBegins:
    """A hook before a node; it holds nothing, as a graph may outlive its model."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = weakref.ref(saved)

    @HELD_BACK
    def __call__(self, _: Any) -> None:
        saved = self._saved()
        if saved is not None:
            saved.function_begins()


class _Pack(Hook):
    """It holds nothing, see note "interrupts". What it packs holds all that it is unpacked with, as a graph may outlive
    its model."""

    def __init__(self, saved: SavedTensors, compute: Compute) -> None:
        super().__init__(compute)
        self._saved = weakref.ref(saved)

    @called_by_autograd
    def __call__(self, tensor: torch.Tensor) -> _Packed:
        saved, compute = self._saved(), self._compute()
        with torch._C.DisableTorchFunction():  # within a custom function the mode would see each question as a use
            if saved is None or compute is None or not compute.runs():
                return None, _kept(tensor), tensor._version
            return saved, saved.pack(tensor), tensor._version


class _Over:
    """In the place of somebody else's hooks, which they take away in its place: it may outlive the forward."""

    def __init__(self, saved: SavedTensors, pack: Callable[[torch.Tensor], Any]) -> None:
        self._saved, self._pack = weakref.ref(saved), pack

    def is_of(self, saved: SavedTensors) -> bool:
        """Whether it is there for `saved`."""
        return self._saved() is saved

    @called_by_autograd
    def __call__(self, tensor: torch.Tensor) -> Any:
        saved = self._saved()
        return self._pack(tensor if saved is None else saved.alias(tensor))


_Packed = tuple[SavedTensors | None, Saved | torch.Tensor, int]


@called_by_autograd
def _unpack(packed: _Packed) -> torch.Tensor:
    saved, kept, version = packed
    tensor = saved.unpack(kept) if saved is not None else kept
    assert isinstance(tensor, torch.Tensor)
    if tensor is kept and tensor._version != version:
        raise RuntimeError(_modified(f"a tensor of shape {list(tensor.shape)}", tensor._version, version))
    return tensor


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` to be kept by the graph, which may be its own."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def _is_view_of_copy(tensor: torch.Tensor, managed: ManagedParameter) -> bool:
    """Whether `tensor` keeps the values it has, though `managed` gets others by `.data = …` within the same forward."""
    if tensor is managed.parameter or managed.device is None:
        return False
    return tensor.untyped_storage().data_ptr() == managed.device.untyped_storage().data_ptr()


def _flat(device: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
    """All elements of `device`, the copy of `managed`: a view of another dtype needs them one beside the other."""
    return torch.as_strided(device, (managed.numel,), (1,))


def _is_ours(hooks: tuple[Any, Any]) -> bool:
    return isinstance(hooks[0], _Pack)


def _is_elsewhere(weight: str, region: str) -> str:
    return (
        f"{region} uses {weight}, which is none of the parameters of that module, and so is not on the device while "
        f"its compiled code runs: what that computed is wrong. Register {weight} there too, as tied weights are, "
        f"compile a module that has both, or do not compile this one"
    )


def _set_since(weight: str) -> str:
    return (
        f"{weight}.data was set within a forward for the first time after this graph had used it, and what it was "
        f"then is not kept: compute the forward again, whose backward will find it"
    )


def _modified(what: str, version: int, expected: int) -> str:
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is "
        f"at version {version}; expected version {expected} instead"
    )
