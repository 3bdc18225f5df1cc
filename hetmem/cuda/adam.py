"""AdamW on the device: state that is resident or streamed from pinned memory, and a 16-bit copy on request.

It checks and launches; it does not know hyper-parameters but as the eight scalars that the host's kernel takes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import GROUP_ELEMENTS, NAMES, Backend, blocks_for, check_flat, stream_for

SCALARS = ("sign", "decay", "lerp", "beta2", "square", "bias", "eps", "negative_step")
"""The scalars of an update, in order, each rounded once to float32: as `hetmem.cpu` prepares them."""

_COPIES = (None, torch.bfloat16, torch.float16)
ADAMS = {
    *((torch.float32, grad, copy) for grad in NAMES for copy in _COPIES),
    *((dtype, dtype, None) for dtype in (torch.bfloat16, torch.float16)),
}
"""The dtypes of state, gradient and copy (None: there is none) that there is a kernel for."""


def adamw(
    backend: Backend,
    scalars: Sequence[np.float32],
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
    *,
    tail: int = 0,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; write `param`, rounded, to `compute_copy` if given.

    Bit for bit what the host computes, `m = fma(lerp, g - m, m)` and so on in float32: see `hetmem.cpu`. The
    last `tail` elements are rounded as torch's kernel on the host rounds those behind its last full vector. `param` and
    the moments are float32, with `grad` in float32, bfloat16 or float16 and `compute_copy` in bfloat16 or float16, or,
    without a copy, are with `grad` of one of these: flat, of one length, on the GPU or in pinned memory; 16 bytes an
    access where all start at multiples of 16. `scalars`: see SCALARS.
    Starts the work on the current stream of their GPU; all tensors must stay until it has passed. Raises
    ValueError, with nothing started.
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "compute_copy": compute_copy}
    names, numel = _check(scalars, tensors, tail), param.numel()
    grid = blocks_for(-(-numel // GROUP_ELEMENTS))
    addresses = [np.uint64(0) if flat is None else backend.address(flat, what) for what, flat in tensors.items()]
    if not backend.native:
        reference.adamw(scalars, param, grad, exp_avg, exp_avg_sq, compute_copy, tail)
    elif numel > 0:
        arguments = (np.int64(numel), np.int64(numel - tail), *addresses, *(np.float32(scalar) for scalar in scalars))
        backend.launch("adam.cu", f"adamw_{'_'.join(names)}", grid, arguments, stream_for(None, param, grad))


def _check(scalars: Sequence[np.float32], tensors: Mapping[str, torch.Tensor | None], tail: int) -> list[str]:
    """The names of the dtypes of state, gradient and copy."""
    if len(scalars) != len(SCALARS):
        raise ValueError(f"scalars: expected {len(SCALARS)} ({', '.join(SCALARS)}), got {len(scalars)}")
    given = {what: flat for what, flat in tensors.items() if flat is not None}
    state, grad, copy = (given[what].dtype if what in given else None for what in ("param", "grad", "compute_copy"))
    if (state, grad, copy) not in ADAMS:
        raise ValueError(f"param, grad, compute_copy: there is no kernel for {state}, {grad}, {copy}")
    numel = given["param"].numel()
    for what, flat in given.items():
        check_flat(flat, what, [given["param"].dtype if what.startswith("exp") else flat.dtype], 0)
        if flat.numel() != numel:
            raise ValueError(f"{what}: expected {numel} elements like param, got {flat.numel()}")
    if not 0 <= tail <= numel:
        raise ValueError(f"tail: expected 0 to {numel} elements, got {tail}")
    return ["none" if dtype is None else NAMES[dtype] for dtype in (state, grad, copy)]
