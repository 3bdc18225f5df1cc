"""The CUDA device, on a machine without a GPU, when its allocator has no room for an operator."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.harness import Recipe, pair, streamed, train_both, vector_batches
from tests.memory.fake_cuda import CpuCuda, FakeCuda, cuda

__all__ = ["cuda"]  # a fixture

WIDTH = 512
"""A gradient of a layer is a MiB: smaller ones are not worth a copy behind the backward."""


class Crowded(CpuCuda):
    """Knows the gradients that take its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[weakref.ref[torch.UntypedStorage]] = []
        self.refused = 0

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        self.arrived.append(weakref.ref(arrived.untyped_storage()))
        super().gradient_out(target, arrived, add=add)

    def sine(self, x: torch.Tensor) -> torch.Tensor:
        """An operator that there is no memory for as long as a gradient has some."""
        if torch.overrides.has_torch_function_unary(x):
            result: torch.Tensor = torch.overrides.handle_torch_function(self.sine, (x,), x)
            return result
        if any(memory() is not None for memory in self.arrived):
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.sin()


class Checkpointed(nn.Module):
    def __init__(self, device: Crowded) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.device.sine(self.layer(x)), x, use_reentrant=False)


@streamed
def test_an_operator_without_memory_gets_that_of_gradients_on_their_way_home(
    cuda: FakeCuda, placement: str, tmp_path: Path
) -> None:
    """A part of the forward that is computed once more in the backward, behind the gradients of other parts; once more
    each, whatever other models are trained beside."""

    def layers(device: Crowded) -> tuple[nn.Module, nn.Module]:
        def build() -> nn.Module:
            return nn.Sequential(*[Checkpointed(device) for _ in range(3)])

        return pair(build, placement, tmp_path, device=device, chunk_bytes=4 * WIDTH * WIDTH)

    device = Crowded()
    before, one, after = map(layers, (Crowded(), device, Crowded()))
    for _, other in (before, after):
        other(torch.randn(4, WIDTH))  # and no backward: one that comes may be of it
    train_both(*one, vector_batches(3, 4, WIDTH), Recipe())
    assert device.refused == 3 * 2, "in each step, the second part and the third"
