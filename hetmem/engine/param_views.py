"""Sets `p.data`: to the home, to the device copy while the parameter is bound, or to a stand-in without memory.

Owns the views of device slots and the maps from storages to parameters. It moves no bytes and decides nothing.

Note "use counts": a view of a weight, a tensor saved by autograd or a checkpoint, and `ctx.weight` of a custom function
refer to the storage of a slot. Every device view has a storage of its own, so a copy is in use while the reference
count of its storage is above what it was when the view was made.

Note "views of weights": after a write to a weight autograd gives a view of it a new `grad_fn` as the view is used, with
the sizes and strides that the weight has by then. A stand-in, whose strides are 0, would share each gradient among all
elements. So a working weight shows its copy between uses too while a tensor of the program holds that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress, repeat
from operator import add, attrgetter, gt
from typing import Any

import torch

from hetmem import torch_private
from hetmem.memory.chunk import NO_MEMORY, NO_VIEW, Chunk, ManagedParameter, SlotView
from hetmem.memory.device import DevicePool

_HOME, _EXPECTED = attrgetter("home_storage"), attrgetter("home_references")
_DEVICE, _REST = attrgetter("device"), attrgetter("rest")
_WORKING, _VIEW = attrgetter("working"), attrgetter("slot_view")
_STORAGE, _REFERENCES = attrgetter("storage"), attrgetter("references")
_TENSOR, _ADDRESS, _ADDRESS_NOW = attrgetter("tensor"), attrgetter("address"), torch.Tensor.data_ptr
_BOUND_KIND, _WATCHED_KIND = attrgetter("bound_kind"), attrgetter("watched_kind")


class Bindings:
    """The managed parameters of one model, by identity and by storage; sets the `.data` and the class of each."""

    def __init__(self, parameters: Iterable[ManagedParameter]) -> None:
        self.by_id: dict[int, ManagedParameter] = {}
        self.by_address: dict[int, ManagedParameter] = {}
        self.by_storage: dict[int, ManagedParameter] = {}
        """Parameters by the handle of a storage that hetmem made: faster to look up, and enough for results of
        operators. A storage that the program made of an address is found in `by_address` alone."""
        self._away, self._watching = 0, False
        """How many forwards and backwards of the model run; and whether `watch` was called."""
        for managed in parameters:
            self.by_id[id(managed.parameter)] = managed
            self._learn_home(managed)
        layouts: dict[Any, int] = {}
        for chunk in dict.fromkeys(managed.chunk for managed in self.by_id.values()):
            fields = [(each.offset, each.numel, each.shape, each.stride) for each in chunk.parameters]
            chunk.layout = layouts.setdefault((chunk.compute_dtype, chunk.numel, *fields), len(layouts))
        self.exposed = {*self.by_id.values()}
        """Those that the program may have met as ordinary parameters since `watch`: it may hold their memory."""
        self.met = {*self.exposed}
        """Those of which it may have set `grad`, or registered hooks, since the last backward began."""

    def _learn_home(self, managed: ManagedParameter) -> None:
        if managed.numel:  # under keys that it has itself, as there may be many
            self.by_address[managed.home_address] = self.by_storage[managed.home_storage] = managed
            if managed.stand_in is not None:
                self.by_address[managed.stand_in.untyped_storage().data_ptr()] = managed
                self.by_storage[storage_address(managed.stand_in)] = managed

    def free_stand_ins(self) -> None:
        """Free the memory of all stand-ins, which no operator reads until `make_stand_ins`."""
        for managed in self.by_id.values():
            assert managed.stand_in is not None, f"{managed.name} has no stand-in"
            storage = managed.stand_in.untyped_storage()
            self.by_address.pop(storage.data_ptr(), None)
            storage.resize_(0)

    def make_stand_ins(self) -> None:
        """Allocate the memory of stand-ins that has been freed. Raises torch.OutOfMemoryError; a repeated call does the
        rest."""
        for managed in self.by_id.values():
            assert managed.stand_in is not None, f"{managed.name} has no stand-in"
            storage = managed.stand_in.untyped_storage()
            if not storage.nbytes():
                storage.resize_(managed.stand_in.itemsize)
                with torch.no_grad():
                    managed.stand_in.data.as_strided((), ()).fill_(nothing(managed.stand_in.dtype))
                if managed.numel:
                    self.by_address[storage.data_ptr()] = managed

    def move_home(self, managed: ManagedParameter, home: torch.Tensor) -> None:
        """Give `managed` another home with the same values; device views stay."""
        parameter = managed.parameter
        unbound, parameter.__class__ = type(parameter), managed.kind
        at_home = parameter.data_ptr() == managed.home.data_ptr()
        self.by_address.pop(managed.home.untyped_storage().data_ptr(), None)
        self.by_storage.pop(storage_address(managed.home), None)
        managed.home = home
        if at_home:
            parameter.data = home
        managed.home_address = home.data_ptr()
        managed.home_storage = storage_address(home)
        managed.home_references = storage_references(home) + (parameter.data_ptr() != home.data_ptr())
        parameter.__class__ = unbound
        self._learn_home(managed)

    def of_storage(self, tensor: torch.Tensor) -> ManagedParameter | None:
        """Return the parameter whose home, stand-in or device slot `tensor` is a view of, or None."""
        try:
            return self.by_address.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # it has no storage: sparse, of a transform, or traced
            return None

    def open_device(self, chunk: Chunk, pool: DevicePool, slot: int) -> torch.Tensor:
        """Set the device views of all parameters of `chunk`, which gets device slot `slot`, and return the slot as a
        flat tensor. Making a view takes some ten calls of torch, so all are kept for chunks of one layout as long as
        `slot` has its memory. Call it `unwatched`."""
        try:
            flat, known = pool.views[slot][chunk.layout]
        except KeyError:
            flat, known = pool.flat(slot, chunk.compute_dtype, chunk.numel), [SlotView() for _ in chunk.parameters]
            pool.views[slot][chunk.layout] = flat, known
        are_made = [*map(_ADDRESS_NOW, map(_TENSOR, known))] == [*map(_ADDRESS, known)]
        for managed, view in zip(chunk.parameters, known, strict=True):
            if managed.device is None:
                if not are_made and view.tensor.data_ptr() != view.address:  # new, or its storage got other memory
                    self._make(view, managed, pool, slot)
                managed.slot_view, managed.device = view, view.tensor
                if managed.numel:
                    self.by_address[view.address] = self.by_storage[view.storage] = managed
        return flat

    @staticmethod
    def _make(view: SlotView, managed: ManagedParameter, pool: DevicePool, slot: int) -> None:
        flat = pool.flat(slot, managed.chunk.compute_dtype, managed.numel, managed.offset)
        view.tensor, view.reshaped = managed.shaped(flat), None
        del flat
        storage = view.tensor.untyped_storage()
        view.storage, view.address = storage._cdata, storage.data_ptr()
        del storage  # a reference; the Python object stays counted
        view.references = references(view.storage)

    def close_device(self, chunk: Chunk) -> None:
        """Clear the device views of `chunk`, whose slot another chunk gets."""
        for managed in chunk.parameters:
            if managed.device is not None:
                view, managed.slot_view, managed.device = managed.slot_view, NO_VIEW, None
                if managed.numel:
                    del self.by_address[view.address], self.by_storage[view.storage]

    @staticmethod
    def device_view(managed: ManagedParameter, *shaped: Any) -> torch.Tensor:
        """Return `as_strided(*shaped)` of the device copy of `managed`. The first view is cached, as most calls ask for
        the same one."""
        view = managed.slot_view
        if (known := view.reshaped) is None:
            known = view.reshaped = shaped, view.tensor.as_strided(*shaped)
            view.references += 1
        return known[1] if known[0] == shaped else view.tensor.as_strided(*shaped)

    # ---- data and class ---------------------------------------------------------------------------------------

    def bind(self, used: Iterable[ManagedParameter]) -> None:
        """Have the working weights of `used` show device copies."""
        for managed in used:
            assert managed.device is not None
            weight = managed.working
            weight.__class__ = managed.kind  # whose `.data` is torch's own
            weight.data = managed.device
            weight.__class__ = managed.bound_kind

    @staticmethod
    def as_ordinary(used: Iterable[ManagedParameter]) -> None:
        """Give `used` the classes they had before they were managed, the only ones that compiled code accepts."""
        for managed in used:
            managed.working.__class__ = managed.kind

    def lose(self, kind: type) -> None:
        """Give all parameters the class `kind`, as the memory of their homes is not in this process."""
        for managed in self.by_id.values():
            managed.parameter.__class__ = kind

    def watch(self, *, but_trained: bool = False) -> None:
        """Watch all that are not bound; with `but_trained`, not those that are trained. Looks only at `exposed`, as
        this runs at the begin and end of each forward and backward."""
        self._watching = True
        self.met |= self.exposed
        ordinary = [each for each in self.exposed if each.parameter.__class__ is each.kind]
        self.exposed = {each for each in ordinary if but_trained and each.parameter.requires_grad}
        for managed in ordinary:
            if managed not in self.exposed:
                managed.parameter.__class__ = managed.watched_kind

    def watch_coded(self) -> None:
        """Watch quantised parameters from here on, also between calls; their classes are known."""
        for managed in self.by_id.values():
            if managed.code is not None:
                managed.parameter.__class__ = managed.watched_kind

    def unwatch(self) -> None:
        """End `watch`, but of quantised parameters, which functions get decoded."""
        if not self._watching:
            return
        for managed in self.by_id.values():
            if managed.parameter.__class__ is managed.watched_kind and managed.code is None:
                managed.parameter.__class__ = managed.kind
        self.exposed, self._watching = {*self.by_id.values()}, False

    @staticmethod
    def shared(among: Sequence[ManagedParameter]) -> list[ManagedParameter]:
        """Return those of `among` whose home's memory a tensor of the program shares."""
        now = map(references, map(_HOME, among))  # C++ is asked without a call of Python for each
        return [each for each in compress(among, map(gt, now, map(_EXPECTED, among))) if each.numel]

    def unbind(self, used: Iterable[ManagedParameter]) -> bool:
        """End `bind`: working weights of `used` have no memory of their own. Returns whether a tensor holds the copy of
        any."""
        for managed in used:
            weight = managed.working
            weight.__class__ = managed.kind
            weight.data = managed.rest
            weight.__class__ = managed.watched_kind
        return are_held(used)

    @staticmethod
    def rest_on(managed: ManagedParameter, copy: torch.Tensor | None) -> None:
        """Have the working weight of `managed` show `copy` while no use binds it; None: its stand-in."""
        managed.rest = managed.stand_in if copy is None else copy
        weight: Any = managed.working
        if type(weight) is managed.watched_kind:
            weight.__class__ = managed.kind
            set_data(weight, managed.rest)
            weight.__class__ = managed.watched_kind

    @staticmethod
    def are_held_by_others(managed: ManagedParameter) -> bool:
        """Return whether a tensor besides a working weight that rests on it has the memory of the copy of `managed`."""
        view, weight = managed.slot_view, managed.working
        rests = type(weight) is managed.watched_kind and managed.rest is not managed.stand_in
        return bool(references(view.storage) > view.references + rests)

    @staticmethod
    def is_elsewhere(managed: ManagedParameter) -> bool:
        """Return whether the program has set `.data` of `managed.parameter`, or given its storage other memory
        (`share_memory_()`)."""
        return bool(managed.parameter.data_ptr() != managed.home_address)

    @staticmethod
    def shows_no_copy(managed: ManagedParameter) -> bool:
        """Return whether the program has set `.data` of the working weight of `managed`, which was bound."""
        return managed.device is None or managed.working.data_ptr() != managed.device.data_ptr()

    @property
    def away(self) -> bool:
        """Whether the model computes: then a parameter that is not bound is watched."""
        return self._away > 0

    def is_watched(self, managed: ManagedParameter) -> bool:
        """Return whether `managed` is watched because the model computes."""
        return self._away > 0 and type(managed.parameter) is managed.watched_kind

    def leave_home(self) -> None:
        """Begin compute, in which modules have working weights: watch all parameters, which stay at home."""
        self._away += 1
        if self._away == 1:
            self.watch()

    @staticmethod
    def watch_again(managed_ones: Iterable[ManagedParameter]) -> None:
        """End `send_home` of `managed_ones`."""
        for managed in managed_ones:
            managed.parameter.__class__ = managed.watched_kind

    def go_home(self) -> None:
        """End `leave_home`."""
        self._away = max(0, self._away - 1)

    def all_home(self) -> None:
        """End all compute, also after an interrupt."""
        self._away = 0

    def send_home(self, managed: ManagedParameter) -> bool:
        """Make `managed`, if it is watched, an ordinary parameter; return whether it was."""
        parameter = managed.parameter
        if type(parameter) is not managed.watched_kind:
            return False
        parameter.__class__ = managed.kind
        self.met.add(managed)
        return True

    @staticmethod
    def show_home(managed: ManagedParameter) -> None:
        """Set `.data` of `managed.parameter`, which the program has set, to its home."""
        set_data(managed.parameter, managed.home)


