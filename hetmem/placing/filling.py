"""Builds modules in memory of the tiers, and moves parameters to their homes: from there, or from ordinary memory.

Note "in place": the homes of a module that was built in memory of its tiers are in that same memory. Each parameter's
offset is known only when all are built, so they are moved within it, in an order that overwrites nothing that has not
moved; if there is none (two swap) one waits in ordinary memory.

Note "ended twice": an interrupt may come before the first instruction of code that ends something, also of a `with`. So
ending is tried twice: the second call does it if the first did not begin, and otherwise has nothing left to do.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetmem import torch_private
from hetmem.base.config import Limits
from hetmem.base.units import format_size, round_down, round_up
from hetmem.cpu.workers import WorkerPool
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import is_shared, leave_coded, reside, storage_references
from hetmem.errors import BudgetError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of, elements, give_away
from hetmem.memory.coded import CodedHome, Run
from hetmem.memory.device import Device
from hetmem.memory.heap import Freed, untouched
from hetmem.memory.host_memory import PAGE_BYTES, Mapping, free_host_bytes
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import NvmeStore
from hetmem.placing.taken import TakenOver
from hetmem.torch_private import is_traceable_wrapper_subclass

_Dimensions = TypeVar("_Dimensions", bound="tuple[int, ...]")
_ALIGNMENT_BYTES = 512
_NOWHERE = range(0)


class BuildingMemory:
    """The memory of the tiers that a module is built in: host memory first, then NVMe, then ordinary memory for
    parameters that will have their home on the device.

    `host_bytes`: what homes may take of host memory. `device_bytes`: the device budget, None = unknown.
    """

    def __init__(self, limits: Limits, host_bytes: int, device_bytes: int | None) -> None:
        self.host_bytes = round_down(host_bytes, PAGE_BYTES)
        self.mapping = Mapping(max(PAGE_BYTES, self.host_bytes))
        self.store: NvmeStore | None = None
        self._limits, self._device_bytes = limits, device_bytes
        self._host_used = self._beside_bytes = 0
        self._placed: list[torch.Tensor] = []
        self.freed = Freed()
        """Blocks of ordinary memory that parameters were in before, or were copied through."""
        self._files: dict[int, range] = {}
        """Addresses used in each file of the store."""

    def place(self, parameter: torch.nn.Parameter) -> None:
        """Move `parameter`, which is dense and in ordinary memory, to the tiers' memory while it has room."""
        nbytes = parameter.numel() * parameter.itemsize
        memory = self._take(nbytes)
        if memory is None:
            self._stay(nbytes)
            return
        flat = elements(memory, parameter.dtype, parameter.numel())
        _copy_touched(address_of(memory), parameter.data_ptr(), nbytes)
        with torch.no_grad():
            parameter.data = flat.as_strided(parameter.shape, parameter.stride())
        self.freed.add(nbytes)
        self._placed.append(flat)

    def _take(self, nbytes: int) -> memoryview | None:
        start = round_up(self._host_used, _ALIGNMENT_BYTES)
        if start + nbytes <= self.host_bytes:
            self._host_used = start + nbytes
            return self.mapping.buffer(start, nbytes)
        if not self._limits.nvme_directories:
            return None
        if self.store is None:
            self.store = NvmeStore(list(self._limits.nvme_directories), self._limits.nvme_bytes)
        if self.store.reserved_bytes + round_up(nbytes, PAGE_BYTES) > self.store.capacity_bytes:
            return None
        extent = self.store.reserve(nbytes)
        memory = self.store.view(extent)
        begin = address_of(memory) - extent.offset
        self._files[extent.file] = range(begin, begin + extent.offset + extent.nbytes)
        return memory[:nbytes]

    def _stay(self, nbytes: int) -> None:
        """Count bytes that stay in ordinary memory, and refuse more than the device could hold in the end."""
        self._beside_bytes += nbytes
        if self._device_bytes is not None and self._beside_bytes > self._device_bytes:
            raise BudgetError(
                f"the parameters that are built so far fill host memory ({format_size(self.host_bytes)}) and NVMe "
                f"({format_size(self._limits.nvme_bytes)}), and {format_size(self._beside_bytes)} of them are beside, "
                f"which the device ({format_size(self._device_bytes)}) has no room for: raise Budget(host=…), or "
                f"Budget(nvme=…, nvme_dir=…)"
            )

    def hand_over(self, module: torch.nn.Module) -> None:
        """Release this memory for homes, over the parameters of `module` in it. Other tensors that share it get memory
        of their own and keep their values."""
        owned = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        for flat in self._placed:
            if storage_references(flat) > 2 + (flat.untyped_storage()._cdata in owned):
                give_away(flat)
        self._placed.clear()
        if self.store is not None:
            self.store.forget()

    def source(self, data: torch.Tensor) -> range:
        """Return the addresses of `data` if it is in this memory."""
        start = data.data_ptr()
        host = self.mapping.address
        if host <= start < host + self._host_used or self.on_disk(start):
            return range(start, start + data.numel() * data.itemsize)
        return _NOWHERE

    def on_disk(self, address: int) -> bool:
        """Return whether `address` is in the store."""
        return any(address in known for known in self._files.values())

    def clear(self, memory: Memory) -> None:
        """Zero the gaps in the homes in this memory, and release the memory that no home uses."""
        for chunk in memory.chunks:
            for role, home in chunk.homes.items():
                if isinstance(home.memory, memoryview):
                    _clear_gaps(chunk, role, home.memory)
        pool = memory.host_pool
        used = min(round_up(pool.reserved_bytes, PAGE_BYTES), self.mapping.nbytes)
        self.mapping.shorten(max(PAGE_BYTES, pool.capacity_bytes), used)
        if self.store is not None and self.store is memory.store:
            self.store.trim()
        elif self.store is not None:
            self.store.close()

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


