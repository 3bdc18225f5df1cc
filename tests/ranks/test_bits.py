"""Ranks that train one model have the bits of plain torch that runs their batches one after the other."""

from __future__ import annotations

import pytest
import torch

from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, difference, trained

UNEVEN, TILES = "other numbers of backwards", "checkpointed, chunks of several tiles"


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, [TILES, "SGD"]),
        (3, [UNEVEN, "bfloat16"]),
        pytest.param(2, [*PROGRAMS], marks=pytest.mark.nightly),
        pytest.param(4, [*PROGRAMS], marks=pytest.mark.nightly),
    ],
)
def test_weights_gradients_and_states_are_those_of_plain_torch(count: int, names: list[str]) -> None:
    """Gradients divided by three are rounded, so another order, or a division after the sum, would show."""
    found = ranks(count, trained, names)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for rank, expected in enumerate(PROGRAMS[name].plain(count)):
                assert difference(found[rank][name], expected) == [], (name, rank)
    finally:
        torch.set_num_threads(threads)
