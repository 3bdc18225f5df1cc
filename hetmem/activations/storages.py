"""The state of storages that autograd has saved: the views that graphs keep, and memory off the device.

`offload` decides when they move. All leave to host memory; a backward uses the storages saved first last, so when host
memory is short these are written to NVMe, and read back to host memory before their use. A storage that was read back
keeps its extent on NVMe as long as it lives, so that its host memory can be freed again without a write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.units import format_size, round_up
from hetmem.base.weak import weakly
from hetmem.engine.events import ON_DEVICE, ON_HOST, ON_NVME
from hetmem.engine.runtime import Runtime
from hetmem.errors import CapacityError
from hetmem.memory.chunk import elements
from hetmem.memory.host_memory import PAGE_BYTES, Loan
from hetmem.memory.nvme_store import LentExtent
from hetmem.schedule.blocks import in_flight_bytes

Mover = Any
"""The `Activations` that moves the storages; it imports this module."""


class SavedStorage:
    """A storage on the device, with all saved views of it. Until it leaves, its views hold it. From then on its bytes
    are in `device` (a flat tensor over it, or over what was fetched), `home` (host memory) and `extent` (NVMe)."""

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
        self._memory: torch.UntypedStorage | None = memory  # the Python object counts as one reference
        self.views: list[weakref.ref[SavedView]] = []
        self.device: torch.Tensor | None = None
        self.fetched_version = 0
        self.home: Loan | None = None
        self.extent: LentExtent | None = None
        self.noted = 0
        """The bits of its tiers in the log; see `EventLog.saved`."""
        self.leaving = False
        """Whether the copy to `home` is in flight."""
        self.arriving: int | None = None
        """The tag of the copy to `device` that is in flight; None: there is none."""

    def __del__(self) -> None:
        self.mover.forget(self)

    def alive(self) -> list[SavedView]:
        """Return the views that graphs keep."""
        return [view for reference in self.views if (view := reference()) is not None]

    def is_held_elsewhere(self) -> bool:
        """Return whether anything but these views holds the storage, so that moving it would free nothing."""
        held = sum(view.tensor is not None for view in self.alive())
        return bool(torch_private.storage_references(self.address) > held + 1)

    def is_between(self) -> bool:
        """Return whether the backward has unpacked some of the views, and not all."""
        unpacked = [view.unpacked for view in self.alive()]
        return any(unpacked) and not all(unpacked)

    def leave(self, home: Loan) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin to leave for `home`; return the flat bytes there and on the device. The program cannot write to the
        storage any more: earlier writes show in the versions of the views now."""
        views = self.alive()
        assert self._memory is not None
        flat = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        self.is_here(flat.set_(self._memory, 0, (self.nbytes,), (1,)))
        self._memory = None
        for view in views:
            view.drop_tensor()
        self.home, self.leaving = home, True
        assert self.device is not None
        return self.home_bytes(), self.device

    def is_here(self, flat: torch.Tensor) -> None:
        """Make `flat` the bytes on the device; writes to it from now on are the program's."""
        self.device, self.fetched_version = flat, flat._version

    def tiers(self) -> int:
        """Return the bits of the tiers that hold the bytes, for the log."""
        home = ON_HOST * (self.home is not None) | ON_NVME * (self.extent is not None)
        return home | ON_DEVICE * (self.device is not None or not home)

    @property
    def is_away(self) -> bool:
        """Whether the device does not have its bytes."""
        return self.device is None and (self.home is not None or self.extent is not None)

    def is_idle(self) -> bool:
        """Return whether no transfer uses `home`, and the device does not have the bytes."""
        return self.device is None and self.home is not None and not self.leaving

    def home_bytes(self) -> torch.Tensor:
        """Return the bytes in host memory, flat, or those on NVMe through a mapping."""
        home = self.home or self.extent
        assert home is not None
        return elements(home.memory, torch.uint8, self.nbytes)

    def stays(self) -> None:
        """Undo `leave`, as the copy has failed."""
        self.home, self.leaving = None, False


