"""What tests of `hetmem.cpu` and `hetmem.quantised` use of them: the one file that follows when they move. For this
folder only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hetmem.cpu import (
    GROUP_ELEMENTS,
    TILE_ELEMENTS,
    AdamWStep,
    Task,
    adamw_on_device,
    adamw_tasks,
    kernel_name,
    loops,
    norm,
    small_states,
    square_sum_tasks,
    total,
    workers,
)
from hetmem.cpu import adamw as update
from hetmem.cpu.adamw import adamw_as_on_host, equals_host, update_by_torch
from hetmem.cpu.loops import BLOCK, RUN
from hetmem.cpu.workers import WorkerPool, one_torch_thread
from hetmem.cuda import kernels
from hetmem.cuda.dequantise import parts_of, torch_dequantise
from hetmem.cuda.kernels import torch_adamw, torch_square_sums
from hetmem.quantised.decode import decode, decode_tasks
from hetmem.quantised.encode import NotFiniteError, encode
from hetmem.schedule.formats import ALL_FORMATS, PIECE_ELEMENTS, Coding

__all__ = [
    "ALL_FORMATS",
    "BLOCK",
    "GROUP_ELEMENTS",
    "PIECE_ELEMENTS",
    "RUN",
    "TILE_ELEMENTS",
    "AdamWStep",
    "Codes8Bit",
    "Coding",
    "NotFiniteError",
    "WorkerPool",
    "adamw",
    "adamw_as_on_host",
    "adamw_compact_tasks",
    "adamw_on_device",
    "adamw_tasks",
    "decode",
    "decode_tasks",
    "encode",
    "equals_host",
    "in_one",
    "kernel_name",
    "kernels",
    "loops",
    "norm",
    "one_torch_thread",
    "parts_of",
    "small_states",
    "square_sum",
    "square_sum_tasks",
    "torch_adamw",
    "torch_dequantise",
    "torch_square_sums",
    "total",
    "update",
    "update_by_torch",
    "workers",
]


class Codes8Bit(NamedTuple):
    """A moment in 8 bits."""

    codes: torch.Tensor
    scales: torch.Tensor


Moment = torch.Tensor | Codes8Bit


def adamw_compact_tasks(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    copy: torch.Tensor | None = None,
    *,
    key: int,
) -> list[Task]:
    both = (exp_avg, exp_avg_sq)
    moments = [each for moment in both for each in (moment if isinstance(moment, Codes8Bit) else [moment])]
    return small_states.prepare_small(param, grad, moments, copy, key=key)(step)


def in_one(step: AdamWStep, key: int, first: int, *tensors: torch.Tensor | None) -> None:
    """The update on small states of a tile that begins at element `first`."""
    loop = small_states._kernel(tuple(None if tensor is None else tensor.dtype for tensor in tensors))
    arrays = (None if tensor is None else workers.as_array(tensor) for tensor in tensors)
    loop(update.scalars_of(step), small_states._keys(key, step.step, first), np.int64(first), *arrays)


def adamw(pool: WorkerPool, *of: Any) -> None:
    pool.run(adamw_tasks(*of))


def square_sum(pool: WorkerPool, grads: Sequence[torch.Tensor]) -> float:
    made = [square_sum_tasks(grad) for grad in grads]
    pool.run([task for tasks, _ in made for task in tasks])
    return total(sums for _, sums in made)
