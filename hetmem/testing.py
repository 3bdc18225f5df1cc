"""For programs `first_difference`, which compares a managed model with plain torch, and `ranks`, which runs a function
on several processes; and the access of hetmem's tests to a managed model: facts as plain data, waits, and faults
injected at named points.

All but these is private: tests that are not about a single unit use public names and this module. It
returns names, numbers, strings and copies of values, and no object of the runtime, so that the runtime can be rebuilt
without touching a test.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from threading import current_thread, main_thread
from typing import Any

import torch

from hetmem.base.hardware import HardwareProfile
from hetmem.checkpoint.coded import coded_weight
from hetmem.cpu import square_sum_tasks, total
from hetmem.cuda.dequantise import NF4, nested_values
from hetmem.intercept import registry
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.hidden_gradient import HiddenGradient
from hetmem.ranks.launch import ranks
from hetmem.schedule import saved
from hetmem.schedule.trace import Schedule, Tier, segment_name
from hetmem.tools.difference import Difference, compare, first_difference

__all__ = ["Difference", "compare", "first_difference", "ranks"]

POINTS = {
    "lease a copy": "hetmem.schedule.residency:Residency.acquire",
    "release a copy": "hetmem.schedule.residency:Residency.release",
    "a copy is stale": "hetmem.schedule.residency:Residency.invalidate",
    "copies are stale": "hetmem.schedule.residency:Residency.invalidate_all",
    "copy done": "hetmem.schedule.residency:Residency.done",
    "carry out": "hetmem.engine.executor:Executor._carry_out",
    "note an end": "hetmem.engine.executor:Executor._note",
    "take an end": "hetmem.memory.transfer:TransferEngine.take",
    "copy now": "hetmem.memory.transfer:TransferEngine.copy_now",
    "take a slot": "hetmem.memory.device:DevicePool.prepare",
    "bind": "hetmem.engine.param_views:Bindings.bind",
    "unbind": "hetmem.engine.param_views:Bindings.unbind",
    "use of a weight": "hetmem.engine.uses:Uses._moment",
    "step done": "hetmem.engine.runtime:Runtime.after_step",
    "device copy": "hetmem.engine.traffic:Traffic.has_copy",
    "home written": "hetmem.engine.traffic:Traffic.superseded",
    "write of the user": "hetmem.engine.write_check:WriteCheck._supersede",
    "ask for a role": "hetmem.engine.traffic:Traffic.ask_role",
    "close a role": "hetmem.engine.traffic:Traffic.close_role",
    "begin an update": "hetmem.engine.traffic:Traffic.begin_updates",
    "end an update": "hetmem.engine.traffic:Traffic.end_updates",
    "give a home away": "hetmem.engine.write_check:give_away",
    "gradients arrive": "hetmem.engine.gradients:GradientSink.wait_until_home",
    "send a gradient": "hetmem.engine.gradient_watch:GradientCopies.send",
    "gradient is home": "hetmem.engine.gradient_watch:GradientCopies._arrived",
    "move a home": "hetmem.placing.rehome:_copy",
    "pump updates": "hetmem.schedule.updates:HostUpdates.pump",
    "open an update": "hetmem.schedule.updates:HostUpdates._open",
    "is an update free": "hetmem.optim.update_queue:Updates._is_free",
    "may open an update": "hetmem.schedule.updates:HostUpdates._may_open",
    "run updates": "hetmem.optim.update_queue:Updates._run",
    "close an update": "hetmem.optim.update_queue:Updates._close",
    "finish updates": "hetmem.optim.update_queue:Updates.finish",
    "begin tasks": "hetmem.cpu.workers:WorkerPool.begin",
    "backward over": "hetmem.engine.gradients:GradientSink.finish",
    "plan ahead": "hetmem.engine.runtime:Runtime.expect",
    "wait until written": "hetmem.engine.traffic:Traffic.wait_until_written",
    "is a gradient kept": "hetmem.engine.gradient_views:is_held",
    "tasks that sum": "hetmem.optim.update_pass:Passes._sum_tasks",
    "tasks that update": "hetmem.optim.update_pass:Passes._update_tasks",
    "read from NVMe": "hetmem.memory.nvme_store:NvmeStore.read",
    "tell other ranks": "hetmem.ranks.waits:Waits.sign",
    "free host memory": "hetmem.engine.ranked_writes:free_host_bytes",
    "compare with other ranks": "hetmem.engine.ranked_gradients:RankedGradients.compare",
    "come to a meeting": "hetmem.ranks.group:Ranks._come",
    "pass a turn": "hetmem.schedule.turns:RankTurns._pass",
    "offer an update": "hetmem.ranks.updates:SharedUpdates.offer",
    "count an update": "hetmem.ranks.updates:SharedUpdates._count",
    "exchange with machines": "hetmem.ranks.machines:Machines.gathered",
}
"""The functions that `around` and `failing` can wrap, by the names that tests use."""


@dataclass(frozen=True)
class ChunkFacts:
    """A chunk: its parameters by name, the slots and bytes of a device copy, its homes as {role: tier}, and whether
    these have moved to the device."""

    index: int
    parameters: tuple[str, ...]
    slots: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    elements: int
    copy_bytes: int
    homes: dict[str, str]
    home_bytes: dict[str, int]
    moved: bool


@dataclass(frozen=True)
class CodesFacts:
    """Copies of the parts of a quantised weight: codes, scales, and scales of scales behind their offset. And the
    values of 4-bit codes and of 8-bit scales."""

    format: str
    codes: torch.Tensor
    scales: torch.Tensor
    nested: torch.Tensor
    code_values: torch.Tensor
    scale_values: torch.Tensor


@dataclass(frozen=True)
class MemoryFacts:
    """The bytes of a model's pools and homes, the slots of staging, and whether the model is whole on the device."""

    resident: bool
    slot_bytes: int
    staging_slots: int
    device_slots: int
    device_bytes: int
    device_chunk_bytes: int
    device_home_bytes: int
    held_bytes: int
    """Bytes that slots hold of the device."""
    moved_bytes: int
    host_free_bytes: int
    host_reserved_bytes: int
    spare_bytes: int
    idle_bytes: int
    non_model_peak_bytes: int
    activation_bytes: int
    """Bytes of activations in host memory."""
    activation_nvme_bytes: int
    """Bytes of activations on NVMe."""


