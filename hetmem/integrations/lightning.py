"""Lightning over a managed model: a callback that logs and reports."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback

from hetmem.integrations.scalars import Recorder


class LightningCallback(Callback):  # type: ignore[misc]  # Any where Lightning is not installed
    """Writes the `scalars` of `model`, a managed module, to the trainer's loggers every `log_every_n_steps`, tells
    `hetmem top` of each step, and saves the report to `report` at the end of `fit`.

    Clip with `hetmem.AdamW(max_grad_norm=…)` in place of `gradient_clip_val`: within the update, and with any overlap.
    """

    def __init__(self, model: torch.nn.Module, *, report: str | os.PathLike[str] | None = None) -> None:
        self._model, self._recorder = model, Recorder(report)
        self._logged = 0

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        step = trainer.global_step
        if step == self._logged:  # a part of an accumulated batch
            return
        self._recorder.step(self._model)
        if step // trainer.log_every_n_steps > self._logged // trainer.log_every_n_steps:
            self._recorder.log(self._model, trainer.loggers, step)
        self._logged = step

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._recorder.end(self._model)
