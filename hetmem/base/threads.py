"""Daemon threads that end before the interpreter does: an `atexit` handler stops and joins them.

Python kills a daemon thread that returns from native code while the interpreter finalizes. Within C++ code (of torch,
for instance) that aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

_running: dict[threading.Thread, tuple[Callable[[], object], float | None]] = {}
"""How each thread is ended that has not ended yet, and the patience with it."""
_over = False


def process_ends() -> bool:
    """Return whether the main thread has ended. Takes no lock, so finalizers may call it."""
    return not threading.main_thread().is_alive()


Work = Callable[[], object]


class Threads:
    """A pool of up to `count` threads that run submitted work in order.

    Not a `ThreadPoolExecutor`, whose threads the interpreter joins at its end, for as long as a disk hangs. These end
    when this object is collected and the queue is empty, or at the interpreter's end, which waits `patience` seconds
    for each (None: without a limit). Each thread calls `begin` first.
    """

    def __init__(self, count: int, name: str, patience: float | None = None, begin: Work = lambda: None) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._count, self._name, self._patience, self._begin = count, name, patience, begin
        self._threads: list[threading.Thread] = []
        self.submit: Callable[[Work], None] = self._queue.put
        """Runs work, which must not raise, on one of the threads."""
        self.stop = weakref.finalize(self, _put_ends, self._queue, count)
        """Ends the threads once the queue is empty. No work may be submitted after it."""
        self.stop.atexit = False

    def __bool__(self) -> bool:
        """Return whether any thread was started."""
        return bool(self._threads)

    def start(self) -> None:
        """Start the threads, before the first work is submitted. Not thread-safe. Raises RuntimeError if none can be
        started, as at the interpreter's end."""
        while len(self._threads) < self._count:
            if _over:
                raise RuntimeError("no thread is started at the end of the interpreter")
            name = f"{self._name}-{len(self._threads) + 1}"
            thread = threading.Thread(target=_serve, args=(self._queue, self._begin), name=name, daemon=True)
            _running[thread] = partial(_end_one, self._queue, self._threads), self._patience
            try:
                thread.start()
            except BaseException:
                _running.pop(thread, None)
                raise
            self._threads.append(thread)

    def join(self) -> None:
        """Wait, after `stop`, until all have ended."""
        for thread in self._threads:
            thread.join()


def _serve(queue: SimpleQueue[Work | None], begin: Work) -> None:
    """Run the work of `queue` until None comes. Refers to the queue alone, so that its `Threads` can be collected."""
    try:
        begin()
        while (run := queue.get()) is not None:
            run()
            del run  # free its memory before the wait for the next one
    finally:
        _running.pop(threading.current_thread(), None)


def _put_ends(queue: SimpleQueue[Work | None], count: int) -> None:
    for _ in range(count):
        queue.put(None)


def _end_one(queue: SimpleQueue[Work | None], threads: list[threading.Thread]) -> None:
    """End one of `threads` at the interpreter's end, and forget all of them."""
    threads.clear()
    queue.put(None)


@atexit.register
def _end_all() -> None:
    global _over
    _over = True
    running = list(_running.items())
    for _, (stop, _) in running:
        stop()
    for thread, (_, patience) in running:
        thread.join(patience)
