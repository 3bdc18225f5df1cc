"""The public functions that manage a module and release it: `manage`, `managed` and `release`."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hetmem.base.config import (
    ActivationsName,
    Budget,
    Limits,
    logged_parts,
    refuse_activations,
    refuse_budget,
    world_size,
)
from hetmem.base.hardware import HardwareProfile
from hetmem.base.units import parse_size
from hetmem.engine.events import log_to_standard_error
from hetmem.engine.gradient_views import to_host_memory
from hetmem.engine.runtime import Runtime
from hetmem.engine.shortage import Called, Rehearsed
from hetmem.errors import ManageError
from hetmem.intercept import backward, registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory import heap
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.cuda_device import CudaDevice
from hetmem.memory.device import Device, SimDevice
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.transfer import TransferEngine
from hetmem.placing.build import Precision, build_memory, precision_of
from hetmem.placing.building_memory import Building, BuildingMemory, build_within
from hetmem.placing.filling import move_home
from hetmem.placing.frozen import Frozen
from hetmem.placing.taken import TakenOver
from hetmem.schedule.blocks import EvictionPolicy, ahead_at_once
from hetmem.schedule.placement import Capacities
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

if TYPE_CHECKING:
    from hetmem.planner.plan import Plan  # planning costs more to import than training does
    from hetmem.ranks.join import JoinedRanks

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
ClassT = TypeVar("ClassT", bound=type[torch.nn.Module])


@dataclass(frozen=True, slots=True)
class _Options:
    """The keywords of `manage`."""

    device: str | torch.device | Device | None = None
    mixed_precision: Precision | None = None
    chunk_bytes: int | str | None = None
    policy: EvictionPolicy | None = None
    sanitize: bool = False
    plan: Plan | str | os.PathLike[str] | None = None
    hardware: HardwareProfile | str | os.PathLike[str] | None = None
    activations: ActivationsName = "keep"
    frozen: Frozen | None = None
    group: Any = None


def manage(
    module: ModuleT,
    budget: Budget | None = None,
    *,
    device: str | torch.device | Device | None = None,
    mixed_precision: Precision | None = None,
    chunk_bytes: int | str | None = None,
    policy: EvictionPolicy | None = None,
    sanitize: bool = False,
    plan: Plan | str | os.PathLike[str] | None = None,
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    activations: ActivationsName = "keep",
    frozen: Frozen | None = None,
    group: Any = None,
) -> ModuleT:
    """Manage the parameters of `module` within `budget`; return that same instance.

    The class, the `state_dict` keys and the identity of every parameter stay. Outside forward and backward a
    parameter is its home, in its true shape, strides and dtype: a tensor in host memory, a mapped view of a file on
    NVMe, or a device tensor if the whole model stays there. Training gives the same bits as plain torch. Buffers move
    to the device. The parameters of `module` must be dense and in host memory; those of any dtype are managed, float32
    ones in 16-bit copies with `mixed_precision`.

    `budget`: see `Budget`; None = the machine's free memory, less a reserve. `device`: "cuda", "cuda:0", "sim" or a
    `SimDevice`; None = the current GPU, or under a launcher where the program has set none that of LOCAL_RANK, or the
    simulated accelerator if there is no GPU. `mixed_precision`: torch.bfloat16 or torch.float16 = float32 parameters
    stay float32 at home and operators see 16-bit copies (except in modules with running statistics, such as BatchNorm,
    which compute in float32); gradients are float32.
    `chunk_bytes`: bytes of a chunk at home, an int or a string such as "16MiB", rounded down to a multiple of 4096
    elements of the widest dtype; None = searched. `policy`: the order of eviction; None = next use furthest away first.
    `sanitize`: poison freed slots and raise `DeviceAccessError` if an operator uses memory that a GPU could not read
    (slow). `plan`: the result of `hetmem.plan`, or the path of its file, in place of `budget`, `chunk_bytes` and
    `mixed_precision`; an optimizer for which the planned budget has no room is refused, and the report shows planned
    figures beside measured ones. `hardware`: the profile of this machine, as for `hetmem.plan`: the path of one that
    `hetmem probe -o` wrote, the name of a shipped one, or a `HardwareProfile`; the report names it.
    `activations`: "keep" = tensors that autograd saves for backward stay on the device; "offload" = they move to the
    part of `budget.host` left beside weights, gradients and states, and come back for the backward, with the same bits;
    "auto" = only as many move as must for a step to fit.
    `frozen`: the format in which weights without gradients are kept, "nf4", "nf4-nested", "mxfp4", "fp8" or "int8": as
    codes and scales, of 0.52 to 1.02 bytes an element, which are decoded as they are copied to the device. Selects
    weights of two dimensions or more with 4,096 elements or more, except embeddings and output embeddings; a mapping
    from patterns of names to formats (None = as they are) selects others. Training gives the bits of plain torch over
    a model that has the decoded values. Such a weight can be read, and not written or trained. Frozen parameters may be
    on `meta` then, and are NaN until `hetmem.load_weights`. None = none. Weights that bitsandbytes, torchao or
    transformers has quantised before keep their codes, whatever it is (see docs/quantised.md).
    `group`: the ranks that train the model together, from one copy of it in the host memory of each machine, with the
    bits of plain torch that runs their batches in turn: a `ProcessGroup`, or a `DeviceMesh` of one dimension. None =
    those of the initialised process group, or of a launcher such as torchrun; False = this process alone.
    `budget.host` and `budget.nvme` are those of all ranks of a machine, `budget.device` that of each.

    Raises `ManageError` for a module or options that cannot be managed, `BudgetError` for a budget or a directory that
    does not suffice, `ProfileError` for an invalid profile (all ValueErrors), `StoreError` for a drive without room and
    `PeerError` where another rank has failed, or asks for something else.
    An error leaves the module as it was; an interrupt leaves it as it was, or managed.
    """
    asked = _Options(device, mixed_precision, chunk_bytes, policy, sanitize, plan, hardware, activations, frozen, group)
    return _manage(module, budget, asked)


def _refuse(module: Any, budget: Any, asked: _Options) -> None:
    """Raise `ManageError` for a module, a budget or options that are invalid, where the arguments alone show it."""
    if isinstance(module, type):
        raise ManageError(
            f"expected a torch.nn.Module, got the class {module.__name__}: pass an instance, or decorate it with "
            f"hetmem.managed(hetmem.Budget(…))"
        )
    if not isinstance(module, torch.nn.Module):
        raise ManageError(f"expected a torch.nn.Module, got {type(module).__name__}")
    registry.refuse_managed(module)
    precision_of(asked.mixed_precision)
    refuse_budget(budget)
    policy: Any = asked.policy
    if policy is not None and (isinstance(policy, type) or not callable(getattr(policy, "rank", None))):
        raise ManageError(f"policy must be an instance like hetmem.LRU(), with a method rank, got {policy!r}")
    refuse_activations(asked.activations)
    if not isinstance(asked.sanitize, bool):
        raise ManageError(f"sanitize must be True or False, got {asked.sanitize!r}")


def _manage(
    module: ModuleT,
    budget: Budget | None,
    asked: _Options,
    accelerator: Device | None = None,
    built: BuildingMemory | None = None,
) -> ModuleT:
    """Manage `module` as `manage` does; `built`: the memory for `accelerator` that its parameters were built in."""
    _refuse(module, budget, asked)
    heap.map_large_blocks()
    mixed_precision, chunk_bytes = precision_of(asked.mixed_precision), asked.chunk_bytes
    joined = _joined(asked.group)
    planned = _plan(asked.plan)
    if planned is not None:
        if budget is not None or chunk_bytes is not None:
            raise ManageError("a plan says the budget and chunk_bytes: give manage the plan, or those, not both")
        mixed_precision = _planned_precision(planned, mixed_precision)
        if asked.frozen not in (None, planned.frozen):
            raise ManageError(f"the plan is for frozen={planned.frozen!r}, got {asked.frozen!r}: plan again with that")
        frozen: Any = planned.frozen
        asked = replace(asked, frozen=frozen)
        budget, chunk_bytes = planned.budget, planned.chunk_bytes
    profile = _profile(asked.hardware)
    if "engine" in logged_parts():
        log_to_standard_error()
    accelerator = accelerator or _accelerator(asked.device)
    limits = (budget or Budget()).limits()
    nbytes = None if chunk_bytes is None else parse_size(chunk_bytes, "chunk_bytes")
    if joined is not None:
        _agree(joined, module, budget, replace(asked, mixed_precision=mixed_precision), accelerator)
    with HELD_BACK, ExitStack() as undone:
        taken = TakenOver(module)
        undone.callback(taken.give_back)
        taken.take()
        with torch.inference_mode(False):  # tensors made here are written to later
            how = asked.activations if asked.activations != "keep" or planned is None else planned.activations
            moves = how != "keep"
            build = partial(
                build_memory,
                module,
                limits,
                accelerator,
                mixed_precision,
                nbytes,
                moves_activations=moves,
                frozen=asked.frozen,
                taken=taken,
                built=built,
                joined=joined,
            )
            memory = build() if joined is None else joined.together("manage the model", build)
            undone.callback(memory.close)
            if built is None:  # else the constructor fails, and the program gets no module
                undone.callback(_to_host_memory, module, memory.parameters())
            with nullcontext() if memory.ranks is None else memory.ranks.waits.at("hetmem.manage"):
                move_home(memory, module, built, taken, undone)
                memory.page_lock()
        slots = {Tier.DEVICE: memory.device_pool.slots, Tier.HOST: memory.staging_slots}
        at_once = ahead_at_once(memory.device_pool.slot_bytes, memory.device_bytes)
        residency = Residency(slots, asked.policy, in_flight=at_once)
        engine = TransferEngine(accelerator.copier, memory.store)
        undone.callback(engine.close)
        runtime = Runtime(memory, residency, engine, sanitize=asked.sanitize)
        runtime.hardware, runtime.may_join = profile, asked.group is None and joined is None
        runtime.prediction = None if planned is None else planned.prediction
        runtime.room.shortage.rehearse = _rehearser(module, runtime, limits, nbytes, how)
        backward.watch()
        registry.watch_scalers()
        registry.watch_exchanges()
        registry.add(module, Interception(module, runtime, how))
        undone.pop_all()
        taken.forget()
    heap.trim()  # where the weights were before
    return module


def _rehearser(
    module: torch.nn.Module, runtime: Runtime, limits: Limits, chunk_bytes: int | None, activations: str
) -> Callable[[Called], Rehearsed | None]:
    """Return a function that rehearses a step of `module`, which holds neither."""
    model, running = weakref.ref(module), weakref.ref(runtime)

    def rehearse(called: Called) -> Rehearsed | None:
        module, runtime = model(), running()
        if module is None or runtime is None:
            return None
        from hetmem.planner import rehearsal

        memory = runtime.memory
        capacities = Capacities(
            memory.device_bytes,
            memory.host_pool.capacity_bytes,
            limits.nvme_bytes,
            limits.device_chunk_bytes,
            memory.device_bytes - memory.usable_bytes,
            limits.home_copies,
        )
        homes = {id(managed.parameter): managed.home for managed in runtime.parameters}
        asked = rehearsal.setting(capacities, chunk_bytes, runtime.hardware, by_the_caller=memory.device.watched)
        coded = ((managed.name, managed.code) for managed in runtime.parameters)
        formats: dict[str, Any] = {name: code.coding.public_format for name, code in coded if code is not None}
        return rehearsal.rehearsed(module, homes, called, asked, memory.mixed_precision, activations, formats)

    return rehearse


def _joined(group: Any) -> JoinedRanks | None:
    """Return the ranks that manage the model together; None if this process does alone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if group is False or (group is None and not distributed and world_size() == 1):
        return None  # without the time of the import
    from hetmem.ranks.join import join

    return join(group)


