"""Updates that trail behind the step: whoever reads, writes or drops what they work on does no harm."""

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
    Mixed,
    Tower,
    assert_same,
    assert_same_states,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    token_batches,
    vector_batches,
)


@pytest.mark.parametrize("placement", STREAMED)
def test_gradients_zeroed_by_the_model_while_updates_trail_do_no_harm(placement: str, tmp_path: Path) -> None:
    """Either torch's bits, or an error that says what to do."""
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            try:
                loss_of(module, batch).backward()
            except RuntimeError as error:
                assert "synchronize" in str(error)  # noqa: PT017
                return
            optimizer.step()
            module.zero_grad(set_to_none=False)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_that_trail_into_inference_mode(kind: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    if kind == "adamw":
        left: Any = adamw(plain.parameters())
        right: Any = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    else:
        left = torch.optim.NAdam(plain.parameters(), lr=1e-2)
        right = hetmem.optim.offload(
            torch.optim.NAdam, managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9
        )
    for batch in vector_batches(3, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            one(module, batch, optimizer)
            with torch.inference_mode():
                module(*batch)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("placement", STREAMED)
def test_loading_weights_while_updates_trail(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    first = copy.deepcopy(plain.state_dict())
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            one(module, batch, optimizer)
            module.load_state_dict(first)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("placement", STREAMED)
def test_the_state_dict_of_a_part_waits_for_updates_too(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        assert_same_weights(plain[2], managed[2])


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_copy_of_the_model_has_the_weights_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        right.synchronize()
        assert_same_weights(plain, copy.deepcopy(managed))


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_parameters_read_directly_are_those_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        right.synchronize()
        for expected, got in zip(plain.parameters(), managed.parameters(), strict=True):
            assert_same(expected, got, "parameter")


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_model_released_while_updates_trail(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
    hetmem.release(managed)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    later = adamw(managed.parameters())
    later.load_state_dict(right.state_dict())
    for group in later.param_groups:  # torch takes options from the checkpoint, which does not have this one
        group["fused"] = True
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, later)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_forward_on_homes_sees_no_update_that_trails(mixed: torch.dtype | None, tmp_path: Path) -> None:
    """All on the device: operators see homes, or what is cast of them."""
    plain, managed = pair(Tower, "resident", tmp_path, mixed_precision=mixed)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    masters = Mixed(plain, mixed) if mixed is not None else None
    for batch in token_batches(4):
        if masters is not None:
            expected = masters.backward(lambda module, batch=batch: loss_of(module, batch))
        else:
            expected = loss_of(plain, batch)
            expected.backward()
        got = loss_of(managed, batch)
        got.backward()
        assert_same(expected, got, "loss")
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
