"""An accelerator, as the runtime sees it, and its memory as a pool of slots.

Here is the simulated one, which lives in host memory and acts like a GPU.
It holds memory and knows link speeds; it does not know chunks, traces or which slots are taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hetmem.base.units import parse_size
from hetmem.errors import BudgetError
from hetmem.memory.chunk import Memory, address_of, elements
from hetmem.memory.host_memory import Mapping, free_host_bytes
from hetmem.memory.transfer import Copier, Finished, Seen, ThreadCopier
from hetmem.schedule.blocks import Link

POISON = 0xFF
"""The byte a freed slot is filled with under `sanitize`: NaN in every floating-point format, -1 in integers."""


_POOLS: weakref.WeakSet[DevicePool] = weakref.WeakSet()


def lies_in_a_slot(address: int) -> bool:
    """Return whether `address` lies in a slot of any model of this process, whose budget counts it."""
    return any(pool.holds(address) for pool in _POOLS)


class DevicePool:
    """Places for chunks on `device`, by number, each of one or more slots of `slot_bytes`.

    A place takes memory when a chunk first comes to lie there, and keeps it until that is given back. `slots` is how
    many may hold memory: before a place is prepared, others are given back.

    `empty` gives bytes of the device. Memory that was given back is safe for its next user, and memory that was just
    taken may still be read by compute that was asked for earlier.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        device: torch.device,
        empty: Callable[[int], Memory],
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._device = device
        self._empty = empty
        self._memory: dict[int, Memory] = {}
        self._spans: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # addresses of that memory
        self.views: dict[int, dict[Any, Any]] = {}
        """By place, what others keep of views of its memory until that is given back."""
        self.held_slots = 0
        """The slots that hold memory."""
        _POOLS.add(self)

    def held_bytes(self) -> int:
        """Return what slots have taken of the device's memory."""
        return self.held_slots * self.slot_bytes

    def holds_place(self, place: int) -> bool:
        """Whether there is memory at `place`."""
        return place in self._memory

    def prepare(self, place: int, span: int) -> None:
        """Have memory for `span` slots at `place`, where there is none. Other compute may still be using it."""
        self._memory[place] = self._empty(span * self.slot_bytes)
        self._starts[place] = address_of(self._memory[place])
        self._spans[place] = span
        self.held_slots += span

    def flat(self, place: int, dtype: torch.dtype, numel: int, offset_elements: int = 0) -> torch.Tensor:
        """Return a 1-D tensor over memory of `place`, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self._device)
        return elements(self._memory[place], dtype, numel, offset_elements * dtype.itemsize)

    def whole(self, place: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return what `flat` does, for copies: the same tensor as long as `place` keeps its memory."""
        views, key = self.views.setdefault(place, {}), (dtype, numel)
        found: torch.Tensor | None = views.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = views[key] = self.flat(place, dtype, numel)
        return found

    def poison(self, place: int) -> None:
        """Overwrite `place`, on the stream of compute, so that a stale reader gets NaN."""
        if place in self._memory:  # there may have been none for it
            self.flat(place, torch.uint8, self._spans[place] * self.slot_bytes).fill_(POISON)

    def give_back(self, free: list[int], keep: int) -> None:
        """Return the memory of places among `free`, those with the highest numbers first, until at most `keep` slots
        hold memory."""
        for place in reversed(free):
            if self.held_slots <= keep:
                return
            if place in self._memory:
                self.held_slots -= self._spans.pop(place)
                del self._starts[place]
                self.views.pop(place, None)
                del self._memory[place]

    def holds(self, address: int) -> bool:
        """Whether `address` lies in a slot."""
        return any(0 <= address - start < self._spans[place] * self.slot_bytes for place, start in self._starts.items())


class Device:
    """An accelerator, as the runtime sees it; what is here holds of one that lives in host memory.

    `memory_bytes`: its capacity, None = the budget's. `watched`: the program watches every operator to know what
    memory it needs; otherwise the allocator of the device says it (`peak_bytes`). `cores`: the CPU numbers nearest to
    it, for threads that work on what it reads; empty where all are alike.
    """

    torch_device = torch.device("cpu")
    watched = True
    SHARE = 0.25
    """Without a budget: this share of the memory that is free now."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.memory_bytes = memory_bytes

    @property
    def cores(self) -> tuple[int, ...]:
        return ()

    def pool(self, slot_bytes: int, slots: int) -> DevicePool:
        """Return a pool of `slots` slots of `slot_bytes` each; its memory is taken only as slots are used."""
        return DevicePool(slot_bytes, slots, self.torch_device, self.allocate)

    def allocate(self, nbytes: int) -> Memory:
        """Return zeroed memory."""
        return Mapping(nbytes).buffer(0, nbytes)

    def available_bytes(self) -> int:
        """Return the bytes that a program may use without a budget."""
        return int(free_host_bytes() * self.SHARE)

    def pin(self, host: Mapping) -> Callable[[], None]:
        """Make copies from and to `host` as fast as the link is; return what undoes it."""
        return lambda: None

    def captures(self) -> bool:
        """Say whether what is asked for now is recorded, in a CUDA graph, to run again later without the program.
        Raises `ManageError` where the program computes on another stream than the default one of a GPU."""
        return False

    def peak_bytes(self) -> int:
        """Return, unless `watched`, the most that was allocated on it, by anyone in this process, since the last
        call."""
        return 0

    def fragment_bytes(self) -> int:
        """Return the most that its allocator had at one time between tensors: free, and of no use to others."""
        return 0

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask for `source`, a home, to be copied to `target`, a slot, on the current stream: both 1-D, contiguous and
        as long. It is cast to the slot's dtype as `Tensor.copy_` does it; a NaN stays one, with any payload."""
        target.copy_(source)  # none needs a gradient

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """Ask for `arrived`, a gradient on the device, to be written to `target`, its home, or added to it, on the
        current stream: of one shape, in the bits of `Tensor.copy_` and `add_`; a NaN stays one, with any payload."""
        if torch.is_grad_enabled():  # a context for each gradient takes more calls than to ask
            with torch.no_grad():
                self.gradient_out(target, arrived, add=add)
        elif add:
            target.add_(arrived)
        else:
            target.copy_(arrived)

    def tell_refusals(self, refused: Callable[[int, int], None]) -> None:
        """Call `refused`, a method that is held weakly, with the bytes that the device's allocator has just refused to
        anyone in this process and with those that it has handed out; on any thread, before the error is raised."""

    def remarks(self) -> list[str]:
        """Return sentences for the report: what is slower here than it could be, why, and the way out."""
        return []

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        """Return what moves bytes between host memory and this device."""
        raise NotImplementedError


class SimDevice(Device):
    """A simulated accelerator: a bounded pool in host memory, with link speeds if they are given.

    `memory`: capacity in bytes or as a string; None = the budget's. `host_to_device`, `device_to_host`: bytes per
    second (ints or strings such as "12GB"); None = as fast as this machine copies. Operators compute on the CPU;
    `hetmem` sees to it that they meet only memory of this device, as on a GPU (with `manage(sanitize=True)` it raises
    where they do not). Raises `BudgetError` for a size or a speed that is none.
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
    """Return bytes a second. Raises `BudgetError` for a speed with which nothing would ever arrive."""
    speed = None if wanted is None else parse_size(wanted, what)
    if speed == 0:
        raise BudgetError(f"{what} must be above 0 bytes per second; None is as fast as this machine copies")
    return speed
