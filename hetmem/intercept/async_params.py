"""Parameters that a step returned without: whoever reads one waits until its update is at home.

Such a parameter is of a class of its own for as long, which torch asks before it does anything with it; torch does the
same to parameters without a shape (`torch.nn.parameter.UninitializedParameter`). It stays the same object, and an
instance of whatever it was an instance of.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.live_bytes import DeviceMonitor
from hetmem.engine.param_views import storage_references
from hetmem.engine.traffic import Traffic
from hetmem.engine.turns import Turn
from hetmem.errors import ManageError
from hetmem.intercept.dynamo import uncompiled
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.tensor_views import without_graph
from hetmem.torch_private import tree_leaves

_TOLD: list[Any] = [
    getattr(torch.Tensor, name)
    for name in "grad requires_grad _version shape ndim dtype layout device is_cuda is_leaf grad_fn nbytes".split()
]
_TELL_NO_VALUES = {way for each in _TOLD for way in (each.__get__, each.__set__)} | {torch.Tensor.numel}
"""What every step asks of every parameter (`zero_grad`), and what is counted or printed."""
_WAITING: dict[type, type] = {}


class Trailing:
    """The parameters of one model whose updates go on behind a step. While the model computes they are ordinary ones:
    operators wait for what they use. In a backward only what it computes once more is that; hooks of the user are
    not."""

    def __init__(self, chunks: Sequence[Chunk], traffic: Traffic, monitor: DeviceMonitor, turn: Turn) -> None:
        self._chunks, self._traffic, self._monitor, self.turn = chunks, traffic, monitor, turn
        self._marked: dict[int, ManagedParameter] = {}
        self._goes_on = False
        self._process = os.getpid()

    def begin(self) -> None:
        """A step returns before all is done. Waits for parameters whose memory another tensor shows too (`p.data` that
        the user keeps), as torch tells of no use of that."""
        self._goes_on, self._process = True, os.getpid()
        self.resume()
        for managed in list(self._marked.values()):
            if managed.numel and storage_references(managed.home) > managed.home_references:
                self.wait_for(managed.parameter)

    def resume(self) -> None:
        """The model computes no more: whoever reads what is still not at home waits for it."""
        if self._goes_on:
            trailing = [chunk for chunk in self._chunks if self._traffic.trails(chunk)]
            self._goes_on = bool(trailing)
            for chunk in trailing:
                for managed in chunk.parameters:
                    self._mark(managed.parameter, managed)

    def look_again(self) -> None:
        """Somebody has waited for all."""
        self.pause()
        self.resume()

    def pause(self) -> None:
        """The model computes, or is no more."""
        for managed in self._marked.values():
            _unmark(managed.parameter)
        self._marked.clear()

    @uncompiled
    @HELD_BACK
    def wait_for(self, parameter: Any) -> None:
        """`parameter` is at home and an ordinary one, unless hetmem itself asks. Raises `StoreError` if a drive fails,
        and `ManageError` in another process than that of the step. Call it with the turn."""
        managed = self._marked.get(id(parameter))
        if managed is None or self._monitor.paused:
            return
        if os.getpid() != self._process:
            raise ManageError(
                f"{managed.name} is read in another process than that of the step, which returned before all was "
                f"updated (overlap='forward'): call the optimizer's synchronize() there first"
            )
        with self._monitor.unwatched(), without_graph():
            self._traffic.wait_for_update(managed.chunk)
            self._traffic.wait_until_written([managed.chunk.homes[Role.PARAM]])
        for each in managed.chunk.parameters:
            if self._marked.pop(id(each.parameter), None) is not None:
                _unmark(each.parameter)

    def _mark(self, parameter: Any, managed: ManagedParameter) -> None:
        if id(parameter) not in self._marked:
            parameter.hetmem_trailing = weakref.ref(self)
            parameter.__class__ = _waiting(type(parameter))
            self._marked[id(parameter)] = managed


class _Waiting:
    """What a parameter is whose update trails, beside what it is anyway."""

    hetmem_trailing: weakref.ref[Trailing]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TELL_NO_VALUES:
            leaves = tree_leaves((args, kwargs))
            with ExitStack() as turns:
                for leaf in leaves:
                    if isinstance(leaf, _Waiting):
                        turns.enter_context(_read_at_home(leaf))
                if not any(isinstance(leaf, _Waiting) for leaf in leaves):
                    return func(*args, **(kwargs or {}))
        with torch_private.NoFunctionsOfSubclasses():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        return _read(self, "__deepcopy__", memo)

    def as_subclass(self, cls: Any) -> Any:
        """As of any tensor; torch's own asks nobody."""
        return _read(self, "as_subclass", cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self, "__reduce_ex__", protocol)


def _waiting(kind: type) -> type:
    if kind not in _WAITING:
        name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _WAITING[kind] = type(kind.__name__, (_Waiting, kind), name)
    return _WAITING[kind]


def _read(parameter: Any, method: str, argument: Any) -> Any:
    with _read_at_home(parameter):
        return getattr(super(_Waiting, parameter) if isinstance(parameter, _Waiting) else parameter, method)(argument)


@contextmanager
def _read_at_home(parameter: Any) -> Iterator[None]:
    """`parameter` is at home, and no other thread computes with it."""
    reference = getattr(parameter, "hetmem_trailing", None)
    trailing = None if reference is None else reference()
    if trailing is None:  # nobody updates it any more, or another thread has just waited
        if reference is not None:
            _unmark(parameter)
        yield
        return
    with trailing.turn.held("reading a weight"):
        trailing.wait_for(parameter)
        yield


def _unmark(parameter: Any) -> None:
    parameter.__class__ = type(parameter).__mro__[2]  # after what waits, and `_Waiting`
    del parameter.hetmem_trailing
