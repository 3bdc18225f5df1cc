"""Once the first step is traced: put parameters that are used together into the same chunks.

Chunks are first filled in order of registration. Where the trace shows another order of use, parameters trade places
before the first update, while the homes of the optimizer's states are still empty and serve as scratch: no tier needs
a byte more. Moves values; the layout itself is `schedule.layout`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from hetmem.engine.build import reside
from hetmem.engine.gradients import is_home_gradient
from hetmem.engine.old_gradients import is_kept
from hetmem.engine.param_views import is_shared, storage_references
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.schedule.layout import Layout, ParameterSpec, build_layout, used_ends

_SCRATCH = 2


def arrange_by_use(runtime: Runtime) -> bool:
    """Rearrange the chunks whose states are still empty in order of first use; whether anything was changed.

    Nothing is changed if the order is that already, if an update was begun (streamed gradients need that in the first
    backward), or if somebody holds a view of a home (a `state_dict`, say) or of a copy, which would show other weights
    afterwards. Call it between a backward and the first update.
    """
    if runtime.traffic.updating or any(home.written for chunk in runtime.chunks for home in chunk.homes.values()):
        return False  # an update was begun in the backward: it is of a chunk as it is now, or has states there
    movable = [chunk for chunk in runtime.chunks if Role.GRAD in chunk.homes and len(_scratch(chunk)) >= _SCRATCH]
    groups: dict[Hashable, list[Chunk]] = {}
    for chunk in (chunk for chunk in movable if chunk.spec.span == 1):
        states = frozenset(role for role in chunk.homes if role.is_state)  # not all chunks may have the same optimizer
        groups.setdefault((chunk.spec.group, states), []).append(chunk)
    plans = [(chunks, _plan(runtime, chunks)) for chunks in groups.values()]
    moves = [(chunks, plan) for chunks, plan in plans if plan is not None]
    held = any(_is_held(managed) for chunks, _ in moves for chunk in chunks for managed in chunk.parameters)
    if not moves or held or runtime.holds_copies():
        return False
    runtime.forget_copies()
    with torch.no_grad():
        for chunks, (order, layout) in moves:
            _move(chunks, order, layout, runtime.memory.device.torch_device)
    runtime.parameters = [managed for chunk in runtime.chunks for managed in chunk.parameters]
    runtime.relearn()
    return True


def _scratch(chunk: Chunk) -> list[Role]:
    """Roles of states that are as large as parameters."""
    return [role for role in chunk.homes if role.is_state and role.dtype is None]


def _plan(runtime: Runtime, chunks: Sequence[Chunk]) -> tuple[list[ManagedParameter], Layout] | None:
    """The parameters of `chunks` in order of first use and their layout; None if nothing is gained by it."""
    parameters = [managed for chunk in chunks for managed in chunk.parameters]
    order = sorted(parameters, key=lambda managed: managed.first_use if managed.first_use > 0 else 1 << 60)
    specs = [ParameterSpec(managed.name, managed.numel, "", managed.chunk.dtype.itemsize) for managed in order]
    layout = build_layout(specs, runtime.memory.layout.chunk_elements)
    together = [{id(order[index]) for index in chunk.parameters} for chunk in layout.chunks]
    before = [{id(managed) for managed in chunk.parameters} for chunk in chunks]
    if together == before or len(layout.chunks) > len(chunks):
        return None
    return order, layout


def _is_held(managed: ManagedParameter) -> bool:
    """Whether somebody else has a view of the home of `managed` or of its gradient's, or has put something else into
    `p.grad`, or has taken that out of it."""
    if managed.parameter.grad is not None and not is_home_gradient(managed):
        return True
    if not managed.numel:
        return False
    if managed.grad_home is not None and (
        is_kept(managed) if managed.parameter.grad is None else is_shared(managed.grad_home)
    ):
        return True
    return storage_references(managed.home) > managed.home_references


def _move(chunks: Sequence[Chunk], order: list[ManagedParameter], layout: Layout, device: torch.device) -> None:
    """Gather parameters and gradients in the empty homes of the states, then put them into place."""
    live = {id(managed) for managed in order if managed.parameter.grad is not None}
    for role, scratch in zip((Role.PARAM, Role.GRAD), _scratch(chunks[0]), strict=False):
        for placement in layout.placements:
            managed, target = order[placement.parameter], chunks[placement.chunk]
            if role is Role.PARAM or id(managed) in live:
                gathered = target.flat(scratch, whole=True)[placement.offset : placement.offset + placement.numel]
                gathered.copy_(managed.part(managed.chunk.flat(role)))
        for chunk in chunks:
            chunk.flat(role, whole=True).copy_(chunk.flat(scratch, whole=True))
            chunk.flat(scratch, whole=True).zero_()
    ends = used_ends(layout)
    for chunk in chunks:
        chunk.parameters = []
    for index, spec in enumerate(layout.chunks):
        chunks[index].spec = replace(spec, index=chunks[index].spec.index, group=chunks[index].spec.group)
        chunks[index].numel = ends[index]
    for placement in layout.placements:
        managed = order[placement.parameter]
        managed.chunk, managed.offset = chunks[placement.chunk], placement.offset
        managed.chunk.parameters.append(managed)
        reside(managed, managed.view(Role.PARAM), device)
        if id(managed) in live:
            assert managed.grad_home is not None
            managed.grad_home.data = managed.view(Role.GRAD)  # the tensor that others know stays the same one
            managed.grad_address = managed.grad_home.data_ptr()
        else:
            managed.grad_home = None
