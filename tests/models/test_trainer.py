"""The `Trainer` of Hugging Face transformers over a managed model does what it does over a plain one, bit for bit."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from torch import Tensor, nn

import hetmem
from hetmem import testing
from hetmem.errors import ManageError
from hetmem.integrations import for_trainer, layer_by_layer
from tests.engine.harness import assert_same_states, assert_same_weights
from tests.models.zoo import MODELS, TOKENS, VOCABULARY
from tests.pairs import some

BATCH = 2
CHUNK_BYTES = 16 * 1024


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """As many as two epochs of three steps take."""

    def __init__(self) -> None:
        self._tokens = torch.randint(3, VOCABULARY, (3 * BATCH, TOKENS), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def managed_copy(model: nn.Module, directory: Path) -> nn.Module:
    """Most of it on NVMe."""
    budget = hetmem.Budget(device="16MiB", device_chunks="512KiB", host="1MiB", nvme="32MiB", nvme_dir=directory)
    return hetmem.manage(copy.deepcopy(model), budget, device="sim", chunk_bytes=CHUNK_BYTES, sanitize=True)


def trained(
    model: nn.Module,
    directory: Path,
    *,
    resume: Path | None = None,
    overlap: str | None = None,
    ours: dict[str, Any] | None = None,
    kind: type[transformers.Trainer] = transformers.Trainer,
    **options: Any,
) -> transformers.Trainer:
    """Three steps with clipping and a schedule. The trainer seeds as it is made. `ours`: keywords of `for_trainer`,
    which makes the optimizer."""
    managed = testing.is_managed(next(model.parameters()))
    made = partial(hetmem.AdamW, overlap=overlap or "off") if managed else partial(torch.optim.AdamW, fused=True)
    decay = options.get("weight_decay", 0.1)
    optimizer: Any = made(model.parameters(), lr=1e-3, weight_decay=decay) if ours is None else None
    arguments = transformers.TrainingArguments(
        str(directory),
        learning_rate=1e-3,
        warmup_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{
            "max_steps": 3,
            "max_grad_norm": 0.5,
            "per_device_train_batch_size": BATCH,
            "save_strategy": "no",
            **options,
        },
    )
    chosen = {"optimizers": (optimizer, None)} if ours is None else for_trainer(arguments, **ours)
    trainer = kind(model, arguments, train_dataset=Sentences(), **chosen)
    if managed and overlap is not None and not arguments.max_grad_norm:
        trainer.accelerator.clip_grad_norm_ = lambda *_, **__: None
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: transformers.Trainer) -> list[float]:
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("options", some([{"gradient_accumulation_steps": 2}, {}], 2), ids=["accumulation", "plain"])
def test_a_trainer_has_the_bits_of_the_same_one_over_plain_torch(options: dict[str, Any], tmp_path: Path) -> None:
    plain = MODELS["gpt2"]()[0]
    managed = managed_copy(plain, tmp_path)
    left = trained(plain, tmp_path / "plain", **options)
    right = trained(managed, tmp_path / "managed", **options)
    assert len(losses(left)) == 3
    assert losses(left) == losses(right)
    assert norms(left) == norms(right)
    assert min(norms(left)) > 0.5, "nothing was clipped"
    assert_same_weights(plain, managed)
    assert_same_states(left.optimizer.optimizer, right.optimizer.optimizer)
    report = hetmem.report(managed).to_dict()
    assert report["steps"] == 3
    assert report["tiers"]["nvme"]["peak_bytes"] > 0


def test_a_trainer_in_bfloat16_keeps_no_second_model_on_the_device(tmp_path: Path) -> None:
    """`bf16=True` is autocast within the forward: torch keeps a cast of each weight until the backward."""
    plain = MODELS["gpt2"]()[0]
    managed = managed_copy(plain, tmp_path)
    left, right = trained(plain, tmp_path / "plain", bf16=True), trained(managed, tmp_path / "managed", bf16=True)
    assert losses(left) == losses(right)
    assert_same_weights(plain, managed)
    (tmp_path / "other").mkdir()
    floats = trained(managed_copy(plain, tmp_path / "other"), tmp_path / "float32")
    other = [hetmem.report(each.model).to_dict()["tiers"]["device"] for each in (right, floats)]
    beside, without = (tier["peak_bytes"] - tier["chunk_peak_bytes"] for tier in other)
    assert beside < without + sum(parameter.numel() for parameter in plain.parameters()) // 2


@pytest.mark.parametrize("of", some(["managed", "plain"], 2))
def test_a_trainer_goes_on_from_a_checkpoint_with_the_same_bits(of: str, tmp_path: Path) -> None:
    """Of its own, or of the same one over plain torch."""
    plain = MODELS["gpt2"]()[0]
    managed, resumed = managed_copy(plain, tmp_path), managed_copy(plain, tmp_path)
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(plain, tmp_path / "plain", **saves)
    trained(managed, tmp_path / "managed", **saves)
    again = trained(resumed, tmp_path / "again", resume=tmp_path / of / "checkpoint-2")
    assert losses(again) == losses(whole)
    assert_same_weights(plain, resumed)
    assert_same_states(whole.optimizer.optimizer, again.optimizer.optimizer)


@pytest.mark.parametrize("overlap", some(["forward", "backward"], 2))
def test_updates_overlap_where_the_trainer_clips_nothing_and_are_refused_where_it_does(
    overlap: str, tmp_path: Path
) -> None:
    """It multiplies gradients by 1 where it only wants their norm, also with `max_grad_norm=0`."""
    plain = MODELS["gpt2"]()[0]
    managed, clipped = managed_copy(plain, tmp_path), managed_copy(plain, tmp_path)
    whole = trained(plain, tmp_path / "plain", max_grad_norm=0.0)
    right = trained(managed, tmp_path / "managed", max_grad_norm=0.0, overlap=overlap)
    assert losses(whole) == losses(right)
    assert_same_weights(plain, managed)
    with pytest.raises(RuntimeError, match="use max_grad_norm= to clip and loss_scale= to scale"):
        trained(clipped, tmp_path / "clipped", overlap=overlap)


def test_for_trainer_lets_trainers_read_norms_with_any_overlap_and_reports(tmp_path: Path) -> None:
    """A trainer does so by default. Without clipping the bits are those of one over plain torch; with it, those of the
    optimizer's own."""
    plain = MODELS["gpt2"]()[0]
    unclipped, clipped, alone = (managed_copy(plain, tmp_path) for _ in range(3))
    written: list[tuple[int, dict[str, float]]] = []
    ours = {"overlap": "backward", "report": tmp_path / "run.json"}
    log = [lambda values, step: written.append((step, values))]
    groups = {"max_grad_norm": 0.0, "weight_decay": 0.0}  # of which a trainer makes two
    left = trained(plain, tmp_path / "plain", **groups)
    right = trained(unclipped, tmp_path / "unclipped", **groups, ours={**ours, "log": log})
    assert losses(left) == losses(right)
    assert norms(left) == norms(right)
    assert_same_weights(plain, unclipped)
    assert [step for step, _ in written] == [1, 2, 3, 3]
    assert written[0][1]["hetmem/device_peak_bytes"] > 0
    assert written[0][1]["hetmem/tokens_per_second"] > 0
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 3
    trained(clipped, tmp_path / "clipped", weight_decay=0.0, ours=ours)
    trained(alone, tmp_path / "alone", weight_decay=0.0, max_grad_norm=0.0, ours={"max_grad_norm": 0.5})
    assert_same_weights(clipped, alone)
    assert not all(map(torch.equal, clipped.parameters(), unclipped.parameters())), "nothing was clipped"


