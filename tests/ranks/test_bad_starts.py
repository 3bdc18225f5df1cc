"""Bad inputs at the start and with files of a group: each is an error that says what is wrong, and none hangs."""

from __future__ import annotations

import mmap
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetmem
from hetmem.errors import BudgetError, HetmemError, ManageError, PeerError, StoreError
from hetmem.testing import ranks
from tests.ranks.programs import Program, loss_of

PROGRAM = Program()
BUDGET = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB")


def told(what: Callable[[], object]) -> str:
    try:
        what()
    except (HetmemError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Trains:
    def __init__(self, rank: int, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        self.rank = rank
        self.model = hetmem.manage(PROGRAM.made(), BUDGET, device="sim", chunk_bytes="256KiB", group=group)
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, **{"moments": "bfloat16", **options})

    def backward(self, model: torch.nn.Module | None = None) -> None:
        loss_of(model or self.model, PROGRAM.batch(0, self.rank, 0)).backward()

    def save(self, path: str) -> None:
        hetmem.save(path, self.model, self.optimizer)

    def load(self, path: str) -> None:
        hetmem.load(path, self.model, self.optimizer)


def stories(rank: int, folder: str) -> dict[str, str]:
    found = {}
    trains = Trains(rank)
    trains.backward()
    trains.optimizer.step()
    trains.save(f"{folder}/file")
    if rank == 0:
        hetmem.save(f"{folder}/without", trains.model)
    dist.barrier()
    found["other files"] = told(lambda: trains.load(f"{folder}/{'without' if rank else 'file'}"))
    found["no folder"] = told(lambda: trains.save(f"{folder}/none/file"))
    trains.load(f"{folder}/file")  # the group goes on behind both
    found["saved by rank 1 alone"] = told(lambda: trains.save(f"{folder}/own") if rank else trains.backward())

    trains = Trains(rank)
    found["loaded by rank 0 alone"] = told(trains.backward if rank else lambda: trains.load(f"{folder}/file"))

    first, second = Trains(rank, seed=rank), Trains(rank, moments="8bit" if rank else "bfloat16")
    for name, trains in (("other seed", first), ("other moments", second)):
        trains.backward()
        found[name] = told(trains.optimizer.step)

    found["wrapped"] = told(lambda: wrapped(Trains(rank), rank))
    inside = torch.nn.parallel.DistributedDataParallel(PROGRAM.made(), find_unused_parameters=True)
    found["wrapped inside"] = told(lambda: hetmem.manage(inside, BUDGET, device="sim"))

    of_rank_1 = dist.new_group([1])
    found["not in the group"] = told(lambda: hetmem.manage(PROGRAM.made(), BUDGET, device="sim", group=of_rank_1))

    found["two models in another order"] = told(lambda: crossed(rank))

    large = hetmem.Budget(device="16MiB", host="4GiB")
    for name, of, limit, nbytes in (
        ("no file in memory", 0, resource.RLIMIT_FSIZE, 1 << 20),
        ("no address space", 1, resource.RLIMIT_AS, used_bytes() + (1 << 30)),
    ):
        with limited(limit, nbytes) if rank == of else nullcontext():
            found[name] = told(lambda: hetmem.manage(PROGRAM.made(), large, device="sim"))

    os.environ["HETMEM_RANK_TIMEOUT"] = "2"
    both = dist.new_group([0, 1])  # whose connections end with that
    found["not on all ranks"] = "" if rank else told(lambda: Trains(rank, both))
    os.environ["HETMEM_RANK_TIMEOUT"] = "60"

    dist.barrier()
    trains = Trains(rank)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed before a load"] = told(lambda: trains.load(f"{folder}/file"))
    return found


def used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@contextmanager
def limited(limit: int, nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def crossed(rank: int) -> None:
    one, other = Trains(rank), Trains(rank)
    (one if rank else other).backward()


def wrapped(trains: Trains, rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(trains.model, find_unused_parameters=True)
    trains.backward(model)
    trains.optimizer.step()


@pytest.mark.nightly
def test_bad_inputs(tmp_path: Path) -> None:
    began = time.monotonic()
    found = ranks(2, stories, str(tmp_path), dies=(1,))[0]
    for name, kind, pattern in (
        ("other files", PeerError, "rank 1 has failed in the check of hetmem.load: .*was saved without an optimizer"),
        ("no folder", StoreError, "No such file or directory"),
        ("saved by rank 1 alone", PeerError, "all ranks wait for each other.* rank 1: hetmem.save, awaits the file"),
        ("loaded by rank 0 alone", PeerError, "all ranks wait for each other. rank 0: the begin of loading"),
        ("two models in another order", PeerError, "all ranks wait for each other. .* of another model, awaits"),
        ("other seed", PeerError, "the same: 'AdamW of .* seed=0' and 'AdamW of .* seed=1'"),
        ("other moments", PeerError, "the same: 'AdamW of moments=torch.bfloat16.* 'AdamW of moments=8bit"),
        ("no file in memory", BudgetError, r"the system gives no 4.0. GiB .* Lower Budget\(host"),
        ("no address space", PeerError, "rank 1 could not map the memory of the group: CapacityError: .*twice"),
        ("wrapped", ManageError, "is called by torch's DistributedDataParallel, .*: leave it out"),
        ("wrapped inside", ManageError, "the model is a DistributedDataParallel: leave it out"),
        ("not in the group", ManageError, "this process is in none of the ranks of group="),
        ("not on all ranks", PeerError, r"not all ranks have come to hetmem.manage .*Ranks? 1 failed"),
        ("killed before a load", PeerError, "rank 1 has died or ended. rank 0: the begin of loading"),
    ):
        text = found.pop(name)
        assert text.startswith(f"{kind.__name__}: "), (name, text)
        assert re.search(pattern, text.replace("\n", " ")), (name, text)
    assert not found
    assert time.monotonic() - began < 90.0
