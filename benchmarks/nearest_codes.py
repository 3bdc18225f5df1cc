"""Moments in codes of 8 bits with a float32 scale for each group, rounded to nearest, to compare with."""

from __future__ import annotations

import torch

from hetmem.cpu import GROUP_ELEMENTS

LARGEST = {"snorm8": 127.0, "unorm8": 255.0}


def quantise(form: str, source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Code the float32 `source`; what is above 0 never becomes 0 in "unorm8"."""
    numel, largest = source.numel(), LARGEST[form]
    x = torch.nn.functional.pad(source, (0, -numel % GROUP_ELEMENTS)).view(-1, GROUP_ELEMENTS)
    if form == "unorm8":
        x = torch.where(x < 0, 0.0, x)
    greatest = x.abs().amax(dim=1) if numel else x.new_zeros(0)
    scale = torch.where(greatest.isfinite(), greatest / torch.full_like(greatest, largest), torch.nan)
    scales[: scale.numel()] = scale
    usable = (scale > 0)[:, None]
    ratio = torch.where(usable, x / torch.where(usable, scale[:, None], 1.0), 0.0)
    least = torch.where(usable & (x > 0), 1.0, 0.0) if form == "unorm8" else torch.full_like(x, -largest)
    code = torch.maximum(ratio.round().clamp(max=largest), least)
    codes[:numel] = code.flatten()[:numel].to(torch.int32).to(codes.dtype)


def dequantise(destination: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write what `codes` stand for to `destination`."""
    numel = destination.numel()
    destination.copy_(codes[:numel].float() * scales.repeat_interleave(GROUP_ELEMENTS)[:numel])
