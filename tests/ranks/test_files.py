"""Checkpoints of a group: the file is that of one process, and all ranks load it, or none does."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hetmem
from hetmem.errors import CheckpointError, PeerError, StoreError
from hetmem.testing import ranks
from tests.ranks.programs import Program, difference, loss_of, values

PROGRAM = Program()
BUDGET = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB")


class Trains:
    """A model and its optimizer, in a group or alone, that begin with other weights at each `seed`."""

    def __init__(self, seed: int, count: int, *, trains_all: bool = False, overlap: Any = "off") -> None:
        mixed = None if count == 3 else torch.bfloat16  # which a hook divides exactly by 2 and 4 alone
        made = PROGRAM.made()
        if trains_all:  # torch's checkpoints have states of all trained weights, or of none
            made.unused.requires_grad_(False)
            made.odd.requires_grad_(False)
        with torch.no_grad():
            for p in made.parameters():
                p += seed / 64
        self.model = hetmem.manage(made, BUDGET, device="sim", chunk_bytes="256KiB", mixed_precision=mixed)
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, overlap=overlap)

    def step(self, number: int, batches: list[int], divided_by: int = 1) -> None:
        self.optimizer.zero_grad()
        hooks = [
            p.register_hook(lambda gradient: gradient / divided_by)
            for p in self.model.parameters()
            if p.requires_grad and divided_by > 1
        ]
        for batch in batches:
            loss_of(self.model, PROGRAM.batch(number, batch, 0)).backward()
        for hook in hooks:
            hook.remove()
        self.optimizer.step()

    def save(self, path: str) -> str:
        hetmem.save(path, self.model, self.optimizer, {"epoch": 3})
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def save_together(self, path: str, rank: int, count: int) -> str:
        """Save, where no rank writes anything until each of them has begun to write a block."""
        real, began = os.pwritev, [Path(f"{path} {number}") for number in range(count)]

        def write(*arguments: Any) -> int:
            began[rank].touch()
            wait_for(began)
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwritev", write)
            return self.save(path)

    def write(self) -> None:
        """To a weight, alike on all ranks: its home has it once they come to a backward."""
        with torch.no_grad():
            next(p for p in self.model.parameters() if p.requires_grad).mul_(0.5)

    def step_beside_a_save(self, path: str, number: int, batches: list[int]) -> None:
        """A step beside a save in the background, of which nothing is written for a while."""
        real, may = os.pwritev, threading.Event()

        def write(*arguments: Any) -> int:
            if threading.current_thread().name == "hetmem-checkpoint":
                assert may.wait(60)
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwritev", write)
            handle = hetmem.save(path, self.model, self.optimizer, {"epoch": 3}, wait=False)
            assert not handle.done()
            threading.Timer(0.5, may.set).start()
            self.step(number, batches)
            handle.wait()

    def load(self, path: str) -> Any:
        return hetmem.load(path, self.model, self.optimizer)

    def values(self) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        return values(self.model, self.optimizer)


def wait_for(paths: list[Path]) -> None:
    until = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, "another rank wrote nothing"
        time.sleep(1e-3)


def goes_on(rank: int, count: int, folder: str) -> tuple[str, str, dict[str, torch.Tensor], list[str]]:
    """Digests of the file that was loaded, saved again, and of the one a step later; all values then, and errors."""
    errors = []
    trains = Trains(1, count, overlap={2: "backward", 3: "forward"}.get(count, "off"))
    trains.step(7, [rank])  # what is loaded replaces copies, gradients' homes and states
    before = trains.values()
    for path in ("damaged", "none" if rank == count - 1 else "first"):
        with pytest.raises((CheckpointError, PeerError, StoreError)) as raised:
            trains.load(f"{folder}/{path}")
        errors.append(f"{raised.type.__name__}: {raised.value}")
    assert difference(before, trains.values()) == [], "something is loaded"
    assert trains.load(f"{folder}/first") == {"epoch": 3}
    del before  # else it holds states, which are in the file before the call returns; errors hold none
    gc.collect()
    trains.write()
    again = trains.save_together(f"{folder}/again {count}", rank, count)
    trains.step_beside_a_save(f"{folder}/beside {count}", 1, [rank])
    assert Path(f"{folder}/beside {count}").read_bytes() == Path(f"{folder}/again {count}").read_bytes()
    with pytest.raises(PeerError if rank else StoreError):
        hetmem.save(f"{folder}/no folder/file", trains.model, wait=False).wait()
    if rank == 0:
        trains.save(f"{folder}/of rank 0 alone {count}")
    digest = trains.save(f"{folder}/next {count}")
    trains.step_beside_a_save(f"{folder}/beside {count}", 2, [rank])
    assert Path(f"{folder}/beside {count}").read_bytes() == Path(f"{folder}/next {count}").read_bytes()
    found = trains.values()
    hetmem.release(trains.model)
    return again, digest, found, errors


def in_one_process(count: int, folder: str) -> tuple[str, str, dict[str, torch.Tensor]]:
    """The same of one process that loads the file and runs the batches of `count` ranks in turn."""
    trains = Trains(2, count)
    trains.load(f"{folder}/first")
    trains.write()
    again = trains.save(f"{folder}/again")
    trains.step(1, [*range(count)], count)
    digest = trains.save(f"{folder}/one {count}")
    trains.step(2, [*range(count)], count)
    found = trains.values()
    hetmem.release(trains.model)
    return again, digest, found


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 3, 4))])
def test_a_group_of_any_size_goes_on_from_the_file_of_one_process(count: int, tmp_path: Path) -> None:
    folder, threads = str(tmp_path), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = Trains(0, count)
        first.step(0, [0, 1])
        first.save(f"{folder}/first")
        hetmem.release(first.model)
        data = bytearray((tmp_path / "first").read_bytes())
        data[-1] ^= 1
        (tmp_path / "damaged").write_bytes(data)
        found = ranks(count, goes_on, count, folder)
        expected = in_one_process(count, folder)
    finally:
        torch.set_num_threads(threads)
    for rank, (again, after, after_values, _) in enumerate(found):
        assert (again, after) == expected[:2], rank
        assert difference(after_values, expected[2]) == [], rank
    check_errors([errors for *_, errors in found], count)
    assert (tmp_path / f"of rank 0 alone {count}").read_bytes() == (tmp_path / f"next {count}").read_bytes()


def check_errors(told: list[list[str]], count: int) -> None:
    """Which rank is named: that which reads the damaged block, and the last one, which lacks a file."""
    damaged, lacking = ([errors[at] for errors in told] for at in range(2))
    found = [rank for rank, text in enumerate(damaged) if text.startswith("CheckpointError") and "CRC-32" in text]
    assert len(found) == 1, damaged
    assert lacking[-1].startswith("StoreError: "), lacking
    for finder, texts in ((found[0], damaged), (count - 1, lacking)):
        for rank in {*range(count)} - {finder}:
            assert texts[rank].startswith(f"PeerError: rank {finder} has failed in the check of hetmem.load: "), texts


def saves_by_torch(rank: int, count: int, folder: str) -> dict[str, torch.Tensor]:
    trains = Trains(0, count, trains_all=True)
    trains.step(0, [rank])
    model, optimizer = get_state_dict(trains.model, trains.optimizer)
    torch.distributed.checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return trains.values()


def loads_by_torch(rank: int, count: int, folder: str) -> dict[str, torch.Tensor]:
    trains = Trains(1, count, trains_all=True)
    model, optimizer = get_state_dict(trains.model, trains.optimizer)
    found = {"model": model, "optimizer": optimizer}
    torch.distributed.checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(trains.model, trains.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    loaded = trains.values()
    trains.step(1, [0])  # what was loaded is home, and alike on all ranks
    return loaded


@pytest.mark.nightly
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_a_checkpoint_of_torch_is_loaded_by_another_number_of_ranks(saving: int, loading: int, tmp_path: Path) -> None:
    saved = ranks(saving, saves_by_torch, 2, str(tmp_path))
    for found in ranks(loading, loads_by_torch, 2, str(tmp_path)):
        assert difference(found, saved[0]) == []


def loads_on_two_machines(rank: int, folder: str) -> str:
    trains = Trains(1, 2)
    before = trains.values()
    with pytest.raises((CheckpointError, PeerError)) as raised:
        trains.load(f"{folder}/{'damaged' if rank == 1 else 'first'}")  # each machine has a drive of its own
    assert difference(before, trains.values()) == [], "something is loaded"
    trains.load(f"{folder}/first")
    trains.step(1, [rank])
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.nightly
def test_a_file_that_is_damaged_on_one_machine_is_loaded_on_none(tmp_path: Path) -> None:
    first = Trains(0, 2)
    first.step(0, [0, 1])
    first.save(f"{tmp_path}/first")
    hetmem.release(first.model)
    data = bytearray((tmp_path / "first").read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    of_rank_0, of_rank_1 = ranks(2, loads_on_two_machines, str(tmp_path), machines=2)
    assert of_rank_0.startswith("PeerError: a rank of machine machine 1 has failed in the check of hetmem.load")
    assert of_rank_1.startswith("CheckpointError: ")
