"""A rank that fails, at any place of a forward, backward, step, save or load: the others are told who and where, in
time; weights and states of the last step can be read, and saved; nothing is left."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import hetmem
from hetmem import testing
from hetmem.testing import ranks
from tests.ranks.programs import Program, difference, loss_of, values

PROGRAM = Program(words=300)
BUDGET = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="1MiB")
SECONDS = 5.0
"""Until a rank is told of another one: 1 s, with a busy machine's delays."""


def raises(error: Callable[[], BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error()

    return act


def stops() -> None:
    """Stop this process for longer than ranks wait until a circle of waits is an error."""
    subprocess.Popen(["/bin/sh", "-c", f"sleep 1.3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {
    "RuntimeError": raises(lambda: RuntimeError("of the program")),
    "MemoryError": raises(MemoryError),
    "KeyboardInterrupt": raises(KeyboardInterrupt),
    "OSError": raises(lambda: OSError(errno.EIO, os.strerror(errno.EIO))),
}


class Trains:
    """A model after a step, and a file of it."""

    def __init__(self, rank: int, file: str) -> None:
        self.rank, self.file = rank, file
        self.model = hetmem.manage(PROGRAM.made(), BUDGET, device="sim", chunk_bytes="128KiB")
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, max_grad_norm=0.5)
        self.train(0)

    def values(self) -> dict[str, Tensor]:
        found = values(self.model, self.optimizer)
        return {name: value for name, value in found.items() if not name.endswith(".grad")}

    def train(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, PROGRAM.batch(number, self.rank, 0)).backward()
        self.optimizer.step()

    def save(self) -> None:
        hetmem.save(self.file, self.model, self.optimizer)

    def load(self) -> None:
        hetmem.load(self.file, self.model, self.optimizer)

    def at(self, place: str, act: Callable[[], None], victim: int, story: str) -> str:
        """Do what has `place` in it, where that calls `act`; return the error. Each `story` is told once of a file."""
        calls, begun = 0, Path(f"{self.file} {story}")

        def instead(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if place == "save" and self.rank != victim:  # which is to write some of it
                while not begun.exists():
                    time.sleep(1e-3)
            if calls == (2 if place in ("save", "load") else 1):  # in the midst of it
                if self.rank == victim:
                    begun.touch()
                act()
            return original(*args, **named)

        do: Callable[[], None] = {"save": self.save, "load": self.load}.get(place, lambda: self.train(1))
        with ExitStack() as stack:
            if place == "forward":
                stack.callback(self.model.blocks[1].register_forward_pre_hook(lambda *_: act()).remove)
            elif place == "backward":
                stack.callback(self.model.blocks[1].linear2.weight.register_hook(lambda _: act()).remove)
            elif place in ("save", "load"):
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                name = {"save": "pwritev", "load": "preadv"}[place]
                original = getattr(os, name)
                patch.setattr(os, name, lambda *args: instead(original, *args))
            else:  # where it begins: one update is of all chunks
                point = {"norm": "tasks that sum", "update": "tasks that update"}[place]
                stack.enter_context(testing.around(point, instead))
            try:
                do()
            except BaseException as error:
                return f"{type(error).__name__}: {error}"
        return ""


def fails(rank: int, place: str, victim: int, folder: str) -> dict[str, tuple[str, float, str]]:
    """By fault, the error that this rank gets, after how many seconds, and what a save by rank 0 gives after that."""
    found = {}
    file = f"{folder}/file"
    for fault, act in FAULTS.items():
        trains = Trains(rank, file)
        trains.save()
        whole, before = Path(file).read_bytes(), trains.values()
        began = time.monotonic()
        error = trains.at(place, act if rank == victim else lambda: None, victim, fault)
        seconds, saved = time.monotonic() - began, ""
        if place == "update":
            trains.values()  # can be read
        elif place != "forward":
            assert difference(before, trains.values()) == [], fault
        if place in ("save", "load"):
            assert Path(file).read_bytes() == whole
            trains.load()
            trains.train(2)  # the group goes on
        elif place == "forward" and error:  # as a program does that leaves such a batch out
            trains.optimizer.step()
        elif rank == 0 and place != "forward":
            try:
                trains.save()
                assert Path(file).read_bytes() == whole
            except hetmem.errors.HetmemError as refused:
                saved = f"{type(refused).__name__}: {refused}"
        found[fault] = error, seconds, saved
        hetmem.release(trains.model)
    return found


def stops_and_is_killed(rank: int, place: str, victim: int, folder: str) -> tuple[list[str], str, float]:
    """What differs after this rank has stopped for a while, the error after it is killed, and in how many seconds."""
    undisturbed, trains = Trains(rank, f"{folder}/other"), Trains(rank, f"{folder}/file")
    for each, act in ((undisturbed, lambda: None), (trains, stops if rank == victim else lambda: None)):
        each.save()
        assert each.at(place, act, victim, "stops") == ""
        each.train(2)
    differ = difference(undisturbed.values(), trains.values())
    began = time.monotonic()
    act = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == victim else lambda: None
    error = trains.at(place, act, victim, "is killed")
    return differ, error, time.monotonic() - began


WHERE = {
    "backward": "in a backward",
    "norm": "in a step",
    "update": "in a step",
    "save": "failed in hetmem.save",
    "load": "failed in the check of hetmem.load",
}
CASES = [(place, victim) for place in ("forward", *WHERE) for victim in (0, 1)]


def with_one_of(place: str, victim: int) -> list[Any]:
    """All cases, of which `make test` runs this one."""
    return [pytest.param(*each, marks=() if each == (place, victim) else pytest.mark.nightly) for each in CASES]


@pytest.mark.parametrize(("place", "victim"), with_one_of("update", 1))
def test_others_are_told_and_the_last_step_can_be_saved(place: str, victim: int, tmp_path: Path) -> None:
    of_ranks = ranks(2, fails, place, victim, str(tmp_path))
    for fault in FAULTS:
        (own, _, _), (told, seconds, _) = of_ranks[victim][fault], of_ranks[1 - victim][fault]
        saved = of_ranks[0][fault][2]
        assert own.startswith("StoreError" if fault == "OSError" and place in ("save", "load") else fault), own
        if place == "forward":
            assert told == ""
            continue
        assert re.match(f"PeerError: rank {victim} .*{WHERE[place]}", told), (fault, told)
        assert fault in told or place == "save" or "StoreError" in told, told
        assert seconds < SECONDS
        assert bool(saved) == (place == "update"), saved
    assert {name.split()[0] for name in os.listdir(tmp_path)} == {"file"}


@pytest.mark.parametrize(("place", "victim"), with_one_of("backward", 0))
def test_a_rank_that_stops_goes_on_and_one_that_is_killed_is_named(place: str, victim: int, tmp_path: Path) -> None:
    found = ranks(2, stops_and_is_killed, place, victim, str(tmp_path), dies=(victim,))
    assert found[victim] is None
    differ, error, seconds = found[1 - victim]
    assert differ == []
    assert re.match(rf"PeerError: rank {victim} has died or ended. rank 0: .*; rank 1: .* steps", error), error
    assert seconds < SECONDS
    left = {name.split()[0] for name in os.listdir(tmp_path) if not name.startswith(".hetmem-")}
    assert left == {"file", "other"}
    assert not [name for name in os.listdir("/dev/shm") if "hetmem" in name]
