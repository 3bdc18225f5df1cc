"""Maps modules and parameters to the `Interception` that manages them, weakly, and hooks the steps of all optimizers.

Note "scalers": torch's `GradScaler` keeps the scale, and whether a gradient was not finite, in GPU tensors. For
gradients in host memory torch copies both with `non_blocking=True`, which orders only work of the device. The CPU may
read before the copy: a wrong scale, or a missed overflow. So hetmem waits for these copies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import chain
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetmem import torch_private
from hetmem.base.units import format_size
from hetmem.base.warning import warn_user
from hetmem.engine.gradient_views import updated_by_another
from hetmem.engine.runtime import Runtime, Section, Turn, in_backward
from hetmem.errors import ManageError, StoreError
from hetmem.intercept.forward_scope import calling_frame, running
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK
from hetmem.ranks.group import not_yet

_modules: WeakKeyDictionary[torch.nn.Module, Interception] = WeakKeyDictionary()
_at_work: WeakKeyDictionary[torch.nn.Module, set[object]] = WeakKeyDictionary()
"""By module, the optimizers with updates under way: they refer to its `Interception`, which must not refer to them."""
_taken: dict[int, list[tuple[Turn, Section]]] = {}
"""By thread, the turns taken for a step of an optimizer that is not hetmem's."""
_warned: WeakSet[Interception] = WeakSet()
"""Models that were warned of: states of their optimizer lie outside of the budget."""


