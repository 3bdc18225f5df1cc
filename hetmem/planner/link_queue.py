"""A link as the simulator knows it: a queue of transfers, each of which takes as long as a rate says. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetmem.schedule.blocks import LinkUse
from hetmem.schedule.hardware import Rate


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

    def _seconds_beside(self, alone: float, busy: float, left: float) -> float:
        """What lasts `alone` seconds alone, where the other direction is `busy` for the first ones."""
        slower = min(1.0, left / self.rate.bytes_per_second)
        done = busy * slower
        return alone / slower if done >= alone > 0 else busy + alone - done
