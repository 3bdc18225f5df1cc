"""The class of a parameter that tells of each function that meets it.

Note "classes": a parameter that may not be used as it is gets a subclass of its class with a `__torch_function__`,
which torch asks by argument, so only functions that meet such a parameter cost anything. The object and `isinstance`
stay as they are; torch does the same to parameters without a shape (`torch.nn.parameter.UninitializedParameter`).
`intercept.faults` is told. Of that class are:

- while something computes, all parameters that are not bound for a call of a module. A bound one is of a subclass
  without the method, whose `.data` is a property, as writes through that count no versions.
- between calls, while copies may stay on the device or be fetched, all: a read or write of one whose update has begun
  raises, or waits for the update where it trails behind its step; a function that may write without counting a version
  (`p.data.mul_()`) makes its copies stale. Where the model is whole on the device and no update trails, only frozen
  ones are from a step to the next forward (see `engine.write_check`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.param_views import get_data, leave_ordinary, of_class, set_data
from hetmem.intercept.dynamo import set_compiler, skipped
from hetmem.memory.chunk import ManagedParameter
from hetmem.torch_private import tree_leaves

_get_compiler: Any = torch_private.eval_frame.get_eval_frame_callback
_NUMBERS = (bool, float, complex, str, type(None))

Told = Any
"""The `Faults` that is told, held weakly: it imports this."""


class Watched:
    """Is the first base of the class of a watched parameter; the second is the class that it had."""

    hetmem_told: Callable[[], Told | None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never called, as none is made of this class. A class with such a method is traced by no compiler: where a
        function that is compiled by itself meets one, the graph ends."""
        raise AssertionError(f"{func} was dispatched to a parameter")

    @classmethod
    @skipped
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # never true where this runs
            torch._dynamo.graph_break("a weight that hetmem manages, in a function that is compiled by itself")
            return func(*args, **(kwargs or {}))
        told = cls.hetmem_told()
        if told is None:  # its model is gone
            for parameter in tree_leaves((args, kwargs)):
                if isinstance(parameter, cls):
                    leave_ordinary(parameter)
            return func(*args, **(kwargs or {}))
        compiler = _get_compiler()
        if compiler is not None:
            set_compiler(None)
        try:
            return told(func, args, kwargs or {})
        finally:
            if compiler is not None:
                set_compiler(compiler)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._as_it_was("__deepcopy__", memo)

    def as_subclass(self, cls: Any) -> Any:
        """Return what torch does, which calls no `__torch_function__` for it."""
        return self._as_it_was("as_subclass", cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_it_was("__reduce_ex__", protocol)

    def _as_it_was(self, method: str, argument: Any) -> Any:
        """What the parameter's own class does, as if that were a function of torch's."""

        def call(parameter: Any) -> Any:
            return getattr(super() if isinstance(parameter, Watched) else parameter, method)(argument)

        told = type(self).hetmem_told()
        return call(self) if told is None else told(call, (self,), {})


class Bound:
    """Is the first base of the class of a parameter bound for a call of a module; the second is the class it had."""

    hetmem_told: Callable[[], Told | None]

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor."""
        told = self.hetmem_told()
        found: torch.Tensor = get_data(self) if told is None else told.data_of_bound(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        told = self.hetmem_told()
        if told is None:
            set_data(self, value)
        else:
            told.set_data_of_bound(self, value)

    def __deepcopy__(self, memo: Any) -> Any:
        return _as_plain(self, "__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self, "__reduce_ex__", protocol)


def _as_plain(parameter: Any, method: str, argument: Any) -> Any:
    """What the parameter's own class, the one behind `Bound`, makes of it, which is of that class."""
    with of_class(parameter, type(parameter).__mro__[2]):
        return getattr(parameter, method)(argument)


def classes_of(kind: type, told: Callable[[], Told | None]) -> tuple[type, type]:
    """Return what parameters of the class `kind` are of while they are bound, and while they are watched."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "hetmem_told": told}
    return type(kind.__name__, (Bound, kind), dict(own)), type(kind.__name__, (Watched, kind), dict(own))


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


def detached(parameter: torch.Tensor) -> torch.Tensor:
    """Return `parameter.detach()` once its update has ended, also between backward and step, where a read of the
    program raises: a checkpoint says itself that its weights are of two steps. The caller has the turn."""
    told = parameter.hetmem_told() if isinstance(parameter, Watched) else None
    if told is not None:
        told.wait_for_update(parameter)
    with torch_private.NoFunctionsOfSubclasses():
        return parameter.detach()
