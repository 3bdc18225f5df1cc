"""Daemon threads that are over before the interpreter is: told to end, and waited for, in an `atexit` handler.

Python ends a daemon thread that comes back from native code into an interpreter which is ending. In the middle of C++
(torch's, say) that ends the process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

_running: weakref.WeakKeyDictionary[threading.Thread, tuple[Callable[[], object], float | None]]
_running = weakref.WeakKeyDictionary()
_over = False


def process_ends() -> bool:
    """Whether the main thread is over. It takes no lock, so finalizers may ask."""
    return not threading.main_thread().is_alive()


Work = Callable[[], object]


class Threads:
    """Up to `count` threads that run what they are given, first come first served.

    Not a `ThreadPoolExecutor`: the interpreter joins its threads when it ends, for as long as a disk hangs. These end
    when this object is gone and nothing is queued, and soon after the interpreter's end, which waits `patience` seconds
    for each, None = for as long as it takes. Each calls `begin` first.
    """

    def __init__(self, count: int, name: str, patience: float | None = None, begin: Work = lambda: None) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._count, self._name, self._patience, self._begin = count, name, patience, begin
        self._threads: list[threading.Thread] = []
        self.stop = weakref.finalize(self, _put_ends, self._queue, count)
        """Lets them end once nothing is queued. No work may follow."""
        self.stop.atexit = False

    def __bool__(self) -> bool:
        """Whether any was started."""
        return bool(self._threads)

    def start(self) -> None:
        """Call before work: who has none needs no threads. Callers exclude each other. Raises RuntimeError if no thread
        can be started, as at the interpreter's end."""
        while len(self._threads) < self._count:
            if _over:
                raise RuntimeError("no thread is started at the end of the interpreter")
            name = f"{self._name}-{len(self._threads) + 1}"
            thread = threading.Thread(target=_serve, args=(self._queue, self._begin), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
            _running[thread] = partial(_end_one, self._queue, self._threads), self._patience

    def submit(self, work: Work) -> None:
        """Run `work`, which must not raise, on one of the threads."""
        self._queue.put(work)

    def join(self) -> None:
        """Wait, after `stop`, until all have ended."""
        for thread in self._threads:
            thread.join()


def _serve(queue: SimpleQueue[Work | None], begin: Work) -> None:
    """Life of a thread. It holds the queue alone, so that what is forgotten can be collected."""
    begin()
    while (run := queue.get()) is not None:
        run()
        del run  # it holds memory, and the next one may be long in coming


def _put_ends(queue: SimpleQueue[Work | None], count: int) -> None:
    for _ in range(count):
        queue.put(None)


def _end_one(queue: SimpleQueue[Work | None], threads: list[threading.Thread]) -> None:
    """End one of `threads` as the interpreter ends; none may be counted on from now on."""
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
