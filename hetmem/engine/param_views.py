"""What `p.data` and `p.grad` are at each moment: a home, the device copy for the length of an operator, a stand-in.

Owns the views of device slots and the maps from storages to parameters. It moves no bytes and decides nothing.

Note "use counts": a view of a weight, a tensor that autograd or a checkpoint saved, `ctx.weight` of a custom function
hold the storage of a slot. Every device view has a storage of its own, so the storage's reference count is the truth
about use: above what it was when the view was made, it is in use.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Container, Iterable
from itertools import repeat
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch

from hetmem import torch_private
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, Widened, give_away, stored
from hetmem.memory.device import DevicePool


class Bindings:
    """The managed parameters of one model, by identity and by storage, and what each `p.data` is."""

    def __init__(self, parameters: Iterable[ManagedParameter]) -> None:
        self.by_id: dict[int, ManagedParameter] = {}
        self.by_address: dict[int, ManagedParameter] = {}
        self.by_storage: dict[int, ManagedParameter] = {}
        """The handles of the storages that hetmem itself made for the same memory: faster to ask, and all that an
        operator's result may share. One that a program made of an address is in `by_address` alone."""
        self._away, self.rests = 0, False
        self.resting: list[ManagedParameter] = []
        """Parameters that rest in a backward: see `end_rest`."""
        self._kept_at: dict[Chunk, int] = {}
        """The device slot of which views of a chunk are kept that has no copy there."""
        self.learn(parameters)

    def learn(self, parameters: Iterable[ManagedParameter]) -> None:
        """Note the homes of `parameters` in place of all that was known; no device view may be open."""
        self.by_address.clear()
        self.by_storage.clear()
        for managed in parameters:
            self.by_id[id(managed.parameter)] = managed
            self._learn_home(managed)

    def _learn_home(self, managed: ManagedParameter) -> None:
        for tensor in (managed.home, managed.rest) if managed.numel else ():
            self.by_address[tensor.untyped_storage().data_ptr()] = managed
            self.by_storage[storage_address(tensor)] = managed

    def move_home(self, managed: ManagedParameter, home: torch.Tensor, rest: torch.Tensor) -> None:
        """Give `managed` another home, with the same values, and another `rest`; device views stay."""
        parameter = managed.parameter
        unbound, parameter.__class__ = type(parameter), managed.kind
        at = parameter.data_ptr()
        at_home, resting = at == managed.home.data_ptr(), at == managed.rest.data_ptr()
        for tensor in (managed.home, managed.rest):
            self.by_address.pop(tensor.untyped_storage().data_ptr(), None)
            self.by_storage.pop(storage_address(tensor), None)
        managed.home, managed.rest = home, rest
        if at_home or resting:  # both, where it was on the device
            parameter.data = rest if self.rests or not at_home else home
        managed.home_address = home.data_ptr()
        managed.home_storage = storage_address(home)
        managed.home_references = storage_references(home) + (parameter.data_ptr() != home.data_ptr())
        parameter.__class__ = unbound
        self._learn_home(managed)

    def of_storage(self, tensor: torch.Tensor) -> ManagedParameter | None:
        """Return the parameter whose home, stand-in or device slot `tensor` is a view of, or None."""
        try:
            return self.by_address.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # it has no memory: sparse, of a transform, of code that is being traced
            return None

    def open_device(self, chunk: Chunk, pool: DevicePool, slot: int) -> None:
        """Make the views of all parameters of `chunk`, whose copy is in device slot `slot`, or take those of the last
        time that it was there."""
        dtype, kept = chunk.compute_dtype, pool.views.get(slot)
        known = None if kept is None else kept.pop(chunk, None)
        for managed in chunk.parameters:
            if managed.device is not None:
                continue
            if known is not None and managed in known:
                managed.device, managed.device_view, *counted = known[managed]
                managed.device_storage, managed.device_address, managed.device_references = counted
            else:
                managed.device = view = managed.shaped(pool.flat(slot, dtype, managed.numel, managed.offset))
                storage = view.untyped_storage()
                managed.device_storage, managed.device_address = storage._cdata, storage.data_ptr()
                del storage  # which counts; that it was asked for once does, too
                managed.device_references = references(managed.device_storage)
            if managed.numel:
                self.by_address[managed.device_address] = managed
                self.by_storage[managed.device_storage] = managed

    def close_device(self, chunk: Chunk, pool: DevicePool, slot: int) -> None:
        """Forget the device views of `chunk`, whose `slot` goes to another one. Making a view takes some ten calls of
        torch, so those of the last place that no program holds are kept, as long as its memory is."""
        kept = pool.views.setdefault(slot, {}) if pool.holds_place(slot) else None
        if self._kept_at.get(chunk, slot) != slot:
            pool.views.get(self._kept_at.pop(chunk), {}).pop(chunk, None)
        views = {}
        for managed in chunk.parameters:
            view = managed.device
            if view is None:
                continue
            made = managed.device_view
            managed.device = managed.device_view = None
            if managed.numel:
                del self.by_address[managed.device_address], self.by_storage[managed.device_storage]
                held = references(managed.device_storage) > managed.device_references
                if kept is not None and not held and view.data_ptr() == managed.device_address:
                    counted = managed.device_storage, managed.device_address, managed.device_references
                    views[managed] = view, made, *counted
        if kept is not None and views:
            kept[chunk], self._kept_at[chunk] = views, slot

    @staticmethod
    def device_view(managed: ManagedParameter, *shaped: Any) -> torch.Tensor:
        """Return `as_strided(*shaped)` of the device copy of `managed`. The first one is kept: the same is asked for
        again and again."""
        known, device = managed.device_view, managed.device
        assert device is not None
        if known is None:
            known = managed.device_view = shaped, device.as_strided(*shaped)
            managed.device_references += 1
        return known[1] if known[0] == shaped else device.as_strided(*shaped)

    # ---- what a parameter is now -------------------------------------------------------------------------------

    def bind(self, used: Iterable[ManagedParameter]) -> None:
        """Bind `used` to their device copies."""
        for managed in used:
            assert managed.device is not None
            parameter = managed.parameter
            parameter.__class__ = managed.kind  # whose `.data` is torch's own
            parameter.data = managed.device
            parameter.__class__ = managed.bound_kind

    def unbind(self, used: Iterable[ManagedParameter]) -> None:
        """End `bind`: each of `used` rests, or is its home if nothing computes."""
        for managed in used:
            parameter = managed.parameter
            parameter.__class__ = managed.kind
            parameter.data = managed.rest if self._away else managed.home
            if self._away:
                parameter.__class__ = managed.unbound_kind
                if not self.rests and managed.rest is not managed.home:
                    self.resting.append(managed)

    def is_elsewhere(self, managed: ManagedParameter) -> bool:
        """Return whether the program has set `managed.parameter.data`, which was bound."""
        at = managed.parameter.data_ptr()
        if at == managed.home_address or (managed.device is not None and at == managed.device.data_ptr()):
            return False
        return at not in (managed.home.data_ptr(), managed.rest.data_ptr())

    @property
    def away(self) -> bool:
        """Return whether the model computes: then a parameter that is not bound is of its `unbound_kind`."""
        return self._away > 0

    def leave_home(self, *, backward: bool = False) -> None:
        """Begin compute: parameters that are not bound rest. A custom function of autograd takes a parameter as it is,
        and expects its gradient on the device, and of the dtype, that it then has. In a `backward` parameters stay at
        home, as a graph from outside of forwards has saved the parameters themselves."""
        self._away += 1
        if self._away == 1:
            self.rests = not backward
            self.rest([managed for managed in self.by_id.values() if not managed.bound])

    def rest(self, managed_ones: Iterable[ManagedParameter]) -> None:
        """Let `managed_ones`, which are at home, rest as all others do while the model computes."""
        for managed in managed_ones:
            parameter = managed.parameter
            if self.rests and managed.rest is not managed.home:
                parameter.data = managed.rest
            parameter.__class__ = managed.unbound_kind

    def end_rest(self) -> None:
        """Send parameters home that a recomputation within a backward has left at rest. Until that is over they must
        not change their dtype, or torch adds their gradients up in another order."""
        while self.resting:
            managed = self.resting.pop()
            parameter = managed.parameter
            if not managed.bound and type(parameter) is managed.unbound_kind:
                parameter.__class__ = managed.kind
                parameter.data = managed.home
                parameter.__class__ = managed.unbound_kind

    def go_home(self) -> None:
        """End compute: every parameter is its home again, unless a forward around it still computes."""
        self._away = max(0, self._away - 1)
        if not self._away:
            self.end_rest()
            rests, self.rests = self.rests, False
            for managed in self.by_id.values():
                parameter = managed.parameter
                if type(parameter) is managed.unbound_kind:
                    parameter.__class__ = managed.kind
                    if rests and managed.rest is not managed.home:
                        parameter.data = managed.home

    def all_home(self) -> None:
        """End all compute, also what was interrupted."""
        self._away = min(1, self._away)
        self.go_home()

    def send_home(self, managed: ManagedParameter) -> bool:
        """Make `managed`, if it rests, its home, so that the program can read it; return whether it did rest."""
        parameter = managed.parameter
        if type(parameter) is not managed.unbound_kind:
            return False
        parameter.__class__ = managed.kind
        if managed.rest is not managed.home and (self.rests or managed in self.resting):
            parameter.data = managed.home
        return True

    @staticmethod
    def show_home(managed: ManagedParameter, tensor: torch.Tensor | None = None) -> None:
        """Set `managed.parameter.data`, which the program has set, to its home, or to `tensor`."""
        managed.parameter.data = managed.home if tensor is None else tensor

    def leave_to_holders(self, managed: ManagedParameter) -> None:
        """Leave the memory of the device view of `managed`, which gets other values, to tensors of the program that
        show it. Raises `ManageError` where that is impossible."""
        if managed.device is None or not managed.numel:
            return
        if references(managed.device_storage) <= managed.device_references:
            return
        if not give_away(managed.device):
            raise ManageError(
                f"{managed.name}.data was set within a forward while a view of what it was is held (as in "
                f"`kept = self.weight.data`): keep a clone of it"
            )
        del self.by_address[managed.device_address], self.by_storage[managed.device_storage]
        managed.device = managed.device_view = None


