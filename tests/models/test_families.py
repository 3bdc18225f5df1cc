"""Families of transformers train managed as in plain torch, bit for bit."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hetmem
from tests.engine.harness import adamws, assert_same_weights
from tests.models.families import FAMILIES, VOCABULARY, build, loss_of


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_in_plain_torch(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has none")
    plain = build(name)
    managed = copy.deepcopy(plain)
    sizes = [4 * p.numel() for p in plain.parameters()]
    room = max(int(0.4 * sum(sizes)), 3 * max(sizes) + (64 << 10))
    limits = hetmem.Budget(device="256MiB", host="256MiB", device_chunks=room)
    hetmem.manage(managed, limits, device=hetmem.SimDevice(), chunk_bytes=16 << 10)
    tokens = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    optimizers = adamws(plain, managed)
    for _ in range(2):
        losses = []
        for model, optimizer in zip((plain, managed), optimizers, strict=True):
            torch.manual_seed(3)
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert_same_weights(plain, managed)
