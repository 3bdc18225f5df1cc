"""Copies gradients from the device to their homes, and sees what the program does with them: uses of those in flight,
which wait, and writes, also where no version counts them.

Writes matter to gradients of which hetmem has a copy in staging that a write makes stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.executor import Executor
from hetmem.engine.param_views import hands_out, is_in_place, is_shared
from hetmem.engine.upward import GradientListener
from hetmem.memory.chunk import Chunk, Home, ManagedParameter, Role
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import SMALL_BYTES, Link
from hetmem.schedule.gradients import GradientSends, Send
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier

_ORDINARY: Any = torch.Tensor
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


class WatchedGradient(torch.Tensor):
    """The class of a gradient while the program has it, and hetmem has a staged copy of it.

    The first function of torch that may write to it, or that hands out its memory, makes it an ordinary tensor and is
    noted in the tensor's `__dict__`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        met = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if type(leaf) is cls]
        writes = is_in_place(func) or "out" in kwargs or getattr(func, "__name__", "") == "__set__"
        for leaf in met:
            leaf.__class__ = _ORDINARY
            if writes:
                note_access(leaf)
        try:
            result = func(*args, **kwargs)
            for leaf in () if writes else met:
                if hands_out(leaf, func, result):
                    note_access(leaf)
            return result
        finally:
            for leaf in met:
                if "hetmem_accessed" not in vars(leaf):
                    leaf.__class__ = cls


