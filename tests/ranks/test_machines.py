"""Ranks of several machines, each with one copy of the homes: groups that may not open each other's memory stand for
machines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetmem
from hetmem.errors import HetmemError
from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, Program, difference, loss_of, trained, values, with_every_two

PROGRAM = Program()
OF_PLAIN_TORCH = [name for name, program in PROGRAMS.items() if not program.in_one_process]


@pytest.mark.parametrize(
    ("machines", "ranks_a_machine", "names"),
    [
        (2, 2, ["other numbers of backwards"]),
        pytest.param(2, 2, OF_PLAIN_TORCH, marks=pytest.mark.nightly),
        pytest.param(5, 1, ["other numbers of backwards", "bfloat16"], marks=pytest.mark.nightly),
    ],
)
def test_the_sums_of_machines_are_added_in_their_order(machines: int, ranks_a_machine: int, names: list[str]) -> None:
    count = machines * ranks_a_machine
    found = ranks(count, trained, names, machines=machines, seconds=500)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for rank, expected in enumerate(PROGRAMS[name].plain(count, machines)):
                assert difference(found[rank][name], expected) == [], (name, rank)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.nightly
def test_options_have_the_bits_of_one_process_on_machines_of_a_rank_each() -> None:
    """Moments of fewer bits, frozen codes with adapters, activations that leave, several backwards, clipping, a loss
    scale: every two meet."""
    programs = with_every_two()
    found = ranks(2, trained, [*programs], machines=2, seconds=500)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, program in programs.items():
            for rank, expected in enumerate(program.alone(2)):
                assert difference(found[rank][name], expected) == [], (name, rank)
    finally:
        torch.set_num_threads(threads)


def managed() -> tuple[nn.Module, hetmem.AdamW]:
    budget = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB")
    model = hetmem.manage(PROGRAM.made(), budget, device="sim", chunk_bytes="256KiB")
    return model, hetmem.AdamW(model.parameters(), lr=1e-2)


def step(rank: int, number: int, model: nn.Module, optimizer: hetmem.AdamW) -> None:
    loss_of(model, PROGRAM.batch(number, rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def loses_a_machine(rank: int, lost: int, place: str, path: str) -> tuple[str, float]:
    """What rank `lost` leaves the others: an error, and how many seconds that takes."""
    model, optimizer = managed()
    for number in range(2):
        step(rank, number, model, optimizer)
    if rank == lost:
        if place == "backward":
            model.blocks[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        elif place == "step":
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        if place == "save":
            hetmem.save(path, model, optimizer)
        step(rank, 2, model, optimizer)
    except HetmemError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["forward", "backward", "step", "save"])
def test_a_machine_that_is_lost_is_named_in_time(place: str, tmp_path: Path) -> None:
    """Each rank has an error: of its own machine, of its counterpart, or of another rank's. The first machine, which
    writes files, needs no other for that."""
    path = str(tmp_path / "run.safetensors")
    found = ranks(4, loses_a_machine, 3, place, path, machines=2, dies=(3,))
    assert found.pop() is None
    for told, seconds in found:
        assert told.startswith("PeerError: ") and seconds < 20, told
    (first, _), (counterpart, _), (beside, _) = found
    where = "a step" if place == "step" else "a backward"
    assert counterpart.startswith("PeerError: the connection to another machine (machine 1, rank 3) has ended")
    assert "rank 3" in beside and f"rank 1: {where}" in counterpart
    assert "rank 1" in first or "machine 1, rank 2" in first
    assert Path(path).exists() == (place == "save")


@pytest.mark.nightly
def test_one_of_three_machines_that_is_lost_is_named(tmp_path: Path) -> None:
    found = ranks(3, loses_a_machine, 1, "forward", str(tmp_path / "run"), machines=3, dies=(1,))
    for told, _ in (found[0], found[2]):
        assert told.startswith("PeerError: the connection to another machine (") and "machine 1, rank 1" in told


def saves(rank: int, path: str) -> dict[str, Tensor]:
    model, optimizer = managed()
    for number in range(2):
        step(rank, number, model, optimizer)
    hetmem.save(path, model, optimizer)
    return values(model, optimizer)


def resumes(rank: int, path: str) -> dict[str, Tensor]:
    model, optimizer = managed()
    hetmem.load(path, model, optimizer)
    loaded = values(model, optimizer)
    step(rank, 2, model, optimizer)
    return loaded


@pytest.mark.nightly
@pytest.mark.parametrize("machines", [1, 3])
def test_another_number_of_machines_resumes_from_the_file(machines: int, tmp_path: Path) -> None:
    path = str(tmp_path / "run.safetensors")
    saved = ranks(2, saves, path, machines=2)
    for loaded in ranks(machines, resumes, path, machines=machines):
        assert difference(loaded, saved[0]) == []
