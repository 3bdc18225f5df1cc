"""A pytest plugin: `torch.cuda` for a whole run of tests, on the device that `device.cpp` adds to torch.

    LD_PRELOAD=<what `building.library` gives> python -m pytest -p tests.faked_driver.plugin tests/gpu

Streams are those of `fake_cuda`, kernels are compiled by g++. What is not sure to be on a machine with a GPU is not
here either, so that no test that is to run there asks for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

for _absent in os.environ.get("FAKED_ABSENT", "hypothesis transformers playwright ruff mypy").split():
    sys.modules[_absent] = None  # type: ignore[assignment]

import torch  # noqa: E402

from hetmem import torch_private  # noqa: E402
from hetmem.cuda.backend import CupyBackend  # noqa: E402
from tests.memory.fake_cuda import FakeCuda, LateKernels, current_stream, install  # noqa: E402

MEMORY_BYTES = 3 << 30
_Refused = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Kernels(LateKernels):
    """In the place of `CupyBackend`."""

    name = "cupy"
    reason = "g++"

    def __init__(self, cache_directory: Path) -> None:
        kernels: dict[str, str] = json.loads(os.environ["FAKED_KERNELS"])
        super().__init__({source: Path(path) for source, path in kernels.items()})

    def address(self, tensor: torch.Tensor, what: str) -> Any:
        if tensor.device.type != "cuda" and not tensor.is_pinned():
            raise ValueError(f"{what} must be on the GPU or in pinned memory, got unpinned memory on {tensor.device}")
        return super().address(tensor, what)

    def works(self) -> bool:
        """As the one that it stands for."""
        works: Any = CupyBackend.works
        return bool(works(self))


def pytest_configure() -> None:
    """Before anything asks whether there is a GPU."""
    install_device()


def _resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Do what `storage.resize_` does, which this torch can for memory of the host alone. The content is lost."""
    if storage.device.type != "cuda":
        return _RESIZE(storage, nbytes)
    storage._swap_data_ptr_(torch.empty(nbytes, dtype=torch.uint8, device="cuda").untyped_storage())
    return storage


_RESIZE = torch.UntypedStorage.resize_


def install_device(seed: int | None = None) -> None:
    """Make `torch.cuda` the device's. With a `seed` work on streams runs as late as it may only some of the time."""
    library = ctypes.CDLL(None)
    for name in ("faked_allocated", "faked_peak"):
        getattr(library, name).restype = ctypes.c_int64
    library.faked_limit(ctypes.c_int64(MEMORY_BYTES))
    fake = FakeCuda()
    if seed is not None:
        fake.early = random.Random(seed).random
    fake.free_bytes = MEMORY_BYTES
    vars(fake.properties).update(total_memory=2 * MEMORY_BYTES, major=9, minor=0, multi_processor_count=132)
    fake.peak, fake.reset_peak = library.faked_peak, library.faked_reset_peak
    install(fake, _put)
    _put(torch.UntypedStorage, "resize_", _resize)
    told = _Refused(lambda asked: [observer(0, asked, MEMORY_BYTES, 0) for observer in fake.observers] and None)
    library.faked_observe(told)
    extra: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "memory_allocated": lambda device=None: library.faked_allocated(),
        "memory_reserved": lambda device=None: library.faked_allocated(),
        "memory_stats": lambda device=None: {
            "allocation.all.allocated": library.faked_allocated(),
            "allocated_bytes.all.peak": library.faked_peak(),
        },
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: current_stream().ask(lambda: None),
    }
    for name, replacement in extra.items():
        _put(torch.cuda, name, replacement)
    rounded = _rounded_otherwise(torch._fused_adamw_)
    _put(torch, "_fused_adamw_", rounded)
    _put(torch_private, "fused_adamw", rounded)
    _put(torch.Tensor, "is_pinned", lambda tensor: _is_pinned(fake, tensor))
    _put(torch.Tensor, "pin_memory", lambda tensor: _pinned(fake, tensor))
    _install_kernels()
    fake.told = told  # as long as anybody may be told


def _install_kernels() -> None:
    from hetmem.cuda import backend

    _put(backend, "CupyBackend", Kernels)


def _rounded_otherwise(update: Any) -> Any:
    """As CUDA's kernel has other bits than the CPU's."""

    def fused(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *more: Any, **options: Any) -> None:
        update(params, grads, exp_avgs, exp_avg_sqs, *more, **options)
        for param in params if params[0].is_cuda else ():
            param.copy_(torch.nextafter(param.cpu(), torch.ones(()).to(param.dtype)))

    return fused


def _is_pinned(fake: FakeCuda, tensor: torch.Tensor) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + nbytes for start, nbytes in fake.pinned.items())


def _pinned(fake: FakeCuda, tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.clone()
    fake.pinned[copied.untyped_storage().data_ptr()] = copied.untyped_storage().nbytes()
    return copied


def _put(where: Any, name: str, value: Any, *, raising: bool = True) -> None:
    assert not raising or hasattr(where, name), f"{where} has no {name}"
    setattr(where, name, value)
