"""Marks parameters between calls of the model, so that reads wait for updates and writes without a version are seen.

- After a step with `overlap="forward"`, parameters whose update still runs are marked: a read waits for that update.
- Between a forward or backward and the step, while copies stay on the device, all are marked: a read or write of one
  whose update has begun raises, and a function that may write without counting a version (`p.data.mul_()`) makes its
  copies stale. From the step to the next forward frozen ones are, as their copies outlive it.

A marked parameter gets a subclass of its class, whose `__torch_function__` torch calls first; torch itself does so for
parameters without a shape (`torch.nn.parameter.UninitializedParameter`). The object and `isinstance` stay as they are.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import compress
from operator import attrgetter, gt, not_
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.param_views import references, storage_references
from hetmem.engine.runtime import Runtime
from hetmem.errors import ManageError
from hetmem.intercept.dynamo import uncompiled
from hetmem.memory.chunk import ManagedParameter, Role, without_graph
from hetmem.memory.interrupts import HELD_BACK
from hetmem.torch_private import tree_leaves

_TENSOR: Any = torch.Tensor
_TOLD: list[Any] = [
    getattr(_TENSOR, name)
    for name in "grad requires_grad _version shape ndim dtype layout device is_cuda is_leaf grad_fn nbytes".split()
]
_TELL_NO_VALUES = {way for each in _TOLD for way in (each.__get__, each.__set__)} | {
    getattr(_TENSOR, name)
    for name in "numel stride is_floating_point is_complex element_size __hash__ requires_grad_ "
    "register_hook register_post_accumulate_grad_hook".split()
}
"""Functions that read no values: those that every step calls of every parameter (`zero_grad`), and metadata."""
_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_HOME, _EXPECTED = attrgetter("home_storage"), attrgetter("home_references")
_TRAINS = attrgetter("parameter.requires_grad")
_NUMBERS = (bool, float, complex, str, type(None))


class Trailing:
    """Marks the parameters of one model. During a forward none is marked, as operators wait for what they use. In a
    backward that holds for recomputation only: hooks of the user see marked ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._chunks, self._traffic, self._monitor = runtime.chunks, runtime.traffic, runtime.monitor
        self.turn, self._touched = runtime.turn, runtime.writes.touched.add
        self.refuse_updated: weakref.WeakMethod[Callable[[list[ManagedParameter]], None]] | None = None
        """Raises RuntimeError for those of the given parameters whose update has begun before `step()`."""
        self.step_runs: Callable[[], bool] = lambda: False
        """Returns whether a step of a torch optimizer is on the stack, which may ask for the type of a parameter."""
        self._all = runtime.bindings.by_id
        self._marked: dict[int, ManagedParameter] = {}
        self._marks: dict[type, type] = {}
        self._unmarks: dict[type, type] = {}
        self._goes_on = self._watches = False
        self._frozen: dict[int, ManagedParameter] | None = None
        """From a step to the next forward, those that it does not train."""
        self._process = os.getpid()

    def begin(self) -> None:
        """Mark what a step leaves to be updated. Waits for parameters whose memory a tensor of the program shares
        (`kept = p.data`), as no function of torch tells of its use."""
        self._goes_on, self._process = True, os.getpid()
        self.resume()
        for managed in list(self._marked.values()):
            if managed.numel and storage_references(managed.home) > managed.home_references:
                self.wait_for(managed.parameter)

    def resume(self) -> None:
        """End compute: mark again."""
        if self._watches and not self.step_runs():
            watched = self._watched()
            managed_ones = watched.values()  # of which C++ is asked without a call of Python for each
            now = map(references, map(_HOME, managed_ones))
            for managed in compress(managed_ones, map(gt, now, map(_EXPECTED, managed_ones))):
                if managed.numel:
                    self._touched(managed)  # perhaps, through a tensor that shares its memory (`kept = p.data`)
            self._mark(watched)
        if self._goes_on:
            trailing = [chunk for chunk in self._chunks if self._traffic.trails(chunk)]
            self._goes_on = bool(trailing)
            self._mark({id(managed.parameter): managed for chunk in trailing for managed in chunk.parameters})

    def look_again(self) -> None:
        """Mark anew, after all updates were waited for."""
        self.unmark_all()
        self.resume()

    def pause(self) -> None:
        """Begin compute, which leaves copies of parameters on the device."""
        self.unmark_all()
        self._watches, self._frozen = bool(self._traffic.executor.chunk_of_block), None

    def begin_step(self) -> None:
        """Mark frozen parameters alone: a step begins, which makes the copies of all others stale."""
        self.unmark_all()
        trains = map(_TRAINS, self._all.values())
        self._frozen = dict(compress(self._all.items(), map(not_, trains))) if self._watches else {}
        if self._watches:
            self._mark(self._watched())

    def stop(self) -> None:
        """Mark no more: the model is released."""
        self.unmark_all()
        self._watches = False

    def _watched(self) -> dict[int, ManagedParameter]:
        """The parameters whose copies stay on the device though the program may write to them."""
        return self._all if self._frozen is None else self._frozen

    def unmark_all(self) -> None:
        """Unmark all parameters until `resume`."""
        unmarks = self._unmarks
        for managed in self._marked.values():
            parameter = managed.parameter
            if parameter.__class__ in unmarks:
                parameter.__class__ = unmarks[parameter.__class__]
        self._marked = {}

    @uncompiled
    @HELD_BACK
    def wait_for(self, parameter: Any) -> None:
        """Wait for the update of `parameter`, and unmark its chunk; nothing where hetmem itself reads. The caller has
        the turn. Raises `StoreError` if a drive fails, and `ManageError` in another process than that of the step."""
        managed = self._marked.get(id(parameter))
        if managed is None or self._monitor.paused:
            return
        if self._goes_on and os.getpid() != self._process:
            raise ManageError(
                f"{managed.name} is read in another process than that of the step, which returned before all was "
                f"updated (overlap='forward'): call the optimizer's synchronize() there first"
            )
        with self._monitor.unwatched(), without_graph():
            self._traffic.wait_for_update(managed.chunk)
            self._traffic.wait_until_written([managed.chunk.homes[Role.PARAM]])
        for each in managed.chunk.parameters:
            watched = self._watches and id(each.parameter) in self._watched()
            if not watched and self._marked.pop(id(each.parameter), None) is not None:
                _unmark(each.parameter)

    @contextmanager
    def used(self, parameter: Any) -> Iterator[None]:
        """Unmark `parameter` for the body, in which no update changes it and no other thread computes with it."""
        with self.turn.held("reading a weight"):
            managed = self._marked.get(id(parameter))
            refuse = None if self.refuse_updated is None else self.refuse_updated()
            if managed is not None and refuse is not None and not self._monitor.paused:
                refuse([managed])
            self.wait_for(parameter)
            watched = type(parameter)
            _unmark(parameter)
            try:
                yield
            finally:
                if id(parameter) in self._marked:
                    parameter.__class__ = watched

    def note(self, func: Any, parameters: Sequence[Any], result: Any) -> None:
        """Make copies of `parameters` stale if `func` was in place, or its `result` shares their memory."""
        if self._monitor.paused:
            return
        for managed in filter(None, (self._marked.get(id(parameter)) for parameter in parameters)):
            if is_in_place(func) or hands_out(managed, func, result):
                self._touched(managed)

    def _mark(self, parameters: dict[int, ManagedParameter]) -> None:
        """Mark `parameters`: all of them after each forward and backward, so without a call for each."""
        marks, unmarks = self._marks, self._unmarks
        for managed in parameters.values():
            parameter = managed.parameter
            kind: type = parameter.__class__
            if kind in unmarks or kind is managed.unbound_kind:  # marked already, or in a backward that goes on
                continue
            if kind not in marks:
                marks[kind] = _waiting(kind, self)
                unmarks[marks[kind]] = kind
            parameter.__class__ = marks[kind]
        self._marked = parameters | self._marked