def move_home(
    memory: Memory, module: torch.nn.Module, built: BuildingMemory | None, taken: TakenOver, undone: ExitStack
) -> None:
    """Move the parameters of `module`, for which `memory` was made, to their homes, and its buffers to the device;
    `taken` has the codes of some.

    Held-back interrupts are raised between two parameters; those in `Memory.parameters` have moved by then. `undone`
    undoes it for those that are quantised, whose codes do not have all of their values; until it is closed, or forgets
    that, they stay in memory, unless they were `built`, and are lost with the module.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            _leave_meta(parameter, undone)
    buffers = [(buffer, buffer.data.to(memory.device.torch_device)) for buffer in module.buffers()]
    parameters = dict(module.named_parameters())
    _separate_versions(parameters.values())
    found = [
        _managed(memory.chunks[placement.chunk], placement.offset, name, parameter)
        for placement, (name, parameter) in zip(memory.layout.placements, parameters.items(), strict=True)
    ]
    workers = WorkerPool(cores=memory.device.cores)
    try:
        if built is None:
            for managed in found:
                HELD_BACK.raise_here()
                if managed.code is not None:
                    undone.callback(_put_back, managed, managed.parameter.data)
                _move(memory, managed, None, workers.run, taken)
        else:
            _move_in_place(memory, found, built, workers.run, taken)
            built.clear(memory)
    finally:
        workers.close()
    if memory.ranks is not None:
        memory.ranks.meet("the end of hetmem.manage")
    for buffer, moved in buffers:
        buffer.data = moved


def _leave_meta(parameter: torch.nn.Parameter, undone: ExitStack) -> None:
    """Give `parameter` a stand-in of NaN in host memory: torch sets no `.data` on another device than `meta`."""
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device="cpu").expand(parameter.shape)
    other = torch.nn.Parameter(nothing, requires_grad=False)
    torch_private.swap_impl(parameter, other)
    undone.callback(torch_private.swap_impl, parameter, other)


def _put_back(managed: ManagedParameter, data: torch.Tensor) -> None:
    """Make a quantised parameter what it was before it had a home, an ordinary one over `data`."""
    leave_coded(managed, data)
    with suppress(ValueError):  # it has not moved
        managed.chunk.parameters.remove(managed)


def _is_unfilled(data: torch.Tensor) -> bool:
    """Return whether all elements of `data` are one NaN in memory, as of a parameter that was on `meta`."""
    return not any(data.stride()) and data.numel() > 1 and bool(data.flatten()[0].isnan())


_NO_HOME = torch.empty(0, device="cpu")  # until the parameter has one


def _managed(chunk: Chunk, offset: int, name: str, parameter: torch.nn.Parameter) -> ManagedParameter:
    data = parameter.data
    code = next((part for part in chunk.codes if part.offset == offset), None)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(data) and code is None
    strides = data.stride() if dense and data.numel() else torch.empty(data.shape, device="meta").stride()
    shape, strides = _shared(data.shape), _shared(strides)
    return ManagedParameter(parameter, name, chunk, offset, data.numel(), shape, strides, _NO_HOME, code)


@lru_cache(1024, typed=True)
def _shared(dimensions: _Dimensions) -> _Dimensions:
    """Return one object for all that are equal: a model has many parameters and few shapes."""
    return dimensions


def _move_in_place(
    memory: Memory, found: Sequence[ManagedParameter], built: BuildingMemory, run: Run, taken: TakenOver
) -> None:
    """Move parameters within the memory they were built in: see note "in place"."""
    sources = [built.source(managed.parameter.data) for managed in found]
    for index, goes_home in _order(sources, [_target(managed) for managed in found]):
        HELD_BACK.raise_here()
        managed = found[index]
        if goes_home:
            _move(memory, managed, built, run, taken)
        else:
            managed.parameter.data = managed.parameter.data.clone()
    for chunk in memory.chunks:
        chunk.parameters.sort(key=lambda managed: managed.offset)


def _target(managed: ManagedParameter) -> range:
    start = address_of(managed.chunk.homes[Role.PARAM].memory)
    if managed.code is not None:
        return range(start + managed.code.start, start + managed.code.start + managed.code.coding.nbytes)
    start += managed.offset * managed.chunk.dtype.itemsize
    return range(start, start + managed.numel * managed.chunk.dtype.itemsize)


def _order(sources: Sequence[range], targets: Sequence[range]) -> Iterator[tuple[int, bool]]:
    """Yield each index with True once nothing that has still to move overlaps its target, and with False before, if it
    must wait in other memory. Neither sources nor targets overlap each other."""
    by_start = sorted((index for index, source in enumerate(sources) if source), key=lambda index: sources[index].start)
    starts = [sources[index].start for index in by_start]
    blocked: dict[int, set[int]] = {}
    blocks: dict[int, list[int]] = {}
    for index, target in enumerate(targets):
        at = max(0, bisect_right(starts, target.start) - 1)
        while at < len(starts) and starts[at] < target.stop:
            other = by_start[at]
            if other != index and sources[other].stop > target.start:
                blocked.setdefault(index, set()).add(other)
                blocks.setdefault(other, []).append(index)
            at += 1
    ready = deque(index for index in range(len(targets)) if index not in blocked)
    while ready or blocked:
        goes_home = bool(ready)
        moved = ready.popleft() if goes_home else next(iter(next(iter(blocked.values()))))
        yield moved, goes_home
        for index in blocks.pop(moved, ()):
            blocked[index].discard(moved)
            if not blocked[index]:
                del blocked[index]
                ready.append(index)


def _move(memory: Memory, managed: ManagedParameter, built: BuildingMemory | None, run: Run, taken: TakenOver) -> None:
    data = managed.parameter.data
    source = built.source(data) if built is not None else _NOWHERE
    if managed.code is not None:
        coded = managed.chunk.source(Role.PARAM)
        assert isinstance(coded, CodedHome), managed.name
        if (weight := taken.of(managed.parameter)) is not None:
            weight.fill(managed.code.bytes_in(coded.codes))
        elif _is_unfilled(data):
            managed.code.bytes_in(coded.codes).fill_(_DECODES_TO_NAN)
        else:
            values = data.clone() if source else data  # codes may overlap them
            managed.code.encode(values.reshape(-1), coded.codes, run)
        managed.chunk.parameters.append(managed)
        reside(managed, data, memory.device.torch_device)
        return
    home = managed.view(Role.PARAM)
    if memory.ranks is not None:
        if memory.ranks.rank == 0:  # whose values count
            managed.at_home(Role.PARAM).copy_(data)
    elif built is not None and source and home.device.type == "cpu":
        _copy_bytes(home, data, over_disk=built.on_disk(source.start))
        built.freed.add(home.nbytes)
    else:
        home.copy_(data)
    managed.chunk.parameters.append(managed)
    if memory.ranks is None or memory.ranks.rank == 0:
        managed.recast(home)
    reside(managed, home, memory.device.torch_device)


def _copy_touched(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address `source` to `target`, where zeros are, without pages that were never
    written: these are zeros too, and reading them would touch them."""
    end = source + nbytes
    zeros = untouched(source, nbytes) or range(end, end)
    for start, stop in (source, zeros.start), (zeros.stop, end):
        ctypes.memmove(target + start - source, start, stop - start)


