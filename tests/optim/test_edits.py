"""What users change between backward and step, or between steps, counts: states, gradients, weights, options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from tests.optim.stories import OVERLAPS, adamw, one
from tests.runtime.harness import (
    STREAMED,
    assert_same_states,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    vector_batches,
)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_states_that_were_loaded_between_steps_count(overlap: str, tmp_path: Path) -> None:
    """Copies of the old ones may lie in staging."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    early = None
    for index, batch in enumerate(vector_batches(6, 4, 64)):
        one(plain, batch, left)
        one(managed, batch, right)
        if index == 1:
            early = copy.deepcopy(left.state_dict())
        if index == 3:
            left.load_state_dict(copy.deepcopy(early))
            right.load_state_dict(copy.deepcopy(early))
    assert_same_states(left, right)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_states_that_the_user_wrote_between_steps_count(overlap: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        for module, optimizer in ((plain, left), (managed, right)):
            for parameter in module.parameters():
                optimizer.state[parameter]["exp_avg"].mul_(0.5)
    assert_same_states(left, right)
    assert_same_weights(plain, managed)


@pytest.mark.pairs
@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("which", ["all", "one chunk"])
def test_gradients_dropped_before_the_step_are_not_used(
    which: str, overlap: str, placement: str, tmp_path: Path
) -> None:
    """Either nothing is updated, as in torch, or an error says what is wrong."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    batches = vector_batches(5, 4, 64)
    for batch in batches[:3]:
        one(plain, batch, left)
        one(managed, batch, right)
    for module in (plain, managed):
        loss_of(module, batches[3]).backward()
        for parameter in module.parameters() if which == "all" else [module[2].weight]:
            parameter.grad = None
    left.step()
    try:
        right.step()
    except RuntimeError as error:
        assert "overlap='off'" in str(error)  # noqa: PT017
        return
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_weights_written_before_the_step_count(overlap: str, placement: str, tmp_path: Path) -> None:
    """Either the update is made of what was written, as in torch, or an error says what is wrong."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    batches = vector_batches(5, 4, 64)
    for batch in batches[:3]:
        one(plain, batch, left)
        one(managed, batch, right)
    for module in (plain, managed):
        loss_of(module, batches[3]).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
    left.step()
    try:
        right.step()
    except RuntimeError as error:
        assert "overlap='off'" in str(error)  # noqa: PT017
        return
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_learning_rate_in_a_tensor_of_one_element_changes_in_place(overlap: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    rates = [torch.tensor([1e-2]), torch.tensor([1e-2])]
    left = torch.optim.AdamW(plain.parameters(), lr=rates[0], fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=rates[1], overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        for module, optimizer, rate in ((plain, left, rates[0]), (managed, right, rates[1])):
            one(module, batch, optimizer)
            rate.mul_(0.5)
        assert_same_weights(plain, managed)


def test_amsgrad_is_not_ignored(tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    with pytest.raises(ValueError, match="amsgrad"):
        hetmem.AdamW([{"params": list(managed.parameters()), "amsgrad": True}], lr=1e-2)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, amsgrad=True)
    one(plain, vector_batches(1, 4, 64)[0], left)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="amsgrad"):
        right.load_state_dict(left.state_dict())


@pytest.mark.parametrize("placement", STREAMED)
def test_options_that_come_with_a_checkpoint_bring_their_states(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left: Any = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    right: Any = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1)
    batches = vector_batches(4, 4, 64)
    for batch in batches[:2]:
        one(plain, batch, left)
    managed.load_state_dict(plain.state_dict())
    right.load_state_dict(copy.deepcopy(left.state_dict()))
    for batch in batches[2:]:
        one(plain, batch, left)
        one(managed, batch, right)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
