"""Frameworks train a managed model on two ranks without wrapping it, each with its own batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hetmem
from hetmem.errors import ManageError
from hetmem.integrations import among_ranks, for_trainer
from hetmem.testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = hetmem.Budget(device="16MiB", device_chunks="2MiB", host="64MiB")
STEPS, WIDTH = 2, 64


def managed(model: torch.nn.Module) -> torch.nn.Module:
    return hetmem.manage(model, BUDGET, device="sim", chunk_bytes="64KiB")


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(16, WIDTH, generator=made), torch.randn(16, WIDTH, generator=made))


def told(model: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
    steps = hetmem.report(model).to_dict()["steps"]
    weights = [p.detach().clone() for p in model.parameters()]
    hetmem.release(model)
    return weights, steps


def by_accelerate(rank: int) -> Any:
    accelerate = importlib.import_module("accelerate")
    model = managed(net())
    accelerator = among_ranks(accelerate.Accelerator)(cpu=True)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4))
    assert prepared is model
    assert len(loader) == STEPS, "each rank has its own batches"
    for x, y in loader:
        accelerator.backward(mse_loss(prepared(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return told(model)


def by_hand(rank: int) -> Any:
    model = managed(net())
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    x, y = data().tensors
    for step in range(STEPS):
        rows = slice(4 * (2 * step + rank), 4 * (2 * step + rank) + 4)
        mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told(model)


def trainer_of(model: torch.nn.Module, folder: str, steps: int) -> Any:
    transformers = importlib.import_module("transformers")
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=2,
        save_steps=1,
        logging_steps=1,
        lr_scheduler_type="constant",
    )
    rows = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    return among_ranks(transformers.Trainer)(model, arguments, train_dataset=data, **for_trainer(arguments))


def by_the_trainer(rank: int, folder: str) -> Any:
    """Trains a step less, and goes on from the checkpoint with another model."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    found = []
    for path, steps in ((f"{folder}/whole", (STEPS,)), (f"{folder}/parts", (STEPS - 1, STEPS))):
        for at in steps:
            torch.manual_seed(1)
            model = managed(transformers.LlamaForCausalLM(config))
            trainer = trainer_of(model, path, at)
            assert trainer.accelerator.num_processes == 2
            trainer.train(resume_from_checkpoint=at == STEPS > steps[0])
            assert trainer.model_wrapped is model
            weights = [p.detach().clone() for p in model.parameters()]
            hetmem.release(model)
        found.append(weights)
    assert all(map(torch.equal, *found))
    return found[0], STEPS


def by_trl(rank: int, folder: str) -> Any:
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    from tests.test_docs_code import llama
    from tests.test_docs_frameworks import words

    model = managed(llama("model"))
    arguments = trl.SFTConfig(
        folder,
        max_steps=STEPS,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=2,
    )
    rows = datasets.Dataset.from_dict({"text": ["a b a b b a"] * 24})
    trainer = among_ranks(trl.SFTTrainer)(
        model, arguments, train_dataset=rows, processing_class=words(), **for_trainer(arguments)
    )
    trainer.train()
    assert trainer.model_wrapped is model
    return told(model)


def by_lightning(rank: int, folder: str) -> Any:
    lightning = importlib.import_module("lightning.pytorch")
    model = managed(net())

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> torch.Tensor:
            return mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return hetmem.AdamW(model.parameters(), lr=1e-2)

    strategy = among_ranks(lightning.strategies.DDPStrategy)(process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=4))
    return told(model)


def check(found: list[Any]) -> None:
    (weights, steps), (others, other_steps) = found
    assert steps == other_steps == STEPS
    assert all(map(torch.equal, weights, others))


@pytest.mark.nightly
def test_accelerate_has_the_bits_of_a_loop() -> None:
    found, expected = ranks(2, by_accelerate), ranks(2, by_hand)
    check(found)
    assert all(map(torch.equal, found[0][0], expected[0][0]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("framework", "run"), [("transformers", by_the_trainer), ("trl", by_trl), ("lightning", by_lightning)]
)
def test_ranks_have_equal_weights(framework: str, run: Callable[..., Any], tmp_path: Any) -> None:
    pytest.importorskip(framework)
    check(ranks(2, run, str(tmp_path)))


def test_a_class_that_wraps_nothing_is_refused() -> None:
    with pytest.raises(ManageError, match="among_ranks takes a Trainer"):
        among_ranks(dict)
