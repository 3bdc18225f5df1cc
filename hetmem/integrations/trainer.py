"""The `Trainer` of transformers, and TRL's, over a managed model: an optimizer that clips, and a callback."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

import hetmem
from hetmem.errors import ManageError
from hetmem.integrations.scalars import Recorder


def for_trainer(
    arguments: transformers.TrainingArguments,
    *,
    report: str | os.PathLike[str] | None = None,
    log: Sequence[Any] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return keywords for a `Trainer` over a managed model: `Trainer(model, arguments, …, **for_trainer(arguments))`.

    They make it a `hetmem.AdamW` by `arguments` (learning rate, betas, epsilon, weight decay, `max_grad_norm`, which is
    clipped within the update) and `options`, keywords of `hetmem.AdamW` such as `overlap="backward"`; and add a
    callback. That writes the `scalars` of the model whenever the trainer logs, to what `arguments.report_to` names of
    TensorBoard, W&B and MLflow and to `log` (see `write`), tells `hetmem top` of each step, and saves the report to
    `report` at the end.

    Raises `ManageError` for another optimizer in `arguments.optim` than AdamW.
    """
    if not str(getattr(arguments.optim, "value", arguments.optim)).startswith("adamw"):
        raise ManageError(f"for_trainer makes a hetmem.AdamW: leave optim out of the arguments, got {arguments.optim}")
    made = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "max_grad_norm": arguments.max_grad_norm or math.inf,  # inf: updates wait for the trainer's look at the norm
        **options,
    }
    callback = _Callback(Recorder(report), tuple(log))
    return {"optimizer_cls_and_kwargs": (hetmem.AdamW, made), "callbacks": [callback]}


class _Callback(transformers.TrainerCallback):
    """Lets the optimizer clip in place of the trainer, logs and reports."""

    def __init__(self, recorder: Recorder, log: tuple[Any, ...]) -> None:
        self._recorder, self._log = recorder, log
        self._targets: list[Any] = []
        self._clips = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clips, args.max_grad_norm = args.max_grad_norm, 0.0
        self._targets = [*self._log, *(_target(name, args) for name in args.report_to if name in _TARGETS)]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.step(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._recorder.log(kwargs["model"], self._targets, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = self._clips
        for target in self._targets:
            getattr(target, "flush", int)()
        self._recorder.end(kwargs["model"])


_TARGETS = ("tensorboard", "wandb", "mlflow")


def _target(name: str, arguments: Any) -> Any:
    """What the trainer reports to under `name`; its own callbacks have begun the run."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(Path(arguments.output_dir, "runs", "hetmem")))
    if name == "wandb":
        import wandb

        return lambda values, step: wandb.log({**values, "train/global_step": step})  # steps are counted so there
    import mlflow

    return mlflow
