"""What is said when the device has no room: where in the step, who holds the memory, and what would avoid it.

Reads; changes nothing.
"""

from __future__ import annotations

from collections import Counter

from hetmem.errors import DeviceOutOfMemoryError
from hetmem.plan.residency import Residency
from hetmem.plan.trace import Tier
from hetmem.runtime.construction import Memory
from hetmem.runtime.tracer import StepTracer, segment_name
from hetmem.units import MIB, format_size, round_up

_NAMED = 3
_NAMES = {"param": "parameters", "grad": "gradients", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


class Shortage:
    """The facts of one runtime at the moment at which it has no room for `operator`."""

    def __init__(self, memory: Memory, residency: Residency, tracer: StepTracer) -> None:
        self._memory, self._residency, self._tracer = memory, residency, tracer

    def error(self, operator: str, live_bytes: int, wanted_bytes: int = 0) -> DeviceOutOfMemoryError:
        """`live_bytes`: what is neither copies nor homes of chunks; `wanted_bytes`: of the copy that finds no room."""
        memory = self._memory
        in_use = self._in_use()
        copies = sum(in_use.values())
        wanted = f", and {format_size(wanted_bytes)} more for the chunk it uses" if wanted_bytes else ""
        return DeviceOutOfMemoryError(
            f"out of device memory in {operator} ({self._where()}): activations and other tensors take "
            f"{format_size(live_bytes)}, copies of parameters in use {format_size(copies)}{_names(in_use)}"
            f"{self._homes()}{wanted}, of {format_size(memory.device_bytes)}, the device budget{self._cap()}. "
            f"{self._ways_out(self._needed(), live_bytes)}"
        )

    def _where(self) -> str:
        key = self._tracer.key
        return "outside a step" if key is None else f"moment {self._tracer.position} of the {segment_name(key)}"

    def _in_use(self) -> dict[str, int]:
        residency, slot = self._residency, self._memory.device_pool.slot_bytes
        return {
            residency.blocks[block].label: residency.blocks[block].span * slot
            for block in residency.resident(Tier.DEVICE)
            if residency.uses(block, Tier.DEVICE) and residency.has_slot(block, Tier.DEVICE)
        }

    def _needed(self) -> int:
        """Bytes of all copies that this moment needs at once, those it could not have included."""
        residency = self._residency
        used = [block for block in residency.resident(Tier.DEVICE) if residency.uses(block, Tier.DEVICE)]
        blocks = {*self._tracer.blocks(), *used}
        return sum(residency.blocks[block].span for block in blocks) * self._memory.device_pool.slot_bytes

    def _homes(self) -> str:
        found: Counter[str] = Counter()
        for chunk in self._memory.chunks:
            for role, home in chunk.homes.items():
                found[role.name] += chunk.home_nbytes(role) if home.tier is Tier.DEVICE else 0
        parts = [f"{_NAMES.get(name, name)} {format_size(nbytes)}" for name, nbytes in found.items() if nbytes]
        return f", homes on the device {', '.join(parts)}" if parts else ""

    def _cap(self) -> str:
        cap = self._memory.device_chunk_bytes
        return f" (chunks may have {format_size(cap)} of it)" if cap < self._memory.device_bytes else ""

    def _ways_out(self, copies: int, live_bytes: int) -> str:
        """The least budget with which this moment would pass, and the largest batch with this one."""
        memory = self._memory
        lost = memory.device_bytes - memory.usable_bytes
        least = format_size(round_up(copies + live_bytes + memory.device_home_bytes + lost, MIB))
        ways = [f"Raise Budget(device=…): this moment needs {least}"]
        if memory.resident:
            return (
                f"{ways[0]}, or set Budget(device_chunks=…) lower, so that chunks are streamed, or use a smaller batch"
            )
        if memory.device_bytes > memory.device_chunk_bytes < copies:
            ways = [f"Raise Budget(device_chunks=…): this moment needs {format_size(copies)} of chunks at once"]
        share = (memory.usable_bytes - copies) / live_bytes if live_bytes else 0.0
        if 0 < share < 1:
            ways.append(f"use a smaller batch, about {share:.0%} of this one")
        elif live_bytes:
            ways.append("use a smaller batch")
        return ", or ".join([*ways, "activation checkpointing, or a smaller chunk_bytes"])


def _names(sizes: dict[str, int]) -> str:
    if not sizes:
        return ""
    names = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" ({'; '.join(names[:_NAMED])}{more})"
