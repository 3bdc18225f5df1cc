"""Quantised weights in files: a checkpoint has their codes, and files of 16 bits are encoded as they are read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import CheckpointError, ManageError
from tests.engine import harness

FORMATS = ("nf4", "nf4-nested", "mxfp4", "fp8", "int8")
WIDTH = 64


def built(seed: int = 0) -> nn.Sequential:
    """Frozen layers with one that is trained behind them."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 8))).bfloat16()
    model[:2].requires_grad_(False)
    return model


def managed(model: nn.Module, frozen: Any, directory: Path, placement: str = "host") -> Any:
    room: dict[str, Any] = {"device": "8MiB", "host": "8MiB"}
    if placement == "nvme":
        room |= {"host": "128KiB", "nvme": "8MiB", "nvme_dir": directory}
    return harness.manage(model, hetmem.Budget(**room), directory, frozen=frozen)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_training_goes_on_from_a_checkpoint_with_the_same_codes(frozen: str, placement: str, tmp_path: Path) -> None:
    model, other = (managed(built(seed), frozen, tmp_path, placement) for seed in (0, 1))
    optimizers = [hetmem.AdamW(each[2].parameters()) for each in (model, other)]
    train(model, optimizers[0], 1)
    train(other, optimizers[1], 2)  # its copies are of its own codes
    file = tmp_path / "model.safetensors"
    hetmem.save(file, model, optimizers[0])
    hetmem.load(file, other, optimizers[1])
    harness.assert_same_weights(model, other)
    losses = [train(each, optimizer, 3) for each, optimizer in zip((model, other), optimizers, strict=True)]
    harness.assert_same(*losses, "the loss")
    coded = 4 * WIDTH * WIDTH
    assert file.stat().st_size < coded * 2 + 24_000, "codes, not values"


def test_a_checkpoint_of_another_format_changes_nothing(tmp_path: Path) -> None:
    model = managed(built(), "nf4", tmp_path)
    before = testing.of(model).home("0.weight")
    for frozen, saved in (("int8", "codes of int8"), ("nf4-nested", "codes of nf4-nested"), (None, "not quantised")):
        file = tmp_path / "model.safetensors"
        hetmem.save(file, managed(built(1), frozen, tmp_path))
        with pytest.raises(CheckpointError, match=rf"0\.weight is {saved} .* in the checkpoint and codes of nf4 of"):
            hetmem.load(file, model)
        harness.assert_same(before, testing.of(model).home("0.weight"), "the weight")
    hetmem.save(file, model)
    with pytest.raises(CheckpointError, match=r"0\.weight is codes of nf4 .* not quantised in the model.*frozen='nf4'"):
        hetmem.load(file, built())


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_weights_of_16_bits_are_encoded_as_they_are_read(frozen: str, placement: str, tmp_path: Path) -> None:
    """To the codes that `manage` makes of them; what was copied to the device before is dropped."""
    source, expected = built(1), managed(built(1), frozen, tmp_path, placement)
    model = managed(built(), frozen, tmp_path, placement)
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    model(x)
    hetmem.save(tmp_path / "model.safetensors", source)
    assert hetmem.load_weights(tmp_path / "model.safetensors", model) == ([], [])
    harness.assert_same_weights(expected, model)
    harness.assert_same(expected(x), model(x), "the output")


def test_weights_of_another_shape_change_nothing_and_infinities_have_no_code(tmp_path: Path) -> None:
    model, other = managed(built(), "nf4", tmp_path), built(1)
    before, file = testing.of(model).home("0.weight"), tmp_path / "model.safetensors"
    wrong = copy.deepcopy(other)
    wrong[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16), requires_grad=False)
    hetmem.save(file, wrong)
    with pytest.raises(CheckpointError, match=r"1\.weight has the shape"):
        hetmem.load_weights(file, model)
    harness.assert_same(before, testing.of(model).home("0.weight"), "the weight")
    other[1].weight.data[-1, -1] = torch.inf
    hetmem.save(file, other)
    with pytest.raises(CheckpointError, match=r"1\.weight has an infinity or NaN in the file.* partly loaded"):
        hetmem.load_weights(file, model)


@pytest.mark.parametrize("frozen", ["nf4", "mxfp4", "fp8"])
def test_a_base_on_meta_is_never_in_memory_in_16_bits(frozen: str, tmp_path: Path) -> None:
    """Its weights are filled by `load_weights`, and are no numbers until then."""
    expected, file = managed(built(1), frozen, tmp_path), tmp_path / "model.safetensors"
    hetmem.save(file, built(1))
    model = built()
    for layer in model[:2]:
        layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    model[1].bias = nn.Parameter(model[1].bias.to("meta"), requires_grad=False)
    weight = model[0].weight
    managed(model, frozen, tmp_path)
    assert model[0].weight is weight
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    assert not model(x).isfinite().any()
    hetmem.load_weights(file, model)
    harness.assert_same_weights(expected, model)
    harness.assert_same(expected(x), model(x), "the output")


def test_what_is_trained_has_to_have_values(tmp_path: Path) -> None:
    model = built()
    model[2].weight = nn.Parameter(model[2].weight.to("meta"))
    with pytest.raises(ManageError, match=r"2\.weight is on meta, without values, and trained"):
        managed(model, "nf4", tmp_path)
    model[2].weight.requires_grad_(False)
    model.register_buffer("scale", torch.ones(1, device="meta"))
    with pytest.raises(ManageError, match="the buffer scale is on meta"):
        managed(model, "nf4", tmp_path)
