"""Ranks that train one model have the bits of plain torch that runs their batches one after the other."""

from __future__ import annotations

import builtins
import errno
import fcntl
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


def without(rank: int, what: str) -> dict[str, dict[str, torch.Tensor]]:
    """`trained` where the system does not say which pages are private, or a kernel from before Linux 6.7 does."""

    def refusing(path: object, *arguments: Any, **named: Any) -> Any:
        if path == "/proc/self/pagemap":
            raise PermissionError(path)
        return opened(path, *arguments, **named)

    def unknown(*_: Any) -> int:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    opened = builtins.open
    if what == "a page map":
        builtins.open = refusing
    else:
        fcntl.ioctl = unknown
    return trained(rank, ["writes"])


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["a page map", "a scan of it"])
def test_private_pages_are_found_where_the_system_says_less_of_them(what: str) -> None:
    _compare(ranks(2, without, what), ["writes"])


def _compare(found: list[dict[str, dict[str, torch.Tensor]]], names: list[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for rank, expected in enumerate(PROGRAMS[name].expected(len(found))):
                assert difference(found[rank][name], expected) == [], (name, rank)
    finally:
        torch.set_num_threads(threads)
