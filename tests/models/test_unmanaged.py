"""`hetmem.AdamW(budget=…)` where frameworks drive a plain model: the `Trainer` of transformers, and accelerate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import torch
import transformers
from torch import nn

import hetmem
from tests.engine.harness import assert_same_states, assert_same_weights
from tests.models.test_trainer import Sentences
from tests.models.zoo import MODELS

pytestmark = pytest.mark.nightly


def budget(directory: Path) -> hetmem.Budget:
    directory.mkdir(exist_ok=True)
    return hetmem.Budget(host="512KiB", nvme="64MiB", nvme_dir=directory)


def test_the_trainer_saves_and_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, trainers = MODELS["gpt2"]()[0], dict[str, transformers.Trainer]()

    def train(name: str, resume: str | None = None) -> None:
        mine, decay = copy.deepcopy(model), {"lr": 1e-3, "weight_decay": 0.1}
        optimizer: Any = (
            torch.optim.AdamW(mine.parameters(), fused=True, **decay)
            if name == "plain"
            else hetmem.AdamW(mine.parameters(), budget=budget(tmp_path / "nvme"), **decay)
        )
        arguments = transformers.TrainingArguments(
            str(tmp_path / name), max_steps=3, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainers[name] = transformers.Trainer(mine, arguments, train_dataset=Sentences(), optimizers=(optimizer, None))
        trainers[name].train(resume_from_checkpoint=resume)

    for name, resume in (("plain", None), ("ours", None), ("resumed", str(tmp_path / "ours" / "checkpoint-2"))):
        train(name, resume)
    for name in ("ours", "resumed"):
        plain, ours = trainers["plain"], trainers[name]
        assert_same_weights(plain.model, ours.model)
        assert_same_states(plain.optimizer.optimizer, ours.optimizer.optimizer)


def test_accelerate_prepares_it(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    sides = []
    for mine in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 64))
        made: Any = (
            hetmem.AdamW(model.parameters(), lr=1e-2, budget=budget(tmp_path / "nvme"))
            if mine
            else torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        )
        schedule = torch.optim.lr_scheduler.StepLR(made, 2)
        model, optimizer, schedule = accelerator.prepare(model, made, schedule)
        for step in range(6):
            with accelerator.accumulate(model):
                loss = model(torch.full((4, 64), step / 7)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        sides.append((model, made))
    assert_same_weights(sides[0][0], sides[1][0])
    assert_same_states(sides[0][1], sides[1][1])