def _agree(
    joined: JoinedRanks,
    module: torch.nn.Module,
    budget: Budget | None,
    asked: _Options,
    accelerator: Device,
) -> None:
    """Compare what the ranks ask for, and give all of them the buffers of rank 0. Raises `ManageError` for what a group
    does not do yet, and `PeerError` for a difference."""
    from hetmem.ranks import alike

    names = ("mixed_precision", "chunk_bytes", "sanitize", "plan", "activations", "frozen")
    options = {name: getattr(asked, name) for name in names}
    joined.together("manage the model", lambda: alike.refuse_wrapped(module))
    joined.together(
        "manage the model",
        lambda: alike.refuse(budget, options),
    )
    joined.compare(alike.facts(module, budget, options))
    for buffer in module.buffers():
        joined.share(buffer)


def _plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """Return `plan`, loaded if it is a path. Raises `ManageError` for one that does not fit, or is no plan."""
    if isinstance(plan, (str, os.PathLike)):
        from hetmem.planner.plan import Plan

        plan = Plan.load(plan)
    if plan is not None and not hasattr(plan, "fits"):
        raise ManageError(f"plan must be what hetmem.plan returned, or the path of its file, got {plan!r}")
    if plan is not None and not plan.fits:
        raise ManageError(
            "the plan does not fit: print it for the bytes that are missing and what helps; run one that fits"
        )
    return plan


