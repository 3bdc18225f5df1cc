"""Where each chunk of one model is updated: where its homes are, or, of homes in host memory, on the device.

Which chunks go to the device is `schedule.update_split`'s to say; here are the facts that it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from hetmem.base.units import format_enough, format_size
from hetmem.engine.gradients import GradientSink, has_hooks_of_the_user
from hetmem.engine.homes import Memory as ModelMemory
from hetmem.engine.runtime import Runtime
from hetmem.errors import BudgetError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.tensor_views import Memory
from hetmem.optim.device_updates import StreamedUpdates
from hetmem.optim.overlap import Gradients
from hetmem.optim.progress import Progress
from hetmem.optim.rule import Rule, Streamable
from hetmem.schedule.blocks import Link
from hetmem.schedule.placement import slots_for_staging
from hetmem.schedule.trace import Tier
from hetmem.schedule.update_split import Facts, Fitting, StreamedShare, Way

Groups = Mapping[int, dict[str, Any]]
"""The parameter groups of an optimizer, by the `id`s of the parameters that it updates."""


class UpdatePlaces:
    """The choice for one optimizer's chunks on one runtime: all at home without a `HardwareProfile` of the machine.

    With a store on NVMe all stays where its home is: the drive is what such a step waits for, whoever updates, and
    updates on the host read it through staging.
    """

    def __init__(
        self, runtime: Runtime, rule: Rule, updates: StreamedUpdates, sink: GradientSink, gradients: Gradients
    ) -> None:
        self._runtime, self._rule, self._updates, self._sink = runtime, rule, updates, sink
        self._gradients_stay = gradients is Gradients.STREAMED
        self.share: StreamedShare | None = None

    def choose(self, groups: Callable[[], Groups]) -> None:
        """Look at the step so far."""
        runtime = self._runtime
        if runtime.hardware is None or not runtime.tracer.knows_a_backward() or not isinstance(self._rule, Streamable):
            return
        if runtime.memory.resident or runtime.memory.store is not None:
            return
        if self.share is None:
            self.share = StreamedShare(runtime.hardware, self._updates)
        sent = runtime.traffic.engine.links()[Link.DEVICE_TO_HOST].bytes - self._updates.sent_home_bytes
        sent += self._sink.stayed_bytes  # as if they had been sent: that is what the choice is about
        self.share.look(sent, runtime.memory.moved_bytes, lambda: self._facts(groups()))

    def same_on_device(self, groups: Groups) -> set[int]:
        """The `id`s of the parameters whose update has the same bits with their homes on the device."""
        if not self._rule.runs_on_device:
            return set()
        owned = [managed for managed in self._runtime.parameters if id(managed.parameter) in groups]
        if self._runtime.memory.device.torch_device.type != "cpu":  # else the host updates there too
            owned = [managed for managed in owned if self._equals_host(managed, groups[id(managed.parameter)])]
        return {id(managed.parameter) for managed in owned}

    def way_of(self, progress: Progress) -> Way:
        """Where the update that `progress` is of runs."""
        if progress.chunk.homes[Role.PARAM].tier is Tier.DEVICE:
            return Way.RESIDENT
        return Way.STREAMED if self._streams(progress) else Way.HOST

    def place_on_device(self, chunk: Chunk) -> Memory | None:
        """For gradients of `chunk`, which nobody but its update will see; see `GradientListener`."""
        hooked = any(has_hooks_of_the_user(managed.parameter) for managed in chunk.parameters)
        return self._updates.place_for(chunk) if self._comes_there(chunk) and not hooked else None

    def _streams(self, progress: Progress) -> bool:
        whole = len(progress.parts) == len(progress.chunk.parameters)
        return whole and all(part.at_home for part in progress.parts) and self._comes_there(progress.chunk)

    def _comes_there(self, chunk: Chunk) -> bool:
        """Whether updates of the whole of `chunk` are made on the device, with its states brought there."""
        if self.share is None or chunk.spec.index not in self.share.chosen or not self._updates.slot_bytes:
            return False
        return _in_host_memory(chunk)

    # ---- facts -------------------------------------------------------------------------------------------------

    def _facts(self, groups: Groups) -> Facts:
        chunks = self._runtime.chunks
        fitting = [chunk for chunk in chunks if self._fits(chunk, groups)]
        copy_bytes = fitting[0].compute_dtype.itemsize if fitting else 0
        return Facts(
            [
                Fitting(chunk.spec.index, chunk.numel, sum(map(chunk.role_nbytes, {*chunk.homes, Role.GRAD})))
                for chunk in fitting
            ],
            sum(chunk.numel for chunk in chunks if chunk.moved),
            copy_bytes,
            copy_bytes if fitting and Role.COMPUTE in fitting[0].homes else 0,
            self._gradients_stay,
        )

    def _fits(self, chunk: Chunk, groups: Groups) -> bool:
        """Whether all of `chunk` can be updated on the device: float32, its homes in host memory."""
        if chunk.dtype is not torch.float32 or not any(role.is_state for role in chunk.homes):
            return False
        if not _in_host_memory(chunk):
            return False
        if not all(m.parameter.requires_grad and id(m.parameter) in groups for m in chunk.parameters):
            return False
        return all(self._equals_host(managed, groups[id(managed.parameter)]) for managed in chunk.parameters)

    def _equals_host(self, managed: ManagedParameter, group: dict[str, Any]) -> bool:
        chunk = managed.chunk
        copy_dtype = chunk.compute_dtype if Role.COMPUTE in chunk.homes else None
        return self._rule.equals_host(self._runtime.memory.device.torch_device, group, chunk.dtype, copy_dtype)


def _in_host_memory(chunk: Chunk) -> bool:
    """Whether all homes of `chunk` are there, but for gradients, which may be kept on the device."""
    return all(home.tier is Tier.HOST for role, home in chunk.homes.items() if role != Role.GRAD)


def check_room(memory: ModelMemory, kept: Mapping[Chunk, Collection[Role]], name: str, *, lends: bool) -> None:
    """Raise `BudgetError` where host memory and NVMe lack room for what the optimizer called `name` keeps of chunks.
    `lends`: gradients have homes for a while only."""
    wanted: Counter[str] = Counter()
    for chunk, roles in kept.items():
        for role in (*roles, *(() if lends else (Role.GRAD,))):
            if role not in chunk.homes and not chunk.moved:
                wanted["gradients" if role is Role.GRAD else "states"] += chunk.home_nbytes(role)
    room, total = memory.room(), sum(wanted.values())
    missing = total - room.host_bytes - room.nvme_bytes
    if missing <= 0:
        return
    here = total + memory.host_pool.reserved_bytes + (memory.store.reserved_bytes if memory.store else 0)
    device = f", the device holds {format_size(memory.device_home_bytes)}" if memory.device_home_bytes else ""
    tiers = f"Budget(host=…) is {format_size(memory.host_pool.capacity_bytes)}"
    tiers += f" and Budget(nvme=…) {format_size(memory.nvme_bytes)}" if memory.store else ""
    kinds = ", ".join(f"{what} {format_size(nbytes)}" for what, nbytes in wanted.items())
    raise BudgetError(
        f"{name} has no room: weights, gradients and states take {format_size(here)} in all beside the device ({kinds} "
        f"still to come), and {tiers}{device}, so {format_enough(missing)} are missing; raise Budget(host=…) to "
        f"{format_enough(memory.host_pool.capacity_bytes + missing)}, or give Budget(nvme=…, nvme_dir=…); "
        f"`hetmem plan` says what else would do"
    )


def stays_on_device(memory: ModelMemory, name: str) -> BudgetError:
    """The error of an optimizer that updates in host memory alone, which has no room for all that it keeps."""
    missing = format_enough(memory.device_home_bytes)
    return BudgetError(
        f"{name} with these options updates in host memory, and {missing} of weights and states have no room there: "
        f"raise Budget(host=…) by {missing}, or give Budget(nvme=…, nvme_dir=…)"
    )


def check_staging(memory: ModelMemory, chunk: Chunk, states: int) -> None:
    """Raise `BudgetError` if an update of `chunk`, with so many `states`, has no room in staging."""
    slots = memory.staging_slots
    needed = (2 + states) * chunk.spec.span
    if 0 < slots < needed:
        raise BudgetError(
            f"staging between NVMe and the device has {slots} slots, an update of {chunk.label(Role.PARAM)} with "
            f"{states} states needs {needed} at once: raise Budget(host=…) to "
            f"{format_size(slots_for_staging(needed) * memory.host_pool.slot_bytes)}, or set a smaller chunk_bytes"
        )
