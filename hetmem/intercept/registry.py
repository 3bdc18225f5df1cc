"""Which modules and parameters are managed, and by what. Weak: being managed keeps nothing alive.

Note "scalers": torch's `GradScaler` keeps the scale, and whether something was not finite, in tensors of the GPU. Where
gradients are in host memory torch copies both there with `non_blocking=True`, which is in order on a device. The CPU
reads at once, and finds what lay there before: a wrong scale, or an overflow that is missed. So these copies are waited
for.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import chain
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetmem.base.units import format_size
from hetmem.engine.gradient_views import updated_by_another
from hetmem.engine.runtime import Runtime, Section, Turn, in_backward
from hetmem.errors import ManageError, StoreError
from hetmem.intercept.forward_scope import calling_frame, running
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK

_modules: WeakKeyDictionary[torch.nn.Module, Interception] = WeakKeyDictionary()
_at_work: WeakKeyDictionary[torch.nn.Module, set[object]] = WeakKeyDictionary()
"""The optimizers that work behind training of each: they refer to what manages it, so that must not hold them."""
_taken: dict[int, list[tuple[Turn, Section]]] = {}
"""By thread, for the step of an optimizer that is not hetmem's."""
_warned: WeakSet[Interception] = WeakSet()
"""Those whose user knows of states outside of the budget."""


@HELD_BACK
def _before_any_optimizer(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """It writes to homes by itself, and no other thread computes meanwhile: the turns are this thread's for as long as
    its `step` runs."""
    if getattr(optimizer, "writes_homes", False) or not _modules:
        return
    _give_turns()  # of a step that raised
    runs = running(calling_frame(optimizer, sys._getframe()))
    managed = managed_among(_parameters_of(optimizer))
    for interception in sorted(managed, key=lambda found: found.runtime.turn.number):
        runtime = interception.runtime
        section = runtime.turn.take(f"a step of {type(optimizer).__name__}", runs)
        interception.is_computing()  # not what an interrupt has ended, which may have left weights bound
        _taken.setdefault(get_ident(), []).append((runtime.turn, section))
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
    """Not every optimizer of torch counts versions when it writes (the fused ones do not): its parameters changed."""
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
        with suppress(StoreError):  # of an older request: who repeats the step would update twice
            interception.runtime.writes.by_optimizer(parameters)
        _count_step(interception.runtime)
        if not in_backward():
            interception.runtime.marks.end_step()
            interception.runtime.marks.resume()
        _warn_of_states(interception, optimizer)
        with suppress(Exception), interception.runtime.unwatched():
            interception.runtime.uses.renew_what_is_held()


def _count_step(runtime: Runtime) -> None:
    """Count a step of an optimizer that is not hetmem's in reports: the host has updated for as long as it took."""
    segment = runtime.events.running()
    if segment is not None and segment[0] == "step":
        runtime.events.updates.append(("all", segment[1], runtime.events.now()))
        runtime.events.end_segment()
        runtime.statistics.steps += 1


def _warn_of_states(interception: Interception, optimizer: torch.optim.Optimizer) -> None:
    """Warn once of a model that `optimizer` keeps states of it in memory that no budget counts."""
    if interception in _warned:
        return
    by_id, name = interception.runtime.bindings.by_id, type(optimizer).__name__
    kept = (state.values() for parameter, state in optimizer.state.items() if id(parameter) in by_id)
    nbytes = sum(v.numel() * v.itemsize for values in kept for v in values if isinstance(v, torch.Tensor) and v.dim())
    if nbytes:
        _warned.add(interception)
        warnings.warn(
            f"{name} keeps {format_size(nbytes)} of states outside of the budget of hetmem.manage: make "
            f"hetmem.AdamW(model.parameters(), …), or hetmem.optim.offload({name}, …), and give it to a Trainer as "
            f"optimizers=(optimizer, None); said once",
            stacklevel=4,
        )


_before_optimizers = register_optimizer_step_pre_hook(_before_any_optimizer)
_watched_optimizers = register_optimizer_step_post_hook(_after_any_optimizer)


def add(module: torch.nn.Module, interception: Interception) -> None:
    """`module` is managed by `interception` from now on."""
    _modules[module] = interception
    interception.runtime.traffic.executor.keep_in(_at_work.setdefault(module, set()))


def remove(module: torch.nn.Module) -> Interception:
    """`module` is managed no more; returns what managed it. Raises `ManageError` if nothing did."""
    interception = of_module(module)
    del _modules[module]
    return interception


def of_module(module: torch.nn.Module) -> Interception:
    """What manages `module`. Raises `ManageError` if nothing does."""
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
    """What manages any module."""
    return list(_modules.values())


def of_parameter(parameter: torch.Tensor) -> tuple[Interception, ManagedParameter] | None:
    """What manages `parameter` and as what; None if nothing does."""
    return next(((by, found[0]) for by, found in managed_among((parameter,)).items()), None)


def managed_among(parameters: Iterable[torch.Tensor]) -> dict[Interception, list[ManagedParameter]]:
    """What manages any of `parameters`, and those that it does, in order. Asked of each step of any optimizer: by C
    alone, and for nothing where no model is managed."""
    if not _modules:
        return {}
    keys = [*map(id, parameters)]  # of parameters that are alive, so that each is of one that is managed or of none
    found = {each: [*filter(None, map(each.runtime.bindings.by_id.get, keys))] for each in interceptions()}
    return {each: managed for each, managed in found.items() if managed}


def added_as(parameter: torch.Tensor) -> str | None:
    """How a model that is managed calls `parameter`, which it has got since; None if none has it."""
    parts = (part.named_parameters() for part in _modules)
    return next((name for names in parts for name, each in names if each is parameter), None)


@contextmanager
def turn_with(parameters: Iterable[torch.Tensor], what: str) -> Iterator[None]:
    """No other thread computes with what manages any of `parameters`, or is between a backward that has begun to update
    them and its step."""
    found = managed_among(parameters)
    with ExitStack() as turns:
        for interception in sorted(found, key=lambda interception: interception.runtime.turn.number):
            turns.enter_context(interception.runtime.turn.held(what, interception.is_whole))
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
    """A tensor whose home is not in this process, which `fork()` has made: every function of torch over it raises."""

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
        interception.runtime.bindings.lose(InForkedChild)  # where reading one would be a segmentation fault


os.register_at_fork(after_in_child=_after_fork)

# ---- scalers: see note "scalers" -------------------------------------------------------------------------------------

_FOR_FUSED = ("grad_scale", "found_inf")
_replicator: Any = getattr(torch.amp.grad_scaler, "_MultiDeviceReplicator", None)
_get: Any = getattr(_replicator, "get", None)


@cache
def watch_scalers() -> None:
    """See note "scalers". In a torch that has other names for it nothing is done."""
    if _get is not None:
        _replicator.get = _get_here
    register_optimizer_step_pre_hook(_send_scale_home)


def _get_here(self: Any, device: torch.device) -> torch.Tensor:
    """In the place of `_MultiDeviceReplicator.get`."""
    found: torch.Tensor = _get(self, device)
    if found.device.type == "cpu" and self.master.device.type == "cuda":
        torch.cuda.current_stream(self.master.device).synchronize()
    return found


def _send_scale_home(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """A fused optimizer of torch's gets the scale from a scaler, and sends it where its parameters are."""
    for name in _FOR_FUSED:
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu" and _has_some_at_home(optimizer):
            setattr(optimizer, name, value.cpu())


def _has_some_at_home(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any managed parameter of `optimizer` is in host memory."""
    return any(
        parameter.device.type == "cpu" and of_parameter(parameter) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
