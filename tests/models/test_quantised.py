"""Families of transformers with a base in codes train bit for bit as in plain torch over the decoded base."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

import hetmem
from tests.engine.harness import assert_same, assert_same_weights
from tests.models.zoo import MODELS
from tests.pairs import case

EVERYDAY = {"mixtral": "mxfp4", "t5": "fp8"}
"""Stacked experts, and a table that several modules share."""
OTHERS = dict(zip(sorted(MODELS.keys() - EVERYDAY), ("nf4", "nf4-nested", "int8") * len(MODELS), strict=False))


@pytest.mark.parametrize(
    ("family", "frozen"),
    [case(family, frozen, nightly=family in OTHERS) for family, frozen in {**EVERYDAY, **OTHERS}.items()],
)
def test_a_family_trains_over_codes_as_over_their_values(family: str, frozen: Any) -> None:
    torch.manual_seed(1)
    plain, inputs = MODELS[family]()
    for parameter in plain.bfloat16().parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    inputs = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    room = hetmem.Budget(device="64MiB", device_chunks="512KiB", host="64MiB")
    model = copy.deepcopy(plain)
    hetmem.manage(model, room, device="sim", chunk_bytes=16 << 10, sanitize=True, frozen=frozen)
    quantised = 0
    with torch.no_grad():
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            quantised += not torch.equal(mine, its)
            mine.copy_(its)
    assert quantised > 5
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (plain, model)]
    optimizers = torch.optim.AdamW(trained[0], fused=True), hetmem.AdamW(trained[1], overlap="backward")
    for step in range(2):
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(step)
            loss = each(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert_same(*losses, "the loss")
    assert_same_weights(plain, model)
