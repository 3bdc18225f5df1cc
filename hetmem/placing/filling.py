"""Moves parameters to their homes, from ordinary memory or from memory of the tiers that they were built in.

Note "in place": the homes of a module that was built in memory of its tiers are in that same memory. Each parameter's
offset is known only when all are built, so they are moved within it, in an order that overwrites nothing that has not
moved; if there is none (two swap) one waits in ordinary memory.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import TypeVar

import torch

from hetmem import torch_private
from hetmem.cpu.workers import WorkerPool
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import leave_coded, reside
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of
from hetmem.memory.coded import CodedHome, Run
from hetmem.memory.interrupts import HELD_BACK
from hetmem.placing.building_memory import BuildingMemory
from hetmem.placing.taken import TakenOver

_Dimensions = TypeVar("_Dimensions", bound="tuple[int, ...]")


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
        if built is None or memory.ranks is not None:  # homes that ranks share are not in the memory of building
            for managed in found:
                HELD_BACK.raise_here()
                if managed.code is not None:
                    undone.callback(_put_back, managed, managed.parameter.data)
                _move(memory, managed, built, workers.run, taken)
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
    source = built.source(data) if built is not None else range(0)
    if managed.code is not None:
        coded = managed.chunk.source(Role.PARAM)
        assert isinstance(coded, CodedHome), managed.name
        if memory.ranks is not None and memory.ranks.rank:
            pass  # the codes of rank 0 count
        elif (weight := taken.of(managed.parameter)) is not None:
            weight.fill(managed.code.bytes_in(coded.codes))
        elif _is_unfilled(data):
            managed.code.bytes_in(coded.codes).fill_(_DECODES_TO_NAN)
        else:
            values = data.clone() if source else data  # codes may overlap them
            managed.code.encode(values.reshape(-1), coded.codes, run)
        if memory.ranks is not None and memory.ranks.machines is not None and memory.ranks.rank == 0:
            codes = managed.code.bytes_in(coded.codes)
            codes.copy_(memory.ranks.machines.shared(codes))
        managed.chunk.parameters.append(managed)
        reside(managed, data, memory.device.torch_device)
        return
    home = managed.view(Role.PARAM)
    if memory.ranks is not None:
        if memory.ranks.rank == 0:  # whose values count, on the first machine
            values = data if memory.ranks.machines is None else memory.ranks.machines.shared(data)
            for role in (Role.PARAM, Role.COMPUTE):
                if role in managed.chunk.homes:
                    managed.at_home(role).copy_(values)
        if built is not None:
            built.leave(data)
    elif built is not None and source and home.device.type == "cpu":
        _copy_bytes(home, data, over_disk=built.on_disk(source.start))
        built.freed.add(home.nbytes)
    else:
        home.copy_(data)
    managed.chunk.parameters.append(managed)
    if memory.ranks is None:
        managed.recast(home)
    reside(managed, home, memory.device.torch_device)


def _copy_bytes(home: torch.Tensor, data: torch.Tensor, *, over_disk: bool) -> None:
    """Copy `data` to `home`, which may overlap it and is as dense. Data on disk is first read from start to end, as the
    system's read-ahead does not work for overlapping copies that run backwards."""
    if home.data_ptr() != data.data_ptr():
        if over_disk:
            data = data.clone()
        ctypes.memmove(home.data_ptr(), data.data_ptr(), data.numel() * data.itemsize)


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
