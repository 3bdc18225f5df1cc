"""Measures what hetmem itself costs the thread that trains: per use, per transfer, per update.

A model of tiny layers is trained beside a plain one on the simulated device, once in small chunks and once in large
ones: operators and bytes take no time there, so what is left is hetmem's. It decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from hetmem.api import manage, release
from hetmem.config import Budget
from hetmem.optim.adamw import AdamW
from hetmem.plan.hardware import ThreadCosts
from hetmem.plan.layout import PAGE_ELEMENTS
from hetmem.plan.trace import Tier
from hetmem.runtime import registry

_LAYERS, _WIDTH, _ROWS = 64, 63, 4  # weight and bias of a layer just fit in a page of `plan.layout`
_PAGE_BYTES = 4 * PAGE_ELEMENTS
_CHUNKS = (1, 8)  # layers in a chunk


@dataclass(frozen=True, slots=True)
class _Seen:
    """Medians of one chunk size: seconds of a forward and backward beyond those of plain torch and fetches within, then
    seconds of an update and fetches within that."""

    extra: float
    fetches: float
    update: float
    renewals: float


def measure(rounds: int = 15) -> ThreadCosts:
    """Seconds of the training thread, medians of `rounds` steps of each chunk size.

    With `u` uses and `f` fetches a step the time beside plain torch's is `u * use_seconds + f * transfer_seconds`, and
    an update of `p` parameters in `c` chunks that renews `r` copies takes `p * update_seconds + c * chunk_seconds +
    r * transfer_seconds`: two chunk sizes give two equations each. A use is an operator's, one of autograd's for
    a saved weight, or a gradient's.
    """
    return solved(*(_train(layers, rounds) for layers in _CHUNKS))


def solved(many: _Seen, few: _Seen) -> ThreadCosts:
    """The costs that explain what was seen with many chunks and with few."""
    uses = _LAYERS + (_LAYERS - 1) + 2 * _LAYERS
    transfer = max(0.0, (many.extra - few.extra) / max(1.0, many.fetches - few.fetches))
    use = max(0.0, (few.extra - few.fetches * transfer) / uses)
    chunks = [_LAYERS // layers for layers in _CHUNKS]
    updates = [max(0.0, seen.update - seen.renewals * transfer) for seen in (many, few)]
    chunk = max(0.0, (updates[0] - updates[1]) / (chunks[0] - chunks[1]))
    return ThreadCosts(use, transfer, max(0.0, (updates[1] - chunks[1] * chunk) / (2 * _LAYERS)), chunk)


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _train(layers: int, rounds: int) -> _Seen:
    """What `rounds` steps in chunks of `layers` layers take, with room for a quarter of the chunks on the device."""
    room = 16 * _LAYERS * _PAGE_BYTES
    plain, batch = _layers(), torch.zeros(_ROWS, _WIDTH)
    budget = Budget(room, room, device_chunks=(_LAYERS // 4 + layers) * _PAGE_BYTES)
    model = manage(_layers(), budget, device="sim", chunk_bytes=layers * _PAGE_BYTES)
    optimizer = AdamW(model.parameters())
    counts = registry.of_module(model).runtime.traffic.residency.counts
    seen: list[tuple[float, float, float, float]] = []
    for _ in range(rounds + 4):
        start = time.perf_counter()
        plain(batch).sum().backward()
        alone = time.perf_counter() - start
        plain.zero_grad()
        before = counts.fetches[Tier.DEVICE]
        start = time.perf_counter()
        model(batch).sum().backward()
        streamed = time.perf_counter() - start
        between = counts.fetches[Tier.DEVICE]
        start = time.perf_counter()
        optimizer.step()
        update = time.perf_counter() - start
        seen.append((streamed - alone, between - before, update, counts.fetches[Tier.DEVICE] - between))
        optimizer.zero_grad()
    release(model)
    return _Seen(*(float(median(values)) for values in zip(*seen[4:], strict=True)))