@HELD_BACK
def _before_any_optimizer(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Take the turns of all models that another optimizer than hetmem's steps, until its `step` ends: it writes to
    homes itself, and no other thread may compute meanwhile."""
    if getattr(optimizer, "writes_homes", False) or not _modules:
        return
    _give_turns()  # if the last step raised
    runs = running(calling_frame(optimizer, sys._getframe()))
    managed = managed_among(_parameters_of(optimizer))
    for interception in sorted(managed, key=lambda found: found.runtime.turn.number):
        runtime = interception.runtime
        section = runtime.turn.take(f"a step of {type(optimizer).__name__}", runs)
        interception.is_computing()  # ends what an interrupt has ended, which may have left weights bound
        runtime.outgoing.wait_for(runtime.chunks)
        _taken.setdefault(get_ident(), []).append((runtime.turn, section))
        if runtime.writes.announced is not None:
            runtime.writes.announced([each for each in managed[interception] if each.parameter.grad is not None])
        if not in_backward():  # an optimizer within a backward steps a part of the model
            runtime.events.begin_segment("step")
            runtime.marks.begin_step(runs)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _give_turns() -> None:
    for turn, section in _taken.pop(get_ident(), ()):
        turn.give(section)


@HELD_BACK
def _after_any_optimizer(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Note that another optimizer than hetmem's wrote its parameters: torch's fused ones count no versions."""
    if getattr(optimizer, "writes_homes", False):
        return
    try:
        _take_note(optimizer)
    finally:
        _give_turns()


def _take_note(optimizer: torch.optim.Optimizer) -> None:
    stepped = managed_among(_parameters_of(optimizer))
    for interception, parameters in stepped.items():
        begun = [listener.begun() for listener in interception.gradients.listeners]
        for managed in parameters if begun else ():
            if any(managed in updated for updated in begun):
                raise RuntimeError(updated_by_another(managed.name))
    for interception, parameters in stepped.items():
        interception.runtime.memory.bound_to_device = True
        with suppress(StoreError):  # of an older request: a program that repeats the step would update twice
            interception.runtime.writes.by_optimizer(parameters)
        _count_step(interception.runtime)
        if not in_backward():
            interception.runtime.marks.end_step()
            interception.runtime.marks.resume()
        _warn_of_states(interception, optimizer)
        with suppress(Exception), interception.runtime.unwatched():
            interception.runtime.uses.renew_held_copies()


def _count_step(runtime: Runtime) -> None:
    """Count a step of another optimizer than hetmem's in reports, as an update by the host for all of its time."""
    segment = runtime.events.running()
    if segment is not None and segment[0] == "step":
        runtime.events.updates.append(("all", segment[1], runtime.events.now()))
        runtime.events.end_segment()
        runtime.statistics.steps += 1


def _warn_of_states(interception: Interception, optimizer: torch.optim.Optimizer) -> None:
    """Warn, once for each model, that `optimizer` has states for it in memory that no budget counts."""
    if interception in _warned:
        return
    by_id, name = interception.runtime.bindings.by_id, type(optimizer).__name__
    found = (state.values() for parameter, state in optimizer.state.items() if id(parameter) in by_id)
    nbytes = sum(v.numel() * v.itemsize for values in found for v in values if isinstance(v, torch.Tensor) and v.dim())
    if nbytes:
        _warned.add(interception)
        if _is_elementwise(optimizer):
            way = (
                f"make hetmem.AdamW(model.parameters(), …), or hetmem.optim.offload({name}, …), and give it to a "
                f"Trainer as optimizers=(optimizer, None)"
            )
        else:
            way = (
                "hetmem.optim.offload, which runs elementwise updates with states of the weight's shape, cannot run "
                "it; it trains as it is, with the bits of plain torch, where Budget(host=…) leaves that memory free"
            )
        warn_user(
            f"{name} keeps {format_size(nbytes)} of states outside of the budget of hetmem.manage: {way}; said once"
        )


_OF_WHOLE_TENSORS = {"Muon", "Adafactor", "LBFGS", "SparseAdam"}
"""Names of classes of torch, and of libraries, whose update of an element depends on others."""


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` may be one that `hetmem.optim.offload` runs, judged by its classes and its states."""
    if not _OF_WHOLE_TENSORS.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        return False
    return all(
        value.shape == parameter.shape
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


_before_optimizers = register_optimizer_step_pre_hook(_before_any_optimizer)
_watched_optimizers = register_optimizer_step_post_hook(_after_any_optimizer)


def add(module: torch.nn.Module, interception: Interception) -> None:
    """Register `interception` as the manager of `module`."""
    _modules[module] = interception
    interception.runtime.writes.source_of = _of_storage
    interception.runtime.traffic.executor.keep_in(_at_work.setdefault(module, set()))


def remove(module: torch.nn.Module) -> Interception:
    """Unregister `module` and return the `Interception` that managed it. Raises `ManageError` if none did."""
    interception = of_module(module)
    del _modules[module]
    return interception


def of_module(module: torch.nn.Module) -> Interception:
    """Return the `Interception` that manages `module`. Raises `ManageError` if none does."""
    if not isinstance(module, torch.nn.Module):
        raise ManageError(f"expected a managed torch.nn.Module, got {type(module).__name__}")
    found = _modules.get(module)
    if found is None:
        raise ManageError(
            f"this {type(module).__name__} is not managed: call hetmem.manage(model, …) first, and pass the module "
            f"that it returned (not a part of it)"
        )
    return found


def interceptions() -> list[Interception]:
    """Return the `Interception` of each managed module."""
    return list(_modules.values())


def of_parameter(parameter: torch.Tensor) -> tuple[Interception, ManagedParameter] | None:
    """Return the `Interception` and the record of `parameter`; None if it is not managed."""
    return next(((by, found[0]) for by, found in managed_among((parameter,)).items()), None)


def managed_among(parameters: Iterable[torch.Tensor]) -> dict[Interception, list[ManagedParameter]]:
    """Return the managed ones of `parameters`, in order, by their `Interception`. Runs in C, as each step of any
    optimizer in the process calls it."""
    if not _modules:
        return {}
    keys = [*map(id, parameters)]  # all are alive, so no `id` is of a parameter that is gone
    found = {each: [*filter(None, map(each.runtime.bindings.by_id.get, keys))] for each in interceptions()}
    return {each: managed for each, managed in found.items() if managed}


def refuse_of_ranks(parameters: Iterable[torch.Tensor], what: str) -> None:
    """Raise `ManageError` for `what` if several ranks manage any of `parameters`."""
    for interception in managed_among(parameters):
        if interception.runtime.memory.ranks is not None:
            raise not_yet(what)


def _of_storage(tensor: torch.Tensor) -> ManagedParameter | None:
    """Return the parameter, of any managed model, that `tensor` is a view of, or None."""
    found = (each.runtime.bindings.of_storage(tensor) for each in interceptions())
    return next((managed for managed in found if managed is not None), None)


def added_as(parameter: torch.Tensor) -> str | None:
    """Return the name of `parameter`, added to a model after `manage`; None if no managed model has it."""
    parts = (part.named_parameters() for part in _modules)
    return next((name for names in parts for name, each in names if each is parameter), None)


@contextmanager
def turn_with(parameters: Iterable[torch.Tensor], what: str) -> Iterator[None]:
    """Hold the turns of the models of `parameters`: no other thread computes with these, or is between a backward that
    has begun to update and its step."""
    found = managed_among(parameters)
    with ExitStack() as turns:
        for interception in sorted(found, key=lambda interception: interception.runtime.turn.number):
            turns.enter_context(interception.runtime.turn.held(what, interception.gradients.is_whole))
        yield


def refuse_managed(module: torch.nn.Module) -> None:
    """Raise `ManageError` if `module`, or a part of it, is managed already."""
    for name, parameter in module.named_parameters():
        if of_parameter(parameter) is not None:
            raise ManageError(
                f"{type(module).__name__} is managed already (its parameter {name} is): manage a model once, as a "
                f"whole, or call hetmem.release on it first"
            )


class InForkedChild(torch.nn.Parameter):
    """A parameter whose home is not in this process, made by `fork()`: each torch function that gets it raises."""

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise ManageError(
            "this tensor lies in memory of hetmem, and this process, made by fork(), has none of it: use the model in "
            "the process that manages it. Give workers of a DataLoader ordinary tensors (weight.detach().clone()), or "
            "make them before hetmem.manage, or by multiprocessing_context='spawn'"
        )


def _after_fork() -> None:
    for interception in interceptions():
        interception.runtime.bindings.lose(InForkedChild)  # else reading a parameter would be a segmentation fault


os.register_at_fork(after_in_child=_after_fork)

# ---- scalers: see note "scalers" -------------------------------------------------------------------------------------

_FOR_FUSED = ("grad_scale", "found_inf")
_replicator: Any = getattr(torch.amp.grad_scaler, "_MultiDeviceReplicator", None)
_get: Any = getattr(_replicator, "get", None)


@cache
def watch_scalers() -> None:
    """Wrap torch's scaler, once for the process; see note "scalers". A torch without these names is left alone."""
    if _get is not None:
        _replicator.get = _get_here
    register_optimizer_step_pre_hook(_send_scale_home)


@cache
def watch_exchanges() -> None:
    """Have modules show what `functional_call` exchanges for their weights within a forward, also those whose hooks are
    off. Once for the process."""
    accessor: Any = torch_private.NamedMemberAccessor
    exchange = accessor.swap_tensors_dict

    def exchanged(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return exchange(self, *args, **kwargs)
        finally:
            for interception in interceptions():
                interception.working.modules.show_exchanged(self.module)

    accessor.swap_tensors_dict = exchanged


def _get_here(self: Any, device: torch.device) -> torch.Tensor:
    """Wait for the copy that `_MultiDeviceReplicator.get`, which this replaces, makes in host memory."""
    found: torch.Tensor = _get(self, device)
    if found.device.type == "cpu" and self.master.device.type == "cuda":
        torch.cuda.current_stream(self.master.device).synchronize()
    return found


def _send_scale_home(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Copy the scale that a scaler gave a fused optimizer of torch's to the host, if managed parameters are there."""
    for name in _FOR_FUSED:
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu" and _has_some_at_home(optimizer):
            setattr(optimizer, name, value.cpu())


def _has_some_at_home(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any managed parameter of `optimizer` is in host memory."""
    return any(
        parameter.device.type == "cpu" and of_parameter(parameter) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
