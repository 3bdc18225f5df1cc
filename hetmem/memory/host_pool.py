"""Pinned host memory: one page-aligned mapping, cut into permanent homes and the slots of a staging ring.

Here is how it is page-locked too: registered with the CUDA driver in pieces, unregistered on a thread that may wait.
It hands out bytes and keeps to its capacity; it does not know what is in them, nor torch's allocator.

Note "finalizers": unregistering waits for the driver, which may wait for a lock of the thread that the garbage
collector has interrupted. A finalizer therefore only queues it (`later`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hetmem.base.units import format_size, round_down, round_up
from hetmem.errors import CapacityError
from hetmem.memory.mapping import Mapping
from hetmem.memory.spans import Spans
from hetmem.schedule.placement import PIECE_BYTES

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU
_MAPPED = 2  # cudaHostRegisterMapped: kernels reach it, at the host's own addresses


class PageLocks:
    """The pieces of `host` that are page-locked, until `end` is called.

    `cudart` has `cudaHostRegister(address, nbytes, flags)` and `cudaHostUnregister(address)`, which return an error
    code. `piece_bytes`: the most that is registered in one call. `error` is the first code other than 0; pieces
    registered before it stay so.
    """

    def __init__(self, cudart: Any, host: Mapping, piece_bytes: int) -> None:
        self._cudart, self._host, self._process = cudart, host, os.getpid()  # holds the memory until it is unregistered
        self.pieces: list[range] = []
        self.error = 0
        _THREAD.begin()
        for start in range(host.address, host.address + host.nbytes, piece_bytes):
            piece = range(start, min(start + piece_bytes, host.address + host.nbytes))
            error = cudart.cudaHostRegister(piece.start, len(piece), _PORTABLE | _MAPPED)
            self.error = int(getattr(error, "value", error))  # torch's own enumeration, which need not be a number
            if self.error:
                break
            self.pieces.append(piece)

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(map(len, self.pieces))

    def end(self) -> None:
        """Unregister all pieces. In a forked child, which has none of the driver's state, it does nothing."""
        if os.getpid() != self._process:
            return
        try:
            while self.pieces:
                self._cudart.cudaHostUnregister(self.pieces.pop().start)
        finally:
            _THREAD.end()


def later(work: Callable[[], None]) -> None:
    """Do `work`, the end of page-locking, on a thread of its own if memory is page-locked at all, else now."""
    _THREAD.queue(work)


class _Thread:
    """The thread of `later`; it runs while any `PageLocks` has not ended."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._locks = 0

    def begin(self) -> None:
        with self._lock:
            self._locks += 1
            if self._locks == 1:
                threading.Thread(target=self._run, name="hetmem-unpin", daemon=True).start()

    def end(self) -> None:
        with self._lock:
            self._locks -= 1
            if not self._locks:
                self._queue.put(None)

    def queue(self, work: Callable[[], None]) -> None:
        """Takes no lock: a finalizer may have interrupted the thread that holds it."""
        if self._locks:
            self._queue.put(work)
        else:
            work()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work


_THREAD = _Thread()


PAGE_BYTES = 4096


class Loan:
    """`memory` of a `HostPool`, which has it back when this is dropped, on any thread."""

    __slots__ = ("_at", "_spans", "memory")

    def __init__(self, spans: Spans, at: int, memory: memoryview) -> None:
        self._spans, self._at, self.memory = spans, at, memory

    def __del__(self) -> None:
        self._spans.give_back(self._at)


class HostPool:
    """`capacity_bytes` of host memory (rounded down to pages), exact: nothing is rounded up to powers of two.

    `mapping`: memory to use, at least as large; None = new memory.
    """

    def __init__(self, capacity_bytes: int, mapping: Mapping | None = None) -> None:
        self.capacity_bytes = round_down(capacity_bytes, PAGE_BYTES)
        self.reserved_bytes = 0
        self.mapping = mapping or Mapping(max(PAGE_BYTES, self.capacity_bytes))
        self.mapping.keep_from_children()
        self._staging_offset = 0
        self.slot_bytes = 0  # of staging
        self._spans = Spans(self.capacity_bytes, PAGE_BYTES, PIECE_BYTES)

    @property
    def free_bytes(self) -> int:
        """What may still be reserved."""
        return self._spans.lowest - self.reserved_bytes

    @property
    def lent_bytes(self) -> int:
        """What `lend` has handed out."""
        return self._spans.lent_bytes

    def lend(self, nbytes: int, leave_bytes: int = 0) -> Loan | None:
        """Lend page-aligned memory for a while, and leave `leave_bytes` to be reserved; None if there is no room."""
        start = round_up(self.reserved_bytes + leave_bytes, PAGE_BYTES)
        at = self._spans.take(nbytes, start)
        return None if at is None else Loan(self._spans, at, self.mapping.buffer(at, round_up(nbytes, PAGE_BYTES)))

    def reserve(self, nbytes: int) -> memoryview:
        """`nbytes` of page-aligned memory for good. Raises `CapacityError` with nothing changed."""
        taken = round_up(nbytes, PAGE_BYTES)
        start = self.reserved_bytes
        if start // PIECE_BYTES != (start + taken - 1) // PIECE_BYTES and 0 < taken <= PIECE_BYTES:
            start = round_up(start, PIECE_BYTES)
        if start + taken > self._spans.lowest:
            raise CapacityError(
                f"the host pool has no room: {format_size(taken)} wanted, {format_size(self.free_bytes)} left "
                f"of {format_size(self.capacity_bytes)}"
            )
        self.reserved_bytes = start + taken
        return self.mapping.buffer(start, nbytes)

    def reserve_staging(self, slot_bytes: int, slots: int) -> None:
        """Set `slots` slots of `slot_bytes` (whole pages) aside for staging; once."""
        self._staging_offset = self.reserved_bytes
        self.slot_bytes = slot_bytes
        if slots:
            self.reserve(slot_bytes * slots)

    def staged(self, slot: int, nbytes: int) -> memoryview:
        """`nbytes` of memory from staging slot `slot` on."""
        return self.mapping.buffer(self._staging_offset + slot * self.slot_bytes, nbytes)
