"""A training run on a clock: what `Residency` decides, carried out by links that are numbers.

The same state machine that runs on a real machine is driven through the same calls, in the order in which
`engine.traffic`, `engine.runtime` and `optim.adamw` make them, so a prediction and a run share one policy. Pure and
deterministic: no clock but its own. What it does not know: arithmetic, threads that compete for cores, an operating
system.

Note "time": one thread trains; its time is `now`. A link is a queue: a transfer starts when the one before is over. An
end is noticed only when the thread looks (where the real one does too), and what follows from it starts then.
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
from hetmem.schedule.gradients import GradientSends, Send, wait_until
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import DEVICE, HOST, Tier


@dataclass(slots=True)
class LinkQueue:
    """A link as a queue of transfers at `rate`, and what it has carried.

    `beside`: the link of the other direction, and the bytes per second that are left while that one is busy too. The
    transfer that was queued first is taken to keep its rate, so that both together never have more. `mixed`: how much
    longer than alone the other one takes, beside that.
    """

    rate: Rate
    load: LinkUse = field(default_factory=LinkUse)
    free_at: float = 0.0
    beside: tuple[LinkQueue, float] | None = None
    mixed: float = 1.0

    def send(self, now: float, nbytes: int) -> float:
        """Queue a transfer; returns when it ends."""
        seconds = self.rate.seconds(nbytes)
        start = now if now > self.free_at else self.free_at
        if self.beside is not None and self.beside[0].free_at > start:
            seconds = self._seconds_beside(seconds * self.mixed, self.beside[0].free_at - start, self.beside[1])
        self.load.bytes += nbytes
        self.load.seconds += seconds
        self.free_at = start + seconds
        return self.free_at

    def carried(self, nbytes: int) -> float:
        """Count a transfer that the thread makes itself, behind none; returns the seconds that it takes."""
        seconds = self.rate.seconds(nbytes)
        self.load.bytes += nbytes
        self.load.seconds += seconds
        return seconds

    def _seconds_beside(self, alone: float, busy: float, left: float) -> float:
        """What lasts `alone` seconds alone, where the other direction is `busy` for the first ones."""
        slower = min(1.0, left / self.rate.bytes_per_second)
        done = busy * slower
        return alone / slower if done >= alone > 0 else busy + alone - done


class SimulatedTraffic:
    """`engine.traffic` with a clock in place of threads. `sizes[block]` are the bytes that a transfer of it moves.

    Transfers in flight are bounded by `device_bytes`, and by the `slot_bytes` of the device where these are known.
    `on_device`: blocks whose home is on the device, so that a copy is a cast there.
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
        self.on_device: set[int] = set()
        self._cast = Rate(hardware.device.bytes_per_second)
        self._ends: list[tuple[float, int, Fetch | Write | Callable[[], None]]] = []
        self._sent = 0
        self.pump: Callable[[], None] = lambda: None
        """Has the worker that makes updates behind everything else go on as far as that needs no waiting."""
        self.make_way: Callable[..., bool] = lambda *, again: False
        """Has it let go of memory that it holds and does not work with yet; see `Waiting`."""
        self.gradients: GradientSends[int] = GradientSends(self, in_flight_bytes(device_bytes))
        self._gradient_ends: deque[tuple[float, int]] = deque()
        self._gradient_bytes = 0
        self.ahead_bytes = 0
        """Of activations that come to the device, up to their use."""
        self._commands: deque[tuple[Fetch | Write, bool]] = deque()
        self._executing = False

    @property
    def links(self) -> dict[str, LinkQueue]:
        """The links by name, that of `Link`."""
        return {
            Link.HOST_TO_DEVICE.value: self.host_to_device,
            Link.DEVICE_TO_HOST.value: self.device_to_host,
            Link.NVME_READ.value: self.nvme_read,
            Link.NVME_WRITE.value: self.nvme_write,
        }

    def _share_the_link(self, both_ways: float) -> None:
        """Where the two directions together reach less than each alone would add up to."""
        up, down = self.host_to_device, self.device_to_host
        if both_ways < up.rate.bytes_per_second + down.rate.bytes_per_second:
            least = 0.1 * both_ways  # a direction is never shut out
            up.beside = (down, max(least, both_ways - down.rate.bytes_per_second))
            down.beside = (up, max(least, both_ways - up.rate.bytes_per_second))

    def _share_the_disk(self, both_ways: float) -> None:
        """A disk that takes requests one at a time needs for both directions the sum of what each takes alone, or more
        where it does not like to change; one with an engine for each no more than the slower one."""
        if both_ways:
            queues = self.nvme_read, self.nvme_write
            alone, together = sum(1 / queue.rate.bytes_per_second for queue in queues), 2 / both_ways
            for queue, other in (queues, queues[::-1]):
                hidden = max(0.0, alone - together) * other.rate.bytes_per_second
                queue.beside = other, min(1.0, hidden) * queue.rate.bytes_per_second
                queue.mixed = max(1.0, together / alone)

    def add(self, block: Block, nbytes: int) -> int:
        """Register `block`; returns its number."""
        self.sizes.append(nbytes)
        return self.residency.add(block)

    # ---- copies ------------------------------------------------------------------------------------------------

    def acquire(self, block: int, tier: Tier, *, load: bool = True) -> None:
        """One more use of `block` on `tier`; waits until it is there. Raises `CapacityError` if it never can be."""
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
        """One use less."""
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
        """Begin what `open_staged` does, and do not wait."""
        self.residency.reach((block,), HOST)
        self.execute(self.residency.acquire(block, HOST, load=load))

    def unask(self, block: int) -> None:
        """Take `ask` back."""
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
        """The home of `operand` will be written: until `end_update` nothing is fetched from there. The device copy is
        given up; whether there is one."""
        if operand is None:
            return False
        self.residency.suspend(operand)
        while self.residency.state(operand, DEVICE) is LOADING:
            self.wait_for_one()
        found = self.residency.state(operand, DEVICE) is VALID
        if found:
            self.execute(self.residency.invalidate(operand, DEVICE))
        return found

    def end_update(self, operand: int | None, *, renew: bool) -> None:
        """The home of `operand` is what it will be; with `renew` a copy on the device is wanted again."""
        if operand is not None:
            self.execute(self.residency.resume(operand))
            if renew:
                self.execute(self.residency.prefetch(operand, DEVICE))

    def copy_beside(self, link: LinkQueue, nbytes: int, done: Fetch | Write | Callable[[], None]) -> float:
        """Send `nbytes` over `link`, behind what the thread does; `done` follows when they are there, which is said."""
        self.now += self._transfer_seconds
        end = link.send(self.now, nbytes)
        self.later(end, done)
        return end

    def move_in(self, block: int, home: Block, nbytes: int) -> None:
        """The home of `block` goes to the device, with `nbytes` that matter; from now on it is `home`."""
        self.execute(self.residency.settle(block))
        self.drain()
        for tier in (HOST, DEVICE):
            self.execute(self.residency.invalidate(block, tier))
        self.residency.blocks[block] = home
        self.on_device.add(block)
        self.now += self.host_to_device.carried(nbytes) if nbytes else 0.0

    def rehome(self, block: int, tier: Tier) -> None:
        """The home of `block`, which has no copy, lies on `tier`."""
        self.residency.blocks[block] = replace(self.residency.blocks[block], home=tier)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def send_home(self, nbytes: int) -> None:
        """A gradient goes home while the thread waits."""
        self.now += self.device_to_host.carried(nbytes)

    def send_gradient(
        self, chunk: int, nbytes: int, device_bytes: int, arrived: Callable[[], None] = lambda: None
    ) -> None:
        """A gradient of `chunk` goes home behind the backward; until then it takes `device_bytes`, and then it has
        `arrived`."""
        if self.device_to_host.rate.by_the_caller and self.gradients.at_once(nbytes):
            self.send_home(nbytes)
            arrived()
            return
        send = self.gradients.send(chunk, nbytes)
        self.send_beside(nbytes, device_bytes, partial(self._gradient_arrived, chunk, send, arrived))
        self.gradients.wait_for_room()

    def send_beside(self, nbytes: int, device_bytes: int, arrived: Callable[[], None]) -> None:
        """Send `nbytes` home, a gradient or an activation; until they are there they take `device_bytes`."""
        end = self.copy_beside(self.device_to_host, nbytes, arrived)
        self._gradient_ends.append((end, device_bytes))
        self._gradient_bytes += device_bytes

    def _gradient_arrived(self, chunk: int, send: Send, arrived: Callable[[], None]) -> None:
        self.gradients.arrived(chunk, send)
        arrived()

    def gradient_bytes(self) -> int:
        """Bytes of gradients, and of activations, that have not left the device yet or come before their use."""
        while self._gradient_ends and self._gradient_ends[0][0] <= self.now:
            self._gradient_bytes -= self._gradient_ends.popleft()[1]
        return self._gradient_bytes + self.ahead_bytes

    def wait_for_gradients(self) -> None:
        """Every gradient is at home."""
        while self.gradients.under_way:
            self.wait_for_one()

    # ---- carrying commands out ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of what has ended meanwhile."""
        while self._ends and self._ends[0][0] <= self.now:
            self._note(heapq.heappop(self._ends)[2])
        self.pump()

    def busy(self) -> bool:
        """Whether anything is under way that `wait_for_one` can wait for."""
        return bool(self._ends)

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self.residency.in_flight():
            self.wait_for_one()

    def wait_for_one(self) -> None:
        """Wait until one transfer has ended."""
        end, _, command = heapq.heappop(self._ends)
        if end > self.now:
            self.stall_seconds += end - self.now
            self.now = end
        self._note(command)

    def execute(self, commands: Sequence[Command], urgent: int | None = None) -> None:
        """Start `commands` in order; what follows from one that is done at once goes behind the others."""
        waiting = self._commands
        for command in commands:
            if not isinstance(command, Drop):  # which is done by being decided
                waiting.append((command, command.block == urgent))
        if self._executing or not waiting:
            return
        self._executing = True
        while waiting:
            self._carry_out(*waiting.popleft())
        self._executing = False

    def later(self, end: float, what: Fetch | Write | Callable[[], None]) -> None:
        """`what` is over at `end`: a command, or something to be called then."""
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
            self.now += self._cast.seconds(nbytes)
            self.execute(self.residency.done(command))
            return
        if urgent and link is self.host_to_device and link.rate.by_the_caller:
            seconds = link.carried(nbytes)
            self.stall_seconds += seconds
            self.now += seconds
            self.execute(self.residency.done(command))
            return
        self.copy_beside(link, nbytes, command)
