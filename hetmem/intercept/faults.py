"""Handles each torch function that gets a watched weight: within compute, binds its device copy during the function.

Outside of compute the weight is its home meanwhile, once its update has ended (see note "classes" in `watched`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.gradients import GradientSink
from hetmem.engine.param_views import get_data, hands_out, is_in_place, set_data, works_for
from hetmem.engine.rows import EmbeddingRows
from hetmem.engine.runtime import Runtime, in_backward
from hetmem.engine.write_check import refused_data, refused_write
from hetmem.errors import DeviceOutOfMemoryError, ManageError
from hetmem.intercept import coded
from hetmem.intercept.saved_tensors import SavedTensors
from hetmem.intercept.watched import Bound, Watched, classes_of, refuse_exchange
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK

_AsItIs: Any = torch_private.NoFunctionsOfSubclasses


def _getters(names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names.split() if hasattr(torch.Tensor, name)]


_TENSOR: Any = torch.Tensor
_FACTS = {
    *_getters(
        "shape requires_grad grad grad_fn is_leaf layout ndim is_sparse is_quantized is_meta is_mkldnn "
        "is_nested output_nr _version retains_grad name names volatile _backward_hooks _post_accumulate_grad_hooks "
        "_base _grad"
    ),
    *(
        getattr(torch.Tensor, name)
        for name in (
            "size dim numel nelement ndimension storage_offset register_hook "
            "register_post_accumulate_grad_hook requires_grad_ __hash__ __len__ is_same_size retain_grad"
        ).split()
    ),
    _TENSOR.grad.__set__,
    _TENSOR.requires_grad.__set__,
    torch.numel,
    torch.is_same_size,
}
"""Functions whose answer is right wherever the parameter is, and that read no element."""
_CHANGE_GRADIENTS = {
    *(_TENSOR.grad.__set__, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
    *_getters("_backward_hooks _post_accumulate_grad_hooks"),
}
_FREEZE = {torch.Tensor.requires_grad_, _TENSOR.requires_grad.__set__}
_GRADIENT = {*_getters("grad _grad")}
_LAYOUT = {torch.Tensor.stride, torch.Tensor.is_contiguous}
"""Functions to which the stand-in of a parameter, which has no memory, would give a wrong answer."""
_KIND = {
    *_getters("device is_cuda is_cpu dtype"),
    *(torch.Tensor.get_device, torch.Tensor.is_floating_point, torch.is_floating_point),
}
"""Functions that ask for device or dtype: within compute, the device and the compute dtype."""
_TELL_NO_VALUES = (_FACTS | _LAYOUT | _KIND) - {torch.Tensor.size, torch.Tensor.dim} | {
    *_getters("nbytes"),
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
}
"""Functions that read no values of a parameter at home. Without `size` and `dim`: transforms of `torch.func` call these
last before they wrap the parameter in C++, and read it."""
_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_POINTERS = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    *_getters("__cuda_array_interface__"),
}
"""Functions that return the address of a weight, which stays valid until the enclosing module's call ends. The
storage's Python object is one for all callers, so its holders cannot be counted."""
_CALL_NO_FUNCTION = {set_data, torch.tensor, torch.Tensor.new_tensor, torch.ops.aten.set_.source_Tensor}


