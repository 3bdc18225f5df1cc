"""Adapters of PEFT over a frozen base, managed, train bit for bit as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from torch import Tensor, nn

import hetmem
from hetmem.errors import CheckpointError
from tests.engine.harness import assert_same_states, assert_same_weights
from tests.models.zoo import MODELS, Inputs
from tests.pairs import case, some

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # of what PEFT still calls in transformers

CHUNK_BYTES = 16 * 1024
STEPS = 3
TASK = "CAUSAL_LM"

METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LoRA": ("llama", lambda: peft.LoraConfig(task_type=TASK, r=4, lora_dropout=0.1, target_modules="all-linear")),
    "LoRA of transposed weights": ("gpt2", lambda: peft.LoraConfig(task_type=TASK, fan_in_fan_out=True)),
    "LoRA and a whole module": (
        "llama",
        lambda: peft.LoraConfig(task_type=TASK, r=4, modules_to_save=["lm_head"]),
    ),
    "trainable tokens": ("llama", lambda: peft.LoraConfig(task_type=TASK, r=4, trainable_token_indices=[3, 7, 9])),
    "DoRA": ("llama", lambda: peft.LoraConfig(task_type=TASK, r=4, use_dora=True)),
    "VeRA": ("llama", lambda: peft.VeraConfig(task_type=TASK, r=8, target_modules=["q_proj", "o_proj"])),
    "IA3": ("llama", lambda: peft.IA3Config(task_type=TASK)),
    "LoHa": ("llama", lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"])),
    "OFT": ("llama", lambda: peft.OFTConfig(oft_block_size=8, target_modules=["q_proj", "o_proj"])),
    "prompts": ("llama", lambda: peft.PromptTuningConfig(task_type=TASK, num_virtual_tokens=4)),
    "prefixes": ("llama", lambda: peft.PrefixTuningConfig(task_type=TASK, num_virtual_tokens=4)),
}
"""Name of a method to the family it adapts, and its configuration."""

EVERYDAY = ("LoRA and a whole module", "trainable tokens", "OFT", "prompts")
"""Beside LoRA and DoRA, which train with overlap: what a test takes without `--all-cases`."""


def adapted(method: str) -> tuple[Any, Inputs]:
    family, configuration = METHODS[method]
    torch.manual_seed(1)
    base, inputs = MODELS[family]()
    return peft.get_peft_model(base, configuration()), inputs


def managed_copy(model: nn.Module, directory: Path, **options: Any) -> Any:
    """Most of it on NVMe."""
    budget = hetmem.Budget(device="16MiB", device_chunks="512KiB", host="512KiB", nvme="32MiB", nvme_dir=directory)
    managed = copy.deepcopy(model)
    return hetmem.manage(managed, budget, device="sim", chunk_bytes=CHUNK_BYTES, sanitize=True, **options)


class Run:
    """A model and its optimizer."""

    def __init__(self, model: Any, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.model, self.optimizer = model, optimizer(model.parameters(), lr=1e-2, weight_decay=0.1)

    def train(self, inputs: Inputs, steps: int = STEPS) -> list[Tensor]:
        """The losses."""
        torch.manual_seed(3)
        losses = []
        for _ in range(steps):
            loss = self.model(**inputs).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses


def runs(method: str, directory: Path, overlap: str = "off") -> tuple[Run, Run, Inputs]:
    """The plain one and the managed one."""
    plain, inputs = adapted(method)
    managed = managed_copy(plain, directory)
    return (
        Run(plain, partial(torch.optim.AdamW, fused=True)),
        Run(managed, partial(hetmem.AdamW, overlap=overlap)),
        inputs,
    )


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(*pair) for pair in zip(left, right, strict=True)), (left, right)


@pytest.mark.parametrize(
    ("method", "overlap"),
    [
        *[case(method, "off", nightly=method not in EVERYDAY) for method in METHODS],
        ("LoRA", "forward"),
        ("DoRA", "backward"),
    ],
)
def test_adapters_train_as_in_plain_torch(method: str, overlap: str, tmp_path: Path) -> None:
    plain, managed, inputs = runs(method, tmp_path, overlap)
    before = copy.deepcopy(plain.model)
    assert_equal(plain.train(inputs), managed.train(inputs))
    assert_same_weights(plain.model, managed.model)
    assert_same_states(plain.optimizer, managed.optimizer)
    for (name, old), new in zip(before.named_parameters(), managed.model.parameters(), strict=True):
        assert old.requires_grad or torch.equal(old, new), f"{name} is frozen"
    assert hetmem.report(managed.model).to_dict()["tiers"]["nvme"]["peak_bytes"] > 0


@pytest.mark.parametrize("reentrant", some([True, False], 2), ids=["reentrant", "not reentrant"])
def test_adapters_train_with_checkpointed_layers(reentrant: bool, tmp_path: Path) -> None:
    plain, managed, inputs = runs("LoRA", tmp_path)
    for model in (plain.model, managed.model):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal(plain.train(inputs), managed.train(inputs))
    assert_same_weights(plain.model, managed.model)


def test_adapters_train_in_mixed_precision_over_a_frozen_base_in_16_bits(tmp_path: Path) -> None:
    """What a user with a large base does: the base is bfloat16 itself, the adapters are float32."""
    torch.manual_seed(1)
    base, inputs = MODELS["llama"]()
    plain = peft.get_peft_model(base.to(torch.bfloat16), METHODS["LoRA"][1](), autocast_adapter_dtype=True)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16, torch.float32}
    managed = Run(managed_copy(plain, tmp_path), hetmem.AdamW)
    left = Run(plain, partial(torch.optim.AdamW, fused=True))
    assert_equal(left.train(inputs), managed.train(inputs))
    assert_same_weights(plain, managed.model)


def test_what_peft_does_between_steps(tmp_path: Path) -> None:
    """Without the adapter, merged into the base and out of it, saved and read into a plain model."""
    plain, managed, inputs = runs("LoRA", tmp_path)
    assert_equal(plain.train(inputs, 1), managed.train(inputs, 1))
    outputs: tuple[list[Tensor], list[Tensor]] = [], []
    for model, found in zip((plain.model, managed.model), outputs, strict=True):
        model.eval()
        with torch.no_grad(), model.disable_adapter():
            found.append(model(**inputs).logits)
        model.merge_adapter()
        with torch.no_grad():
            found.append(model(**inputs).logits)
        found.append(model.generate(inputs["input_ids"][:, :5], max_new_tokens=5, do_sample=False))
        model.unmerge_adapter()
        model.train()
    assert_equal(*outputs)
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert_same_weights(plain.model, managed.model)
    assert_equal(plain.train(inputs, 2), managed.train(inputs, 2))
    managed.model.save_pretrained(tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(MODELS["llama"]()[0], tmp_path / "adapter")
    adapters = [peft.get_peft_model_state_dict(model) for model in (plain.model, read)]
    assert adapters[0].keys() == adapters[1].keys()
    assert_equal(*[list(adapter.values()) for adapter in adapters])


def test_an_adapter_that_was_trained_is_merged_for_good(tmp_path: Path) -> None:
    plain, managed, inputs = runs("LoRA", tmp_path)
    assert_equal(plain.train(inputs, 1), managed.train(inputs, 1))
    merged = [run.model.merge_and_unload() for run in (plain, managed)]
    assert_same_weights(*merged)
    with torch.no_grad():
        assert torch.equal(*[model.eval()(inputs["input_ids"]).logits for model in merged])


@pytest.mark.parametrize("method", ["LoRA", "LoRA of transposed weights", "LoRA and a whole module"])
@pytest.mark.parametrize("frozen", [None, "nf4"])
def test_an_adapter_is_exported_merged_with_the_bits_of_pefts_merge(method: str, frozen: Any, tmp_path: Path) -> None:
    """Under the names of the base model, with nothing changed; or alone, by the names in PEFT's files."""
    plain, inputs = adapted(method)
    base = copy.deepcopy(plain).unload()
    run = Run(managed_copy(plain, tmp_path, frozen=frozen), hetmem.AdamW)
    run.train(inputs, 2)
    alone = dict(hetmem.export_weights(run.model, torch.float32, adapters="only"))
    assert alone.keys() == peft.get_peft_model_state_dict(run.model).keys()
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    merged = {name: tensor.clone() for name, tensor in hetmem.export_weights(run.model)}
    assert_equal(before, [parameter.detach() for parameter in run.model.parameters()])
    with torch.no_grad():
        for parameter, values in zip(plain.parameters(), before, strict=True):
            parameter.copy_(values)  # of quantised ones what their codes stand for
    expected = plain.merge_and_unload()
    names = dict(base.named_parameters())
    assert merged.keys() == names.keys()
    weights = dict(expected.named_parameters())
    assert_equal([merged[name] for name in names], [weights[name].detach().bfloat16() for name in names])


@pytest.mark.parametrize(("method", "kind"), [("DoRA", "Dora"), ("IA3", "peft.tuners.ia3"), ("prompts", "Prompt")])
def test_an_adapter_that_is_no_plain_lora_is_not_merged(method: str, kind: str, tmp_path: Path) -> None:
    model = managed_copy(adapted(method)[0], tmp_path)
    with pytest.raises(CheckpointError, match=rf"cannot be merged: {kind}"):
        next(hetmem.export_weights(model))
    assert [*hetmem.export_weights(model, adapters="only")]