references: Any = torch_private.storage_references
storage_address: Any = torch_private.storage_address


def storage_references(tensor: torch.Tensor) -> int:
    """Return how often the memory of `tensor` is referred to, by tensors and by what C++ holds."""
    return references(tensor.untyped_storage()._cdata)  # type: ignore[no-any-return]


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether any other tensor holds the memory of `tensor`, which is no view (the handle that counts does)."""
    return references(tensor.untyped_storage()._cdata) > 2  # type: ignore[no-any-return]


def rest_of(managed: ManagedParameter, home: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what `managed` is between operators that run on `device`: `home`, or its stand-in. That was made when it
    was managed: a home comes back from the device just when there is no memory for one."""
    if managed.chunk.compute_dtype is managed.chunk.dtype and home.device == device:
        return home
    assert managed.stand_in is not None
    return managed.stand_in


def stand_in(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `dtype` on `device` in the shape of `like` that takes no memory and reads as NaN."""
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(like.shape)


def show_cast(cast: torch.Tensor, values: torch.Tensor | None) -> None:
    """Let `cast`, which torch keeps of a weight for later uses, have the weight's `values`; with None it takes no
    memory, and any function that computes with it raises."""
    with torch.no_grad():
        missing = torch.empty((0,) * 5, dtype=cast.dtype, device=cast.device)
        cast.data = missing if values is None else values.to(cast.dtype)


def reside(managed: ManagedParameter, home: torch.Tensor, device: torch.device) -> None:
    """Make `home`, which holds the values of `managed`, what `.data` is; operators run on `device`."""
    dtype = managed.chunk.compute_dtype
    if managed.stand_in is None and (dtype is not managed.chunk.dtype or device.type != "cpu"):
        managed.stand_in = stand_in(home, dtype, device)
    managed.home, managed.rest = home, rest_of(managed, home, device)
    managed.parameter.data = home
    managed.version = managed.parameter._version
    managed.home_storage = storage_address(home)
    managed.home_references = storage_references(home)
    managed.home_address = home.data_ptr()
    gradient = managed.parameter.grad
    if gradient is not None and gradient.device != home.device:
        managed.parameter.grad = gradient.to(home.device)


# ---- p.grad ----------------------------------------------------------------------------------------------------


def show_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `p.grad`. For one on another device, or of another dtype, `parameter` is that gradient for as long: torch
    refuses it from anything but autograd otherwise."""
    if gradient is None or (gradient.device == parameter.device and gradient.dtype is parameter.dtype):
        parameter.grad = gradient
        return
    home = parameter.data
    if type(gradient) is Widened:  # it has no memory that a parameter could have
        parameter.data = torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    else:
        parameter.data = gradient
    try:
        parameter.grad = gradient
    finally:
        parameter.data = home


def to_host_memory(managed: ManagedParameter) -> None:
    """Make the parameter, and its gradient, ordinary tensors in host memory, as the model is released."""
    parameter = managed.parameter
    gradient = take_gradient(parameter)
    parameter.data = parameter.data.to("cpu", copy=True, memory_format=torch.preserve_format)
    if gradient is not None and not isinstance(gradient, UsedUp):
        parameter.grad = gradient.to("cpu", copy=True, memory_format=torch.preserve_format)


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Take `p.grad` away and return it."""
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None
    return gradient


def hide_gradients(bound: Iterable[ManagedParameter]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take away each `p.grad` of `bound` that is on another device, or of another dtype, than the parameter is now, as
    a compiler takes both for tensors of one device. Returns what `show_gradient` gives back."""
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
    for managed in bound:
        parameter = managed.parameter
        gradient = parameter.grad
        if gradient is not None and not (gradient.device == parameter.device and gradient.dtype is parameter.dtype):
            hidden.append((parameter, gradient))
            parameter.grad = None
    return hidden


def is_home_gradient(managed: ManagedParameter) -> bool:
    """Return whether `p.grad` is the home of the gradient, as hetmem left it there."""
    gradient = managed.parameter.grad
    return gradient is not None and is_home(gradient, managed)


def is_home(gradient: torch.Tensor, managed: ManagedParameter) -> bool:
    """Return whether `gradient` is, or shows, the home of that of `managed`, and where that was made."""
    kept: torch.Tensor = stored(gradient)
    return kept is managed.grad_home and kept.data_ptr() == managed.grad_address


def move_gradient(managed: ManagedParameter, gradient: torch.Tensor | None) -> None:
    """Make `gradient` the home of that of `managed`, at the present place of the role: the tensor that the program may
    hold stays the same one."""
    if gradient is not None:
        gradient.data = managed.view(Role.GRAD)
        managed.grad_address = gradient.data_ptr()
        if gradient is not managed.grad_home:
            managed.grad_version = gradient._version
    managed.grad_home = gradient


def show_widened(managed: ManagedParameter) -> None:
    """Let the gradient of `managed`, which was kept in fewer bits and has a home in all of them now, be `p.grad`."""
    view, managed.grad_view = managed.grad_view, None
    if view is not None and managed.parameter.grad is view:
        show_gradient(managed.parameter, managed.grad_home)


_alone = SimpleNamespace(grad_home=object())
_REFERENCES = sys.getrefcount(_alone.grad_home)
"""Of what one attribute alone refers to, as they are counted here."""


def leave_gradient_to_holders(managed: ManagedParameter, warned: list[str], *, others: int = 0) -> None:
    """Give a gradient of an earlier backward that the program keeps (`kept = p.grad; p.grad = None`) memory of its own,
    as the next one goes to the same home: torch makes a new tensor. Views of it (`p.grad.detach()`) cannot be told from
    the memory that they show: of the first there is a warning, in `warned`. `others`: how often hetmem itself refers to
    the tensor elsewhere, as the update that has used it does."""
    if managed.grad_home is None or not managed.numel or not is_kept(managed, others=others):
        return
    if is_shared(managed.grad_home) and not warned:
        warned.append(managed.name)
        warnings.warn(
            f"a view of an earlier p.grad of {managed.name} is kept, and will show the next gradient, as hetmem "
            f"puts that in the same place: keep p.grad itself, or a clone of it (said once)",
            stacklevel=2,
        )
    with torch.no_grad():
        managed.grad_home.data = managed.grad_home.clone()
    managed.close_grad_home()


def is_kept(managed: ManagedParameter, *, others: int = 0) -> bool:
    """Return whether the program holds the home of the gradient of `managed`, which is no `p.grad`, or a view of it."""
    view = managed.grad_view is not None
    if (sys.getrefcount(managed.grad_view) if view else sys.getrefcount(managed.grad_home)) > _REFERENCES + others:
        return managed.grad_home is not None
    return managed.grad_home is not None and references(storage_address(managed.grad_home)) > 1


Given = tuple[ManagedParameter, torch.Tensor, torch.Tensor | None, int, bool]
"""A working weight (see `placing.working`) of a parameter, what its gradient is added to in the backward that runs
(None: it is handed over at the end), which version that has, and whether there was no gradient before."""


def let_arrive(
    used: Iterable[tuple[ManagedParameter, torch.Tensor]], fresh: Container[ManagedParameter] | None
) -> list[Given]:
    """Have autograd add gradients of the working weights in `used` to what `p.grad` is; for those `fresh` that is the
    home, which it becomes here. None: nothing is added, what arrives is handed over."""
    given: list[Given] = []
    for managed, weight in used:
        parameter, is_fresh = managed.parameter, fresh is not None and managed in fresh
        if is_fresh and parameter.dtype is managed.chunk.dtype:
            parameter.grad = managed.grad_home
        elif is_fresh:  # it rests, in a forward around
            show_gradient(parameter, managed.grad_home)
        gradient = parameter.grad if fresh is not None else None
        if type(gradient) is not torch.Tensor:
            gradient = None
        if gradient is not None:  # as `show_gradient`
            weight.__class__ = managed.kind  # whose `.data` is torch's own
            own, weight.data = weight.data, gradient
            weight.grad, weight.data = gradient, own
            weight.__class__ = managed.bound_kind
        given += ((managed, weight, gradient, 0 if gradient is None else gradient._version, is_fresh),)
    return given


def take_arrived(given: Iterable[Given]) -> list[tuple[ManagedParameter, torch.Tensor, torch.Tensor | None]]:
    """End `let_arrive`: where nothing has arrived there is no gradient, or the one from before. Return what was not
    added to what was given for it, with that."""
    others: list[tuple[ManagedParameter, torch.Tensor, torch.Tensor | None]] = []
    for managed, weight, gradient, version, is_fresh in given:
        arrived, weight.grad = weight.grad, None
        if arrived is not gradient and arrived is not None:
            others += ((managed, arrived, gradient),)
        elif is_fresh and gradient is not None and gradient._version == version and managed.parameter.grad is gradient:
            managed.parameter.grad = None
    return others


def leave_working(managed: ManagedParameter, weight: torch.Tensor) -> None:
    """Have `weight`, a working weight that nothing computes with any more, take no memory."""
    if managed.stand_in is not None:
        weight.__class__ = managed.kind
        weight.data = managed.stand_in
        weight.__class__ = managed.bound_kind


def working_weight(managed: ManagedParameter) -> torch.Tensor:
    """Return a working weight over the device copy of `managed`."""
    assert managed.device is not None
    weight: Any = torch.nn.Parameter(managed.device, managed.parameter.requires_grad)
    vars(weight).update(vars(managed.parameter))
    vars(weight)["hetmem_parameter"] = weakref.ref(managed.parameter)
    weight.__class__ = managed.bound_kind
    return weight  # type: ignore[no-any-return]


def are_own(homes: list[torch.Tensor | None], addresses: list[int]) -> bool:
    """Return whether the program holds none of `homes` of gradients, none of which is a `p.grad`, nor a view of one,
    and all are at `addresses`: `is_kept` of many, by C alone."""
    if any(map(is_, homes, repeat(None))):
        return False
    found: Any = homes
    alone = max(map(sys.getrefcount, found), default=0) <= _REFERENCES_OF_LISTED
    alone = alone and max(map(references, map(storage_address, found)), default=0) <= 1
    return alone and [*map(torch.Tensor.data_ptr, found)] == addresses


def _references_of_listed() -> int:
    listed = [SimpleNamespace(grad_home=object())]
    return max(map(sys.getrefcount, [each.grad_home for each in listed]))


_REFERENCES_OF_LISTED = _references_of_listed()
"""Of what one attribute and one list alone refer to, as they are counted there."""


# ---- gradients that an update has used up ------------------------------------------------------------------------


_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class UsedUp(torch.Tensor):
    """Stands in `p.grad` for a gradient that an update has used up: its shape, no memory, and an error for all that
    computes with it but `zero_grad` (`hetmem_zeroed`). None would make a clip in between clip by a norm of 0, and,
    behind the step (`hetmem_stepped`), the next backward forget to add to it."""

    hetmem_name: str
    hetmem_zeroed: bool
    hetmem_stepped: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, element: torch.Tensor, name: str) -> UsedUp:
        """Make one in the shape of `like`, all of it the one `element`, for the parameter called `name`."""
        made = torch_private.make_subclass(cls, element.as_strided(like.shape, [0] * like.dim()))
        made.hetmem_name, made.hetmem_zeroed, made.hetmem_stepped = name, False, False
        return made

    def __init__(self, like: torch.Tensor, element: torch.Tensor, name: str) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types there
        return f"<the gradient of {self.hetmem_name}, used up by its update>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func in _ZERO:
            for leaf in leaves:
                leaf.hetmem_zeroed = True
            return args[0]
        if any(leaf.hetmem_stepped for leaf in leaves):
            raise RuntimeError(
                f"{func} met the gradient of {leaves[0].hetmem_name}, which the last step() has used up "
                f"(overlap='forward' or gradients='streamed'): read gradients before step(), or use overlap='backward' "
                f"and gradients='visible', which keep them"
            )
        name = next((leaf.hetmem_name for leaf in leaves), "a parameter")
        raise RuntimeError(
            f"{func} met the gradient of {name}, which its update has used up during backward "
            f"(gradients='streamed'): nothing can be clipped, scaled or measured any more. To clip, use "
            f"gradients='visible' with max_grad_norm=, or with overlap='off'"
        )


