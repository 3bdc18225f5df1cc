"""Sees every place at which the host would wait for a GPU, on a machine that has none.

Which tensors would be in its memory: those in slots and in homes on the device, what the test says, and all that was
computed from those. It watches functions of torch, as `Tensor.cpu` does nothing on a CPU, and operators below them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hetmem
from tests.memory.tested import HiddenGradient, Memory, TransferEngine, live_bytes

_HETMEM = f"{Path(hetmem.__file__).parent}/"
_READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__"}
_CROSSES = {"to", "copy_"}
_WAITING_OPERATORS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip


class Watch:
    """`waits` are the places where the host waited, as "who < caller: what", while `watching`.

    `memory` is the model's. Memory of neither side (a buffer of the device's, a number on the host) crosses nothing.
    """

    def __init__(self, memory: Memory) -> None:
        self.waits: list[str] = []
        self._memory = memory
        self._computed: dict[int, StorageWeakRef] = {}

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether it is in host memory that hetmem owns, or in a mapped file."""
        address, pinned = tensor.untyped_storage().data_ptr(), self._memory.host_pool.mapping
        return self._memory.is_home_address(address) or 0 <= address - pinned.address < pinned.nbytes

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether it would be in the GPU's memory."""
        if tensor.layout is not torch.strided or not tensor.numel() or self.on_host(tensor):
            return False
        storage = tensor.untyped_storage()
        return self._memory.is_device_address(storage.data_ptr()) or storage._cdata in self._computed

    def computed(self, tensors: Iterable[torch.Tensor]) -> None:
        """These would be there too."""
        for tensor in tensors:
            if not self.on_host(tensor):
                storage = tensor.untyped_storage()
                self._computed[storage._cdata] = StorageWeakRef(storage)  # weak, but nobody else gets its number

    def note(self, what: str) -> None:
        """Somebody waits."""
        self.waits.append(f"{_who()}: {what}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Waits for transfers are seen too."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("copy_now", "take"):
                patch.setattr(TransferEngine, name, _noted(self, getattr(TransferEngine, name)))
            patch.setattr(live_bytes, "_modes_are_around", lambda: False)  # which see hetmem's own work too
            with _Operators(self), _Functions(self):
                yield


def _noted(watch: Watch, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("wait", True):
            watch.note(method.__name__)
        return method(*args, **kwargs)

    return noted


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in tensors if not isinstance(tensor, HiddenGradient)]  # it has no memory
        with torch._C.DisableTorchFunctionSubclass():  # to ask for its memory is to read a parameter that trails
            there = any(self._watch.on_device(tensor) for tensor in tensors)
            here = any(self._watch.on_host(tensor) for tensor in tensors)
        if name in _READS and there:
            self._watch.note(name)
        if name in _CROSSES and here and there and not kwargs.get("non_blocking"):
            self._watch.note(f"{name} across")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(self._watch.on_device(tensor) for tensor in tensors):
            name = func._schema.name.removeprefix("aten::")
            masks = name == "index" and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
            if name in _WAITING_OPERATORS or masks:
                self._watch.note(name)
            if not func._schema.is_mutable:
                self._watch.computed(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def _who() -> str:
    """The functions of hetmem that wait and that called it, as "write_check.compare < uses.end_use"."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if path.startswith(_HETMEM) and frame.f_code.co_name not in ("wait_while", "_until"):  # loops, no more
            found.append(f"{path.rsplit('/', 1)[-1].removesuffix('.py')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "outside of hetmem"
