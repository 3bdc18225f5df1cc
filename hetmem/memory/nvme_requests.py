"""Reads and writes of files by threads of each disk, and the settings that a disk is asked with.

Requests go over one link for each direction, with its traffic and its time.

Knows files, memory and futures. Must not know extents, capacities or who asked.

How to ask a disk: request size and threads, as `hetmem probe` measured them for it, else defaults that were good.

Knows samples, directories and one small file in the cache. Must not know stores. A cache file that is missing, old,
broken or of another machine is as good as none: nothing here fails because of one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hetmem.base.hardware import DiskSample
from hetmem.base.threads import start_thread
from hetmem.base.units import MIB, format_size, round_up
from hetmem.base.whole_files import keep, kept
from hetmem.errors import StoreError
from hetmem.memory.nvme_file import BLOCK_BYTES, Move, StoreFile

_EXIT_SECONDS = 5.0  # a disk that hangs must not keep a process alive that has failed
_LEAST_REQUEST_BYTES = 2 * MIB  # smaller ones cost more of a core than a second thread wins


class DiskLink:
    """One direction: the bytes moved, and the time it was busy.

    Each file has threads of its own, so that no disk waits for another. A transfer is shared out to all of them, also
    where it is smaller than their requests may be: a single one that training waits for has the whole disk.
    """

    def __init__(self, verb: str, move: Move, requests: list[Requests]) -> None:
        self.verb = verb
        self.move = move
        self.moved_bytes = 0
        self._requests = requests
        self._threads = [Threads(each.threads, f"hetmem-nvme-{verb}") for each in requests]
        self._lock = threading.Lock()
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    def start(self, file: StoreFile, index: int, memory: memoryview, position: int) -> Future[int]:
        """Move `memory` from or to `position` of `file`, the store's number `index`."""
        requests = self._requests[index]
        share = round_up(-(-memory.nbytes // requests.threads), BLOCK_BYTES)
        nbytes = min(requests.nbytes, max(share, _LEAST_REQUEST_BYTES))
        self._threads[index].start()
        with self._lock:
            if not self._in_flight:
                self._busy_since = time.perf_counter()
            self._in_flight += 1
        return _Transfer(self, file, memory, position).start(self._threads[index], nbytes)

    def end(self, moved_bytes: int) -> None:
        """A transfer has ended."""
        with self._lock:
            self.moved_bytes += moved_bytes
            self._in_flight -= 1
            if not self._in_flight:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def busy_seconds(self) -> float:
        """Seconds during which at least one transfer was queued or running."""
        with self._lock:
            return self._busy_seconds + (time.perf_counter() - self._busy_since if self._in_flight else 0.0)

    def join(self) -> None:
        """Let the threads end once nothing is queued, and wait for them."""
        for threads in self._threads:
            threads.stop()
        for threads in self._threads:
            threads.join()


class Threads:
    """A few threads that run what they are given, first come first served.

    Not a `ThreadPoolExecutor`: the interpreter joins its threads when it ends, for as long as a disk hangs. These end
    when this object is gone and nothing is queued.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self.stop = weakref.finalize(self, _put_ends, self._queue, count)
        self.stop.atexit = False

    def start(self) -> None:
        """Once, before the first work: a store that is never read needs none. Callers exclude each other."""
        while len(self._threads) < self._count:
            name = f"{self._name}_{len(self._threads)}"
            stop = partial(self._queue.put, None)
            self._threads.append(start_thread(_serve, (self._queue,), name, stop, _EXIT_SECONDS))

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, on one of the threads."""
        self._queue.put(work)

    def join(self) -> None:
        """Wait, after `stop`, until all have ended."""
        for thread in self._threads:
            thread.join()


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := work.get()) is not None:
        run()
        del run  # it holds memory and a file, and the next one may be long in coming


def _put_ends(work: queue.SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        work.put(None)


class _Transfer:
    """One read or write, cut into requests; the last request to end settles the future."""

    def __init__(self, link: DiskLink, file: StoreFile, memory: memoryview, position: int) -> None:
        self._link = link
        self._file = file
        self._memory = memory
        self._position = position
        self._lock = threading.Lock()
        self._pending = 0
        self._moved_bytes = 0
        self._error: BaseException | None = None
        self._future: Future[int] = Future()

    def start(self, threads: Threads, request_bytes: int) -> Future[int]:
        future, memory = self._future, self._memory
        future.set_running_or_notify_cancel()  # a cancelled future would hide that the memory is in use
        starts = range(0, memory.nbytes, request_bytes)
        self._pending = len(starts)
        for start in starts:
            part = memory[start : start + request_bytes]
            threads.submit(partial(self._run, part, self._position + start))
        return future

    def _run(self, memory: memoryview, position: int) -> None:
        """Move a part, on one of the threads."""
        moved_bytes, link = 0, self._link
        if self._error is None:
            try:
                self._file.transfer(link.verb, link.move, memory, position)
                moved_bytes = memory.nbytes
            except BaseException as error:  # whatever it is, the waiting thread must learn of it
                self._error = error
        with self._lock:
            self._moved_bytes += moved_bytes
            self._pending -= 1
            last = not self._pending
        if last:
            self._settle()

    def _settle(self) -> None:
        # Only now, also after an error: until the last request ends, the disk may still write into the memory.
        future, error = self._future, self._error
        if isinstance(error, StoreError) and self._link.verb == "write":
            error = self._whole_or_not(error)
        self._link.end(self._moved_bytes)
        del self._future, self._error  # the error's frames hold this transfer: a cycle that would keep memory alive
        if error is None:
            future.set_result(self._moved_bytes)
        else:
            future.set_exception(error)

    def _whole_or_not(self, error: StoreError) -> StoreError:
        kept = self._file.keep_in_cache(self._link.move, self._memory, self._position)
        what = "Until it is written again " + ("only the page cache has all of it" if kept else "a part of it is old")
        told = StoreError(error.errno, f"{error.strerror}. {what}")
        told.__cause__ = error.__cause__
        return told


_FILE = "disks.json"
_GOOD_ENOUGH = 0.95  # of the best rate: then larger requests, which cost less of the cores, and more of them: when the
# cores are busy a thread comes late to ask for the next one, and the disk shall have something to do meanwhile
_MOST_BYTES, _MOST_THREADS = 64 * MIB, 32


@dataclass(frozen=True, slots=True)
class Requests:
    """At most `threads` requests at once, of at most `nbytes` each."""

    nbytes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.threads} x {format_size(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How to ask one disk in either direction, and where that is known from: "measured", "default" or "given"."""

    read: Requests
    write: Requests
    source: str

    def __str__(self) -> str:
        return f"reads {self.read}, writes {self.write} ({self.source})"


DEFAULT = DiskSettings(Requests(16 * MIB, 4), Requests(16 * MIB, 4), "default")
"""Measured: benchmarks/results/nvme.md."""


def settings_for(directory: str) -> DiskSettings:
    """What was measured for the disk of `directory`, or the default."""
    try:
        disk = kept(_FILE)[_disk_of(directory)]
        return DiskSettings(_requests(disk["read"]), _requests(disk["write"]), "measured")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return DEFAULT


def remember(directory: str, samples: Sequence[DiskSample]) -> tuple[DiskSettings, Path | None]:
    """Keep the best of `samples` for the disk of `directory`: the settings, and the file they are in (None: none)."""
    found = DiskSettings(
        _best(samples, lambda sample: sample.read_bytes_per_second),
        _best(samples, lambda sample: sample.write_bytes_per_second),
        "measured",
    )
    try:
        settings = {"read": asdict(found.read), "write": asdict(found.write)}
        return found, keep(_FILE, _disk_of(directory), settings)
    except (OSError, RuntimeError):  # a read-only home: the measurement is still worth showing
        return found, None


def _best(samples: Sequence[DiskSample], rate: Callable[[DiskSample], float]) -> Requests:
    enough = _GOOD_ENOUGH * max(map(rate, samples))
    best = max((s for s in samples if rate(s) >= enough), key=lambda s: (s.block_bytes, s.depth))
    return Requests(best.block_bytes, best.depth)


def _disk_of(directory: str) -> str:
    """The disk and the filesystem: numbers of devices are given anew at every start, names of disks nearly so."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    name = Path(f"/sys/dev/block/{number}").resolve().name  # the number itself where there is no block device
    return f"{name} {number} {os.statvfs(directory).f_fsid:x}"


def _requests(data: Any) -> Requests:
    nbytes, threads = data["nbytes"], data["threads"]
    for value, most in ((nbytes, _MOST_BYTES), (threads, _MOST_THREADS)):
        if type(value) is not int or not 0 < value <= most:
            raise ValueError("not what was kept")
    if nbytes % 4096:
        raise ValueError("not whole blocks")
    return Requests(nbytes, threads)
