"""Measures the cost of hetmem itself on the training thread: per call, use, gradient, transfer and update.

    python -m benchmarks.thread_costs    # as `thread` of a hardware profile has it

Managed models of tiny layers are trained beside plain ones, and the difference of their times is hetmem's: on the
simulated device operators and bytes take no time, and on a GPU each phase begins idle and is only launched. The models
differ in the size of their chunks and in the functions between the layers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hetmem.api import manage, release
from hetmem.base.config import Budget
from hetmem.base.hardware import ThreadCosts
from hetmem.intercept import registry
from hetmem.optim.adamw import AdamW
from hetmem.schedule.layout import PAGE_ELEMENTS
from hetmem.schedule.trace import Tier
from hetmem.tools.probe import ordinary_torch

_LAYERS, _WIDTH, _ROWS = 64, 63, 4  # weight and bias of a layer just fit in a page of `schedule.layout`
_PAGE_BYTES = 4 * PAGE_ELEMENTS
_CHUNKS = (1, 8)  # layers in a chunk
_KINDS = ((_CHUNKS[0], False), (_CHUNKS[1], False), (_CHUNKS[1], True))  # layers in a chunk, and whether more is called
_WORKSPACE_BYTES = 1 << 28  # cuBLAS takes 32 MiB for each thread and stream that multiplies
_BETWEEN = 6  # calls between two layers: a module and five functions


@dataclass(frozen=True, slots=True)
class Seen:
    """Medians of one model for a forward, a backward and an update: seconds beyond plain torch's, and fetches.
    `queued`: seconds of an update until the first chunk is computed."""

    forward: float
    forward_fetches: float
    backward: float
    backward_fetches: float
    update: float
    renewals: float
    queued: float


class Overheads:
    """Trains the models in turn, as the speed of a shared machine changes.

    Beyond plain torch's time, a forward with `c` calls, `u` uses and `f` fetches takes `c * call_seconds + u *
    use_seconds + f * transfer_seconds`; a backward that unpacks `w` weights and makes `g` gradients takes `(w + g) *
    gradient_seconds + f * transfer_seconds`; and an update of `p` parameters in `n` chunks that renews `r` copies takes
    `p * (queue_seconds + update_seconds) + n * chunk_seconds + r * transfer_seconds`, with all of the queueing first.
    The cost of a call in backward, for the tensors it saved, counts as its forward's.
    """

    def __init__(self, device: str = "sim") -> None:
        self._models = [_Trained(layers, device, between=between) for layers, between in _KINDS]

    def step(self) -> None:
        """Run one step of each model. The first four are not counted: they record traces and warm up."""
        for model in self._models:
            model.step()

    def result(self) -> ThreadCosts:
        """Return the costs by the medians of all counted steps, and release the models."""
        return solved(*(model.result() for model in self._models))


@ordinary_torch()
def measure(rounds: int = 15, device: str = "sim") -> ThreadCosts:
    """Measure the costs on "sim" or "cuda" in `rounds` steps of each model.

    Operators of the CPU use one thread meanwhile: with layers this tiny, synchronizing a pool would take most of the
    time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        overheads = Overheads(device)
        for _ in range(rounds + 4):
            overheads.step()
        return overheads.result()
    finally:
        torch.set_num_threads(threads)


def solved(many: Seen, few: Seen, called: Seen) -> ThreadCosts:
    """Solve for the costs, from the medians with many chunks, with few, and with more calls."""
    fetches = many.forward_fetches + many.backward_fetches - few.forward_fetches - few.backward_fetches
    transfer = max(0.0, (many.forward + many.backward - few.forward - few.backward) / max(1.0, fetches))
    call = max(0.0, (called.forward + called.backward - few.forward - few.backward) / (_BETWEEN * _LAYERS))
    calls = 2 * _LAYERS  # a module and a function each
    use = max(0.0, (few.forward - calls * call - few.forward_fetches * transfer) / _LAYERS)
    asked = (_LAYERS - 1) + 2 * _LAYERS
    gradient = max(0.0, (few.backward - few.backward_fetches * transfer) / asked)
    chunks = [_LAYERS // layers for layers in _CHUNKS]
    updates = [max(0.0, seen.update - seen.renewals * transfer) for seen in (many, few)]
    chunk = max(0.0, (updates[0] - updates[1]) / (chunks[0] - chunks[1]))
    update = max(0.0, (updates[1] - chunks[1] * chunk) / (2 * _LAYERS))
    queue = min(update, few.queued / (2 * _LAYERS))
    return ThreadCosts(use, transfer, update - queue, chunk, call, gradient, queue)


class _Between(nn.Module):
    """Functions without weights between layers, as models have them; some save their inputs for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply them to `x`: [rows, width]."""
        return torch.relu(x.unflatten(-1, (3, -1)).transpose(1, 2).flatten(1)).add(x)


def _layers(*, between: bool) -> nn.Sequential:
    layers: list[Callable[[], nn.Module]] = [lambda: nn.Linear(_WIDTH, _WIDTH), *([_Between] if between else [])]
    return nn.Sequential(*(make() for _ in range(_LAYERS) for make in layers))


class _Trained:
    """A model in chunks of `layers` layers beside a plain one, with room for a quarter of the chunks on the device."""

    def __init__(self, layers: int, device: str, *, between: bool) -> None:
        room = 16 * _LAYERS * _PAGE_BYTES
        self._on_gpu = device == "cuda"
        tensors = device if self._on_gpu else "cpu"
        self._plain, self._batch = _layers(between=between).to(tensors), torch.zeros(_ROWS, _WIDTH, device=tensors)
        taken = torch.cuda.memory_allocated() + _WORKSPACE_BYTES if self._on_gpu else 0
        budget = Budget(room + taken, room, device_chunks=(_LAYERS // 4 + layers) * _PAGE_BYTES)
        chunk_bytes = layers * _PAGE_BYTES
        self._model = manage(_layers(between=between), budget, device=device, chunk_bytes=chunk_bytes)
        self._optimizer = AdamW(self._model.parameters())
        runtime = registry.of_module(self._model).runtime
        self._counts, self._updates = runtime.traffic.residency.counts, runtime.events.updates
        self._seen: list[tuple[float, ...]] = []

    def step(self) -> None:
        """Run and time one step of both models."""
        loss, alone, _ = self._timed(lambda: self._plain(self._batch).sum())
        _, behind, _ = self._timed(loss.backward)
        self._plain.zero_grad()
        loss, forward, fetches = self._timed(lambda: self._model(self._batch).sum())
        _, backward, fetches_back = self._timed(loss.backward)
        before = len(self._updates)
        _, update, renewals = self._timed(self._optimizer.step)
        began = time.perf_counter() - update
        self._optimizer.zero_grad()
        queued = self._updates[before].start - began
        self._seen.append((forward - alone, fetches, backward - behind, fetches_back, update, renewals, queued))

    def _timed(self, phase: Callable[[], Any]) -> tuple[Any, float, int]:
        """Run `phase` on an idle device; return its result, the thread's seconds in it, and its fetches."""
        if self._on_gpu:
            torch.cuda.synchronize()
        fetches, start = self._counts.fetches[Tier.DEVICE], time.perf_counter()
        result = phase()
        seconds = time.perf_counter() - start
        return result, seconds, self._counts.fetches[Tier.DEVICE] - fetches

    def result(self) -> Seen:
        """Return the medians of all steps but the first four, and release the model."""
        release(self._model)
        return Seen(*(float(median(values)) for values in zip(*self._seen[4:], strict=True)))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(device="cuda" if torch.cuda.is_available() else "sim")), indent=2))
