"""AdamW for states that are brought to a device: the kernel of `hetmem.cuda` with the bits of the host's loop.

It knows flat tensors; not how they came to the device, nor how they go back.

Note "tail": torch rounds the last `numel % 16` elements of a parameter differently, by the vectors of this CPU. No
kernel can follow that, so the host updates them at home, before all else is brought to the device.
"""

from __future__ import annotations

import torch

from hetmem.cuda import adam
from hetmem.cuda.backend import Backend, TorchBackend, backend
from hetmem.optim.kernels.update import WIDEST_VECTOR, AdamWStep, scalars_of, update_by_torch
from hetmem.units import round_down

_SIMULATED = TorchBackend("the device is simulated")
_known: dict[tuple[torch.device, torch.dtype | None], bool] = {}


def kernels_of(device: torch.device) -> Backend:
    """What updates on `device`."""
    return backend() if device.type == "cuda" else _SIMULATED


def tail_of(numel: int) -> slice:
    """The last elements of a parameter of `numel` elements, which the host updates; see Note "tail"."""
    return slice(round_down(numel, WIDEST_VECTOR), numel)


def adamw_but_tail(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
) -> None:
    """Update all but the tail of `param`, `exp_avg` and `exp_avg_sq`, float32 on one device, on its current stream.
    `compute_copy`, in bfloat16 or float16, gets the whole of `param`, rounded."""
    tail = tail_of(param.numel())
    body = slice(tail.start)
    copy = None if compute_copy is None else compute_copy[body]
    if tail.start:
        kernels = kernels_of(param.device)
        adam.adamw(kernels, scalars_of(step), param[body], grad[body], exp_avg[body], exp_avg_sq[body], copy)
    if compute_copy is not None and tail.start < tail.stop:
        compute_copy[tail].copy_(param[tail])


def equals_host(device: torch.device, copy_dtype: torch.dtype | None) -> bool:
    """Whether `adamw_but_tail` on `device` gives the bits of torch's kernel on the host: tried once, on a thousand
    elements. Where it cannot run at all it does not."""
    key = device, copy_dtype
    if key not in _known:
        try:
            _known[key] = _try(device, copy_dtype)
        except Exception:  # no compiler, no memory: whatever it is, the host updates
            _known[key] = False
    return _known[key]


def _try(device: torch.device, copy_dtype: torch.dtype | None) -> bool:
    step = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, grad_scale=0.3)
    angles = torch.linspace(0, 700, 1024, dtype=torch.float64, device="cpu")
    param, grad, exp_avg, exp_avg_sq = (angles.add(shift).sin().float() for shift in range(4))
    copy = None if copy_dtype is None else torch.empty_like(param, dtype=copy_dtype)
    given = [t for t in (param, grad, exp_avg, exp_avg_sq.square(), copy) if t is not None]
    there = [tensor.to(device, copy=True) for tensor in given]
    update_by_torch(step, *given)
    adamw_but_tail(step, *there)
    return all(torch.equal(host, got.cpu()) for host, got in zip(given, there, strict=True))
