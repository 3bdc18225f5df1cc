"""The hooks for saved tensors: a weight is saved by name, not by memory, and fetched again as backward unpacks it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hetmem import torch_private
from hetmem.activations.offload import Activations
from hetmem.activations.storages import SavedView, modified
from hetmem.engine.param_views import works_for
from hetmem.engine.runtime import Runtime, in_backward
from hetmem.intercept.autocast_casts import Casts
from hetmem.intercept.dynamo import called_by_autograd, set_compiler, skipped
from hetmem.intercept.forward_scope import Compute, Hook
from hetmem.intercept.phases import StepSegments
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.live_bytes import is_unseen

_AUTOGRAD: Any = torch_private.autograd
_STRIDED = torch.strided
_tuple: Any = tuple.__new__
_storage_of: Any = torch_private.storage_address
_functions_around: Any = torch_private.function_modes_around


def _nodes_of_casts() -> tuple[type, type]:
    """Return the classes of autograd's nodes of a cast, and of a transposed cast, as a linear layer saves it."""
    with torch.enable_grad(), torch.inference_mode(False):
        cast = torch.zeros(1, 1, device="cpu", requires_grad=True).to(torch.bfloat16)
        return type(cast.grad_fn), type(cast.t().grad_fn)


_CASTS = _nodes_of_casts()
_CAST: Any = _CASTS[0]


class Saved(NamedTuple):
    """What autograd saves of a weight: which parameter, and which view of it, without memory."""

    managed: ManagedParameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    itself: bool
    """Whether the parameter itself was saved, whose `.data` may be set since."""
    replaced: int
    """`ManagedParameter.replaced` as it was saved."""
    trains: bool
    """Whether it requires a gradient: then autograd makes a new tensor of what `unpack` returns, else the node gets
    that itself, and may keep it."""
    conj: bool
    neg: bool
    is_cast: bool
    """Whether it is a view of a cast of all of the weight to `dtype`, as autocast makes it."""


