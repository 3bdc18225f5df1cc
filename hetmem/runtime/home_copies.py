"""Whether 16-bit copies at home say what their parameters do, compared wholly before operators see them.

Note "early copies": an update writes a parameter and its 16-bit copy in one pass, and the copy may be fetched ahead
while the user may write to the parameter. No version counts some of such writes, and a few elements are found by no
sample. So each forward that may come behind one compares all of parameter and copy, chunk by chunk, on the optimizer's
workers while the first chunks are computed with: a pass over 6 bytes a parameter. Making the copy only then would read
and write as many, and nothing could be fetched while other chunks are updated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.runtime.construction import recast_all
from hetmem.runtime.fingerprints import INTEGERS

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
