"""What a managed model does, as numbers by name, and one way to hand them to TensorBoard, W&B, MLflow and others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

import hetmem
from hetmem.engine.runtime import Runtime
from hetmem.report.live import Watch, watch

_watched: WeakKeyDictionary[Runtime, Watch] = WeakKeyDictionary()


def scalars(model: torch.nn.Module) -> dict[str, float]:
    """Return what `model` did since the last call, as numbers to plot: seconds of a step, tokens a second, share of
    stalls, bytes a second on each link; and the peak of each tier in bytes. A number that is not known is left out.

    Raises `ManageError` if `model` is not managed.
    """
    status = watch(model, _watched).look()
    found = {name: status[name] for name in ("step_seconds", "tokens_per_second", "stall_share") if status[name]}
    found |= {f"{tier}_peak_bytes": used for tier, (used, capacity) in status["tiers"].items() if capacity}
    found |= {f"{link}_bytes_per_second": speed for link, speed in status["links"].items() if speed}
    return {f"hetmem/{name}": float(value) for name, value in found.items()}


def write(target: Any, values: Mapping[str, float], step: int) -> None:
    """Hand `values` of `step` to `target`: a TensorBoard `SummaryWriter`, a run of W&B, the module `mlflow`, an
    `Accelerator`, a logger of Lightning, or a function of both. Raises TypeError for anything else."""
    if hasattr(target, "add_scalar"):
        for name, value in values.items():
            target.add_scalar(name, value, step)
    elif hasattr(target, "log_metrics"):
        target.log_metrics(dict(values), step=step)
    elif hasattr(target, "log"):
        target.log(dict(values), step=step)
    elif callable(target):
        target(values, step)
    else:
        raise TypeError(f"expected a SummaryWriter, a W&B run, mlflow, a logger or a function, got {target!r}")


class Recorder:
    """What the callbacks of frameworks share: numbers to `targets`, a line for `hetmem top`, the report at the end."""

    def __init__(self, report: str | os.PathLike[str] | None) -> None:
        self._report = report

    def step(self, model: torch.nn.Module) -> None:
        """An optimizer step of `model` is over."""
        hetmem.progress(model)

    def log(self, model: torch.nn.Module, targets: Iterable[Any], step: int) -> None:
        """Write what `model` did since the last time to each of `targets`."""
        values = scalars(model)
        for target in targets:
            write(target, values, step)

    def end(self, model: torch.nn.Module) -> None:
        """Save the report, where one is wanted."""
        if self._report is not None:
            hetmem.report(model).save(self._report)
