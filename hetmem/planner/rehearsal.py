"""Rehearses a step of a managed model that had no room, on `meta`: what it needs, and what would let it run.

The model is copied without its memory and traced with the shapes of the call that failed. Changes nothing of a run.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from glob import escape
from typing import Any

import torch
from torch import nn

from hetmem.base.hardware import HardwareProfile, Rate
from hetmem.base.units import MIB, round_down, round_up
from hetmem.engine.shortage import Rehearsed
from hetmem.intercept.backward import aside
from hetmem.placing.frozen import Format, Frozen
from hetmem.planner import load_profile
from hetmem.planner.activations import moving
from hetmem.planner.decide import Judged, judged, not_whole
from hetmem.planner.meta_results import Results
from hetmem.planner.meta_trace import MetaTracer
from hetmem.planner.model import TracedCall, call_in_chunks, checkpoint_layers, codings_of, default_loss, divided
from hetmem.planner.plan import PlanError
from hetmem.planner.wording import LOGITS_SHARE
from hetmem.planner.workload import Setting, Workload
from hetmem.schedule.placement import Capacities
from hetmem.schedule.trace import Tier
from hetmem.torch_private import NoFunctionsOfSubclasses, tree_leaves, tree_map

_PARTS = (2, 4, 8, 16, 32, 64)
_LARGER = 32
"""How many times a budget that is too small is made larger by what is missing."""


def rehearsed(
    module: nn.Module,
    homes: Mapping[int, torch.Tensor],
    called: tuple[tuple[Any, ...], dict[str, Any]],
    asked: Setting,
    mixed_precision: torch.dtype | None,
    activations: str,
    frozen: Mapping[str, Format],
) -> Rehearsed | None:
    """Return what a step with one call of `module`, with arguments `called` on `meta`, needs of the device in a run as
    `asked` with `manage(activations=…)`, and what would let it run; None where a rehearsal cannot say.

    `frozen` has the formats of quantised weights, by name.

    Runs in a thread of its own, as modes, hooks and the node that runs belong to the thread that asks.
    """
    found: list[Rehearsed | None] = []
    formats: Frozen | None = {escape(name): format_ for name, format_ in frozen.items()} or None
    call = TracedCall(lambda: without_memory(module, homes), called, mixed_precision=mixed_precision, frozen=formats)

    def run() -> None:
        with suppress(Exception), aside(), torch.random.fork_rng(devices=[]):  # else the moment alone is told
            found.append(_Rehearsal(call, asked, activations).said())

    thread = threading.Thread(target=run, name="hetmem rehearsal", daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else None


class _Rehearsal:
    """The workloads of one call, and the least memory with which each runs."""

    def __init__(self, call: TracedCall, asked: Setting, activations: str) -> None:
        self._call = call
        self._asked, self._how = asked, activations
        self._alone = asked.hardware.host_to_device.by_the_caller
        self._results = Results(fuses_dropout=not self._alone)
        self._has_loss = True
        self._keeps = True
        """Whether the program has the model's output until the backward has ended."""
        self._kept: Any = None

    def said(self) -> Rehearsed | None:
        """Return what the step needs and what lets it run; None if it should have had room."""
        base = self._traced(self._call)
        if self._runs(base, self._how, self._asked):
            return None
        needed = self._least(base, self._how)
        if needed is None:
            return None
        ways = [*self._by_activations(base), *self._by_batch(base), *self._by_checkpoints(), *self._by_loss(base)]
        ways.append(f'raise Budget(device="{needed // MIB}MiB")')
        return Rehearsed(needed, self._without_output(needed), self._has_loss, tuple(ways))

    def _without_output(self, needed: int) -> int:
        """Return the bytes that are enough where the program drops the output, and keeps the loss alone."""
        if not self._has_loss:
            return needed
        self._keeps = False
        return self._least(self._traced(self._call), self._how) or self._asked.capacities.device_bytes

    def _by_activations(self, base: Workload) -> list[str]:
        if self._how != "keep":
            return []
        if self._runs(base, "auto", self._asked):
            return ['give hetmem.manage activations="auto": it moves to host memory what the device has no room for']
        least = self._least(base, "auto")
        if least is None:
            return []
        return [f'give hetmem.manage activations="auto" and Budget(device="{least // MIB}MiB")']

    def _by_batch(self, base: Workload) -> list[str]:
        for parts in _PARTS:
            if base.rows % parts:
                break
            if self._runs(self._traced(divided(self._call, parts)), self._how, self._asked):
                return [f"use a smaller batch: {parts} micro-batches of {base.rows // parts}"]
        return []

    def _by_checkpoints(self) -> list[str]:
        with suppress(PlanError):
            if self._runs(self._traced(replace(self._call, recomputed=None)), self._how, self._asked):
                return ["checkpoint every layer, for a third more compute"]
        return []

    def _by_loss(self, base: Workload) -> list[str]:
        if self._has_loss and base.logits_bytes > LOGITS_SHARE * base.peak_live_bytes:
            with suppress(PlanError):
                if self._runs(self._traced(replace(self._call, loss="chunked")), self._how, self._asked):
                    return ["take hetmem.chunked_loss(model), without the logits of all tokens: equal but for rounding"]
        return []

    def _traced(self, call: TracedCall) -> Workload:
        model = call.build_model()
        if call.recomputed is None:
            checkpoint_layers(model)
        args, kwargs = tree_map(_anew, call.batch)
        try:
            chunked = call_in_chunks(model, args) if call.loss == "chunked" else None
            tracer = MetaTracer(model, call.mixed_precision, self._results, codings_of(model, call))
            return tracer.run(args, kwargs, self._loss, chunked)
        finally:
            self._kept = None

    def _loss(self, output: Any) -> torch.Tensor:
        self._kept = output if self._keeps else None
        try:
            return default_loss(output)
        except PlanError:
            self._has_loss = False
        leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        made: torch.Tensor = _Root.apply(
            *(each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad)
        )
        return made

    def _runs(self, base: Workload, how: str, setting: Setting) -> bool:
        return self._refusal(base, how, setting) == 0

    def _refusal(self, base: Workload, how: str, setting: Setting) -> int | None:
        """Return the bytes that `base` lacks of the device with `setting`: 0 if it runs, None if not for want of it."""
        workload = base
        if how != "keep":
            workload = moving(base, setting.capacities, all_leave=how == "offload", by_the_caller=self._alone)
        lacking: list[int] = []
        for way in dict.fromkeys((setting, not_whole(workload, setting))):
            found = judged(workload, way, steps=2)
            if isinstance(found, Judged):
                return 0
            if found.tier is Tier.DEVICE:
                lacking.append(max(1, found.missing_bytes))
        return min(lacking, default=None)

    def _least(self, base: Workload, how: str) -> int | None:
        """Return the smallest budget of the device, in whole MiB, above the one asked for, with which `base` runs."""
        small = size = self._asked.capacities.device_bytes
        for _ in range(_LARGER):
            lacking = self._refusal(base, how, self._sized(size))
            if lacking is None:
                return None
            if not lacking:
                break
            small, size = size, round_up(size + lacking, MIB)
        else:
            return None
        while size - small > MIB:
            middle = round_down((small + size) // 2, MIB)
            if middle <= small:
                break
            small, size = (small, middle) if self._runs(base, how, self._sized(middle)) else (middle, size)
        return size

    def _sized(self, device_bytes: int) -> Setting:
        capacities = self._asked.capacities
        fragments = capacities.device_fragment_bytes * device_bytes // max(1, capacities.device_bytes)
        return self._asked.within(device_bytes=device_bytes, device_fragment_bytes=fragments)


def _anew(leaf: Any) -> Any:
    """Return a tensor as one with memory of its own; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_like(leaf, requires_grad=leaf.requires_grad)


class _Root(torch.autograd.Function):
    """A scalar of some outputs, whose gradients take the memory that those of a loss take."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        """Return a scalar that depends on `outputs`."""
        ctx.shapes = [(each.shape, each.dtype) for each in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return a gradient for each of the outputs."""
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.shapes)


def without_memory(module: nn.Module, homes: Mapping[int, torch.Tensor]) -> nn.Module:
    """Return a copy of `module` whose parameters and buffers are on `meta`, without hooks of hetmem. `homes`: those of
    the managed parameters, by the `id` of the parameter, which may be bound to a copy meanwhile."""
    memo: dict[int, Any] = {}
    with NoFunctionsOfSubclasses():  # parameters are watched
        for parameter in module.parameters():
            empty = torch.empty_like(homes.get(id(parameter), parameter).detach(), device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        return copy.deepcopy(module, memo)


def setting(
    capacities: Capacities, chunk_bytes: int | None, hardware: HardwareProfile | None, *, by_the_caller: bool
) -> Setting:
    """Return the setting of a run, on any machine if `hardware` is not known: a rehearsal counts bytes.
    `by_the_caller`: the program's thread copies, as to the simulated device."""
    machine = hardware or load_profile("h100")

    def changed(rate: Rate) -> Rate:
        return replace(rate, by_the_caller=by_the_caller)

    inward, outward = changed(machine.host_to_device), changed(machine.device_to_host)
    return Setting(capacities, chunk_bytes, replace(machine, host_to_device=inward, device_to_host=outward))
