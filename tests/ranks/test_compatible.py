"""Several ranks with models of other kinds, and with what programs use beside: the bits of plain torch that runs the
batches of all ranks one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.testing import norm, ranks
from tests.pairs import every_two_meet
from tests.ranks.programs import difference, values

WIDTH, WORDS, STEPS = 32, 60, 3
Inputs = tuple[Tensor, ...]


class Tied(nn.Module):
    """Tied embeddings, a frozen layer, and blocks that may be recomputed, in either way, or compiled."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.blocks[0][1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            recomputes = self.reentrant is not None
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=self.reentrant) if recomputes else block(hidden))
        return (hidden @ self.words.weight.T).float().square().mean()


class Experts(nn.Module):
    """Each rank's batch has experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, number = self.into(inputs), int(inputs[0, 0].abs() * 1000)
        return (
            (hidden + self.experts[number % 6](hidden) * self.experts[number // 7 % 6](hidden)).float().square().mean()
        )


class Pictures(nn.Sequential):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return super().forward(pictures).float().square().mean()


class Pairs(nn.Module):
    """An encoder, and a decoder that attends to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, **options)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, **options)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, self.encoder(source)).float().square().mean()


class LoRA(nn.Module):
    """Frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            inputs = torch.tanh(base(inputs) + up(down(inputs)))
        return inputs.float().square().mean()


class Language(nn.Module):
    """A language model of transformers whose loss is computed without the logits of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=WORDS, pad_token_id=0))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        return hetmem.chunked_loss(self.model)(input_ids=tokens, labels=tokens)


def compiled(backend: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = Tied()
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    return made


def _tokens(made: torch.Generator) -> Inputs:
    return (torch.randint(WORDS, (2, 9), generator=made),)


def _numbers(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], Inputs]:
    return lambda made: tuple(torch.randn(shape, generator=made) for shape in shapes)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Inputs]]] = {
    "tied and frozen": (Tied, _tokens),
    "experts": (Experts, _numbers((4, WIDTH))),
    "convolutions and BatchNorm": (Pictures, _numbers((4, 3, 8, 8))),
    "encoder and decoder": (Pairs, _numbers((2, 5, WIDTH), (2, 4, WIDTH))),
    "LoRA": (LoRA, _numbers((4, WIDTH))),
    "compiled by eager": (compiled("eager"), _tokens),
    "compiled by aot_eager": (compiled("aot_eager"), _tokens),
    "checkpoints": (partial(Tied, reentrant=False), _tokens),
    "reentrant checkpoints": (partial(Tied, reentrant=True), _tokens),
    "chunked loss": (Language, _tokens),
}


@dataclass(frozen=True)
class Case:
    """A model by its name in `MODELS`, and how it is trained."""

    model: str
    mixed: torch.dtype | None = None
    micro: int = 1
    scales: str = ""
    """"clip", "dynamic" (hetmem's loss scale) or "GradScaler" (torch's)."""
    overlap: Literal["off", "backward", "forward"] = "off"
    activations: str = "keep"
    in_turns: bool = False
    """Whether micro-batches take turns at the layers."""

    def made(self) -> nn.Module:
        torch.manual_seed(7)
        return MODELS[self.model][0]()

    def inputs(self, step: int, micro: int, rank: int) -> Inputs:
        made = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        given = MODELS[self.model][1](made)
        return tuple(each.to(self.mixed) if self.mixed and each.is_floating_point() else each for each in given)


