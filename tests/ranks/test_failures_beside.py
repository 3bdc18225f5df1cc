"""A rank that fails while updates run beside a backward or a forward, or with states on NVMe: the others are told who
and where, in time; nothing hangs as weights are read or saved; a new group goes on from the file."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from torch import Tensor

import hetmem
from hetmem import testing
from hetmem.testing import ranks
from tests.ranks.programs import Program, difference, loss_of, values
from tests.ranks.test_failures import FAULTS, SECONDS

pytestmark = pytest.mark.nightly
PROGRAM = Program(words=300)


class Mode(NamedTuple):
    overlap: Literal["off", "backward", "forward"]
    nvme: bool


MODES = {
    "beside the backward": Mode("backward", nvme=False),
    "beside the forward": Mode("forward", nvme=False),
    "NVMe": Mode("off", nvme=True),
    "NVMe beside the backward": Mode("backward", nvme=True),
}
OF_A_DISK = ("OSError", "MemoryError")


class Trains:
    """A model after a step, whose file is at `file`."""

    def __init__(self, rank: int, mode: str, file: str) -> None:
        self.rank, self.file, of = rank, file, MODES[mode]
        budget = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="1MiB")
        if of.nvme:  # weights and gradients fill host memory, beside staging
            nvme_dir = os.path.dirname(file)
            budget = hetmem.Budget(device="16MiB", host="2816KiB", device_chunks="1MiB", nvme="4MiB", nvme_dir=nvme_dir)
        self.model = hetmem.manage(PROGRAM.made(), budget, device="sim", chunk_bytes="64KiB")
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, overlap=of.overlap)
        self.train(0)
        on_nvme = hetmem.report(self.model).to_dict()["tiers"].get("nvme", {}).get("homes", {})
        assert bool(on_nvme.get("exp_avg")) == of.nvme, on_nvme

    def train(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, PROGRAM.batch(number, self.rank, 0)).backward()
        self.optimizer.step()

    def trained(self) -> dict[str, Tensor]:
        """All values after a step; an update that trails has ended."""
        self.train(1)
        self.optimizer.zero_grad()
        return values(self.model, self.optimizer)

    def save(self) -> None:
        hetmem.save(self.file, self.model, self.optimizer)

    def load(self) -> None:
        hetmem.load(self.file, self.model, self.optimizer)

    def at(self, place: str, act: Callable[[], None]) -> str:
        """Do what has `place` in it, in the midst of which `act` is called once; return the error."""
        calls = itertools.count(1)

        def second() -> None:
            if next(calls) == 2:
                act()

        def instead(original: Callable[..., Any], *args: Any) -> Any:
            if place == "update":
                second()
            return [partial(within, task) for task in original(*args)]

        def within(task: Callable[[], None]) -> None:
            if place == "task":
                second()
            task()

        do: Callable[[], object] = {"save": self.save, "load": self.load}.get(place, self.trained)
        with ExitStack() as stack:
            if place == "backward":
                stack.callback(self.model.blocks[1].linear2.weight.register_hook(lambda _: act()).remove)
            elif place in CALLS:
                BEFORE[CALLS[place]] = second
                stack.callback(BEFORE.clear)
            else:
                stack.enter_context(testing.around("tasks that update", instead))
            return outcome(do)


CALLS = {"save": "pwritev", "load": "preadv", "write": "pwritev", "read": "preadv"}
BEFORE: dict[str, Callable[[], None]] = {}
"""What is called before functions of `os`, by their names."""


def watch_files() -> None:
    """Have reads and writes of files, also of those that are open already, do `BEFORE` first."""

    def instead(name: str, original: Callable[..., int], *args: Any) -> int:
        BEFORE.get(name, lambda: None)()
        return original(*args)

    for name in ("preadv", "pwritev"):
        setattr(os, name, partial(instead, name, getattr(os, name)))


def outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Told(NamedTuple):
    """What a rank gets where one fails: its error, after how many seconds; what reading, saving and releasing give; and
    what differs in a new group that goes on from the file."""

    error: str
    seconds: float
    later: list[str]
    differ: list[str]


def fails(rank: int, mode: str, place: str, victim: int, folder: str) -> dict[str, Told]:
    watch_files()
    file, found = f"{folder}/file", {}
    trains = Trains(rank, mode, file)
    trains.save()
    whole, expected = Path(file).read_bytes(), trains.trained()
    hetmem.release(trains.model)
    for fault, act in FAULTS.items():
        if place in ("read", "write") and fault not in OF_A_DISK:
            continue
        trains = Trains(rank, mode, file)
        began = time.monotonic()
        error = trains.at(place, act if rank == victim else lambda: None)
        seconds = time.monotonic() - began
        read = outcome(lambda trains=trains: values(trains.model, trains.optimizer))
        saved = outcome(trains.save) if rank == 0 else ""
        assert Path(file).read_bytes() == whole, (fault, error, saved)
        released, again = (outcome(lambda trains=trains: hetmem.release(trains.model)) for _ in range(2))
        assert again.startswith("ManageError: "), (released, again)  # it is an ordinary model
        trains = Trains(rank, mode, file)
        trains.load()
        found[fault] = Told(error, seconds, [read, saved, released], difference(expected, trains.trained()))
        hetmem.release(trains.model)
    return found


def is_killed(rank: int, mode: str, place: str, victim: int, folder: str) -> tuple[str, float, str]:
    """The error after a rank is killed, in how many seconds, and what reading weights gives."""
    watch_files()
    trains = Trains(rank, mode, f"{folder}/file")
    trains.save()
    began = time.monotonic()
    error = trains.at(place, (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == victim else lambda: None)
    return error, time.monotonic() - began, outcome(lambda: values(trains.model, trains.optimizer))


PLACES = ["backward", "update", "task", "save", "load"]
CASES = [
    (mode, place, victim)
    for mode, of in MODES.items()
    for place in [*PLACES, *(["read", "write"] if of.nvme else [])]
    for victim in (0, 1)
    if (place, victim) != ("save", 1)
]


@pytest.mark.parametrize(("mode", "place", "victim"), CASES)
def test_others_are_told_and_a_new_group_goes_on(mode: str, place: str, victim: int, tmp_path: Path) -> None:
    of_ranks = ranks(2, fails, mode, place, victim, str(tmp_path))
    for fault, own in of_ranks[victim].items():
        told = of_ranks[1 - victim][fault]
        of_store = place in ("read", "write") or (place in CALLS and fault == "OSError")
        assert own.error.startswith("StoreError" if of_store else fault), own
        assert re.match(rf"PeerError: rank {victim} ", told.error), (fault, told)
        assert fault in told.error or "StoreError" in told.error or place == "save", told
        assert told.seconds < SECONDS
        for each in (own, told):
            assert each.differ == [], fault
            for text in each.later:
                assert re.match(r"(PeerError|StateError|RuntimeError|StoreError|CheckpointError): |$", text), (
                    fault,
                    text,
                )
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("mode", "place", "victim"), CASES)
def test_a_rank_that_is_killed_is_named(mode: str, place: str, victim: int, tmp_path: Path) -> None:
    found = ranks(2, is_killed, mode, place, victim, str(tmp_path), dies=(victim,))
    assert found[victim] is None
    error, seconds, read = found[1 - victim]
    assert re.match(rf"PeerError: rank {victim} has died or ended. rank 0: .*; rank 1: .* steps", error), error
    assert seconds < SECONDS
    assert re.match(r"(PeerError|StateError|RuntimeError): |$", read), read
    assert {name for name in os.listdir(tmp_path) if not name.startswith(".hetmem-")} == {"file"}
    assert not [name for name in os.listdir("/dev/shm") if "hetmem" in name]
