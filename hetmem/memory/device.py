"""An accelerator, as the runtime sees it, and its memory as a pool of slots.

The simulated one is here, which lives in host memory and acts like a GPU. A device holds memory and knows link speeds;
it does not know chunks, traces or which slots are taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from hetmem import torch_private
from hetmem.base.units import parse_size
from hetmem.cuda.dequantise import Parts
from hetmem.errors import BudgetError
from hetmem.memory.chunk import RawMemory, SlotView, address_of, elements
from hetmem.memory.coded import CodedHome, CodedTable
from hetmem.memory.host_memory import Mapping, free_host_bytes
from hetmem.memory.transfer import Copier, Finished, Seen, ThreadCopier
from hetmem.quantised.decode import decode_parts
from hetmem.schedule.blocks import Link
from hetmem.schedule.formats import Coding

POISON = 0xFF
"""The byte that fills a freed slot under `sanitize`: NaN in every floating-point format, -1 in integers."""


_POOLS: weakref.WeakSet[DevicePool] = weakref.WeakSet()


def lies_in_a_slot(address: int) -> bool:
    """Return whether `address` lies in a slot of any model of this process, whose budget counts it."""
    return any(pool.holds(address) for pool in _POOLS)


class DevicePool:
    """Numbered places for chunks on `device`, each of one or more slots of `slot_bytes`.

    A place takes memory when a chunk is first put there, and keeps it until `give_back`. At most `slots` slots may hold
    memory: before a place is prepared, others are given back.

    `empty` allocates device memory. Freed memory is safe for its next user, and newly allocated memory may still be
    read by earlier compute.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        device: torch.device,
        empty: Callable[[int], RawMemory],
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._device = device
        self._empty = empty
        self._memory: dict[int, RawMemory] = {}
        self._spans: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # addresses of that memory
        self.views: dict[int, dict[int, tuple[torch.Tensor, list[SlotView]]]] = {}
        """By place that has memory, views of it that callers keep until it is given back."""
        self.held_slots = 0
        """How many slots hold memory."""
        _POOLS.add(self)

    def held_bytes(self) -> int:
        """Return the bytes of device memory that slots hold."""
        return self.held_slots * self.slot_bytes

    def holds_place(self, place: int) -> bool:
        """Return whether `place` has memory."""
        return place in self._memory

    def prepare(self, place: int, span: int) -> None:
        """Allocate memory for `span` slots at `place`, which has none. Earlier compute may still be using it."""
        self._memory[place] = self._empty(span * self.slot_bytes)
        self.views[place] = {}
        self._starts[place] = address_of(self._memory[place])
        self._spans[place] = span
        self.held_slots += span

    def flat(self, place: int, dtype: torch.dtype, numel: int, offset_elements: int = 0) -> torch.Tensor:
        """Return a 1-D tensor over memory of `place`, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self._device)
        return elements(self._memory[place], dtype, numel, offset_elements * dtype.itemsize)

    def poison(self, place: int) -> None:
        """Overwrite `place`, on the stream of compute, so that a stale reader gets NaN."""
        if place in self._memory:  # it may have none
            self.flat(place, torch.uint8, self._spans[place] * self.slot_bytes).fill_(POISON)

    def give_back(self, free: list[int], keep: int) -> None:
        """Free the memory of places among `free`, those with the highest numbers first, until at most `keep` slots hold
        memory."""
        for place in reversed(free):
            if self.held_slots <= keep:
                return
            if place in self._memory:
                self.held_slots -= self._spans.pop(place)
                del self._starts[place]
                del self.views[place]
                del self._memory[place]

    def holds(self, address: int) -> bool:
        """Return whether `address` lies in a slot."""
        return any(0 <= address - start < self._spans[place] * self.slot_bytes for place, start in self._starts.items())


class Device:
    """An accelerator, as the runtime sees it; the methods here are those of one that lives in host memory.

    `memory_bytes`: its capacity, None = the budget's. `watched`: the program watches every operator to know what memory
    it needs; otherwise the device's allocator counts it (`peak_bytes`). `cores`: the CPU numbers nearest to it, for
    threads that work on memory it reads; empty if all are alike.
    """

    torch_device = torch.device("cpu")
    watched = True
    SHARE = 0.25
    """Share of the free memory that is used without a budget."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.memory_bytes = memory_bytes

    @property
    def cores(self) -> tuple[int, ...]:
        return ()

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        """Return a pool of `slots` slots of `slot_bytes` each; its memory is taken only as slots are used."""
        return DevicePool(slot_bytes, slots, self.torch_device, self.allocate)

    def allocate(self, nbytes: int) -> RawMemory:
        """Return zeroed memory."""
        return Mapping(nbytes).buffer(0, nbytes)

    def available_bytes(self) -> int:
        """Return the bytes that a program may use without a budget."""
        return int(free_host_bytes() * self.SHARE)

    def pin(self, host: Mapping, start: int = 0) -> Callable[[], None]:
        """Page-lock `host` from byte `start` on, for copies at the full rate of the link; return a function that undoes
        it."""
        return lambda: None

    def captures(self) -> bool:
        """Return whether the current stream is being captured in a CUDA graph. Raises `ManageError` if it is not the
        default stream of a GPU."""
        return False

    def peak_bytes(self) -> int:
        """Return, unless `watched`, the most bytes allocated on it at one time by this process since `forget_peak`, or
        since the program has reset the peak that it reads itself."""
        return 0

    def forget_peak(self) -> None:
        """Have `peak_bytes` start anew from what is allocated now."""

    def allocated_bytes(self) -> int:
        """Return, unless `watched`, the bytes allocated on it by this process."""
        return 0

    def give_back(self) -> None:
        """Give others what serves all models, and what its allocator keeps; it is taken again as it is used."""

    def kept_bytes(self) -> int:
        """Return the bytes of the device that this process keeps from others, free memory of its allocator too."""
        return self.allocated_bytes()

    def told_free(self) -> str:
        """Return what of it is free, and who has the rest, as the end of a sentence; "" if no others can."""
        return ""

    def fragment_bytes(self) -> int:
        """Return the most bytes that its allocator had at one time between tensors: free, and of no use to others."""
        return 0

    def copy_in(self, target: torch.Tensor, source: torch.Tensor | CodedHome) -> None:
        """Copy `source`, a home, to `target`, a slot, on the current stream: both 1-D, contiguous and of one length.
        Casts to the slot's dtype as `Tensor.copy_` does; a NaN stays one, with any payload. Decodes quantised
        weights."""
        if isinstance(source, CodedHome):
            source.decode_into(target)
        else:
            target.copy_(source)  # neither needs a gradient

    def rows_in(self, target: torch.Tensor, table: torch.Tensor | CodedTable, indices: torch.Tensor) -> None:
        """Copy the rows `indices` (n) of `table` (rows, width), a home, to `target` (n, width), on the current stream,
        with a cast, or decoded, as `copy_in`. Raises what torch does for an index that the table does not have, but on
        a GPU, where such a row becomes NaN."""
        with torch.no_grad():
            if isinstance(table, CodedTable):
                self._decode_rows(target, table, indices)
            else:
                target.copy_(torch.index_select(table, 0, indices))

    def _decode_rows(self, target: torch.Tensor, table: CodedTable, indices: torch.Tensor) -> None:
        found = []
        for words in table.words():
            found.append(torch.empty((len(indices), words.shape[1]), dtype=words.dtype, device=target.device))
            self.rows_in(found[-1], words, indices)
        codes, scales = (each.view(-1).view(torch.uint8) for each in found)
        coding = replace(table.coding, matrices=1, rows=len(indices))
        self._decode(coding, (codes, scales, scales[:0]), target.view(-1))

    def _decode(self, coding: Coding, parts: Parts, target: torch.Tensor) -> None:
        """Decode a quantised weight from `parts` on the device to the flat `target`, on the current stream."""
        decode_parts(coding, parts, target)

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """Copy `arrived`, a gradient on the device, to `target`, its home, or add it, on the current stream: of one
        shape, with the bits of `Tensor.copy_` and `add_`; a NaN stays one, with any payload."""
        if torch.is_grad_enabled():  # a context for each gradient costs more than this test
            with torch.no_grad():
                self.gradient_out(target, arrived, add=add)
        elif add:
            target.add_(arrived)
        else:
            target.copy_(arrived)

    def gradients_out(self, targets: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
        """Do `gradient_out` for each of `targets`, of one dtype, with that of `arrived`, also of one; none is added."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.gradients_out(targets, arrived)
        else:
            torch_private.foreach_copy(targets, arrived)

    def tell_refusals(self, refused: Callable[[int, int], None]) -> None:
        """Call `refused`, a method that is held weakly, whenever the device's allocator refuses memory to this process,
        with the refused bytes and those allocated; on any thread, before the error is raised."""

    def remarks(self) -> list[str]:
        """Return sentences for the report: what is slower than it could be, why, and the remedy."""
        return []

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        """Return the copier between host memory and this device."""
        raise NotImplementedError


class SimDevice(Device):
    """A simulated accelerator: a bounded pool in host memory, with link speeds if they are given.

    `memory`: capacity in bytes or as a string; None = the budget's. `host_to_device`, `device_to_host`: bytes per
    second (ints or strings such as "12GB"); None = as fast as this machine copies. Operators compute on the CPU;
    `hetmem` sees to it that they use only memory of this device, as on a GPU (with `manage(sanitize=True)` it raises if
    they do not). Raises `BudgetError` for an invalid size or speed.
    """

    def __init__(
        self,
        memory: int | str | None = None,
        *,
        host_to_device: int | str | None = None,
        device_to_host: int | str | None = None,
    ) -> None:
        super().__init__(None if memory is None else parse_size(memory, "SimDevice(memory)"))
        self.host_to_device = _speed(host_to_device, "SimDevice(host_to_device=…)")
        self.device_to_host = _speed(device_to_host, "SimDevice(device_to_host=…)")

    def __repr__(self) -> str:
        return f"SimDevice(memory={self.memory_bytes})"

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        rates = {Link.HOST_TO_DEVICE: self.host_to_device, Link.DEVICE_TO_HOST: self.device_to_host}
        return ThreadCopier(rates, seen, finished)


def _speed(wanted: int | str | None, what: str) -> int | None:
    """Return bytes a second. Raises `BudgetError` for a speed of 0."""
    speed = None if wanted is None else parse_size(wanted, what)
    if speed == 0:
        raise BudgetError(f"{what} must be above 0 bytes per second; None is as fast as this machine copies")
    return speed


def out_of_memory(device: Device) -> str:
    """Return the sentence for a `device` without memory, in the words by which frameworks know it: "CUDA" and
    " out of memory."."""
    return f"{'simulated CUDA device' if device.watched else 'CUDA'} out of memory."
