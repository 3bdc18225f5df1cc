"""Layers that random programs are made of: each holds, reads or writes its weights in a way of its own.

What writes to weights in forward does so in float32 only: in mixed precision plain torch has no one weight to write to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class InFloat32(nn.Module):
    """A layer that torch has in float32 only, on a CPU; in other dtypes the program goes on without it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x) if x.dtype is torch.float32 else x
        return output[0] if isinstance(output, tuple) else output


class Normalized(nn.BatchNorm1d):
    """Counts, and keeps means of what it has seen, in buffers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.MultiheadAttention):
    """Its weights go to functions, not to layers; in evaluation to another operator than in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + super().forward(x, x, x, need_weights=False)[0]


class LookedUp(nn.Module):
    """An embedding with a row that gets no gradient; `max_norm` writes to the rows that are used, in forward."""

    def __init__(self, width: int, max_norm: float | None) -> None:
        super().__init__()
        self.table = nn.Embedding(8, width, padding_idx=2, max_norm=max_norm, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.max_norm is not None and x.dtype is not torch.float32:
            return x
        return x + self.table(x.detach()[..., :8].argmax(-1)).to(x.dtype)


class Codebook(nn.Module):
    """A parameter that no gradient changes but the forward itself, in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.dtype is torch.float32:
            with torch.no_grad():
                self.code.lerp_(x.detach().mean((0, 1)), 0.25)
        return torch.tanh(self.layer(x - self.code))


class Scale(torch.autograd.Function):
    """Gets a weight before any of torch's functions does, and saves it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).flatten(0, -2).sum(0)


class OfOwnFunction(nn.Module):
    """A function with a backward of the user's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) + torch.randn(width) / 8)
        self.after = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In 16 bits a weight that only such a function uses gets its gradients added up in float32: see test_autograd.
        weight = self.weight if x.dtype.itemsize > 2 else self.weight.view_as(self.weight)
        y: torch.Tensor = Scale.apply(x, weight)
        return F.linear(y, self.after.tril())


class CastsItself(nn.Module):
    """Computes in float32 whatever its weights are, as routers of experts do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer.to(self.layer.weight.dtype)
        y = F.linear(x.float(), layer.weight.float(), layer.bias.to(torch.float32))
        return x * y.softmax(-1).to(x.dtype)


WRITTEN_IN_FORWARD = ("clipped rows", "codebook")
"""What cannot be computed once more as if nothing had happened."""


def own_parts(width: int) -> dict[str, Callable[[], nn.Module]]:
    """By name, what makes each of them; all take and give (rows, length, width)."""
    encoder = lambda: nn.TransformerEncoderLayer(width, 4, width, dropout=0.1, batch_first=True)  # noqa: E731
    return {
        "batch norm": lambda: Normalized(width),
        "lstm": lambda: InFloat32(nn.LSTM(width, width, batch_first=True)),
        "gru": lambda: InFloat32(nn.GRU(width, width // 2, batch_first=True, bidirectional=True)),
        "attention": lambda: InFloat32(Attention(width, 4, batch_first=True)),
        "encoder": lambda: InFloat32(encoder()),
        "looked up": lambda: LookedUp(width, None),
        "clipped rows": lambda: LookedUp(width, 1.0),
        "codebook": lambda: Codebook(width),
        "casts itself": lambda: CastsItself(width),
        "own function": lambda: OfOwnFunction(width),
        "weight norm": lambda: parametrizations.weight_norm(nn.Linear(width, width)),
        "spectral norm": lambda: InFloat32(parametrizations.spectral_norm(nn.Linear(width, width))),
    }
