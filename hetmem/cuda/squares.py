"""Sums of squares of gradients that stay on the device, in the order of the host, so that both give the same norm.

It checks and launches; it does not know what the norm is for, nor how the sums of runs are added.
"""

from __future__ import annotations

import numpy as np
import torch

from hetmem.cuda import reference
from hetmem.cuda.backend import NAMES, Backend, blocks_for, check_flat, stream_for
from hetmem.cuda.reference import RUN_ELEMENTS

_TEAM = 8
"""Threads that do one run; squares.cu says the same."""


def square_sums(
    backend: Backend,
    values: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """sums[i] = the sum of squares of the i-th RUN_ELEMENTS of `values`; infinite or NaN if and only if one of them is.

    Added in float64 in the order that squares.cu says, which is the host's: see `hetmem.cpu.loops`. `values`:
    flat, float32, bfloat16 or float16, 16 bytes an access where it starts at a multiple of 16. `sums`: float64, one for
    each run, the last of which may be shorter. Starts the work on the current stream of their GPU; both must stay
    until it has passed. Raises ValueError, with nothing started.
    """
    runs = -(-values.numel() // RUN_ELEMENTS)
    check_flat(values, "values", list(NAMES), 0)
    check_flat(sums, "sums", [torch.float64], runs)
    grid = blocks_for(runs * _TEAM)
    addresses = backend.address(values, "values"), backend.address(sums, "sums")
    if not backend.native:
        sums[:runs] = reference.square_sums(values)
    elif runs > 0:
        arguments = (np.int64(values.numel()), *addresses)
        backend.launch("squares.cu", f"square_sums_{NAMES[values.dtype]}", grid, arguments, stream_for(None, values))
