"""Sees every place at which the host would wait for a GPU, on a machine that has none.

Which tensors would be in its memory: those in slots and in homes on the device, what the test says, and all that was
computed from those. It watches functions of torch, as `Tensor.cpu` does nothing on a CPU, and operators below them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetmem.memory.transfer import TransferEngine

_READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__"}
_CROSSES = {"to", "copy_"}
_WAITING_OPERATORS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip


class Watch:
    """What waited, as "who < caller: what", while a `watching` of it was entered."""

    def __init__(self, on_host: Callable[[int], bool], on_device: Callable[[int], bool]) -> None:
        self.waits: list[str] = []
        self._on_host, self._on_device = on_host, on_device
        self._computed: dict[int, StorageWeakRef] = {}

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether it would be in the GPU's memory."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        storage = tensor.untyped_storage()
        if self._on_host(storage.data_ptr()):
            return False
        return self._on_device(storage.data_ptr()) or storage._cdata in self._computed

    def computed(self, tensors: Iterable[torch.Tensor]) -> None:
        """These would be there too."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._on_host(storage.data_ptr()):
                self._computed[storage._cdata] = StorageWeakRef(storage)  # weak, but nobody else gets its number

    def note(self, what: str) -> None:
        """Somebody waits."""
        self.waits.append(f"{_who()}: {what}")

    @contextmanager
    def watching(self, monkeypatch: Any) -> Iterator[None]:
        """Until the end of it, waits for transfers too are seen."""
        for name in ("copy_now", "take"):
            monkeypatch.setattr(TransferEngine, name, _noted(self, getattr(TransferEngine, name)))
        with _Operators(self), _Functions(self):
            yield
        monkeypatch.undo()


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
        there = [self._watch.on_device(tensor) for tensor in tensors]
        if name in _READS and any(there):
            self._watch.note(name)
        if name in _CROSSES and len(set(there)) > 1 and not kwargs.get("non_blocking"):
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
    """The functions of hetmem that wait and that called it, as "writes.compare < runtime.end_use"."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if "/hetmem/" in path and "/tests/" not in path:
            found.append(f"{path.rsplit('/', 1)[-1].removesuffix('.py')}.{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "outside of hetmem"