class GradientInFlight(torch.Tensor):
    """The class of a gradient while its home may lack its value, as hooks of a backward may find it: a copy of it is in
    flight, or in staging and not written to NVMe. The first function of torch that gets one waits for all.

    Each model has a subclass of its own (`Flights`).
    """

    hetmem_arrive: Callable[[], Callable[[], None] | None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (arrive := cls.hetmem_arrive()) is not None:
            arrive()
        for leaf in torch_private.tree_leaves((args, kwargs or {})):
            if type(leaf) is cls:  # its model is gone, or it was none of those awaited
                leaf.__class__ = _ORDINARY
        return func(*args, **(kwargs or {}))


class Flights:
    """The gradients of one model whose homes may lack their values, which the program waits for."""

    def __init__(self, arrive: Callable[[], Callable[[], None] | None]) -> None:
        """`arrive`: a weak reference to the function that waits for all of them, and then calls `end`."""
        name, fields = GradientInFlight.__name__, {"hetmem_arrive": arrive, "__module__": __name__}
        self.kind: Any = type(name, (GradientInFlight,), fields)
        """Their class."""
        self._begun: list[ManagedParameter] = []

    def begin(self, managed: ManagedParameter) -> None:
        """Have the program wait when it uses the gradient's home of `managed`, if there is one."""
        home: Any = managed.grad_home
        if home is not None:
            home.__class__ = self.kind
            self._begun += (managed,)

    @staticmethod
    def pause(managed: ManagedParameter) -> None:
        """Make the gradient's home of `managed` an ordinary tensor, until `begin` or `end`."""
        home: Any = managed.grad_home
        home.__class__ = _ORDINARY

    def end(self) -> None:
        """Make all of them ordinary tensors."""
        begun, self._begun = self._begun, []
        for managed in begun:
            home: Any = managed.grad_home
            if type(home) is self.kind:
                home.__class__ = _ORDINARY


def note_access(gradient: Any) -> None:
    """Note, unless that is noted, that the program may write to `gradient`, which has all its values at home."""
    known = vars(gradient)
    if "hetmem_accessed" not in known:
        if type(gradient) is WatchedGradient:
            gradient.__class__ = _ORDINARY
        known["hetmem_accessed"] = None


def watch_gradient(gradient: Any) -> None:
    """Watch `gradient`, which the program may write to from now on."""
    if type(gradient) is torch.Tensor and "hetmem_accessed" not in vars(gradient):
        gradient.__class__ = WatchedGradient


def end_watch(gradient: Any) -> None:
    """End `watch_gradient`."""
    if type(gradient) is WatchedGradient:
        gradient.__class__ = _ORDINARY
    vars(gradient).pop("hetmem_accessed", None)


def watch_gradients(chunk: Chunk) -> None:
    """Watch the homes of gradients of `chunk`."""
    for managed in chunk.parameters:
        if managed.grad_home is not None:
            managed.grad_version = managed.grad_home._version
            watch_gradient(managed.grad_home)
            if is_shared(managed.grad_home):
                note_access(managed.grad_home)


def end_watch_of(chunk: Chunk) -> bool:
    """End `watch_gradients`; return whether the program may have written to any."""
    accessed = False
    for managed in chunk.parameters:
        if managed.grad_home is not None:
            known = vars(managed.grad_home)
            accessed |= "hetmem_accessed" in known or managed.grad_home._version != managed.grad_version
            end_watch(managed.grad_home)
    return accessed


# ---- copies in flight ----------------------------------------------------------------------------------------------


def _without_functions(work: Callable[[], None]) -> None:
    """Do `work`, which writes to a gradient in flight, that a use of the program waits for."""
    with torch_private.NoFunctionsOfSubclasses():
        work()


class RoomForGradients(Protocol):
    """What limits device memory, as it is seen by what sends gradients."""

    def gradients_sent(self, count: int) -> None:
        """Note that `count` gradients were sent home."""

    def room_for_gradients(self) -> int:
        """Return how many device bytes gradients may take in the moment that runs, until they are at home."""


class GradientCopies:
    """Carries out what `GradientSends` decides: gradients in flight from the device to their homes."""

    def __init__(self, engine: TransferEngine, residency: Residency, executor: Executor, most_bytes: int) -> None:
        self._engine, self._residency, self._executor = engine, residency, executor
        self.sends: GradientSends[Chunk] = GradientSends(executor, most_bytes)
        self.arriving = self.sends.arriving
        self._unlimited = engine.unlimited(Link.DEVICE_TO_HOST)
        self.loss_listeners: Iterable[GradientListener] = ()
        """Those whose `lost` is called if a gradient of a chunk was sent and did not arrive."""
        self.room: Callable[[], RoomForGradients | None] = lambda: None
        """A weak reference to what limits device memory."""
        self.allowed_bytes = -1
        """How many device bytes may be gathered, as `room_bytes` has said; -1: another moment has begun since."""
        self.leaving: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}
        """The device memory of gradients in flight, by number of the send."""
        self.gathered_bytes = 0
        """Device bytes of gradients that wait there until their chunk has all of them: see `gathered_gradients`."""
        self.summed_bytes = 0
        """Those among them of sums, which idle copies make room for: see `summed_gradients`."""
        self.send_gathered: Callable[[], None] = lambda: None
        """Sends them, as their memory, or their values at home, are needed."""
        self.await_turns: Callable[[], bool | None] = lambda: False
        """Waits until a gradient that waits for other ranks is sent; False if none does."""

    def send_now(self, home: Home, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which copies `nbytes` from the device to `home`, on this thread."""
        if home.tier is Tier.DEVICE:
            work()
        else:
            self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)

    def send(
        self,
        chunk: Chunk,
        work: Callable[[], None],
        nbytes: int,
        gradients: Sequence[torch.Tensor],
        *,
        gathered: bool = False,
    ) -> None:
        """Run `work`, which copies `gradients`, of `nbytes` at home, to the home of `chunk`: few bytes on this thread,
        others while the backward goes on. Then end the lease of the staged role, if it is on NVMe. `gathered`: the
        trace has been told of them as they were gathered."""
        home, sent = chunk.homes[Role.GRAD], 0 if gathered else len(gradients)
        if home.tier is Tier.DEVICE or (self._unlimited and nbytes < SMALL_BYTES and not self.sends.on_their_way):
            try:
                if home.tier is Tier.DEVICE:
                    work()
                else:
                    self._engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            finally:
                if home.tier is Tier.NVME:
                    self._end_lease(home)
            if (room := self.room()) is not None:
                room.gradients_sent(sent)
            if home.tier is Tier.NVME:
                self._write_back(chunk, home)
            return
        send = self.sends.send(chunk, nbytes)
        self.leaving[send.number] = [*map(weakref.ref, map(torch.Tensor.untyped_storage, gradients))]
        ended = partial(weakly(self._arrived), chunk, send)
        self._executor.copy_beside(Link.DEVICE_TO_HOST, partial(_without_functions, work), nbytes, ended)
        if (room := self.room()) is not None:
            room.gradients_sent(sent)
        self.sends.wait_for_room()
        self.allowed_bytes = -1

    def _arrived(self, chunk: Chunk, send: Send, error: BaseException | None) -> None:
        del self.leaving[send.number]
        self.sends.arrived(chunk, send)
        home = chunk.homes[Role.GRAD]
        if home.tier is Tier.NVME:
            self._end_lease(home)
        if error is not None:
            for listener in self.loss_listeners:
                listener.lost(chunk)
            raise error
        if home.tier is Tier.NVME:
            self._write_back(chunk, home)

    def _end_lease(self, home: Home) -> None:
        """End the lease of the staged role that was opened before the gradient was sent."""
        assert home.block is not None
        self._executor.execute(self._residency.release(home.block, Tier.HOST, dirty=True))

    def _write_back(self, chunk: Chunk, home: Home) -> None:
        """Write the gradients of `chunk` to NVMe once all have arrived: see note "writes of gradients" in
        `schedule.gradients`."""
        if self.sends.to_be_written(chunk):
            assert home.block is not None
            self._executor.execute(self._residency.settle(home.block))

    def room_bytes(self) -> int:
        """Return how many device bytes may be gathered beside the gradients in flight, in the moment that runs."""
        room = self.room()
        beside = 0 if room is None else max(0, room.room_for_gradients())
        self.allowed_bytes = self.sends.room_bytes(beside)
        return self.allowed_bytes

    @property
    def under_way(self) -> bool:
        """Whether any gradient is in flight."""
        return self.sends.under_way

    @property
    def leaving_bytes(self) -> int:
        """Device bytes that gradients in flight still take; one that has arrived is free before its end is handled."""
        if not self.leaving:
            return 0
        storages = [memory() for memory in chain.from_iterable([*self.leaving.values()])]
        return sum({id(storage): storage.nbytes() for storage in storages if storage is not None}.values())

    def wait(self) -> None:
        """Send all that are gathered, and wait until every gradient has arrived; then raise the first error, if there
        was one."""
        self.send_gathered()
        self._executor.wait_while(lambda: self.sends.under_way)
