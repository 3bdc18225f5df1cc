"""Activations on the GPU: kept, moved to pinned host memory as far as they must, all of them, or computed again."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import Llama, filled_fast, training_step
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.training import GIB, Steps


def activations(notes: Notes) -> None:
    """Four layers of Llama 8B's shape and 16384 tokens. The ceiling of a step is one that keeps all, of which a third
    is forward; where the link needs longer for what leaves in it, or comes back in the backward, it is that."""
    shape: dict[str, Any] = {"depth": 4}
    batch, device, host = (4, 4096), torch.cuda.mem_get_info()[1] * 9 // 10, 40 * GIB
    if notes.small:
        shape = {"depth": 12, "vocabulary": 128, "width": 64, "heads": 4, "groups": 2, "inner": 128}
        batch, host = (2, 128), 256 << 20
    tokens = torch.randint(0, shape.get("vocabulary", 16384), batch, device="cuda")
    train = partial(_train, notes, shape, tokens, host)
    kept = notes.attempt("all kept", train, "all kept", device, "keep", None)
    if kept is None:
        return
    seconds, peak, _ = kept
    moved = notes.attempt("all moved", train, "all moved", device, "offload", seconds)
    if moved is not None:
        room = peak - moved[2] // 2
        notes.attempt("half must go", train, f"half must go (device {room / GIB:.3g} GiB)", room, "auto", seconds)
    notes.attempt("checkpointed", train, "none kept, checkpointed", device, "keep", seconds, checkpointing=True)


def _train(
    notes: Notes,
    shape: dict[str, Any],
    tokens: torch.Tensor,
    host: int,
    case: str,
    device: int,
    how: Any,
    kept_seconds: float | None,
    checkpointing: bool = False,
) -> tuple[float, int, int]:
    """Seconds of a step, the peak of the device and the bytes of activations that left it, of steps that are noted."""
    import hetmem

    with filled_fast():
        model: Any = Llama(**shape, checkpointing=checkpointing)
    budget = hetmem.Budget(device=device, host=host)
    hetmem.manage(model, budget, device="cuda", mixed_precision=torch.bfloat16, activations=how)
    try:
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-4)
        warm_up = 8 if how == "auto" else 3  # which looks at the times of some steps, and measures once more
        steps = Steps(training_step(model, optimizer, tokens), 1 if notes.small else 4, 8.0, warm_up=warm_up)
        report = hetmem.report(model).to_dict()
    finally:
        hetmem.release(model)
        gc.collect()
        torch.cuda.empty_cache()
    found, peak = report["activations"] or {}, report["tiers"]["device"]["peak_bytes"]
    left, ceiling = found.get("bytes", {}).get("device_to_host", 0), None
    if kept_seconds is not None:
        rates = notes.rates()
        out, back = (
            left / rates.get(f"{link}.bytes_per_second", float("inf")) for link in ("device_to_host", "host_to_device")
        )
        ceiling = 1e3 * (max(kept_seconds / 3, out) + max(2 * kept_seconds / 3, back))
    step = report["step"]
    notes.number(
        f"{case}: step",
        1e3 * steps.seconds,
        "ms",
        ceiling=ceiling,
        **steps.details(),
        **{"moved out": f"{left / GIB:.2f} GiB", "peak of the device": f"{peak / GIB:.2f} GiB"},
        says=step.get("sentence", ""),
    )
    return steps.seconds, peak, left
