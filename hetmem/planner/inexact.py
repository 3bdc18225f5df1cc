"""Changes of the mathematics that fit where a plan does not, or are faster than one with a drive. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hetmem.planner.decide import Alternative, Decision, quicker
from hetmem.planner.workload import Updating, Workload
from hetmem.schedule.placement import Capacities


def approximations(
    workload: Workload,
    capacities: Capacities,
    than: Decision,
    adapted: Callable[[], Workload | None],
    quantised: Callable[[], Workload | None],
) -> tuple[Alternative, ...]:
    """Return the changes to the mathematics that fit where `than` does not, or are faster, the fastest first: smaller
    states, weights in bfloat16, `adapted` (adapters), and, where these do not fit or the model has frozen weights,
    these `quantised`. All of them with overlapped updates, which keep the bits."""
    best, updating = than.candidate, than.asked.updating
    if updating.on_host_only:
        return ()
    if best is not None and not best.result.bytes["nvme_read"]:
        return ()
    how = replace(updating, overlapped=True)
    choices: list[tuple[Workload | None, Updating, str]] = []
    if workload.trainable:
        choices += _of_training(workload, how, adapted)
    found, limit = [], math.inf if best is None else best.result.seconds
    for made, updating, advice in choices:
        setting = replace(than.asked, capacities=capacities, chunk_bytes=None, updating=updating)
        candidate = None if made is None else quicker(made, setting, limit)
        if candidate is not None:
            found.append(Alternative(advice, candidate.result.seconds))
    frozen = len(workload.trainable) < len(workload.parameters)
    if frozen or not any("--lora" in each.advice for each in found):
        made = quantised()
        setting = replace(than.asked, capacities=capacities, chunk_bytes=None)
        setting = replace(setting, updating=how) if workload.trainable else setting
        candidate = None if made is None else quicker(made, setting, limit)
        if candidate is not None:
            beside = "" if frozen else f"adapters of rank {RANK} beside "
            advice = f"{beside}frozen weights in nf4 ({'' if frozen else f'--lora {RANK} '}--frozen nf4)"
            found.append(Alternative(advice, candidate.result.seconds))
    return tuple(sorted(found, key=lambda alternative: alternative.step_seconds))


def _of_training(
    workload: Workload, how: Updating, adapted: Callable[[], Workload | None]
) -> Iterator[tuple[Workload | None, Updating, str]]:
    """Yield changes of what is trained, and of its states, with how each is updated and what says so."""
    with_overlap = ', overlap="backward"'
    yield from [
        (workload, replace(how, moments=kind), f"hetmem.AdamW(moments={said}{with_overlap}) (--moments {kind})")
        for kind, said in (("bfloat16", "torch.bfloat16"), ("8bit", '"8bit"'))
    ]
    yield adapted(), how, f"adapters of rank {RANK} beside frozen weights in bfloat16 (--lora {RANK})"
    if workload.mixed_precision and workload.dtype == "bfloat16":
        rounded = replace(how, stochastic_rounding=True)
        weights = "weights in bfloat16 (model.bfloat16(), no mixed_precision)"
        advice = f"{weights} and hetmem.AdamW(stochastic_rounding=True{with_overlap}) (--stochastic-rounding)"
        yield in_16_bits(workload), rounded, advice


RANK = 16
"""The rank of the adapters that are judged where a model does not fit, or waits for a drive."""


def in_16_bits(workload: Workload) -> Workload:
    """Return `workload`, which computes in 16 bits, with 16-bit weights at home too."""
    parameters = tuple(replace(spec, itemsize=min(2, spec.itemsize)) for spec in workload.parameters)
    return replace(workload, parameters=parameters, mixed_precision=False)
