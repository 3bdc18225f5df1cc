"""A model whose codes have room on the device is whole there: it is decoded into slots, nothing crosses a link, and it
leaves when something else needs the memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from tests.engine import harness
from tests.engine.test_quantised import CHUNK, FORMATS, GPT, TOKENS, budget, decoded_twin, managed, trainable


def pair(frozen: str, room: hetmem.Budget, *, trains: bool = True) -> tuple[GPT, Any]:
    """A plain model with the decoded values of a managed one, whose homes are all on the device."""
    torch.manual_seed(0)
    plain = GPT().bfloat16()
    for parameter in () if trains else plain.parameters():
        parameter.requires_grad_(False)
    model = harness.manage(copy.deepcopy(plain), room, Path(), chunk_bytes=CHUNK, frozen=frozen)
    decoded_twin(plain, model)
    assert testing.of(model).homes() == {"device"}
    assert not testing.of(model).memory().resident
    return plain, model


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, TOKENS, (rows, 8))


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
def test_forwards_decode_what_has_no_slot_and_move_nothing(frozen: str, tmp_path: Path) -> None:
    plain, model = pair(frozen, budget("codes", tmp_path), trains=False)
    memory = testing.of(model).memory()
    slots = (memory.device_chunk_bytes - memory.device_home_bytes) // memory.slot_bytes
    assert slots < len(testing.of(model).chunks())
    for _ in range(3):
        batch = tokens()
        with torch.inference_mode():
            harness.assert_same(plain(batch), model(batch), "the loss")
    report = hetmem.report(model).to_dict()
    assert not any(link["bytes"] for link in report["links"].values())
    assert report["tiers"]["host"]["used_bytes"] == 0
    assert report["tiers"]["device"]["chunk_peak_bytes"] <= memory.device_chunk_bytes
    assert sum(report["tiers"]["device"]["homes"].values()) == memory.device_home_bytes


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("frozen", ["nf4", "int8"])
def test_it_goes_to_host_memory_where_a_batch_needs_the_device(frozen: str, overlap: Any) -> None:
    plain, model = pair(frozen, hetmem.Budget(device="1100KiB", host="8MiB"))
    optimizers = (
        torch.optim.AdamW(trainable(plain), lr=1e-2, fused=True),
        hetmem.AdamW(trainable(model), lr=1e-2, overlap=overlap),
    )
    for rows in (2, 2, 13, 13):
        batch = tokens(rows)
        losses = [module(batch) for module in (plain, model)]
        harness.assert_same(*losses, "the loss")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (testing.of(model).homes("param") == {"device"}) is (rows == 2)
    harness.assert_same_weights(plain, model)
    device = hetmem.report(model).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= device["capacity_bytes"]


def test_it_is_parked_saved_and_loaded_as_codes(tmp_path: Path) -> None:
    plain, model = pair("nf4", budget("codes", tmp_path))
    optimizers = torch.optim.AdamW(trainable(plain), fused=True), hetmem.AdamW(trainable(model), overlap="backward")
    for module, optimizer in zip((plain, model), optimizers, strict=True):
        module(torch.arange(16).view(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert testing.of(model).homes("param") == {"device"}, "buffers that gradients borrow there are no homes"
    hetmem.park(model)
    assert testing.of(model).homes() == {"host"}
    harness.assert_same_weights(plain, model, "parked")
    hetmem.unpark(model)
    assert testing.of(model).homes() == {"device"}
    hetmem.save(tmp_path / "saved", model)
    streamed = managed(GPT().bfloat16(), "nf4", tmp_path, "third")
    hetmem.load(tmp_path / "saved", streamed)
    hetmem.save(tmp_path / "again", streamed)
    other = pair("nf4", budget("codes", tmp_path))[1]
    hetmem.load(tmp_path / "again", other)
    batch = tokens()
    for each in (model, streamed, other):
        harness.assert_same(plain(batch), each(batch), "the loss")
