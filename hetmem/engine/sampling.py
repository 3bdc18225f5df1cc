"""Samples of gradients: one element of each, to detect writes by the program that count no version.

Note "torn reads": a read of gradients from NVMe that is under way while the program scales them (`p.grad.data.mul_`)
returns some blocks from before the write and others from after. One sampled element does not show that, so the staging
copy is marked as torn, and read again from its home before its use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetmem.cpu.workers import Array
from hetmem.memory.chunk import Chunk, Role
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

_TAKEN = 1024  # elements of which the greatest is the sample
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Sample = tuple[int, bytes] | tuple[torch.Tensor, torch.Tensor]
"""The index of an element and its bits; of a tensor on the device, tensors there of one element each."""


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View `values` as integers: there a NaN equals itself, and 0 is not -0."""
    return values.view(_INTEGERS.get(values.itemsize, values.dtype))


def sample_of(flat: torch.Tensor) -> Sample | None:
    """Return an element of a gradient that changes if the gradient is scaled: the greatest of a thousand, or of all if
    those are zero. Does not wait for the device. None if `flat` is empty."""
    if not flat.numel():
        return None
    step = max(1, flat.numel() // _TAKEN)
    if flat.is_cpu:
        bits, magnitude = _on_host(flat)
        at = int((bits[::step] & magnitude).argmax()) * step
        if step > 1 and not bits[at] & magnitude:
            at = int((bits & magnitude).argmax())
        return at, bits[at].tobytes()
    flat = flat.detach()
    index = flat[::step].abs().argmax().mul(step).view(1)
    return index, flat.index_select(0, index)


def _on_host(flat: torch.Tensor) -> tuple[Array, Any]:
    """Return `flat` as NumPy integers (NumPy's calls take less time than torch's) and a mask of all bits but the sign:
    masked values order by magnitude, with NaN above all."""
    bits = flat.detach().view(_INTEGERS[min(flat.itemsize, 8)]).numpy()
    return bits, bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)


def as_sampled(samples: Sequence[tuple[Sample, torch.Tensor]]) -> list[bool]:
    """Return for each sample whether the tensor beside it still has those bits. Waits for the device once."""
    same = [_is_same(*one) for one in samples]
    on_device = [one for one in same if isinstance(one, torch.Tensor)]
    found = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(found) if isinstance(one, torch.Tensor) else one for one in same]


def _is_same(sample: Sample, flat: torch.Tensor) -> torch.Tensor | bool:
    """Return whether `flat` has the bits of `sample`; compares on the device if the sample is there."""
    at, bits = sample
    if isinstance(at, int):
        return bits == bits_at(flat, at)
    assert isinstance(bits, torch.Tensor)
    now = flat.detach().index_select(0, at.to(flat.device)).to(bits.device)
    return (now.view(torch.uint8) == bits.view(torch.uint8)).all()


def bits_at(flat: torch.Tensor, at: int) -> bytes:
    """Return the bits of the element `at` of `flat`, on any device."""
    if flat.is_cpu:
        found: bytes = _on_host(flat)[0][at].tobytes()
        return found
    return flat.detach()[at : at + 1].view(torch.uint8).cpu().numpy().tobytes()


class TornReads:
    """Tracks the staging copies of gradients that may be torn: see note "torn reads"."""

    def __init__(self, residency: Residency, chunk_of_block: dict[int, tuple[Chunk, Role]]) -> None:
        self._residency, self._chunk_of_block = residency, chunk_of_block
        self.torn: set[int] = set()
        """The blocks whose staging copy may be partly from before a write and partly from after it."""
        self._may_be_written = True

    def allow_writes(self, *, allowed: bool) -> None:
        """Note whether the program may write to gradients from now on: outside backward and step. Reads in flight as it
        becomes `allowed` may be torn."""
        before, self._may_be_written = self._may_be_written, allowed
        for block, (chunk, role) in self._chunk_of_block.items() if allowed and not before else ():
            if role is Role.GRAD and self._residency.state(block, Tier.HOST) is CopyState.LOADING:
                self.begin_read(block, chunk, role)

    def begin_read(self, block: int, chunk: Chunk, role: Role) -> None:
        """Note that a read of the home of `block` begins; only gradients that are a `p.grad` may be written
        meanwhile."""
        self.torn.discard(block)
        shown = (each for each in chunk.parameters if each.grad_home is not None) if role is Role.GRAD else ()
        if self._may_be_written and any(each.parameter.grad is each.grad_home for each in shown):
            self.torn.add(block)
