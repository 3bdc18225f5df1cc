"""Collects the numbers of a managed run: `report(model)` reads them, `MemoryReport` shows and saves them.

It changes nothing of the module, and a report keeps nothing of it alive.
"""

from __future__ import annotations

import html
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from hetmem.base.config import VERSION
from hetmem.base.units import format_size
from hetmem.engine.runtime import Runtime
from hetmem.intercept import registry
from hetmem.memory.chunk import Chunk
from hetmem.memory.device import Device, SimDevice
from hetmem.memory.heap import trimmed
from hetmem.memory.interrupts import HELD_BACK
from hetmem.report.files import SCHEMA, SCHEMA_VERSION, page_text, save
from hetmem.report.live import tier_peaks
from hetmem.report.step import Window, activations_section, history, last_window, only_infers, step_section
from hetmem.report.text import line, table
from hetmem.report.timeline import BlockFacts, timeline_section
from hetmem.schedule.trace import Tier

_NAMES_SHOWN = 6
_KINDS_SHOWN = 8
_HELD_AS = {"inputs": "input", "buffers": "input", "activations fetched back": "saved"}


@dataclass(frozen=True, slots=True, repr=False)
class MemoryReport:
    """A snapshot of a run's numbers. `str()` is a table; `to_dict()` the content of a `.json` (see docs/report.md)."""

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, a new dict at each call."""
        copy: dict[str, Any] = json.loads(json.dumps(self.data))
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to `path` in the format of its suffix: ".json", ".html" (one self-contained page) or
        ".trace.json" (for Perfetto and chrome://tracing).

        The file appears whole or not at all. Raises ValueError for another suffix, with nothing written.
        """
        save(self.data, Path(path))

    def __str__(self) -> str:
        return table(self.data)

    def __repr__(self) -> str:
        return line(self.data)

    def _repr_html_(self) -> str:
        """Return the HTML page for a notebook, in a frame of its own."""
        page = html.escape(page_text(self.data))
        return f'<iframe srcdoc="{page}" style="width:100%; height:720px; border:0" sandbox="allow-scripts"></iframe>'


@HELD_BACK
@trimmed()
def report(model: torch.nn.Module) -> MemoryReport:
    """Report on the run of `model`, a managed module, so far: bytes and seconds on every link, homes and peaks of every
    tier, the terms of the last whole step (in inference: forward), and the history of all steps.

    Waits for transfers in flight. Raises `ManageError` if `model` is not managed, and the error of a transfer that
    failed.
    """
    interception = registry.of_module(model)
    runtime, moves = interception.runtime, interception.activations
    runtime.traffic.executor.drain()
    runtime.events.read_marks(wait=True)
    counts, statistics = runtime.traffic.residency.counts, runtime.statistics
    layout, tiers = runtime.memory.layout, _tiers(runtime)
    window, held = last_window(runtime.events), {} if moves is None else moves.held()
    past = history(runtime.events)
    parameters = sum(parameter.numel for parameter in runtime.parameters)
    home_bytes = sum(chunk.role_nbytes(role) for chunk in runtime.chunks for role in chunk.homes)
    widest = max((chunk.dtype.itemsize for chunk in runtime.chunks), default=0)
    device, staging = (frozenset(runtime.traffic.residency.resident(tier)) for tier in (Tier.DEVICE, Tier.HOST))
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": type(model).__name__,
        **_head(model),
        "parameters": parameters,
        "steps": statistics.steps,
        "tiers": tiers,
        "links": {
            link.value: {"bytes": use.bytes, "seconds": use.seconds}
            for link, use in runtime.traffic.engine.links().items()
        },
        "updates": {"host": statistics.updated_bytes[Tier.HOST], "resident": statistics.updated_bytes[Tier.DEVICE]},
        "fetches": sum(counts.fetches.values()),
        "evictions": sum(counts.evictions.values()),
        "faults": counts.faults[Tier.DEVICE],
        "staging_faults": counts.faults[Tier.HOST],
        "stall_seconds": runtime.events.stall_seconds,
        "host_wait_seconds": runtime.events.host_wait_seconds,
        "chunks": len(runtime.chunks),
        "chunk_bytes": layout.chunk_elements * widest,
        "chunk_waste": layout.waste,
        "bytes_per_parameter": (home_bytes + sum(map(runtime.memory.lent.spare_bytes, Tier))) / max(1, parameters),
        "planned": None if runtime.prediction is None else dict(runtime.prediction),
        "loss": runtime.loss,
        "between_steps": _between_steps(runtime),
        "ranks": _ranks(runtime),
        "missing": _missing(runtime, window),
        "history": past,
        "step": step_section(window, tiers, _tokens(window, past, runtime)) if window and window.whole else None,
        "beside_chunks": _beside_chunks(model, runtime),
        "activations": window and activations_section(window, held),
        "timeline": window and timeline_section(window, _block_facts(runtime), (device, staging), held),
    }
    return MemoryReport(data)


