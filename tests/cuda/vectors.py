"""The numbers and layouts that kernels are checked with, and the places where the checks run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetmem.cuda.backend import Backend

MARGIN = 64
SENTINEL = 0xA5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = torch.float32
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Place:
    """Where a check runs. `exact`: buffers end where the data ends, for a sanitiser; else between margins."""

    backend: Backend
    device: str = "cpu"
    exact: bool = False
    thorough: bool = True

    def buffer(self, data: torch.Tensor, shift: int = 0, pinned: bool = False) -> Buffer:
        """A copy of the 1-D `data`, `shift` elements after an address that is a multiple of 64 bytes."""
        margin = 0 if self.exact else MARGIN
        whole = torch.empty(margin + shift + data.numel() + margin, dtype=data.dtype)
        whole.view(torch.uint8).fill_(SENTINEL)
        whole[margin + shift : margin + shift + data.numel()] = data
        if self.device != "cpu":
            whole = whole.pin_memory() if pinned else whole.to(self.device)
        return Buffer(whole, margin + shift, data.numel())

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Buffer:
    whole: torch.Tensor
    start: int
    numel: int

    @property
    def view(self) -> torch.Tensor:
        return self.whole[self.start : self.start + self.numel]

    def result(self) -> torch.Tensor:
        """The data, on the CPU, once it is sure that nothing was written beside it."""
        for part in (self.whole[: self.start], self.whole[self.start + self.numel :]):
            assert (part.cpu().view(torch.uint8) == SENTINEL).all(), "written beside the destination"
        return self.view.cpu()


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal bits where a number is expected, any NaN where a NaN is."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    same = actual.view(BITS[actual.itemsize]) == expected.view(BITS[actual.itemsize])
    if actual.is_floating_point():
        same |= actual.float().isnan() & expected.float().isnan()
    wrong = (~same).nonzero().flatten().tolist()
    assert not wrong, (
        f"{what}: {len(wrong)} of {actual.numel()} differ, first at {wrong[0]}: "
        f"expected {expected[wrong[0]].item()!r}, got {actual[wrong[0]].item()!r}"
    )


# ---- Numbers. ----


def float32_edges() -> torch.Tensor:
    """Every sign and exponent, with the mantissas around every place where a format may round."""
    near = {0, 0x7FFFFF}
    for bit in range(23):
        near |= {(1 << bit) + step for step in (-1, 0, 1)} | {(3 << bit & 0x7FFFFF) + step for step in (-1, 0, 1)}
        near |= {0x7FFFFF ^ (1 << bit), 0x7FFFFF >> bit}
    mantissas = torch.tensor(sorted(mantissa & 0x7FFFFF for mantissa in near), dtype=torch.int64)
    heads = torch.arange(512, dtype=torch.int64) << 23
    bits = (heads[:, None] | mantissas[None, :]).flatten()
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def float32_sample(numel: int) -> torch.Tensor:
    """Bits spread evenly over all of them."""
    bits = torch.arange(numel, dtype=torch.int64) * 2654435761 % (1 << 32)
    return (bits - (1 << 31)).to(torch.int32).view(torch.float32)


def numbers(dtype: torch.dtype, thorough: bool = True) -> torch.Tensor:
    """All there is of a 16-bit format; of float32 the edges and, if `thorough`, a sample of the rest."""
    if dtype == torch.float32:
        edges = float32_edges()
        return torch.cat([edges, float32_sample(1 << 22)]) if thorough else edges[::7]
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def ordinary(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Finite numbers over many magnitudes."""
    random = torch.Generator().manual_seed(seed * 7919 + numel)
    exponents = torch.randint(-12, 6, (numel,), generator=random)
    return torch.ldexp(torch.randn(numel, generator=random), exponents).to(dtype)