get_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Access `.data` of a bound parameter, whose own `data` property notes each access."""
references: Any = torch_private.storage_references
storage_address: Any = torch_private.storage_address


def storage_references(tensor: torch.Tensor) -> int:
    """Return the reference count of the storage of `tensor`, with references in C++."""
    return references(tensor.untyped_storage()._cdata)  # type: ignore[no-any-return]


def are_held(used: Iterable[ManagedParameter], times: int = 0) -> bool:
    """Return whether more than `times` tensors have the memory of the device copy of any of `used`. In C alone."""
    views = [*map(_VIEW, used)]
    now, own = map(references, map(_STORAGE, views)), map(_REFERENCES, views)
    return True in map(gt, now, map(add, own, repeat(times)) if times else own)


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether any other tensor has the storage of `tensor`, which is no view."""
    return references(tensor.untyped_storage()._cdata) > 2  # type: ignore[no-any-return]


def is_in_place(func: Any) -> bool:
    """Return whether `func` is in place, by its name; some of these (the `_foreach_` ones) count no versions."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


_FACTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


def hands_out(tensor: torch.Tensor, func: Any, result: Any) -> bool:
    """Return whether `result` of `func` may share the memory of `tensor`: writes to it may count no version."""
    if isinstance(result, dict) or func is torch.Tensor.data_ptr:  # `__cuda_array_interface__`
        return True
    storage = storage_address(tensor)
    for leaf in torch_private.tree_leaves(result) if isinstance(result, (list, tuple)) else (result,):
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, _FACTS):
                return True
        else:
            with suppress(RuntimeError):  # it has no memory: sparse, or of a transform
                if storage_address(leaf) == storage:
                    return True
    return False


def leave_coded(managed: ManagedParameter, values: torch.Tensor) -> None:
    """Make a quantised parameter, whose model is released, an ordinary one over `values`."""
    parameter: Any = managed.parameter
    parameter.__class__ = managed.kind
    parameter.data = values


def stand_in(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `dtype` on `device` in the shape of `like` that takes no memory and reads as NaN."""
    return torch.full((), nothing(dtype), dtype=dtype, device=device).expand(like.shape)


