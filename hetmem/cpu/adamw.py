"""AdamW on flat tensors with the bits of torch's fused kernel: on the host, as tasks over tiles; on a device, with the
bits of torch there or with the host's.

The reference is `torch.optim.AdamW(fused=True)` on the CPU. Its kernel computes, in the parameter's dtype,

    m = fma(1 - b1, g - m, m)        v = fma((1 - b2) * g, g, b2 * v)
    p = p * (1 - lr * wd) + (-lr / bc1 * m) / (sqrt(v) / sqrt(bc2) + eps)        bc = 1 - b ** step

with scalars made in fp64 and rounded once. The loop in loops.py and the kernel of `hetmem.cuda` compute the same. Each
variant of them is compared with torch before it may change real memory. If the loop cannot be built, or torch was built
without fma and rounds otherwise, torch's own kernel runs instead, with the same bits and more passes; if the device's
kernel differs, the host updates.

Note "tail": torch's kernel on the host rounds v differently in the elements behind its last full vector. The length of
a vector depends on the CPU and on how torch was built, so for the device it is found by trying.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch

from hetmem import torch_private
from hetmem.base.units import round_down
from hetmem.cpu import loops
from hetmem.cpu.workers import TILE_ELEMENTS, Task, as_array, check_flat, cut, most_threads, one_torch_thread
from hetmem.cuda import kernels
from hetmem.cuda.backend import Backend, TorchBackend, backend

# Vectors have at most 16 float32, and every width divides 16, so torch's kernel treats the last `numel % 16` elements
# alike alone and within the whole: see note "tail".
WIDEST_VECTOR = 16
_SCALED_BYTES = 64 << 20

_GRADIENT_COLUMN = 5
"""Where a row of tiles has the address of the gradient: see `loops.adamw_tiles`."""

SHARED_TILE_ELEMENTS = 64 * 1024
"""Elements of a tile of `loops.adamw_tiles`: some hundred microseconds, as the last ones keep single threads busy."""

# What the loops read and write beside the states.
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
COPIES = (None, *GRADIENTS)


@dataclass(frozen=True, slots=True, eq=False)
class AdamWStep:
    """The hyper-parameters of one update, as `torch.optim.AdamW` names them; `step` is the one being made, from 1.

    Each gradient is widened to float32 and multiplied by float32(grad_scale) before anything else: the product of an
    unscaling and a clip factor.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False
    grad_scale: float = 1.0


def adamw_tasks(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
) -> list[Task]:
    """Return tasks that update `param`, `exp_avg` and `exp_avg_sq` in place, and write `param`, rounded, to
    `compute_copy` if given. They cover disjoint elements, to be run once each, in any order, on any thread, and hold
    the memory.

    All are 1-D, contiguous, on the CPU and of one length. The moments have the dtype of `param`; `grad` and
    `compute_copy` may have any floating dtype. float32 with gradient and copy in float32, bfloat16 or float16 runs in
    one pass; everything else takes torch's kernel, on one thread per task. The results equal
    `torch.optim.AdamW(fused=True)` with `(grad.float() * grad_scale).to(param.dtype)`, and
    `param.to(compute_copy.dtype)`, bit for bit (a NaN is a NaN of any payload). Compiles on first use.
    """
    copies = () if compute_copy is None else (compute_copy,)
    return PreparedRuns([(param, grad, exp_avg, exp_avg_sq, *copies)])([step])


Flats = tuple[torch.Tensor, ...]
"""The flat tensors of one parameter: itself, its gradient, two moments and, if there is one, its 16-bit copy."""


