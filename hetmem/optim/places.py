"""Where each chunk of one model is updated: where its homes are, or, of homes in host memory, on the device.

How much goes to the device is `plan.balance`'s to say; here are the facts it needs, and which chunks make up that part.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from hetmem.memory.chunk import Chunk, Role
from hetmem.optim.progress import Progress
from hetmem.optim.rule import Rule, Streamable
from hetmem.optim.streamed import SLOTS, StreamedUpdates
from hetmem.plan.balance import Way, streamed_part, update_costs
from hetmem.plan.links import Link
from hetmem.plan.trace import Tier
from hetmem.runtime.runtime import Runtime
from hetmem.units import round_up

_ALIGNMENT = 4096


class UpdatePlaces:
    """The choice for one optimizer's chunks on one runtime: all at home without a `HardwareProfile` of the machine.

    It is made between a backward and the updates of a step, once two steps have shown what crosses the link, and again
    when homes have moved to the device or back, or slots had to go. With a store on NVMe all stays where its home is:
    the drive is what such a step waits for, whoever updates, and updates on the host read it through staging.
    """

    def __init__(self, runtime: Runtime, rule: Rule, updates: StreamedUpdates) -> None:
        self._runtime, self._rule, self._updates = runtime, rule, updates
        self._chosen: set[Chunk] = set()
        self._sent_home: int | None = None
        self._moved_bytes = -1

    def choose(self, owned: Container[int]) -> None:
        """Look at the step so far. `owned`: the `id`s of the parameters that the optimizer updates."""
        runtime = self._runtime
        if runtime.hardware is None or not runtime.tracer.knows_a_backward() or not isinstance(self._rule, Streamable):
            return
        if runtime.memory.resident or runtime.memory.store is not None:
            return
        sent_home = self._sent_home_since()
        homes = runtime.memory.moved_bytes - SLOTS * self._updates.slot_bytes
        if homes == self._moved_bytes and (self._updates.slot_bytes or not self._chosen):
            return
        fitting = [chunk for chunk in runtime.chunks if self._fits(chunk, owned)]
        if sent_home is None:  # room for them, before homes take it
            self._have_slots(fitting)
            return
        self._moved_bytes = homes
        part = self._part(fitting, sent_home) if fitting else 0.0
        self._chosen = spread(fitting, part) if part and self._have_slots(fitting) else set()
        if not self._chosen:
            self._updates.give_slots_back()

    def way_of(self, progress: Progress) -> Way:
        """Where the update that `progress` is of runs."""
        if progress.chunk.homes[Role.PARAM].tier is Tier.DEVICE:
            return Way.RESIDENT
        return Way.STREAMED if self._streams(progress) else Way.HOST

    def _streams(self, progress: Progress) -> bool:
        chunk = progress.chunk
        if chunk not in self._chosen or not self._updates.slot_bytes or len(progress.parts) < len(chunk.parameters):
            return False
        at_home = all(part.at_home for part in progress.parts)
        return at_home and all(home.tier is Tier.HOST for home in chunk.homes.values())

    # ---- facts -------------------------------------------------------------------------------------------------

    def _fits(self, chunk: Chunk, owned: Container[int]) -> bool:
        """Whether all of `chunk` can be updated on the device: float32, its homes in host memory."""
        if chunk.dtype is not torch.float32 or not any(role.is_state for role in chunk.homes):
            return False
        if not all(home.tier is Tier.HOST for home in chunk.homes.values()):
            return False
        if not all(m.parameter.requires_grad and id(m.parameter) in owned for m in chunk.parameters):
            return False
        copy_dtype = chunk.compute_dtype if Role.COMPUTE in chunk.homes else None
        assert isinstance(self._rule, Streamable)
        return self._rule.streams(self._runtime.memory.device.torch_device, copy_dtype)

    def _have_slots(self, chunks: list[Chunk]) -> bool:
        """Slots for the largest of `chunks`, in memory of the device that is idle."""
        nbytes = max((sum(map(chunk.role_nbytes, {*chunk.homes, Role.GRAD})) for chunk in chunks), default=0)
        nbytes = round_up(nbytes, _ALIGNMENT)
        if self._updates.slot_bytes >= nbytes:
            return bool(nbytes)
        room = self._runtime.memory.idle_bytes(self._runtime.non_model_peak_bytes)
        return room + SLOTS * self._updates.slot_bytes >= SLOTS * nbytes and self._updates.take_slots(nbytes)

    def _sent_home_since(self) -> int | None:
        """The bytes of gradients that a whole step sends to the host; None as long as none is whole."""
        before, use = self._sent_home, self._runtime.traffic.engine.links()[Link.DEVICE_TO_HOST]
        self._sent_home = use.bytes - self._updates.sent_home_bytes
        return None if before is None else self._sent_home - before

    def _part(self, fitting: list[Chunk], sent_home: int) -> float:
        """Of `fitting`, the part to be streamed. All copies have room: only those that are renewed cross."""
        runtime = self._runtime
        assert runtime.hardware is not None
        away = sum(chunk.numel for chunk in fitting)
        there = sum(chunk.numel for chunk in runtime.chunks if chunk.moved)
        copy_bytes = fitting[0].compute_dtype.itemsize
        costs = update_costs(
            runtime.hardware,
            away + there,
            copy_bytes=copy_bytes,
            gradient_bytes=sent_home / away,
            home_copy_bytes=copy_bytes if Role.COMPUTE in fitting[0].homes else 0,
        )
        return streamed_part(costs, there / (away + there))


def spread(chunks: list[Chunk], part: float) -> set[Chunk]:
    """So great a `part` of `chunks`, by elements, evenly among them: both places are busy all the time."""
    due, chosen = 0.0, set()
    for chunk in chunks:
        due += part * chunk.numel
        if due >= chunk.numel / 2:
            due -= chunk.numel
            chosen.add(chunk)
    return chosen
