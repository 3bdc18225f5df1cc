"""What does not match, or is damaged, or cannot be read changes nothing, and the error says what and where."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import CheckpointError, HetmemError, StoreError
from tests.checkpoint.models import Run, start
from tests.engine.harness import assert_same_states, assert_same_weights, loss_of, mlp, same_bits
from tests.faults.disk import EIO, FaultyDisk, once
from tests.faults.training import Training


def snapshot(run: Run) -> Any:
    optimizer = copy.deepcopy(run.optimizer.state_dict())
    scale = copy.deepcopy(getattr(run.optimizer, "loss_scale", None))
    return copy.deepcopy(run.module.state_dict()), optimizer, scale and scale.state_dict()


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    run = start(folder, "host", lambda module: hetmem.AdamW(module.parameters(), lr=1e-2, loss_scale=4.0))
    run.steps(0, 2)
    run.save(folder / "c")
    return (folder / "c").read_bytes()


@pytest.fixture
def saved(whole: bytes, tmp_path: Path) -> Path:
    (tmp_path / "c").write_bytes(whole)
    return tmp_path / "c"


@pytest.fixture(params=["host", "plain"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Another run, which has been trained, so that its states could be lost."""
    if request.param == "plain":
        run = start(tmp_path, "plain", lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3), seed=2)
    else:
        run = start(tmp_path, "host", lambda m: hetmem.AdamW(m.parameters(), lr=1e-3, loss_scale="dynamic"), seed=2)
    run.steps(2, 3)
    return run


def refused(run: Run, path: Path, error: type[HetmemError], match: str) -> None:
    """Loading raises, and changes no bit."""
    before = snapshot(run)
    with pytest.raises(error, match=match):
        hetmem.load(path, run.module, run.optimizer)
    assert equal(before, snapshot(run))


# ---- what does not match ---------------------------------------------------------------------------------------------


def wider(run: Run) -> None:
    run.module.blocks[1].up = nn.Linear(48, 97)


def narrower(run: Run) -> None:
    run.module.blocks[1].up.to(torch.bfloat16)


def longer(run: Run) -> None:
    run.module.more = nn.Linear(2, 2)


def shorter(run: Run) -> None:
    del run.module.unused


def unbuffered(run: Run) -> None:
    del run.module.calls


MISMATCHES: dict[str, tuple[Callable[[Run], None], str]] = {
    "shape": (wider, r"blocks\.1\.up\.weight is \(96, 48\) of torch\.float32 in the checkpoint and \(97, 48\) of"),
    "dtype": (narrower, r"blocks\.1\.up\.weight is .*float32 in the checkpoint and .*bfloat16 in the model"),
    "missing": (longer, r"the checkpoint has no more\.bias; the checkpoint has no more\.weight"),
    "unexpected": (shorter, r"the model has no unused\.bias"),
    "buffer": (unbuffered, r"the model has no calls"),
}


@pytest.mark.parametrize(("change", "match"), MISMATCHES.values(), ids=MISMATCHES)
def test_another_model_is_refused_by_the_name_of_its_parameter(
    change: Callable[[Run], None], match: str, saved: Path, tmp_path: Path
) -> None:
    run = start(tmp_path, "plain", lambda module: torch.optim.AdamW(module.parameters()), seed=2)
    run.steps(0, 1)
    change(run)
    before = copy.deepcopy(run.module.state_dict())
    with pytest.raises(CheckpointError, match=match):
        hetmem.load(saved, run.module)
    assert equal(before, run.module.state_dict())


FILLED = {
    "expanded": (lambda: torch.arange(4.0).view(4, 1).expand(4, 5), "mask is expanded in the model"),
    "sparse": (lambda: torch.ones(4, 5).to_sparse(), r"mask is no dense tensor in the model, but a Tensor of .*sparse"),
}


