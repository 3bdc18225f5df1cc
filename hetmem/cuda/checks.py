"""What the launchers refuse: the message says what it was about, what was expected and what was got."""

from __future__ import annotations

from collections.abc import Collection

import torch

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""The dtypes of the kernels, by the name that floats.cuh gives them."""

MOST_BLOCKS = 2048
"""Eight blocks of 256 threads are what a multiprocessor holds: enough for 256 of them."""


def stream_for(stream: torch.cuda.Stream | None, *tensors: torch.Tensor) -> torch.cuda.Stream | None:
    """`stream`, or else the one that is current on the GPU of the first of `tensors` that lies on any: it need not be
    the current GPU, where a kernel would find nothing at these addresses. None if all are in host memory."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    return stream if stream is not None or device is None else torch.cuda.current_stream(device)


def check_flat(tensor: torch.Tensor, what: str, dtypes: Collection[torch.dtype], numel: int) -> None:
    """Refuse anything but contiguous memory of one of `dtypes` with at least `numel` elements."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{what}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what}: expected contiguous memory, got {tuple(tensor.shape)}, strides {tensor.stride()}")
    if tensor.numel() < numel:
        raise ValueError(f"{what}: expected at least {numel} elements, got {tensor.numel()}")


def check_blocks(blocks: int | None, work: int) -> int:
    """The grid: `blocks` if given, else one block per item of work, up to what any device can hold at once."""
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks: expected at least 1, got {blocks}")
    return min(work, MOST_BLOCKS if blocks is None else blocks)
