"""Plans the generation of text: the prompt in one forward (prefill), then a forward for each token (decode), with the
cache of keys and values on the device.

A run has one arrangement for both, and the first forward's trace tells what the later ones leave free. So both phases
are judged with the most that either needs at each operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetmem.planner.decide import Judged, Variant, decide
from hetmem.planner.meta_results import Results, tensor_bytes
from hetmem.planner.model import TracedCall, divided, trace
from hetmem.planner.plan import Plan, PlanError
from hetmem.planner.step_program import rehearse
from hetmem.planner.workload import Event, Phase, Setting, StepResult, Workload


@dataclass(frozen=True, slots=True)
class Phases:
    """The forward of the prompt and that of the last token, with equal bytes beside parameters at each operator.

    `cache_bytes`: of keys and values at the end. `activation_bytes`: the most on the device beside them.
    """

    prefill: Workload
    decode: Workload
    prompt: int
    cache_bytes: int
    activation_bytes: int


def planned_generation(
    call: TracedCall, results: Results, asked: Setting, new_tokens: int, as_plan: Callable[..., Plan]
) -> Plan:
    """Return the plan of generating `new_tokens` for each row of the batch of `call`, a prompt. `as_plan(decision,
    activation_bytes=…)`: the plan of a forward. Raises `PlanError`."""
    phases = _phases(call, results, new_tokens)
    prefill, decode, rows = phases.prefill, phases.decode, phases.prefill.rows
    fewer = (_at_a_time(call, results, new_tokens, rows, parts) for parts in _PARTS if rows % parts == 0)
    decision = decide(decode if new_tokens > 1 else prefill, asked, [*fewer])
    first = token = None
    if decision.candidate is not None:
        first, token = _seconds(phases, decision.candidate, new_tokens)
        both = [(1.0, first)] if token is None else [(1.0, first), (float(new_tokens - 1), token)]
        decision = replace(decision, candidate=replace(decision.candidate, result=_total(both)))
    made = as_plan(decision, activation_bytes={"as written": phases.activation_bytes})
    generation = {
        "rows": rows,
        "prompt": phases.prompt,
        "new_tokens": new_tokens,
        "cache_bytes": phases.cache_bytes,
        "prefill_seconds": first and first.seconds,
        "token_seconds": token and token.seconds,
    }
    device = {**made.role_bytes["device"], "cache": phases.cache_bytes, "activations": phases.activation_bytes}
    return replace(
        made,
        tokens=rows * new_tokens,
        flops=prefill.flops + (new_tokens - 1) * decode.flops,
        role_bytes={**made.role_bytes, "device": device},
        compute_bound_rows=None,
        generation=generation,
    )


_PARTS = (2, 4, 8, 16)


def _at_a_time(call: TracedCall, results: Results, new_tokens: int, rows: int, parts: int) -> Variant:
    """Return the way to generate for one `parts`-th of the rows at a time, of which a step is one."""
    text = f"generate for {rows // parts} of the {rows} rows at a time (--rows {rows // parts}), a token a step"
    return Variant("rows", text, lambda: _phases(divided(call, parts), results, new_tokens).decode)


def _seconds(phases: Phases, best: Judged, new_tokens: int) -> tuple[StepResult, StepResult | None]:
    """Return a forward of the prompt and one of a token, run as `best`; None for the token if there is just one."""
    if new_tokens == 1:
        return best.result, None
    return rehearse(phases.prefill, best.arrangement, best.setting), best.result


def _total(parts: list[tuple[float, StepResult]]) -> StepResult:
    """Return the sums of `parts` with the largest of their peaks."""
    made = StepResult.total(parts)
    peaks = "device_peak_bytes", "chunk_peak_bytes", "non_model_peak_bytes"
    return replace(made, **{name: max(getattr(part, name) for _, part in parts) for name in peaks})


def _phases(call: TracedCall, results: Results, new_tokens: int) -> Phases:
    """Trace both forwards. Raises `PlanError` for a model that has no cache."""
    ids = call.batch if isinstance(call.batch, torch.Tensor) else None
    batch = {"input_ids": ids} if ids is not None else call.batch
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise PlanError("generation is planned for a batch of input_ids, of shape (rows, tokens of the prompt)")
    rows, prompt = ids.shape
    tokens = prompt + new_tokens - 1
    held: list[Any] = []

    def begin(model: torch.nn.Module, kwargs: dict[str, Any], cached: int) -> list[torch.Tensor]:
        """Have `kwargs` ask for a cache, which has `cached` tokens already, and return its tensors."""
        taken = inspect.signature(model.forward).parameters
        if not {"use_cache", "past_key_values"} <= taken.keys() or "decoder_input_ids" in taken:
            raise PlanError(
                f"{type(model).__name__} takes no past_key_values: generation is planned for language models without "
                f"an encoder, as transformers has them; plan one forward of others without new_tokens (--new-tokens)"
            )
        kwargs["use_cache"] = True
        if "logits_to_keep" in taken:
            kwargs["logits_to_keep"] = 1
        if not cached:
            return []
        with torch.no_grad():
            output = model(**{**kwargs, "input_ids": ids.new_empty((rows, cached), device="meta")})
        cache = kwargs["past_key_values"] = output.past_key_values
        kwargs.pop("attention_mask", None)
        kwargs["input_ids"] = ids.new_empty((rows, 1), device="meta")
        held.append(tensor_bytes(list(_tensors(cache))))
        return list(_tensors(cache))

    given = replace(call, batch=batch)
    before = trace(given, results, inference=True, prepare=lambda model, kwargs: begin(model, kwargs, 0))
    after = trace(
        given, results, inference=True, prepare=lambda model, kwargs: begin(model, kwargs, max(1, tokens - 1))
    )
    cache_bytes = held[0] * tokens // max(1, tokens - 1)
    beside = max(before.peak_live_bytes - cache_bytes * prompt // tokens, after.peak_live_bytes - held[0])
    return Phases(_raised(before, after), _raised(after, before), prompt, cache_bytes, max(0, beside))


def _raised(one: Workload, other: Workload) -> Workload:
    """Return `one` with at least the bytes beside parameters that `other` has at the same operators; where they differ
    in their operators, with those of its peak."""

    def alike(event: Event) -> tuple[Any, ...]:
        return event.kind, event.operator, event.parameters

    peak = other.peak_live_bytes
    same = [alike(event) for event in one.events] == [alike(event) for event in other.events]

    def most(phase: Phase, nbytes: int) -> Phase:
        return replace(phase, peak_bytes=max(phase.peak_bytes, nbytes))

    pairs = zip(one.events, other.events if same else one.events, strict=True)
    events = tuple(
        replace(
            event,
            live_bytes=max(event.live_bytes, beside.live_bytes),
            during=most(event.during, beside.during.peak_bytes if same else peak),
            after=most(event.after, beside.after.peak_bytes if same else peak),
        )
        for event, beside in pairs
    )
    higher = other if other.peak_live_bytes > one.peak_live_bytes else one
    return replace(one, events=events, at_peak=higher.at_peak)


def _tensors(held: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors that `held`, a cache, keeps in its attributes and in lists and tables of them."""
    seen = set() if seen is None else seen
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
        return
    parts: list[Any] = []
    if isinstance(held, (list, tuple)):
        parts = [*held]
    elif isinstance(held, dict):
        parts = [*held.values()]
    elif type(held).__module__.startswith("transformers."):
        parts = [*getattr(held, "__dict__", {}).values()]
    for part in parts:
        yield from _tensors(part, seen)
