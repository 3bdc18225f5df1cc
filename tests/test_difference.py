"""Where a managed model and plain torch part, told by step, module, parameter and element."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import ManageError


def build() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.BatchNorm1d(128)]
    return nn.Sequential(*parts, nn.Linear(128, 1))


def managed(**options: Any) -> nn.Sequential:
    limits = hetmem.Budget(device="4MiB", device_chunks="96KiB", host="16MiB")
    return hetmem.manage(build(), limits, device="sim", chunk_bytes="16KiB", **options)


def batches(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(8, 16) for _ in range(count)]


def square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_two_models_of_the_same_bits_do_not_differ(mixed: torch.dtype | None, overlap: Any) -> None:
    """Dropout draws the same numbers in both, and running statistics are compared too."""
    model, reference = managed(mixed_precision=mixed), build()
    ours = hetmem.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    found = testing.first_difference(model, reference, batches(), loss=square, optimizers=(ours, theirs))
    assert found is None, str(found)
    assert not torch.equal(reference[3].weight, build()[3].weight), "it has trained"


def test_a_copy_that_a_step_has_left_old_is_named_where_it_is_used() -> None:
    """Not as the loss that it has changed, or as a weight that its gradient has changed."""
    with (
        testing.around("a copy is stale", lambda original, *args: []),
        testing.around("copies are stale", lambda original, *args: []),
    ):
        found = testing.first_difference(managed(), build(), batches(), loss=square)
    assert found is not None and (found.step, found.what) == (2, "weight in use")
    assert str(found).startswith(f"step 2: weight in use {found.name}[")


def test_what_differs_before_the_first_step_in_a_gradient_and_in_a_state_is_named() -> None:
    reference = build()
    with torch.no_grad():
        reference[3].weight[2, 3] = 1.5
    found = testing.first_difference(managed(), reference, batches(), loss=square)
    assert found is not None and (found.step, found.name, found.index, found.expected) == (0, "3.weight", (2, 3), 1.5)
    assert "3.weight[2, 3], the first of 1 of 16384 elements" in str(found)
    reference = build()
    reference[5].bias.register_hook(lambda gradient: 2 * gradient)
    found = testing.first_difference(managed(), reference, batches(), loss=square)
    assert found is not None and (found.step, found.what, found.name) == (1, "gradient", "5.bias")
    model, reference = managed(), build()
    optimizers = (
        hetmem.AdamW(model.parameters()),
        torch.optim.AdamW(reference.parameters(), betas=(0.9, 0.9), fused=True),
    )
    found = testing.first_difference(model, reference, batches(), loss=square, optimizers=optimizers)
    assert found is not None and (found.step, found.what, found.name) == (1, "state", "exp_avg_sq of 0.weight")


def test_what_cannot_be_compared_is_refused() -> None:
    model = managed()
    for reference, why in ((copy.copy(model), "is managed"), (nn.Linear(16, 1), "other parameters: ")):
        with pytest.raises(ManageError, match=why):
            testing.first_difference(model, reference, batches(), loss=square)
    with pytest.raises(ManageError, match="is not managed"):
        testing.first_difference(build(), build(), batches(), loss=square)
    with pytest.raises(ManageError, match="no scalar"):
        testing.first_difference(model, build(), batches())