def _writes_to(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the arguments that `func`, which is in place, may write to: the first, or all where it has several
    outputs, as `_fused_adam_` has."""
    return (*args, *kwargs.values()) if kwargs or func.__name__.startswith("_") else args[:1]


class Faults:
    """Binds managed parameters of one model to their device copies during each function that gets them unbound."""

    def __init__(
        self, runtime: Runtime, gradients: GradientSink, saved: SavedTensors, interception: Any, rows: EmbeddingRows
    ) -> None:
        self._rows = rows
        self._runtime, self._gradients, self._saved = runtime, gradients, saved
        self._bindings, self._marks = runtime.bindings, runtime.marks
        self._interception: Callable[[], Any] = weakref.ref(interception)
        """The `Interception`, which knows the compute around a function; it imports this module."""
        self._by_id = runtime.bindings.by_id
        with runtime.unwatched():
            dtypes, device = {chunk.compute_dtype for chunk in runtime.chunks}, runtime.memory.device.torch_device
            self._like = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in dtypes}
            """An empty tensor on the device by compute dtype."""
        kinds: dict[tuple[type, bool], tuple[type, type]] = {}
        self._coded: dict[int, ManagedParameter] = {}
        """The quantised parameters, by `id`: see `intercept.coded`."""
        for managed in runtime.parameters:
            managed.kind = type(managed.parameter)
            key = managed.kind, managed.code is not None
            if key not in kinds:
                kinds[key] = classes_of(managed.kind, weakref.ref(self), coded=managed.code is not None)
            managed.bound_kind, managed.watched_kind = kinds[key]
            if managed.code is not None:
                self._coded[id(managed.parameter)] = managed
            if managed.kind is torch.nn.Parameter:
                saved.kinds.add(managed.bound_kind)
        runtime.bindings.watch_coded()

    def _bound(self, parameter: Any) -> ManagedParameter | None:
        """Return what `parameter`, whose `.data` is used, is or is the working weight of; None: nothing managed."""
        interception = self._interception()
        if interception is not None:
            interception.working.cannot_serve = True
        managed = self._by_id.get(id(parameter))
        return works_for(parameter) if managed is None else managed

    def data_of_bound(self, parameter: Any) -> torch.Tensor:
        """Return `parameter.data`, through which the program may write."""
        managed = self._bound(parameter)
        if managed is not None:
            managed.data_taken = True
        found: torch.Tensor = get_data(parameter)
        return found

    def set_data_of_bound(self, parameter: Any, value: torch.Tensor) -> None:
        """Do `parameter.data = value`, of a copy of a parameter; see `_set_data`."""
        managed = self._bound(parameter)
        if managed is None:
            set_data(parameter, value)
            return
        self._set_data(managed, value)

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call `func(*args, **kwargs)`, with a watched parameter among the arguments."""
        computes = self._bindings.away
        if self._coded and args and (frozen := self._coded_of(args[0])) is not None:
            if func in _LAYOUT:
                return func(frozen.like(), *args[1:], **kwargs)
            coded.refuse_to_train(func, args, kwargs, frozen)
        as_it_is = func in _FACTS or self._runtime.monitor.paused if computes else func in _TELL_NO_VALUES
        if as_it_is:
            if func in _CHANGE_GRADIENTS and id(args[0]) in self._by_id:
                self._bindings.met.add(self._by_id[id(args[0])])
            elif func in _GRADIENT and in_backward() and not self._runtime.monitor.paused:
                with HELD_BACK, self._runtime.unwatched():  # a hook of the program may read it, or write to it
                    self._gradients.wait_until_home()
            with _AsItIs():
                result = func(*args, **kwargs)
            if computes and func in _FREEZE and (interception := self._interception()) is not None:
                interception.working.freeze()
            return result
        used, kept = list[ManagedParameter](), dict[int, ManagedParameter]()
        self._find(args, used, kept)
        if kwargs:
            self._find(kwargs.values(), used, kept)
        if not used:  # a copy of a parameter, with its class
            with _AsItIs():
                return func(*args, **kwargs)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs, used)
        if not self.computes():
            args, kwargs = _exchanged(args, kwargs, {key: managed.parameter for key, managed in kept.items()})
            return self._at_home(func, args, kwargs, used)
        if func in _LAYOUT or func in _KIND:  # called more often than operators
            like = used[0].like() if func in _LAYOUT else self._like[used[0].chunk.compute_dtype]
            return func(like, *args[1:], **kwargs)
        with HELD_BACK:
            return self._operator(func, args, kwargs, used, kept)

    def _coded_of(self, value: Any) -> ManagedParameter | None:
        """Return the quantised parameter that `value` is, or is the working weight of; None if none."""
        if (found := self._coded.get(id(value))) is None and isinstance(value, (Watched, Bound)):
            found = works_for(value)
        return found if found is not None and found.code is not None else None

    def computes(self) -> bool:
        """Return whether this thread is within a forward of the model, or a node of its backward."""
        interception = self._interception()
        return bool(self._bindings.away and interception is not None and interception.computes())

    def _find(self, values: Iterable[Any], used: list[ManagedParameter], kept: dict[int, ManagedParameter]) -> None:
        """Add the watched parameters among `values`, or in containers there, to `used`, once each, and those of working
        weights without memory, which are in `kept` by `id`."""
        for value in values:
            if isinstance(value, Watched):
                managed = self._by_id.get(id(value))
                if managed is None and (managed := works_for(value)) is not None:
                    kept[id(value)] = managed
                if managed is not None and managed not in used:
                    used.append(managed)
            elif isinstance(value, (list, tuple)):
                self._find(value, used, kept)
            elif isinstance(value, dict):
                self._find(value.values(), used, kept)

    def _operator(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        used: list[ManagedParameter],
        kept: dict[int, ManagedParameter],
    ) -> Any:
        interception = self._interception()
        if func == set_data and (used[0].parameter is args[0] or id(args[0]) in kept):
            return self._set_data(used[0], args[1])
        if func is torch.nn.functional.embedding and (rows := self._rows.read(used, args, kwargs)) is not None:
            return rows
        if self._gradients.within_step or in_backward():
            self._gradients.notify_use(used)
        if in_backward():
            self._saved.enter_node()
        takes_data = func == get_data
        written = used if is_in_place(func) and self._are_among(used, kept, _writes_to(func, args, kwargs)) else ()
        if (takes_data or written) and self._runtime.outgoing.save is not None:
            self._runtime.outgoing.wait_for([managed.chunk for managed in used])
        if interception.note_unbound_use(hands_out=takes_data):
            interception.working.arrive(used, _name(func))
            if takes_data or written:
                interception.working.cannot_serve = True
                for managed in used:
                    managed.data_taken = True
            return self._with_working(func, args, kwargs, used, kept)
        for managed in used if takes_data or written else ():
            managed.data_taken = managed.data_taken or managed.bound > 0
        fresh = [managed for managed in used if not managed.bound]
        interception.leases.rows.elsewhere.update(fresh)
        interception.leases.end_row_before(_name(func), fresh)
        self._runtime.uses.use(_name(func), fresh)
        displaced, casts = self._saved.displace_others(used), self._saved.casts
        left = casts.leave_cache()
        try:
            casts.renew(fresh)
            return self._with_working(func, args, kwargs, used, kept)
        finally:
            self._saved.restore_others(displaced)
            if left is not None:
                casts.enter_cache_again(left)
            if not (func in _POINTERS and interception.keep(fresh)):
                self._runtime.uses.end_use(fresh, untracked=func in (set_data, get_data), writes=written)
                casts.drop(fresh)

    def _with_working(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        used: list[ManagedParameter],
        kept: dict[int, ManagedParameter],
    ) -> Any:
        """Call `func` with the working weights of `used`, which show their copies, in the place of parameters and of
        earlier working weights."""
        given = {id(managed.parameter): managed.working for managed in used}
        given |= {key: managed.working for key, managed in kept.items()}
        args, kwargs = _exchanged(args, kwargs, given)
        result = run_again([self._runtime], func, args, kwargs)
        return next((m.parameter for m in used if result is m.working and id(result) not in kept), result)

    def _are_among(
        self, used: list[ManagedParameter], kept: dict[int, ManagedParameter], values: Iterable[Any]
    ) -> bool:
        parameters = {id(managed.parameter) for managed in used} | kept.keys()
        return any(
            id(value) in parameters or (isinstance(value, (list, tuple)) and self._are_among(used, kept, value))
            for value in values
        )

    def _backward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], used: list[ManagedParameter]) -> Any:
        """Call `func`, which runs a backward, and so nodes and the user's hooks, with `used` among its arguments."""
        if not self._bindings.away:
            return self._backward_at_rest(func, args, kwargs, used)
        self._bindings.as_ordinary(used)
        self._gradients.sent_home += used  # rest again as the backward begins
        try:
            return func(*args, **kwargs)
        finally:
            self._gradients.rest_again()

    def _backward_at_rest(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], used: list[ManagedParameter]
    ) -> Any:
        if any(managed.code is not None for managed in used):  # they require no gradients, as torch says then
            with _AsItIs():
                return func(*args, **kwargs)
        with self._runtime.turn.held("reading a weight"):
            self._wait_for(used)
        self._bindings.unwatch()
        try:
            return func(*args, **kwargs)
        finally:
            self._marks.resume()

    @HELD_BACK
    def _wait_for(self, used: list[ManagedParameter]) -> None:
        """Wait for the updates of `used`, which the program reads at home; raise if one began before the step."""
        self._gradients.notify_use(used)
        for managed in used:
            self._runtime.uses.read_at_home(managed)

    def _at_home(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], used: list[ManagedParameter]) -> Any:
        """Call `func` outside of compute, as in a hook of the user in a backward: with parameters at home, as the last
        step left them. On another thread than that of the compute this waits for the turn."""
        runtime, bindings, writes = self._runtime, self._bindings, self._runtime.writes
        with runtime.turn.held("reading a weight"):
            if decoded := [managed for managed in used if managed.code is not None]:
                return coded.at_home(func, args, kwargs, decoded, partial(_exchanged, args, kwargs))
            if runtime.monitor.paused:  # hetmem's own read
                with _AsItIs():
                    return func(*args, **kwargs)
            self._wait_for(used)
            computes = bindings.away  # called by a hook within a backward
            sent = [managed for managed in used if bindings.send_home(managed)]
            written = _writes_to(func, args, kwargs) if func == set_data or is_in_place(func) else ()
            try:
                if runtime.outgoing.save is not None and written:
                    runtime.outgoing.wait_for([managed.chunk for managed in used])
                if written and writes.announced is not None:
                    writes.announced([managed for managed in used if self._are_among([managed], {}, written)])
                result = func(*args, **kwargs)
                shown = [m for m in used if self._are_among([m], {}, written) or hands_out(m.home, func, result)]
                runtime.outgoing.wait_for([managed.chunk for managed in shown])  # it may write to that memory
                (writes.shared if computes else writes.touched).update(shown)
                return result
            finally:
                with HELD_BACK:
                    if computes:
                        runtime.uses.rest_again(sent)
                    else:
                        self._marks.mark_again(sent)

    def before_exchange(self, parameter: torch.Tensor) -> None:
        """Make `parameter`, whose C++ tensor the program is about to exchange for another one, an ordinary parameter at
        home, until the engine has looked at it. Raises `ManageError` within compute, and what a read raises."""
        if (managed := self._by_id.get(id(parameter))) is None:  # a copy of a parameter, with its class
            return
        self.refuse_coded(parameter, "torch.utils.swap_tensors of it")
        with self._runtime.turn.held("exchanging a weight"):
            if self._bindings.away:
                refuse_exchange()
            self._wait_for([managed])
            self._runtime.outgoing.wait_for((managed.chunk,))
            self._bindings.send_home(managed)
            self._bindings.exposed.add(managed)
            self._runtime.writes.touched.add(managed)

    def refuse_coded(self, parameter: torch.Tensor, what: str) -> None:
        """Raise `ManageError` for `what` if `parameter` is quantised."""
        if (managed := self._coded_of(parameter)) is not None:
            raise refused_write(managed, what)

    def wait_for_update(self, parameter: torch.Tensor) -> None:
        """Wait for the update of `parameter`, if one is still to end after the step."""
        managed = self._by_id.get(id(parameter))
        if managed is not None and not self._runtime.monitor.paused:
            with HELD_BACK:
                self._runtime.uses.read_at_home(managed)

    def _set_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """Raise `ManageError` for `parameter.data = value` within compute, unless `value` is the same memory, which
        `Module.to` sets."""
        if value is managed.parameter or value is managed.working:
            return
        with _AsItIs():
            shown = managed.working if managed.device is None else managed.device
            same = value.data_ptr() == shown.data_ptr() and value.dtype is shown.dtype
            if not same or value.shape != shown.shape or value.stride() != shown.stride():
                raise refused_data(managed)

    def within_unknown_memory(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call `func`, in a forward that may need more memory than is known, again if the device has run out of it."""
        _refuse_to_hand_out(func, args)
        try:
            return run_again([self._runtime], func, args, kwargs)
        finally:
            self._runtime.monitor.left = False


def _exchanged(
    args: Sequence[Any], kwargs: dict[str, Any], given: dict[int, torch.Tensor]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return `args` and `kwargs` with other tensors, `given` by `id`, in the place of some."""
    if not given:
        return args, kwargs

    def exchange(value: Any) -> Any:
        if id(value) in given:
            return given[id(value)]
        if type(value) in (list, tuple):
            return type(value)(map(exchange, value))
        return {key: exchange(each) for key, each in value.items()} if type(value) is dict else value

    return tuple(map(exchange, args)), {key: exchange(each) for key, each in kwargs.items()}


def _refuse_to_hand_out(func: Any, args: Sequence[Any]) -> None:
    """Raise `ManageError` for `other.data = weight`, `torch.tensor(weight)` and the like, which do not call the
    weight's `__torch_function__`, and so would read its stand-in without values."""
    if func not in _CALL_NO_FUNCTION or not isinstance(args[-1], Watched):
        return
    if func != set_data or not isinstance(args[0], (Watched, Bound)):
        raise ManageError(
            f"{_name(func)} of torch was given a weight itself within a forward, where that is on the device only for "
            f"functions that torch tells of: write other.data = weight.data, or other = weight.detach().clone()"
        )


def run_again(runtimes: Sequence[Runtime], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `func(*args, **kwargs)`. If the device's allocator is out of memory, free that of idle chunks of `runtimes`
    and call it again, unless `func` may have written."""
    try:
        return func(*args, **kwargs)
    except DeviceOutOfMemoryError:
        raise  # of hetmem: nothing idle is left
    except torch.OutOfMemoryError as error:
        if is_in_place(func) or "out" in kwargs:
            raise _explained(runtimes, error) from None
        for runtime in runtimes:
            runtime.uses.out_of_memory()
    try:
        return func(*args, **kwargs)
    except DeviceOutOfMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        raise _explained(runtimes, error) from None


def _explained(runtimes: Sequence[Runtime], error: Exception) -> Exception:
    """Return `error`, with what holds the device's memory added to its message."""
    messages = [runtime.room.shortage.last_message for runtime in runtimes if runtime.room.shortage.last_message]
    if messages:
        error.args = ("\n".join([str(error), *messages]),)
    return error


def _name(func: Any) -> str:
    name: str | None = getattr(func, "__name__", None)
    return str(func) if name is None else name