class PreparedRuns:
    """Makes the `adamw_tasks` of all `runs` (parameter, gradient, two moments, and perhaps a copy) for a step of each;
    call it once a step, when the tasks of the last one have ended. It holds the memory.

    Runs of one kind are updated by a few tasks, which share their tiles: see `loops.adamw_tiles`.
    """

    def __init__(self, runs: Sequence[Flats], own: Sequence[Sequence[slice] | None] = ()) -> None:
        """Prepare `runs`; `own`: of each the elements to update, in parts that end within no vector; None = all."""
        self._runs = [*runs]
        threads = most_threads()
        self._gradients = np.array([run[1].data_ptr() for run in runs])
        tables: dict[tuple[torch.dtype, torch.dtype, torch.dtype | None], list[tuple[int, ...]]] = {}
        owners: dict[tuple[torch.dtype, torch.dtype, torch.dtype | None], list[int]] = {}
        self._rest: list[tuple[int, slice, list[Any]]] = []
        for number, flats in enumerate(runs):
            check_flat(*flats)
            param, grad, exp_avg, exp_avg_sq, *copies = flats
            kind = param.dtype, grad.dtype, copies[0].dtype if copies else None
            body = 0 if isinstance(_verified_loop(*kind), str) else round_down(param.numel(), WIDEST_VECTOR)
            mine = own[number] if own else None
            for place in _tiles(mine, body, param.numel(), TILE_ELEMENTS):
                self._rest.append((number, place, cut(flats, place, [1] * len(flats))))
            if places := _tiles(mine, 0, body, SHARED_TILE_ELEMENTS):
                bases = [(flat.data_ptr(), flat.itemsize) for flat in (param, exp_avg, exp_avg_sq, grad, *copies)]
                tables.setdefault(kind, []).extend(
                    (
                        0,
                        place.stop - place.start,
                        *(base + place.start * itemsize for base, itemsize in bases),
                        *(() if copies else (0,)),
                    )
                    for place in places
                )
                owners.setdefault(kind, []).extend([number] * len(places))
        self._shared = [
            (
                _verified_loop(*kind),
                np.array(table, np.int64),
                np.array(owners[kind]),
                min(len(table), threads),
                *_samples(kind),
            )
            for kind, table in tables.items()
        ]

    def gradients_in(self, grads: Sequence[torch.Tensor]) -> None:
        """Read the gradients of the next steps from `grads`, tensors like those before."""
        addresses = np.array([*map(torch.Tensor.data_ptr, grads)])
        shifts, self._gradients = addresses - self._gradients, addresses
        self._runs = [(run[0], grad, *run[2:]) for run, grad in zip(self._runs, grads, strict=True)]
        for _, table, owner, *_ in self._shared:
            table[:, _GRADIENT_COLUMN] += shifts[owner]
        for number, place, tile in self._rest:
            tile[1] = grads[number][place]

    def __call__(self, steps: Sequence[AdamWStep]) -> list[Task]:
        """Return the tasks for `steps`, one for each run."""
        made: list[Task] = []
        for number, _, tile in self._rest:
            made += (partial(update_by_torch, steps[number], *tile),)
        distinct = (*dict.fromkeys(steps),)
        alike, scalars = not distinct[1:], _table_of(distinct)
        numbers = dict(zip(distinct, range(len(steps)), strict=False))
        for loop, table, owner, tasks, *samples in self._shared:
            table[:, 0] = 0 if alike else np.array([*map(numbers.__getitem__, steps)])[owner]
            task = SharedTiles(loop, (scalars, table, np.zeros(1, np.int64), *samples), self._runs)
            made += (task,) * tasks
        return made


def _tiles(own: Sequence[slice] | None, start: int, end: int, size: int) -> list[slice]:
    """Split what `own` has of elements [start, end), None = all, into slices of `size`."""
    spans = [(start, end)] if own is None else [(max(start, part.start), min(end, part.stop)) for part in own]
    return [slice(at, min(at + size, last)) for first, last in spans for at in range(first, last, size)]


class SharedTiles:
    """A task of several threads: each call of `loop` runs tiles until none is left. Holds the `memory` to which the
    tiles have addresses."""

    __slots__ = ("_arguments", "_loop", "_memory")

    def __init__(self, loop: loops.Loop, arguments: tuple[Any, ...], memory: object) -> None:
        self._loop, self._arguments, self._memory = loop, arguments, memory

    def __call__(self) -> None:
        self._loop(*self._arguments)


def _samples(kind: tuple[torch.dtype, torch.dtype, torch.dtype | None]) -> list[Any]:
    """Return empty arrays of the types of gradient and copy."""
    return [None if dtype is None else as_array(torch.empty(0, dtype=dtype, device="cpu")) for dtype in kind[1:]]


def adamw_on_device(
    step: AdamWStep,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    counts: list[torch.Tensor],
) -> None:
    """Update tensors of any layout, alike in one another, in one call for each dtype: with the bits of
    `torch.optim.AdamW(fused=True)` on their device.

    `counts`, in place of `step.step`: float32 numbers in host memory. A `grad_scale` other than 1 takes scaled copies
    of the gradients, of about `_SCALED_BYTES` at a time, the largest first: if one has no room, nothing has changed.
    """
    if params[0].device.type != "cpu":
        counts = _on_device(counts, params[0].device)
    lists: Any = [params, grads, exp_avgs, exp_avg_sqs, counts]
    grouped: Any = torch_private.group_by_device_and_dtype(lists, False)  # as torch's own does
    for alike, _ in grouped.values():
        if step.grad_scale == 1.0:
            _fused(step, *alike)
            continue
        parts = list(_batches(alike[0]))
        for part in sorted(parts, key=lambda part: -sum(param.nbytes for param in alike[0][part])):  # largest first
            some, given, *others = (tensors[part] for tensors in alike)
            scaled = [_scaled(grad, step).to(param.dtype) for grad, param in zip(given, some, strict=True)]
            _fused(step, some, scaled, *others)