def _between_steps(runtime: Runtime) -> dict[str, Any]:
    """Return what saves in the background, and parking, took since the model is managed."""
    outgoing, statistics = runtime.outgoing, runtime.statistics
    return {
        "saves": outgoing.saves,
        "saved_bytes": outgoing.saved_bytes,
        "save_seconds": outgoing.save_seconds,
        "save_wait_seconds": outgoing.wait_seconds,
        "parks": statistics.parks,
        "prepare_seconds": statistics.prepare_seconds,
        "park_seconds": statistics.park_seconds,
        "wake_seconds": statistics.wake_seconds,
        "parked_kept_bytes": statistics.parked_kept_bytes,
        "parked_used_bytes": statistics.parked_used_bytes,
    }


def _ranks(runtime: Runtime) -> dict[str, Any] | None:
    """Return the figures of all ranks that train the model with this one; None if none do."""
    ranks = runtime.memory.ranks
    if ranks is None:
        return None
    return {"own": ranks.rank, "rows": ranks.figures.rows(), "remarks": ranks.figures.remarks()}


def _head(model: torch.nn.Module) -> dict[str, Any]:
    """Return the setup of the run: the device, the profile of the machine, options, and versions."""
    interception = registry.of_module(model)
    runtime = interception.runtime
    memory = runtime.memory
    options = {
        "mixed_precision": memory.mixed_precision and str(memory.mixed_precision).removeprefix("torch."),
        "activations": interception.activations_asked,
        "sanitize": runtime.sanitize,
    }
    optimizers = [listener.optimizer_options() for listener in interception.gradients.listeners]
    versions = {"hetmem": VERSION, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "device": _device(memory.device),
        "hardware": None if runtime.hardware is None else runtime.hardware.name,
        "options": {**options, "optimizers": optimizers},
        "versions": versions,
    }


def _device(device: Device) -> str:
    """Return the name of the device, and the link speeds of a simulated one."""
    if not isinstance(device, SimDevice):
        return f"{torch.cuda.get_device_name(device.torch_device)} ({device.torch_device})"
    speeds = {"to it": device.host_to_device, "from it": device.device_to_host}
    limits = [f"{format_size(speed)}/s {way}" for way, speed in speeds.items() if speed]
    return ", ".join(["simulated device", *limits])


def _tokens(window: Window, past: dict[str, Any], runtime: Runtime) -> int:
    """Return the number of tokens processed in `window`."""
    tokens: int = runtime.events.forwards[-1].tokens if window.covers == "forward" else past["tokens"][-1]
    return tokens


def _beside_chunks(model: torch.nn.Module, runtime: Runtime) -> dict[str, Any] | None:
    """Return the largest kinds of tensors beside chunks, by operator and module, at the peak of their bytes on the
    device in the steps whose operators were traced; None if no step was."""
    peak, most = runtime.monitor.peak, runtime.room.non_model_peak_bytes
    if not peak.nbytes:
        return None
    names = _names(model)
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for made in peak.tensors:
        held = _HELD_AS.get(made.operator, "saved" if made.saved else "temporary")
        kinds.setdefault((made.operator, names.get(made.module, ""), held), []).append(made.nbytes)
    largest = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:_KINDS_SHOWN]
    where = "a forward" if only_infers(runtime.events) else f"the {peak.segment} of step {peak.step}"
    sentence = f"Beside chunks the device held at most {format_size(peak.nbytes)}, in {where}."
    if most > peak.nbytes and runtime.memory.device.watched:
        sentence += f" Larger inputs since, of steps not watched: up to {format_size(most)}."
    elif most > peak.nbytes:
        sentence += f" Its allocator counted up to {format_size(most)}, with what libraries take, and other steps."
    return {
        "bytes": peak.nbytes,
        "segment": peak.segment,
        "step": peak.step,
        "tensors": [
            {"operator": operator, "module": module, "held": held, "count": len(sizes), "bytes": sum(sizes)}
            for (operator, module, held), sizes in largest
        ],
        "other_bytes": max(0, peak.nbytes - sum(sum(sizes) for _, sizes in largest)),
        "sentence": sentence,
    }


