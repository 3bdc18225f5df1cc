"""Inputs of other shapes use weights in the same order: they are not measured anew, and nothing moves for them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import CHUNK, WIDTH, adamws, assert_same_weights, pair

LAYERS = 8


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batch(length: int) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))


def lengths() -> list[int]:
    """Of thirty steps, of which no two are alike."""
    found = list(range(16, 76, 2))
    random.Random(1).shuffle(found)
    return found


def limits(*, share: bool) -> hetmem.Budget:
    """Room for half of the copies, or for all of them and homes of some chunks."""
    return hetmem.Budget(device="64MiB", host="8MiB", device_chunks=(4 + LAYERS // 2 * (1 + 5 * share)) * CHUNK)


@pytest.mark.parametrize("order", ["mixed", "growing"])
def test_of_thirty_steps_of_thirty_lengths_three_are_measured(order: str, tmp_path: Path) -> None:
    plain, managed = pair(layers, limits(share=False), tmp_path, sanitize=False)
    inside, optimizers, measured = testing.of(managed), adamws(plain, managed), 0
    for length in sorted(lengths()) if order == "growing" else lengths():
        for module in (plain, managed):
            loss = module(batch(length)).square().mean()
            measured += module is managed and inside.measured()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)
    assert 1 <= measured <= 3


def test_evaluation_and_other_lengths_move_no_homes_that_fit(tmp_path: Path) -> None:
    """And fetch what they use ahead, as the steps before did."""
    plain, managed = pair(layers, limits(share=True), tmp_path, sanitize=False)
    inside, optimizers, homes = testing.of(managed), adamws(plain, managed), []
    for index, length in enumerate([64, 64, 64, *lengths()[:12]]):
        for module in (plain, managed):
            module(batch(min(length, 64))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(plain(batch(length // 2)), managed(batch(length // 2)))
        if index >= 2:
            homes.append([chunk.moved for chunk in inside.chunks()])
    assert any(homes[0])
    assert all(moved == homes[0] for moved in homes)
    assert_same_weights(plain, managed)


def test_of_larger_inputs_more_memory_is_expected_than_was_measured(tmp_path: Path) -> None:
    """As much more as they are larger, until they are measured themselves; smaller ones change nothing."""
    _, managed = pair(layers, limits(share=False), tmp_path, sanitize=False)
    inside = testing.of(managed)
    peaks: list[int] = []
    with torch.no_grad():
        for length in (32, 16, 48, 80, 16):
            managed(batch(length))
            peaks.append(inside.memory().non_model_peak_bytes)
    first, smaller, larger, measured, last = peaks
    assert 0 < first == smaller
    assert larger == pytest.approx(1.5 * first, rel=1e-3)
    assert larger < measured == last
    assert len(inside.expected_peaks("forward")) == 1


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_an_evaluation_between_forward_and_backward_changes_nothing_that_is_expected(
    known: bool, tmp_path: Path
) -> None:
    """The backward is measured where its own forward was, and its memory grows with the inputs of that."""
    expected: list[list[int]] = []
    for evaluates in (False, True):
        _, managed = pair(layers, limits(share=False), tmp_path, sanitize=False)
        optimizer = hetmem.AdamW(managed.parameters(), lr=1e-3)
        if known:
            evaluate(managed)
        for index, length in enumerate((16, 16, 48)):
            loss = managed(batch(length)).square().mean()
            if evaluates and index:
                evaluate(managed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(testing.of(managed).expected_peaks("backward"))
    assert expected[:3] == expected[3:]
    assert [0] < expected[0] == expected[1] < expected[2]


def test_evaluations_that_omit_no_grad_leave_a_later_backward_measured(tmp_path: Path) -> None:
    """Each was watched for a backward that did not come, but others have come since."""
    _, managed = pair(layers, limits(share=False), tmp_path, sanitize=False)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-3)
    expected: list[int] = []
    for length in (*[16] * 8, 64):
        if len(expected) % 2:
            managed(batch(64))
        managed(batch(length)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(max(testing.of(managed).expected_peaks("backward")))
    assert expected[-2] < expected[-1]


@torch.no_grad()
def evaluate(managed: nn.Module) -> None:
    managed(batch(48))
