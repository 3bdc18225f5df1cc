"""Tensors of a model that are made of others in files: merged, cut or turned, as a conversion says.

Where that only moves elements they are read block by block, straight to where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hetmem.checkpoint.declared import Conversion
from hetmem.checkpoint.layout import Stored
from hetmem.checkpoint.moving import read_tensors
from hetmem.checkpoint.opening import OpenFile
from hetmem.checkpoint.rearranging import NotFollowedError, Rearranging
from hetmem.checkpoint.shards import Source
from hetmem.errors import CheckpointError

Reads = list[tuple[OpenFile, Stored, torch.Tensor]]
"""What is to be read from which file into which tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """`made`: by the names of the model, what `conversion` makes of `sources`, without memory."""

    conversion: Conversion
    sources: list[Source]
    made: dict[str, torch.Tensor]
    _followed: Rearranging | None

    def reads(self, name: str, into: torch.Tensor) -> Reads | None:
        """What fills `into`, which is to be `name`, of the shape that is made. None if only `fill` can."""
        if self._followed is None:
            return None
        try:
            runs = list(self._followed.runs(self.made[name], into))
        except NotFollowedError:
            return None
        stored = [source.stored for source in self.sources]
        return [
            (self.sources[run.number].file, _part(stored[run.number], run.first, run.into), run.into) for run in runs
        ]

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """The same by the conversion itself, in host memory: as much as `sources` and what is made of them."""
        tensors = [torch.empty(source.stored.shape, dtype=source.stored.dtype, device="cpu") for source in self.sources]
        for source, tensor in zip(self.sources, tensors, strict=True):
            read_tensors(source.file, [(source.stored, tensor)])
        with torch.no_grad():
            made = self.conversion.convert(tensors)
            for name, tensor in targets.items():
                tensor.copy_(made[name])


def merge(conversion: Conversion, sources: Sequence[Source]) -> Merge:
    """What `conversion` would make of `sources`, one for each of its names; nothing is read.

    Raises `CheckpointError` if it cannot make anything of them.
    """
    shapes = [(source.stored.shape, source.stored.dtype) for source in sources]
    followed = Rearranging(shapes)
    try:
        with followed:
            return Merge(conversion, list(sources), conversion.convert(followed.stand_ins), followed)
    except Exception:  # whatever it is, an operation that is not understood here may be right
        pass
    try:
        made = conversion.convert([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
    except Exception as error:
        raise CheckpointError(f"{conversion.name} cannot be made of {shown(conversion.names)}: {error}") from error
    return Merge(conversion, list(sources), made, None)


def shown(names: Sequence[str]) -> str:
    """`names`, or their number and two of them."""
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({names[0]} … {names[-1]})"


def _part(stored: Stored, first: int, into: torch.Tensor) -> Stored:
    """The elements of `stored` from `first` on that fill `into`."""
    return replace(stored, shape=tuple(into.shape), start=stored.start + first * stored.dtype.itemsize)
