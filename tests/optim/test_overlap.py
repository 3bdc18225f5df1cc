"""Updates that overlap with backward or forward: the same bits as without, or an error."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    Recipe,
    Tower,
    adamws,
    assert_same,
    assert_same_states,
    assert_same_weights,
    loss_of,
    manage,
    mlp,
    pair,
    precisions,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)
from tests.faults.disk import FaultyDisk
from tests.optim.stories import OVERLAPS, TRAILING
from tests.pairs import mostly


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Of what lasts until a test ends."""
    with ExitStack() as made:
        yield made


def spans(module: nn.Module, what: str) -> list[tuple[float, float]]:
    """When segments called `what` ran."""
    return [(start, end) for name, start, end in testing.of(module).spans("segments") if name == what]


def updates_within(module: nn.Module, what: str) -> int:
    """How many updates of chunks began while a segment `what` ran."""
    began = [start for _, start, _ in testing.of(module).spans("updates")]
    return sum(start <= at < end for at in began for start, end in spans(module, what))


@pytest.mark.each
@streamed
@precisions
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("overlap", OVERLAPS[1:])
def test_overlapped_training_equals_torch(
    overlap: str, accumulation: int, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed)
    optimizers = adamws(plain, managed, overlap=overlap)
    recipe = Recipe(steps=5, accumulation=accumulation, mixed=mixed)
    train_both(plain, managed, token_batches(5 * accumulation), recipe, optimizers=optimizers)
    assert updates_within(managed, "backward") > 0, "nothing overlapped"


