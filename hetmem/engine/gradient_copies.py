"""Gradients on their way from the device to their homes, behind the backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from hetmem.engine.executor import Carrier
from hetmem.engine.pending import Pending
from hetmem.memory.chunk import Chunk, Home, Role
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import GRADIENTS_IN_FLIGHT, SMALL_BYTES, Link
from hetmem.schedule.trace import Tier


class Close(Protocol):
    """Ends the use of a role of a chunk: `Traffic.close_role`."""

    def __call__(self, chunk: Chunk, role: Role, *, dirty: bool) -> None:
        """See there."""


class Homeward:
    """Sends gradients; each closes its role, with `close`, when it has arrived."""

    def __init__(self, engine: TransferEngine, pending: Pending, carrier: Carrier, close: Close) -> None:
        self._engine, self._pending, self._carrier, self._close = engine, pending, carrier, close
        self._on_their_way: Counter[Chunk] = Counter()
        self.lost: Callable[[Chunk], None] = lambda chunk: None
        """Called if a gradient of a chunk was sent and did not arrive."""
        self.sent: Callable[[], None] = lambda: None
        """Called when a gradient was sent."""
        self.leaving: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """The memory of those on their way, by the `id` of each reference."""
        self.arrived: Callable[[Chunk], None] = lambda chunk: None
        """Called if it did, and its role is closed."""

    def send_now(self, home: Home, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which takes `nbytes` from the device to `home`, here and now."""
        if home.tier is Tier.DEVICE:
            work()
        else:
            self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)

    def send(self, chunk: Chunk, work: Callable[[], None], nbytes: int, gradient: torch.Tensor) -> None:
        """Run `work`, which takes `gradient`, of `nbytes` at home, to `chunk`; at its end the role, open before, is
        closed. A small one at once, others behind the backward; until then it takes memory of the device."""
        home = chunk.homes[Role.GRAD]
        at_once = nbytes < SMALL_BYTES and not self._on_their_way and self._engine.unlimited(Link.DEVICE_TO_HOST)
        if home.tier is Tier.DEVICE or at_once:
            try:
                self.send_now(home, work, nbytes)
            finally:
                if home.tier is Tier.NVME:
                    self._close(chunk, Role.GRAD, dirty=True)
            self.sent()
            if home.tier is Tier.NVME:
                self.arrived(chunk)
            return
        memory = weakref.ref(gradient.untyped_storage())
        self._on_their_way[chunk] += 1
        self.leaving[id(memory)] = memory
        ended = partial(self._arrived, chunk, memory)
        self._pending.copy_beside(Link.DEVICE_TO_HOST, work, nbytes, ended)
        self.sent()
        while self._on_their_way.total() > GRADIENTS_IN_FLIGHT:
            self._carrier.wait_for_one()

    def _arrived(self, chunk: Chunk, memory: weakref.ref[torch.UntypedStorage], error: BaseException | None) -> None:
        del self.leaving[id(memory)]
        self._on_their_way[chunk] -= 1
        if not self._on_their_way[chunk]:
            del self._on_their_way[chunk]
        self._close(chunk, Role.GRAD, dirty=True)
        if error is not None:
            self.lost(chunk)
            raise error
        self.arrived(chunk)

    @property
    def under_way(self) -> bool:
        """Whether any gradient is on its way."""
        return bool(self._on_their_way)

    @property
    def leaving_bytes(self) -> int:
        """What gradients on their way still take of the device, also if nobody has taken note of their end yet."""
        if not self.leaving:
            return 0
        storages = [memory() for memory in self.leaving.values()]
        return sum({id(storage): storage.nbytes() for storage in storages if storage is not None}.values())

    def arriving(self, chunk: Chunk) -> bool:
        """Whether gradients of `chunk` are on their way."""
        return chunk in self._on_their_way

    def wait(self) -> None:
        """Every gradient has arrived at home, or its error is raised when all others have."""
        self._carrier.wait_while(lambda: bool(self._on_their_way))
