"""The models that `make gpu` and `benchmarks.peers` train: a GPT and a stack of Llama's shape. They measure nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class _Stack(nn.Module):
    """Blocks between an embedding and a head; returns the loss of the next token."""

    def __init__(self, blocks: list[nn.Module], norm: nn.Module, vocabulary: int, width: int, checkpointing: bool):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), norm
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.begin(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def begin(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed [batch, time] tokens."""
        x: torch.Tensor = self.embedding(tokens)
        return x


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(_Stack):
    """GPT-2's shape with tied embeddings, or with a head of its own (`tied=False`)."""

    def __init__(
        self,
        width: int,
        depth: int,
        vocabulary: int = 50304,
        *,
        heads: int | None = None,
        context: int = 1024,
        checkpointing: bool = False,
        tied: bool = True,
    ) -> None:
        blocks: list[nn.Module] = [GPTBlock(width, heads or max(1, width // 128)) for _ in range(depth)]
        super().__init__(blocks, nn.LayerNorm(width), vocabulary, width, checkpointing)
        self.position = nn.Embedding(context, width)
        if tied:
            self.head.weight = self.embedding.weight

    def begin(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().begin(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class LlamaBlock(nn.Module):
    """Grouped attention and a gated MLP, without rotations, which cost next to nothing."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        narrow = width // heads * groups
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (width, narrow, narrow))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (count, -1)).transpose(1, 2)
            for layer, count in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(_Stack):
    """Blocks of Llama 8B's shape, as many as `depth`."""

    def __init__(
        self,
        depth: int,
        vocabulary: int = 16384,
        *,
        width: int = 4096,
        heads: int = 32,
        groups: int = 8,
        inner: int = 14336,
        checkpointing: bool = False,
    ) -> None:
        blocks: list[nn.Module] = [LlamaBlock(width, heads, groups, inner) for _ in range(depth)]
        super().__init__(blocks, nn.RMSNorm(width), vocabulary, width, checkpointing)


def sizes_of(build: Callable[[], nn.Module]) -> list[int]:
    """The elements of each parameter of the model that `build` builds."""
    with torch.device("meta"), _initialised_by(lambda module: None):
        return [parameter.numel() for parameter in build().parameters()]


def filled_fast() -> AbstractContextManager[None]:
    """Fill weights with normal noise at the speed of memory: torch's own takes a minute for ten billion numbers."""
    return _initialised_by(_fill)


@contextmanager
def _initialised_by(fill: Callable[[nn.Module], None]) -> Iterator[None]:
    with (
        mock.patch.object(nn.Linear, "reset_parameters", fill),
        mock.patch.object(nn.Embedding, "reset_parameters", fill),
    ):
        yield


def _fill(module: nn.Module) -> None:
    noise = torch.randn(1 << 20) * 0.02
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])


def training_step(model: Any, optimizer: Any, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step of training; returns its loss."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
