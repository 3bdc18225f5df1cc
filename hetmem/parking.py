"""Gives the device to others between steps, an inference engine or another model, and takes it again: `park`, `unpark`
and `parked`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hetmem.base.units import format_size
from hetmem.errors import DeviceOutOfMemoryError, HetmemError, ManageError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk
from hetmem.memory.device import out_of_memory
from hetmem.memory.interrupts import HELD_BACK
from hetmem.optim.optimizer import OffloadedOptimizer

Model = torch.nn.Module | Sequence[torch.nn.Module | torch.optim.Optimizer]


class _Left:
    """What a parked model takes to the device again: chunks with homes there, and buffers. `refused_room_bytes`: what
    the device has refused it until then; what it refuses others meanwhile, or waking, is no want of a step."""

    def __init__(self, chunks: list[tuple[Chunk, bool]], buffers: list[torch.Tensor], refused_room_bytes: int) -> None:
        self.chunks, self.buffers, self.refused_room_bytes = chunks, buffers, refused_room_bytes


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

    Host memory that homes go to is page-locked at the first time, and stays so: later ones, and waking, take as long as
    the link. `prepare=True` parks nothing, and does that part alone.

    Weights, states and gradients stay readable at home, `state_dict` and `hetmem.save` work, and a forward, a backward
    or a step raises `ManageError` until `unpark`. Optimizers of hetmem may be given with their models, whose homes
    their states are; states of others stay where they are.

    Raises `ManageError`, with nothing parked, if a model is not managed or parked already, within a forward or
    backward, between a forward and its backward, if the program holds memory of the device that is to move
    (`kept = p.data`), and for an optimizer that is not hetmem's; `BudgetError` if host memory and NVMe have no room
    within the budget for homes on the device, and `CapacityError` if the machine has less host memory left. An error
    that ends it in between is raised with the models awake, or, if the device has no room for that, parked.
    """
    if prepare:
        for module in _modules(model):
            _prepare(module)
    else:
        _for_all(_park, _modules(model), _unpark)


def unpark(model: Model) -> None:
    """Take the device again for a `model`, or several, that `park` has moved off it: homes and buffers lie where they
    lay, and copies of weights come at their next use. Training goes on with the same bits.

    Raises `DeviceOutOfMemoryError` if the device has no room, with all of them still parked and readable; `ManageError`
    if one is not parked. After an error in between, of a copy, it may be called again.
    """
    _for_all(_unpark, _modules(model), _park)


@HELD_BACK
def _for_all(
    do: Callable[[torch.nn.Module], None], modules: list[torch.nn.Module], undo: Callable[[torch.nn.Module], None]
) -> None:
    """Do something for all `modules`, or, after an error, for none."""
    done = list[torch.nn.Module]()
    try:
        for module in modules:
            do(module)
            done.append(module)
    except BaseException:
        for module in done:
            with suppress(HetmemError):  # it stays, and says what it is at its next use
                undo(module)
        raise


def _modules(model: Any) -> list[torch.nn.Module]:
    found: list[Any] = [model] if isinstance(model, torch.nn.Module) else list(model)
    for each in found:
        if isinstance(each, torch.optim.Optimizer) and not isinstance(each, OffloadedOptimizer):
            raise ManageError(
                f"states of {type(each).__module__}.{type(each).__name__} are not hetmem's, and stay where they are: "
                f"park the model without it"
            )
        if not isinstance(each, (torch.nn.Module, OffloadedOptimizer)):
            raise ManageError(f"expected a managed model, or several, got {type(each).__name__}")
    return [each for each in found if isinstance(each, torch.nn.Module)]


@HELD_BACK
def _park(module: torch.nn.Module) -> None:
    interception = registry.of_module(module)
    runtime, name = interception.runtime, type(module).__name__
    statistics, device = runtime.statistics, runtime.memory.device
    registry.refuse_of_ranks(module.parameters(), "hetmem.park")
    began, prepared = runtime.events.now(), statistics.prepare_seconds
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
        buffers = [] if device.watched else [each for each in module.buffers() if each.device == device.torch_device]
        refused = runtime.room.shortage.refused_room_bytes
        _LEFT[interception] = _Left(interception.share.leaving(), buffers, refused)
        runtime.turn.parked = True
        try:
            _leave(interception, _LEFT[interception])
        except BaseException:
            with suppress(torch.OutOfMemoryError):  # else it stays parked
                _take_again(interception, _LEFT[interception])
            raise
        statistics.parks += 1
        statistics.park_seconds += runtime.events.now() - began - (statistics.prepare_seconds - prepared)


def _leave(interception: Interception, left: _Left) -> None:
    runtime = interception.runtime
    statistics, device = runtime.statistics, runtime.memory.device
    interception.share.leave(left.chunks)
    runtime.room.free_slots()
    for buffer in left.buffers:
        buffer.data = buffer.data.cpu()
    runtime.bindings.free_stand_ins()
    device.give_back()
    statistics.parked_kept_bytes = 0 if device.watched else device.kept_bytes()
    statistics.parked_used_bytes = 0 if device.watched else device.allocated_bytes()


def _take_again(interception: Interception, left: _Left) -> None:
    """End `_leave`, also one that an error has ended. Raises torch.OutOfMemoryError, with the model parked."""
    runtime = interception.runtime
    runtime.bindings.make_stand_ins()
    interception.share.come_back(left.chunks)
    for buffer in left.buffers:
        buffer.data = buffer.data.to(runtime.memory.device.torch_device)
    runtime.room.shortage.refused_room_bytes = left.refused_room_bytes
    del _LEFT[interception]
    runtime.turn.parked = False


@HELD_BACK
def _prepare(module: torch.nn.Module) -> None:
    interception = registry.of_module(module)
    registry.refuse_of_ranks(module.parameters(), "hetmem.park")
    with interception.runtime.turn.held("hetmem.park"):
        if interception in _LEFT:
            raise ManageError(f"{type(module).__name__} is parked already")
        chunks = [chunk for chunk in interception.runtime.chunks if chunk.moved]
        interception.share.prepare(chunks)
        interception.share.end_prepared(chunks)


@HELD_BACK
def _unpark(module: torch.nn.Module) -> None:
    interception = registry.of_module(module)
    runtime, name, began = interception.runtime, type(module).__name__, interception.runtime.events.now()
    with runtime.turn.held("hetmem.unpark"):
        left = _LEFT.get(interception)
        if left is None:
            raise ManageError(f"{name} is not parked")
        try:
            _take_again(interception, left)
        except torch.OutOfMemoryError as error:
            runtime.bindings.free_stand_ins()
            runtime.memory.device.give_back()
            needed = sum(chunk.home_nbytes(role) for chunk, _ in left.chunks for role in chunk.homes)
            raise DeviceOutOfMemoryError(
                f"{out_of_memory(runtime.memory.device)}: {name} stays parked, as its homes on the device take "
                f"{format_size(needed)} and others have not given that back{runtime.memory.device.told_free()}"
            ) from error
        runtime.statistics.wake_seconds += runtime.events.now() - began