def _copy_bytes(home: torch.Tensor, data: torch.Tensor, *, over_disk: bool) -> None:
    """Copy `data` to `home`, which may overlap it and is as dense. Data on disk is first read from start to end, as the
    system's read-ahead does not work for overlapping copies that run backwards."""
    if home.data_ptr() != data.data_ptr():
        if over_disk:
            data = data.clone()
        ctypes.memmove(home.data_ptr(), data.data_ptr(), data.numel() * data.itemsize)


def _clear_gaps(chunk: Chunk, role: Role, home: memoryview) -> None:
    """Zero the parts of `home` that no parameter uses."""
    memory = np.frombuffer(home, np.uint8)
    if chunk.codes and role == Role.PARAM:
        last = chunk.codes[-1]
        memory[last.start + last.coding.nbytes : chunk.home_nbytes(role)] = 0
        return
    itemsize, end = chunk.dtype_of(role).itemsize, 0
    for managed in chunk.parameters:
        memory[end : managed.offset * itemsize] = 0
        end = (managed.offset + managed.numel) * itemsize
    memory[end : chunk.home_nbytes(role)] = 0


_DECODES_TO_NAN = 0xFF
"""Bytes of this decode to NaN, or of mxfp4 to infinities."""


def _separate_versions(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters that are views of one tensor version counters of their own, unless a graph has them: with a
    common one, an update of one would look like a write to the others."""
    of_storage: dict[int, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        of_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    for together in of_storage.values():
        for parameter in together[1:]:
            hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            if parameter.grad is None and not hooks and parameter.numel():
                alone = torch.nn.Parameter(parameter.data, parameter.requires_grad)
                with suppress(RuntimeError):
                    torch_private.swap_impl(parameter, alone)


# ---- While a module is built, its parameters go to memory of the tiers, so that they never fill host memory. ----

HOST_SHARE = 0.6
"""Share of the free memory that is used without a budget. The rest is for the system and the program."""

_state = threading.local()
T = TypeVar("T")


def as_written(build: Callable[[], T]) -> T:
    """Return `build()` without what `hetmem.managed` adds to classes, on this thread: for a plan."""
    before = getattr(_state, "as_written", False)
    try:  # see note "ended twice"
        try:
            _state.as_written = True
            return build()
        finally:
            _state.as_written = before
    finally:
        _state.as_written = before


def build_within(limits: Limits, device: Device, build: Callable[[], None]) -> BuildingMemory:
    """Run `build()` while every parameter that a module registers moves to memory of the tiers; return that memory."""
    building = Building(limits, device)
    try:  # see note "ended twice"
        try:
            building.begin()
            build()
            building.place_pending()
        finally:
            building.end()
    except BaseException:
        building.memory.close()
        raise
    finally:
        building.end()
    return building.memory


class Building:
    """Moves every parameter that any module registers, on the thread that began it, to memory of the tiers.

    A parameter that was never written moves as it is registered, so that it is initialised where it lies then. Any
    other moves when another module registers its first one, and at the end: usually nothing else holds its memory by
    then. Reentrant use is an error of the caller.
    """

    def __init__(self, limits: Limits, device: Device) -> None:
        self._handle: Any = None
        check_directories(limits)
        given = [size for size in (limits.device_bytes, device.memory_bytes) if size is not None]
        self.memory = BuildingMemory(limits, host_bytes(limits), min(given, default=None))
        self._pending: list[weakref.ref[torch.nn.Parameter]] = []
        self._module: weakref.ref[torch.nn.Module] | None = None
        """The module that registered the pending parameters."""

    @staticmethod
    def active() -> bool:
        """Return whether a module is being built on this thread, here or by `as_written`."""
        return getattr(_state, "building", None) is not None or getattr(_state, "as_written", False)

    @HELD_BACK
    def begin(self) -> None:
        """Begin to move registered parameters."""
        self._handle = register_module_parameter_registration_hook(self._registered)
        _state.building = self

    @HELD_BACK
    def end(self) -> None:
        """End that, if it has begun and not ended yet."""
        _state.building = None
        if self._handle is not None:
            self._handle.remove()

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is None or getattr(_state, "building", None) is not self:
            return
        if self._module is None or self._module() is not module:
            self.place_pending()
            self._module = weakref.ref(module)
        if _is_placed(parameter) and untouched(parameter.data_ptr(), parameter.numel() * parameter.itemsize):
            self.memory.place(parameter)
        else:
            self._pending.append(weakref.ref(parameter))

    def place_pending(self) -> None:
        """Move the pending parameters."""
        pending, self._pending = self._pending, []
        for reference in pending:
            parameter = reference()
            if parameter is not None and _is_placed(parameter):
                self.memory.place(parameter)


def _is_placed(parameter: torch.nn.Parameter) -> bool:
    """Return whether `parameter` can lie in memory of the tiers. Parameters that share memory cannot: `collect` refuses
    them."""
    return (
        parameter.device.type == "cpu"
        and not torch.nn.parameter.is_lazy(parameter)
        and not is_traceable_wrapper_subclass(parameter)
        and parameter.layout is torch.strided
        and parameter.numel() > 0
        and not parameter.is_inference()
        and not is_shared(parameter)
        and torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
    )


def check_directories(limits: Limits) -> None:
    """Raise `BudgetError` for a path of the NVMe tier that is no directory or not writable, even if unused."""
    for directory in limits.nvme_directories:
        if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
            what = "is no directory" if not os.path.isdir(directory) else "may not be written to"
            raise BudgetError(
                f"Budget(nvme_dir=…): {str(directory)!r} {what}: name an existing, writable directory on the disk to "
                f"use"
            )


def host_bytes(limits: Limits) -> int:
    """Return the bytes of host memory for homes and staging."""
    if limits.host_bytes is not None:
        return limits.host_bytes
    return int(free_host_bytes() * HOST_SHARE)
