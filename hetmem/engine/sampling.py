"""Sampled bits of homes and of their copies, to find writes that count no version.

It reads host memory only: a copy on a GPU could be read only by waiting for all that was asked of the GPU before.

Note "early copies": an update writes a parameter and its 16-bit copy in one pass, and the copy may be fetched ahead
while the user may write to the parameter. No version counts some of such writes, and a few elements are found by no
sample. So each forward that may come behind one compares all of parameter and copy, chunk by chunk, on the optimizer's
workers while the first chunks are computed with: a pass over 6 bytes a parameter. Making the copy only then would read
and write as many, and nothing could be fetched while other chunks are updated.

Note "torn reads": a read of gradients from NVMe that is under way while the user scales them (`p.grad.data.mul_`) gives
some blocks from before and others from after. One sampled element does not find that, so such a copy is marked, and
read again before its use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from hetmem.engine.build import recast_all
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

_SAMPLES = 16  # of each parameter, at least, if it has as many
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, what its bits are read as."""


@dataclass(slots=True, eq=False)
class _Places:
    """Which elements of a chunk are looked at: `index`, of which those of each parameter are `parts`."""

    index: torch.Tensor
    parts: dict[ManagedParameter, slice]

    def part(self, managed: ManagedParameter | None) -> slice:
        return slice(None) if managed is None else self.parts[managed]


class Fingerprints:
    """Of the chunks of one model, where homes are in host memory or on NVMe."""

    def __init__(self) -> None:
        self._places: dict[Chunk, _Places] = {}
        self._bits: dict[Chunk, torch.Tensor] = {}

    def take(self, chunk: Chunk, values: torch.Tensor) -> None:
        """A copy of `chunk` is made from `values`, its flat parameters in host memory, and from now on says that."""
        self._bits[chunk] = _bits(values, self._places_of(chunk).index)

    def differ(self, chunk: Chunk, values: torch.Tensor, managed: ManagedParameter | None = None) -> bool:
        """Whether `values` have other bits than when they were last taken, if they were; of the whole chunk, or of
        `managed`."""
        places, before = self._places_of(chunk), self._bits.get(chunk)
        part = places.part(managed)
        return before is None or not torch.equal(_bits(values, places.index[part]), before[part])

    def unequal(
        self, chunk: Chunk, values: torch.Tensor, others: torch.Tensor, managed: ManagedParameter | None = None
    ) -> bool:
        """Whether two copies in host memory differ, `others` in the dtype of `values`."""
        places = self._places_of(chunk)
        index = places.index[places.part(managed)]
        theirs = others.index_select(0, index).to(values.dtype)
        return not torch.equal(_bits(values, index), _bits(theirs, torch.arange(index.numel(), device="cpu")))

    def offsets(self, chunk: Chunk) -> list[int]:
        """The bytes of its home that are looked at."""
        return [at * chunk.dtype.itemsize for at in self._places_of(chunk).index.tolist()]

    def _places_of(self, chunk: Chunk) -> _Places:
        found = self._places.get(chunk)
        if found is None:
            runs, parts, start = [], {}, 0
            for managed in chunk.parameters:
                step = max(1, managed.numel // _SAMPLES)
                runs.append(torch.arange(managed.offset, managed.offset + managed.numel, step, device="cpu"))
                parts[managed] = slice(start, start + runs[-1].numel())
                start = parts[managed].stop
            found = self._places[chunk] = _Places(
                torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *runs]), parts
            )
        return found