@pytest.mark.parametrize(("buffer", "match"), FILLED.values(), ids=FILLED)
@pytest.mark.parametrize("load", [hetmem.load, hetmem.load_weights])
def test_what_cannot_take_values_is_refused_before_any_is_loaded(
    load: Callable[[Path, nn.Module], object], buffer: Callable[[], torch.Tensor], match: str, tmp_path: Path
) -> None:
    saved, module = nn.Linear(3, 3), nn.Linear(3, 3)
    saved.register_buffer("mask", torch.ones(4, 5))
    module.register_buffer("mask", buffer())
    hetmem.save(tmp_path / "c", saved)
    before = module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path / "c", module)
    assert same_bits(before, module.weight)


def test_one_element_may_have_any_stride(tmp_path: Path) -> None:
    saved, module = nn.Linear(3, 3), nn.Linear(3, 3)
    saved.register_buffer("ids", torch.arange(3).view(1, 3))
    module.register_buffer("ids", torch.zeros(3, dtype=torch.long).as_strided((1, 3), (0, 1)))
    hetmem.save(tmp_path / "c", saved)
    hetmem.load(tmp_path / "c", module)
    assert module.ids.tolist() == [[0, 1, 2]]


def test_tied_weights_that_differ_in_the_checkpoint_are_refused(saved: Path, tmp_path: Path) -> None:
    run = start(tmp_path, "plain", lambda module: torch.optim.AdamW(module.parameters()), seed=2)
    tied = copy.deepcopy(run.module)
    run.module.head.weight = nn.Parameter(run.module.embedding.weight.detach().clone())
    hetmem.save(tmp_path / "equal", run.module)
    hetmem.load(tmp_path / "equal", tied)
    with torch.no_grad():
        run.module.head.weight += 1
    hetmem.save(tmp_path / "differ", run.module)
    before = copy.deepcopy(tied.state_dict())
    with pytest.raises(CheckpointError, match=r"embedding\.weight and head\.weight are one tensor in the model, and"):
        hetmem.load(tmp_path / "differ", tied)
    assert equal(before, tied.state_dict())
    hetmem.load(saved, run.module)  # tied there, and not here
    assert same_bits(run.module.head.weight, run.module.embedding.weight)


Optimizers = dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]]
OPTIMIZERS: Optimizers = {
    "groups": (
        lambda m: hetmem.AdamW([{"params": [p]} for p in m.parameters()]),
        r"the checkpoint has 1 parameter groups, the optimizer \d+",
    ),
    "fewer": (
        lambda m: hetmem.AdamW([p for n, p in m.named_parameters() if n != "norm.bias"]),
        r"norm\.bias is in parameter group 0 of the checkpoint, and not in that of the optimizer",
    ),
    "kind": (
        lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        r"another kind of optimizer: its options are betas, .* those of this SGD dampening, ",
    ),
    "offloaded kind": (
        lambda m: hetmem.optim.offload(torch.optim.SGD, m.parameters(), lr=1.0),
        r"another kind of optimizer",
    ),
    "moments": (
        lambda m: hetmem.AdamW(m.parameters(), moments="8bit"),
        r"exp_avg of \S+ is torch\.float32 without scales .* moments=",
    ),
}


