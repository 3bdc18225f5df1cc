"""What autograd keeps of weights from forward to backward: where they are, not the memory that they had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hetmem.memory.chunk import ManagedParameter
from hetmem.runtime.runtime import Runtime
from hetmem.runtime.segments import Segments

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


class SavedTensors:
    """The hooks for what autograd saves in the forwards of one model: weights are saved by name, and fetched again.

    Note "hooks of others": a checkpoint, or whoever else has hooks of its own on top, gets to see what is saved in
    its place. It may keep the very tensor, and a parameter is its home again once its operator is over; so it gets an
    alias of the memory that the parameter is bound to, which stays on the device for as long as that is kept.
    """

    def __init__(self, runtime: Runtime, segments: Segments) -> None:
        self._runtime, self._segments = runtime, segments
        self._by_id = runtime.bindings.by_id
        self._own = (self.pack, self.unpack)

    def enter(self) -> Callable[[], None] | None:
        """Autograd calls these hooks from now on, unless there are others; returns what ends that."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if not _AUTOGRAD._saved_tensors_hooks_is_enabled() or not (top is None or _is_ours(top)):
            return None  # a checkpoint counts what is saved, and another's hooks see everything
        _AUTOGRAD._push_saved_tensors_default_hooks(*self._own)
        return _AUTOGRAD._pop_saved_tensors_default_hooks  # type: ignore[no-any-return]

    def enter_over_others(self) -> bool:
        """For one operator that uses weights: whoever else has hooks gets aliases; whether `leave` is to be called."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if top is None or _is_ours(top):
            return False
        pack, unpack = top
        _AUTOGRAD._push_saved_tensors_default_hooks(lambda tensor: pack(self._alias(tensor)), unpack)
        return True

    @staticmethod
    def leave() -> None:
        """The operator is over."""
        _AUTOGRAD._pop_saved_tensors_default_hooks()

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._by_id:
            return tensor
        return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to keep instead of `tensor`."""
        managed = self._runtime.bindings.of_storage(tensor)
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
        if self._runtime.memory.streams:
            self._segments.on_backward()
        if not isinstance(packed, Saved):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(_modified(f"a tensor of shape {list(tensor.shape)}", tensor._version, version))
            return tensor  # type: ignore[no-any-return]
        managed = packed.managed
        device = self._runtime.saved(managed)  # may wait for an update of it
        if managed.parameter._version != packed.version:
            raise RuntimeError(_modified(managed.name, managed.parameter._version, packed.version))
        if packed.size == managed.shape and packed.stride == managed.stride and packed.dtype == device.dtype:
            return device
        with self._runtime.unwatched():
            base = device if packed.dtype == device.dtype else device.view(packed.dtype)
            tensor = torch.as_strided(base, packed.size, packed.stride, packed.offset)
            tensor = torch.conj(tensor) if packed.conj else tensor
            return torch._neg_view(tensor) if packed.neg else tensor


def _is_ours(hooks: tuple[Any, Any]) -> bool:
    return isinstance(getattr(hooks[0], "__self__", None), SavedTensors)


def _modified(what: str, version: int, expected: int) -> str:
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is "
        f"at version {version}; expected version {expected} instead"
    )
