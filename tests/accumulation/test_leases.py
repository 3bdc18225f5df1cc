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
from benchmarks.large_steps import calls
from tests.accumulation.test_accumulate import BF16, KINDS, Stack, batches, both_ways
from tests.accumulation.test_sums import Tower, out_in_a_step, overlaps, placed, precisions
from tests.engine.harness import assert_same, assert_same_weights, reference, shared

MOST = {0.5: 1, 1.5: 1}
"""By the share of copies that there is room for, calls of Python of three micro-batches of three blocks: what was
measured, and three in a hundred more."""


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
def test_a_step_takes_no_more_calls_than_it_did(share: float) -> None:
    assert calls(3, 3, hetmem.accumulate, share) <= MOST[share]


@overlaps
@precisions
@shared("kind", KINDS)
def test_training_has_the_bits_of_the_loop(kind: str, mixed: torch.dtype | None, overlap: Any, tmp_path: Path) -> None:
    plain = Stack(kind)
    managed = placed(copy.deepcopy(plain), tmp_path, chunks="1MiB", mixed_precision=mixed)

    def step(at: int) -> None:
        both_ways(plain, managed, batches(3, seed=at % 2), mixed, f"step {at}", consumed=overlap != "off")

    trained(plain, managed, step, overlap)


@pytest.mark.parametrize("other", ["autocast", "hooks", "teacher"])
def test_forwards_that_differ_from_the_first_one_are_right(other: str, tmp_path: Path) -> None:
    """The second micro-batch computes under autocast, with hooks for saved tensors, or without a graph first."""
    plain = Tower()
    managed = placed(copy.deepcopy(plain), tmp_path, chunks="1MiB")

    def forward(module: Any, numbered: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, tokens = numbered
        contexts = {"autocast": torch.autocast("cpu", BF16), "hooks": torch.autograd.graph.save_on_cpu()}
        with contexts.get(other, nullcontext()) if number == 1 else nullcontext():
            if other == "teacher" and number != 0:
                with torch.no_grad():
                    known = module(tokens)
                return module(tokens) + known
            result: torch.Tensor = module(tokens)
            return result

    def step(at: int) -> None:
        several = [*enumerate(batches(3, seed=at))]
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
        if at == 4:
            for batch in batches(2):
                assert_same(reference(plain, None)(lambda module, batch=batch: module(batch)), managed(batch), "alone")
                managed(batch).backward()
        else:
            both_ways(plain, managed, batches(3, seed=at), None, f"step {at}")

    trained(plain, managed, step, steps=8)


@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
def test_sums_have_their_room_before_a_lease(mixed: torch.dtype | None, tmp_path: Path) -> None:
    """All copies fit beside what the forwards keep, and no sum does beside them: these displace copies."""
    several = batches(8)
    plain = Tower()
    nbytes = sum(p.numel() * (2 if mixed else 4) for p in plain.parameters())
    managed = placed(
        plain, tmp_path, device=str(nbytes + (220 << 10)), chunks=str(nbytes + 4096), mixed_precision=mixed
    )
    for _ in range(3):
        hetmem.accumulate(managed, several)
        managed.zero_grad()
    moved = out_in_a_step(managed, lambda: hetmem.accumulate(managed, several))
    assert moved == sum(p.nbytes for p in managed.parameters())
