"""Updates that trail behind the step: whoever reads, writes or drops what they work on does no harm."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

import hetmem
from tests.optim.stories import TRAILING, Twins, adamw, one, overlaps, twins
from tests.runtime.harness import (
    Tower,
    assert_same,
    assert_same_weights,
    loss_of,
    mlp,
    pair,
    precisions,
    reference,
    streamed,
    token_batches,
    vector_batches,
)


@streamed
def test_gradients_zeroed_by_the_model_while_updates_trail_do_no_harm(placement: str, tmp_path: Path) -> None:
    """Either torch's bits, or an error that says what to do."""
    both = twins(pair(mlp, placement, tmp_path), **TRAILING)
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in both.sides:
            try:
                loss_of(module, batch).backward()
            except RuntimeError as error:
                assert "synchronize" in str(error)  # noqa: PT017
                return
            optimizer.step()
            module.zero_grad(set_to_none=False)
    assert_same_weights(both.plain, both.managed)


@streamed
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_that_trail_into_inference_mode(kind: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    if kind == "adamw":
        both = twins((plain, managed), **TRAILING)
    else:
        left = torch.optim.NAdam(plain.parameters(), lr=1e-2)
        right = hetmem.optim.offload(torch.optim.NAdam, managed.parameters(), lr=1e-2, **TRAILING)
        both = Twins(plain, managed, left, right)
    for batch in vector_batches(3, 4, 64):
        for module, optimizer in both.sides:
            one(module, batch, optimizer)
            with torch.inference_mode():
                module(*batch)
    both.assert_same()


@streamed
def test_loading_weights_while_updates_trail(placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), **TRAILING)
    first = copy.deepcopy(both.plain.state_dict())
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in both.sides:
            one(module, batch, optimizer)
            module.load_state_dict(first)
    both.assert_same()


@streamed
def test_the_state_dict_of_a_part_waits_for_updates_too(placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), **TRAILING)
    for batch in vector_batches(4, 4, 64):
        both.train([batch])
        assert_same_weights(both.plain[2], both.managed[2])


@streamed
@overlaps
def test_a_copy_of_the_model_has_the_weights_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        both.train([batch])
        both.right.synchronize()
        assert_same_weights(both.plain, copy.deepcopy(both.managed))


@streamed
@overlaps
def test_parameters_read_directly_are_those_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        both.train([batch])
        both.right.synchronize()
        for expected, got in zip(both.plain.parameters(), both.managed.parameters(), strict=True):
            assert_same(expected, got, "parameter")


@streamed
@overlaps
def test_a_model_released_while_updates_trail(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    before = twins((plain, managed), overlap=overlap, max_grad_norm=1e9)
    before.train(vector_batches(3, 4, 64))
    hetmem.release(managed)
    before.assert_same()
    later = adamw(managed.parameters())
    later.load_state_dict(before.right.state_dict())
    for group in later.param_groups:  # torch takes options from the checkpoint, which does not have this one
        group["fused"] = True
    Twins(plain, managed, before.left, later).train(vector_batches(3, 4, 64))
    assert_same_weights(plain, managed)


@precisions
def test_a_forward_on_homes_sees_no_update_that_trails(mixed: torch.dtype | None, tmp_path: Path) -> None:
    """All on the device: operators see homes, or what is cast of them."""
    both = twins(pair(Tower, "resident", tmp_path, mixed_precision=mixed), **TRAILING)
    backward = reference(both.plain, mixed)
    for batch in token_batches(4):
        expected, got = backward(partial(loss_of, batch=batch)), loss_of(both.managed, batch)
        got.backward()
        assert_same(expected, got, "loss")
        for _, optimizer in both.sides:
            optimizer.step()
            optimizer.zero_grad()
