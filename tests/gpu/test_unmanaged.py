"""`hetmem.AdamW(budget=…)` over a model that lies on a GPU: gradients come to the host, states stay there, weights go
back. Its bits are those of torch's fused AdamW on the processor, from the gradients of the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [layer for _ in range(3) for layer in (nn.Linear(70, 70), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(70, 301)).to("cuda")


@pytest.mark.parametrize("nvme", [False, True])
@pytest.mark.parametrize("limit", [None, 1e-3])
def test_a_model_on_the_device_is_stepped_with_the_bits_of_the_host(
    nvme: bool, limit: float | None, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"host": "1GiB"}
    if nvme:
        sizes = {"host": "300KiB", "nvme": "16MiB", "nvme_dir": tmp_path}
    model = _build()
    twins = [nn.Parameter(p.detach().cpu()) for p in model.parameters()]
    plain = torch.optim.AdamW(twins, lr=1e-2, fused=True)
    before = torch.cuda.memory_allocated()
    optimizer: Any = hetmem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=limit, budget=hetmem.Budget(**sizes))
    for step in range(6):
        torch.manual_seed(step)
        model(torch.randn(4, 70, device="cuda")).square().mean().backward()
        for twin, ours in zip(twins, model.parameters(), strict=True):
            twin.grad = None if ours.grad is None else ours.grad.cpu()
        optimizer.step()
        if limit is not None:
            for twin in twins:
                assert twin.grad is not None
                twin.grad.mul_(min(1.0, limit / (optimizer.grad_norm + 1e-6)))
        plain.step()
        optimizer.zero_grad()
    assert torch.cuda.memory_allocated() <= before + 4096, "a state lies on the device"
    for twin, ours in zip(twins, model.parameters(), strict=True):
        assert torch.equal(twin, ours.detach().cpu())
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(plain.state[twin][name], optimizer.state[ours][name])