def _names(model: torch.nn.Module) -> dict[int, str]:
    """Return the path of each module by its `id`, with * for the index of a module among siblings of one class; the
    model's path is its class."""
    names = {id(model): ""}
    for module in model.modules():
        alike = len({type(child) for child in module.children()}) == 1
        for name, child in module.named_children():
            path = f"{names[id(module)]}.{'*' if alike and name.isdigit() else name}"
            names.setdefault(id(child), path.lstrip("."))
    return {**names, id(model): type(model).__name__}


def _missing(runtime: Runtime, window: Window | None) -> list[str]:
    """Return sentences on what this report cannot show yet, what the device cannot do here, and why."""
    missing = []
    if window is None:
        missing.append("Nothing ran yet: call the model, then ask again.")
    elif not window.whole:
        done = "one optimizer step was" if runtime.statistics.steps == 1 else "no two optimizer steps were"
        missing.append(
            f"No whole training step was seen, so there are no terms of its time: {done} taken, and a step lasts from "
            f"the end of one to the end of the next. The timeline shows the last forward and what followed."
        )
    if window is not None:
        if not runtime.memory.uses_copies:
            missing.append("Every chunk has its home on the device: nothing moves, and no moments are recorded.")
        if window.forgotten:
            missing.append(f"The log has forgotten the beginning of the window: {', '.join(window.forgotten)}.")
    if runtime.prediction is not None and isinstance(runtime.memory.device, SimDevice):
        missing.append(
            "Planned times are of a device with cores and memory of its own. A simulated one computes and copies with "
            "those that hetmem works with, so a step takes longer than planned; the peaks are the same."
        )
    return missing + runtime.memory.device.remarks()


def _block_facts(runtime: Runtime) -> list[BlockFacts]:
    """Return the facts of each block of the residency, in the order of their numbers."""
    memory = runtime.memory
    facts: dict[int, BlockFacts] = {}
    for chunk in runtime.chunks:
        names = [managed.name for managed in chunk.parameters]
        shown = (*names[:_NAMES_SHOWN], *([f"… {len(names)} in all"] if len(names) > _NAMES_SHOWN else []))
        span = chunk.spec.span
        tier_bytes = (span * memory.device_pool.slot_bytes, span * memory.host_pool.slot_bytes)
        for role, home in chunk.homes.items():
            if home.block is not None:
                where = home.tier.name.lower()
                nbytes = chunk.role_nbytes(role)
                facts[home.block] = BlockFacts(chunk.spec.index, role.name, where, nbytes, tier_bytes, shown)
    return [facts[block] for block in sorted(facts)]


def _homes_by_role(chunks: list[Chunk], tier: Tier) -> dict[str, int]:
    """Return the bytes of homes on `tier` by role; "kept" is memory reserved for homes that are on the device now."""
    taken: Counter[str] = Counter()
    for chunk in chunks:
        for role, home in chunk.homes.items():
            if home.tier is tier:
                taken[f"{chunk.spec.format} codes" if chunk.codes else role.name] += chunk.home_nbytes(role)
            if home.away is not None and home.away.tier is tier:
                taken["kept"] += chunk.home_nbytes(role)
    return dict(taken)


def _tiers(runtime: Runtime) -> dict[str, dict[str, Any]]:
    memory, statistics, store = runtime.memory, runtime.statistics, runtime.memory.store
    chunk_bytes, pool = runtime.room.chunk_bytes(), memory.host_pool
    used = {
        "device": chunk_bytes,
        "host": pool.reserved_bytes + pool.lent_bytes,
        "nvme": store.reserved_bytes + store.lent_bytes if store else 0,
    }
    tiers: dict[str, dict[str, Any]] = {
        name: {
            "capacity_bytes": capacity,
            "peak_bytes": peak,
            "used_bytes": used[name],
            "homes": _homes_by_role(runtime.chunks, Tier[name.upper()]),
        }
        for name, (peak, capacity) in tier_peaks(runtime).items()
    }
    if there := memory.lent.spare_bytes(Tier.DEVICE):
        tiers["device"]["homes"]["grad"] = tiers["device"]["homes"].get("grad", 0) + there
    tiers["device"] |= {
        "chunk_peak_bytes": max(statistics.chunk_peak_bytes, chunk_bytes),
        "non_model_peak_bytes": statistics.non_model_peak_bytes,
        "fragment_bytes": memory.device.fragment_bytes(),
    }
    tiers["host"]["staging_bytes"] = memory.staging_slots * pool.slot_bytes
    return tiers
