"""Ranks that train one model have the bits of plain torch that runs their batches one after the other."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, difference, trained

UNEVEN, TILES = "other numbers of backwards", "checkpointed, chunks of several tiles"


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, ["codes, 8 bits, activations leave", "SGD", "writes", "overlap, bfloat16", "trailing"]),
        (3, [UNEVEN, "writes beside 16-bit copies", "overlap"]),
        pytest.param(3, [TILES, "bfloat16"], marks=pytest.mark.nightly),
        pytest.param(2, [*PROGRAMS], marks=pytest.mark.nightly),
        pytest.param(4, [*PROGRAMS], marks=pytest.mark.nightly),
    ],
)
def test_weights_gradients_and_states_are_those_of_plain_torch(count: int, names: list[str]) -> None:
    """Gradients divided by three are rounded, so another order, or a division after the sum, would show."""
    found = ranks(count, trained, names)
    _compare(found, names)


def without_pagemap(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    def refusing(path: object, *arguments: Any, **named: Any) -> Any:
        if path == "/proc/self/pagemap":
            raise PermissionError(path)
        return opened(path, *arguments, **named)

    opened, builtins.open = builtins.open, refusing
    return trained(rank, ["writes"])


@pytest.mark.nightly
def test_where_the_system_does_not_say_which_pages_are_private_bytes_are_compared() -> None:
    _compare(ranks(2, without_pagemap), ["writes"])


def _compare(found: list[dict[str, dict[str, torch.Tensor]]], names: list[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for rank, expected in enumerate(PROGRAMS[name].expected(len(found))):
                assert difference(found[rank][name], expected) == [], (name, rank)
    finally:
        torch.set_num_threads(threads)
