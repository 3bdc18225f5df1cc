"""What the stories of `tests.optim` have in common: twins of a model and their optimizers, halves of them, one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetmem import testing
from tests.engine.harness import STREAMED, adamws, assert_same_states, assert_same_weights, loss_of, shared
from tests.pairs import mostly

OVERLAPS = ("off", "backward", "forward")
overlaps = shared("overlap", OVERLAPS)
on_either = shared(("overlap", "placement"), mostly(OVERLAPS, STREAMED))
on_the_other = shared(("overlap", "placement"), mostly(OVERLAPS, STREAMED[::-1]))
"""Each overlap with one placement of two: tests that take the one or the other have all pairs among them."""

TRAILING: dict[str, Any] = {"overlap": "forward", "max_grad_norm": 1e9}
"""Every update waits for a norm, which clips nothing: all of them trail behind the step."""

trailing = shared("options", [TRAILING, {"overlap": "forward"}], ids=["all", "last"])
"""All updates, or only those that the backward has begun and left."""


def small() -> nn.Sequential:
    """Many parameters in each chunk."""
    return nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(40, 40), nn.Tanh())])


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every other parameter: neighbours in one chunk."""
    parameters = list(module.parameters())
    return parameters[::2], parameters[1::2]


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, **options)


def one(module: nn.Module, batch: Any, *optimizers: Any) -> None:
    loss_of(module, batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


@dataclass(frozen=True)
class Twins:
    """A model twice, plain and managed, each with an optimizer: what is done to one is done to the other."""

    plain: Any
    managed: Any
    left: Any
    right: Any

    @property
    def sides(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The plain model and its optimizer, then the managed one and its own."""
        return (self.plain, self.left), (self.managed, self.right)

    def train(self, batches: Iterable[Any]) -> None:
        """Nothing is looked at, so that what trails behind a step still does after the last one."""
        for batch in batches:
            for module, optimizer in self.sides:
                one(module, batch, optimizer)

    def assert_same(self) -> None:
        assert_same_weights(self.plain, self.managed)
        assert_same_states(self.left, self.right)


def twins(modules: tuple[nn.Module, nn.Module], **options: Any) -> Twins:
    """With `adamws` on both sides of a `pair`."""
    return Twins(*modules, *adamws(*modules, **options))


def with_gradients(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that have a gradient which is not used up."""
    return [p for p in module.parameters() if p.grad is not None and not testing.is_consumed(p.grad)]
