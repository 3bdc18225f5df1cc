"""Ranks that train one model have the bits of plain torch that runs their batches one after the other."""

from __future__ import annotations

import builtins
import errno
import fcntl
import time
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, Program, difference, loss_of, trained, values

UNEVEN, TILES = "other numbers of backwards", "checkpointed, chunks of several tiles"


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, ["codes, 8 bits, activations leave", "SGD", "writes", "overlap, bfloat16", "trailing", "in turns"]),
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


def begins_anew(rank: int, seconds: float) -> dict[str, torch.Tensor]:
    """A second optimizer over weights whose states have homes, while the last rank's updates begin late."""

    def late(original: Any, *args: Any) -> Any:
        time.sleep(seconds * rank)
        return original(*args)

    program = Program()
    model = hetmem.manage(
        program.made(), hetmem.Budget(device="16MiB", host="64MiB"), device="sim", chunk_bytes="64KiB"
    )
    for number in range(2):
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
        optimizer.zero_grad()
        loss_of(model, program.batch(number, rank, 0)).backward()
        with testing.around("tasks that update", late):
            optimizer.step()
    return values(model, optimizer)


@pytest.mark.nightly
def test_states_are_zeroed_by_the_ranks_that_compute_them() -> None:
    found = ranks(2, begins_anew, 0.3)
    assert difference(found[0], ranks(2, begins_anew, 0.0)[0]) == []
    assert difference(*found) == []


def in_a_full_device(rank: int) -> dict[str, torch.Tensor]:
    """Training where copies take all that activations leave, so that gradients which wait for a turn lack room."""
    program = Program()
    budget = hetmem.Budget(device="1300KiB", host="64MiB")
    model = hetmem.manage(program.made(), budget, device="sim", chunk_bytes="64KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        time.sleep(0.2 * (rank == 0))
        loss_of(model, program.batch(step, rank, 0)).backward()
        optimizer.step()
    found = values(model, optimizer)
    hetmem.release(model)
    return found


@pytest.mark.nightly
def test_gradients_that_wait_for_their_turn_leave_the_device_when_copies_need_it() -> None:
    """The wait for room was one for a transfer, of which there was none: two ranks hung without an error."""
    of_ranks = ranks(2, in_a_full_device, seconds=60)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = Program().plain(2)[0]
    torch.set_num_threads(threads)
    for found in of_ranks:
        assert difference(found, {name: expected[name] for name in found}) == []
