"""The host's kernels are compiled when an optimizer is made, not in the middle of its first step.

It knows the dtypes of chunks; which kernels they need is the rule's to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from hetmem.cpu import square_sum_tasks
from hetmem.engine.homes import Memory
from hetmem.memory.chunk import Chunk, Role
from hetmem.optim.rule import Rule


def compile_ahead(rule: Rule, memory: Memory, chunks: Collection[Chunk], *, norm: bool) -> None:
    """Compile what updates of `chunks`, whose homes are there, run on the host, and with `norm` what sums squares up.

    What is kept on disk is read. Whoever needs another kernel after all compiles it then.
    """
    if not memory.streams and memory.device.torch_device.type != "cpu":
        return  # the device has kernels of its own
    for dtype in {chunk.dtype for chunk in chunks}:
        for copy_dtype in {copy for chunk in chunks if chunk.dtype is dtype for copy in _copies(memory, chunk)}:
            rule.prepare(dtype, copy_dtype)
        if norm:
            square_sum_tasks(torch.zeros(1, dtype=dtype, device="cpu"))


def _copies(memory: Memory, chunk: Chunk) -> Iterator[torch.dtype | None]:
    """Dtypes of the 16-bit copies that updates of `chunk` write on the host; None: they may write none."""
    if Role.COMPUTE not in chunk.homes:
        yield None
    if Role.COMPUTE in chunk.homes or (
        chunk.compute_dtype is not chunk.dtype and memory.device.torch_device.type == "cpu"
    ):
        yield chunk.compute_dtype
