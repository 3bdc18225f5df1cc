"""A trace with more layers made of it is, event by event, the one that the deeper model gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.planner.tested import Call, Event, Work, Workload, grown, stacks, trace


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.mlp = nn.Linear(width, 3 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norms[0](x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return x + self.mlp(torch.cat([self.norms[1](x + mixed), other], -1)).relu()


class Translator(nn.Module):
    """Two stacks, and a head tied to the embedding."""

    def __init__(self, encoder: int, decoder: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.encoder = nn.ModuleList(Block(16) for _ in range(encoder))
        self.decoder = nn.ModuleList(Block(16) for _ in range(decoder))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.encoder:
            hidden = block(hidden, hidden)
        other = hidden
        for block in self.decoder:
            hidden = block(hidden, other)
        return cross_entropy((hidden @ self.embedding.weight.t()).flatten(0, 1), x.flatten())


def traced(encoder: int, decoder: int, mixed_precision: torch.dtype | None) -> Workload:
    batch = torch.zeros(2, 8, dtype=torch.int64)
    return trace(Call(lambda: Translator(encoder, decoder), batch, mixed_precision=mixed_precision))


def sight(workload: Workload) -> list[object]:
    def names(parameters: tuple[int, ...]) -> list[tuple[str, str]]:
        parts = [workload.parameters[number].name.split(".") for number in parameters]
        return [(part[0], ".".join(part[2:])) for part in parts]

    def work(event: Event) -> list[tuple[Work, int]]:
        return [(phase.work, phase.calls) for phase in (event.during, event.after)]

    return [(e.kind, names(e.parameters), names(e.held), names(e.let_go), *work(e)) for e in workload.events]


@pytest.mark.parametrize("mixed_precision", [None, torch.bfloat16])
def test_more_layers_of_a_trace_are_those_of_a_deeper_model(mixed_precision: torch.dtype | None) -> None:
    made: Workload | None = traced(3, 4, mixed_precision)
    assert made is not None
    for stack, more in zip(stacks(made.parameters), (2, 3), strict=True):
        made = grown(made, stack, more)
        assert made is not None
    deeper = traced(5, 7, mixed_precision)
    assert sight(made) == sight(deeper)
    assert (made.numel, made.peak_live_bytes, made.flops) == (deeper.numel, deeper.peak_live_bytes, deeper.flops)
    off = {one.live_bytes - other.live_bytes for one, other in zip(made.events, deeper.events, strict=True)}
    between_layers = 2 * 8 * 16 * made.compute_itemsizes[0]
    assert off == {0, between_layers}  # the gradient of what all decoder layers see is added up a little later