def _bits(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """As integers a NaN equals itself, and 0 is not -0."""
    return values.view(INTEGERS.get(values.itemsize, values.dtype)).index_select(0, index)


class Exposed:
    """Of the blocks in `chunk_of_block`, those of gradients that `residency` has in staging and that may be mixed."""

    def __init__(self, residency: Residency, chunk_of_block: dict[int, tuple[Chunk, Role]]) -> None:
        self._residency, self._chunk_of_block = residency, chunk_of_block
        self._mixed: set[int] = set()
        self._users_turn = True

    def show(self) -> None:
        """The user may write to gradients from now on, also to those that are being read."""
        if not self._users_turn:
            self._users_turn = True
            for block, (chunk, role) in self._chunk_of_block.items():
                if role is Role.GRAD and self._residency.state(block, Tier.HOST) is CopyState.LOADING:
                    self.reads(block, chunk, role)

    def hide(self) -> None:
        """A backward or a step has begun: nobody writes to gradients but hetmem."""
        self._users_turn = False

    def reads(self, block: int, chunk: Chunk, role: Role) -> None:
        """A read of the home of `block` begins. Of gradients that trail behind a step nobody knows."""
        self._mixed.discard(block)
        shown = (each for each in chunk.parameters if each.grad_home is not None) if role is Role.GRAD else ()
        if self._users_turn and any(each.parameter.grad is each.grad_home for each in shown):
            self._mixed.add(block)

    def mixed(self, block: int) -> bool:
        """Whether the copy of `block` in staging may be of before and after a write."""
        return block in self._mixed

    def forget(self, block: int) -> None:
        """That copy counts no more, or says what its home says."""
        self._mixed.discard(block)


_TILE = 512 * 1024  # elements that are cast and compared while they are in the CPU's cache


class CopyComparer(Protocol):
    """Compares on other threads."""

    def compare(self, chunk: Chunk) -> Callable[[], bool]:
        """Begin to compare the 16-bit copy of `chunk` with its parameters; what is returned waits for whether they say
        the same."""
        ...


class HomeCopies:
    """Those of one model. A chunk is `unchecked` from where the user may have written to it until `stale` was asked."""

    def __init__(self) -> None:
        self.unchecked: dict[Chunk, None] = {}
        self._begun: dict[Chunk, Callable[[], bool]] = {}
        self._comparer: weakref.ref[CopyComparer] | None = None

    def compare_with(self, comparer: CopyComparer) -> None:
        """Have `comparer` compare, as long as it lives."""
        self._comparer = weakref.ref(comparer)

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """A forward begins: `chunks`, and those that were not used since an earlier one, are compared, in their order
        of use."""
        self.unchecked.update(dict.fromkeys(chunks))
        comparer = None if self._comparer is None else self._comparer()
        self._begun = {} if comparer is None else {chunk: comparer.compare(chunk) for chunk in self.unchecked}

    def renewed(self, chunk: Chunk) -> None:
        """An update makes parameters and copy of `chunk`: what was begun says nothing."""
        self.unchecked.pop(chunk, None)
        self._begun.pop(chunk, None)

    def stale(self, chunk: Chunk) -> list[ManagedParameter]:
        """The parameters of `chunk` whose copies did not say what they do; these are made anew."""
        self.unchecked.pop(chunk, None)
        begun = self._begun.pop(chunk, None)
        if begun is not None and begun():
            return []
        found = [managed for managed in chunk.parameters if not _says_the_same(managed)]
        if found or begun is not None:
            with torch.no_grad():
                chunk.flat(Role.COMPUTE).copy_(chunk.flat(Role.PARAM))  # what lies between parameters too
            recast_all(chunk)
        return found


def _says_the_same(managed: ManagedParameter) -> bool:
    home, copy = (managed.part(managed.chunk.flat(role)) for role in (Role.PARAM, Role.COMPUTE))
    tiles = zip(home.split(_TILE), copy.split(_TILE), strict=True)
    return all(same_bits(there, here.to(there.dtype)) for here, there in tiles)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN for NaN, and 0 is not -0."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    integer = INTEGERS.get(left.itemsize, left.dtype)
    one, other = left.view(integer), right.view(integer)
    return bool(torch.equal(one, other) or ((one == other) | (left.isnan() & right.isnan())).all())
