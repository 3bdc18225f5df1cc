"""`hetmem.plan(…)`: from a function that builds a model to a `Plan`, without allocating its memory or running it.

Traces the model on the `meta` device, then calls the pure planner. Moves no data and manages no module.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from hetmem.base.config import (
    ActivationsName,
    Budget,
    Limits,
    OverlapName,
    refuse_activations,
    refuse_budget,
)
from hetmem.base.hardware import HardwareProfile
from hetmem.base.units import parse_size
from hetmem.optim.options import Overlap, check_max_grad_norm, choice, refuse_others
from hetmem.optim.options import loss_scale as scale_of
from hetmem.placing.build import Precision, precision_of
from hetmem.placing.frozen import Frozen
from hetmem.planner.activations import moving
from hetmem.planner.answer import (
    activation_choices,
    compute_bound_micro_batches,
    moved_and_kept,
    other_order,
    plan_of,
)
from hetmem.planner.decide import Decision, Judged, Variant, cheapest_mix, combined, decide, first_that_fits
from hetmem.planner.generation import planned_generation
from hetmem.planner.hugging_face.call import hugging_face_call
from hetmem.planner.hugging_face.offline import Offline
from hetmem.planner.in_turns import in_turns
from hetmem.planner.inexact import RANK, approximations
from hetmem.planner.meta_results import Results
from hetmem.planner.model import (
    Builder,
    TracedCall,
    checkpointed,
    in_bfloat16,
    repeated_layers,
    trace,
    traced,
    with_adapters,
)
from hetmem.planner.plan import Plan, PlanError
from hetmem.planner.profiles import DEFAULT_HARDWARE, known_profiles, load_profile, profile_of
from hetmem.planner.quantised_models import with_codings
from hetmem.planner.ranked import RanksPlan, of_ranks, refuse_options
from hetmem.planner.states import OptimizerPlan, plan_optimizer
from hetmem.planner.variants import changes_of, chunked_variants, of_tokens, variants_of
from hetmem.planner.ways import cheapest_way
from hetmem.planner.wording import LOGITS_SHARE
from hetmem.planner.workload import Kind, Setting, Updating, Workload
from hetmem.schedule.placement import Capacities

__all__ = [
    "DEFAULT_HARDWARE",
    "Capacities",
    "Offline",
    "OptimizerPlan",
    "Plan",
    "PlanError",
    "RanksPlan",
    "TracedCall",
    "hugging_face_call",
    "in_bfloat16",
    "known_profiles",
    "load_profile",
    "plan",
    "plan_optimizer",
    "plan_ranks",
    "plan_ranks_within",
    "plan_within",
    "trace",
    "with_adapters",
    "with_codings",
]


def plan(
    build_model: Builder,
    batch: Any,
    budget: Budget | None = None,
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | Literal["chunked"] | None = None,
    mixed_precision: Precision | None = None,
    chunk_bytes: int | str | None = None,
    micro_batches: int | None = None,
    accumulate: bool = False,
    tokens: int | None = None,
    checkpointing: bool = False,
    overlap: OverlapName = "off",
    max_grad_norm: float | None = None,
    loss_scale: float | Literal["dynamic"] | None = None,
    real: bool = False,
    moments: torch.dtype | str | None = None,
    stochastic_rounding: bool = False,
    inference: bool = False,
    new_tokens: int | None = None,
    activations: ActivationsName = "keep",
    frozen: Frozen | None = None,
    **others: Any,
) -> Plan:
    """Predict the memory on each tier and the seconds of a step for training the model that `build_model()` returns.

    The model is traced on `meta`, which takes no memory (of one that a library has quantised a copy), and the step
    simulated with the rates of `hardware`. `batch`: the model's input: a tuple, a dict of keywords or one tensor
    (shapes count, values do not). `hardware`: a `HardwareProfile`, the name of a shipped one, or the path of one that
    `hetmem probe` wrote; None: the h100's. `budget`: as for `manage`; a tier it leaves open gets the memory that
    `hardware` has, and the device never gets more than that. `loss`: a function from the model's output to the scalar
    to differentiate (None: the output's `.loss`, or the output itself), or "chunked" for that of `hetmem.chunked_loss`.
    `micro_batches`: forwards and backwards in a step (None: 1), which are of `batch` each; `accumulate`: they pass the
    model layer by layer, as `hetmem.accumulate` has them do. `tokens`, in place of `micro_batches`: those of a step;
    the fewest micro-batches that fit have them together, of `batch` or an equal part of its rows. `checkpointing`: plan
    every repeated layer as checkpointed, for a model that is built without (one that checkpoints by itself is planned
    as it is). `overlap`, `max_grad_norm`, `loss_scale`, `moments`, `stochastic_rounding`: arguments of `hetmem.AdamW`
    (the last one for a model in bfloat16). `inference`: forwards alone, under `torch.no_grad()`. `new_tokens`: with
    `inference`, text generated after the batch, a prompt: `.generation` has the cache, and the seconds of the prompt
    and of a token, and a step is all of it. `activations`: as for `manage`; with other than "keep"
    `.activation_choices` says for each choice whether it fits, the seconds of a step, and how many times as large a
    batch or sequence would fit. `real`: run one forward and backward on this machine's CPU instead of tracing on
    `meta`, for a model whose control flow depends on values. `frozen`, and other keywords, are as for `manage`.

    Raises `PlanError` if the model cannot be built on `meta` or refuses the batch, or for options that exclude each
    other; `ProfileError` for a bad profile; and `ManageError` or `BudgetError` for a budget, a precision or
    `chunk_bytes` that `manage` would refuse. Where what is asked for does not fit, or needs a drive, the plan is the
    cheapest one with the same bits that does better: `.changes` says what the program has to change for it. A model
    that does not fit at all is no error: `.fits` is False then, and `.missing_bytes` and `.advice` say what to do.
    """
    refuse_others("plan", others)
    refuse_budget(budget)
    mixed_precision = precision_of(mixed_precision)
    if loss not in (None, "chunked") and not callable(loss):
        raise PlanError(f'loss must be "chunked" or a function from the model\'s output to a scalar, got {loss!r}')
    profile = profile_of(hardware)
    limits = (budget or Budget()).limits()
    return plan_within(
        TracedCall(with_codings(build_model), batch, loss, mixed_precision, frozen=frozen),
        capacities_of(limits, profile),
        profile,
        nvme_directories=tuple(str(path) for path in limits.nvme_directories),
        chunk_bytes=None if chunk_bytes is None else parse_size(chunk_bytes, "chunk_bytes"),
        micro_batches=micro_batches,
        accumulate=accumulate,
        tokens=tokens,
        checkpointing=checkpointing,
        overlap=overlap,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        real=real,
        moments=str(moments or "float32").removeprefix("torch."),
        stochastic_rounding=stochastic_rounding,
        inference=inference,
        new_tokens=new_tokens,
        activations=activations,
    )


def plan_ranks(
    build_model: Builder,
    batch: Any,
    ranks: int,
    budget: Budget | None = None,
    hardware: HardwareProfile | str | os.PathLike[str] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | Literal["chunked"] | None = None,
    mixed_precision: Precision | None = None,
    chunk_bytes: int | str | None = None,
    micro_batches: int | None = None,
    checkpointing: bool = False,
    overlap: OverlapName = "off",
    max_grad_norm: float | None = None,
    loss_scale: float | Literal["dynamic"] | None = None,
    real: bool = False,
    machines: int = 1,
    network: int | str | None = None,
) -> RanksPlan:
    """Plan a step of `ranks` ranks on each of `machines` that train one model, as `manage` does under torchrun.

    `batch` and `micro_batches` are those of one rank, and `budget` is as for `manage`: `host` and `nvme` of each
    machine, `device` of each rank. `network`: what a machine gets from others in a second, in bytes or as in "50GB/s";
    for several machines only. Other arguments, and errors, are those of `plan`; what a group of ranks does not have yet
    is a `PlanError`.
    """
    refuse_budget(budget)
    profile, limits = profile_of(hardware), (budget or Budget()).limits()
    return plan_ranks_within(
        TracedCall(build_model, batch, loss, precision_of(mixed_precision)),
        capacities_of(limits, profile),
        profile,
        ranks,
        chunk_bytes=None if chunk_bytes is None else parse_size(chunk_bytes, "chunk_bytes"),
        micro_batches=micro_batches,
        nvme_directories=tuple(map(str, limits.nvme_directories)),
        checkpointing=checkpointing,
        overlap=overlap,
        max_grad_norm=max_grad_norm,
        loss_scale=loss_scale,
        real=real,
        machines=machines,
        network=network,
    )


def plan_ranks_within(
    call: TracedCall,
    capacities: Capacities,
    hardware: HardwareProfile,
    ranks: int,
    *,
    machines: int = 1,
    network: int | str | None = None,
    nvme_directories: tuple[str, ...] = (),
    **options: Any,
) -> RanksPlan:
    """Plan as `plan_ranks` does, with `capacities` in bytes. `options` are keywords of `plan`."""
    refuse_options(options, frozen=call.frozen, nvme_directories=len(nvme_directories))
    of_all = replace(capacities, ranks=ranks) if type(ranks) is int and ranks > 0 else capacities  # else: `of_ranks`
    rank = plan_within(call, of_all, hardware, nvme_directories=nvme_directories, compares=False, **options)
    if rank.peak_bytes["nvme"] and options.get("overlap") == "forward":  # a step ends when its states are in the file
        return plan_ranks_within(
            call,
            capacities,
            hardware,
            ranks,
            machines=machines,
            network=network,
            nvme_directories=nvme_directories,
            **{**options, "overlap": "backward"},
        )
    rate = (
        None
        if network is None
        else parse_size(network.removesuffix("/s") if isinstance(network, str) else network, "network")
    )
    return of_ranks(rank, hardware, ranks, machines, rate)


@dataclass(frozen=True, slots=True)
class _Request:
    """The keywords of `plan` about the model and its optimizer. Raises `PlanError` for values that `hetmem.AdamW` would
    refuse, or that cannot be planned."""

    chunk_bytes: int | None = None
    micro_batches: int | None = None
    accumulate: bool = False
    tokens: int | None = None
    checkpointing: bool = False
    overlap: OverlapName = "off"
    max_grad_norm: float | None = None
    loss_scale: float | str | None = None
    real: bool = False
    moments: str = "float32"
    stochastic_rounding: bool = False
    inference: bool = False
    new_tokens: int | None = None
    activations: ActivationsName = "keep"

    def __post_init__(self) -> None:
        for name in ("micro_batches", "tokens", "new_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise PlanError(f"{name} must be an int, at least 1, got {value!r}")
        if self.tokens is not None and self.micro_batches is not None:
            raise PlanError("tokens= finds the number of micro-batches: leave micro_batches= out")
        if self.tokens is not None and self.inference:
            raise PlanError("tokens= are those of a training step: leave it out with inference=True")
        if self.accumulate and self.inference:
            raise PlanError("accumulate=True adds gradients, and forwards alone have none: leave one of them out")
        if self.accumulate and self.tokens is None and self.micro_batches in (None, 1):
            raise PlanError("accumulate=True takes several micro-batches: micro_batches=, at least 2, or tokens=")
        if self.checkpointing not in (True, False):
            raise PlanError(f"checkpointing must be True or False, got {self.checkpointing!r}")
        if self.checkpointing and self.real:
            raise PlanError("a real step is traced as the model is: have the model checkpoint its layers by itself")
        if self.checkpointing and self.inference:
            raise PlanError("forwards alone keep nothing that could be computed again: leave checkpointing out")
        if self.new_tokens is not None and (self.real or not self.inference):
            raise PlanError("new_tokens are generated by forwards alone, traced on meta: inference=True, without real")
        refuse_activations(self.activations)

    def updating(self) -> Updating:
        """Return how `hetmem.AdamW` updates with these options. Raises `PlanError` for ones that it would refuse."""
        try:
            when = choice(self.overlap)
            check_max_grad_norm(self.max_grad_norm)
            scale_of(self.loss_scale)
        except ValueError as error:
            raise PlanError(str(error)) from error
        if self.moments not in ("float32", "bfloat16", "8bit"):
            raise PlanError(f"moments must be float32, bfloat16 or 8bit, got {self.moments!r}")
        overlapped, into_forward = when is not Overlap.OFF, when is Overlap.FORWARD
        return Updating(
            overlapped, into_forward, self.moments, self.stochastic_rounding, self.max_grad_norm, self.loss_scale
        )


@torch.inference_mode(False)  # this leaves no_grad, too: a plan covers the backward
def plan_within(
    call: TracedCall,
    capacities: Capacities,
    hardware: HardwareProfile,
    *,
    nvme_directories: tuple[str, ...] = (),
    on_stage: Callable[[str], None] = lambda text: None,
    compares: bool = True,
    **options: Any,
) -> Plan:
    """Plan as `plan` does, for another machine, with `capacities` in bytes. `options` are keywords of `plan`.
    `on_stage` is called with the name of each stage before it begins. `compares`: also judge other ways to run the same
    training, and advise the better ones."""
    how = _Request(**options)
    asked = Setting(capacities, how.chunk_bytes, hardware, how.micro_batches or 1, how.updating())
    inference, activations, checkpointing = how.inference, how.activations, how.checkpointing
    on_stage("tracing the model")
    results = Results(fuses_dropout=not hardware.host_to_device.by_the_caller)
    if how.new_tokens is not None:
        as_inference = functools.partial(plan_of, call=call, nvme_directories=nvme_directories, inference=True)
        return planned_generation(call, results, asked, how.new_tokens, as_inference)
    alone = hardware.host_to_device.by_the_caller

    def moved(base: Workload, how: str = activations) -> Workload:
        """Return `base`, a workload whose activations stay on the device, as `manage(activations=how)` runs it."""
        if how == "keep" or inference:
            return base
        return moving(base, capacities, all_leave=how == "offload", by_the_caller=alone)

    call = checkpointed(call) if checkpointing else call
    for part, count in of_tokens(call, how.tokens) if how.tokens is not None else ((call, asked.micro_batches),):
        call = replace(part, micro_batches=None if count == 1 else count if how.accumulate else 1)
        base = trace(call, results, inference=inference, real=how.real)
        asked = replace(asked, micro_batches=count // base.micro_batches)
        if how.tokens is None or isinstance(first_that_fits(moved(base), asked, steps=2), Judged):
            break
    peaks = {"with checkpointing" if checkpointing else "as written": base.peak_live_bytes}
    base_light = base if checkpointing else None
    if compares and not (checkpointing or how.real or inference):
        on_stage("tracing it with checkpointed layers")
        base_light = traced(checkpointed(call), results)
        if base_light is not None and base_light.peak_live_bytes < base.peak_live_bytes:
            peaks["with checkpointing"] = base_light.peak_live_bytes

    workload, light = moved(base), base_light and moved(base_light)
    mix = None
    if activations == "auto" and base.saved and compares and not (inference or alone):
        on_stage("comparing what may become of each layer's activations")
        of, count = ("", 0) if checkpointing or how.real else repeated_layers(call)
        mix = cheapest_mix(lambda n: traced(checkpointed(call, n), results) if n else base, count, asked)
    on_stage("searching for the fastest way to run it")
    found: tuple[Variant, ...] = ()
    if compares and not (how.real or inference):
        found = tuple(variants_of(call, None if checkpointing else base_light, base, results, asked, moved))
    lead = any(of and of.logits_bytes > LOGITS_SHARE * of.peak_live_bytes for of in (base, base_light))
    if compares and lead and call.loss is None and not inference:
        found = (*found, *chunked_variants(call, results, asked.micro_batches, moved))
    if mix is not None:
        recomputed, mixed = mix
        mixes = {"of": of, "count": count, "recomputed": recomputed, **moved_and_kept(mixed.workload)}
        text = f"checkpoint the first {recomputed} of the {count} layers"
        found = (Variant("mix", text, lambda: mixed.workload, asked.micro_batches), *found)
    if activations == "keep" and not inference and base.saved and compares:
        text = 'give manage activations="auto", which moves to host memory what the device lacks room for'
        found = (*found, Variant("move", text, lambda: moved(base, "auto"), asked.micro_batches))
    changes = changes_of(base, None if checkpointing or len(peaks) == 1 else base_light, moved, activations)
    way = cheapest_way(workload, asked, changes) if compares and not inference else None
    decision = decide(workload, asked, found) if way is None else way.decision
    keywords = {"checkpointing": checkpointing, "activations": activations, **((way and way.keywords) or {})}
    as_plan = functools.partial(
        plan_of,
        call=call,
        activation_bytes=peaks,
        nvme_directories=nvme_directories,
        inference=inference,
    )
    made = as_plan(decision, **keywords)
    if not compares:
        return made
    if way is not None:
        made = replace(made, changes=way.changes, as_asked=way.as_asked)
    if base.micro_batches * asked.micro_batches > 1:
        on_stage("comparing the orders of micro-batches")
        written = base_light if keywords["checkpointing"] and base_light else base
        made = replace(made, **_orders(decision, written, functools.partial(moved, how=keywords["activations"])))
    on_stage("combining what is faster")
    lighter = light if not checkpointing and len(peaks) > 1 and decision.workload is workload else None
    others: list[tuple[Workload, Capacities | None]] = [] if lighter is None else [(lighter, None)]
    others += [] if mix is None else [(mix[1].workload, mix[1].setting.capacities)]
    better = combined(decision, others)
    if better is not None:
        keywords |= {"checkpointing": True} if better.workload is lighter else {}
        layers = mixes if mix is not None and better.workload is mix[1].workload else None
        made = replace(made, combined=as_plan(better, layers=layers, **keywords).to_dict())
    if activations != "keep" and not inference:
        on_stage("comparing what may become of activations")
        ways = {"keep": (base, "keep"), "auto": (base, "auto"), "offload": (base, "offload")}
        if base_light is not None and not checkpointing:
            ways |= {"checkpointed": (base_light, "keep"), "checkpointed, auto": (base_light, "auto")}
        made = replace(made, activation_choices=activation_choices(ways, moved, asked))
    on_stage("judging what changes the mathematics")

    def adapted() -> Workload | None:
        return traced(with_adapters(call if light is None else checkpointed(call), RANK), results)

    def quantised() -> Workload | None:
        if call.frozen is not None:
            return None
        of = call if len(base.trainable) < len(base.parameters) else with_adapters(call, RANK)
        return traced(replace(of if light is None else checkpointed(of), frozen="nf4"), results)

    inexact = approximations(light or workload, capacities, better or decision, adapted, quantised)
    return replace(made, approximations=tuple(asdict(choice) for choice in inexact))


def _orders(decision: Decision, base: Workload, moved: Callable[[Workload], Workload]) -> dict[str, Any]:
    """Return what the step of `decision`, of several micro-batches, takes in the other order, and how many of them make
    compute bind in turns. `base`: its workload before any activations are `moved`."""
    of, asked, best = decision.workload, decision.asked, decision.candidate
    if not any(event.kind is Kind.BORDER for event in of.events):
        return {}
    if of.alone is None:
        turned = moved(in_turns(base, asked.micro_batches))
        return {"other_order": other_order(turned, replace(asked, micro_batches=1))}
    found: dict[str, Any] = {"other_order": other_order(of.alone, replace(asked, micro_batches=of.micro_batches))}
    if best is not None and not best.arrangement.ground.resident:
        fewer = of.micro_batches // 2 if of.micro_batches > 3 else of.micro_batches + 2
        second = first_that_fits(moved(in_turns(base.alone or base, fewer)), asked)
        if isinstance(second, Judged) and not second.arrangement.ground.resident:
            found["compute_bound_micro_batches"] = compute_bound_micro_batches(best, second)
    return found


def capacities_of(limits: Limits, hardware: HardwareProfile) -> Capacities:
    """Return the bytes of each tier: those of `limits`, or else the machine's. The device gets at most what the card
    has for programs; host memory may exceed the profile's, as machines with the same card differ."""
    has, host = hardware.device.memory_bytes, limits.host_bytes
    device = has if limits.device_bytes is None else min(has, limits.device_bytes)
    return Capacities(
        device,
        hardware.host.memory_bytes if host is None else host,
        limits.nvme_bytes,
        limits.device_chunk_bytes,
        int(hardware.device.allocator_share * device),
        limits.home_copies,
    )
