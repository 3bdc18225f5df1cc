"""Codes on a device that is no CPU to torch: encoded on the host, decoded by kernels, from host memory and from there.

These run in a process that has `plugin`; `test_in_a_process` starts it.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.pairs import case

pytestmark = [
    pytest.mark.skipif("FAKED_KERNELS" not in os.environ, reason="another process runs these"),
    pytest.mark.filterwarnings("default"),
]
WIDTH, ROWS = 128, 512
DEVICE_CHUNKS = {"host": "256KiB", "codes": "768KiB"}


class Adapted(nn.Module):
    """A frozen table and frozen layers, and a vector in each that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.requires_grad_(False)
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + torch.relu(layer(x)) * scale
        return x.float().square().mean()


def build() -> Adapted:
    torch.manual_seed(0)
    return Adapted().bfloat16()


def managed(frozen: Any, placement: str) -> Any:
    limits = hetmem.Budget(
        device=torch.cuda.memory_allocated() + (40 << 20), host="8MiB", device_chunks=DEVICE_CHUNKS[placement]
    )
    return hetmem.manage(build(), limits, device="cuda", chunk_bytes="32KiB", frozen={"*": frozen})


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(number)).cuda()


@pytest.mark.parametrize(
    ("frozen", "placement"),
    [
        case(frozen, placement, nightly=(frozen, placement) not in (("nf4", "codes"), ("int8", "host")))
        for frozen in ("nf4", "nf4-nested", "mxfp4", "fp8", "int8")
        for placement in DEVICE_CHUNKS
    ],
)
def test_codes_train_and_generate_wherever_they_live(frozen: str, placement: str, tmp_path: Path) -> None:
    model, plain = managed(frozen, placement), build()
    assert testing.of(model).homes("param") == {"device" if placement == "codes" else "host"}
    with torch.no_grad():
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    plain.cuda()
    for number in range(3):
        losses = plain(tokens(number)), model(tokens(number))
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            losses += plain(tokens(number + 9)), model(tokens(number + 9))
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[2], losses[3])
    for mine, its in zip(plain.scales, model.scales, strict=True):
        assert torch.equal(mine.grad.cpu(), its.grad.cpu())
    hetmem.save(tmp_path / "saved", model)
    other = managed(frozen, "codes" if placement == "host" else "host")
    with torch.no_grad():
        other(tokens(0))
    hetmem.load(tmp_path / "saved", other)
    hetmem.park(model)
    hetmem.unpark(model)
    with torch.no_grad():
        assert torch.equal(plain(tokens(5)), model(tokens(5)))
        assert torch.equal(plain(tokens(5)), other(tokens(5)))
    hetmem.release(model)
    for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), its.cpu())


def test_files_of_16_bits_are_encoded_to_codes_on_the_device(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain: Any = build()
    model = managed("nf4", "codes")
    changed = {name: value * 2 for name, value in plain.state_dict().items()}
    save_file(changed, tmp_path / "model.safetensors")
    hetmem.load_weights(tmp_path / "model.safetensors", model)
    twin = copy.deepcopy(plain)
    twin.load_state_dict(changed)
    room = hetmem.Budget(device="64MiB", host="8MiB")
    expected = hetmem.manage(twin, room, device="sim", chunk_bytes="32KiB", frozen={"*": "nf4"})
    for mine, its in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.detach().cpu(), its.detach().cpu())
