"""Which elements of which tensor an operation puts where, found out without their values: it runs on stand-ins.

What it makes of tensors on disk can then be read block by block, straight to where it belongs. Knows operations that
move elements. Must not know files, models, nor which library these operations are from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Place = Callable[[torch.Tensor], torch.Tensor]
"""The view of a whole that one part of it has."""


_TENSOR: Any = torch.Tensor
_GET_DATA = _TENSOR.data.__get__
_BY_STRIDES = {torch.as_strided, torch.Tensor.as_strided}


class NotFollowedError(ValueError):
    """The operation does more than to move elements, or moves them in another way than those known here."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of the stand-in `number` from element `first` on, in their order, which belong `into` that view."""

    number: int
    first: int
    into: torch.Tensor


@dataclass(slots=True, eq=False)
class _StandIn:
    """A contiguous tensor without memory, whose views torch itself keeps account of; `parts`: what it was joined of."""

    tensor: torch.Tensor
    parts: list[tuple[Place, torch.Tensor]] = field(default_factory=list)


class Rearranging(TorchFunctionMode):
    """Within this mode what runs on `stand_ins` is followed: `torch.stack`, `torch.cat` and whatever makes views.

    Copies to other strides (`contiguous`) are left out, as they move nothing that matters here.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        with torch.inference_mode(False):  # where tensors count versions
            self.stand_ins = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        self._numbers = {_storage(each): number for number, each in enumerate(self.stand_ins)}
        self._known = {_storage(each): _StandIn(each) for each in self.stand_ins}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        if func in _BY_STRIDES:
            raise NotFollowedError("it goes by strides, which are others here")
        with torch.inference_mode(False):
            if func is torch.cat or func is torch.stack:
                return self._joined(func, *args, **(kwargs or {}))
            if func == _GET_DATA:  # writes to which would count no version
                return args[0].detach()
            return func(*args, **(kwargs or {}))

    def _joined(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        made: torch.Tensor = func(tensors, dim)
        joined, first = _StandIn(made), 0
        for number, part in enumerate(tensors):
            if func is torch.stack:
                place: Place = partial(torch.select, dim=dim, index=number)
            else:
                place = partial(torch.narrow, dim=dim, start=first, length=part.shape[dim])
                first += part.shape[dim]
            joined.parts.append((place, part))
        self._known[_storage(made)] = joined
        return made

    def runs(self, made: torch.Tensor, into: torch.Tensor) -> Iterator[Run]:
        """Where the elements of `made`, which came out of the operations, come from, for all of `into`, of that shape.

        Raises `NotFollowedError` where that is not known.
        """
        known = self._known.get(_storage(made))
        if known is None or known.tensor._version or made.is_conj() or made.is_neg():
            raise NotFollowedError("its values are not those of the tensors that it is made of")
        if made.dtype != known.tensor.dtype or made.shape != into.shape:
            raise NotFollowedError("its elements are others than those of the tensors that it is made of")
        order = _order(made)
        made, into = made.permute(order), into.permute(order)
        if not known.parts:
            yield from _runs(self._numbers[_storage(made)], made, into)
            return
        if not made.is_contiguous():
            raise NotFollowedError("parts of what was joined are used")
        order = _order(known.tensor)  # torch joins tensors with channels last to one with channels last
        into = _viewed(into, known.tensor.permute(order).shape).permute(
            sorted(range(len(order)), key=order.__getitem__)
        )
        for place, part in known.parts:
            yield from self.runs(part, place(into))


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of `tensor` as they lie in memory."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _runs(number: int, made: torch.Tensor, into: torch.Tensor) -> Iterator[Run]:
    if made.is_contiguous():
        yield Run(number, int(made.storage_offset()), into)
        return
    if made.dim() < 2:
        raise NotFollowedError("single elements are picked")
    for index in range(made.shape[0]):
        yield from _runs(number, made[index], into[index])


def _viewed(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    try:
        return tensor.view(shape)
    except RuntimeError as error:
        raise NotFollowedError("dimensions are merged that do not lie together") from error


def _storage(tensor: torch.Tensor) -> int:
    """Tells storages apart, as long as they live."""
    return int(tensor.untyped_storage()._cdata)