class Inside:
    """The internals of a managed model. Chunks are named by their index; tiers are "device", "host" and "nvme"."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found = registry.of_module(module)
        self._runtime = self._found.runtime
        self._traffic, self._memory = self._runtime.traffic, self._runtime.memory

    # ---- facts -------------------------------------------------------------------------------------------------

    def runtime(self) -> weakref.ref[object]:
        """Return a weak reference to the model's runtime, which dies once all its memory is given back."""
        return weakref.ref(self._runtime)

    def chunks(self) -> list[ChunkFacts]:
        """Return the chunks in the order of their indices."""
        return [_facts(chunk) for chunk in self._runtime.chunks]

    def chunk_of(self, parameter: torch.Tensor | str) -> int:
        """Return the chunk of `parameter`, which is a tensor or a name."""
        return self._parameter(parameter).chunk.spec.index

    def homes(self, role: str | None = None) -> set[str]:
        """Return the tiers of all homes, or of those of `role`."""
        return {tier for chunk in self.chunks() for name, tier in chunk.homes.items() if role in (None, name)}

    def home(self, parameter: torch.Tensor | str, role: str = "param") -> torch.Tensor:
        """Return a copy of the value in the home of `role` ("param", "compute", "grad") of `parameter`."""
        managed = self._parameter(parameter)
        if managed.code is not None:
            return managed.decoded()
        return managed.view(_role(role)).detach().clone()

    def codes(self, parameter: torch.Tensor | str) -> CodesFacts | None:
        """Return the bytes of `parameter`, or None if it is not quantised."""
        found = coded_weight(self._parameter(parameter).parameter)
        if found is None:
            return None
        coding, coded = found.coding, found.codes.clone()
        spans = coding.codes_span, coding.scales_span, coding.nested_span
        codes, scales, nested = (coded[start : start + nbytes].clone() for start, nbytes in spans)
        return CodesFacts(
            coding.format, codes, scales, nested.view(torch.float32), torch.tensor(NF4), nested_values().clone()
        )

    def leased(self) -> list[str]:
        """Return the labels of the copies that are in use on any tier."""
        self._runtime.uses.holds_copies()
        residency = self._traffic.residency
        blocks = ((block, tier) for tier in (Tier.DEVICE, Tier.HOST) for block in residency.resident(tier))
        return [residency.blocks[block].label for block, tier in blocks if residency.uses(block, tier)]

    def holds_views(self) -> bool:
        """Return whether the user or autograd holds memory of a copy on the device."""
        return self._runtime.uses.holds_copies()

    def place_of(self, tensor: torch.Tensor | int) -> str:
        """Return the kind of memory of `tensor`, or at an address: "home" (in host memory or a mapped file), "device"
        (a copy or a home there), or "other"."""
        address = tensor if isinstance(tensor, int) else tensor.data_ptr()
        if self._memory.is_home_address(address):
            return "home"
        return "device" if self._memory.is_device_address(address) else "other"

    def unwritten(self, role: str) -> list[int]:
        """Return the chunks whose home of `role` is on NVMe and stale, with a dirty copy that is not being written."""
        homes = {chunk.spec.index: chunk.homes.get(_role(role)) for chunk in self._runtime.chunks}
        blocks = {index: home.block for index, home in homes.items() if home is not None and home.tier is Tier.NVME}
        residency = self._traffic.residency
        return [
            index
            for index, block in blocks.items()
            if block is not None and residency.dirty(block) and not residency.writing(block)
        ]

    def updating(self) -> list[int]:
        """Return the chunks whose update has been queued and has not ended."""
        return sorted(chunk.spec.index for chunk in self._traffic.updating)

    def link_bytes(self) -> dict[str, int]:
        """Return the bytes that crossed each link, as `hetmem.report` names them."""
        return {link.value: use.bytes for link, use in self._traffic.engine.links().items()}

    def spans(self, kind: str) -> list[tuple[str, float, float]]:
        """Return the name, start and end of each logged span of `kind`: "segments", "updates" or "stalls"."""
        return [tuple(span) for span in getattr(self._runtime.events, kind)]

    def transfers(self) -> list[tuple[str, int, int]]:
        """Return the link, the block (-1: none) and the bytes of each logged transfer."""
        return [(each.link.value, each.block, each.nbytes) for each in self._runtime.events.transfers]

    def operators(self) -> list[str]:
        """Return the operators that used weights, in order."""
        return [moment.operator for moment in self._runtime.events.moments]

    def in_backward(self) -> bool:
        """Return whether a backward has begun and has not ended."""
        return self._found.segments.in_backward

    def remembered_forwards(self) -> int:
        """Return how many forwards are recorded as waiting for their backward."""
        return max(len(self._found.segments._pending), len(self._found.segments._attempts))

    def measured(self) -> bool:
        """Return whether the current segment is being measured."""
        return self._runtime.tracer.measured

    def at_rest(self) -> bool:
        """Return whether no forward, backward or step is running."""
        return self._found.at_rest()

    def memory(self) -> MemoryFacts:
        """Return the facts about the model's pools and homes."""
        memory, room = self._memory, self._runtime.room
        return MemoryFacts(
            resident=memory.resident,
            slot_bytes=memory.device_pool.slot_bytes,
            staging_slots=memory.staging_slots,
            device_slots=memory.device_pool.slots,
            device_bytes=memory.device_bytes,
            device_chunk_bytes=memory.device_chunk_bytes,
            device_home_bytes=memory.device_home_bytes,
            held_bytes=memory.device_pool.held_bytes(),
            moved_bytes=memory.moved_bytes,
            host_free_bytes=memory.host_pool.free_bytes,
            host_reserved_bytes=memory.host_pool.reserved_bytes,
            spare_bytes=memory.spare_bytes,
            idle_bytes=memory.idle_bytes(room.non_model_peak_bytes),
            non_model_peak_bytes=room.non_model_peak_bytes,
            activation_bytes=memory.activation_bytes,
            activation_nvme_bytes=memory.store.lent_bytes if memory.store else 0,
        )

    def hardware(self) -> HardwareProfile | None:
        """Return the hardware profile that `manage` was given, or None."""
        return self._runtime.hardware

    def expected_peaks(self, segment: str) -> list[int]:
        """Return the most bytes beside chunks that each trace of `segment` ("forward", …) expects."""
        traces = [trace for trace in self._runtime.tracer.book.traces() if segment_name(trace.key) == segment]
        return [trace.worst[0] if trace.moments else 0 for trace in traces]

    def checks(self) -> bool:
        """Return whether operators that use a home are refused now, given `sanitize=True`."""
        return not self._runtime.monitor.left

    def live_bytes(self) -> int:
        """Return the present device bytes of tensors beside chunks."""
        return self._runtime.monitor.live_bytes

    # ---- acts --------------------------------------------------------------------------------------------------

    def wait_idle(self) -> None:
        """Wait until no transfer or job is in flight; then raise the first error of one."""
        self._traffic.executor.quiesce()

    def busy(self) -> bool:
        """Return whether a transfer or a job is in flight."""
        return self._traffic.executor.busy()

    def wait_for_updates(self) -> None:
        """Wait until all updates have ended, with parameters and 16-bit copies written to homes on NVMe."""
        self._traffic.wait_for_updates()
        copies = [chunk.homes[Role.COMPUTE] for chunk in self._runtime.chunks if Role.COMPUTE in chunk.homes]
        self._traffic.wait_until_written(copies)

    def make_room(self, nbytes: int = 1 << 30) -> None:
        """Move homes of `nbytes` off the device, as far as they can leave."""
        self._runtime.room.give_way(nbytes)

    def leave_device(self, nbytes: int = 0) -> bool:
        """Make a model that is whole on the device free `nbytes` there; return False if it is streamed or must stay."""
        return self._runtime.room._leave_device(nbytes)

    def look_for_idle_memory(self) -> None:
        """Let the next step move homes to idle device memory again."""
        self._found.share._idle_seen = -1

    def forget_peaks(self) -> None:
        """Reset the peak of device bytes beside chunks."""
        self._runtime.statistics.non_model_peak_bytes = 0

    def prefetch(self, chunk: int, tier: str, role: str = "param") -> None:
        """Begin to fetch `role` of `chunk` to `tier`, if there is room, as if no use were expected."""
        block = self._runtime.chunks[chunk].homes[_role(role)].block
        assert block is not None
        residency, at = self._traffic.residency, Tier[tier.upper()]
        self._traffic.execute(residency.expect({at: Schedule([])}))
        self._traffic.execute(residency.prefetch([block], at))

    def forget_copies(self) -> None:
        """Evict every copy on every tier; none may be in use."""
        self._runtime.forget_copies()

    def detect_writes(self) -> None:
        """Look for the user's writes to weights, as the next forward does."""
        self._runtime.writes.notice_all()

    def _parameter(self, wanted: torch.Tensor | str) -> ManagedParameter:
        name = wanted if isinstance(wanted, str) else None
        return next(each for each in self._runtime.parameters if each.name == name or each.parameter is wanted)


