"""A CUDA GPU behind the interface of the simulated one: torch's allocator, and two streams of its own for copies.

Needs torch with CUDA and nothing else. Importing it starts nothing; making a `CudaDevice` starts the driver.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.config import local_rank
from hetmem.base.threads import process_ends
from hetmem.base.units import format_size, parse_size, round_down
from hetmem.base.warning import warn_user
from hetmem.cuda.backend import Backend, backend
from hetmem.cuda.dequantise import Parts, dequantise_parts
from hetmem.cuda.kernels import GATHERS, gather_rows
from hetmem.errors import ManageError
from hetmem.memory.chunk import RawMemory, without_graph
from hetmem.memory.coded import CodedHome, CodedTable
from hetmem.memory.device import Device, DevicePool
from hetmem.memory.host_memory import Mapping, cores_near
from hetmem.memory.stream_copies import Moves, StreamCopier
from hetmem.memory.transfer import Copier, Finished, Seen
from hetmem.schedule.blocks import Link
from hetmem.schedule.formats import Coding
from hetmem.schedule.placement import PIECE_BYTES

_REBASE_MILLISECONDS = 10_000.0  # a float32 of milliseconds loses microseconds after about ten seconds


class CudaDevice(Device):
    """One GPU. `index`: None = torch's current device; where the program has set none, that of LOCAL_RANK if a launcher
    such as torchrun has set that. `memory`: how much of it may be used, in bytes or as a string; None = the budget's.

    Raises `ManageError` if torch sees no GPU, or not this one.
    """

    watched = False
    SHARE = 0.9

    def __init__(self, index: int | None = None, memory: int | str | None = None) -> None:
        if not torch.cuda.is_available():
            raise ManageError(
                "torch sees no CUDA GPU: install a CUDA build of torch and a driver (nvidia-smi must list the GPU), or "
                "use device='sim'"
            )
        index = _own_index() if index is None else index
        if not 0 <= index < torch.cuda.device_count():
            raise ManageError(f"there is no cuda:{index}: torch sees {torch.cuda.device_count()} GPU(s)")
        self.torch_device = torch.device("cuda", index)
        super().__init__(None if memory is None else parse_size(memory, "CudaDevice(memory)"))
        self._page_locks: list[PageLocks] = []
        self._refused = ""
        self._refusals: list[weakref.WeakMethod[Callable[[int, int], None]]] = []
        self._unseen_peak = self._fragment_bytes = 0
        _devices.add(self)

    def __repr__(self) -> str:
        return f"CudaDevice({self.torch_device.index}, memory={self.memory_bytes})"

    @cached_property
    def cores(self) -> tuple[int, ...]:
        return cores_near(pci_address(self.torch_device))

    @cached_property
    def _compute(self) -> ComputeStream:
        return ComputeStream(self.torch_device)

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        return DevicePool(slot_bytes, slots, self.torch_device, self._compute.empty)

    def allocate(self, nbytes: int) -> RawMemory:
        return self._compute.zeros(nbytes)

    def available_bytes(self) -> int:
        """Return nine tenths of the memory that is free or reserved by torch's allocator; this process may be allowed a
        part of the GPU only."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.torch_device))
        return int(min(free + torch.cuda.memory_reserved(self.torch_device), allowed) * self.SHARE)

    def pin(self, host: Mapping, start: int = 0) -> Callable[[], None]:
        """Register `host` from byte `start` (of a page) on with the driver, exactly as long as it is; return a function
        that undoes it.

        Its pages are populated first, new ones in the memory nearest to this GPU; raises `CapacityError` if the machine
        has too few. If registering is refused (a limit of locked memory, a container), copies still work, several times
        slower, and a warning says so.
        """
        host.populate(self.cores, start)
        with torch.cuda.device(self.torch_device):
            locks = PageLocks(torch.cuda.cudart(), host, start)
        if locks.error:
            with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next launch: this one
                torch.zeros(1, device=self.torch_device)
            self._refused = (
                f"the driver refused to page-lock {format_size(locks.wanted_bytes - locks.nbytes)} of "
                f"{format_size(locks.wanted_bytes)} of host memory (CUDA error {locks.error}): copies to and from the "
                f"GPU will be several times slower there. {_locked_memory_advice(locks.wanted_bytes)}, or lower "
                f"Budget(host=…)"
            )
            warn_user(self._refused)
        self._page_locks.append(locks)

        def unpin() -> None:
            self._page_locks.remove(locks)
            locks.end()

        return unpin

    def captures(self) -> bool:
        with torch.cuda.device(self.torch_device):
            return torch.cuda.is_current_stream_capturing() or self._compute.current() is None

    def peak_bytes(self) -> int:
        """Return the most that torch's allocator had handed out at one time since `forget_peak` of any device here, or
        a program's own reset; of what a reset has taken from other devices that have not looked at it, once, too."""
        peak, fragments = self._peaks()
        self._fragment_bytes = max(self._fragment_bytes, fragments)
        peak, self._unseen_peak = max(peak, self._unseen_peak), 0
        return peak

    def forget_peak(self) -> None:
        """Have the allocator's peak start anew, for all models on this GPU, and for programs that read
        `torch.cuda.max_memory_allocated`: so only where the old one says nothing of what is needed from now on."""
        peak, fragments = self._peaks()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        for device in list(_devices):
            if device.torch_device == self.torch_device:
                device._fragment_bytes = max(device._fragment_bytes, fragments)
                if device is not self:
                    device._unseen_peak = max(device._unseen_peak, peak)

    def _peaks(self) -> tuple[int, int]:
        seen = torch.cuda.memory_stats(self.torch_device)
        peak, fragments = (int(seen.get(f"{what}_bytes.all.peak", 0)) for what in ("allocated", "inactive_split"))
        return peak, fragments

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def kept_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device))

    def told_free(self) -> str:
        (free, total), kept = torch.cuda.mem_get_info(self.torch_device), self.kept_bytes()
        others = max(0, total - free - kept)
        return (
            f": {format_size(free)} are free, this process keeps {format_size(kept)}, in which tensors take "
            f"{format_size(self.allocated_bytes())}, and other programs {format_size(others)}"
        )

    def fragment_bytes(self) -> int:
        return self._fragment_bytes

    def give_back(self) -> None:
        if "moves" in self.__dict__:
            self.moves.release_staging()
        torch.cuda.empty_cache()

    @cached_property
    def moves(self) -> Moves:
        """The copies of this GPU; made at the first use."""
        return Moves(self.torch_device, self._kernels())

    def copy_in(self, target: torch.Tensor, source: torch.Tensor | CodedHome) -> None:
        if isinstance(source, CodedHome):
            decode = self.moves.decode_in if self._crosses(source.codes, target) else self.moves.decode
            decode(target, source)
        elif self._crosses(source, target):
            self.moves.copy_in(target, source)
        else:
            super().copy_in(target, source)

    def rows_in(self, target: torch.Tensor, table: torch.Tensor | CodedTable, indices: torch.Tensor) -> None:
        with without_graph():
            if isinstance(table, CodedTable):
                self._decode_rows(target, table, indices)
            elif self.moves.kernels.native and table.is_pinned() and (table.dtype, target.dtype) in GATHERS:
                gather_rows(self.moves.kernels, table, indices.long(), target)
            else:
                target.copy_(torch.index_select(table, 0, indices.to(table.device)))

    def _decode(self, coding: Coding, parts: Parts, target: torch.Tensor) -> None:
        dequantise_parts(self.moves.kernels, coding, *parts, target, 0)

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        if not self._crosses(arrived, target):
            super().gradient_out(target, arrived, add=add)
            return
        with without_graph():
            self.moves.gradient_out(target, arrived, add=add)

    def gradients_out(self, targets: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
        for target, each in zip(targets, arrived, strict=True):
            self.gradient_out(target, each, add=False)

    def tell_refusals(self, refused: Callable[[int, int], None]) -> None:
        """Report refusals by an observer of torch's allocator, which cannot prevent them."""
        _observe_allocator()
        self._refusals.append(weakref.WeakMethod(refused))

    def refused(self, asked_bytes: int) -> None:
        """Tell models that the allocator has refused `asked_bytes`, on the allocating thread."""
        allocated = self.allocated_bytes()
        for method in self._refusals:
            callback = method()
            if callback is not None:
                callback(asked_bytes, allocated)

    def remarks(self) -> list[str]:
        found = [f"Host memory is not page-locked: {self._refused}."] if self._refused else []
        if "moves" in self.__dict__ and not self.moves.kernels.native:
            found.append(
                f"Weights and gradients are cast by torch's operators, not by kernels of hetmem: "
                f"{self.moves.kernels.reason}. pip install 'hetmem[cuda12]' or 'hetmem[cuda13]'."
            )
        return found

    def _crosses(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        return source.device != target.device

    def _kernels(self) -> Backend:
        return backend()

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        return StreamCopier(CudaStreams(self.torch_device, self._compute), seen, finished)


def _own_index() -> int:
    current = torch.cuda.current_device()
    return current or (local_rank() if local_rank() < torch.cuda.device_count() else 0)


_devices: weakref.WeakSet[CudaDevice] = weakref.WeakSet()


@cache
def _observe_allocator() -> None:
    """Observe torch's allocator, once in a process, as torch cannot remove an observer. Other allocators call none."""
    attach: Any = torch_private.out_of_memory_observer()
    if attach is not None:
        with contextlib.suppress(RuntimeError):  # with cudaMallocAsync, or a plugin's allocator
            attach(_refused)


def _refused(index: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
    """Report a refusal to devices. Raises nothing: that would replace torch's error, which torch catches."""
    with contextlib.suppress(Exception):
        for device in list(_devices):
            if device.torch_device.index in (index, None):
                device.refused(asked_bytes)


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU


class PageLocks:
    """The pieces of `host` from byte `start` on that are page-locked, until `end` is called.

    `cudart` has `cudaHostRegister(address, nbytes, flags)` and `cudaHostUnregister(address)`, which return an error
    code. `error` is the first code other than 0; pieces registered before it stay so.
    """

    def __init__(self, cudart: Any, host: Mapping, start: int = 0) -> None:
        self._cudart, self._host, self._process = cudart, host, os.getpid()  # holds the memory until then
        self.pieces: list[range] = []
        self.error, self.wanted_bytes = 0, host.memory_nbytes - start
        cuts = range(round_down(start, PIECE_BYTES) + PIECE_BYTES, host.memory_nbytes, PIECE_BYTES)
        for begin, end in pairwise((start, *cuts, host.memory_nbytes)):
            piece = range(host.address + begin, host.address + end)
            error = cudart.cudaHostRegister(piece.start, len(piece), _PORTABLE)
            self.error = int(getattr(error, "value", error))  # torch's enumeration, not always a number
            if self.error:
                break
            self.pieces.append(piece)

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(map(len, self.pieces))

    def end(self) -> None:
        """Unregister all pieces, which waits for the driver. Does nothing in a forked child, which lacks the driver's
        state, and at the end of the process, which unlocks its pages anyway."""
        if process_ends():
            _LEFT.append(self)
        elif os.getpid() == self._process:
            while self.pieces:
                self._cudart.cudaHostUnregister(self.pieces.pop().start)


_LEFT: list[PageLocks] = []
"""Kept alive until the end of the process, which unregisters them."""


def _locked_memory_advice(nbytes: int) -> str:
    """Return advice if the driver refuses to page-lock `nbytes`: a higher limit only if it is too low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < nbytes:
        return (
            f"This process may lock {format_size(limit)}: raise the limit (ulimit -l unlimited; in a container "
            f"--ulimit memlock=-1)"
        )
    return "No limit of this process forbids it: look for the driver's own message (dmesg)"


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU, as sysfs names it."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


class ComputeStream:
    """The default stream of one GPU, the only one that a program may compute on: freed memory of slots is reused there
    in the order of that stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.default = torch.cuda.default_stream(device)
        self._handle: Any = None

    def current(self) -> torch.cuda.Stream:
        """Return the default stream. Raises `ManageError` if another one is current."""
        handle_of = torch_private.raw_current_stream
        handle = None if handle_of is None else handle_of(self._device.index)
        if handle is None or handle != self._handle:
            if torch.cuda.current_stream(self._device) != torch.cuda.default_stream(self._device):
                raise ManageError(
                    f"a managed model is used on another stream of {self._device} than its default one: leave out "
                    f"torch.cuda.stream(…) around calls of the model, backward() and step()"
                )
            self._handle = handle
        return self.default

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory that earlier work of the default stream may still use."""
        with torch.cuda.stream(self.default):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        with torch.cuda.stream(self.default):
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)


class CudaStreams:
    """A stream of a GPU for each direction, and its `ComputeClock`."""

    def __init__(self, device: torch.device, compute: ComputeStream) -> None:
        self._device = device
        self._compute = compute
        self.see_compute = compute.current
        self._streams = {link: torch.cuda.Stream(device) for link in (Link.HOST_TO_DEVICE, Link.DEVICE_TO_HOST)}
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def timed_mark(self) -> torch.cuda.Event | None:
        """Return what `mark` does; None while a CUDA graph is captured."""
        return None if torch.cuda.is_current_stream_capturing() else self.mark()

    def mark(self) -> torch.cuda.Event:
        """Return an event on the stream of compute, with the time of this call."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.hetmem_asked = time.perf_counter()  # weak references to events are not cleared in torch 2.11
        event.record(self._compute.current())
        found: torch.cuda.Event = event
        return found

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> torch.cuda.Event:
        """Launch `work` on the stream of `link`, behind the events `after`; return the event of its end. If it raises,
        nothing that `work` launched is still under way."""
        stream, compute, device = self._streams[link], self._compute.current(), torch.cuda.current_device()
        end: Any = torch.cuda.Event(enable_timing=True)
        end.hetmem_asked = time.perf_counter()
        torch.cuda.set_stream(stream)  # `with torch.cuda.stream(…)` queries the current one three times
        try:
            for event in after:
                stream.wait_event(event)
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a failed device runs nothing
                    stream.synchronize()  # launched work uses memory that its owner will free
                raise
            end.record(stream)
        finally:
            torch.cuda.set_stream(compute)  # makes its GPU the current one
            if device != self._device.index:
                torch.cuda.set_device(device)
        ended: torch.cuda.Event = end
        return ended

    def order_compute(self, event: torch.cuda.Event) -> None:
        """Order later compute behind `event`."""
        self._compute.current().wait_event(event)

    now = staticmethod(time.perf_counter)

    def passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def when(self, event: torch.cuda.Event) -> float:
        """Return the time at which `event` passed, from the GPU's time between an earlier event and this one. As the
        GPU's clock may drift from the host's, it is clamped to lie between the request and now."""
        milliseconds: float = self._base.elapsed_time(event)
        seconds: float = self._base_seconds + milliseconds / 1e3
        asked, now = getattr(event, "hetmem_asked", seconds), time.perf_counter()
        if asked <= seconds <= now and milliseconds <= _REBASE_MILLISECONDS:
            return seconds
        self._base, self._base_seconds = event, min(max(seconds, asked), now)
        return self._base_seconds