class SavedView:
    """What a graph keeps of a saved tensor: a view of `storage`, and the tensor's version."""

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
        """Describe `tensor`, a view of `storage` without a graph, to which nothing else refers."""
        self.storage = storage
        self.tensor: torch.Tensor | None = tensor
        self._dtype, self._size, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset, self._version = tensor.storage_offset(), tensor._version
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()
        self.found_version = self._version
        """The tensor's version as the storage left."""
        self.unpacked = False
        """Whether the running backward, or the last one, has unpacked it."""
        storage.views.append(weakref.ref(self))

    def drop_tensor(self) -> None:
        """Drop the reference to the storage, which leaves."""
        if self.tensor is not None:
            self.found_version, self.tensor = self.tensor._version, None

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor, on the device. Raises torch's own error if it was written to since it was saved."""
        version = self.found_version if self.tensor is None else self.tensor._version
        if version != self._version:
            raise RuntimeError(modified(f"a tensor of shape {list(self._size)}", version, self._version))
        if self.tensor is not None:
            self.storage.mover.stayed(self.storage)
            return self.tensor
        flat: torch.Tensor = self.storage.mover.bring(self.storage, self)
        if flat._version != self.storage.fetched_version:  # written by an earlier node
            raise RuntimeError(modified(f"a tensor of shape {list(self._size)}", version + 1, self._version))
        whole = flat[: self.storage.nbytes // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        tensor = whole.as_strided(self._size, self._stride, self._offset)
        tensor = torch.conj(tensor) if self._conj else tensor
        return torch_private.negative_view(tensor) if self._neg else tensor


def modified(what: str, version: int, expected: int) -> str:
    """Return torch's message for a saved tensor, called `what`, that was written to."""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is "
        f"at version {version}; expected version {expected} instead"
    )


