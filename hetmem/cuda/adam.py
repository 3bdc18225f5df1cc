"""AdamW on the device: float32 state that is resident or streamed from pinned memory, and a 16-bit copy on request.

It checks and launches; it does not know hyper-parameters but as the eight scalars that the host's kernel takes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import GROUP_ELEMENTS, THREADS, Backend
from hetmem.cuda.checks import NAMES, check_blocks, check_flat, stream_for

SCALARS = ("sign", "decay", "lerp", "beta2", "square", "bias", "eps", "negative_step")
"""The scalars of an update, in order, each rounded once to float32: as `hetmem.optim.kernels` prepares them."""

_DTYPES = {"grad": list(NAMES), "compute_copy": [torch.bfloat16, torch.float16]}


def adamw(
    backend: Backend,
    scalars: Sequence[np.float32],
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
    *,
    stream: torch.cuda.Stream | None = None,
    blocks: int | None = None,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; write `param`, rounded, to `compute_copy` if given.

    Bit for bit what the host's loop computes, `m = fma(lerp, g - m, m)` and so on: see `hetmem.optim.kernels`. (The
    host leaves the last `numel % 16` elements to torch, whose rounding there depends on the CPU's vectors.) `grad` is
    float32, bfloat16 or float16, `compute_copy` bfloat16 or float16, the others float32: flat, of one length, on the
    GPU or in pinned memory; 16 bytes an access where all start at multiples of 16. `scalars`: see SCALARS.
    Starts the work on `stream` (None: torch's current one); all tensors must stay until it has passed. Raises
    ValueError, with nothing started.
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "compute_copy": compute_copy}
    _check(scalars, tensors)
    numel = param.numel()
    grid = check_blocks(blocks, -(-numel // (THREADS * GROUP_ELEMENTS)))
    addresses = [np.uint64(0) if flat is None else backend.address(flat, what) for what, flat in tensors.items()]
    if not backend.native:
        with torch.cuda.stream(stream):
            reference.adamw(scalars, param, grad, exp_avg, exp_avg_sq, compute_copy)
    elif numel > 0:
        copy = "none" if compute_copy is None else NAMES[compute_copy.dtype]
        arguments = (np.int64(numel), *addresses, *(np.float32(scalar) for scalar in scalars))
        backend.launch("adam.cu", f"adamw_{NAMES[grad.dtype]}_{copy}", grid, arguments, stream_for(stream, param, grad))


def _check(scalars: Sequence[np.float32], tensors: Mapping[str, torch.Tensor | None]) -> None:
    if len(scalars) != len(SCALARS):
        raise ValueError(f"scalars: expected {len(SCALARS)} ({', '.join(SCALARS)}), got {len(scalars)}")
    numel = next(flat.numel() for flat in tensors.values() if flat is not None)
    for what, flat in tensors.items():
        if flat is None:
            continue
        check_flat(flat, what, _DTYPES.get(what, [torch.float32]), 0)
        if flat.numel() != numel:
            raise ValueError(f"{what}: expected {numel} elements like param, got {flat.numel()}")
