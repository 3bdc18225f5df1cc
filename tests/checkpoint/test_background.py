"""A save in the background has the bytes of one that waits, whatever is done meanwhile, or leaves the older file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import hetmem
from benchmarks import saves
from hetmem.errors import CheckpointError, ManageError, StoreError
from tests.checkpoint.models import Run, start
from tests.engine import harness
from tests.forked import Forks, end_in_a_fork


def adamw(**options: Any) -> Any:
    return lambda module: hetmem.AdamW(module.parameters(), lr=1e-2, **options)


class Writer:
    """Holds back what saves write in the background, until it `may` be written; fails as told."""

    def __init__(self) -> None:
        self.may, self.error = threading.Event(), cast("OSError | None", None)
        self.holds: Callable[[int], bool] = lambda nbytes: True
        self._real = os.pwritev

    def __call__(self, fd: int, memory: list[memoryview], offset: int) -> int:
        if threading.current_thread().name == "hetmem-checkpoint" and self.holds(memory[0].nbytes):
            assert self.may.wait(60)
            if self.error is not None:
                raise self.error
        return self._real(fd, memory, offset)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    made = Writer()
    monkeypatch.setattr(os, "pwritev", made)
    yield made
    made.may.set()


@contextmanager
def released_after(writer: Writer, seconds: float = 0.2) -> Iterator[None]:
    """`writer` may go on a while after the body has begun."""
    timer = threading.Timer(seconds, writer.may.set)
    timer.start()
    yield
    timer.join()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"mixed_precision": torch.bfloat16}, {}),
    "8-bit moments": ({}, {"moments": "8bit"}),
}


@pytest.mark.each
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("placement", harness.PLACEMENTS)
def test_a_save_at_every_step_has_the_bytes_of_one_that_waits(
    placement: str, overlap: Any, kind: str, tmp_path: Path, writer: Writer
) -> None:
    """Nothing is written in the background until the next step has begun."""
    options, own = CASES[kind]
    files: list[list[bytes]] = []
    for waits in (True, False):
        run = start(tmp_path, placement, adamw(overlap=overlap, **own), **options)
        torch.manual_seed(5)
        handle = None
        for number in range(4):
            with released_after(writer, 0.02):
                run.steps(number, number + 1)
            if waits:
                run.save(tmp_path / f"{waits} {number}")
                continue
            if handle is not None:
                handle.wait()
            writer.may.clear()
            handle = run.save(tmp_path / f"{waits} {number}", wait=False)
        writer.may.set()
        hetmem.save(tmp_path / "last", run.module)  # waits for the one before
        files.append([(tmp_path / f"{waits} {number}").read_bytes() for number in range(4)])
    for number, (expected, found) in enumerate(zip(*files, strict=True)):
        assert expected == found, f"after step {number}"


@pytest.mark.each
@pytest.mark.parametrize(
    ("placement", "frozen", "overlap"),
    [("host", "nf4-nested", "off"), ("nvme", None, "off"), ("host", None, "backward"), ("nvme", "int8", "backward")],
)
def test_a_save_beside_micro_batches_in_turns_and_codes_has_the_bytes_of_one_that_waits(
    placement: str, frozen: Any, overlap: Any, tmp_path: Path, writer: Writer
) -> None:
    """Gradients are added up on the device, and weights in codes are frozen."""
    files: list[list[bytes]] = []
    for waits in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        if frozen is not None:
            model[:2].bfloat16().requires_grad_(False)
        room: dict[str, Any] = {"host": "128KiB", "nvme": "8MiB", "nvme_dir": tmp_path} if placement == "nvme" else {}
        budget = hetmem.Budget(**({"device": "8MiB", "device_chunks": "64KiB", "host": "8MiB"} | room))
        harness.manage(model, budget, tmp_path, frozen=frozen)
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
        batches = torch.randn(3, 2, 4, 64, dtype=torch.float32)
        writer.may.set()
        for number in range(3):
            with released_after(writer, 0.02):
                hetmem.accumulate(model, [*batches[number]], forward=loss_of)
                optimizer.step()
                optimizer.zero_grad()
            if waits:
                hetmem.save(tmp_path / f"{waits} {number}", model, optimizer)
            else:
                writer.may.clear()
                hetmem.save(tmp_path / f"{waits} {number}", model, optimizer, wait=False)
        writer.may.set()
        hetmem.release(model)
        files.append([(tmp_path / f"{waits} {number}").read_bytes() for number in range(3)])
    assert files[0] == files[1]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x = batch
    for layer in model:  # type: ignore[attr-defined]
        x = layer(x.to(layer.weight.dtype))
    return x.float().square().mean()


def trained(directory: Path, placement: str = "host", **options: Any) -> Run:
    run = start(directory, placement, adamw(**options))
    run.steps(0, 2)
    return run


def write_in_place(run: Run) -> None:
    with torch.no_grad():
        run.module.head.weight.mul_(2)


def write_unseen(run: Run) -> None:
    run.module.head.weight.data.mul_(2)


def write_behind_a_read(run: Run) -> None:
    run.module.head.weight.norm()
    write_unseen(run)


def write_an_element(run: Run) -> None:
    with torch.no_grad():
        run.module.head.weight[0] = 5


def write_in_a_backward(run: Run) -> None:
    handle = run.module.head.weight.register_post_accumulate_grad_hook(lambda _: write_unseen(run))
    run.step(harness.token_batches(6)[2])
    handle.remove()


def write_in_a_forward(run: Run) -> None:
    handle = run.module.blocks[0].register_forward_hook(lambda *_: write_unseen(run))
    run.module(*harness.token_batches(6)[2])
    handle.remove()


def swap_tensors(run: Run) -> None:
    weight = run.module.head.weight
    other = torch.nn.Parameter(torch.ones_like(weight))
    torch.utils.swap_tensors(weight, other)
    other.data.zero_()


def write_by_numpy(run: Run) -> None:
    run.module.head.weight.detach().numpy()[:] = 3


def exchange(run: Run) -> None:
    run.module.head.weight.data = torch.ones_like(run.module.head.weight)
    run.step(harness.token_batches(6)[2])


def step_by_torch(run: Run) -> None:
    optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1)
    run.module(*harness.token_batches(6)[2]).backward()
    optimizer.step()


def write_a_state(run: Run) -> None:
    run.optimizer.state[run.module.head.weight]["exp_avg"].zero_()


def load_a_state(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def load_weights(run: Run) -> None:
    state = {name: torch.zeros_like(value) for name, value in run.module.state_dict().items()}
    run.module.load_state_dict(state)


def park(run: Run) -> None:
    with hetmem.parked(run.module):
        pass
    run.step(harness.token_batches(6)[2])


def release(run: Run) -> None:
    hetmem.release(run.module)
    write_in_place(run)


WRITES = [
    write_in_place,
    write_unseen,
    write_behind_a_read,
    write_an_element,
    write_in_a_backward,
    write_in_a_forward,
    swap_tensors,
    write_by_numpy,
    exchange,
    step_by_torch,
    write_a_state,
    load_a_state,
    load_weights,
    park,
    release,
]


SEEN = {f"{write.__name__}-{placement}": (write, placement) for write in WRITES for placement in harness.PLACEMENTS}
del SEEN["write_in_a_forward-resident"]  # see docs/limits.md


@pytest.mark.each
@pytest.mark.parametrize(("write", "placement"), SEEN.values(), ids=SEEN)
def test_who_writes_waits_until_the_save_has_come_by(
    write: Any, placement: str, tmp_path: Path, writer: Writer
) -> None:
    run = trained(tmp_path, placement)
    writer.may.set()
    run.save(tmp_path / "expected")
    writer.may.clear()
    handle = run.save(tmp_path / "c", wait=False)
    assert not handle.done()
    assert not (tmp_path / "c").exists()
    with released_after(writer):
        write(run)
    handle.wait()
    assert (tmp_path / "c").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("placement", harness.STREAMED)
def test_what_the_program_holds_is_written_before_the_call_returns(
    placement: str, tmp_path: Path, writer: Writer
) -> None:
    run = trained(tmp_path, placement)
    run.save(tmp_path / "expected")
    kept, state = run.module.head.weight.data, run.optimizer.state[run.module.head.weight]["exp_avg"].view(-1)
    handle = run.save(tmp_path / "c", wait=False)
    kept.zero_()
    state.zero_()
    writer.may.set()
    handle.wait()
    assert (tmp_path / "c").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("what", ["weight", "state"])
def test_a_write_that_nothing_announced_ends_the_save_by_name(what: str, tmp_path: Path, writer: Writer) -> None:
    run = trained(tmp_path)
    entry = run.optimizer.state[run.module.head.weight]
    run.save(tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    run.steps(2, 3)
    handle = run.save(tmp_path / "c", wait=False)
    if what == "weight":
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            run.module.head.weight.mul_(2)
    else:
        entry["exp_avg"].zero_()
    writer.may.set()
    with pytest.raises(CheckpointError, match=r"was not written: the program wrote to \S*embedding\.weight"):
        handle.wait()
    assert handle.done()
    assert (tmp_path / "c").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".hetmem-")] == []
    run.steps(3, 4)  # the error was raised already


def test_an_error_of_the_drive_is_raised_once_by_the_next_call(tmp_path: Path, writer: Writer) -> None:
    run = trained(tmp_path)
    writer.may.set()
    run.save(tmp_path / "d")
    writer.error = OSError(5, "the drive fails")
    for call in (
        lambda: run.steps(2, 3),
        run.optimizer.step,
        lambda: run.save(tmp_path / "d"),
        lambda: hetmem.load(tmp_path / "d", run.module),
    ):
        writer.may.clear()
        handle = run.save(tmp_path / "c", wait=False)
        writer.may.set()
        assert harness.comes_to_be(handle.done)
        with pytest.raises(StoreError, match="the drive fails"):
            call()
    writer.error = None
    run.steps(2, 3)
    assert not (tmp_path / "c").exists()
    run.save(tmp_path / "c")


def test_a_full_disk_is_told_by_the_call_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="cannot reserve"):
        run.save(tmp_path / "c", wait=False)
    run.steps(2, 3)


def test_a_save_of_a_parked_model_and_of_a_plain_one(tmp_path: Path, writer: Writer) -> None:
    """Homes go back to the device once they are written."""
    run = trained(tmp_path, "resident")
    writer.may.set()
    run.save(tmp_path / "expected")
    writer.may.clear()
    with hetmem.parked(run.module):
        handle = run.save(tmp_path / "c", wait=False)
        threading.Timer(0.1, writer.may.set).start()
    run.steps(2, 3)
    handle.wait()
    assert (tmp_path / "c").read_bytes() == (tmp_path / "expected").read_bytes()
    plain = harness.mlp()
    handle = hetmem.save(tmp_path / "p", plain, wait=False)
    assert handle.done()
    assert (tmp_path / "p").exists()


def test_updates_wait_only_for_chunks_that_are_not_out_yet(tmp_path: Path, writer: Writer) -> None:
    """All but one weight is written, and all are updated meanwhile but those of its chunk."""
    run = trained(tmp_path, overlap="backward")
    held, before = run.module.embedding.weight.nbytes, {n: p._version for n, p in run.module.named_parameters()}
    writer.holds = lambda nbytes: nbytes == held
    handle, updated = run.save(tmp_path / "c", wait=False), set[str]()

    def look() -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a use of a weight would be one within the step
            updated.update(name for name, p in run.module.named_parameters() if p._version != before[name])
        writer.may.set()

    timer = threading.Timer(0.5, look)
    timer.start()
    run.steps(2, 3)
    timer.join()
    handle.wait()
    assert "embedding.weight" not in updated
    assert updated, "others were updated meanwhile"
    told = hetmem.report(run.module)
    facts = told.to_dict()["between_steps"]
    assert (facts["saves"], facts["saved_bytes"]) == (1, (tmp_path / "c").stat().st_size)
    assert 0.2 < facts["save_wait_seconds"] < facts["save_seconds"]
    assert "1 save in the background, of" in str(told)


def test_a_child_made_by_fork_is_told_where_to_ask(tmp_path: Path) -> None:
    run = trained(tmp_path)
    handle = run.save(tmp_path / "c", wait=False)

    def ask() -> None:
        for call in (handle.wait, handle.done):
            with pytest.raises(ManageError, match="made by fork"):
                call()

    assert end_in_a_fork(ask) == 0
    handle.wait()


ENDS = """
import sys
from pathlib import Path
import torch
from tests.checkpoint.models import start

