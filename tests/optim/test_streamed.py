"""Updates on the device with states brought there: the bits of the host's, in bounded memory, behind every other copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.memory.chunk import Chunk
from hetmem.optim import streamed
from hetmem.optim.kernels.streamed import adamw_but_tail, equals_host, tail_of
from hetmem.optim.kernels.update import AdamWStep, update_by_torch
from hetmem.optim.places import spread
from hetmem.plan.balance import Way
from hetmem.plan.hardware import DeviceProfile, HardwareProfile, HostProfile, Rate
from hetmem.plan.links import Link
from hetmem.runtime import registry
from hetmem.runtime.runtime import Runtime
from tests.runtime.harness import CHUNK, Recipe, Tower, pair, token_batches, train_both
from tests.runtime.lazy_device import EarlyDevice, LazyDevice

BF16 = torch.bfloat16
GB = 1e9
SLOW_HOST = HardwareProfile(
    "a host that is slow beside its links",
    DeviceProfile(10**9, 1000 * GB, {"float32": 1e12}),
    HostProfile(10**10, 2, 1000 * GB, 0.001 * GB),
    Rate(100 * GB),
    Rate(100 * GB),
    Rate(1 * GB),
    Rate(1 * GB),
    200 * GB,
)
WIDTH = 57
"""So that the last elements of nearly all parameters are the host's."""

MIXED = pytest.mark.parametrize("mixed", [None, BF16], ids=["float32", "bfloat16"])


def build() -> nn.Module:
    return Tower(width=WIDTH, depth=4)


CHUNKS = 18


def room(mixed: torch.dtype | None = None, slots: float = 2, **changes: Any) -> hetmem.Budget:
    """The device may have a copy of each chunk and, for updates, `slots` of two of them with all roles; no homes."""
    copies = CHUNKS * CHUNK // (1 if mixed is None else 2)
    sizes = {"device": "64MiB", "host": "8MiB", "device_chunks": copies + int(slots * 2 * 4.5 * CHUNK)}
    return hetmem.Budget(**{**sizes, **changes})


def runtime_of(module: nn.Module) -> Runtime:
    return registry.of_module(module).runtime


def updated(module: nn.Module) -> dict[str, int]:
    return {way.value: nbytes for way, nbytes in runtime_of(module).statistics.updated_bytes.items() if nbytes}


def crossed(module: nn.Module) -> dict[Link, int]:
    return {link: use.bytes for link, use in runtime_of(module).traffic.engine.links().items()}


@pytest.mark.pairs
@MIXED
@pytest.mark.parametrize("home_copies", [True, False])
@pytest.mark.parametrize("overlap", ["off", "backward", "speculative", "forward"])
@pytest.mark.parametrize(
    "device",
    [
        hetmem.SimDevice,
        LazyDevice,
        EarlyDevice,
        lambda: hetmem.SimDevice(host_to_device="100MB", device_to_host="100MB"),
    ],
    ids=["threads", "late", "early", "linked"],
)
def test_the_bits_are_those_of_plain_torch(
    device: Any, overlap: str, home_copies: bool, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    limits = room(mixed, home_copies=home_copies)
    plain, managed = pair(build, limits, tmp_path, mixed_precision=mixed, hardware=SLOW_HOST, device=device())
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap),
    )
    train_both(plain, managed, token_batches(5), Recipe(steps=5, mixed=mixed), optimizers=optimizers)
    print(
        runtime_of(managed).memory.layout.chunk_elements,
        len(runtime_of(managed).chunks),
        [c.spec.span for c in runtime_of(managed).chunks],
        updated(managed),
    )
    assert updated(managed)["streamed"] == 3 * sum(p.nbytes for p in managed.parameters())
    assert registry.of_module(managed).runtime.memory.moved_bytes > 0