def is_in_place(func: Any) -> bool:
    """Return whether `func` is in place by its name; some of those (the `_foreach_` ones) count no versions."""
    name: str = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def hands_out(managed: ManagedParameter, func: Any, result: Any) -> bool:
    """Return whether `result` of `func` may share the memory of `managed`: writes to it may count no version."""
    if func is torch.Tensor.tolist:
        return False
    home = managed.home.untyped_storage()._cdata
    for leaf in tree_leaves(result) if isinstance(result, (list, tuple, dict)) else (result,):
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, _NUMBERS):
                return True
        else:
            with suppress(RuntimeError):  # it has no memory: sparse, or of a transform
                if leaf.untyped_storage()._cdata == home:
                    return True
    return False


class _Waiting:
    """Is the first base of the class of a marked parameter; the second is the class that it had."""

    hetmem_trailing: Callable[[], Trailing | None]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TELL_NO_VALUES:
            with torch_private.NoFunctionsOfSubclasses():
                return func(*args, **(kwargs or {}))
        asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Waiting)]
        models = dict.fromkeys(filter(None, (type(parameter).hetmem_trailing() for parameter in asked)))
        with ExitStack() as around:
            for parameter in asked:
                around.enter_context(_read_at_home(parameter))
            if func not in _BACKWARDS:
                result = func(*args, **(kwargs or {}))
                for trailing in models:
                    trailing.note(func, asked, result)
                return result
        for trailing in models:
            trailing.unmark_all()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for trailing in models:
                trailing.look_again()

    def __deepcopy__(self, memo: Any) -> Any:
        return _read(self, "__deepcopy__", memo)

    def as_subclass(self, cls: Any) -> Any:
        """Return what torch does, which calls no `__torch_function__` for it."""
        return _read(self, "as_subclass", cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self, "__reduce_ex__", protocol)


def _waiting(kind: type, trailing: Trailing) -> type:
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "hetmem_trailing": weakref.ref(trailing)}
    return type(kind.__name__, (_Waiting, kind), own)


def _read(parameter: Any, method: str, argument: Any) -> Any:
    with _read_at_home(parameter):
        return getattr(parameter, method)(argument)


@contextmanager
def _read_at_home(parameter: Any) -> Iterator[None]:
    """Enter `Trailing.used` of `parameter`, if it is marked."""
    kind: Any = type(parameter)
    trailing = kind.hetmem_trailing() if issubclass(kind, _Waiting) else None
    if trailing is None:  # its model is gone, or another thread has just unmarked it
        _unmark(parameter)
        yield
        return
    with trailing.used(parameter):
        yield


def detached(parameter: torch.Tensor) -> torch.Tensor:
    """Return `parameter.detach()` once its update has ended, also between backward and step, where a read of the
    program raises: a checkpoint says itself that its weights are of two steps."""
    trailing = parameter.hetmem_trailing() if isinstance(parameter, _Waiting) else None
    if trailing is not None:
        trailing.wait_for(parameter)
    with torch_private.NoFunctionsOfSubclasses():
        return parameter.detach()


def _unmark(parameter: Any) -> None:
    if isinstance(parameter, _Waiting):
        parameter.__class__ = type(parameter).__mro__[2]  # the one behind the marked class and `_Waiting`