def late_writes(verb: str, _: int, nbytes: int) -> int:
    """A disk that takes its time to write."""
    if verb == "write":
        time.sleep(0.02)
    return nbytes


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_parameters_can_be_read_as_soon_as_a_step_is_over(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensors that share their memory, of which no function of torch tells: as they are in the mapped file, however
    slow the disk is."""
    disk = FaultyDisk()
    disk.fault = late_writes
    disk.used_by(monkeypatch, threads=2)
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamws(plain, managed, overlap=overlap)
    shown = [parameter.detach() for parameter in managed.parameters()]
    for batch in vector_batches(8, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
        for (name, expected), got in zip(plain.named_parameters(), shown, strict=True):
            assert_same(expected, got, name)


@pytest.mark.parametrize(("limit", "overlap"), mostly([None, 1e-3, 1e9], OVERLAPS[1:]))
def test_gradients_that_arrive_behind_the_backward_are_waited_for(
    overlap: str, limit: float | None, tmp_path: Path
) -> None:
    """Gradients of over a megabyte are copied by another thread."""
    plain = nn.Sequential(*[nn.Linear(640, 640, bias=False) for _ in range(4)])
    room = hetmem.Budget(device="64MiB", device_chunks="8MiB", host="128MiB")
    seen = []
    for how in ("off", overlap):
        managed = manage(copy.deepcopy(plain), room, tmp_path, chunk_bytes="2MiB")
        optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=how, max_grad_norm=limit)
        for batch in vector_batches(4, 2, 640):
            optimizer.zero_grad()
            loss_of(managed, batch).backward()
            optimizer.step()
        seen.append((managed.state_dict(), optimizer.state_dict()["state"]))
    for name, value in seen[0][0].items():
        assert_same(value, seen[1][0][name], name)
    for index, state in seen[0][1].items():
        for name, value in state.items():
            assert_same(value, seen[1][1][index][name], f"{name} of {index}")


@streamed
def test_gradients_that_are_zeroed_in_place_stay_right(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = adamws(plain, managed, overlap="backward")
    recipe = Recipe(steps=5, set_to_none=False)
    train_both(plain, managed, vector_batches(5, 4, 64), recipe, optimizers=optimizers)


@streamed
def test_the_next_forward_runs_while_updates_do(placement: str, tmp_path: Path) -> None:
    """Nothing but forwards, backwards and steps, so that nothing waits for a step's end. Each update takes a while."""
    late = partial(time.sleep, 0.005)
    plain, managed = pair(Tower, placement, tmp_path)
    left, right = adamws(plain, managed, **TRAILING)
    batches = token_batches(6)
    losses: list[list[torch.Tensor]] = [[], []]
    with testing.around("begin tasks", lambda begin, pool, tasks, after=None: begin(pool, [*tasks, late], after)):
        for module, optimizer, seen in ((plain, left, losses[0]), (managed, right, losses[1])):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_of(module, batch)
                loss.backward()
                seen.append(loss.detach())
                optimizer.step()
        right.synchronize()
    for expected, got in zip(*losses, strict=True):
        assert_same(expected, got, "loss")
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    updates, forwards = testing.of(managed).spans("updates"), spans(managed, "forward")
    overlapped = [began < end and start < ended for _, began, ended in updates for start, end in forwards]
    assert any(overlapped), "nothing overlapped"


@streamed
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_one_more_backward_than_ever_before_is_an_error(overlap: str, placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters(), overlap=overlap)
    first, second = vector_batches(2, 4, 64)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(module, first).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(module, first).backward()
    with pytest.raises(RuntimeError, match=r"after its update had begun .*overlap='off'.*Updated already: .*weight"):
        loss_of(module, second).backward()


@streamed
def test_a_step_with_more_backwards_teaches_the_next_ones(placement: str, tmp_path: Path) -> None:
    """The first step has two backwards: later updates wait for the second, and a step of one is flushed in `step`."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = adamws(plain, managed, overlap="backward")
    for accumulation in (2, 2, 1, 2):
        recipe = Recipe(steps=1, accumulation=accumulation)
        train_both(plain, managed, vector_batches(2, 4, 64), recipe, optimizers=optimizers)


@streamed
def test_a_hook_that_changes_gradients_is_honoured(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for module in (plain, managed):
        module[2].weight.register_post_accumulate_grad_hook(halve)
    optimizers = adamws(plain, managed, overlap="backward")
    train_both(plain, managed, vector_batches(4, 4, 64), Recipe(steps=4), optimizers=optimizers)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overlap": "sideways"}, "sideways"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"loss_scale": "static"}, "loss_scale"),
        ({"loss_scale": 0.0}, "loss scale"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    module = manage(mlp(), "host", tmp_path)
    with pytest.raises(ValueError, match=match):
        hetmem.AdamW(module.parameters(), **options)


@pytest.mark.parametrize("make", [hetmem.AdamW, partial(hetmem.optim.offload, torch.optim.SGD)])
def test_the_option_that_went_says_what_to_write(make: Any, tmp_path: Path) -> None:
    module = manage(mlp(), "host", tmp_path)
    with pytest.raises(TypeError, match=r"has no gradients= any more, got 'streamed': with overlap='backward'"):
        make(module.parameters(), lr=0.1, gradients="streamed")


@precisions
def test_the_sum_of_a_first_step_takes_the_memory_of_gradients_that_waited(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Two bytes of each parameter wait for the second backward, and make room for four in its midst."""
    build = lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(24)])  # noqa: E731
    sizes, waiting = 24 * 4 * 4096, 6 * 4096 * (4 if mixed is None else 2)
    room = hetmem.Budget(device="1MiB", device_chunks="256KiB", host=4 * sizes + waiting + 4096 * 2, home_copies=False)
    plain, managed = pair(build, room, tmp_path, mixed_precision=mixed)
    optimizers = adamws(plain, managed, overlap="backward")
    recipe = Recipe(steps=3, accumulation=2, mixed=mixed)
    train_both(plain, managed, vector_batches(6, 4, 64, dtype=mixed), recipe, optimizers=optimizers)


def test_a_first_step_that_cannot_keep_its_gradients_overlaps_and_takes_one_backward(tmp_path: Path) -> None:
    build = lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(24)])  # noqa: E731
    room = hetmem.Budget(device="1MiB", device_chunks="256KiB", host=(3 * 24 + 6) * 4 * 4096)
    plain, managed = pair(build, room, tmp_path)
    left, right = adamws(plain, managed, overlap="backward")
    first, second = vector_batches(2, 4, 64)
    for module in (plain, managed):
        loss_of(module, first).backward()
    begun = testing.updates_begun(managed)
    assert 0 < len(begun) <= 24
    with pytest.raises(
        RuntimeError, match=r"more backwards than host memory has room to keep gradients of.*overlap='of"
    ):
        loss_of(managed, second).backward()
    right.forget_step()
    right.zero_grad()
    left.step()
    left.zero_grad()
