"""Keeps a builder from filling real memory while it is planned, which is done for models that have none here."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetmem.base.units import GIB, format_size
from hetmem.planner.plan import PlanError

MOST_BYTES = GIB
"""Tables of positions, masks and small constants may be real; weights are not."""


class RefuseRealMemory(TorchDispatchMode):
    """Raises `PlanError` as soon as more than `MOST_BYTES` of tensors are alive that are not on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, _asked_bytes(args, kwargs))
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.layout is torch.strided:
                self._count(leaf.untyped_storage())
        self._check(func, 0)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._live_bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._sizes.pop(key, 0)

    def _check(self, func: Any, more_bytes: int) -> None:
        if self._live_bytes + more_bytes > MOST_BYTES:
            raise PlanError(
                f"the builder takes real memory: with {func} it has {format_size(self._live_bytes + more_bytes)} of "
                f"tensors that are not on the meta device. Leave device=… out of what it makes, so that planning can "
                f"say where tensors go, and load weights afterwards"
            )


def _asked_bytes(args: Any, kwargs: dict[str, Any]) -> int:
    """What a factory will take, before it does: sizes come first and there is no tensor."""
    device = kwargs.get("device")
    shaped = args and isinstance(args[0], (list, tuple)) and all(type(size) is int for size in args[0])
    if not shaped or device is None or torch.device(device).type == "meta":
        return 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return int(prod(args[0]) * dtype.itemsize)