torch.set_num_threads(1)
folder = Path(sys.argv[1])
run = start(folder)
run.steps(0, 1)
run.save(folder / "expected")
run.save(folder / "c", wait=False)
others = start(folder)
others.save(folder / "d", wait=False)
(folder / "d").mkdir()
raise ZeroDivisionError
"""


def test_a_process_that_ends_writes_the_file_first_and_tells_an_error(forks: Forks, tmp_path: Path) -> None:
    """Also one that ends by an error."""
    ended = forks.run(ENDS, str(tmp_path))
    assert "ZeroDivisionError" in ended.stderr
    assert (tmp_path / "c").read_bytes() == (tmp_path / "expected").read_bytes()
    assert f"hetmem.save('{tmp_path}/d', wait=False) has failed: [Errno 21]" in ended.stderr


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("placement", harness.PLACEMENTS)
def test_a_step_beside_a_save_moves_what_any_step_moves_and_waits_only_where_it_updates(
    placement: str, overlap: Any, tmp_path: Path, writer: Writer
) -> None:
    """A save that is out before the first update costs no wait."""
    run = trained(tmp_path, placement, overlap=overlap)
    counts, waits = [], []
    writer.may.set()
    for number in range(4):
        before = hetmem.report(run.module).to_dict()["links"]
        writer.may.clear()
        handle = run.save(tmp_path / "c", wait=False) if number > 1 else None
        batch = harness.token_batches(6)[2]
        run.module(*batch)  # nothing of a forward waits
        if handle is not None:
            assert not handle.done()
            writer.may.set()
            handle.wait()
        run.step(batch)
        run.optimizer.synchronize()
        told = hetmem.report(run.module).to_dict()
        links = ("host_to_device", "device_to_host")  # what is read from NVMe depends on when it is
        counts.append([told["links"][link]["bytes"] - before[link]["bytes"] for link in links])
        waits.append(told["between_steps"]["save_wait_seconds"])
    assert counts[1] == counts[3]
    assert waits == [0.0] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_a_step_beside_a_save_takes_as_long_as_a_step_or_the_drive(overlap: str, tmp_path: Path) -> None:
    """On clocks; the best of a few, as other programs take time of this machine."""
    drive = saves.Drive()
    with drive.used():
        trained = saves.Trained("host", overlap, 8, 0.6, drive, tmp_path)
        found = saves.measured(trained, 0.6, 4)
    assert min(found.beside) <= 1.05
    assert min(found.others) <= 1.05 * min(found.alone)


def test_the_error_of_a_failed_load_holds_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose memory the program holds would be written before the call returns."""
    model = hetmem.manage(torch.nn.Linear(64, 64), hetmem.Budget(device="16MiB", host="16MiB"), device="sim")
    hetmem.save(tmp_path / "file", model)
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC-32") as kept:
        hetmem.load(tmp_path / "file", model)
    real, threads = os.pwritev, set[str]()

    def write(*arguments: Any) -> int:
        threads.add(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", write)
    hetmem.save(tmp_path / "later", model, wait=False).wait()
    assert threads == {"hetmem-checkpoint"}, kept
