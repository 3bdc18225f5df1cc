"""What every measurement takes for granted of torch, whatever the program around it has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary_torch() -> Iterator[None]:
    """New tensors are float32 in host memory, and a backward is possible. All threads have the dtype meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(before)