def _planned_precision(plan: Plan, asked: torch.dtype | None) -> torch.dtype | None:
    """Return the plan's `mixed_precision`. Raises `ManageError` if another one is `asked` for."""
    planned: torch.dtype | None = getattr(torch, plan.mixed_precision) if plan.mixed_precision else None
    if asked not in (None, planned):
        raise ManageError(f"the plan is for mixed_precision={planned}, got {asked}: plan again with that")
    return planned


def _profile(asked: HardwareProfile | str | os.PathLike[str] | None) -> HardwareProfile | None:
    """Return the hardware profile `asked`, loaded if it is a name or a path."""
    if asked is None or isinstance(asked, HardwareProfile):
        return asked
    from hetmem.planner import load_profile

    return load_profile(asked)


def _accelerator(device: str | torch.device | Device | None) -> Device:
    if isinstance(device, (SimDevice, CudaDevice)):
        return device
    if device == "sim" or (device is None and not torch.cuda.is_available()):
        return SimDevice()
    if device is None:
        return CudaDevice()
    try:
        asked = torch.device(device)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        asked = None
    if asked is None or asked.type != "cuda":
        raise ManageError(f"device must be 'cuda', 'cuda:0', …, 'sim' or a hetmem.SimDevice, got {device!r}")
    return CudaDevice(asked.index)


