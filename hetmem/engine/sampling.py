"""Comparisons that find writes which count no version: 16-bit copies as a whole, sampled bits of everything else.

A home is read only where it lies in host memory or on NVMe: a copy on a GPU could be read only by waiting for all that
was asked of the GPU before. What a difference means is for the caller to say.

Note "torn reads": a read of gradients from NVMe that is under way while the program scales them (`p.grad.data.mul_`)
returns some blocks from before the write and others from after. One sampled element does not show that, so the staging
copy is marked as torn, and read again from its home before its use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hetmem.cpu import compare_tasks
from hetmem.cpu.workers import Array, WorkerPool
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

_TILE = 512 * 1024  # elements that are cast and compared while they are in the CPU's cache
_OF_WEIGHTS = 16  # elements of each parameter, at least, if it has as many
_OF_GRADIENTS = 1024  # elements, of which the greatest is the sample
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Sample = tuple[int, bytes] | tuple[torch.Tensor, torch.Tensor]
"""The index of an element and its bits; of a tensor on the device, tensors there of one element each."""


# ---- weights: a few elements of each ---------------------------------------------------------------------------


class Fingerprints:
    """The bits of 16 elements of each parameter, as they were when the device copy of its chunk was made."""

    def __init__(self) -> None:
        self._indices: dict[Chunk, tuple[torch.Tensor, dict[ManagedParameter | None, slice]]] = {}
        self._bits: dict[Chunk, torch.Tensor] = {}

    def take(self, chunk: Chunk, values: torch.Tensor) -> None:
        """Note the bits of `values`, the flat parameters in host memory that a copy of `chunk` is made of."""
        self._bits[chunk] = _bits(values, self._index(chunk)[0])

    def forget(self, chunk: Chunk) -> None:
        """Forget the bits of `chunk`: to `differ`, any have changed."""
        self._bits.pop(chunk, None)

    def differ(self, chunk: Chunk, values: torch.Tensor, managed: ManagedParameter | None = None) -> bool:
        """Return whether `values` have other bits than `take` noted; of `managed` alone, if that is given."""
        (index, parts), before = self._index(chunk), self._bits.get(chunk)
        part = parts[managed]
        return before is None or not torch.equal(_bits(values, index[part]), before[part])

    def unequal(
        self, chunk: Chunk, values: torch.Tensor, others: torch.Tensor, managed: ManagedParameter | None = None
    ) -> bool:
        """Return whether two copies in host memory differ, with `others` cast to the dtype of `values`."""
        index, parts = self._index(chunk)
        index = index[parts[managed]]
        theirs = others.index_select(0, index).to(values.dtype)
        return not torch.equal(as_integers(values.index_select(0, index)), as_integers(theirs))

    def offsets(self, chunk: Chunk) -> list[int]:
        """Return the bytes of the home of `chunk` that `take` and `differ` read."""
        return [at * chunk.dtype.itemsize for at in self._index(chunk)[0].tolist()]

    def _index(self, chunk: Chunk) -> tuple[torch.Tensor, dict[ManagedParameter | None, slice]]:
        """Return the sampled elements of `chunk`, and which of them are each parameter's (None: all)."""
        found = self._indices.get(chunk)
        if found is None:
            runs, start = [torch.empty(0, dtype=torch.int64, device="cpu")], 0
            parts: dict[ManagedParameter | None, slice] = {None: slice(None)}
            for managed in chunk.parameters:
                step = max(1, managed.numel // _OF_WEIGHTS)
                runs.append(torch.arange(managed.offset, managed.offset + managed.numel, step, device="cpu"))
                parts[managed] = slice(start, start + runs[-1].numel())
                start = parts[managed].stop
            found = self._indices[chunk] = torch.cat(runs), parts
        return found


def _bits(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return as_integers(values).index_select(0, index)


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View `values` as integers: there a NaN equals itself, and 0 is not -0."""
    return values.view(_INTEGERS.get(values.itemsize, values.dtype))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal, where any NaN equals any other, and 0 is not -0."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    one, other = as_integers(left), as_integers(right)
    return bool(torch.equal(one, other) or ((one == other) | (left.isnan() & right.isnan())).all())


# ---- 16-bit copies at home: as a whole --------------------------------------------------------------------------


class HomeCopies:
    """The comparison of 16-bit copies at home with their parameters. A chunk is `unchecked` until `stale` is asked."""

    def __init__(self) -> None:
        self.unchecked: dict[Chunk, None] = {}
        self._begun: dict[Chunk, Callable[[], bool]] = {}
        self._workers: Callable[[], WorkerPool | None] = lambda: None

    def compare_on(self, workers: WorkerPool) -> None:
        """Have the threads of `workers` compare, as long as that lives."""
        self._workers = weakref.ref(workers)

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Begin to compare `chunks`, and those of earlier forwards that were not used since, in their order of use."""
        self.unchecked.update(dict.fromkeys(chunks))
        workers = self._workers()
        self._begun = {} if workers is None else {chunk: _begin_to_compare(workers, chunk) for chunk in self.unchecked}

    def renewed(self, chunk: Chunk) -> None:
        """Forget what was begun of `chunk`: an update makes its parameters and copy anew."""
        self.unchecked.pop(chunk, None)
        self._begun.pop(chunk, None)

    def stale(self, chunk: Chunk) -> list[ManagedParameter]:
        """Return the parameters of `chunk` whose copies differ from them; these copies are made anew."""
        self.unchecked.pop(chunk, None)
        begun = self._begun.pop(chunk, None)
        if begun is not None and begun():
            return []
        found = [managed for managed in chunk.parameters if not _copy_is_current(managed)]
        if found or begun is not None:
            with torch.no_grad():
                chunk.flat(Role.COMPUTE).copy_(chunk.flat(Role.PARAM))  # what lies between parameters too
            chunk.recast()
        return found


def _begin_to_compare(workers: WorkerPool, chunk: Chunk) -> Callable[[], bool]:
    """Begin to compare the 16-bit copy of `chunk`; the result waits for whether it equals the parameters."""
    tasks, found = compare_tasks(chunk.flat(Role.PARAM), chunk.flat(Role.COMPUTE))
    batch = workers.begin(tasks)

    def same() -> bool:
        batch.join()
        return not found.any()

    return same


def _copy_is_current(managed: ManagedParameter) -> bool:
    home, copy = (managed.part(managed.chunk.flat(role)) for role in (Role.PARAM, Role.COMPUTE))
    tiles = zip(home.split(_TILE), copy.split(_TILE), strict=True)
    return all(same_bits(there, here.to(there.dtype)) for here, there in tiles)


# ---- gradients: the greatest of a thousand elements ----------------------------------------------------------------


def sample_of(flat: torch.Tensor) -> Sample | None:
    """Return an element of a gradient that changes if the gradient is scaled: the greatest of a thousand, of all where
    those are zero. Of a tensor on the device nothing is waited for. None if `flat` is empty."""
    if not flat.numel():
        return None
    step = max(1, flat.numel() // _OF_GRADIENTS)
    if flat.is_cpu:
        bits, magnitude = _on_host(flat)
        at = int((bits[::step] & magnitude).argmax()) * step
        if step > 1 and not bits[at] & magnitude:
            at = int((bits & magnitude).argmax())
        return at, bits[at].tobytes()
    flat = flat.detach()
    there = flat[::step].abs().argmax().mul(step).view(1)
    return there, flat.index_select(0, there)


def _on_host(flat: torch.Tensor) -> tuple[Array, Any]:
    """View `flat` as integers of numpy's, whose calls take less than torch's, and return what masks the sign: what is
    left has the order of magnitudes, with NaN above all."""
    bits = flat.detach().view(_INTEGERS[min(flat.itemsize, 8)]).numpy()
    return bits, bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)


def as_sampled(samples: Sequence[tuple[Sample, torch.Tensor]]) -> list[bool]:
    """Return for each sample whether the tensor beside it still has those bits. All that are on the device are waited
    for at once."""
    same = [_is_same(*one) for one in samples]
    there = [one for one in same if isinstance(one, torch.Tensor)]
    found = iter(torch.stack(there).tolist() if there else ())
    return [next(found) if isinstance(one, torch.Tensor) else one for one in same]


def _is_same(sample: Sample, flat: torch.Tensor) -> torch.Tensor | bool:
    """Compare on the device where the sample is there, whether or not the gradient has moved since."""
    at, bits = sample
    if isinstance(at, int):
        return bits == bits_at(flat, at)
    assert isinstance(bits, torch.Tensor)
    now = flat.detach().index_select(0, at.to(flat.device)).to(bits.device)
    return (now.view(torch.uint8) == bits.view(torch.uint8)).all()


def bits_at(flat: torch.Tensor, at: int) -> bytes:
    """Return the bits of one element, also where its home has moved to the device."""
    if flat.is_cpu:
        found: bytes = _on_host(flat)[0][at].tobytes()
        return found
    return flat.detach()[at : at + 1].view(torch.uint8).cpu().numpy().tobytes()


class TornReads:
    """The staging copies of gradients that may be torn: see note "torn reads"."""

    def __init__(self, residency: Residency, chunk_of_block: dict[int, tuple[Chunk, Role]]) -> None:
        self._residency, self._chunk_of_block = residency, chunk_of_block
        self._torn: set[int] = set()
        self._may_be_written = True

    def allow_writes(self, *, allowed: bool) -> None:
        """Note whether the program may write to gradients from now on: outside backward and step. Reads that are under
        way as that begins may be torn."""
        before, self._may_be_written = self._may_be_written, allowed
        for block, (chunk, role) in self._chunk_of_block.items() if allowed and not before else ():
            if role is Role.GRAD and self._residency.state(block, Tier.HOST) is CopyState.LOADING:
                self.begin_read(block, chunk, role)

    def begin_read(self, block: int, chunk: Chunk, role: Role) -> None:
        """Note that a read of the home of `block` begins. Gradients that no `p.grad` shows are not written to."""
        self._torn.discard(block)
        shown = (each for each in chunk.parameters if each.grad_home is not None) if role is Role.GRAD else ()
        if self._may_be_written and any(each.parameter.grad is each.grad_home for each in shown):
            self._torn.add(block)

    def torn(self, block: int) -> bool:
        """Return whether the staging copy of `block` may be from before and after a write."""
        return block in self._torn

    def forget(self, block: int) -> None:
        """Note that the staging copy of `block` was dropped, or read again."""
        self._torn.discard(block)
