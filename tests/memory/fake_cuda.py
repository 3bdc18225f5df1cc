"""`torch.cuda` on a machine without a GPU: streams, events and the allocator's numbers, over the memory of the CPU.

Compute (the default stream) runs when it is asked for. What is asked for on another stream runs at the last moment:
when somebody waits for an event behind it, or compute is ordered behind one. Whoever forgets that reads what was there
before. Nothing here knows hetmem, so its own calls of `torch.cuda` are what is tested.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.cuda.shim import ShimBackend
from tests.memory.tested import (
    Backend,
    ComputeStream,
    CudaDevice,
    CudaStreams,
    TorchBackend,
    cuda_device,
    live_bytes,
    registry,
    torch_private,
)

_EARLY = 0.4  # of the times that a stream may run ahead, where `FakeCuda.early` is chance
_PATIENCE = 8  # queries of one event after which its stream goes on, as time does


class Record:
    """One time that an event was recorded. `at` is the time at which it passed, 0 while it has not."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at = 0.0
        stream.ask(self._passes)

    def synchronize(self) -> None:
        while not self.at:
            self.stream.run_one()

    def _passes(self) -> None:
        self.at = time.perf_counter()


class Event:
    """Until it is recorded it counts as passed, and what waits for it waits for its last record so far: as in CUDA.

    It allows no weak reference: torch 2.11 does not tell those that its own has died, and whoever meets one crashes.
    """

    __slots__ = ("__dict__",)

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.last: Record | None = None
        self.queries = 0

    @property
    def at(self) -> float:
        return self.last.at if self.last is not None else 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.last = Record(stream or current_stream())

    def query(self) -> bool:
        self.queries += 1
        if self.queries % _PATIENCE == 0 and self.last is not None:
            self.last.stream.run_one()
        return self.last is None or self.at > 0

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.synchronize()

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing and end.enable_timing, "CUDA would refuse: an event without timing"
        assert self.at > 0 and end.at > 0, "CUDA would refuse: an event that has not passed"
        return (end.at - self.at) * 1e3


