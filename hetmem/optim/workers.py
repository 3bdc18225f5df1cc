"""A small thread pool that runs the tiles of one host update.

It must not know tensors, kernels or optimizers: a task is any callable. Tasks run in parallel only as far as they
release the GIL, as the compiled kernels do.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

Task = Callable[[], None]


def usable_cores() -> int:
    """Physical cores of this machine, at most the ones that this process may run on; at least 1."""
    import psutil  # here: it costs a quarter of what `import hetmem` may take

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


class _Batch:
    """The tasks of one `run`, handed out one by one to whichever threads drain it."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks: Iterator[Task] = iter(tasks)
        self._unfinished = len(tasks)
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._first_error: BaseException | None = None

    def drain(self) -> None:
        """Run tasks until none is left to start; others may still be running elsewhere."""
        while True:
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                return
            error: BaseException | None = None
            try:
                task()
            except BaseException as caught:  # the caller of `run` gets it, whatever it is
                error = caught
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._first_error = self._first_error or error
            self._unfinished -= 1
            last = self._unfinished == 0
        if last:
            self._finished.set()

    def join(self) -> None:
        """Wait until every task has run; raise the first error."""
        self._finished.wait()
        if self._first_error is not None:
            raise self._first_error


def _serve(batches: SimpleQueue[_Batch | None]) -> None:
    """Life of a worker thread. It holds the queue, not the pool, so a forgotten pool can be collected."""
    while (batch := batches.get()) is not None:
        batch.drain()
        del batch  # an idle worker must not keep a chunk's memory alive


def _stop(batches: SimpleQueue[_Batch | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        batches.put(None)


class WorkerPool:
    """Runs the tasks of a batch on `threads` threads, the calling one included.

    `threads=None` takes `usable_cores()`. Workers start with the first batch that can use them and are daemons, so
    they never hold up the interpreter's exit. The caller works too and needs no worker to finish, therefore `run`
    may be called from several threads, from a task, after `close`, or in a forked child.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"a worker pool needs at least 1 thread, got {threads}")
        self.threads = usable_cores() if threads is None else threads
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _stop, self._batches, self._workers).atexit = False

    def run(self, tasks: Sequence[Task]) -> None:
        """Run every task once and return when all have ended; tasks start in order, on any thread.

        If tasks raise, the others run all the same and then the first error is raised. The pool stays usable.
        """
        helpers = min(self.threads, len(tasks)) - 1
        if helpers > 0 and not self._workers:
            self._start()
        batch = _Batch(tasks)
        for _ in range(helpers):
            self._batches.put(batch)
        if tasks:
            batch.drain()
            batch.join()

    def close(self) -> None:
        """Join the workers. Call it when no `run` is under way; a later `run` starts new ones."""
        with self._lock:
            workers = self._workers.copy()
            _stop(self._batches, workers)
            for worker in workers:
                worker.join()
            self._workers.clear()

    def _start(self) -> None:
        with self._lock:
            if self._workers:
                return
            for index in range(1, self.threads):
                name = f"hetmem-worker-{index}"
                worker = threading.Thread(target=_serve, args=(self._batches,), name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