def test_a_trainer_computes_the_loss_in_chunks_if_asked_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    plain = MODELS["gpt2"]()[0]
    chunked, own = (managed_copy(plain, tmp_path) for _ in range(2))
    groups = {"weight_decay": 0.0, "gradient_accumulation_steps": 2}
    right = trained(chunked, tmp_path / "chunked", **groups, ours={"loss": "chunked"})
    left = trained(own, tmp_path / "own", **groups, ours={})
    assert losses(right) == pytest.approx(losses(left), rel=1e-5)
    assert norms(right) == pytest.approx(norms(left), rel=1e-4)
    assert hetmem.report(chunked).to_dict()["loss"] and not hetmem.report(own).to_dict()["loss"]
    tokens = Sentences()[0]["input_ids"][None]
    assert chunked.train()(input_ids=tokens, labels=tokens).logits is not None
    with pytest.raises(ManageError, match="smoothed labels"):
        trained(own, tmp_path / "own", label_smoothing_factor=0.1, ours={"loss": "chunked"})


@pytest.mark.parametrize("options", some([{}, {"bf16": True}, {"num_train_epochs": 2}], 2))
def test_a_trainer_computes_all_micro_batches_of_a_step_layer_by_layer_with_its_bits(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The last step of an epoch has fewer. What is logged is the same, and each weight comes twice a step."""
    plain = MODELS["llama"]()[0]  # which has no dropout
    budget = hetmem.Budget(device="16MiB", device_chunks="320KiB", host="16MiB")
    managed = hetmem.manage(copy.deepcopy(plain), budget, device="sim", chunk_bytes=CHUNK_BYTES)
    steps = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_steps": 4, "weight_decay": 0.0}
    left = trained(plain, tmp_path / "plain", **steps, **options)
    right = trained(managed, tmp_path / "managed", **steps, **options, kind=layer_by_layer(transformers.Trainer))
    assert len(losses(left)) == 4
    assert left.state.log_history[:-1] == right.state.log_history[:-1]
    assert_same_weights(plain, managed)
    assert_same_states(left.optimizer.optimizer, right.optimizer.optimizer)
    moved = testing.of(managed).link_bytes()["host_to_device"]
    assert moved < 4 * 2.2 * sum(parameter.nbytes for parameter in plain.parameters())


def test_a_trainer_without_norms_updates_within_the_backward(tmp_path: Path) -> None:
    plain = MODELS["llama"]()[0]
    managed = managed_copy(plain, tmp_path)
    steps = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, "weight_decay": 0.0}
    steps |= {"max_grad_norm": 0.0}
    left = trained(plain, tmp_path / "plain", **steps)
    ours = {"norms": False, "overlap": "backward"}
    right = trained(managed, tmp_path / "managed", **steps, ours=ours, kind=layer_by_layer(transformers.Trainer))
    assert losses(left) == losses(right)
    assert len(norms(left)) == 3
    assert not norms(right)
    assert_same_weights(plain, managed)


@pytest.mark.nightly
def test_a_trainer_finds_a_batch_size_by_itself(tmp_path: Path) -> None:
    """Its search, accelerate's, looks for words in the text of an error with one argument."""
    model, budget = MODELS["gpt2"]()[0], hetmem.Budget(device="1536KiB", device_chunks="512KiB", host="16MiB")
    hetmem.manage(model, budget, device="sim", chunk_bytes=CHUNK_BYTES)
    sizes = {"auto_find_batch_size": True, "per_device_train_batch_size": 3 * BATCH}
    trainer = trained(model, tmp_path, ours={}, weight_decay=0.0, **sizes)
    assert 0 < trainer._train_batch_size < 3 * BATCH
    assert len(losses(trainer)) == 3


def test_each_checkpoint_has_a_file_of_hetmem_that_was_written_behind_training(tmp_path: Path) -> None:
    """Training from it has the bits of training without a break; the trainer keeps one checkpoint."""
    managed = managed_copy(MODELS["gpt2"]()[0], tmp_path)
    ours: dict[str, Any] = {"checkpoints": True, "weight_decay": 0.1}
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "save_only_model": True,
        "max_grad_norm": 0.0,
    }
    trainer = trained(managed, tmp_path / "out", ours=ours, **options)
    assert [each.name for each in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    (tmp_path / "other").mkdir()
    other = managed_copy(MODELS["gpt2"]()[0], tmp_path / "other")
    names = {id(parameter): name for name, parameter in managed.named_parameters()}
    groups = [[other.get_parameter(names[id(p)]) for p in of["params"]] for of in trainer.optimizer.param_groups]
    optimizer = hetmem.AdamW([{"params": each} for each in groups])
    latest = hetmem.latest(tmp_path / "out" / "checkpoint-3")
    assert latest == str(tmp_path / "out" / "checkpoint-3" / "hetmem.safetensors")
    extra = hetmem.load(latest, other, optimizer)
    assert extra["step"] == 3
    assert_same_weights(managed, other)
    assert_same_states(trainer.optimizer.optimizer, optimizer)
    assert hetmem.report(managed).to_dict()["between_steps"]["saves"] == 3