def of(module: torch.nn.Module) -> Inside:
    """Return the internals of `module`. Raises `ManageError` if it is not managed."""
    return Inside(module)


def move_all_activations() -> None:
    """Make models that are managed from now on offload activations of any size."""
    saved.LEAST_BYTES = 1


def is_managed(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` belongs to a managed model."""
    return registry.of_parameter(parameter) is not None


def place_of(point: str) -> tuple[Any, str]:
    """Return the owner (class or module) of the function at `point`, and its name, for `monkeypatch.setattr`."""
    owner, _, name = POINTS[point].rpartition("." if "." in POINTS[point].partition(":")[2] else ":")
    return resolve_name(owner), name


@contextmanager
def around(point: str, call: Callable[..., Any]) -> Iterator[None]:
    """Run `call(original, *args)` in place of the function at `point` in the block, for all models."""
    owner, name = place_of(point)
    original = owner.__dict__[name]

    def instead(*args: Any, **keywords: Any) -> Any:
        return call(original, *args, **keywords)

    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def failing(
    point: str, error: Callable[[], BaseException], at: int = 0, *, times: int = 1, main: bool = False
) -> Iterator[Callable[[], int]]:
    """Raise `error()` in place of `times` calls at `point` from call number `at` on; `main`: of the main thread only.

    Yields a function that returns how often it was raised so far.
    """
    calls = failed = 0

    def call(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        nonlocal calls, failed
        if not main or current_thread() is main_thread():
            calls += 1
            if at < calls <= at + times:
                failed += 1
                raise error()
        return original(*args, **keywords)

    with around(point, call):
        yield lambda: failed


@contextmanager
def updates_held() -> Iterator[None]:
    """Hold queued updates of all models back in the block, also those that a thread waits for."""
    with around("may open an update", lambda *_: False):
        yield


def updates_begun(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters whose update has begun in the current step."""
    return [managed.name for listener in registry.of_module(module).gradients.listeners for managed in listener.begun()]


def is_consumed(gradient: torch.Tensor | None) -> bool:
    """Return whether `gradient` stands for one that its update has read."""
    return isinstance(gradient, HiddenGradient) and gradient.consumed


def is_hidden(gradient: torch.Tensor | None) -> bool:
    """Return whether `gradient` stands for one that only its update reads, or has read."""
    return isinstance(gradient, HiddenGradient)


def norm(tensors: list[torch.Tensor]) -> float:
    """Return the norm of one-dimensional `tensors` as clipping computes it."""
    made = [square_sum_tasks(tensor) for tensor in tensors]
    for tasks, _ in made:
        for task in tasks:
            task()
    return float(total(sums for _, sums in made) ** 0.5)


def _facts(chunk: Chunk) -> ChunkFacts:
    return ChunkFacts(
        index=chunk.spec.index,
        parameters=tuple(each.name for each in chunk.parameters),
        slots=chunk.spec.span,
        dtype=chunk.dtype,
        compute_dtype=chunk.compute_dtype,
        elements=chunk.numel,
        copy_bytes=chunk.compute_nbytes,
        homes={role.name: home.tier.name.lower() for role, home in chunk.homes.items()},
        home_bytes={role.name: chunk.home_nbytes(role) for role in chunk.homes},
        moved=chunk.moved,
    )


def _role(name: str) -> Role:
    return {"param": Role.PARAM, "compute": Role.COMPUTE, "grad": Role.GRAD}[name]
