"""What a person sees of the engine at work: its log, labels in torch's profiler, and objects as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hetmem
from hetmem import testing
from hetmem.errors import StateError
from tests.engine.harness import budget, manage, mlp
from tests.forked import Forks

LOGGED = """
import torch, hetmem
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
limits = hetmem.Budget(device="1MiB", device_chunks="48KiB", host="8MiB")
hetmem.manage(model, limits, device="sim", chunk_bytes="16KiB")
optimizer = hetmem.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_engine_logs_what_it_decides_by_the_names_of_parameters(forks: Forks) -> None:
    said = forks.run(LOGGED, environment={"HETMEM_LOG": "engine"})
    assert said.returncode == 0, said.stderr
    lines = [re.sub(r"^ *[\d.]+ ms MainThread: ", "", line) for line in said.stderr.splitlines()]
    assert [line for line in lines if line in ("forward", "backward", "step")] == ["forward", "backward", "step"] * 2
    for words in ("fetch param of chunk . \\(0.weight.* from host to device", "drop param of chunk .* from device"):
        assert any(re.match(words, line) for line in lines), words
    assert any(re.match(r"update param of chunk \d \(3.weight", line) for line in lines)
    assert not forks.run(LOGGED).stderr.count("fetch"), "only if asked"
    refused = forks.run(LOGGED, environment={"HETMEM_LOG": "engin"})
    assert "BudgetError: HETMEM_LOG names engin: known is engine" in refused.stderr


def test_torch_s_profiler_shows_phases_and_fetches_by_name(tmp_path: Path) -> None:
    managed = manage(mlp(), budget("host", tmp_path), tmp_path, sanitize=False)
    optimizer = hetmem.AdamW(managed.parameters())
    for at in range(3):
        with profile(activities=[ProfilerActivity.CPU]) if at == 2 else nullcontext() as seen:
            managed(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    names = {event.name for event in seen.events()}
    assert {"hetmem forward", "hetmem backward", "hetmem step"} <= names
    assert any(re.match(r"hetmem fetch param of chunk \d+ \(.*weight.* from host to device", name) for name in names)


def test_an_error_of_the_bookkeeping_tells_what_has_become_of_the_chunk(tmp_path: Path) -> None:
    managed = manage(mlp(), budget("host", tmp_path), tmp_path, sanitize=False)

    def twice(original: Callable[..., Any], *args: Any) -> Any:
        original(*args)
        return original(*args)

    with testing.around("copy done", twice), pytest.raises(StateError) as raised:
        managed(torch.ones(2, 64))
    said = str(raised.value)
    told = re.sub(r"-[\d.]+ ms ", "", said.partition("; its last events: ")[2]).split("; ")
    assert re.match(r"param of chunk \d \(0.weight", said), said
    assert [re.sub(r"\d+", "N", event) for event in told] == [
        "used without a copy on DEVICE",
        "copy asked for on DEVICE",
        "N bytes begun HOST_TO_DEVICE",
        "N bytes ended HOST_TO_DEVICE",
    ]
