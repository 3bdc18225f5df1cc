"""Gives the device to others between steps, an inference engine or another model, and takes it again: `park`, `unpark`
and `parked`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hetmem.base.units import format_size
from hetmem.errors import DeviceOutOfMemoryError, ManageError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk
from hetmem.memory.device import out_of_memory
from hetmem.memory.interrupts import HELD_BACK

Model = torch.nn.Module | Sequence[torch.nn.Module]


class _Left:
    """What a parked model takes to the device again: chunks with homes there, and buffers."""

    def __init__(self, chunks: list[tuple[Chunk, bool]], buffers: list[torch.Tensor]) -> None:
        self.chunks, self.buffers = chunks, buffers


_LEFT: WeakKeyDictionary[Interception, _Left] = WeakKeyDictionary()


@contextmanager
def parked(model: Model) -> Iterator[None]:
    """Have `model` parked in a `with` block: see `park` and `unpark`."""
    park(model)
    try:
        yield
    finally:
        unpark(model)


def park(model: Model, *, prepare: bool = False) -> None:
    """Move all that a managed `model`, or each of several, has on the device to host memory, or to NVMe where that has
    no room, and free its slots and staging, so that others may have the device: no byte of the model stays there.
    `hetmem.report` says how long that took, and what torch's allocator keeps for tensors of the program.

    `prepare=True` parks nothing: the host memory that parking is to take is touched, which the first park would do.

    Weights, states and gradients stay readable at home, `state_dict` and `hetmem.save` work, and a forward, a backward
    or a step raises `ManageError` until `unpark`. States of other optimizers than hetmem's stay where they are.

    Raises `ManageError`, with nothing parked, if a model is not managed or parked already, within a forward or
    backward, between a forward and its backward, and if the program holds memory of the device that is to move
    (`kept = p.data`); `BudgetError` if host memory and NVMe have no room within the budget for homes on the device.
    """
    if prepare:
        for module in _modules(model):
            _prepare(module)
        return
    done = list[torch.nn.Module]()
    try:
        for module in _modules(model):
            _park(module)
            done.append(module)
    except BaseException:
        for module in done:
            _unpark(module)
        raise


def unpark(model: Model) -> None:
    """Take the device again for a `model`, or several, that `park` has moved off it: homes and buffers lie where they
    lay, and copies of weights come at their next use. Training goes on with the same bits.

    Raises `DeviceOutOfMemoryError` if the device has no room, with the model still parked and readable; `ManageError`
    if it is not parked.
    """
    for module in _modules(model):
        _unpark(module)


def _modules(model: Any) -> list[torch.nn.Module]:
    found: list[Any] = [model] if isinstance(model, torch.nn.Module) else list(model)
    for each in found:
        if not isinstance(each, torch.nn.Module):
            raise ManageError(f"expected a managed model, or several, got {type(each).__name__}")
    return found


@HELD_BACK
def _park(module: torch.nn.Module) -> None:
    interception = registry.of_module(module)
    runtime, name = interception.runtime, type(module).__name__
    registry.refuse_of_ranks(module.parameters(), "hetmem.park")
    began = runtime.events.now()
    with runtime.turn.held("hetmem.park", interception.gradients.is_whole):
        if interception in _LEFT:
            raise ManageError(f"{name} is parked already")
        if not interception.at_rest():
            raise ManageError(f"{name} computes: park it between steps, not within a forward or a backward")
        interception.settle_for_reading()
        for listener in interception.gradients.listeners:
            listener.synchronize()
        runtime.traffic.gradients.wait()
        runtime.uses.release_working()
        moves = interception.activations
        if runtime.uses.holds_copies() or (moves is not None and any(moves.held().values())):
            raise ManageError(
                f"{name} is between a forward and its backward, or the program holds a copy of a weight (a view that "
                f"a forward made): run the backward, or drop the loss, before hetmem.park"
            )
        runtime.forget_copies()
        homes = interception.share.leave()
        runtime.room.free_slots()
        device = runtime.memory.device
        buffers = [] if device.watched else [each for each in module.buffers() if each.device == device.torch_device]
        for buffer in buffers:
            buffer.data = buffer.data.cpu()
        runtime.bindings.free_stand_ins()
        device.give_back()
        runtime.statistics.parked_kept_bytes = 0 if device.watched else device.kept_bytes()
        runtime.statistics.parked_used_bytes = 0 if device.watched else device.allocated_bytes()
        _LEFT[interception] = _Left(homes, buffers)
        runtime.turn.parked = True
        runtime.statistics.parks += 1
        runtime.statistics.park_seconds += runtime.events.now() - began


@HELD_BACK
def _prepare(module: torch.nn.Module) -> None:
    interception = registry.of_module(module)
    memory = interception.runtime.memory
    registry.refuse_of_ranks(module.parameters(), "hetmem.park")
    with interception.runtime.turn.held("hetmem.park"):
        if interception in _LEFT:
            raise ManageError(f"{type(module).__name__} is parked already")
        chunks = [chunk for chunk in interception.runtime.chunks if chunk.moved]
        memory.lent.touch(memory.borrow_way_back(chunks))
        for chunk in chunks:
            memory.end_way_back(chunk)


@HELD_BACK
def _unpark(module: torch.nn.Module) -> None:
    interception = registry.of_module(module)
    runtime, name, began = interception.runtime, type(module).__name__, interception.runtime.events.now()
    with runtime.turn.held("hetmem.unpark"):
        left = _LEFT.get(interception)
        if left is None:
            raise ManageError(f"{name} is not parked")
        device = runtime.memory.device
        try:
            runtime.bindings.make_stand_ins()
            interception.share.come_back(left.chunks)
            for buffer in left.buffers:
                buffer.data = buffer.data.to(device.torch_device)
        except torch.OutOfMemoryError as error:
            needed = sum(chunk.home_nbytes(role) for chunk, _ in left.chunks for role in chunk.homes)
            raise DeviceOutOfMemoryError(
                f"{out_of_memory(device)}: {name} stays parked, as its homes on the device take {format_size(needed)} "
                f"and others have not given that back"
            ) from error
        del _LEFT[interception]
        runtime.turn.parked = False
        runtime.statistics.wake_seconds += runtime.events.now() - began
