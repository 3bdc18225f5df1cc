"""What `parameter.data` is at each moment: its home outside compute, the device copy for the length of an operator.

Owns the views of device slots and the maps from storages to parameters. It moves no bytes and decides nothing.

Note "use counts": whoever still holds memory of a slot (a view of a weight, a tensor that autograd or a checkpoint
saved, `ctx.weight` of a custom function) holds its storage. Every device view has a storage of its own, so the
storage's reference count is the truth about use: above what it was when the view was made, somebody else has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter
from hetmem.memory.device_pool import DevicePool
from hetmem.memory.tensor_views import give_away


class Bindings:
    """The managed parameters of one model by identity and by storage."""

    def __init__(self, parameters: Iterable[ManagedParameter]) -> None:
        self.by_id: dict[int, ManagedParameter] = {}
        self._by_address: dict[int, ManagedParameter] = {}
        self._resting: list[ManagedParameter] = []
        self._computes = False
        self.learn(parameters)

    def learn(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take note of the homes of `parameters`, and of nothing else: no device view may be open."""
        self._by_address.clear()
        for managed in parameters:
            self.by_id[id(managed.parameter)] = managed
            for tensor in (managed.home, managed.rest):
                if managed.numel:
                    self._by_address[tensor.untyped_storage().data_ptr()] = managed

    def move_home(self, managed: ManagedParameter, home: torch.Tensor, rest: torch.Tensor) -> None:
        """`managed` has another home, with the same values, and rests as `rest`; device views stay."""
        at = managed.parameter.data_ptr()
        at_home, resting = at == managed.home.data_ptr(), at == managed.rest.data_ptr()
        for tensor in (managed.home, managed.rest):
            self._by_address.pop(tensor.untyped_storage().data_ptr(), None)
        managed.home, managed.rest = home, rest
        if at_home or resting:  # both, where it was on the device
            rests = not at_home or (self._computes and managed.parameter.requires_grad)
            managed.parameter.data = rest if rests else home
            if rests and rest is not home:
                self._resting.append(managed)
        managed.home_address = home.data_ptr()
        managed.home_references = storage_references(home) + (managed.parameter.data_ptr() != home.data_ptr())
        for tensor in (home, rest):
            if managed.numel:
                self._by_address[tensor.untyped_storage().data_ptr()] = managed

    def of_storage(self, tensor: torch.Tensor) -> ManagedParameter | None:
        """The parameter whose home, stand-in or device slot `tensor` is a view of; None for any other tensor."""
        if tensor.layout is not torch.strided or tensor._is_zerotensor() or _is_of_a_transform(tensor):
            return None
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def open_device(self, managed: ManagedParameter, pool: DevicePool, slot: int) -> torch.Tensor:
        """The view of `managed` in device slot `slot`, made at its first use in this residence."""
        if managed.device is None:
            dtype = managed.chunk.compute_dtype
            view = managed.device = managed.shaped(pool.flat(slot, dtype, managed.numel, managed.offset))
            managed.device_storage = view.untyped_storage()._cdata
            managed.device_references = _references(managed.device_storage)
            if managed.numel:
                self._by_address[view.untyped_storage().data_ptr()] = managed
        return managed.device

    def close_device(self, chunk: Chunk) -> None:
        """Forget the device views of `chunk`: its slot goes to another one."""
        for managed in chunk.parameters:
            if managed.device is not None:
                if managed.numel:
                    del self._by_address[managed.device.untyped_storage().data_ptr()]
                managed.device = None

    def bind(self, used: Iterable[ManagedParameter]) -> None:
        """Operators see the device copies of `used` from here on."""
        for managed in used:
            assert managed.device is not None
            managed.parameter.data = managed.device

    def is_elsewhere(self, managed: ManagedParameter) -> bool:
        """Whether somebody has set `managed.parameter.data`, which was bound."""
        at, known = managed.parameter.data_ptr(), (managed.device, managed.home, managed.rest)
        return all(tensor is None or tensor.data_ptr() != at for tensor in known)

    def unbind(self, used: Iterable[ManagedParameter]) -> None:
        """Between operators: the home, or the stand-in where the home's dtype would disturb autograd's graph."""
        for managed in used:
            managed.parameter.data = managed.rest
            if managed.rest is not managed.home:
                self._resting.append(managed)

    def leave_home(self) -> None:
        """Compute begins: what is trained rests, also before its first operator. A custom function of autograd takes a
        parameter as it is, and expects its gradient on the device, and of the dtype, that it then has."""
        self._computes = True
        for managed in self.by_id.values():
            if managed.rest is not managed.home and managed.parameter.requires_grad:
                managed.parameter.data = managed.rest
                self._resting.append(managed)

    def go_home(self) -> None:
        """Compute has ended: every parameter is its home again."""
        self._computes = False
        for managed in self._resting:
            managed.parameter.data = managed.home
        self._resting.clear()

    @staticmethod
    def held(managed: ManagedParameter) -> bool:
        """Whether anybody still has memory of the device view (which must not be bound)."""
        return managed.device is not None and _references(managed.device_storage) > managed.device_references

    def leave_to_holders(self, managed: ManagedParameter) -> None:
        """`managed` becomes another tensor's values: whoever holds its device view keeps what that shows. Raises
        `ManageError` where they cannot."""
        if managed.device is None or not managed.numel or not self.held(managed):
            return
        address = managed.device.untyped_storage().data_ptr()
        if not give_away(managed.device):
            raise ManageError(
                f"{managed.name}.data was set within a forward while a view of what it was is held (as in "
                f"`kept = self.weight.data`): keep a clone of it"
            )
        del self._by_address[address]
        managed.device = None


_is_of_a_transform: Any = torch._C._functorch.is_functorch_wrapped_tensor  # it has no storage that can be asked for


def _references(storage: int) -> int:
    count: int = torch._C._storage_Use_Count(storage)
    return count


def storage_references(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` is referred to, by tensors and by what C++ holds."""
    return _references(tensor.untyped_storage()._cdata)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether anybody but `tensor`, which is no view, holds its memory (and the handle that counts)."""
    return storage_references(tensor) > 2


def rest_of(managed: ManagedParameter, home: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What `managed` is between operators that run on `device`, with its home where `home` is. Its stand-in was made
    when it was managed: a home comes back from the device just when there is no memory for one."""
    if managed.chunk.compute_dtype is managed.chunk.dtype and home.device == device:
        return home
    assert managed.stand_in is not None
    return managed.stand_in


def stand_in(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `dtype` on `device` in the shape of `like` that takes no memory and reads as NaN."""
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(like.shape)
