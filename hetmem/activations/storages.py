"""One storage that autograd has saved, and the views of it that a graph keeps.

They hold bytes and say how many hold them; when they move is decided by `offload`.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from hetmem import torch_private
from hetmem.engine.events import ON_DEVICE, ON_HOST, ON_NVME
from hetmem.memory.chunk import elements
from hetmem.memory.host_pool import Loan
from hetmem.memory.nvme_store import LentExtent


class Mover(Protocol):
    """What brings storages back."""

    def bring(self, storage: SavedStorage, view: SavedView) -> torch.Tensor:
        """Return the bytes of `storage`, which compute asked for from now on may read on the device."""
        ...

    def met(self, storage: SavedStorage) -> None:
        """Note that a node asks for `storage`, which has not left."""
        ...

    def note(self, storage: SavedStorage) -> None:
        """Log where `storage` lies, if that has changed."""
        ...

    def forget(self, storage: SavedStorage) -> None:
        """Note that no graph keeps `storage` any more; called by the garbage collector too, on any thread."""
        ...


class SavedStorage:
    """A storage of the device, whatever views of it are saved. Until it leaves, its views hold it; from then on
    `device` does, a flat tensor over it or over what was fetched, `home` its bytes in host memory, and `extent`
    those on NVMe."""

    __slots__ = (
        "__weakref__",
        "_memory",
        "address",
        "arriving",
        "device",
        "extent",
        "fetched_version",
        "home",
        "leaving",
        "mover",
        "nbytes",
        "noted",
        "number",
        "views",
    )

    def __init__(self, mover: Mover, number: int, memory: torch.UntypedStorage) -> None:
        self.mover, self.number, self.address, self.nbytes = mover, number, memory._cdata, memory.nbytes()
        self._memory: torch.UntypedStorage | None = memory  # Python's object counts as a holder, by itself or for torch
        self.views: list[weakref.ref[SavedView]] = []
        self.device: torch.Tensor | None = None
        self.fetched_version = 0
        self.home: Loan | None = None
        self.extent: LentExtent | None = None
        self.noted = 0
        """The tiers that the log says; see `EventLog.saved`."""
        self.leaving = False
        """Whether `home` is not whole yet."""
        self.arriving: int | None = None
        """The tag of the copy to `device` that is not over yet."""

    def __del__(self) -> None:
        self.mover.forget(self)

    def alive(self) -> list[SavedView]:
        """Return the views that graphs keep."""
        return [view for reference in self.views if (view := reference()) is not None]

    def is_held_elsewhere(self) -> bool:
        """Whether anything but these views holds the storage, so that moving it would free nothing."""
        held = sum(view.tensor is not None for view in self.alive())
        return bool(torch_private.storage_references(self.address) > held + 1)

    def is_between(self) -> bool:
        """Whether the backward has asked for some views, and will for others."""
        unpacked = [view.unpacked for view in self.alive()]
        return any(unpacked) and not all(unpacked)

    def leave(self, home: Loan) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin to leave for `home`; return the flat bytes there and on the device. The program cannot write to it any
        more: what was written since a view was saved shows in its version now."""
        views = self.alive()
        assert self._memory is not None
        flat = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        self.is_here(flat.set_(self._memory, 0, (self.nbytes,), (1,)))
        self._memory = None
        for view in views:
            view.let_go()
        self.home, self.leaving = home, True
        assert self.device is not None
        return self.home_bytes(), self.device

    def is_here(self, flat: torch.Tensor) -> None:
        """Hold `flat`, whose writes from now on are not hetmem's."""
        self.device, self.fetched_version = flat, flat._version

    def tiers(self) -> int:
        """Return the tiers on which the bytes lie, as the log has them."""
        home = ON_HOST * (self.home is not None) | ON_NVME * (self.extent is not None)
        return home | ON_DEVICE * (self.device is not None or not home)

    @property
    def is_away(self) -> bool:
        """Whether its bytes are at home alone, or on their way from there to the device."""
        return self.device is None and (self.home is not None or self.extent is not None)

    def is_idle(self) -> bool:
        """Whether nothing is done with `home`, nor will be at once."""
        return self.device is None and self.home is not None and not self.leaving

    def home_bytes(self) -> torch.Tensor:
        """Return the bytes at home, flat; those on NVMe as a mapped file."""
        home = self.home or self.extent
        assert home is not None
        return elements(home.memory, torch.uint8, self.nbytes)

    def stays(self) -> None:
        """End `leave`, which has failed: there is no home."""
        self.home, self.leaving = None, False


class SavedView:
    """What a graph keeps of a tensor that it saved: a view of `storage`, and the version that it had."""

    __slots__ = (
        "__weakref__",
        "_conj",
        "_dtype",
        "_neg",
        "_offset",
        "_size",
        "_stride",
        "_version",
        "found_version",
        "storage",
        "tensor",
        "unpacked",
    )

    def __init__(self, storage: SavedStorage, tensor: torch.Tensor) -> None:
        """`tensor` has no graph, and no other owner."""
        self.storage = storage
        self.tensor: torch.Tensor | None = tensor
        self._dtype, self._size, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset, self._version = tensor.storage_offset(), tensor._version
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()
        self.found_version = self._version
        """That of when the storage left."""
        self.unpacked = False
        """Whether the backward that runs, or the last one, has asked for it."""
        storage.views.append(weakref.ref(self))

    def let_go(self) -> None:
        """Hold the storage no more, which leaves."""
        if self.tensor is not None:
            self.found_version, self.tensor = self.tensor._version, None

    def unpack(self) -> torch.Tensor:
        """Return what autograd gets back. Raises torch's own error where it was written to since it was saved."""
        version = self.found_version if self.tensor is None else self.tensor._version
        if version != self._version:
            raise RuntimeError(modified(f"a tensor of shape {list(self._size)}", version, self._version))
        if self.tensor is not None:
            self.storage.mover.met(self.storage)
            return self.tensor
        flat = self.storage.mover.bring(self.storage, self)
        if flat._version != self.storage.fetched_version:  # by the backward that had it before
            raise RuntimeError(modified(f"a tensor of shape {list(self._size)}", version + 1, self._version))
        whole = flat[: self.storage.nbytes // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        tensor = whole.as_strided(self._size, self._stride, self._offset)
        tensor = torch.conj(tensor) if self._conj else tensor
        return torch_private.negative_view(tensor) if self._neg else tensor


def modified(what: str, version: int, expected: int) -> str:
    """Return what torch says where a saved tensor was written to."""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is "
        f"at version {version}; expected version {expected} instead"
    )
