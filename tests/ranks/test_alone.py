"""What one rank of a group does without the others: it evaluates, reads, and saves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

import hetmem
from hetmem import testing
from hetmem.testing import ranks
from tests.ranks.programs import Program, loss_of

PROGRAM = Program()
BUDGET = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB")


def saved(rank: int, folder: str) -> tuple[str, float, list[str]]:
    model = hetmem.manage(PROGRAM.made(), BUDGET, device="sim", chunk_bytes="256KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, PROGRAM.batch(0, rank, 0)).backward()
    optimizer.step()
    loss, path = 0.0, Path(folder) / "file"
    if rank:
        with torch.no_grad():
            loss = float(loss_of(model, PROGRAM.batch(5, 0, 0)))
    else:
        hetmem.save(path, model, optimizer)
    optimizer.zero_grad()
    loss_of(model, PROGRAM.batch(1, rank, 0)).backward()  # the others go on once all have come
    keys = [*model.state_dict()] if rank else []
    hetmem.release(model)
    return hashlib.sha256(path.read_bytes()).hexdigest() if rank == 0 else "", loss, keys


def one_process(path: Path) -> tuple[str, float]:
    """The file, and the loss of an evaluation, of one process that runs the batches of two ranks in turn."""
    model = hetmem.manage(PROGRAM.made(), BUDGET, device="sim", chunk_bytes="256KiB")
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient / 2)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    for rank in range(2):
        loss_of(model, PROGRAM.batch(0, rank, 0)).backward()
    optimizer.step()
    hetmem.save(path, model, optimizer)
    with torch.no_grad():
        loss = float(loss_of(model, PROGRAM.batch(5, 0, 0)))
    hetmem.release(model)
    return hashlib.sha256(path.read_bytes()).hexdigest(), loss


def test_rank_0_saves_the_file_of_one_process_while_rank_1_evaluates(tmp_path: Path) -> None:
    found = ranks(2, saved, str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks: another number rounds sums in another way
    try:
        digest, loss = one_process(tmp_path / "one")
    finally:
        torch.set_num_threads(threads)
    assert found[0][0] == digest
    assert found[1][1] == loss
    assert found[1][2] == [*PROGRAM.made().state_dict()]


def leaves_a_step(rank: int, folder: str) -> list[torch.Tensor]:
    """Steps of two weights, of which each batch uses another one. So the second batch need not wait for the update of
    the first weight, nor for rank 1, which is slow to compare what both have told of that step."""
    budget, told = hetmem.Budget(device="16MiB", host="16MiB", device_chunks="1MiB"), Path(folder) / "told"
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    hetmem.manage(model, budget, device="sim", chunk_bytes="16KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, overlap="forward")

    def slow(original: Callable[..., None], *args: object) -> None:
        until = time.monotonic() + 0.3  # rank 0 tells of its next backward, or waits
        while time.monotonic() < until and not told.exists():
            time.sleep(1e-3)
        original(*args)

    def tells(original: Callable[..., None], *args: object) -> None:
        told.touch()
        original(*args)

    for number in range(2):
        optimizer.zero_grad()
        loss = model[number](torch.ones(1, 64)).sum()
        with testing.around("tell other ranks", tells) if number and not rank else nullcontext():
            loss.backward()
        with testing.around("compare with other ranks", slow) if rank and not number else nullcontext():
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_rank_that_has_left_a_step_tells_of_its_next_backward_once_all_have_compared(tmp_path: Path) -> None:
    first, second = ranks(2, leaves_a_step, str(tmp_path))
    assert all(map(torch.equal, first, second))
