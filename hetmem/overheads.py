"""Measures what hetmem itself costs the thread that trains: per use of a parameter, per transfer, per update.

A model of tiny layers is trained beside a plain one on the simulated device, once in small chunks and once in large
ones: operators and bytes take no time there, so what is left is hetmem's. It decides nothing.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from hetmem.api import manage, release
from hetmem.config import Budget
from hetmem.optim.adamw import AdamW
from hetmem.plan.hardware import ThreadCosts
from hetmem.plan.trace import Tier
from hetmem.runtime import registry

_LAYERS, _WIDTH, _ROWS = 64, 64, 4
_CHUNKS = (1, 8)  # layers in a chunk


def measure(rounds: int = 15) -> ThreadCosts:
    """Seconds of the training thread, medians of `rounds` steps of each chunk size.

    With `u` uses and `f` fetches a step the time beside plain torch's is `u * use_seconds + f * transfer_seconds`: two
    chunk sizes give two equations. A use is an operator's, one of autograd's for a saved weight, or a gradient's.
    """
    uses = _LAYERS + (_LAYERS - 1) + 2 * _LAYERS
    (many, fetches, update), (few, fewer, _) = (_train(layers, rounds) for layers in _CHUNKS)
    transfer = max(0.0, (many - few) / max(1.0, fetches - fewer))
    return ThreadCosts(max(0.0, (few - fewer * transfer) / uses), transfer, update / (2 * _LAYERS))


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _train(layers: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of a forward and backward beyond those of plain torch, fetches within, and seconds of an update."""
    layer_bytes = 4 * _WIDTH * (_WIDTH + 1)
    plain, batch = _layers(), torch.zeros(_ROWS, _WIDTH)
    budget = Budget(
        16 * _LAYERS * layer_bytes, 16 * _LAYERS * layer_bytes, device_chunks=(_LAYERS // 4 + layers) * layer_bytes
    )
    model = manage(_layers(), budget, device="sim", chunk_bytes=-(-layers * layer_bytes // 4096) * 4096)
    optimizer = AdamW(model.parameters())
    residency = registry.of_module(model).runtime.traffic.residency
    seen: list[tuple[float, float, float]] = []
    for _ in range(rounds + 4):
        start = time.perf_counter()
        plain(batch).sum().backward()
        alone = time.perf_counter() - start
        plain.zero_grad()
        fetches = residency.counts.fetches[Tier.DEVICE]
        start = time.perf_counter()
        model(batch).sum().backward()
        streamed = time.perf_counter() - start
        fetches = residency.counts.fetches[Tier.DEVICE] - fetches
        start = time.perf_counter()
        optimizer.step()
        seen.append((streamed - alone, float(fetches), time.perf_counter() - start))
        optimizer.zero_grad()
    release(model)
    extra, fetched, updated = (median(values) for values in zip(*seen[4:], strict=True))
    return extra, fetched, updated
