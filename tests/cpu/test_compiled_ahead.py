"""What updates run on the host is compiled when the optimizer is made: a first step takes no second more for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from tests.cpu.tested import compact, loops, norm, update
from tests.engine.harness import PLACEMENTS, Tower, loss_of, manage, token_batches

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "bfloat16 moments": {"moments": torch.bfloat16},
    "8-bit moments": {"moments": "8bit", "max_grad_norm": 1.0},
}


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_step_compiles(
    name: str,
    overlap: str,
    mixed: torch.dtype | None,
    placement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    kernels = (update._verified_loop, norm._verified_loop, norm._compare_loop)
    for kept in (*kernels, compact._kernel):
        kept.cache_clear()
    compiled: list[str] = []
    compile_loop = loops.compile_loop
    monkeypatch.setattr(loops, "compile_loop", lambda loop: (compiled.append(loop.__name__), compile_loop(loop))[1])
    managed = manage(Tower(), placement, tmp_path, mixed_precision=mixed)
    optimizer = hetmem.AdamW(managed.parameters(), overlap=overlap, **OPTIONS[name])
    assert compiled
    assert any(loop.startswith("square_sum") for loop in compiled) == ("max_grad_norm" in OPTIONS[name])
    before = len(compiled)
    for batch in token_batches(3):
        loss_of(managed, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert compiled[before:] == []


def test_an_optimizer_of_torch_has_nothing_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "compile_loop", None)
    update._verified_loop.cache_clear()
    managed = manage(Tower(), "host", tmp_path)
    hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1)
    update._verified_loop.cache_clear()