class Stream:
    """Work in the order in which it was asked for. Only of the default one (`late=False`) it runs at once."""

    def __init__(self, device: Any = None, *, late: bool = True) -> None:
        self.late = late
        self.device = device
        self.asked: deque[Callable[[], None]] = deque()
        self._turn = threading.RLock()
        _cuda.streams.append(self)

    def ask(self, work: Callable[[], None]) -> None:
        self.asked.append(work)
        while self.asked and (not self.late or _cuda.early() < _EARLY):
            self.run_one()

    def run_one(self) -> None:
        """Whatever stream somebody is just asking for work on."""
        with self._turn:
            if not self.asked:  # another thread has run it
                return
            work = self.asked.popleft()
            with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():  # a device calls no Python
                work()

    def wait_event(self, event: Event) -> None:
        if event.last is not None:
            self.ask(event.last.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def query(self) -> bool:
        return not self.asked

    def synchronize(self) -> None:
        while self.asked:
            self.run_one()


class Deferred(TorchDispatchMode):
    """What operators write is written when the stream that is current comes to it; who asks for a value waits for it.

    Streams may be entered within others: the innermost counts, and the mode is entered once for each of them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stream = current_stream()
        if not stream.late:
            return func(*args, **kwargs)
        schema = func._schema
        written = [
            i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write
        ]
        if written:
            stream.ask(partial(func, *args, **kwargs))
            return kwargs.get(schema.arguments[written[0]].name) if written[0] >= len(args) else args[written[0]]
        is_view = any(value.alias_info is not None for value in schema.returns)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not is_view:
            _cuda.made.append(str(func))
        if is_view or not tensors:
            return func(*args, **kwargs)  # a view or new memory: no value is read
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            stream.synchronize()
            return func(*args, **kwargs)
        stream.ask(lambda: result.copy_(func(*args, **kwargs)))
        return result


class CudaError:
    """What a call of the driver returns through torch: one of an enumeration, and no number."""

    def __init__(self, value: int) -> None:
        self.value = value


class FakeCuda:
    """One machine. `free_bytes` is what `mem_get_info` says, `reserved_bytes` and `peak` what the allocator says.

    `early` says by chance whether a late stream runs what it is asked for before somebody waits for it: here never.
    `made` names the operators on late streams that took new memory; `kept` is memory, by address, that the allocator
    hands out no more before a stream is done with it.
    """

    def __init__(self) -> None:
        global _cuda
        _cuda = self
        self.streams: list[Stream] = []
        self.default = Stream(late=False)
        self._of_thread = threading.local()
        self.free_bytes = 1 << 30
        self.reserved_bytes = 0
        self.fraction = 1.0
        self.captures = False
        self.early: Callable[[], float] = lambda: 1.0
        self.peak: Callable[[], int] = lambda: 0
        self.reset_peak: Callable[[], None] = lambda: None
        self.pinned: dict[int, int] = {}
        self.register_error = 0
        self.registered_before_error = 0
        self.sticky_error = 0
        self.deferred = 0
        self.made: list[str] = []
        self.kept: list[tuple[int, Stream]] = []
        self.allocated_bytes = 0
        self.fragment_bytes = 0
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0, uuid="12-34")

    @property
    def current(self) -> Stream:
        """Of this thread: another one, autograd's, has the default stream until it is told of another."""
        found: Stream = getattr(self._of_thread, "stream", self.default)
        return found

    @current.setter
    def current(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:  # torch changes nothing then
            yield
            return
        before, self.current = self.current, stream
        try:
            if stream.late:
                self.deferred += 1
                with Deferred():
                    yield
            else:
                yield
        finally:
            self.current = before

    def set_stream(self, stream: Stream) -> None:
        """As `stream`, until it is called with the stream that was current before."""
        before, entered = getattr(self._of_thread, "entered", (None, None))
        if entered is not None:
            entered.__exit__(None, None, None)
            self._of_thread.entered = None, None
        if stream is not before:
            mode = self.stream(stream)
            self._of_thread.entered = self.current, mode
            mode.__enter__()

    def host_register(self, address: int, nbytes: int, flags: int) -> CudaError:
        assert address % 4096 == 0 and nbytes > 0 and address not in self.pinned
        if self.register_error and len(self.pinned) >= self.registered_before_error:
            self.sticky_error = self.register_error
            return CudaError(self.register_error)
        self.pinned[address] = nbytes
        return CudaError(0)

    def host_unregister(self, address: int) -> CudaError:
        del self.pinned[address]
        return CudaError(0)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.kept.append((tensor.data_ptr(), stream))

    def refuse(self, nbytes: int) -> None:
        """What the allocator does when it has no room: tell its observers, and raise whatever they do."""
        for observer in self.observers:
            observer(0, nbytes, 2 * self.free_bytes, self.free_bytes)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")

    def synchronize(self, device: Any = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    def launch(self) -> None:
        """What a kernel's launch does: raise the error that a refused call of the driver left behind, and clear it."""
        error, self.sticky_error = self.sticky_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


_cuda: FakeCuda
FakeCuda()


def current_stream(device: Any = None) -> Stream:
    return _cuda.current


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """`torch.cuda` as on a machine with one GPU."""
    if registry.interceptions():
        gc.collect()  # models of earlier tests are told of refusals too, as long as they live
    fake = FakeCuda()
    install(fake, monkeypatch.setattr)
    return fake


def install(fake: FakeCuda, put: Callable[..., None]) -> None:
    """Make `torch.cuda` the `fake` one; `put` is like `setattr`."""

    class Cudart:
        cudaHostRegister = staticmethod(fake.host_register)  # noqa: N815
        cudaHostUnregister = staticmethod(fake.host_unregister)  # noqa: N815

    names: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "mem_get_info": lambda device=None: (fake.free_bytes, 2 * fake.free_bytes),
        "synchronize": fake.synchronize,
        "get_device_name": lambda device=None: "a fake GPU",
        "get_device_properties": lambda device=None: fake.properties,
        "memory_reserved": lambda device=None: fake.reserved_bytes,
        "memory_allocated": lambda device=None: fake.allocated_bytes,
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.peak": fake.peak(),
            "inactive_split_bytes.all.peak": fake.fragment_bytes,
        },
        "reset_peak_memory_stats": lambda device=None: fake.reset_peak(),
        "cudart": Cudart,
        "Stream": Stream,
        "Event": Event,
        "stream": fake.stream,
        "set_stream": fake.set_stream,
        "set_device": lambda device: None,
        "current_stream": current_stream,
        "default_stream": lambda device=None: fake.default,
        "is_current_stream_capturing": lambda: fake.captures,
        "get_per_process_memory_fraction": lambda device=None: fake.fraction,
    }
    for name, replacement in names.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
        put(torch.cuda, name, replacement)
    put(torch_private, "raw_current_stream", lambda index: id(fake.current))
    put(torch.Tensor, "record_stream", lambda self, stream: fake.record_stream(self, stream))
    put(live_bytes, "_modes_are_around", lambda: False)  # `Deferred` is a mode that hetmem's own copies need
    cuda_device._observe_allocator.cache_clear()
    put(torch._C, "_cuda_attach_out_of_memory_observer", fake.observers.append, raising=False)


class LateKernels(ShimBackend):
    """The kernels compiled by g++, launched when the stream comes to them. `launched` are their names."""

    def __init__(self, libraries: Mapping[str, Path]) -> None:
        super().__init__(libraries)
        self.launched: list[str] = []

    def launch(
        self, source: str, kernel: str, blocks: int, arguments: Sequence[np.generic], stream: Any = None
    ) -> None:
        self.launched.append(kernel)
        (stream or current_stream()).ask(partial(super().launch, source, kernel, blocks, arguments, None))


class CpuCuda(CudaDevice):
    """A `CudaDevice` in all but where its memory is: what lies in registered memory is the host's."""

    def __init__(self, memory: int | str | None = None, kernels: Backend | None = None) -> None:
        super().__init__(0, memory)
        self.torch_device = torch.device("cpu")
        self.kernels = kernels or TorchBackend("a test")

    def _kernels(self) -> Backend:
        return self.kernels

    def _crosses(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        return self.is_registered(source) != self.is_registered(target)

    def is_registered(self, tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() in piece for locks in self._page_locks for piece in locks.pieces)


def streams_of_cpu() -> CudaStreams:
    return CudaStreams(torch.device("cpu"), ComputeStream(torch.device("cpu")))