def trained(rank: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [_trained(rank, case) for case in cases]


def _trained(rank: int, case: Case) -> dict[str, Tensor]:
    model = hetmem.manage(
        case.made(),
        hetmem.Budget(device="8MiB", host="32MiB", device_chunks="128KiB"),
        device="sim",
        chunk_bytes="16KiB",
        mixed_precision=case.mixed,
        activations=case.activations,
    )
    options: dict[str, Any] = {"clip": {"max_grad_norm": 0.05}, "dynamic": {"loss_scale": "dynamic"}}
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, overlap=case.overlap, **options.get(case.scales, {}))
    scaler = torch.amp.GradScaler("cpu", enabled=case.scales == "GradScaler", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        batches = [case.inputs(step, micro, rank) for micro in range(case.micro)]
        if case.in_turns:
            hetmem.accumulate(model, batches, lambda model, batch: scaler.scale(optimizer.scale(model(*batch))))
        for batch in () if case.in_turns else batches:
            scaler.scale(optimizer.scale(model(*batch))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = values(model, optimizer)
    hetmem.release(model)
    return found


def expected(case: Case, count: int) -> dict[str, Tensor]:
    model, computes = case.made(), case.made()
    if case.mixed is not None:
        computes.to(case.mixed)
        for part in computes.modules():
            if isinstance(part, nn.BatchNorm2d):  # those with running statistics stay as they are
                part.float()
    pairs = [*zip(model.parameters(), computes.parameters(), strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        for p, used in pairs:
            used.data.copy_(p.data)
        for backward in [range(case.micro)] if case.in_turns else [(micro,) for micro in range(case.micro)]:
            for rank in range(count):
                of_rank: dict[Tensor, Tensor] = {}
                for micro in backward:
                    computes.zero_grad()
                    computes(*case.inputs(step, micro, rank)).backward()
                    for p, used in pairs:
                        if used.grad is not None:
                            part = used.grad.float()
                            of_rank[p] = of_rank[p] + part if p in of_rank else part
                for p, whole in of_rank.items():
                    p.grad = whole / count if p.grad is None else p.grad + whole / count
        shown = [p.grad for p in model.parameters() if p.grad is not None]
        if case.scales == "clip":
            scale = min(1.0, 0.05 / (norm([gradient.flatten() for gradient in shown]) + 1e-6))
            for gradient in shown:
                gradient.mul_(torch.tensor(scale))
        optimizer.step()
        optimizer.zero_grad()
    return values(model, optimizer)


TIED = Case("tied and frozen")
USES = [
    *(replace(TIED, model=name) for name in [*MODELS][5:]),
    replace(TIED, activations="auto"),
    replace(TIED, activations="auto", mixed=torch.bfloat16),
    *(replace(TIED, scales=scales, micro=micro) for scales in ("dynamic", "GradScaler") for micro in (1, 2)),
]
IN_TURNS = [
    Case(model, mixed, 3, scales, overlap, in_turns=True)
    for model in ("tied and frozen", "experts", "checkpoints", "LoRA")
    for mixed in (None, torch.bfloat16)
    for scales in ("", "clip", "dynamic")
    for overlap in ("off", "backward", "forward")
]
KINDS = [
    Case(model, mixed, micro, scales, overlap)
    for model in [*MODELS][:5]
    for mixed in (None, torch.bfloat16)
    for micro in (1, 2)
    for scales in ("", "clip", "dynamic")
    for overlap in ("off", "backward", "forward")
]


def pairwise(count: int, kinds: list[Case] = KINDS) -> list[Case]:
    """Those of `kinds` in which every two values meet, with others for each number of ranks."""
    fields = [*map(astuple, kinds)]
    turned = fields[count * 7 :] + fields[: count * 7]
    return [Case(*turned[at]) for at in every_two_meet(turned)]


def compare(count: int, cases: list[Case]) -> None:
    found = ranks(count, trained, cases, seconds=400.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = [expected(case, count) for case in cases]
    finally:
        torch.set_num_threads(threads)
    differ = {
        (case, rank): difference(found[rank][at], wanted[at]) for at, case in enumerate(cases) for rank in range(count)
    }
    assert {each: names for each, names in differ.items() if names} == {}


@pytest.mark.nightly
def test_what_programs_use_beside_has_the_bits_of_plain_torch() -> None:
    compare(2, USES)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_add_up_micro_batches_in_turns_before_they_add_up_ranks(count: int) -> None:
    compare(count, pairwise(count, IN_TURNS))


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_models_of_all_kinds_have_the_bits_of_plain_torch(count: int) -> None:
    compare(count, pairwise(count))
