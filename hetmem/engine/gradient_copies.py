"""Gradients on their way from the device to their homes, behind the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from hetmem.engine.executor import Executor
from hetmem.engine.pending import Pending
from hetmem.memory.chunk import Chunk, Home, Role
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import Link
from hetmem.schedule.gradients import GradientSends, Send
from hetmem.schedule.trace import Tier


class Close(Protocol):
    """Ends the use of a role of a chunk: `Traffic.close_role`."""

    def __call__(self, chunk: Chunk, role: Role, *, dirty: bool) -> None:
        """See there."""


class GradientCopies:
    """Carries out what `sends` decides; each gradient closes its role, with `close`, when it has arrived."""

    def __init__(
        self, engine: TransferEngine, pending: Pending, executor: Executor, close: Close, most_bytes: int
    ) -> None:
        self._engine, self._pending, self._executor, self._close = engine, pending, executor, close
        self.sends: GradientSends[Chunk] = GradientSends(pending, most_bytes)
        self.arriving = self.sends.arriving
        self._unlimited = engine.unlimited(Link.DEVICE_TO_HOST)
        self.lost: Callable[[Chunk], None] = lambda chunk: None
        """Called if a gradient of a chunk was sent and did not arrive."""
        self.sent: Callable[[], None] = lambda: None
        """Called when a gradient was sent."""
        self.leaving: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """The memory of those on their way, by the number of each send."""
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
        at_once = self._unlimited and self.sends.at_once(nbytes)
        if home.tier is Tier.DEVICE or at_once:
            try:
                if home.tier is Tier.DEVICE:
                    work()
                else:
                    self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            finally:
                if home.tier is Tier.NVME:
                    self._close(chunk, Role.GRAD, dirty=True)
            self.sent()
            if home.tier is Tier.NVME:
                self.arrived(chunk)
            return
        memory = weakref.ref(gradient.untyped_storage())
        send = self.sends.send(chunk, nbytes)
        self.leaving[send.number] = memory
        ended = partial(self._arrived, chunk, send)
        self._pending.copy_beside(Link.DEVICE_TO_HOST, work, nbytes, ended)
        self.sent()
        self.sends.wait_for_room()

    def _arrived(self, chunk: Chunk, send: Send, error: BaseException | None) -> None:
        del self.leaving[send.number]
        self.sends.arrived(chunk, send)
        self._close(chunk, Role.GRAD, dirty=True)
        if error is not None:
            self.lost(chunk)
            raise error
        self.arrived(chunk)

    @property
    def under_way(self) -> bool:
        """Whether any gradient is on its way."""
        return self.sends.under_way

    @property
    def leaving_bytes(self) -> int:
        """What gradients on their way still take of the device, also if nobody has taken note of their end yet."""
        if not self.leaving:
            return 0
        storages = [memory() for memory in self.leaving.values()]
        return sum({id(storage): storage.nbytes() for storage in storages if storage is not None}.values())

    def wait(self) -> None:
        """Every gradient has arrived at home, or its error is raised when all others have."""
        self._executor.wait_while(lambda: self.sends.under_way)
