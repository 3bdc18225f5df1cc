"""Where all copies have room, forwards that take turns lease them once: with the bits of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from tests.accumulation.test_accumulate import BF16, KINDS, Stack, batches, both_ways
from tests.accumulation.test_sums import Tower, out_in_a_step, overlaps, placed, precisions
from tests.engine.harness import assert_same, assert_same_weights, reference, shared
from tests.forked import Forks

MOST = {0.5: 14_740, 1.5: 7_640}
"""By the share of copies that there is room for, calls of Python of three micro-batches of three blocks: what was
measured, and three in a hundred more."""

_COUNT = """
import hetmem
from benchmarks.large_steps import calls
print(calls(3, 3, hetmem.accumulate, {}))
"""


def trained(plain: Any, managed: Any, step: Callable[[int], None], overlap: Any = "off", steps: int = 5) -> None:
    """Call `step`, and update, until all is learned and a lease has been renewed."""
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for at in range(steps):
        step(at)
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("share", MOST)
def test_a_step_takes_no_more_calls_than_it_did(share: float, forks: Forks) -> None:
    """Counted in a process without other models: a backward asks each managed one that is alive."""
    ended = forks.run(_COUNT.format(share))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.splitlines()[-1]) <= MOST[share]


def test_all_copies_are_leased_from_the_first_forward_to_the_end_of_the_last_backward(tmp_path: Path) -> None:
    managed: Any = placed(Tower(), tmp_path, chunks="1MiB")
    seen: list[int] = []
    for layer in managed.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(len(testing.of(managed).leased())))
    for _ in range(4):
        seen.clear()
        hetmem.accumulate(managed, batches(3))
        assert not testing.of(managed).leased()
        managed.zero_grad()
    assert seen == [len([*managed.parameters()])] * 24


@overlaps
@precisions
@shared("kind", KINDS)
def test_training_has_the_bits_of_the_loop(kind: str, mixed: torch.dtype | None, overlap: Any, tmp_path: Path) -> None:
    plain = Stack(kind)
    managed = placed(copy.deepcopy(plain), tmp_path, chunks="1MiB", mixed_precision=mixed)

    def step(at: int) -> None:
        both_ways(plain, managed, batches(3, seed=at % 2), mixed, f"step {at}", consumed=overlap != "off")

    trained(plain, managed, step, overlap)


@pytest.mark.parametrize(
    "other",
    ["autocast", *(pytest.param(other, marks=pytest.mark.nightly) for other in ("hooks", "teacher"))],
)
def test_forwards_that_differ_from_the_first_one_are_right(other: str, tmp_path: Path) -> None:
    """Once all copies are leased, the second micro-batch computes under autocast or with hooks for saved tensors, or
    the later ones without a graph first."""
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path, chunks="1MiB")

    def forward(module: Any, numbered: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, tokens = numbered
        contexts = {"autocast": torch.autocast("cpu", BF16), "hooks": torch.autograd.graph.save_on_cpu()}
        known: Any = 0
        if other == "teacher" and number > 0:
            with torch.no_grad():
                known = module(tokens)
        with contexts.get(other, nullcontext()) if number == 1 else nullcontext():
            loss: torch.Tensor = module(tokens) + known
        return loss

    def step(at: int) -> None:
        several = [(number if at > 2 else 0, batch) for number, batch in enumerate(batches(3, seed=at))]
        got = hetmem.accumulate(managed, several, forward)
        for each, loss in zip(several, got, strict=True):
            expected = reference(plain, None)(lambda module, each=each: forward(module, each))
            assert_same(expected.detach(), loss, f"step {at}")

    trained(plain, managed, step)


def test_an_error_in_a_forward_ends_the_lease(tmp_path: Path) -> None:
    """The next call, and a forward and backward alone, are right."""
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path, chunks="1MiB")

    def fail(module: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(tokens)
        if tokens.shape[1] == 4:
            raise ArithmeticError("the program's")
        return loss

    def step(at: int) -> None:
        if at in (3, 5):
            with pytest.raises(ArithmeticError):
                hetmem.accumulate(managed, batches(3), fail)
            assert all(parameter.grad is None for parameter in managed.parameters())
        if at == 4:
            for batch in batches(2):
                assert_same(reference(plain, None)(lambda module, batch=batch: module(batch)), managed(batch), "alone")
                managed(batch).backward()
        else:
            both_ways(plain, managed, batches(3, seed=at), None, f"step {at}")

    trained(plain, managed, step, steps=8)


def test_sums_have_their_room_before_a_lease(tmp_path: Path) -> None:
    """All copies fit beside what the forwards keep, and no sum does beside both: sums displace copies."""
    plain, several = Tower(), batches(8)
    nbytes = sum(2 * p.numel() for p in plain.parameters())
    managed = placed(plain, tmp_path, str(nbytes + (270 << 10)), "192KiB", mixed_precision=BF16)
    for _ in range(3):
        hetmem.accumulate(managed, several)
        managed.zero_grad()
    moved = out_in_a_step(managed, lambda: hetmem.accumulate(managed, several))
    assert moved == sum(p.nbytes for p in managed.parameters())
