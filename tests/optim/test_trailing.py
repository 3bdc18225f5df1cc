"""Updates that trail behind the step: whoever reads, writes or drops what they work on does no harm."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.errors import ManageError
from tests.engine.harness import (
    Tower,
    assert_same,
    assert_same_weights,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    reference,
    streamed,
    token_batches,
    vector_batches,
)
from tests.optim.stories import Twins, adamw, on_either, on_the_other, one, trailing, twins


@streamed
@trailing
def test_gradients_zeroed_by_the_model_while_updates_trail_do_no_harm(
    options: dict[str, Any], placement: str, tmp_path: Path
) -> None:
    """Either torch's bits, or an error that says what to do."""
    both = twins(pair(mlp, placement, tmp_path), **options)
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


@pytest.mark.each
@streamed
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@trailing
def test_updates_that_trail_into_inference_mode(
    options: dict[str, Any], kind: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    if kind == "adamw":
        both = twins((plain, managed), **options)
    else:
        left = torch.optim.NAdam(plain.parameters(), lr=1e-2)
        right = hetmem.optim.offload(torch.optim.NAdam, managed.parameters(), lr=1e-2, **options)
        both = Twins(plain, managed, left, right)
    for batch in vector_batches(3, 4, 64):
        for module, optimizer in both.sides:
            one(module, batch, optimizer)
            with torch.inference_mode():
                module(*batch)
    both.assert_same()


@streamed
@trailing
def test_loading_weights_while_updates_trail(options: dict[str, Any], placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), **options)
    first = copy.deepcopy(both.plain.state_dict())
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in both.sides:
            one(module, batch, optimizer)
            module.load_state_dict(first)
    both.assert_same()


@streamed
@trailing
def test_states_that_are_put_away_while_updates_trail(options: dict[str, Any], placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), **options)
    for batch in vector_batches(6, 4, 64):
        for module, optimizer in both.sides:
            one(module, batch, optimizer)
            optimizer.state = defaultdict(dict)
    both.train(vector_batches(1, 4, 64))
    both.assert_same()


@streamed
@trailing
def test_the_state_dict_of_a_part_waits_for_updates_too(
    options: dict[str, Any], placement: str, tmp_path: Path
) -> None:
    both = twins(pair(mlp, placement, tmp_path), **options)
    for batch in vector_batches(4, 4, 64):
        both.train([batch])
        assert_same_weights(both.plain[2], both.managed[2])


@on_either
def test_a_copy_of_the_model_has_the_weights_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        both.train([batch])
        both.right.synchronize()
        assert_same_weights(both.plain, copy.deepcopy(both.managed))


@on_the_other
def test_parameters_read_directly_are_those_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        both.train([batch])
        both.right.synchronize()
        for expected, got in zip(both.plain.parameters(), both.managed.parameters(), strict=True):
            assert_same(expected, got, "parameter")


@on_either
def test_a_model_released_while_updates_trail(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    before = twins((plain, managed), overlap=overlap, max_grad_norm=1e9)
    before.train(vector_batches(3, 4, 64))
    hetmem.release(managed)
    before.assert_same()
    later = adamw(managed.parameters())
    later.load_state_dict(before.right.state_dict())
    Twins(plain, managed, before.left, later).train(vector_batches(3, 4, 64))
    assert_same_weights(plain, managed)


@on_the_other
def test_an_optimizer_of_a_model_that_was_released_and_is_managed_again_says_whose_states_it_has(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """It went on with empty ones."""
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap)
    both.train(vector_batches(3, 4, 64))
    hetmem.release(both.managed)
    manage(both.managed, placement, tmp_path)
    for module, _ in both.sides:
        loss_of(module, vector_batches(1, 4, 64)[0]).backward()
    for _ in range(2):
        with pytest.raises(ManageError, match="released and managed again"):
            both.right.step()
    both.right.load_state_dict(both.right.state_dict())
    for _, optimizer in both.sides:
        optimizer.step()
        optimizer.zero_grad()
    both.train(vector_batches(3, 4, 64))
    both.assert_same()


@precisions
@trailing
def test_a_forward_on_homes_sees_no_update_that_trails(
    options: dict[str, Any], mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """All on the device: operators see homes, or what is cast of them."""
    both = twins(pair(Tower, "resident", tmp_path, mixed_precision=mixed), **options)
    backward = reference(both.plain, mixed)
    for batch in token_batches(4):
        expected, got = backward(partial(loss_of, batch=batch)), loss_of(both.managed, batch)
        got.backward()
        assert_same(expected, got, "loss")
        for _, optimizer in both.sides:
            optimizer.step()
            optimizer.zero_grad()


@streamed
def test_a_step_waits_for_no_update_that_was_begun_in_the_backward(placement: str, tmp_path: Path) -> None:
    """As if none came to an end while the step goes on."""
    both = twins(pair(mlp, placement, tmp_path), overlap="forward")
    batches = vector_batches(4, 4, 64)
    both.train(batches[:2])
    for batch in batches[2:]:
        for module in (both.plain, both.managed):
            loss_of(module, batch).backward()
        with testing.around("finish updates", _must_not_be_waited_for):
            both.right.step()
        both.left.step()
        both.left.zero_grad()
        assert all(testing.is_consumed(parameter.grad) for parameter in both.managed.parameters())
        both.right.zero_grad()
    both.right.synchronize()
    both.assert_same()


@streamed
def test_what_is_left_of_a_step_is_done_in_the_order_in_which_it_is_wanted(placement: str, tmp_path: Path) -> None:
    """Gradients arrive in the opposite order."""
    both = twins(pair(mlp, placement, tmp_path), overlap="forward")
    batches = vector_batches(3, 4, 64)
    both.train(batches[:2])
    both.right.synchronize()
    with testing.updates_held():
        for module, optimizer in both.sides:
            loss_of(module, batches[2]).backward()
            optimizer.step()
    opened: list[int] = []

    def note(original: Callable[..., None], updates: Any, job: Any) -> None:
        opened.append(job.chunk.spec.index)
        original(updates, job)

    with testing.around("open an update", note):
        both.right.synchronize()
    everyone = [chunk.index for chunk in testing.of(both.managed).chunks()]
    assert len(everyone) > 3
    assert opened == everyone
    both.assert_same()


def _must_not_be_waited_for(*_: Any) -> None:
    raise AssertionError("the step waits")


def test_a_gradient_that_a_step_used_up_shows_zeros_once_it_is_zeroed(tmp_path: Path) -> None:
    module = manage(mlp(), "host", tmp_path)
    optimizer = hetmem.AdamW(module.parameters(), overlap="forward")
    for _ in range(2):
        module(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        gradient: Any = next(module.parameters()).grad
        with pytest.raises(RuntimeError, match=r"which the last step\(\) has used up"):
            gradient.clone()
        optimizer.zero_grad(set_to_none=False)
        assert torch.equal(gradient.clone(), torch.zeros(64, 64)) and not gradient.norm()
        for write in (lambda each: each.add_(1), lambda each: each.detach().add_(1), lambda each: each[0].fill_(1)):
            with pytest.raises(RuntimeError, match=r"which the last step\(\) has used up"):
                write(gradient)
