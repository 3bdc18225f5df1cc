"""AdamW on a device with the bits of the host's: the kernel of `hetmem.cuda`, tried against torch's before it is used.

It knows flat tensors; not how they came to the device.

Note "tail": torch's kernel on the host rounds the elements behind its last full vector differently. How many a vector
has depends on the CPU and on how torch was built, so it is found by trying.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetmem.cpu.update import AdamWStep, scalars_of, update_by_torch
from hetmem.cuda import adam
from hetmem.cuda.backend import Backend, TorchBackend, backend

Flats = tuple[torch.Tensor, ...]
"""Of one parameter: itself, its gradient, the two moments and, if there is one, the 16-bit copy that gets it."""

_SIMULATED = TorchBackend("the device is simulated")
_STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.01, step=3, grad_scale=0.3)
_WIDTHS = (16, 8, 4, 2, 1)
_TRIED = (1024, *(31,) * 16)
"""Elements of the tensors of a trial: whole vectors of any kind of element, and 16 times a tail."""
_SAMPLE = 1 << 16
"""In bfloat16 the two ways to round differ in one of some two thousand elements."""
_known: dict[tuple[torch.device, torch.dtype, torch.dtype | None], int] = {}


def kernels_of(device: torch.device) -> Backend:
    """What updates on `device`."""
    return backend() if device.type == "cuda" else _SIMULATED


def adamw_as_on_host(updates: Iterable[tuple[AdamWStep, Flats]]) -> None:
    """Update whole parameters on a device that `equals_host`, on its current stream; neighbours in one launch."""
    for step, flats in _joined(updates):
        adam.adamw(kernels_of(flats[0].device), scalars_of(step), *flats, tail=flats[0].numel() % _width_of(flats))


def _joined(updates: Iterable[tuple[AdamWStep, Flats]]) -> list[tuple[AdamWStep, Flats]]:
    """With one update in place of two that are alike and next to each other, if none of the first is a tail."""
    joined: list[tuple[AdamWStep, Flats]] = []
    for step, flats in updates:
        if joined and joined[-1][0] == step and _go_on(joined[-1][1], flats):
            before = joined.pop()[1]
            pairs = zip(before, flats, strict=True)
            flats = tuple(one.as_strided((one.numel() + other.numel(),), (1,)) for one, other in pairs)
        joined.append((step, flats))
    return joined


def _go_on(before: Flats, flats: Flats) -> bool:
    """Whether `flats` lie directly behind `before`, in the same memory."""
    if len(before) != len(flats) or before[0].numel() % _width_of(before):
        return False
    return all(
        one.dtype is other.dtype
        and one.data_ptr() + one.nbytes == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(before, flats, strict=True)
    )


def equals_host(device: torch.device, dtype: torch.dtype, copy_dtype: torch.dtype | None) -> bool:
    """Whether `adamw_as_on_host` of parameters of `dtype`, with a copy of `copy_dtype` (None: without), gives the bits
    of torch's kernel on the host: tried once, on some 1500 elements. Where it cannot run at all it does not."""
    return _width(device, dtype, copy_dtype) > 0


def _width_of(flats: Flats) -> int:
    param, _, _, _, *copy = flats
    width = _width(param.device, param.dtype, copy[0].dtype if copy else None)
    assert width, f"{param.device} does not compute as the host does"
    return width


def _width(device: torch.device, dtype: torch.dtype, copy_dtype: torch.dtype | None) -> int:
    """Elements of a vector of torch's kernel on the host with which `device` computes the same; 0: with none."""
    key = device, dtype, copy_dtype
    if key not in _known:
        # In torch a vector of 16-bit elements has twice as many as one of float32.
        widths = _WIDTHS if dtype is torch.float32 else (2 * _width(device, torch.float32, None),)
        try:
            given = _trial(dtype, copy_dtype)
            _known[key] = next((width for width in widths if width and _agrees(device, given, width)), 0)
        except Exception:  # no compiler, no memory: whatever it is, the host updates
            _known[key] = 0
    return _known[key]


def _trial(dtype: torch.dtype, copy_dtype: torch.dtype | None) -> list[torch.Tensor]:
    """What is updated to try: ordinary elements first, then such that the two ways to round tell apart."""
    generator = torch.Generator().manual_seed(0)
    normal = (torch.randn(_SAMPLE, generator=generator, device="cpu").to(dtype) for _ in range(4))
    param, grad, exp_avg, exp_avg_sq = normal
    sample = [param, grad, exp_avg, exp_avg_sq.square()]
    vectors, others = ([tensor.clone() for tensor in sample] for _ in range(2))
    adam.adamw(_SIMULATED, scalars_of(_STEP), *vectors)
    adam.adamw(_SIMULATED, scalars_of(_STEP), *others, tail=_SAMPLE)
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
        update_by_torch(_STEP, *on_host)
        adam.adamw(kernels_of(device), scalars_of(_STEP), *on_device, tail=on_device[0].numel() % width)
    return all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
