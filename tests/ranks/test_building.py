"""Models that each rank of a group builds, or fills with weights from files: one copy for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hetmem
from hetmem.errors import PeerError
from hetmem.testing import ranks

BUDGET = hetmem.Budget(device="64MiB", host="256MiB", device_chunks="32MiB")
WIDTH, LAYERS = 1024, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


def memory(kind: str) -> int:
    """Bytes that this process has: RssAnon, shared with no other; VmRSS, all; or VmHWM, the peak of that."""
    return int(Path("/proc/self/status").read_text().split(f"{kind}:")[1].split()[0]) << 10


class Stack(nn.Module):
    """Layers of 4 MiB; `grown` is what their values take of this process's memory once all are built."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        nn.Linear(WIDTH, WIDTH)  # what torch itself takes
        before = memory("RssAnon")
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean += rank
        self.grown = memory("RssAnon") - before
        if rank == 2:
            raise LookupError("no such file")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def first_weight(model: nn.Module) -> Tensor:
    return model.layers[0].weight.detach()[:2].clone()


def built(rank: int, file: str) -> tuple[tuple[int, int, int], Tensor, Tensor, list[str], Tensor]:
    made = hetmem.managed(BUDGET, device="sim", chunk_bytes="4MiB")(Stack)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, all_before = memory("RssAnon"), memory("VmRSS")
    model = made(rank)
    after, peak = memory("RssAnon") - before, memory("VmHWM") - all_before
    initial, mean = first_weight(model), model.norm.running_mean.clone()
    model(torch.ones(2, WIDTH)).sum().backward()
    missing = hetmem.load_weights(file, model, strict=False).missing_keys
    model.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    loaded = torch.stack([layer.weight.detach()[0, 0] for layer in model.layers])
    hetmem.release(model)
    return (model.grown, after, peak), initial, mean, missing, loaded


def fails(rank: int) -> str:
    made = hetmem.managed(BUDGET, device="sim")(Stack)
    with pytest.raises((PeerError, LookupError)) as raised:
        made(rank + 1)
    return str(raised.value)


def test_others_hold_one_submodule_of_what_rank_0_builds_and_weights_are_read_once(tmp_path: Path) -> None:
    weights = {f"layers.{at}.weight": torch.full((WIDTH, WIDTH), at + 0.5) for at in range(LAYERS)}
    save_file(weights, tmp_path / "weights.safetensors")
    torch.manual_seed(0)
    expected = Stack(0)
    of_rank_0, of_rank_1 = ranks(2, built, str(tmp_path / "weights.safetensors"))
    for _, initial, mean, missing, loaded in (of_rank_0, of_rank_1):
        assert torch.equal(initial, first_weight(expected))
        assert torch.equal(mean, torch.zeros(WIDTH))
        assert missing == [
            "norm.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        ]
        assert loaded.tolist() == [at + 0.5 for at in range(LAYERS)]
    grown, after, peak = zip(of_rank_0[0], of_rank_1[0], strict=True)
    assert grown[0] >= LAYERS * LAYER_BYTES
    assert grown[1] < 2 * LAYER_BYTES, "the values of one layer, and of the one before"
    assert max(after) < 2 * LAYER_BYTES, "homes are shared, and nothing else is left"
    assert peak[0] - peak[1] < (LAYERS + 5) * LAYER_BYTES, "values leave as their homes have them"


def test_a_constructor_that_fails_on_one_rank_is_told_on_all() -> None:
    told = ranks(2, fails)
    assert told == ["rank 1 could not build the model: LookupError: no such file", "no such file"]
