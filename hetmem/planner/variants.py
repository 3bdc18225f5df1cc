"""The ways to run the same training that a plan compares: other micro-batches, checkpoints, activations that move, a
loss in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetmem.planner.decide import Variant
from hetmem.planner.meta_results import Results, rows_and_tokens
from hetmem.planner.model import TracedCall, checkpointed, divided, traced
from hetmem.planner.plan import PlanError
from hetmem.planner.ways import Change
from hetmem.planner.workload import Setting, Workload, smaller

_PARTS = (2, 4, 8, 16)


def variants_of(
    call: TracedCall,
    light: Workload | None,
    base: Workload,
    results: Results,
    asked: Setting,
    moved: Callable[[Workload], Workload],
) -> Iterator[Variant]:
    """Yield ways to train the same tokens a step in less device memory: more micro-batches, checkpointing (`light`)."""

    in_turns = call.micro_batches or 1

    def cut(of: TracedCall, parts: int) -> Workload | None:
        part = divided(of, parts)
        workload = traced(replace(part, micro_batches=parts * in_turns) if in_turns > 1 else part, results)
        return workload and moved(workload)

    micro_batches = asked.micro_batches
    again = "checkpoint the activations of every layer (a third more compute)"
    ways = [("", "divide", call, base)]
    if light is not None:
        yield Variant("checkpoint", again, functools.partial(moved, light), micro_batches)
        ways.append((f"{again}, and ", "divide and checkpoint", checkpointed(call), light))
    for how, kind, of, whole in ways:
        for parts in _PARTS:
            if base.rows % parts == 0:
                size = f"{parts} micro-batches of {base.rows // parts}"
                text = f"{how}split the batch into {size} and accumulate gradients"
                workload = functools.cache(functools.partial(cut, of, parts))
                about = functools.partial(lambda whole, parts: moved(smaller(whole, parts)), whole, parts)
                times = parts if base.micro_batches == 1 else 1
                yield Variant(kind, text, workload, micro_batches * times, about)


def of_tokens(call: TracedCall, tokens: int) -> Iterator[tuple[TracedCall, int]]:
    """Yield `call`, and then with smaller and smaller parts of its batch, with the number of micro-batches that have
    `tokens` together. Raises `PlanError` if a step cannot have as many."""
    rows, whole = rows_and_tokens(call.batch)
    if tokens % (whole // rows):
        raise PlanError(f"a step has whole rows of {whole // rows} tokens: tokens={tokens} is no multiple of that")
    for parts in range(1, rows + 1):
        if rows % parts == 0 and tokens % (whole // parts) == 0:
            yield divided(call, parts), tokens // (whole // parts)


def chunked_variants(
    call: TracedCall, results: Results, micro_batches: int, moved: Callable[..., Workload]
) -> Iterator[Variant]:
    """Yield ways without the logits of all tokens, which keep the mathematics and not each bit."""

    def made(of: TracedCall, *activations: str) -> Workload | None:
        workload = traced(of, results)
        return workload and moved(workload, *activations)

    chunks, text = (
        replace(call, loss="chunked"),
        "take hetmem.chunked_loss(model), equal but for rounding (--loss chunked)",
    )
    again = "checkpoint the activations of every layer"
    yield Variant("loss", text, functools.partial(made, chunks), micro_batches)
    yield Variant(
        "loss and checkpoint", f"{text}, and {again}", functools.partial(made, checkpointed(chunks)), micro_batches
    )
    yield Variant(
        "loss and checkpoint and move",
        f'{text}, {again}, and give manage activations="auto"',
        functools.partial(made, checkpointed(chunks), "auto"),
        micro_batches,
    )


def changes_of(
    base: Workload, light: Workload | None, moved: Callable[..., Workload], activations: str
) -> Sequence[Change]:
    """Return the changes of the program that keep the bits, the cheapest first, for a model that is traced as `base`,
    and as `light` with every layer checkpointed."""
    found = []
    if light is not None:
        found.append(Change("every layer checkpointed", functools.partial(moved, light), {"checkpointing": True}))
    if activations == "keep" and base.saved:
        auto = {"activations": "auto"}
        found.append(Change('activations="auto"', functools.partial(moved, base, "auto"), auto))
        if light is not None:
            text = 'every layer checkpointed, activations="auto"'
            found.append(Change(text, functools.partial(moved, light, "auto"), {"checkpointing": True, **auto}))
    return found
