"""Weights that others saved arrive in a managed model with their bits, or nothing of it changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import hetmem
from hetmem.checkpoint import disk, layout
from hetmem.checkpoint.weights import _is_exact
from hetmem.errors import CheckpointError, StoreError
from tests.checkpoint.models import Awkward, start
from tests.engine.harness import (
    PLACEMENTS,
    WIDTH,
    Recipe,
    assert_same,
    assert_same_weights,
    manage,
    mlp,
    token_batches,
    train_both,
    vector_batches,
)


def saved(module: nn.Module, directory: Path, files: int = 3) -> Path:
    """The state of `module` in that many files and an index, tied tensors once, as others save it."""
    directory.mkdir()
    state: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not any(value is other for other in state.values()):
            state[name] = value
    names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    weight_map = {name: names[number % files] for number, name in enumerate(state)}
    for file in names:
        mine = {name: state[name].detach() for name in state if weight_map[name] == file}
        safetensors.torch.save_file(mine, directory / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_managed_model_gets_the_weights_of_many_files_and_trains_as_a_plain_one(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1 << 10)  # tensors of many blocks
    torch.manual_seed(1)
    plain = Awkward().eval()
    weights = saved(plain, tmp_path / "w")
    torch.manual_seed(2)
    managed = manage(Awkward().eval(), placement, tmp_path)
    managed(*token_batches(1)[0]).backward()  # copies on the device, which are old afterwards
    managed.zero_grad()
    assert hetmem.load_weights(weights, managed) == ([], [])
    assert_same_weights(plain, managed)
    train_both(plain, managed, token_batches(3))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_element_that_is_new_reaches_the_copies(placement: str, tmp_path: Path) -> None:
    plain = mlp()
    managed = manage(copy.deepcopy(plain), placement, tmp_path)
    train_both(plain, managed, vector_batches(2, 4, WIDTH))
    with torch.no_grad():
        plain[0].weight[5, 7] += 1
    hetmem.load_weights(saved(plain, tmp_path / "w"), managed)
    train_both(plain, managed, vector_batches(2, 4, WIDTH))


def test_a_file_an_index_and_a_directory_are_the_same_weights(tmp_path: Path) -> None:
    plain = mlp()
    weights = saved(plain, tmp_path / "w")
    safetensors.torch.save_model(plain, str(tmp_path / "one.safetensors"))
    single = tmp_path / "single"
    single.mkdir()
    safetensors.torch.save_model(plain, str(single / "any.safetensors"))
    both = saved(mlp(), tmp_path / "both")
    safetensors.torch.save_model(plain, str(both / "model.safetensors"))  # is preferred, as others do
    for path in (weights / "model.safetensors.index.json", tmp_path / "one.safetensors", str(single), both):
        other = mlp()
        for parameter in other.parameters():
            nn.init.ones_(parameter)
        hetmem.load_weights(path, other)
        assert_same_weights(plain, other)


def test_weights_of_a_checkpoint_load_without_its_optimizer(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.steps(0, 2)
    run.save(tmp_path / "c")
    other = Awkward()
    assert hetmem.load_weights(tmp_path / "c", other) == ([], [])
    assert_same_weights(run.module, other)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_narrower_weights_widen_exactly(placement: str, tmp_path: Path) -> None:
    plain = mlp().to(torch.bfloat16)
    managed = manage(mlp(), placement, tmp_path, mixed_precision=torch.bfloat16)
    hetmem.load_weights(saved(plain, tmp_path / "w"), managed)
    for expected, got in zip(plain.parameters(), managed.parameters(), strict=True):
        assert_same(expected.float(), got, "widened")
    plain = plain.float()  # trains as masters that begin with these values do
    train_both(plain, managed, vector_batches(2, 4, WIDTH, dtype=torch.bfloat16), Recipe(steps=2, mixed=torch.bfloat16))


def test_a_cast_that_rounds_has_to_be_allowed(tmp_path: Path) -> None:
    plain, managed = mlp(), manage(mlp().to(torch.bfloat16), "host", tmp_path)
    before = [parameter.clone() for parameter in managed.parameters()]
    weights = saved(plain, tmp_path / "w")
    with pytest.raises(CheckpointError, match=r"rounded from torch.float32 to torch.bfloat16.* rounding=True"):
        hetmem.load_weights(weights, managed)
    for expected, got in zip(before, managed.parameters(), strict=True):
        assert_same(expected, got, "unchanged")
    hetmem.load_weights(weights, managed, rounding=True)
    for expected, got in zip(plain.parameters(), managed.parameters(), strict=True):
        assert_same(expected.to(torch.bfloat16), got, "rounded")


FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("narrow", FLOATS[:4], ids=str)
@pytest.mark.parametrize("wide", FLOATS, ids=str)
def test_a_cast_is_exact_if_every_value_comes_back(narrow: torch.dtype, wide: torch.dtype) -> None:
    width = narrow.itemsize * 8
    bits = torch.arange(2**width, dtype=torch.int32).to({8: torch.uint8, 16: torch.int16}[width])
    values = bits.view(narrow).double()
    finite = values[values.isfinite()]
    assert _is_exact(narrow, wide) == bool((finite.to(wide).double() == finite).all())


def test_names_that_do_not_match_are_told_and_nothing_changes(tmp_path: Path) -> None:
    weights = saved(mlp(), tmp_path / "w")
    other = nn.Sequential(*mlp(), nn.Linear(3, 3))
    del other[0]
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"the files have no .*the model has no .*; rename= translates"):
        hetmem.load_weights(weights, other)
    with pytest.raises(CheckpointError, match=r"of another model: the model has no 0\.bias; rename="):
        hetmem.load_weights(weights, nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *mlp()[1:]))
    with pytest.raises(CheckpointError, match=r"of another model: the files have no 0\.bias; rename="):
        hetmem.load_weights(weights, mlp(), rename=lambda name: None if name == "0.bias" else name)
    for name, value in other.state_dict().items():
        assert_same(before[name], value, name)


def test_what_matches_is_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    plain = mlp()
    keys = list(plain.state_dict())
    weights = saved(plain, tmp_path / "w")
    other = mlp()
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    other.register_parameter("new", nn.Parameter(torch.full((3,), 7.0)))
    missing, unexpected = hetmem.load_weights(
        weights, other, strict=False, rename=lambda name: None if name == keys[1] else name + "?" * (name == keys[2])
    )
    assert (missing, unexpected) == (["new", keys[1], keys[2]], [keys[2] + "?"])
    state = other.state_dict()
    for key in keys:
        expected = torch.ones_like(state[key]) if key in keys[1:3] else plain.state_dict()[key]
        assert_same(expected, state[key], key)
    assert_same(torch.full((3,), 7.0), state["new"], "new")


def test_names_are_translated(tmp_path: Path) -> None:
    plain, inner = mlp(), mlp()
    for parameter in inner.parameters():
        nn.init.ones_(parameter)
    weights = saved(plain, tmp_path / "w")
    hetmem.load_weights(weights, nn.ModuleDict({"model": inner}), rename=lambda name: f"model.{name}")
    assert_same_weights(plain, inner)
    with pytest.raises(CheckpointError, match="are both called x"):
        hetmem.load_weights(weights, inner, rename=lambda name: "x")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("names", [["first.weight"], ["second.weight"], ["first.weight", "second.weight"]])
def test_tied_weights_may_be_saved_under_any_of_their_names(names: list[str], tmp_path: Path) -> None:
    value = torch.rand(4, 4)
    safetensors.torch.save_file({name: value.clone() for name in names}, tmp_path / "w")
    model = Tied()
    assert hetmem.load_weights(tmp_path / "w", model) == ([], [])
    assert_same(value, model.second.weight, "tied")


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({f"{name}.weight": torch.rand(4, 4) for name in ("first", "second")}, tmp_path / "w")
    with pytest.raises(CheckpointError, match=r"first.weight and second.weight are one tensor .* differ in the files"):
        hetmem.load_weights(tmp_path / "w", Tied())


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is missing": (lambda path: next(path.glob("*2-of*")).unlink(), "cannot open the checkpoint .*2-of"),
    "a shard is cut off": (
        lambda path: next(path.glob("*2-of*")).write_bytes(next(path.glob("*2-of*")).read_bytes()[:-4]),
        "2-of.*cut off or too long",
    ),
    "the index is no index": (lambda path: next(path.glob("*.json")).write_text("[]"), "is no index"),
    "the index is no text": (lambda path: next(path.glob("*.json")).write_bytes(b"\xff"), "is no index"),
    "the index leads elsewhere": (
        lambda path: next(path.glob("*.json")).write_text('{"weight_map": {"a": "../w/x.safetensors"}}'),
        "'../w/x.safetensors', which is not beside it",
    ),
    "two indices": (lambda path: (path / "b.safetensors.index.json").write_text("{}"), "more than one model"),
    "no safetensors": (
        lambda path: [each.rename(each.with_suffix(".bin")) for each in list(path.iterdir())],
        r"has no \*\.safetensors \(it has model-00001-of-00003.bin",
    ),
}


@pytest.mark.parametrize(("harm", "match"), WRONG.values(), ids=WRONG)
def test_files_that_are_not_whole_are_refused_and_nothing_changes(
    harm: Callable[[Path], Any], match: str, tmp_path: Path
) -> None:
    weights, model = saved(mlp(), tmp_path / "w"), mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    harm(weights)
    with pytest.raises((CheckpointError, StoreError), match=match):
        hetmem.load_weights(weights, model)
    for name, value in model.state_dict().items():
        assert_same(before[name], value, name)


def test_shapes_and_kinds_that_differ_are_named(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.rand(4, 3), "bias": torch.arange(4)}, tmp_path / "w")
    model = nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match=r"weight has the shape \(4, 3\) .*bias is of torch.int64 in the files"):
        hetmem.load_weights(tmp_path / "w", model)
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        hetmem.load_weights(tmp_path / "w", nn.Linear(3, 4, bias=False, device="meta"), strict=False)


def test_a_disk_that_fails_while_values_are_read_is_told_with_what_that_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, model = saved(mlp(), tmp_path / "w"), mlp()
    read_at = disk.read_at

    def fails(fd: int, path: str, memory: memoryview, offset: int) -> None:
        if "2-of" in path and offset > 8:
            raise StoreError(5, f"cannot read {memory.nbytes} bytes at offset {offset} of {path!r}")
        read_at(fd, path, memory, offset)

    monkeypatch.setattr("hetmem.checkpoint.disk.read_at", fails)
    with pytest.raises(StoreError, match=r"2-of.*the model is partly loaded now: load again"):
        hetmem.load_weights(weights, model)
    monkeypatch.undo()
    hetmem.load_weights(weights, model)
