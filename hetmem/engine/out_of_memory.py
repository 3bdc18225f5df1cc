"""What is said when the device has no room: where in the step, who holds the memory, and what would avoid it.

Reads; changes nothing.
"""

from __future__ import annotations

from hetmem.base.units import format_size
from hetmem.engine.homes import Memory
from hetmem.engine.remedies import Needs, remedies
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier
from hetmem.schedule.tracer import StepTracer, segment_name

_NAMED = 3


class Shortage:
    """The facts of one runtime at the moment at which it has no room for `operator`."""

    def __init__(self, memory: Memory, residency: Residency, tracer: StepTracer) -> None:
        self._memory, self._residency, self._tracer = memory, residency, tracer

    def error(
        self, operator: str, live_bytes: int, wanted_bytes: int = 0, refused_bytes: int = 0
    ) -> DeviceOutOfMemoryError:
        """`live_bytes`: what is neither copies nor homes of chunks; `wanted_bytes`: of the copy that finds no room;
        `refused_bytes`: what else finds none, which `operator` names."""
        memory = self._memory
        in_use = self._in_use()
        copies = sum(in_use.values())
        wanted = f", and {format_size(wanted_bytes)} more for the chunk it uses" if wanted_bytes else ""
        return DeviceOutOfMemoryError(
            f"out of device memory in {operator} ({self._where()}): activations and other tensors take "
            f"{format_size(live_bytes)}, copies of parameters in use {format_size(copies)}{_names(in_use)}"
            f"{memory.homes_on_device()}{wanted}, of {format_size(memory.device_bytes)}, the device budget{self._cap()}"
            f"{self._stays()}. "
            f"{self._ways_out(live_bytes + refused_bytes)}"
        )

    def _where(self) -> str:
        key = self._tracer.key
        return "outside a step" if key is None else f"moment {self._tracer.position} of the {segment_name(key)}"

    def _in_use(self) -> dict[str, int]:
        residency, slot = self._residency, self._memory.device_pool.slot_bytes
        return {
            residency.blocks[block].label: residency.blocks[block].span * slot
            for block in residency.resident(Tier.DEVICE)
            if residency.uses(block, Tier.DEVICE) and residency.slot_taken(block, Tier.DEVICE) >= 0
        }

    def _blocks_needed(self) -> set[int]:
        """The blocks of all copies that this moment needs at once, those it could not have included."""
        residency = self._residency
        used = [block for block in residency.resident(Tier.DEVICE) if residency.uses(block, Tier.DEVICE)]
        return {*self._tracer.blocks(), *used}

    def _cap(self) -> str:
        cap = self._memory.device_chunk_bytes
        return f" (chunks may have {format_size(cap)} of it)" if cap < self._memory.device_bytes else ""

    def _stays(self) -> str:
        """Why a model that is whole on the device does not leave it, if that is for want of room."""
        memory = self._memory
        if not memory.resident or memory.may_leave_device:
            return ""
        return (
            f"; its homes cannot go to host memory, where they need {format_size(memory.away_bytes)} and "
            f"{format_size(memory.host_pool.free_bytes)} are left of Budget(host=…)"
        )

    def _ways_out(self, live_bytes: int) -> str:
        """What would let this moment pass, and all others that are known, cheapest first."""
        needs = self._needs(live_bytes, self._blocks_needed())
        moments = dict.fromkeys((moment.non_model_bytes, moment.blocks) for moment in self._tracer.known_moments())
        others = [self._needs(nbytes, set(blocks)) for nbytes, blocks in moments]
        ways = ", or ".join(remedies(needs, others))
        known = "what is known of the step" if self._tracer.measured else "the step"
        most = max((m.copy_bytes + m.live_bytes + m.home_bytes for m in (needs, *others)), default=0)
        return (
            f"Any of these lets this moment pass, the cheapest first: {ways}. Activation checkpointing needs less too. "
            f"In all {known} needs {format_size(most)} of the device; before a run, hetmem plan MODULE:FUNCTION "
            f"--input … --device-memory {self._memory.device_bytes} --host-memory "
            f"{self._memory.host_pool.capacity_bytes} says what the whole step needs"
        )

    def _needs(self, live_bytes: int, blocks: set[int]) -> Needs:
        """What a moment needs that uses `blocks`; without any it is as if it used the largest parameter."""
        memory, residency = self._memory, self._residency
        chunks = [chunk for chunk in memory.chunks if chunk.operand_block in blocks] or memory.chunks
        largest = max(managed.numel for chunk in chunks for managed in chunk.parameters)
        slot_bytes = memory.device_pool.slot_bytes
        return Needs(
            memory.device_bytes,
            memory.usable_bytes,
            memory.device_chunk_bytes,
            live_bytes,
            min(live_bytes, memory.buffer_bytes),
            sum(residency.blocks[block].span for block in blocks) * slot_bytes,
            len(blocks),
            largest,
            max(managed.numel for chunk in memory.chunks for managed in chunk.parameters),
            memory.device_home_bytes,
            memory.device_home_bytes if memory.resident else 0,
            slot_bytes,
            max(chunk.dtype.itemsize for chunk in chunks),
            max(chunk.compute_dtype.itemsize for chunk in chunks),
        )


def _names(sizes: dict[str, int]) -> str:
    if not sizes:
        return ""
    names = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" ({'; '.join(names[:_NAMED])}{more})"
