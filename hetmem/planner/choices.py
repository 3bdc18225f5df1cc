"""What a user may choose beside the plan as asked: all that is faster together with the same bits, and smaller states.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hetmem.planner.decide import Alternative, Decision
from hetmem.planner.search import Judged, Setting, first_that_fits, with_streaming
from hetmem.planner.workload import Workload
from hetmem.schedule.hardware import HardwareProfile
from hetmem.schedule.placement import Capacities
from hetmem.schedule.update_split import WORTH


def combined(
    decision: Decision, capacities: Capacities, hardware: HardwareProfile, light: Workload | None
) -> Decision | None:
    """`decision` with all done that is faster, or fits, together and has the same bits: `light`, where every layer is
    checkpointed, and updates that go on behind the backward. None if it is that already."""
    best, workload, how = decision.candidate, decision.workload, decision.updating
    chunk_bytes = None if best is None else best.setting.chunk_bytes
    asked = Setting(capacities, chunk_bytes, updating=how) if best is None else best.setting
    ways = [how] if how.overlapped or not workload.trainable else [how, replace(how, overlapped=True)]
    if decision.micro_batches == 1 and workload.trainable and (best is None or best.result.bytes["nvme_read"]):
        ways.append(replace(how, overlapped=True, streamed_gradients=True))
    found, limit = None, math.inf if best is None else WORTH * best.result.seconds
    for made in (workload, light) if light is not None else (workload,):
        for updating in ways:
            if made is workload and updating == how:
                continue
            if decision.micro_batches * made.compute_seconds(hardware.device) >= limit:
                continue
            setting = replace(asked, updating=replace(updating, streamed_states=asked.updating.streamed_states))
            candidate = first_that_fits(made, setting, hardware, decision.micro_batches)
            if isinstance(candidate, Judged):
                candidate = with_streaming(made, candidate, hardware, decision.micro_batches)
                if candidate.result.seconds < limit:
                    found, limit = (made, updating, candidate), candidate.result.seconds
    if found is None:
        return None
    made, updating, candidate = found
    largest = max(decision.largest_parameters, made.numel)
    return Decision(made, decision.micro_batches, updating, candidate, {}, (), (), (), largest)


def approximations(
    workload: Workload, capacities: Capacities, hardware: HardwareProfile, micro_batches: int, than: Decision
) -> tuple[Alternative, ...]:
    """Smaller states, where they fit and `than` does not, or is slower: the fastest first. Updates go on behind the
    backward, which has the same bits."""
    best = than.candidate
    if than.updating.on_host_only or not workload.trainable:
        return ()
    if best is not None and not best.result.bytes["nvme_read"]:
        return ()
    streams = micro_batches == 1
    how = replace(than.updating, overlapped=True, streamed_gradients=streams)
    kept = ', overlap="backward"' + (', gradients="streamed"' if streams else "")
    choices = [
        (workload, replace(how, moments="bfloat16"), f"hetmem.AdamW(moments=torch.bfloat16{kept})"),
        (workload, replace(how, moments="8bit"), f'hetmem.AdamW(moments="8bit"{kept})'),
    ]
    if workload.mixed_precision and workload.dtype == "bfloat16":
        rounded = replace(how, stochastic_rounding=True)
        weights = "weights in bfloat16 (model.bfloat16(), no mixed_precision)"
        choices.append((in_16_bits(workload), rounded, f"{weights} and hetmem.AdamW(stochastic_rounding=True{kept})"))
    found = []
    for made, updating, advice in choices:
        candidate = first_that_fits(made, Setting(capacities, None, updating=updating), hardware, micro_batches)
        if isinstance(candidate, Judged) and (best is None or candidate.result.seconds < best.result.seconds):
            result = candidate.result
            found.append(Alternative(advice, micro_batches, result.seconds, result.non_model_peak_bytes))
    return tuple(sorted(found, key=lambda alternative: alternative.step_seconds))


def in_16_bits(workload: Workload) -> Workload:
    """`workload`, which computes in 16 bits, with weights that are so at home too."""
    parameters = tuple(replace(spec, itemsize=min(2, spec.itemsize)) for spec in workload.parameters)
    return replace(workload, parameters=parameters, mixed_precision=False)
