"""What a managed module did so far, as numbers, text and JSON. Only reads; changes nothing and keeps nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetmem.memory.chunk import Role
from hetmem.plan.trace import Tier
from hetmem.runtime import registry
from hetmem.runtime.runtime import Runtime
from hetmem.units import format_size

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A snapshot. `str()` is a table; `to_dict()` is what `.json` holds (bytes and seconds, schema in the keys)."""

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers, a new dict at each call."""
        copy: dict[str, Any] = json.loads(json.dumps(self.data))
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to `path`, whose ending says how: ".json". Raises ValueError for another ending."""
        target = Path(path)
        if target.suffix != ".json":
            raise ValueError(f"a report can be saved as .json, got {target.name!r}")
        target.write_text(json.dumps(self.data, indent=2) + "\n")

    def __str__(self) -> str:
        data = self.data
        lines = ["tier      peak         of budget    used now", "-" * 46]
        for name, tier in data["tiers"].items():
            share = f"{tier['peak_bytes'] / tier['capacity_bytes']:8.1%}" if tier["capacity_bytes"] else "       -"
            used = format_size(tier["used_bytes"])
            lines.append(f"{name:8}  {format_size(tier['peak_bytes']):>11}  {share}     {used:>11}")
        lines += ["", "link              moved        busy", "-" * 38]
        for name, link in data["links"].items():
            lines.append(f"{name:16}  {format_size(link['bytes']):>10}  {link['seconds']:7.2f} s")
        waste = f"{data['chunk_waste']:.1%}"
        lines += [
            "",
            f"{data['steps']} steps; {data['fetches']} fetches, {data['evictions']} evictions, {data['faults']} faults"
            f" on the device and {data['staging_faults']} in staging, {data['stall_seconds']:.2f} s stalled",
            f"{data['chunks']} chunks of {format_size(data['chunk_bytes'])}, {waste} of them unused; "
            f"{data['bytes_per_parameter']:.1f} bytes per parameter on host and NVMe",
        ]
        return "\n".join(lines)


def report(model: torch.nn.Module) -> MemoryReport:
    """What `model`, a managed module, did so far. Raises `ManageError` if it is not managed."""
    runtime = registry.of_module(model).runtime
    counts, statistics = runtime.traffic.residency.counts, runtime.statistics
    memory = runtime.memory
    return MemoryReport(
        {
            "schema_version": SCHEMA_VERSION,
            "tiers": _tiers(runtime),
            "links": {
                link.value: {"bytes": use.bytes, "seconds": use.seconds}
                for link, use in runtime.traffic.engine.links().items()
            },
            "fetches": sum(counts.fetches.values()),
            "evictions": sum(counts.evictions.values()),
            "faults": counts.faults[Tier.DEVICE],
            "staging_faults": counts.faults[Tier.HOST],
            "stall_seconds": statistics.stall_seconds,
            "steps": statistics.steps,
            "chunks": len(runtime.chunks),
            "chunk_bytes": memory.layout.chunk_elements * max(chunk.dtype.itemsize for chunk in runtime.chunks),
            "chunk_waste": memory.layout.waste,
            "bytes_per_parameter": _home_bytes(runtime) / max(1, sum(p.numel for p in runtime.parameters)),
            "parameters": sum(parameter.numel for parameter in runtime.parameters),
        }
    )


def _home_bytes(runtime: Runtime, *tiers: Tier) -> int:
    return sum(
        chunk.nbytes
        for chunk in runtime.chunks
        for role in Role
        if role in chunk.homes and (not tiers or chunk.homes[role].tier in tiers)
    )


def _tiers(runtime: Runtime) -> dict[str, dict[str, int]]:
    memory, statistics = runtime.memory, runtime.statistics
    nvme = memory.store.reserved_bytes if memory.store else 0
    return {
        "device": {
            "capacity_bytes": memory.device_bytes,
            "peak_bytes": max(statistics.device_peak_bytes, runtime.chunk_bytes()),
            "used_bytes": runtime.chunk_bytes(),
            "chunk_peak_bytes": max(statistics.chunk_peak_bytes, runtime.chunk_bytes()),
            "non_model_peak_bytes": statistics.non_model_peak_bytes,
        },
        "host": {
            "capacity_bytes": memory.host_pool.capacity_bytes,
            "peak_bytes": memory.host_pool.reserved_bytes,
            "used_bytes": memory.host_pool.reserved_bytes,
            "staging_bytes": memory.staging_slots
            * memory.layout.chunk_elements
            * max(chunk.dtype.itemsize for chunk in runtime.chunks),
        },
        "nvme": {"capacity_bytes": memory.nvme_bytes, "peak_bytes": nvme, "used_bytes": nvme},
    }