def nothing(dtype: torch.dtype) -> float:
    """Return NaN, or the number that stands for it in `dtype`."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def show_cast(cast: torch.Tensor, values: torch.Tensor | None) -> None:
    """Give `cast`, a weight's cast in the cache of autocast, the weight's `values`; with None it takes no memory, and
    any function that computes with it raises."""
    with torch.no_grad():
        missing = torch.empty((0,) * 5, dtype=cast.dtype, device=cast.device)
        cast.data = missing if values is None else values.to(cast.dtype)


def reside(managed: ManagedParameter, home: torch.Tensor, device: torch.device) -> None:
    """Make `home`, which has the values of `managed`, its home and `.data`; operators run on `device`. The stand-in is
    made here, as working weights may be made when the device has no memory left. Of a quantised parameter `home` only
    has the shape: a stand-in becomes its home."""
    dtype = managed.chunk.compute_dtype
    if managed.stand_in is None:
        managed.stand_in = managed.rest = stand_in(home, dtype, device)
    if managed.code is not None:
        home = stand_in(home, dtype, torch.device("cpu"))
    managed.home, managed.home_stride = home, home.stride()
    managed.parameter.data = home
    learn_tensor(managed)
    managed.home_storage = storage_address(home)
    managed.home_references = storage_references(home)
    managed.home_address = home.data_ptr()
    gradient = managed.parameter.grad
    if gradient is not None and gradient.device != home.device:
        managed.parameter.grad = gradient.to(home.device)


def learn_tensor(managed: ManagedParameter) -> None:
    """Note which C++ tensor is below `managed.parameter`, with its version counter, and have it call the hooks of the
    parameter: `torch.utils.swap_tensors` leaves those with the tensor that was there before."""
    parameter: Any = managed.parameter
    with torch_private.NoFunctionsOfSubclasses(), torch.inference_mode(False):
        managed.counter = parameter.detach()
        managed.counter.data = NO_MEMORY
        if managed.own is not None and managed.own is not parameter.__dict__:
            parameter._backward_hooks = parameter._backward_hooks
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        managed.own = parameter.__dict__
    managed.version = managed.counter._version


def leave_ordinary(parameter: Any) -> None:
    """Give `parameter`, which is watched, and whose model is gone, its own class."""
    parameter.__class__ = type(parameter).__mro__[2]  # behind the watched class and `Watched`


def exchange_kind(parameter: Any, kind: type, other: torch.Tensor) -> None:
    """Exchange the C++ tensors of `parameter`, which gets the class `kind`, and `other`."""
    torch_private.swap_impl(parameter, other)
    parameter.__class__ = kind


@contextmanager
def of_class(parameter: torch.Tensor, kind: type) -> Iterator[None]:
    """Give `parameter` the class `kind` in the body."""
    before, parameter.__class__ = type(parameter), kind
    try:
        yield
    finally:
        parameter.__class__ = before


def working_weight(managed: ManagedParameter, data: torch.Tensor | None) -> torch.Tensor:
    """Return a working weight of `managed` over `data`, its device copy; None: without memory, as the copy is not
    leased and may be on its way."""
    weight: Any = managed.counter.detach()  # which has the version counter of the parameter
    weight.__class__ = managed.kind
    weight.data = managed.rest if data is None else data
    weight.requires_grad_(managed.parameter.requires_grad)
    vars(weight).update(vars(managed.parameter))
    vars(weight)["hetmem_managed"] = weakref.ref(managed)  # a weak reference to a parameter prevents its exchange
    weight.__class__ = managed.watched_kind if data is None else managed.bound_kind
    return weight  # type: ignore[no-any-return]


def works_for(weight: Any) -> ManagedParameter | None:
    """Return the parameter that `weight` works for; None if it is no working weight."""
    managed: ManagedParameter | None = vars(weight).get("hetmem_managed", _nothing)()
    return managed


def owners_of(weights: Iterable[Any]) -> list[ManagedParameter | None]:
    """Return `works_for` each of `weights`."""
    owners: Any = map(_get, map(vars, weights), repeat("hetmem_managed"), repeat(_nothing))
    return [owner() for owner in owners]


def show_copies(used: Sequence[ManagedParameter]) -> None:
    """Have the working weights of `used` show their device copies. Call it without `__torch_function__`."""
    weights = [*map(_WORKING, used)]
    run_through(map(set_data, weights, map(_DEVICE, used)))
    run_through(map(setattr, weights, repeat("__class__"), map(_BOUND_KIND, used)))


def leave_working(used: Sequence[ManagedParameter], weights: Sequence[torch.Tensor]) -> None:
    """Have `weights`, working weights of `used` that nothing computes with any more, take no memory; a function that
    gets one uses its parameter instead (see `intercept.faults`). Call it without `__torch_function__`."""
    run_through(map(set_data, weights, map(_REST, used)))
    run_through(map(setattr, weights, repeat("__class__"), map(_WATCHED_KIND, used)))


_get: Any = dict.get
run_through: Any = deque(maxlen=0).extend
"""Exhausts an iterator, for all weights, in C."""


def _nothing() -> None:
    return None
