"""Models of Hugging Face transformers, managed, do bit for bit what they do in plain torch.

Every managed model has a third of the bytes of its states for chunks, on device and host together: most of it lives on
NVMe. `sanitize` poisons what is freed and fails where a GPU would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

import hetmem
from tests.models.zoo import MODELS, Inputs

STEPS = 3
PAGE = 4096
CHUNK_BYTES = 4 * PAGE
STATE_BYTES = 16
"""Of one float32 parameter under AdamW: itself, its gradient, and two states."""

Step = Callable[[nn.Module, Inputs], Tensor]


def third_of_states(model: nn.Module, directory: Path) -> hetmem.Budget:
    """Room for a third of the states: an eighth for chunks on the device, five twenty-fourths on the host."""
    states = STATE_BYTES * trainable(model)
    return hetmem.Budget(
        device="32MiB", device_chunks=states // 8, host=states * 5 // 24, nvme="64MiB", nvme_dir=directory
    )


def trainable(model: nn.Module) -> int:
    """How many elements are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def same(plain: Any, managed: Any) -> bool:
    """Bit for bit: NaN equals NaN only where the other has it, too."""
    if isinstance(plain, Tensor):
        return torch.equal(plain, managed)
    return plain is managed


class Pair:
    """A plain model and its managed copy, driven alike and compared after every move."""

    def __init__(self, name: str, directory: Path, mixed_precision: torch.dtype | None = None) -> None:
        self.plain, self.inputs = MODELS[name]()
        self.managed = copy.deepcopy(self.plain)
        self.budget = third_of_states(self.plain, directory)
        hetmem.manage(
            self.managed,
            self.budget,
            device="sim",
            mixed_precision=mixed_precision,
            chunk_bytes=CHUNK_BYTES,
            sanitize=True,
        )
        hyper_parameters = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
        self._plain_optimizer = torch.optim.AdamW(self.plain.parameters(), fused=True, **hyper_parameters)
        self._managed_optimizer = hetmem.AdamW(self.managed.parameters(), **hyper_parameters)

    def both(self, run: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """What `run` returns for the plain and for the managed model, from the same random numbers."""
        results = []
        seed = int(torch.randint(1 << 30, ()))
        for model in (self.plain, self.managed):
            torch.manual_seed(seed)
            results.append(run(model))
        torch.manual_seed(seed + 1)
        return results[0], results[1]

    def train(self, steps: int = STEPS) -> None:
        """`steps` steps, in which loss, gradients and weights stay the same."""
        for step in range(steps):
            plain, managed = self.both(self._forward_backward)
            assert torch.equal(plain, managed), f"step {step}: the losses are {plain} and {managed}"
            self.assert_alike(step, "gradient", lambda parameter: parameter.grad)
            for optimizer in (self._plain_optimizer, self._managed_optimizer):
                optimizer.step()
                optimizer.zero_grad()
            self.assert_alike(step, "weight", lambda parameter: parameter)

    def _forward_backward(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(**self.inputs).loss
        loss.backward()
        return loss.detach()

    def assert_alike(self, step: int, what: str, of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """`of` every parameter is the same in both models."""
        managed = dict(self.managed.named_parameters())
        for name, parameter in self.plain.named_parameters():
            assert same(of(parameter), of(managed[name])), f"step {step}: the {what} of {name} differs"

@pytest.mark.parametrize("name", MODELS)
def test_trains_bit_equal_to_plain_torch_under_a_third_of_its_states(name: str, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    pair.train()
    print(hetmem.report(pair.managed))
