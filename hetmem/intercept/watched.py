"""Classes of parameters whose uses by torch functions hetmem sees.

Note "classes": a parameter that must not be used as it is gets a subclass of its class with a `__torch_function__`,
which torch calls by argument, so only functions that get such a parameter cost anything. The object and `isinstance`
stay the same; torch does so to parameters without a shape (`torch.nn.parameter.UninitializedParameter`). The calls go
to `intercept.faults`. Of that class ("watched") are:

- during compute, all parameters, and all working weights that show no copy: a function that gets one computes with the
  working weight, whose copy it leases. One that shows its copy, in a call of its module, is of a subclass without the
  method, whose `.data` is a property, as writes through that count no versions.
- between calls, while copies may stay on the device or be fetched, all: a read or write of one whose update has begun
  raises, or waits if the update may end after its step; a function that may write without counting a version
  (`p.data.mul_()`) makes copies stale. Of a model that is whole on the device, with no update that ends after its step,
  only frozen parameters are watched from a step to the next forward (see `engine.write_check`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn

import torch

from hetmem import torch_private
from hetmem.engine.param_views import get_data, leave_ordinary, of_class, set_data, works_for
from hetmem.errors import DeviceOutOfMemoryError, ManageError
from hetmem.intercept.dynamo import set_compiler, skipped, told
from hetmem.torch_private import tree_leaves

_get_compiler: Any = torch_private.eval_frame.get_eval_frame_callback

FaultHandler = Any
"""The `Faults` that is called, held weakly; it imports this module."""


class Watched:
    """The first base of the class of a watched parameter; the second is the parameter's own class."""

    hetmem_faults: Callable[[], FaultHandler | None]
    hetmem_coded = False
    """Whether parameters of this class are quantised."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise: never called, as no tensor is made of this class. Dynamo traces no class with such a method: the graph
        breaks where a function that is compiled by itself gets a watched parameter."""
        raise AssertionError(f"{func} was dispatched to a parameter")

    @classmethod
    @skipped
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # never true where this runs
            torch._dynamo.graph_break("a weight that hetmem manages, in a function that is compiled by itself")
            return func(*args, **(kwargs or {}))
        faults = cls.hetmem_faults()
        if faults is None:  # the model is gone
            if cls.hetmem_coded:
                raise ManageError(
                    "this weight was quantised by hetmem, and its model, which had its codes, is gone: keep the model, "
                    "or a clone of the weight"
                )
            for parameter in tree_leaves((args, kwargs)):
                if isinstance(parameter, cls):
                    leave_ordinary(parameter)
            return func(*args, **(kwargs or {}))
        compiler = _get_compiler()
        if compiler is not None:
            set_compiler(None)
        try:
            return faults(func, args, kwargs or {})
        except DeviceOutOfMemoryError as error:
            raise told(error) from None
        finally:
            if compiler is not None:
                set_compiler(compiler)

    def __deepcopy__(self, memo: Any) -> Any:
        managed = works_for(self)
        if managed is not None:
            return deepcopy(managed.parameter, memo)
        # Of a quantised one torch would note in `memo` the `id` of decoded values, which end at once.
        return self._call_own("__deepcopy__", {} if self.hetmem_coded else memo)

    def as_subclass(self, cls: Any) -> Any:
        """Return what torch's method does, which calls no `__torch_function__`."""
        return self._call_own("as_subclass", cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._call_own("__reduce_ex__", protocol)

    def set_(self: Any, *given: Any, **named: Any) -> Any:
        """Do what torch's method does, which calls no `__torch_function__`. Raises `ManageError` within compute."""
        faults = type(self).hetmem_faults()
        if faults is not None:
            faults.refuse_coded(self, "p.set_(…)")
            if faults.computes():
                refuse_set()
        return torch.Tensor.set_(self, *given, **named)

    def _use_count(self: Any) -> int:
        """Return what torch's method does. Only `torch.utils.swap_tensors` calls it, of a tensor that it exchanges."""
        faults = type(self).hetmem_faults()
        if faults is not None:
            faults.before_exchange(self)
        return torch_private.tensor_references(self)  # type: ignore[no-any-return]

    def _call_own(self, method: str, argument: Any) -> Any:
        """Call `method` of the parameter's own class, as a torch function would be called."""

        def call(parameter: Any) -> Any:
            return getattr(super() if isinstance(parameter, Watched) else parameter, method)(argument)

        faults = type(self).hetmem_faults()
        return call(self) if faults is None else faults(call, (self,), {})


class Bound:
    """The first base of the class of a parameter bound for a module call; the second is the parameter's own class."""

    hetmem_faults: Callable[[], FaultHandler | None]

    @property
    def data(self) -> torch.Tensor:
        """The tensor's `data`; hetmem notes the access, as writes through it count no version."""
        faults = self.hetmem_faults()
        found: torch.Tensor = get_data(self) if faults is None else faults.data_of_bound(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        faults = self.hetmem_faults()
        if faults is None:
            set_data(self, value)
        else:
            faults.set_data_of_bound(self, value)

    def set_(self, *_: Any, **__: Any) -> Any:
        """Raise `ManageError`: the parameter would leave its device copy, and its home, behind."""
        refuse_set()

    def _use_count(self) -> int:
        """Raise `ManageError` for `torch.utils.swap_tensors`, for the same reason."""
        refuse_exchange()

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a copy of its parameter, so that a module that is copied meanwhile has one copy of both."""
        managed = works_for(self)
        return _call_unbound(self, "__deepcopy__", memo) if managed is None else deepcopy(managed.parameter, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _call_unbound(self, "__reduce_ex__", protocol)


class BoundCoded(Bound):
    """The same of a quantised parameter, which stays frozen."""

    @property
    def requires_grad(self) -> bool:
        """False, whatever it is set to: setting it to True raises `ManageError`."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        faults = self.hetmem_faults()
        if value and faults is not None:
            faults.refuse_coded(self, "requires_grad = True")

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Return this parameter. Raises `ManageError` for True."""
        self.requires_grad = requires_grad
        return self


def refuse_set() -> NoReturn:
    """Raise `ManageError` for `p.set_(…)` within compute."""
    raise ManageError(
        "p.set_(…) of a managed parameter within a forward or backward: write p.copy_(tensor) with torch.no_grad()"
    )


def refuse_exchange() -> NoReturn:
    """Raise `ManageError` for `torch.utils.swap_tensors` within compute."""
    raise ManageError(
        "torch.utils.swap_tensors of a managed parameter within a forward or backward: exchange tensors before or after"
        " it, or write p.copy_(tensor) with torch.no_grad()"
    )


def _call_unbound(parameter: Any, method: str, argument: Any) -> Any:
    """Call `method` of `parameter` while it is of its own class, the last base."""
    with of_class(parameter, type(parameter).__bases__[-1]):
        return getattr(parameter, method)(argument)


def classes_of(kind: type, faults: Callable[[], FaultHandler | None], *, coded: bool) -> tuple[type, type]:
    """Return the classes of bound and of watched parameters, `coded` or not, whose own class is `kind`."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "hetmem_faults": faults}
    own |= {"hetmem_coded": coded}
    if coded:  # what PEFT asks a weight for that bitsandbytes has quantised, to merge an adapter into it
        own |= {"quant_state": property(_no_state), "SCB": property(_no_state)}
    bound = BoundCoded if coded else Bound
    return type(kind.__name__, (bound, kind), dict(own)), type(kind.__name__, (Watched, kind), dict(own))


class _NoStateError(ManageError, AttributeError):
    """Says that a quantised weight has no state of bitsandbytes; `getattr` with a default returns that."""


def _no_state(parameter: Any) -> NoReturn:
    raise _NoStateError(
        "hetmem keeps the codes of this weight, which has no quant_state of bitsandbytes any more, and cannot be "
        "written: to merge an adapter, save it (model.save_pretrained(…)) and merge it into a base of 16 bits"
    )


def detached(parameter: torch.Tensor) -> torch.Tensor:
    """Return `parameter.detach()` once its update has ended. Unlike a read by the program, this is no error between
    backward and step: a checkpoint says itself that its weights are of two steps. The caller has the turn."""
    faults = parameter.hetmem_faults() if isinstance(parameter, Watched) else None
    if faults is not None:
        faults.wait_for_update(parameter)
    with torch_private.NoFunctionsOfSubclasses():
        return parameter.detach()