@pytest.mark.parametrize(("optimizer_of", "match"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_another_optimizer_is_refused(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], match: str, saved: Path, tmp_path: Path
) -> None:
    run = start(tmp_path, "host", optimizer_of, seed=2)
    run.steps(2, 3) if "kind" not in match else None
    before = snapshot(run)
    with pytest.raises(HetmemError, match=match):
        hetmem.load(saved, run.module, run.optimizer)
    assert equal(before, snapshot(run))


def test_a_parameter_that_only_this_optimizer_has_is_named(other: Run, tmp_path: Path) -> None:
    optimizer_of = OPTIMIZERS["fewer"][0]
    start(tmp_path, "host", optimizer_of).save(tmp_path / "c")
    match = r"norm\.bias is in parameter group 0 of the optimizer, and not in that of the checkpoint"
    refused(other, tmp_path / "c", CheckpointError, match)


STATES = {
    "foreign": (
        {"step": torch.tensor(1.0), "momentum_buffer": torch.ones(48)},
        r"momentum_buffer of \S+, \(48,\) ",
    ),
    "shape": ({"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}, r"exp_avg of frozen is \(1,\) .* \(48,\) here"),
}


@pytest.mark.parametrize(("state", "match"), STATES.values(), ids=STATES)
def test_states_that_have_no_home_here_are_refused_before_any_is_loaded(
    state: dict[str, torch.Tensor], match: str, tmp_path: Path
) -> None:
    """They were cast and kept beside the homes, and the moments began at zero; one element filled a whole moment."""
    run = start(tmp_path)
    run.steps(0, 1)
    found = run.optimizer.state_dict()
    before = snapshot(run)
    with pytest.raises(hetmem.errors.ManageError, match=match):
        run.optimizer.load_state_dict({**found, "state": {**found["state"], 0: state}})
    assert equal(before, snapshot(run))


def test_a_step_that_failed_halfway_is_saved_after_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, refused = Training(FaultyDisk(), tmp_path, monkeypatch), 0
    for call in range(0, 66, 6):
        batch = next(training.batches)
        for module in (training.plain, training.managed):
            loss_of(module, batch).backward()
        training.left.step()
        training.disk.fault = once(call, EIO)
        try:
            training.step_to_the_end()
        except StoreError:
            if training.right.half_stepped:
                refused += 1
                with pytest.raises(CheckpointError, match="call a step that failed again first"):
                    hetmem.save(tmp_path / "c", training.managed, training.right)
            training.step_to_the_end()
        for optimizer in (training.left, training.right):
            optimizer.zero_grad()
        if refused > 1:
            break
    assert refused > 1
    hetmem.save(tmp_path / "c", training.managed, training.right)
    other = mlp()
    fresh = torch.optim.AdamW(other.parameters())
    hetmem.load(tmp_path / "c", other, fresh)
    assert_same_weights(training.plain, other)
    assert_same_states(training.left, fresh)


def test_a_checkpoint_without_an_optimizer_has_none(other: Run, tmp_path: Path) -> None:
    hetmem.save(tmp_path / "c", other.module)
    refused(other, tmp_path / "c", CheckpointError, r"was saved without an optimizer")
    assert hetmem.load(tmp_path / "c", other.module) is None


def test_8_bit_states_are_in_the_order_of_memory_that_was_saved(tmp_path: Path) -> None:
    def build(memory_format: torch.memory_format) -> tuple[nn.Module, hetmem.AdamW]:
        module = nn.Conv2d(8, 8, 3).to(memory_format=memory_format)
        module = hetmem.manage(module, hetmem.Budget(device="16MiB", host="16MiB", device_chunks="1MiB"), device="sim")
        return module, hetmem.AdamW(module.parameters(), moments="8bit")

    left, right = build(torch.channels_last), build(torch.contiguous_format)
    left[0](torch.randn(2, 8, 8, 8)).sum().backward()
    left[1].step()
    hetmem.save(tmp_path / "c", *left)
    with pytest.raises(CheckpointError, match=r"weight has the strides .* build the model with the memory format"):
        hetmem.load(tmp_path / "c", *right)
    hetmem.load(tmp_path / "c", right[0])  # weights go by their indices
    assert same_bits(left[0].weight, right[0].weight)


# ---- what is damaged -------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_flipped_bit_of_any_tensor_is_seen(saved: Path, other: Run, whole: bytes) -> None:
    start_of_data = data_start(saved)
    header = json.loads(whole[8:start_of_data])
    names = ["embedding.weight", "calls", "optimizer:norm.bias:exp_avg", "optimizer:norm.bias:step", "extra:rng"]
    for name in names:
        offset = start_of_data + header[name]["data_offsets"][0]
        flip(saved, offset)
        match = rf"{re.escape(repr(str(saved)))} is damaged: .* at offset {offset}, of {re.escape(name)}, .*CRC-32"
        refused(other, saved, CheckpointError, match)
        saved.write_bytes(whole)


def test_weights_alone_are_not_kept_from_anybody_by_a_damaged_state(saved: Path, other: Run) -> None:
    """What is not wanted is not read."""
    header = json.loads(saved.read_bytes()[8 : data_start(saved)])
    flip(saved, data_start(saved) + header["optimizer:norm.bias:exp_avg"]["data_offsets"][0])
    before = snapshot(other)
    hetmem.load(saved, other.module)
    after = snapshot(other)
    assert not equal(before[0], after[0])
    assert equal(before[1:], after[1:])


def test_a_changed_number_in_the_header_is_seen(saved: Path, other: Run, whole: bytes) -> None:
    """Learning rates and step numbers lie there."""
    saved.write_bytes(whole.replace(b"0.005", b"0.006", 1))
    assert saved.read_bytes() != whole
    refused(other, saved, CheckpointError, "header is damaged: CRC-32")


def test_a_file_that_is_cut_off_is_refused(saved: Path, other: Run, whole: bytes) -> None:
    for keep in (0, 7, 100, 5000, len(whole) - 1):
        saved.write_bytes(whole[:keep])
        refused(other, saved, CheckpointError, r"cut off|is no file of safetensors")
    saved.write_bytes(whole + b"\0")
    refused(other, saved, CheckpointError, r"too long")


def test_another_version_is_refused_by_its_number(saved: Path, other: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetmem.checkpoint.layout.VERSION", "2")
    other.save(saved)
    monkeypatch.undo()
    refused(other, saved, CheckpointError, "it has version '2' of the format, and this hetmem reads version 1")


def test_a_missing_file_a_directory_and_a_foreign_file_are_refused(tmp_path: Path, other: Run) -> None:
    refused(other, tmp_path / "none", StoreError, r"cannot open the checkpoint '.*none': No such file")
    refused(other, tmp_path, HetmemError, re.escape(str(tmp_path)))
    (tmp_path / "pickle").write_bytes(b"PK" * 5000)
    refused(other, tmp_path / "pickle", CheckpointError, r"is no file of safetensors, or cut off$")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_refused_and_the_way_out_is_said(zipped: bool, tmp_path: Path, other: Run) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    refused(other, tmp_path / "model.pt", CheckpointError, r"one of torch\.save.*weights_only=True.*load_state_dict")


# ---- disks that fail while it is read --------------------------------------------------------------------------------


class Reads:
    """`os.preadv` that fails at the `nth` call, or gives less than asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at: int = -1, at_most: int = 1 << 40) -> None:
        self.calls, self._fails_at, self._at_most, self._real = 0, fails_at, at_most, os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.calls += 1
        if self.calls - 1 == self._fails_at:
            raise OSError(errno.EIO, "Input/output error")
        return self._real(fd, [buffers[0][: self._at_most]], offset)


def test_reads_that_give_less_than_asked_go_on(saved: Path, other: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Reads(patch, at_most=1000)
        other.load(saved)
    expected = start(saved.parent, seed=3)
    expected.load(saved)
    assert equal(other.module.state_dict(), expected.module.state_dict())


def test_a_disk_that_fails_at_any_read_is_no_half_loaded_model(
    saved: Path, other: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: nothing has changed, or the error says that the model is partly loaded and must be loaded
    again; and that makes it whole."""
    with monkeypatch.context() as patch:
        counted = Reads(patch)
        hetmem.load(saved, other.module, other.optimizer)
    expected = snapshot(other)
    other.steps(3, 4)
    before, kinds = snapshot(other), []
    for number in [*range(0, counted.calls, 7), counted.calls - 1]:
        with monkeypatch.context() as patch:
            Reads(patch, fails_at=number)
            with pytest.raises(StoreError, match=rf"cannot read \d+ bytes at offset \d+ of '{saved}'") as caught:
                hetmem.load(saved, other.module, other.optimizer)
        assert caught.value.errno == errno.EIO
        kinds.append("partly loaded now: load again" in str(caught.value))
        if kinds[-1]:
            hetmem.load(saved, other.module, other.optimizer)
            assert equal(expected, snapshot(other))
            break
        assert equal(before, snapshot(other))
    tensors = len(json.loads(saved.read_bytes()[8 : data_start(saved)])) - 1
    assert kinds[-1]
    assert len(kinds) * 7 >= tensors, "the first reading, which checks everything, was not reached"
