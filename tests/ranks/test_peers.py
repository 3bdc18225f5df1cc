"""What a rank is told of the others: what differs, who is missing, and what a group does not do yet."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError, HetmemError, ManageError, PeerError
from hetmem.testing import ranks
from tests.ranks.programs import WIDTH, Program, loss_of

PROGRAM = Program()


def managed(**options: Any) -> torch.nn.Module:
    budget = options.pop("budget", hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB"))
    return hetmem.manage(PROGRAM.made(), budget, device="sim", chunk_bytes="256KiB", **options)


def told(what: Callable[[], object]) -> tuple[str, str, float]:
    """The error of `what`, and after how many seconds it came."""
    began = time.monotonic()
    try:
        what()
    except HetmemError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


class Trains:
    def __init__(self, rank: int, **options: Any) -> None:
        self.rank, self.model = rank, managed()
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, **options)

    def backward(self, batch: int = 0) -> None:
        loss_of(self.model, PROGRAM.batch(batch, self.rank, 0)).backward()

    def step(self, **options: Any) -> None:
        self.optimizer.param_groups[0].update(options)
        self.optimizer.step()


class Adds:
    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def __call__(self, gradient: torch.Tensor) -> None:
        self.bias.add_(1.0)


def stories(rank: int) -> dict[str, tuple[str, str, float]]:
    found = {}
    found["other budget"] = told(lambda: managed(budget=hetmem.Budget(device="16MiB", host=f"{64 + rank}MiB")))
    found["other options"] = told(lambda: managed(mixed_precision="bf16" if rank else None))
    found["NVMe"] = told(lambda: managed(budget=hetmem.Budget(nvme="1GiB", nvme_dir=["/tmp", "/var/tmp"])))

    trains = Trains(rank)
    trains.backward()
    found["other lr"] = told(lambda: trains.step(lr=0.1 * (1 + rank)))
    found["after an error"] = told(trains.backward)

    trains = Trains(rank)
    trains.backward()
    if rank:
        trains.model.words.weight.grad = None
    found["no gradient on one"] = told(trains.step)

    trains = Trains(rank)
    if rank:
        trains.backward()
        hetmem.release(trains.model)
    else:
        found["a step that one rank lacks"] = told(trains.step)

    trains = Trains(rank)
    plain, words = torch.optim.SGD(trains.model.parameters(), lr=0.1), trains.model.words.weight
    trains.backward()
    for name, write in (
        ("no room for an optimizer of torch", plain.step),
        ("no room for a function", lambda: words.mul_(0.5)),
    ):
        with torch.no_grad(), testing.around("free host memory", lambda *_: 256 << 10):
            found[name] = told(write)
    plain.step()
    trains.optimizer.zero_grad()
    trains.backward()

    trains = Trains(rank)
    trains.backward()
    weight = trains.model.blocks[0].linear2.weight
    before = weight.detach().clone()
    if not rank:
        weight.detach().numpy()[3, 5] = 100.0
    found["a write by NumPy on one"] = told(trains.step)
    assert torch.equal(weight, before) == bool(rank), "homes are as they were"

    trains = Trains(rank)
    with torch.no_grad():
        trains.model.blocks[1].norm2.bias[7] = 1.0 + rank
    found["other values"] = told(trains.backward)

    trains = Trains(rank)
    trains.backward()
    trains.model.words.weight.grad = torch.full((PROGRAM.words, WIDTH), float(rank))
    found["other gradients of the program"] = told(trains.step)

    trains = Trains(0)  # on both the same batches
    trains.model.odd.register_forward_pre_hook(lambda module, _: module.weight.data.add_(1.0))
    found["a write in a forward"] = told(lambda: [trains.backward(batch) for batch in range(9)])

    trains = Trains(rank)
    trains.model.words.weight.register_hook(Adds(trains.model.odd.bias))
    found["a write in a backward"] = told(trains.backward)

    trains = Trains(rank)
    trains.backward()
    if not rank:
        torch.nn.utils.clip_grad_norm_(trains.model.parameters(), 1e-3)
    found["a write to gradients on one"] = told(trains.step)
    found["park"] = told(lambda: hetmem.park(trains.model))

    trains = Trains(rank)
    if rank:
        hetmem.release(trains.model)
    else:
        found["a release"] = told(trains.backward)

    trains = Trains(rank)
    trains.backward()
    trains.optimizer.step()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    trains.optimizer.zero_grad()
    found["killed"] = told(trains.backward)
    return found


def test_what_differs_and_who_is_missing_is_an_error_by_name() -> None:
    found = ranks(2, stories, dies=(1,))[0]
    for name, kind, pattern in (
        ("other budget", PeerError, r"Budget\(host\) is '64MiB' on rank 0 and '65MiB' on rank 1"),
        ("other options", PeerError, r"manage\(mixed_precision\) is None on rank 0 and torch.bfloat16 on rank 1"),
        ("NVMe", ManageError, r"Budget\(nvme_dir=…\) of several directories is not possible for a group"),
        ("other lr", PeerError, "ranks 0 and 1 do not do the same: .*'lr': 0.1,.*'lr': 0.2,"),
        ("after an error", PeerError, "rank 0 takes no part any more, as it raised PeerError"),
        ("no gradient on one", PeerError, r"words.weight.grad is there on rank 0 and None on rank 1"),
        (
            "a step that one rank lacks",
            PeerError,
            "rank 1 has released its model. rank 0: a step, awaits a step of AdamW, after 1 backwards and 0 steps",
        ),
        ("a write by NumPy on one", PeerError, "other values to blocks.0.linear2.weight on rank 1 than on rank 0"),
        (
            "no room for an optimizer of torch",
            BudgetError,
            "about to write to words.weight: .* each of 2 ranks .* would take .* 128.00 KiB left for each.*hetmem.load",
        ),
        (
            "no room for a function",
            BudgetError,
            "write to words.weight: .* would take 257.50 KiB, and the machine has 128.00 KiB left",
        ),
        ("other values", PeerError, "other values to blocks.1.norm2.bias on rank 1 than on rank 0"),
        ("a write to gradients on one", PeerError, r"other values to .*\.grad on rank 1 than on rank 0"),
        ("other gradients of the program", PeerError, "the same: 'words.weight.grad with a hash of"),
        ("a write in a forward", ManageError, "a write of the program to odd.weight within a forward is not possible"),
        ("a write in a backward", ManageError, "a write of the program to odd.bias within a backward is not possible"),
        ("park", ManageError, "hetmem.park is not possible for a group"),
        ("a release", PeerError, "rank 1 has released its model. rank 0: a backward, awaits"),
        ("killed", PeerError, "rank 1 has died or ended. rank 0: a backward, awaits .*, after 2 backwards and 1 steps"),
    ):
        got, text, seconds = found.pop(name)
        assert got == kind.__name__, (name, got, text)
        assert re.search(pattern, text.replace("\n", " ")), (name, text)
        if name in (
            "a step that one rank lacks",
            "a release",
            "killed",
        ):  # 2 s, 1 s and 1 s with a busy machine's delays
            assert seconds < 5.0, (name, seconds)
    assert not found
    assert not [name for name in os.listdir("/dev/shm") if "hetmem" in name]


def test_a_launcher_without_a_rendezvous_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ManageError, match="WORLD_SIZE is 4, and RANK, MASTER_ADDR, MASTER_PORT not set"):
        managed()
    hetmem.release(managed(group=False))
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = managed()
    with monkeypatch.context() as later:
        later.setattr(torch.distributed, "is_initialized", lambda: True)
        later.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(ManageError, match=r"the process group of 2 ranks was made after hetmem.manage"):
            hetmem.AdamW(alone.parameters()).step()
    hetmem.release(alone)
    with pytest.raises(ManageError, match="group must be None, False, a ProcessGroup or a DeviceMesh"):
        managed(group=3)
