"""Moving bytes between tiers behind compute, on threads; counts bytes and busy seconds per link.

It carries out what it is told, in order per link, and reports each job done or failed once. It decides nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hetmem.memory.device import SimDevice
from hetmem.memory.nvme import Extent, NvmeStore


class Link(Enum):
    """A direction between two tiers."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"


@dataclass(slots=True)
class LinkUse:
    """Bytes that crossed a link and the seconds it was busy."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Finished:
    """The end of a job: `tag` is what it was submitted with, `error` None if it was carried out."""

    tag: Any
    error: BaseException | None = field(default=None)


class TransferEngine:
    """One thread for each direction between host and device, and the store's own threads for NVMe.

    `observe` is told of every transfer, on any thread: link, tag, start and end in seconds, bytes. One to or from NVMe
    starts when it is submitted.

    Jobs are submitted and `take`n by one thread (the one that trains). A job's buffers belong to it from submission
    to its `Finished`.
    """

    def __init__(self, device: SimDevice, store: NvmeStore | None) -> None:
        self._store = store
        self._rate = {Link.HOST_TO_DEVICE: device.host_to_device, Link.DEVICE_TO_HOST: device.device_to_host}
        self._copied = {link: LinkUse() for link in self._rate}
        self._threads = {link: ThreadPoolExecutor(1, thread_name_prefix=f"hetmem-{link.value}") for link in self._rate}
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self.observe: Callable[[Link, Any, float, float, int], None] | None = None

    def copy(self, tag: Any, link: Link, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which moves `nbytes` over `link`, on the link's thread."""
        self._submit(tag, self._threads[link].submit(self.copy_now, link, work, nbytes, tag))

    def unlimited(self, link: Link) -> bool:
        """Whether `link` has no set speed, so that a copy costs the same on any thread."""
        return not self._rate[link]

    def copy_now(self, link: Link, work: Callable[[], None], nbytes: int, tag: Any = None) -> None:
        """Run `work` here and now, at the link's speed."""
        start = time.perf_counter()
        work()
        rate = self._rate[link]
        if rate:
            time.sleep(max(0.0, nbytes / rate - (time.perf_counter() - start)))
        use, end = self._copied[link], time.perf_counter()
        with self._counting:  # the thread that trains copies small things itself
            use.bytes += nbytes
            use.seconds += end - start
        self._seen(link, tag, start, nbytes)

    def read(self, tag: Any, extent: Extent, into: memoryview) -> None:
        """Read `extent` from NVMe into host memory."""
        self._submit(tag, self._nvme().read(extent, into), Link.NVME_READ, len(into))

    def write(self, tag: Any, extent: Extent, source: memoryview) -> None:
        """Write host memory to `extent` on NVMe."""
        self._submit(tag, self._nvme().write(extent, source), Link.NVME_WRITE, len(source))

    def take(self, *, wait: bool) -> Finished | None:
        """One finished job; None if there is none yet, or with `wait` as soon as there is one."""
        try:
            return self._finished.get(block=wait)
        except queue.Empty:
            return None

    def links(self) -> dict[Link, LinkUse]:
        """What every link has carried so far."""
        store = self._store
        return {
            **self._copied,
            Link.NVME_READ: LinkUse(store.bytes_read, store.read_seconds) if store else LinkUse(),
            Link.NVME_WRITE: LinkUse(store.bytes_written, store.write_seconds) if store else LinkUse(),
        }

    def close(self) -> None:
        """Wait for what is in flight and stop the threads. Idempotent."""
        for executor in self._threads.values():
            executor.shutdown(wait=True)

    def _submit(self, tag: Any, future: Future[Any], link: Link | None = None, nbytes: int = 0) -> None:
        start = time.perf_counter()

        def done(ended: Future[Any]) -> None:
            if link is not None:
                self._seen(link, tag, start, nbytes)
            self._finished.put(Finished(tag, ended.exception()))

        future.add_done_callback(done)

    def _seen(self, link: Link, tag: Any, start: float, nbytes: int) -> None:
        if self.observe is not None:
            self.observe(link, tag, start, time.perf_counter(), nbytes)

    def _nvme(self) -> NvmeStore:
        assert self._store is not None, "a transfer to NVMe without a store"
        return self._store