def _on_device(counts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return numbers in host memory as tensors on `device`, one for each value, which the kernel only reads. They are
    filled there: a copy from pageable memory would wait for all earlier work of the device."""
    numbers = torch.stack(counts).tolist()
    there = {number: torch.full((), number, dtype=torch.float32, device=device) for number in set(numbers)}
    return [there[number] for number in numbers]


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Split `tensors` into runs of about `_SCALED_BYTES`."""
    start = nbytes = 0
    for index, tensor in enumerate(tensors):
        if nbytes >= _SCALED_BYTES:
            yield slice(start, index)
            start, nbytes = index, 0
        nbytes += tensor.nbytes
    yield slice(start, len(tensors))


def kernel_name() -> str:
    """Return what updates float32 parameters here: "numba", or "torch" and why. Compiles the kernel if necessary."""
    loop = _verified_loop(torch.float32, torch.float32, None)
    return f"torch ({loop})" if isinstance(loop, str) else "numba"


@lru_cache(maxsize=16)  # one step updates many tensors
def scalars_of(step: AdamWStep) -> tuple[np.float32, ...]:
    """Return the loops' scalars, each rounded to float32 where torch rounds it."""
    lerp = np.float32(1 - step.beta1)
    scale = np.float32(step.grad_scale)
    return (
        -scale if step.maximize else scale,  # a change of sign commutes with every rounding
        # torch's compiler contracts this to one fma: exact until the one rounding to float64.
        np.float32(float(1 - Fraction(step.lr) * Fraction(step.weight_decay))),
        # lerp interpolates from its nearer end: from m below a weight of 1/2, else back from g (a weight <= 0).
        lerp if lerp < 0.5 else lerp - np.float32(1),
        np.float32(step.beta2),
        np.float32(1 - step.beta2),
        np.float32(math.sqrt(1 - step.beta2**step.step)),
        np.float32(step.eps),
        np.float32(-(step.lr / (1 - step.beta1**step.step))),
    )


@lru_cache(maxsize=16)
def _table_of(steps: tuple[AdamWStep, ...]) -> Any:
    """Return the `scalars_of` each of `steps`, as the rows of an array that nothing writes to."""
    return np.array([*map(scalars_of, steps)], np.float32)


# ---- The choice between loop and torch, and torch's kernel. ----

TRIED_STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.01, step=3, grad_scale=0.3)
"""The step of trials."""


@cache
def _verified_loop(param: torch.dtype, grad: torch.dtype, compute_copy: torch.dtype | None) -> loops.Loop | str:
    """Return the compiled loop for these dtypes once it has given torch's bits, or why torch's kernel must run."""
    if param != torch.float32 or grad not in GRADIENTS or compute_copy not in COPIES:
        return f"no loop for {param}, {grad}, {compute_copy}"
    return loops.verified(loops.adamw_tiles, lambda loop: _equals_torch(loop, grad, compute_copy))


def _equals_torch(loop: loops.Loop, grad_dtype: torch.dtype, copy_dtype: torch.dtype | None) -> bool:
    """Return whether `loop` and torch's kernel agree in every bit on a thousand elements."""
    angles = torch.linspace(0, 700, 1024, dtype=torch.float64, device="cpu")
    param, grad, exp_avg, exp_avg_sq = (angles.add(shift).sin().float() for shift in range(4))
    copy = None if copy_dtype is None else torch.empty_like(param, dtype=copy_dtype)
    tensors = (param, grad.to(grad_dtype), exp_avg, exp_avg_sq.square(), copy)
    given = [tensor for tensor in tensors if tensor is not None]
    expected = [tensor.clone() for tensor in given]
    update_by_torch(TRIED_STEP, *expected)
    in_rows = param, *given[2:4], given[1], *given[4:]
    half = param.numel() // 2  # two tiles
    tiles = [[0, half, *(flat[part * half :].data_ptr() for flat in in_rows), 0][:7] for part in range(2)]
    scalars, taken = np.array([scalars_of(TRIED_STEP)], np.float32), np.zeros(1, np.int64)
    loop(scalars, np.array(tiles, np.int64), taken, *_samples((torch.float32, grad_dtype, copy_dtype)))
    return all(map(torch.equal, given, expected))


