"""Known families train with `hetmem.accumulate` as with the loop of plain torch, in every precision, placement of
activations and way to overlap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.accumulation.test_accumulate import loop
from tests.engine.harness import adamws, assert_same, assert_same_weights, pair, reference
from tests.models import zoo
from tests.pairs import every_two_meet

BF16 = torch.bfloat16
SCALE = 256.0
"""Of losses; a power of two, so that no bit depends on it."""


class Loss(nn.Module):
    """The loss of a model of transformers for a batch of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.inner(**micro_batch).loss
        return loss


class Stem(Loss):
    """A convolution and statistics of the batch before a vision transformer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))

    def forward(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward({**micro_batch, "pixel_values": self.stem(micro_batch["pixel_values"])})


class Recurrent(nn.Module):
    """No blocks that repeat: the loop stands in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(zoo.VOCABULARY, 32), nn.LSTM(32, 32, 2)
        self.head = nn.Linear(32, zoo.VOCABULARY)

    def forward(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = micro_batch["input_ids"]
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


class Adapted(nn.Linear):
    """A frozen weight, and what an adapter adds to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=False)
        self.weight = nn.Parameter(frozen.weight.detach().clone(), requires_grad=False)
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


def with_adapters(model: Any) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return Loss(model)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: Loss(zoo.gpt2()[0]),
    "llama": lambda: Loss(zoo.llama()[0]),
    "t5": lambda: Loss(zoo.t5()[0]),
    "mixtral": lambda: Loss(zoo.mixtral()[0]),
    "vit": lambda: Stem(zoo.vit()[0]),
    "lstm": Recurrent,
    "lora": lambda: with_adapters(zoo.llama()[0]),
}
INPUTS = {"vit": zoo.vit, "t5": zoo.t5}


def micro_batches(family: str, count: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Batches of other values each."""
    first = INPUTS.get(family, zoo.llama)()[1]
    changed = {"input_ids", "pixel_values"}
    return [
        {name: tensor.roll(1 + at + count * step, -1) if name in changed else tensor for name, tensor in first.items()}
        for at in range(count)
    ]


def build(family: str, kept: str) -> nn.Module:
    model = FAMILIES[family]()
    inner = getattr(model, "inner", None)
    if kept == "checkpointed" and inner is not None:
        enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        if family == "lora":
            inner.enable_input_require_grads()
    return model


CASES = list(
    product(
        FAMILIES,
        (None, BF16),
        ("keep", "checkpointed", "auto"),
        ("off", "clip", "scaled", "backward", "forward"),
        (2, 3, 8),
    )
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "mixed", "kept", "overlap", "count"), [CASES[index] for index in every_two_meet(CASES)]
)
def test_a_family_trains_with_the_bits_of_the_loop(
    family: str, mixed: torch.dtype | None, kept: str, overlap: str, count: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mixed_precision": mixed, "activations": "auto" if kept == "auto" else "keep"}
    plain, managed = pair(lambda: build(family, kept), "host", tmp_path, sanitize=False, **options)
    asked: dict[str, Any] = {"scaled": {"loss_scale": SCALE}, "clip": {}}.get(overlap, {"overlap": overlap})
    optimizers = adamws(plain, managed, **asked)
    scale = SCALE if overlap == "scaled" else 1.0
    backward = reference(plain, mixed)
    for step in range(3):
        batches = micro_batches(family, count, step)
        if mixed is not None and family == "vit":
            batches = [{**batch, "pixel_values": batch["pixel_values"].to(mixed)} for batch in batches]
        state = torch.get_rng_state()
        expected = loop(backward, batches)
        torch.set_rng_state(state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Recurrent has no ModuleList")
            got = hetmem.accumulate(managed, batches, lambda model, batch: optimizers[1].scale(model(batch) / count))
        for one, other in zip(expected, got, strict=True):
            assert_same(one, other / scale, f"step {step} loss")
        if overlap == "clip":
            assert_same(*(nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (plain, managed)), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
