"""Simulates the transfers of a training run: carries out the decisions of `Residency` on a clock.

It drives the same state machine as a run, through the calls of `engine.traffic`, `engine.runtime` and `optim.adamw` in
their order, so a prediction and a run share one policy. Pure and deterministic. It does not model arithmetic, threads
that compete for cores, or the operating system.

Note "time": one thread trains; its time is `now`. A link is a queue: a transfer starts when the one before is over.
The thread notices that a transfer has ended only where the real one polls, and what follows from it starts then.
What hetmem takes of the thread takes longer beside updates, and what links carry delays updates, as both use the host's
memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hetmem.base.hardware import HardwareProfile, Rate
from hetmem.schedule.blocks import (
    LOADING,
    VALID,
    WAITING,
    Block,
    Command,
    Drop,
    EvictionPolicy,
    Fetch,
    Link,
    LinkUse,
    Write,
    ahead_at_once,
    in_flight_bytes,
)
from hetmem.schedule.formats import CODED_PIECE_ELEMENTS
from hetmem.schedule.gradients import GradientSends, Send, wait_until
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import DEVICE, HOST, Tier


@dataclass(slots=True)
class LinkQueue:
    """A link as a queue of transfers at `rate`; `load` counts what it carried.

    `beside`: the link of the other direction, and the bytes per second left to this one while that is busy. The
    transfer that was queued first keeps its rate, so that both together never exceed their sum. `mixed`: a factor on
    the seconds of a transfer that overlaps with the other direction.
    """

    rate: Rate
    load: LinkUse = field(default_factory=LinkUse)
    free_at: float = 0.0
    beside: tuple[LinkQueue, float] | None = None
    mixed: float = 1.0

    def send(self, now: float, nbytes: int) -> float:
        """Queue a transfer; return the time when it ends."""
        seconds = self.rate.seconds(nbytes)
        start = now if now > self.free_at else self.free_at
        if self.beside is not None and self.beside[0].free_at > start:
            seconds = self._seconds_beside(seconds * self.mixed, self.beside[0].free_at - start, self.beside[1])
        self.load.bytes += nbytes
        self.load.seconds += seconds
        self.free_at = start + seconds
        return self.free_at

    def carried(self, nbytes: int) -> float:
        """Count a transfer that the thread makes itself, without queueing; return its seconds."""
        seconds = self.rate.seconds(nbytes)
        self.load.bytes += nbytes
        self.load.seconds += seconds
        return seconds

    def _seconds_beside(self, alone: float, busy: float, left: float) -> float:
        """Return the seconds of a transfer that takes `alone` by itself, if the other direction is `busy` seconds."""
        slower = min(1.0, left / self.rate.bytes_per_second)
        done = busy * slower
        return alone / slower if done >= alone > 0 else busy + alone - done


_DECODED_PIECE_BYTES = 3 * CODED_PIECE_ELEMENTS
"""What decoding a piece reads and writes at most."""


class SimulatedTraffic:
    """Simulates `engine.traffic`, on a clock instead of threads. A transfer of a block moves `sizes[block]` bytes.

    `device_bytes`, and `slot_bytes` of the device if given, bound the transfers in flight. `on_device`: blocks whose
    home is on the device, so that a copy is a cast there.
    """

    def __init__(
        self,
        slots: dict[Tier, int],
        hardware: HardwareProfile,
        policy: EvictionPolicy | None = None,
        device_bytes: int = 1 << 40,
        slot_bytes: int | None = None,
    ) -> None:
        at_once = ahead_at_once(slot_bytes or device_bytes, device_bytes)
        self.residency = Residency(slots, policy, in_flight=at_once)
        self.sizes: list[int] = []
        self.now = 0.0
        self.stall_seconds = 0.0
        self.host_to_device = LinkQueue(hardware.host_to_device)
        self.device_to_host = LinkQueue(hardware.device_to_host)
        self._share_the_link(hardware.both_ways_bytes_per_second)
        self.nvme_read = LinkQueue(hardware.nvme_read)
        self.nvme_write = LinkQueue(hardware.nvme_write)
        self._share_the_disk(hardware.nvme_both_ways_bytes_per_second)
        self._transfer_seconds = hardware.thread.transfer_seconds
        self._beside_updates = hardware.host.beside_updates
        self.updating_until = 0.0
        """When the updates that have begun on the host end."""
        self.host_bytes = 0
        """Bytes that the device's links have read from and written to host memory."""
        self.on_device: set[int] = set()
        self._cast = Rate(hardware.device.bytes_per_second)
        self.decoded: dict[int, int] = {}
        """The bytes that decoding a copy of a block of quantised weights reads and writes: of codes, and of values."""
        by_host = hardware.host_to_device.by_the_caller
        rate = hardware.host.copy_bytes_per_second if by_host else hardware.device.bytes_per_second
        self.decoding = LinkQueue(Rate(rate, by_the_caller=by_host))
        self._ends: list[tuple[float, int, Fetch | Write | Callable[[], None]]] = []
        self._sent = 0
        self.pump: Callable[[], None] = lambda: None
        """Makes queued updates progress as far as they can without waiting."""
        self.make_way: Callable[..., bool] = lambda *, again: False
        """Makes queued updates release staging that they have opened and do not use yet; see `Waiting`."""
        self.gradients: GradientSends[int] = GradientSends(self, in_flight_bytes(device_bytes))
        self._gradient_ends: deque[tuple[float, int]] = deque()
        self._gradient_bytes = 0
        self.gathered_bytes = 0
        """Device bytes of gradients that wait there for the others of their chunk, or are added up."""
        self.summed_bytes = 0
        """Those of the latter."""
        self.send_sums: Callable[[], None] = lambda: None
        """Sends them home."""
        self.send_gathered: Callable[[], object] = lambda: None
        """Sends the others."""
        self.ahead_bytes = 0
        """Bytes of activations fetched to the device, until their use."""
        self._commands: deque[tuple[Fetch | Write, bool]] = deque()
        self._executing = False

    @property
    def links(self) -> dict[str, LinkQueue]:
        """The links by the names in `Link`."""
        return {
            Link.HOST_TO_DEVICE.value: self.host_to_device,
            Link.DEVICE_TO_HOST.value: self.device_to_host,
            Link.NVME_READ.value: self.nvme_read,
            Link.NVME_WRITE.value: self.nvme_write,
        }

    def _share_the_link(self, both_ways: float) -> None:
        """Slow each direction down while the other is busy, if both together reach less than the sum of their rates."""
        up, down = self.host_to_device, self.device_to_host
        if both_ways < up.rate.bytes_per_second + down.rate.bytes_per_second:
            least = 0.1 * both_ways  # a direction is never shut out
            up.beside = (down, max(least, both_ways - down.rate.bytes_per_second))
            down.beside = (up, max(least, both_ways - up.rate.bytes_per_second))

    def _share_the_disk(self, both_ways: float) -> None:
        """Slow reads and writes of the disk down while they overlap: a disk that serves one request at a time takes the
        sum of both times or more, one with an engine for each direction only the longer time."""
        if both_ways:
            queues = self.nvme_read, self.nvme_write
            alone, together = sum(1 / queue.rate.bytes_per_second for queue in queues), 2 / both_ways
            for queue, other in (queues, queues[::-1]):
                hidden = max(0.0, alone - together) * other.rate.bytes_per_second
                queue.beside = other, min(1.0, hidden) * queue.rate.bytes_per_second
                queue.mixed = max(1.0, together / alone)

    def add(self, block: Block, nbytes: int) -> int:
        """Register `block`, whose transfers move `nbytes`; return its number."""
        self.sizes.append(nbytes)
        return self.residency.add(block)

    # ---- copies ------------------------------------------------------------------------------------------------

    def acquire(self, block: int, tier: Tier, *, load: bool = True) -> None:
        """Begin a use of `block` on `tier`; wait until its copy is valid. Raises `CapacityError` if it never can be."""
        residency = self.residency
        used = residency.use({block: 1}, tier)
        commands = residency.acquire(block, tier, load=load) if used is None else used
        if commands:
            self.execute(commands, urgent=block)
        if used is not None:
            return
        if residency.state(block, tier) is VALID:
            return
        if not wait_until(self, lambda: residency.state(block, tier) is VALID):
            raise residency.withdraw(block, tier)

    def release(self, block: int, tier: Tier, *, dirty: bool = False) -> None:
        """End a use of `block` on `tier`; `dirty`: the use wrote to the copy."""
        commands = self.residency.release(block, tier, dirty=dirty)
        if commands:
            self.execute(commands)

    def open_staged(self, block: int, *, load: bool) -> None:
        """Use `block`, whose home is on NVMe, in host memory."""
        self.residency.reach((block,), HOST)
        self.acquire(block, HOST, load=load)
        while self.residency.writing(block):
            self.wait_for_one()

    def ask(self, block: int, *, load: bool) -> None:
        """Begin what `open_staged` does, without waiting."""
        self.residency.reach((block,), HOST)
        self.execute(self.residency.acquire(block, HOST, load=load))

    def unask(self, block: int) -> None:
        """Undo `ask`."""
        if self.residency.state(block, HOST) is WAITING:
            self.residency.withdraw(block, HOST)
        else:
            self.release(block, HOST)

    def wait_until_written(self, blocks: Iterable[int]) -> None:
        """Write the dirty ones among `blocks` to NVMe, and wait for that."""
        blocks = list(blocks)
        for block in blocks:
            self.execute(self.residency.settle(block))
        for block in blocks:
            while self.residency.dirty(block):
                self.wait_for_one()

    def begin_update(self, operand: int | None) -> bool:
        """Prepare for a write to the home of `operand`: nothing is fetched from it until `end_update`, and its device
        copy is dropped. Return whether there was one."""
        if operand is None:
            return False
        self.residency.suspend([operand])
        while self.residency.state(operand, DEVICE) is LOADING:
            self.wait_for_one()
        found = self.residency.state(operand, DEVICE) is VALID
        if found:
            self.execute(self.residency.invalidate(operand, DEVICE))
        return found

    def end_update(self, operand: int | None, *, renew: bool) -> None:
        """Allow fetches of `operand` again, as its home has been written; with `renew` prefetch it to the device."""
        if operand is not None:
            self.execute(self.residency.resume([operand]))
            if renew:
                self.execute(self.residency.prefetch([operand], DEVICE))

    def copy_beside(self, link: LinkQueue, nbytes: int, done: Fetch | Write | Callable[[], None]) -> float:
        """Send `nbytes` over `link` in the background; `done` follows at their arrival, whose time is returned."""
        self.takes(self._transfer_seconds)
        if link is self.host_to_device or link is self.device_to_host:
            self.host_bytes += nbytes
        end = link.send(self.now, nbytes)
        if isinstance(done, tuple) and link is self.host_to_device and done.block in self.decoded:
            end += self._decode(done.block)
        self.later(end, done)
        return end

    def _decode(self, block: int) -> float:
        """Count the decoding of `block`; return its seconds behind the copy: of all of it, or of the last piece, as a
        copy engine brings the next piece meanwhile."""
        nbytes = self.decoded[block]
        self.decoding.load.seconds += self.decoding.rate.seconds(nbytes)
        last = nbytes if self.decoding.rate.by_the_caller else min(nbytes, _DECODED_PIECE_BYTES)
        return self.decoding.rate.seconds(last)

    def _decode_here(self, block: int) -> float:
        """Count the decoding of `block`, whose codes are on the device, as a wait of compute; return its seconds."""
        seconds = self.decoding.rate.seconds(self.decoded[block])
        self.decoding.load.seconds += seconds
        self.stall_seconds += seconds
        return seconds

    def read_rows(self, nbytes: int) -> None:
        """Have compute itself read `nbytes` of rows of an embedding from host memory."""
        seconds = self.host_to_device.carried(nbytes)
        self.host_bytes += nbytes
        self.stall_seconds += seconds
        self.now += seconds

    def takes(self, seconds: float) -> None:
        """Let the thread take `seconds`, by the time that they take where nothing updates."""
        beside = self.updating_until - self.now
        if beside > 0:
            slowed = min(seconds, beside / self._beside_updates)
            seconds += (self._beside_updates - 1) * slowed
        self.now += seconds

    def move_in(self, block: int, home: Block, nbytes: int) -> None:
        """Move the home of `block` to the device, where it is `home`; `nbytes` of it have to be copied."""
        self.execute(self.residency.settle(block))
        self.drain()
        for tier in (HOST, DEVICE):
            self.execute(self.residency.invalidate(block, tier))
        self.residency.blocks[block] = home
        self.on_device.add(block)
        self.now += self.host_to_device.carried(nbytes) if nbytes else 0.0

    def rehome(self, block: int, tier: Tier) -> None:
        """Place the home of `block`, which has no copy, on `tier`."""
        self.residency.blocks[block] = replace(self.residency.blocks[block], home=tier)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def send_home(self, nbytes: int) -> None:
        """Send a gradient or an activation home while the thread waits."""
        self.now += self.device_to_host.carried(nbytes)

    def send_gradient(
        self, chunk: int, nbytes: int, device_bytes: int, arrived: Callable[[], None] = lambda: None
    ) -> None:
        """Send a gradient of `chunk` home in the background; it takes `device_bytes` until then, and then `arrived` is
        called."""
        if self.device_to_host.rate.by_the_caller and self.gradients.at_once(nbytes):
            self.send_home(nbytes)
            arrived()
            return
        send = self.gradients.send(chunk, nbytes)
        self.send_beside(nbytes, device_bytes, partial(self._gradient_arrived, chunk, send, arrived))
        self.gradients.wait_for_room()

    def send_beside(self, nbytes: int, device_bytes: int, arrived: Callable[[], None]) -> None:
        """Send a gradient or an activation home in the background; it takes `device_bytes` until it has `arrived`."""
        end = self.copy_beside(self.device_to_host, nbytes, arrived)
        self._gradient_ends.append((end, device_bytes))
        self._gradient_bytes += device_bytes

    def _gradient_arrived(self, chunk: int, send: Send, arrived: Callable[[], None]) -> None:
        self.gradients.arrived(chunk, send)
        arrived()

    def gradient_bytes(self) -> int:
        """Return the device bytes of gradients that are gathered, of gradients and activations in flight, and of
        activations fetched ahead of use."""
        while self._gradient_ends and self._gradient_ends[0][0] <= self.now:
            self._gradient_bytes -= self._gradient_ends.popleft()[1]
        return self._gradient_bytes + self.gathered_bytes + self.ahead_bytes

    def wait_for_gradients(self) -> None:
        """Wait until every gradient is at home."""
        while self.gradients.under_way:
            self.wait_for_one()

    # ---- carrying commands out ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Process the transfers that have ended by now, and let updates progress."""
        while self._ends and self._ends[0][0] <= self.now:
            self._note(heapq.heappop(self._ends)[2])
        self.pump()

    def busy(self) -> bool:
        """Return whether anything is in flight that `wait_for_one` can wait for."""
        return bool(self._ends)

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self.residency.in_flight():
            self.wait_for_one()

    def wait_for_one(self) -> None:
        """Wait for the next end of a transfer or job, and count the stall."""
        end, _, command = heapq.heappop(self._ends)
        if end > self.now:
            self.stall_seconds += end - self.now
            self.now = end
        self._note(command)

    def execute(self, commands: Sequence[Command], urgent: int | None = None) -> None:
        """Start `commands` in order; new ones, that follow from one that is done at once, go behind the others."""
        waiting = self._commands
        for command in commands:
            if not isinstance(command, Drop):  # a drop takes no time
                waiting.append((command, command.block == urgent))
        if self._executing or not waiting:
            return
        self._executing = True
        while waiting:
            self._carry_out(*waiting.popleft())
        self._executing = False

    def later(self, end: float, what: Fetch | Write | Callable[[], None]) -> None:
        """Schedule `what` for the time `end`: a command that is done then, or a function to call."""
        self._sent += 1
        heapq.heappush(self._ends, (end, self._sent, what))

    def _note(self, what: Fetch | Write | Callable[[], None]) -> None:
        if isinstance(what, tuple):  # a command
            commands = self.residency.done(what)
            if commands:
                self.execute(commands)
        else:
            what()

    def _carry_out(self, command: Fetch | Write, urgent: bool) -> None:
        if isinstance(command, Write):
            link = self.nvme_write
        else:
            link = self.host_to_device if command.target is DEVICE else self.nvme_read
        block = command.block
        nbytes = self.sizes[block]
        if block in self.on_device:
            seconds = self._decode_here(block) if block in self.decoded else self._cast.seconds(nbytes)
            self.now += seconds
            self.execute(self.residency.done(command))
            return
        if urgent and link is self.host_to_device and link.rate.by_the_caller:
            seconds = link.carried(nbytes)
            if block in self.decoded:
                seconds += self._decode(block)
            self.stall_seconds += seconds
            self.now += seconds
            self.execute(self.residency.done(command))
            return
        self.copy_beside(link, nbytes, command)