def clear_zeroed(parameter: torch.Tensor) -> None:
    """Raise RuntimeError where a gradient of `parameter` arrives, and one that a step has used up was not cleared."""
    gradient = parameter.grad
    if not isinstance(gradient, UsedUp):
        return
    if not gradient.hetmem_zeroed:
        raise RuntimeError(
            f"a gradient of {gradient.hetmem_name} arrives, and that of the last step was not cleared: torch would add "
            f"to it, but its update has used it up (overlap='forward' or gradients='streamed'): call zero_grad() "
            f"between step() and the next backward, or use overlap='backward' and gradients='visible', which keep it"
        )
    parameter.grad = None


def refuse_used_up(parameters: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if a step would begin with gradients in `parameters` that the step before has used up."""
    gradients = [parameter.grad for parameter in parameters]
    for gradient in gradients if UsedUp in set(map(type, gradients)) else ():
        if isinstance(gradient, UsedUp) and gradient.hetmem_stepped:
            raise RuntimeError(
                f"the gradient of {gradient.hetmem_name} is that of the last step, which has used it up "
                f"(overlap='forward' or gradients='streamed'), and torch would step with it, or with zeros, once more: "
                f"call zero_grad() between step() and the next backward, which leaves None behind"
            )


def is_as_it_was(gradient: torch.Tensor | None, used: torch.Tensor) -> bool:
    """Return whether `gradient`, which a parameter has, is `used`, or what stands for that once it is used up."""
    return gradient is used or (isinstance(gradient, UsedUp) and not gradient.hetmem_zeroed)


def updated_by_another(name: str) -> str:
    """Return the message for a step of the parameter called `name` whose update another optimizer has begun."""
    return (
        f"{name} was updated during backward by another optimizer, made with overlap=, whose step() was to be called: "
        f"make that with overlap='off', or drop it before the backward"
    )