def managed(budget: Budget | None = None, **options: Any) -> Callable[[ClassT], ClassT]:
    """Decorate a class so that every instance is managed as by `manage(instance, budget, **options)`.

    Parameters go to their tiers while the module is built, host memory first: building takes the budget's host memory
    and NVMe, and the memory of one submodule. Parameters that these have no room for, but the device has, are built in
    ordinary host memory; `BudgetError` if the device has no room either. Of a group of ranks each builds, the values of
    rank 0 count, and the others hold those of one submodule.
    `options` are the keywords of `manage`; a `plan` among them replaces `budget`. Raises `ManageError` for anything but
    a class derived from `torch.nn.Module`, and for unknown options; making an instance raises the errors of `manage`.
    """
    refuse_budget(budget)
    known = {option.name for option in fields(_Options)}
    if unknown := sorted(set(options) - known):
        raise ManageError(f"hetmem.managed has no option {unknown[0]!r}: it takes {', '.join(sorted(known))}")

    def decorate(cls: ClassT) -> ClassT:
        if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
            raise ManageError(f"hetmem.managed decorates classes derived from torch.nn.Module, got {cls!r}")
        _build_managed(cls, budget, _Options(**options))
        return cls

    return decorate


def _build_managed(cls: type[torch.nn.Module], budget: Budget | None, asked: _Options) -> None:
    """Wrap `__init__` of `cls` and of every later subclass; the outermost call manages the module when it returns."""
    own = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: type[torch.nn.Module], /, **keywords: Any) -> None:
        if own is not None:
            own.__get__(None, subclass)(**keywords)
        else:
            super(cls, subclass).__init_subclass__(**keywords)
        if "__init__" in vars(subclass):
            _wrap_init(subclass, budget, asked)

    cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    _wrap_init(cls, budget, asked)


def _wrap_init(cls: type[torch.nn.Module], budget: Budget | None, asked: _Options) -> None:
    init = cls.__init__

    @functools.wraps(init)
    def wrapper(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if Building.active():
            init(self, *args, **kwargs)  # of a submodule or a base class of the module that is being built
            return
        heap.map_large_blocks()
        plan = _plan(asked.plan)
        limits = (budget or (Budget() if plan is None else plan.budget)).limits()
        accelerator = _accelerator(asked.device)
        joined = _joined(asked.group)
        build = partial(
            build_within,
            limits,
            accelerator,
            lambda: init(self, *args, **kwargs),
            keeps=joined is None or joined.rank == 0,
        )
        built = build() if joined is None else joined.together("build the model", build)
        try:
            _manage(self, budget, replace(asked, plan=plan), accelerator=accelerator, built=built)
        except BaseException:
            built.close()
            raise

    cls.__init__ = wrapper  # type: ignore[method-assign]


@HELD_BACK
def release(module: torch.nn.Module) -> None:
    """Turn a managed module back into an ordinary one, its weights and gradients in ordinary host memory.

    Its threads have ended and its files are removed when this returns. A `hetmem.AdamW` over its parameters cannot step
    any more. Raises `ManageError` if `module` is not managed. An interrupt leaves it ordinary, or still managed.
    """
    interception = registry.of_module(module)
    with interception.runtime.turn.held("release"):
        try:
            interception.runtime.outgoing.wait_for_all()  # this and the next call an interrupt may end; nothing is
            interception.settle_for_reading()  # changed yet
            interception.runtime.traffic.executor.quiesce()
        except Exception:
            _end(module)
            raise
        _end(module)


def _end(module: torch.nn.Module) -> None:
    """Stop managing `module`, also if a transfer or an update fails."""
    interception = registry.remove(module)
    interception.remove()
    runtime = interception.runtime
    try:
        try:
            runtime.traffic.executor.end_workers()
            runtime.traffic.wait_for_updates()
        finally:
            runtime.traffic.executor.quiesce()
    finally:
        _to_host_memory(module, runtime.parameters)
        runtime.close()


def _to_host_memory(module: torch.nn.Module, parameters: Iterable[ManagedParameter]) -> None:
    """Make weights, gradients and buffers of `module` ordinary tensors in host memory."""
    with torch.no_grad():
        for managed in parameters:
            to_host_memory(managed)
        for buffer in module.buffers():
            buffer.data = buffer.data.cpu()