class SavedTensors:
    """Packs and unpacks what autograd saves in the forwards of one model.

    Note "hooks of others": saved-tensor hooks of a checkpoint or of the user that are on top get tensors instead of
    hetmem's. Of a weight they get an alias of its device copy. If they keep that tensor, it is made an alias of the
    home without their notice, as all weights that they keep may not fit; what they give back is copied to the device.
    Memory that they keep through another tensor (`weight.detach()`), or of recomputed tensors, stays on the device. For
    this, hooks of hetmem's replace theirs while weights are bound, and call them; after an interrupt leaving their
    context pops hetmem's.
    """

    def __init__(self, runtime: Runtime, segments: StepSegments, activations: Activations | None) -> None:
        self.runtime, self.segments = runtime, segments
        self.activations = activations
        """Moves saved activations; None = they stay on the device."""
        self.others = False
        """Whether saved-tensor hooks of the program have ever been on top while weights were used."""
        self.weights_packed = 0
        """How many weights were saved in forwards."""
        self.results_show_weights = False
        """Whether a result that autograd saved has ever had the memory of a weight."""
        self.casts = Casts(runtime)
        self.last: dict[ManagedParameter, Saved] = {}
        """What was last saved of each weight as it computes: mostly the same again."""
        self._device_type = runtime.memory.device.torch_device.type
        self._by_id = runtime.bindings.by_id
        self.by_address, self.by_storage = runtime.bindings.by_address, runtime.bindings.by_storage
        self.kinds: set[type] = {torch.Tensor, torch.nn.Parameter}
        """Classes of tensors whose storage C++ can be asked for."""
        dtypes = {managed.chunk.compute_dtype for managed in self._by_id.values()}
        self.dtype = next((each for each in dtypes if len(dtypes) == 1 and not each.is_complex), None)
        """The dtype in which all weights compute: no tensor of it is a cast of a weight, and none has its conjugate bit
        set. None: there are several, or it is complex."""

    @called_by_autograd
    def on_backward(self) -> None:
        """Begin the backward segment, as a tensor saved by these hooks is unpacked."""
        if self.runtime.memory.uses_copies:
            self.segments.on_backward()

    def is_alone(self) -> bool:
        """Return whether no saved-tensor hooks are in effect."""
        return _AUTOGRAD._top_saved_tensors_default_hooks(True) is None

    def enter(self, compute: Compute) -> None:
        """Have autograd call these hooks until the end of `compute`, unless others are on top."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if not _AUTOGRAD._saved_tensors_hooks_is_enabled() or not (top is None or _is_ours(top)):
            return  # a checkpoint counts saved tensors, and other hooks are to see all of them
        _AUTOGRAD._push_saved_tensors_default_hooks(Pack(self, compute), _unpack)

    def displace_others(self, used: Iterable[ManagedParameter]) -> Any:
        """Have hooks of the program, if they are on top, get aliases of the weights `used`, which are bound, until
        `restore_others` is called with the result. Returns None if there is nothing to do."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if top is None or _is_ours(top) or (isinstance(top[0], _ProgramHooks) and top[0].is_of(self)):
            return None
        if _keeps_no_parameter(top[0], used) and not torch.is_autocast_enabled(self._device_type):
            return None
        self.others = True
        _AUTOGRAD._pop_saved_tensors_default_hooks()
        over = _ProgramHooks(self, *top)
        _AUTOGRAD._push_saved_tensors_default_hooks(over, over.unpack)
        return over, top

    @staticmethod
    def restore_others(displaced: Any) -> None:
        """End `displace_others`, which returned `displaced`."""
        if displaced is None:
            return
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] is displaced[0]:
            _AUTOGRAD._pop_saved_tensors_default_hooks()
            _AUTOGRAD._push_saved_tensors_default_hooks(*displaced[1])

    def pack_by(self, others: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Return what the pack hook `others` makes of `tensor`. It gets a weight as operators do, and keeps its
        home."""
        with torch_private.NoFunctions():
            if tensor.grad_fn.__class__ in _CASTS and self.of_cast(tensor) is not None:
                return others(tensor.detach().requires_grad_(tensor.requires_grad))  # a cast stays as they keep it
            place = self.pack(tensor)
            if not isinstance(place, Saved) or place.dtype is not place.managed.chunk.compute_dtype:
                return others(tensor)
            managed, version = place.managed, place.managed.counter._version
            with self.runtime.unwatched():
                bound = tensor.untyped_storage().data_ptr() == managed.slot_view.address
                alias = tensor.detach() if bound and managed.device is not None else self.unpack(place, version)
                given = torch.nn.Parameter(alias, False) if tensor is managed.working else alias
                given.requires_grad_(tensor.requires_grad)
        packed = others(given)
        if in_backward():  # a checkpoint compares it with the tensor that it got in the forward
            return packed
        with torch_private.NoFunctions(), self.runtime.unwatched():
            if managed.code is None:
                given.data = managed.home.as_strided(place.size, place.stride, place.offset)
            else:
                given.data = managed.home.as_strided(place.size, (0,) * len(place.size))
        return _OfWeight(place, version, packed)

    @called_by_autograd
    def bring(self, unpacked: torch.Tensor, place: Saved, version: int) -> torch.Tensor:
        """Return, for autograd, the weight at `place`, for which hooks of the program have `unpacked` a tensor."""
        if self.runtime.bindings.of_storage(unpacked) is place.managed:
            return self.unpack(place, version)
        with self.runtime.unwatched():
            return unpacked.to(self.runtime.memory.device.torch_device, place.dtype)

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """Return what autograd saves instead of `tensor`."""
        managed = self.runtime.bindings.of_storage(tensor)
        if managed is None:
            return _detached(tensor)
        return self._place_of(managed, tensor)

    def of_cast(self, tensor: torch.Tensor) -> Saved | None:
        """Return the weight that `tensor`, or its base, is cast from; None if from none. A graph that saved autocast's
        casts would hold a copy of the whole model."""
        base = tensor if tensor._base is None else tensor._base
        cast: Any = base.grad_fn
        if cast is None or cast.__class__ is not _CAST or tensor._version or not self.runtime.memory.uses_copies:
            return None
        leaf = getattr(cast.next_functions[0][0], "variable", None)
        managed = None if leaf is None else works_for(leaf)
        if managed is None or base.stride() != managed.stride or base.shape != managed.shape:
            return None
        self.casts.note(managed, base)
        return _place_of(managed, tensor, tensor.stride(), is_cast=True)

    def enter_node(self) -> None:
        """Have autograd call these hooks until the end of the running node, where it removes them."""
        top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if top is None and _AUTOGRAD._saved_tensors_hooks_is_enabled():
            _AUTOGRAD._push_saved_tensors_default_hooks(Pack(self, None), _unpack)

    def _place_of(self, managed: ManagedParameter, tensor: torch.Tensor) -> Saved:
        assert managed.stand_in is not None
        stands_in = tensor.untyped_storage().data_ptr() == managed.stand_in.untyped_storage().data_ptr()
        return _place_of(managed, tensor, managed.stride if stands_in else tensor.stride())

    def unpack(self, packed: Saved, version: int) -> torch.Tensor:
        """Return the view that was saved as `packed`, at `version` of its parameter, on the device."""
        if torch.is_grad_enabled() and torch_private.current_node() is not None:
            self.enter_node()  # create_graph=True: the node saves what it computes with
        if self.segments.unseen or is_unseen():
            return self.view(packed, version)
        with self.runtime.unwatched():
            return self.view(packed, version)

    def view(self, packed: Saved, version: int) -> torch.Tensor:
        """Return the view that was saved as `packed`, at `version`. No mode may see how."""
        managed = packed.managed
        if packed.itself:
            self.runtime.uses.notice_data(managed)
        device = self.runtime.uses.saved(managed)  # may wait for an update of it
        if version != managed.counter._version:
            raise RuntimeError(modified(managed.name, managed.counter._version, version))
        if packed.replaced != managed.replaced and not packed.itself:
            raise RuntimeError(_set_since(managed.name))
        as_it_is = packed.size == managed.shape and packed.stride == managed.stride
        if packed.is_cast:
            base = device.to(packed.dtype)
        elif packed.dtype != device.dtype:
            base = _flat(device, managed).view(packed.dtype)
        elif as_it_is:
            return device if packed.trains else device.detach()
        elif packed.trains and device is managed.device and not (packed.conj or packed.neg):
            return self.runtime.bindings.device_view(managed, packed.size, packed.stride, packed.offset)
        else:
            base = device
        tensor = base.as_strided(packed.size, packed.stride, packed.offset)
        tensor = torch.conj(tensor) if packed.conj else tensor
        return torch_private.negative_view(tensor) if packed.neg else tensor


class Pack(Hook):
    """The pack hook. It has weak references only, see note "interrupts", but what it packs has all that unpacking
    needs, as a graph may outlive its model. Most saved tensors are activations, so these take the shortest way.

    A tensor that is no leaf, and no view of one, is a result, and its storage is not asked for, but in a backward,
    which saves weights that it has unpacked, and unless a measured forward has saved results that show weights (by
    `.data`, or of custom functions that return `weight.detach()`). A copy that one shows without notice stays on the
    device until the graph is dropped.
    """

    def __init__(self, saved: SavedTensors, compute: Compute | None) -> None:
        super().__init__(compute)
        self._saved = weakref.ref(saved)
        self._moves = compute is not None and compute.task < 0 and saved.activations is not None
        """Whether activations may leave the device: not those of a recomputation, which are needed at once."""
        self._asks = self._moves or saved.runtime.tracer.measured or saved.results_show_weights
        """Whether it is asked for the storage of results."""
        self._within_modes = bool(_functions_around())
        """Whether function modes were around what these hooks were entered for: they may be where a tensor is saved."""

    @skipped
    def __call__(self, tensor: torch.Tensor) -> _Packed:
        saved = self._saved()
        if saved is None or type(tensor) not in saved.kinds or (self._within_modes and _functions_around()):
            return self._pack(tensor)
        try:
            leaf, base = tensor.is_leaf, tensor._base
            if leaf or (base is not None and base.is_leaf) or self._asks or saved.runtime.in_backward:
                storage = _storage_of(tensor)
                if storage in saved.by_storage:
                    managed = saved.by_storage[storage]
                    if not leaf and (base is None or not base.is_leaf) and not saved.runtime.in_backward:
                        saved.results_show_weights = True
                    if managed.bound and storage == managed.slot_view.storage:
                        saved.weights_packed += 1
                        itself, dtype, last = tensor is managed.working, tensor.dtype, saved.last
                        stride, offset = (managed.stride, 0) if itself else (tensor.stride(), tensor.storage_offset())
                        place: Any = managed, dtype, tensor.shape, stride, offset, itself, managed.replaced
                        place = *place, tensor.requires_grad, False, False, False
                        if managed not in last or last[managed] != place or dtype is not saved.dtype:
                            last[managed] = _place_of(managed, tensor, stride)
                        return last[managed], saved, managed.counter._version
                    return self._pack(tensor)
            if leaf:
                if tensor.untyped_storage().data_ptr() in saved.by_address:
                    return self._pack(tensor)
            elif (
                tensor.dtype is not saved.dtype
                and tensor.grad_fn.__class__ in _CASTS
                and (cast := saved.of_cast(tensor)) is not None
            ):
                return cast, saved, cast.managed.counter._version
        except RuntimeError:  # it has no storage, as a sparse tensor has none
            return self._pack(tensor)
        if self._moves and (view := self._view(saved, tensor)) is not None:
            return self._saved, view, 0
        return self._saved, tensor if leaf else tensor.detach(), tensor._version

    @called_by_autograd
    def _pack(self, tensor: torch.Tensor) -> _Packed:
        saved = self._saved()
        with torch_private.NoFunctions():  # within a custom function a mode would see each attribute read as a use
            if saved is not None and self.is_active():
                packed = saved.pack(tensor)
                if isinstance(packed, Saved):
                    saved.weights_packed += 1
                    return packed, saved, packed.managed.counter._version
                if self._moves and type(tensor) in saved.kinds and tensor.layout is _STRIDED:
                    with suppress(NotImplementedError):  # it has no storage
                        if (view := self._view(saved, tensor)) is not None:
                            return self._saved, view, 0
                return self._saved, packed, tensor._version
            return None, _detached(tensor), tensor._version

    @called_by_autograd
    def _view(self, saved: SavedTensors, tensor: torch.Tensor) -> SavedView | None:
        """Return what is saved of an activation that may leave the device; None if it stays."""
        if saved.activations is None or not saved.activations.takes(tensor) or not self.is_active():
            return None
        return saved.activations.pack(tensor)


@dataclass(slots=True, eq=False)
class _OfWeight:
    """What the program's pack hook has made (`packed`) of the weight at `place`, at `version` of its parameter."""

    place: Saved
    version: int
    packed: Any


class _ProgramHooks:
    """Replaces saved-tensor hooks of the program, and calls them. The program pops this; it may outlive the forward."""

    def __init__(
        self, saved: SavedTensors, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self._saved, self._pack, self._unpack = weakref.ref(saved), pack, unpack

    def is_of(self, saved: SavedTensors) -> bool:
        """Return whether this was made by `saved`."""
        return self._saved() is saved

    @called_by_autograd
    def __call__(self, tensor: torch.Tensor) -> Any:
        saved = self._saved()
        return self._pack(tensor) if saved is None else saved.pack_by(self._pack, tensor)

    @skipped
    def unpack(self, packed: Any) -> torch.Tensor:
        """Return what the program's hook unpacks, a weight as the view that was saved."""
        if not isinstance(packed, _OfWeight):
            return self._unpack(packed)
        tensor, saved = self._unpack(packed.packed), self._saved()
        return tensor if saved is None else saved.bring(tensor, packed.place, packed.version)


_Packed = tuple[Any, Any, int]
"""A weight (`Saved`), the `SavedTensors`, and the version of the parameter; or a weak reference to the `SavedTensors`
(an activation may be another model's: a hook outlives an interrupt; None: there is none), the activation or tensor, and
the tensor's version."""


@skipped
def _unpack(packed: _Packed) -> torch.Tensor:
    of, tensor, version = packed
    if type(of) is Saved:  # most are not, and cost as little as they can
        owner = tensor
        if not owner.runtime.in_backward:
            owner.on_backward()
        compiler, monitor = set_compiler(None), owner.runtime.monitor
        try:
            monitor.own = owner.segments.unseen and not torch.is_grad_enabled()
            unpacked: torch.Tensor = owner.view(of, version) if monitor.own else owner.unpack(of, version)
            return unpacked
        finally:
            monitor.own = False
            if HELD_BACK.came:
                HELD_BACK.leave()
            if compiler is not None:
                set_compiler(compiler)
    saved = None if of is None else of()
    if saved is not None and not saved.runtime.in_backward:
        saved.on_backward()
    if type(tensor) is SavedView:
        return _fetched(tensor)
    if tensor._version != version:
        raise RuntimeError(modified(f"a tensor of shape {list(tensor.shape)}", tensor._version, version))
    return tensor  # type: ignore[no-any-return]


@called_by_autograd
def _fetched(view: SavedView) -> torch.Tensor:
    return view.unpack()


def _place_of(
    managed: ManagedParameter, tensor: torch.Tensor, stride: tuple[int, ...], *, is_cast: bool = False
) -> Saved:
    dtype, itself = tensor.dtype, tensor is managed.working
    conj = neg = False
    if dtype is not managed.chunk.compute_dtype or dtype.is_complex:  # real and negative: a view of a complex one
        conj, neg = tensor.is_conj(), tensor.is_neg()
    offset, trains = 0 if itself else tensor.storage_offset(), tensor.requires_grad
    place = managed, dtype, tensor.shape, stride, offset, itself, managed.replaced, trains, conj, neg, is_cast
    return _tuple(Saved, place)  # type: ignore[no-any-return]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as its own graph may save it, without a reference to that graph."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def _flat(device: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
    """Return all elements of `device`, the copy of `managed`, contiguously, as a view of another dtype needs."""
    return torch.as_strided(device, (managed.numel,), (1,))


def _code_of(hooks: type) -> Any:
    """Return the code of the pack hook in `hooks`, a class of torch's; None in a torch that has it elsewhere."""
    consts = hooks.__init__.__code__.co_consts  # type: ignore[misc]
    return next((each for each in consts if getattr(each, "co_name", "") == "pack_hook"), None)


_CHECKPOINTED, _RECOMPUTED = map(_code_of, (torch_private.checkpoint_hook, torch_private.recomputation_hook))


def _keeps_no_parameter(pack: Any, used: Iterable[ManagedParameter]) -> bool:
    """Return whether `pack` is of a checkpoint of torch's that keeps no parameter itself: in the forward it keeps
    nothing, in the recomputation the device memory of tensors that require a gradient."""
    code = getattr(getattr(pack, "__wrapped__", pack), "__code__", None)
    if code is None or code is not _RECOMPUTED:
        return code is not None and code is _CHECKPOINTED
    return all(managed.parameter.requires_grad for managed in used)


def _is_ours(hooks: tuple[Any, Any]) -> bool:
    return isinstance(hooks[0], Pack)


def _set_since(weight: str) -> str:
    return (
        f"{weight}.data was set within a backward, or before another forward, after this graph had used it, and what "
        f"it was then is not kept: compute the forward again, or write by .data.copy_()"
    )