class Spill:
    """Lends host memory to storages that leave the device, and moves them to NVMe and back. For the thread that has the
    runtime's turn."""

    def __init__(self, runtime: Runtime, unreserved_bytes: Callable[[], int]) -> None:
        """Leave `unreserved_bytes()` of host memory, or of NVMe, to homes that are not reserved yet."""
        self._memory, self._engine, self._executor = runtime.memory, runtime.traffic.engine, runtime.traffic.executor
        self._leaving = runtime.room.leaving
        self._unreserved_bytes = unreserved_bytes
        self._window = in_flight_bytes(runtime.memory.device_bytes)
        self._in_host: dict[int, weakref.ref[SavedStorage]] = {}
        """Storages in host memory, by number."""
        self._writing: dict[int, int] = {}
        self._reading: dict[int, int] = {}
        """Bytes of storages in flight to and from NVMe, by number."""
        self._largest = 0
        """Bytes of the largest storage so far, in whole pages."""
        self.refused_bytes = 0
        """Bytes of storages without room since the last one with room."""

    # ---- out -----------------------------------------------------------------------------------------------------

    def lend(self, nbytes: int) -> Loan | None:
        """Return host memory for a storage that leaves, after moving others to NVMe if needed; None if there is no
        room."""
        apart = 0
        if self._memory.store is not None:  # leave room to read the largest storage back
            self._largest = max(self._largest, round_up(nbytes, PAGE_BYTES))
            apart = self._largest
        loan = self._lend(nbytes, apart)
        self.refused_bytes = 0 if loan is not None else self.refused_bytes + nbytes
        return loan

    def _lend(self, nbytes: int, apart_bytes: int) -> Loan | None:
        while (loan := self._memory.host_pool.lend(nbytes, self._unreserved_bytes(), apart_bytes)) is None:
            if self._memory.store is None:
                return None
            begun = sum(self._writing.values()) < nbytes and self._spill_one()
            if not begun:
                if not (self._writing or self._leaving or self._reading) or not self._executor.busy():
                    return None
                self._executor.wait_for_one()
        return loan

    def arrived(self, storage: SavedStorage) -> None:
        """Note that `storage` has arrived in host memory, and begin to move others to NVMe before room is short."""
        if self._memory.store is None:
            return
        self._in_host[storage.number] = weakref.ref(storage)
        room = self._memory.host_pool.loan_room_bytes(self._unreserved_bytes()) + sum(self._writing.values())
        while room < self._largest + self._window and sum(self._writing.values()) <= self._window:
            before = sum(self._writing.values())
            if not self._spill_one():
                return
            room += max(storage.nbytes, sum(self._writing.values()) - before)

    def _spill_one(self) -> bool:
        """Move the storage saved first out of host memory; return False if none can leave, or NVMe has no room."""
        for number in sorted(self._in_host):
            reference = self._in_host.get(number)  # the collector may have dropped it meanwhile
            storage = None if reference is None else reference()
            if storage is None or storage.home is None:
                self._in_host.pop(number, None)
            elif storage.extent is not None and not storage.leaving and storage.arriving is None:
                self._leaves(storage)  # also if the device has the bytes, as NVMe has them, too
                return True
            elif storage.is_idle() and number not in self._writing:
                return self._write(storage, storage.home)
        return False

    def forget(self, storage: SavedStorage) -> None:
        """Note, on any thread, that no graph keeps `storage` any more."""
        self._in_host.pop(storage.number, None)

    def _leaves(self, storage: SavedStorage) -> None:
        self._in_host.pop(storage.number, None)
        storage.home = None
        storage.mover.note(storage)

    def _write(self, storage: SavedStorage, home: Loan) -> bool:
        assert self._memory.store is not None
        host = self._memory.host_pool.free_bytes
        extent = self._memory.store.lend(storage.nbytes, max(0, self._unreserved_bytes() - host))
        if extent is None:
            return False
        number = storage.number
        self._writing[number] = storage.nbytes
        tag = self._executor.expect(partial(weakly(self._written), number, weakref.ref(storage), extent, home))
        self._engine.write(tag, extent.extent, home.memory)
        return True

    def _written(
        self,
        number: int,
        reference: weakref.ref[SavedStorage],
        extent: LentExtent,
        home: Loan,
        error: BaseException | None,
    ) -> None:
        """Note that a storage is on NVMe, or with an `error` that it is in host memory only. The write has kept `home`
        reserved until now."""
        del home
        self._writing.pop(number, None)
        storage = reference()
        if storage is not None and error is None:
            storage.extent = extent
            storage.mover.note(storage)
            if storage.is_idle():
                self._leaves(storage)
        if error is not None:
            raise error

    # ---- back ----------------------------------------------------------------------------------------------------

    def bring(self, storage: SavedStorage) -> None:
        """Read `storage` into host memory, if it is not there. Raises `CapacityError`, with nothing lost, if that has
        no room."""
        while storage.home is None:
            if storage.number not in self._reading:
                loan = self._lend(storage.nbytes, 0)
                if loan is None:
                    raise CapacityError(
                        f"an activation of {format_size(storage.nbytes)} cannot come back from NVMe, as it crosses "
                        f"host memory, which other graphs fill. {self._holds()}: raise Budget(host=…) by "
                        f"{format_size(storage.nbytes)} or more, or let go of graphs that are kept"
                    )
                self._read(storage, loan)
            self._executor.wait_for_one()

    def read_ahead(self, storage: SavedStorage) -> bool:
        """Begin to read `storage` into host memory, if it is not there; return False if the window of reads is full, or
        host memory has no room."""
        if storage.home is not None or storage.number in self._reading:
            return True
        if self._reading and sum(self._reading.values()) + storage.nbytes > self._window:
            return False
        loan = self._memory.host_pool.lend(storage.nbytes, self._unreserved_bytes(), self._largest)
        if loan is None:
            return False
        self._read(storage, loan)
        return True

    def _read(self, storage: SavedStorage, loan: Loan) -> None:
        extent = storage.extent
        assert extent is not None
        self._reading[storage.number] = storage.nbytes
        ended = partial(weakly(self._have_read), storage.number, weakref.ref(storage), loan, extent)
        self._engine.read(self._executor.expect(ended), extent.extent, loan.memory)

    def _have_read(
        self,
        number: int,
        reference: weakref.ref[SavedStorage],
        loan: Loan,
        extent: LentExtent,
        error: BaseException | None,
    ) -> None:
        """Note that the bytes of a storage are in `loan`, or with an `error` that only NVMe has them."""
        del extent
        self._reading.pop(number, None)
        storage = reference()
        if storage is not None and error is None:
            storage.home = loan
            self._in_host[number] = reference
            storage.mover.note(storage)
        if error is not None:
            raise error

    # ---- messages ------------------------------------------------------------------------------------------------

    def _holds(self) -> str:
        pool, store = self._memory.host_pool, self._memory.store
        held = (
            f"Host memory holds {format_size(pool.lent_bytes)} of activations, and weights, gradients and states take "
            f"{format_size(pool.reserved_bytes)} of {format_size(pool.capacity_bytes)}"
        )
        if store is None:
            return held
        return (
            f"{held}; NVMe holds {format_size(store.lent_bytes)} and {format_size(store.reserved_bytes)} of "
            f"{format_size(store.capacity_bytes)}"
        )

    def shortage(self) -> str:
        """Return a sentence on why storages that could have left did not; "" if all could."""
        if not self.refused_bytes:
            return ""
        missing = format_size(self.refused_bytes)
        if self._memory.store is None:
            way = f"raise Budget(host=…) by {missing} or more, or give Budget(nvme=…, nvme_dir=…)"
        else:
            way = (
                f"raise Budget(nvme=…) by {missing} or more, where host memory has twice the largest of them, "
                f"{format_size(2 * self._largest)}, to cross it; or Budget(host=…)"
            )
        return (
            f"Activations of {missing} could not leave the device. {self._holds()}: {way}, use activation "
            f"checkpointing, or a smaller micro-batch. "
        )
