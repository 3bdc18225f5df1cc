"""Ranks of several machines, each with one copy of the homes: groups that may not open each other's memory stand for
machines."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetmem
from hetmem.errors import HetmemError
from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, Program, difference, loss_of, trained, values

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


def managed() -> tuple[nn.Module, hetmem.AdamW]:
    budget = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB")
    model = hetmem.manage(PROGRAM.made(), budget, device="sim", chunk_bytes="256KiB")
    return model, hetmem.AdamW(model.parameters(), lr=1e-2)


def step(rank: int, number: int, model: nn.Module, optimizer: hetmem.AdamW) -> None:
    loss_of(model, PROGRAM.batch(number, rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def loses_a_machine(rank: int, place: str, path: str) -> str:
    model, optimizer = managed()
    step(rank, 0, model, optimizer)
    if rank == 1:
        if place == "backward":
            model.blocks[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        elif place == "step":
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    if place == "save":
        hetmem.save(path, model, optimizer)
    try:
        step(rank, 1, model, optimizer)
    except HetmemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["forward", "backward", "step", "save"])
def test_a_machine_that_is_lost_is_named(place: str, tmp_path: Path) -> None:
    """The first machine, which writes files, needs no other for that."""
    path = str(tmp_path / "run.safetensors")
    told = ranks(2, loses_a_machine, place, path, machines=2, dies=(1,))[0]
    assert told.startswith("PeerError: the connection to another machine (machine 1) has ended while this rank awaited")
    assert f"rank 0: a {'step' if place == 'step' else 'backward'}" in told
    assert Path(path).exists() == (place == "save")


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
