"""Moves storages that autograd saves off the device, and fetches them back. `storages` has their state.

A storage leaves once only graphs refer to it: before that, moving it would free nothing, and it may still be written
to. This is checked whenever another storage is saved, and where the device has no room. It is fetched back as the first
node unpacks it, and the storages saved before it behind it, as a backward runs in reverse; it stays until every view of
it was unpacked, so that it crosses each link once.

Note "budget": storages in flight count as gradients in flight do; those fetched ahead are dropped for anything else
that needs room, as their bytes are still in host memory. `engine.device_limit` calls for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from hetmem.activations.choice import LeavingChoice
from hetmem.activations.storages import SavedStorage, SavedView, Spill
from hetmem.base.weak import weakly
from hetmem.engine.events import Held
from hetmem.engine.runtime import Runtime
from hetmem.errors import DeviceOutOfMemoryError
from hetmem.memory.chunk import Role
from hetmem.memory.host_memory import Loan
from hetmem.schedule.blocks import Link, in_flight_bytes
from hetmem.schedule.saved import AT_ONCE, LOOKED_AT, least_bytes

_LOOKED_BACK = 64
"""How many storages saved before the one in use are considered for fetching ahead."""


class Activations:
    """Moves the storages that the graphs of one model keep. Graphs refer to it, and it to the runtime, as they may
    outlive the model. For the thread that has the runtime's turn."""

    def __init__(self, runtime: Runtime, *, all_leave: bool) -> None:
        self._runtime = runtime
        memory = runtime.memory
        runtime.room.shortage.activations = weakref.ref(self)
        self._memory, self._engine, self._executor = memory, runtime.traffic.engine, runtime.traffic.executor
        self.least_bytes = least_bytes(memory.device_bytes)
        self._window = in_flight_bytes(memory.device_bytes)
        beside = not self._engine.unlimited(Link.HOST_TO_DEVICE)
        self.choice = LeavingChoice(runtime, all_leave=all_leave, beside=beside)
        self._due: dict[int, None] = {}
        """Numbers of the storages in `_staying` that leave as soon as only graphs refer to them."""
        self._count = 0
        self._by_address: dict[int, weakref.ref[SavedStorage]] = {}
        self._staying: dict[int, weakref.ref[SavedStorage]] = {}
        """Storages on the device that have not left, by number."""
        self._look_at_all = LOOKED_AT
        """All are checked once there are more than this; else the last few are."""
        self._numbered: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._leaving, self._ahead = runtime.room.leaving, runtime.room.ahead
        self._between: dict[int, weakref.ref[SavedStorage]] = {}
        """Storages of which nodes have unpacked some views, and not all."""
        self._used: set[int] = set()
        """Numbers of storages of which the running backward has unpacked all views: not to be fetched ahead."""
        self._any_left = False
        self._unreserved: tuple[int, int] = (-1, 0)
        self._spill = Spill(runtime, weakly(self._unreserved_bytes))  # type: ignore[arg-type]
        self.closed = False
        """Whether the model is released: no more storages leave, but those that have left come back."""

    # ---- saving --------------------------------------------------------------------------------------------------

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of `tensor` is worth moving."""
        if tensor.untyped_storage().nbytes() < self.least_bytes or self.closed:
            return False
        if tensor.device != self._memory.device.torch_device:
            return False
        return not (tensor.is_quantized or tensor._is_zerotensor())  # which has no memory

    def pack(self, tensor: torch.Tensor) -> SavedView:
        """Return the view that a graph saves instead of `tensor`."""
        memory = tensor.untyped_storage()
        found = self._by_address.get(memory._cdata)
        storage = None if found is None else found()
        if storage is None:
            self._count += 1
            storage = SavedStorage(self, self._count, memory)
            self._by_address[memory._cdata] = self._staying[self._count] = weakref.ref(storage)
            self._numbered[self._count] = storage
            self.note(storage)
            if self.choice.saved(self._count, storage.nbytes):
                self._due[self._count] = None
        view = SavedView(storage, tensor.detach())
        self._look()
        return view

    def _look(self) -> None:
        """Begin to move due storages to which only graphs refer, among those saved last or, at times, all."""
        looked_at = self._staying if self.choice.looks_at_all else self._due
        look_at_all = len(looked_at) > self._look_at_all
        last = list(looked_at) if look_at_all else _last_of(looked_at)
        for number in last:
            if (storage := self._free(number)) is not None:
                self.choice.freed(number)
                if number in self._due and self._leave(storage):
                    self.choice.left(number, storage.nbytes, forced=False)
        if look_at_all:
            self._look_at_all = 2 * len(looked_at) + LOOKED_AT

    def _free(self, number: int) -> SavedStorage | None:
        """Return the storage `number` if it is on the device and only graphs refer to it, else None."""
        reference = self._staying.get(number)
        storage = None if reference is None else reference()
        if storage is None:
            self._staying.pop(number, None)
            self._due.pop(number, None)
            return None
        return None if not storage.alive() or storage.is_held_elsewhere() else storage

    def _leave(self, storage: SavedStorage) -> bool:
        """Begin to move `storage` to host memory; return False if there is no room for it."""
        with self._runtime.unwatched():
            loan = self._spill.lend(storage.nbytes)
        if loan is None or not self._may_leave(storage):
            return False
        self._any_left = True
        del self._staying[storage.number]
        self._due.pop(storage.number, None)
        self._leaving[storage.number] = storage.nbytes
        with self._runtime.unwatched(), torch.no_grad():
            home, flat = storage.leave(loan)
            self.note(storage)
            work = partial(self._memory.device.gradient_out, home, flat, add=False)
            del flat
            if self._engine.unlimited(Link.DEVICE_TO_HOST):
                error = None
                try:
                    self._engine.copy_now(Link.DEVICE_TO_HOST, work, storage.nbytes)
                except BaseException as failed:
                    error = failed
                del work
                self._left(storage.number, weakref.ref(storage), loan, error)
            else:
                ended = partial(weakly(self._left), storage.number, weakref.ref(storage), loan)
                self._executor.copy_beside(Link.DEVICE_TO_HOST, work, storage.nbytes, ended)
                del work
            leaving = self._leaving
            while len(leaving) > AT_ONCE and sum(leaving.values()) > self._window and self._executor.busy():
                self._executor.wait_for_one()
            self._runtime.room.transit_grew()
        return True

    def _may_leave(self, storage: SavedStorage) -> bool:
        """Return whether `storage` may still leave, after a wait for others."""
        return storage.number in self._staying and storage.device is None and not storage.is_held_elsewhere()

    def _left(self, number: int, reference: weakref.ref[SavedStorage], loan: Loan, error: BaseException | None) -> None:
        """Note that a storage has arrived in `loan`, or with an `error` that it stays on the device."""
        self._leaving.pop(number, None)
        storage = reference()
        if storage is not None:
            if error is not None:
                storage.stays()
                self.note(storage)
            else:
                storage.leaving = False
                if not storage.is_between():
                    self._drop(storage)
                self._spill.arrived(storage)
        try:
            if error is not None:
                raise error
        finally:
            del error, storage

    def _drop(self, storage: SavedStorage) -> None:
        """Free the device memory of `storage`, whose bytes are in host memory or on NVMe."""
        self._forget_address(storage)
        self._between.pop(storage.number, None)
        storage.device = None
        self.note(storage)

    def _unreserved_bytes(self) -> int:
        """Return the bytes of host memory that gradients without a home there will still take."""
        reserved = self._memory.host_pool.reserved_bytes
        if self._unreserved[0] != reserved:
            memory = self._memory
            chunks = [
                chunk
                for chunk in memory.chunks
                if Role.GRAD not in chunk.homes
                and memory.uses_copies
                and not memory.lends(chunk)
                and any(managed.parameter.requires_grad for managed in chunk.parameters)
            ]
            self._unreserved = reserved, sum(chunk.home_nbytes(Role.GRAD) for chunk in chunks)
        return self._unreserved[1]

    # ---- bringing back -------------------------------------------------------------------------------------------

    def bring(self, storage: SavedStorage, view: SavedView) -> torch.Tensor:
        """Return the bytes of `storage` on the device, flat, for a node that unpacks `view`."""
        with self._runtime.unwatched(), torch.no_grad():
            if view.unpacked:  # by an earlier backward
                self._used.clear()
                for other in storage.alive():
                    other.unpacked = False
            view.unpacked = True
            self.choice.used(storage.number)
            if storage.device is None:
                self._fetch(storage)
            self._leaving.pop(storage.number, None)  # counts as the backward's from here on
            self._ahead.pop(storage.number, None)
            self._fetch_before(storage.number)
            self._wait_for(storage)
            flat = storage.device
            assert flat is not None
            if storage.is_between():
                self._between[storage.number] = weakref.ref(storage)
            else:
                self._used.add(storage.number)
                if not storage.leaving:
                    self._drop(storage)
            return flat

    def stayed(self, storage: SavedStorage) -> None:
        """Note that a node unpacks a view of `storage`, which has not left; fetch those before it that have."""
        self.choice.used(storage.number)
        if self._any_left:
            with self._runtime.unwatched(), torch.no_grad():
                self._fetch_before(storage.number)

    def _fetch(self, storage: SavedStorage) -> None:
        """Begin to fetch `storage` to the device, in memory of its own."""
        if not self.closed:  # else its bytes on NVMe are read through a mapping
            self._spill.bring(storage)
        room, device = self._runtime.room, self._memory.device
        try:
            flat = torch.empty(storage.nbytes, dtype=torch.uint8, device=device.torch_device)
        except DeviceOutOfMemoryError:
            raise
        except torch.OutOfMemoryError:
            self._runtime.uses.out_of_memory()
            flat = torch.empty(storage.nbytes, dtype=torch.uint8, device=device.torch_device)
        room.count("activations fetched back", flat)
        work = partial(device.copy_in, flat.data, storage.home_bytes())  # `data`: counts no version of `flat`
        if self.closed or self._engine.unlimited(Link.HOST_TO_DEVICE):
            self._engine.copy_now(Link.HOST_TO_DEVICE, work, storage.nbytes)
        else:
            ended = partial(weakly(self._arrived), storage.number, weakref.ref(storage), storage.home)
            storage.arriving = self._executor.copy_beside(
                Link.HOST_TO_DEVICE, work, storage.nbytes, ended, [self._engine.mark()]
            )
        storage.is_here(flat)
        self.note(storage)

    def _arrived(
        self, number: int, reference: weakref.ref[SavedStorage], loan: Loan, error: BaseException | None
    ) -> None:
        """Note that a storage was fetched from `loan`, which may be freed now, or with an `error` that it was not."""
        storage = reference()
        if storage is None or error is not None:
            self._ahead.pop(number, None)
        if storage is not None:
            storage.arriving = None
            if error is not None:
                self._drop(storage)
        if error is not None:
            raise error

    def _wait_for(self, storage: SavedStorage) -> None:
        """Order compute launched from now on behind the copy of `storage` to the device, or wait for that."""
        while storage.arriving is not None:
            end = self._engine.end_of(storage.arriving)
            if end is not None:
                self._runtime.events.waits_for(-1, end)
            if self._engine.ordered and self._engine.order_compute_after(storage.arriving):
                return
            self._executor.wait_for_one()

    def _fetch_before(self, number: int) -> None:
        """Begin to fetch storages saved before `number`, the last first, as far as the windows of the links allow."""
        if self.closed:
            return
        if self._memory.store is not None:
            all(self._spill.read_ahead(storage) for storage in self._away_before(number))
        if self._engine.unlimited(Link.HOST_TO_DEVICE):
            return  # this thread makes the copies, so fetching ahead gains nothing
        for storage in self._away_before(number):
            if storage.home is None:
                return
            if len(self._ahead) >= AT_ONCE and sum(self._ahead.values()) + storage.nbytes > self._window:
                return
            if not self._runtime.room.has_room_ahead(storage.nbytes):
                return
            self._fetch(storage)
            self._ahead[storage.number] = storage.nbytes

    def _away_before(self, number: int) -> Iterator[SavedStorage]:
        """Yield storages saved before `number` that are not on the device, the last first."""
        for before in range(number - 1, max(0, number - _LOOKED_BACK), -1):
            storage = self._numbered.get(before)
            if storage is not None and storage.is_away and before not in self._used:
                yield storage

    # ---- room ----------------------------------------------------------------------------------------------------

    @property
    def ahead_bytes(self) -> int:
        """Device bytes that chunks leave, if they have enough, for storages fetched ahead."""
        return self._window if self._any_left and not self._engine.unlimited(Link.HOST_TO_DEVICE) else 0

    def give_way(self) -> bool:
        """Drop one storage that was fetched ahead, or is between uses, and is in host memory as well; return False if
        there is none."""
        for number in (*sorted(self._ahead), *sorted(self._between)):  # the storage saved first is needed last
            storage = self._numbered.get(number)
            if storage is not None and storage.arriving is None and not storage.leaving:
                self._ahead.pop(number, None)
                self._drop(storage)
                return True
        return False

    def make_room(self, nbytes: int) -> bool:
        """Begin to move `nbytes`, or all, of storages that only graphs keep, the first saved first; return whether
        any."""
        other_bytes = sum(self._leaving.values()) + sum(self._ahead.values())  # will be free anyway
        missing, began = self.choice.to_go(nbytes, other_bytes), False
        for number in [*self._staying] if missing > 0 else ():
            storage = self._free(number)
            if storage is not None and self._leave(storage):
                self.choice.left(number, storage.nbytes, forced=True)
                began, missing = True, missing - storage.nbytes
                if missing <= 0:
                    break
        return began

    def needs(self, own_bytes: int) -> None:
        """Note that `own_bytes` are needed beside chunks and storages in flight."""
        self.choice.needs(own_bytes)

    def shortage(self) -> str:
        """Return a sentence on why storages that could have left did not; "" if all could."""
        return self._spill.shortage()

    def note(self, storage: SavedStorage) -> None:
        """Log the tiers of `storage`, if they have changed."""
        self._log(storage, storage.tiers())

    def _log(self, storage: SavedStorage, tiers: int) -> None:
        if tiers != storage.noted:
            events = self._runtime.events
            events.saved.append((events.now(), storage.nbytes, storage.noted, tiers))
            storage.noted = tiers

    def held(self) -> Held:
        """Return the bytes that graphs keep now, by the bits of their tiers."""
        held: Held = {}
        for storage in list(self._numbered.values()):
            held[storage.noted] = held.get(storage.noted, 0) + storage.nbytes
        return held

    def forget(self, storage: SavedStorage) -> None:
        """Note, on any thread, that no graph keeps `storage` any more. Waits for nothing."""
        self._log(storage, 0)
        self._staying.pop(storage.number, None)
        self._due.pop(storage.number, None)
        if storage.arriving is None:
            self._ahead.pop(storage.number, None)
        self._between.pop(storage.number, None)
        self._used.discard(storage.number)
        self._spill.forget(storage)
        self._forget_address(storage)

    def _forget_address(self, storage: SavedStorage) -> None:
        found: Any = self._by_address.get(storage.address)
        if found is not None and found() in (storage, None):
            self._by_address.pop(storage.address, None)


def _last_of(numbers: dict[int, Any]) -> list[int]:
    """Return the last few of `numbers`, the last one first."""
    while True:
        with suppress(RuntimeError):  # the garbage collector has removed one meanwhile
            return list(islice(reversed(numbers), LOOKED_AT))