def update_by_torch(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
) -> None:
    """Update one tile by torch's fused kernel, on this thread alone; its casts stay in the cache."""
    with one_torch_thread(), torch.no_grad():
        g = _scaled(grad.detach(), step).to(param.dtype)
        p, m, v = (tensor.detach() for tensor in (param, exp_avg, exp_avg_sq))
        _fused(step, [p], [g], [m], [v], [torch.tensor(float(step.step), dtype=torch.float32, device="cpu")])
        if compute_copy is not None:
            compute_copy.detach().copy_(p)


def _scaled(grad: torch.Tensor, step: AdamWStep) -> torch.Tensor:
    """Return `grad` times `step.grad_scale`, in float32 unless it is wider."""
    if step.grad_scale == 1.0:
        return grad
    return grad.to(torch.promote_types(grad.dtype, torch.float32)) * float(np.float32(step.grad_scale))


def _fused(
    step: AdamWStep,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    torch_private.fused_adamw(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        lr=step.lr, beta1=step.beta1, beta2=step.beta2, weight_decay=step.weight_decay, eps=step.eps,
        amsgrad=False, maximize=step.maximize,
    )  # fmt: skip


# ---- On a device, with the bits of the host. ----

_SIMULATED = TorchBackend("the device is simulated")
_WIDTHS = (16, 8, 4, 2, 1)
_TRIED = (1024, *(31,) * 16)
"""Elements of the tensors of a trial: whole vectors of any dtype, and 16 times a tail."""
_SAMPLE = 1 << 16
"""In bfloat16 the two ways to round differ in one of about two thousand elements."""


def kernels_of(device: torch.device) -> Backend:
    """Return the backend that updates on `device`."""
    return backend() if device.type == "cuda" else _SIMULATED


def adamw_as_on_host(step: AdamWStep, flats: Flats) -> None:
    """Update whole parameters on a device that `equals_host`, on its current stream."""
    param, _, _, _, *copy = flats
    width = _width(param.device, param.dtype, copy[0].dtype if copy else None)
    assert width, f"{param.device} does not compute as the host does"
    kernels.adamw(kernels_of(param.device), scalars_of(step), *flats, tail=param.numel() % width)


def equals_host(device: torch.device, dtype: torch.dtype, copy_dtype: torch.dtype | None) -> bool:
    """Return whether `adamw_as_on_host` of parameters of `dtype`, with a copy of `copy_dtype` (None: without), gives
    the bits of torch's kernel on the host: tried once, on about 1500 elements. False if it cannot run at all."""
    return _width(device, dtype, copy_dtype) > 0


@cache
def _width(device: torch.device, dtype: torch.dtype, copy_dtype: torch.dtype | None) -> int:
    """Return the length of torch's vectors on the host with which `device` computes the same; 0 if there is none."""
    # In torch a vector of 16-bit elements has twice as many as one of float32.
    widths = _WIDTHS if dtype is torch.float32 else (2 * _width(device, torch.float32, None),)
    try:
        given = _trial(dtype, copy_dtype)
        return next((width for width in widths if width and _agrees(device, given, width)), 0)
    except Exception:  # no compiler or memory, say: the host updates
        return 0


def _trial(dtype: torch.dtype, copy_dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the tensors of a trial: ordinary elements first, then some for which the two ways to round differ."""
    generator = torch.Generator().manual_seed(0)
    normal = (torch.randn(_SAMPLE, generator=generator, device="cpu").to(dtype) for _ in range(4))
    param, grad, exp_avg, exp_avg_sq = normal
    sample = [param, grad, exp_avg, exp_avg_sq.square()]
    vectors, others = ([tensor.clone() for tensor in sample] for _ in range(2))
    kernels.adamw(_SIMULATED, scalars_of(TRIED_STEP), *vectors)
    kernels.adamw(_SIMULATED, scalars_of(TRIED_STEP), *others, tail=_SAMPLE)
    telling = (vectors[-1] != others[-1]).nonzero().flatten()
    rest = torch.arange(sum(_TRIED) - _TRIED[0], device="cpu") % telling.numel()
    chosen = torch.cat([torch.arange(_TRIED[0], device="cpu"), telling[rest]])
    copy = [] if copy_dtype is None else [torch.empty(chosen.numel(), dtype=copy_dtype, device="cpu")]
    return [*(tensor[chosen] for tensor in sample), *copy]


def _agrees(device: torch.device, given: list[torch.Tensor], width: int) -> bool:
    here = [tensor.clone() for tensor in given]
    there = [tensor.to(device, copy=True) for tensor in given]
    parts = (zip(*(tensor.split(_TRIED) for tensor in tensors), strict=True) for tensors in (here, there))
    for on_host, on_device in zip(*parts, strict=True):
        update_by_torch(TRIED_STEP, *on_host)
        kernels.adamw(kernels_of(device), scalars_of(TRIED_STEP), *on_device, tail=on_device[0].numel() % width)
    return all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
