"""A small thread pool, and the tiles of host updates that it runs: flat tensors as numpy arrays, one thread for torch.

It must not know what a kernel computes: a task is any callable. Tasks run in parallel only as far as they release the
GIL, as the compiled kernels do.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetmem.base.threads import Threads
from hetmem.base.units import round_down

TILE_ELEMENTS = 512 * 1024
"""Elements of one task: a few hundred microseconds, and few enough to stay in the cache between torch's passes."""

Array = np.ndarray[Any, Any]
Task = Callable[[], None]


def check_flat(first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Assert that all are flat, of one length and in host memory."""
    numel = first.numel()
    for tensor in (first, *others):
        if tensor is not None:
            assert tensor.is_cpu, f"host memory only, got {tensor.device}"
            assert tensor.stride() == (1,), f"flat memory only, got {tuple(tensor.shape)}, strides {tensor.stride()}"
            assert tensor.numel() == numel, f"{tensor.numel()} elements beside {numel} parameters"


def tiles_of(numel: int) -> list[slice]:
    """Split `numel` elements into slices of TILE_ELEMENTS."""
    return [slice(start, min(start + TILE_ELEMENTS, numel)) for start in range(0, numel, TILE_ELEMENTS)]


def runs_of(numel: int) -> list[slice]:
    """Split `numel` elements into about 16 slices, of TILE_ELEMENTS at least and 8 times that at most, for loops of one
    pass, which need no cache. Each is one task, which acquires the GIL once."""
    size = min(max(TILE_ELEMENTS, round_down(numel // 16, TILE_ELEMENTS)), 8 * TILE_ELEMENTS)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def cut(whole: Sequence[Any], part: slice, pers: Sequence[int]) -> list[Any]:
    """Return the elements in `part` of each tensor or array, whose items stand for `per` elements; None stays None."""
    return [
        None if memory is None else memory[part.start // per : -(-part.stop // per)]
        for memory, per in zip(whole, pers, strict=True)
    ]


def as_array(tensor: torch.Tensor) -> Array:
    """Return the memory of `tensor` as the loops see it: bfloat16 as uint16, float16 as int16."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    dtype = tensor.dtype
    if dtype is torch.float32:
        return tensor.numpy()
    if dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.int16).numpy() if dtype is torch.float16 else tensor.numpy()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch's operators use no thread but this one.

    `torch.set_num_threads` is for the whole process: threads that start later (autograd's, say) inherit the number.
    OpenMP's own setting belongs to the calling thread, and torch reads it whenever it splits work.
    """
    threads = torch.get_num_threads()  # also lets torch set up this thread, which would undo the next line later
    _set_openmp_threads()(1)
    try:
        yield
    finally:
        _set_openmp_threads()(threads)


@cache
def _set_openmp_threads() -> Callable[[int], object]:
    """Return `omp_set_num_threads` of torch's OpenMP, or a function without effect if torch was built without one."""
    try:
        setter = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError):
        return lambda threads: None
    setter.argtypes, setter.restype = [ctypes.c_int], None
    found: Callable[[int], object] = setter
    return found


def usable_cores(cores: Collection[int] = ()) -> int:
    """Return how many physical cores this process may use, of `cores` if given; at least 1."""
    import psutil  # imported late: it takes a quarter of the time allowed for `import hetmem`

    allowed = len(_allowed(cores))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def most_threads() -> int:
    """Return how many threads of this process can run at a time."""
    return len(os.sched_getaffinity(0))


def _allowed(cores: Collection[int]) -> set[int]:
    """Return the CPUs that this process may run on, of `cores` if it may use any."""
    all_allowed = os.sched_getaffinity(0)
    return all_allowed.intersection(cores) or all_allowed


_MANY = 8
_CPUS = Path("/sys/devices/system/cpu")


def left_to_training(allowed: set[int], folder: Path = _CPUS) -> set[int]:
    """Return the CPUs among `allowed` that updates leave to the thread that trains: a physical core, as a thread whose
    sibling streams memory launches operators at half its speed. Virtual machines often hide which CPUs are siblings: of
    many CPUs two are left then. The last CPUs, as the first ones serve interrupts; none if there is only one."""
    if len(allowed) < 2:
        return set()
    last = max(allowed)
    siblings = {last}
    with suppress(OSError, ValueError):
        listed = (folder / f"cpu{last}/topology/thread_siblings_list").read_text().strip()
        spans = (part.partition("-") for part in listed.split(","))
        siblings = {cpu for first, _, end in spans for cpu in range(int(first), int(end or first) + 1)} & allowed
    if len(siblings) == 1 and len(allowed) >= _MANY:
        return {last, max(allowed - {last})}
    return siblings if len(siblings) < len(allowed) else {last}


class Batch:
    """Tasks under way, handed out one by one to the threads that drain it."""

    def __init__(self, tasks: Sequence[Task], after: Callable[[], None] | None = None) -> None:
        self._tasks = tasks
        self._after = after
        self.tasks = self._unfinished = len(tasks)
        self._begun = 0
        self._lock = threading.Lock()
        self._unended: threading.Lock | None = None
        """Held until the batch is done; made for who joins it."""
        self.done = False
        """Whether every task has ended, with an error or without."""
        self.error: BaseException | None = None
        """The first error so far."""
        self.ended = 0.0  # in seconds of `time.perf_counter`
        if not tasks:
            self._end()

    def join(self) -> None:
        """Run tasks that are not started yet, wait until every one has ended, and raise the first error.

        Any thread may join, any number of times; not a task of the same batch, which would wait for itself.
        """
        self.drain()
        with self._lock:
            if not self.done and self._unended is None:
                self._unended = threading.Lock()
                self._unended.acquire()
        if self._unended is not None:
            with self._unended:
                pass
        if self.error is not None:
            raise self.error

    @property
    def all_begun(self) -> bool:
        """Whether every task has been started."""
        return self._begun >= self.tasks

    def drain(self) -> None:
        """Run tasks until none is left to start; other threads may still be running some."""
        while self.run_one():
            pass

    def run_one(self) -> bool:
        """Run a task that is not started yet; False if there is none."""
        with self._lock:
            at = self._begun
            self._begun += 1
        if at >= self.tasks:
            return False
        error: BaseException | None = None
        try:
            self._tasks[at]()
        except BaseException as caught:  # `join` raises it, whatever it is
            error = caught
        with self._lock:
            self.error = self.error or error
            self._unfinished -= 1
            last = self._unfinished == 0
        if last:
            self._end()
        return True

    def _end(self) -> None:
        after, self._after, self._tasks = self._after, None, ()  # their memory must be free when the batch has ended
        self.ended = time.perf_counter()
        with self._lock:
            self.done = True  # before `after` wakes a thread that checks it
        if self._unended is not None:
            self._unended.release()
        if after is not None:
            try:
                after()
            except BaseException as error:  # a worker must not end
                self.error = self.error or error


def _drain(batch: Batch, more: int, submit: Callable[[Task], None]) -> None:
    """Run tasks of `batch`, after waking the next of `more` workers: so the thread that begins a batch, and launches
    kernels, wakes only one."""
    if more and not batch.all_begun:
        submit(partial(_drain, batch, more - 1, submit))
    batch.drain()


def _bind_this_thread(cores: Collection[int]) -> None:
    """Bind this thread to `cores`, as far as the process may use them, and of many only to those that are not
    `left_to_training`. If that fails the thread is only slower."""
    with suppress(OSError, ValueError):
        if cores:
            allowed = _allowed(cores)
            os.sched_setaffinity(0, allowed - left_to_training(allowed) if len(allowed) >= _MANY else allowed)


class WorkerPool:
    """Runs the tasks of a batch on `threads` threads, the calling one included.

    `threads=None` takes one for each CPU but those that are `left_to_training`, and the calling one; if several
    `processes` share the CPUs, each takes its part. Workers bind to `cores` (numbers of CPUs, such as those near the
    memory) if possible. They start with the first batch that can use them; the interpreter's exit waits for batches
    under way. A thread that runs or joins a batch works on it too, and needs no worker to finish it; so `run` may be
    called from several threads, from a task, after `close`, or in a forked child.
    """

    def __init__(self, threads: int | None = None, cores: Collection[int] | None = None, processes: int = 1) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"a worker pool needs at least 1 thread, got {threads}")
        self._cores = frozenset(cores or ())
        if threads is None:
            allowed = _allowed(self._cores)
            threads = max(1, (len(allowed - left_to_training(allowed)) + (len(allowed) > 1)) // processes)
        self.threads, self._helpers = threads, max(1, threads - 1)
        self._lock = threading.Lock()
        self._workers = self._new_workers()

    def _new_workers(self) -> Threads:
        return Threads(self._helpers, "hetmem-worker", begin=partial(_bind_this_thread, self._cores))

    def run(self, tasks: Sequence[Task]) -> None:
        """Run every task once and return when all have ended; tasks start in order, on any thread.

        If tasks raise, the others run all the same and then the first error is raised. The pool stays usable.
        """
        batch = Batch(tasks)
        self._share(batch, min(self.threads, len(tasks)) - 1)
        batch.join()

    def begin(self, tasks: Sequence[Task], after: Callable[[], None] | None = None) -> Batch:
        """Begin to run `tasks` and return at once. Batches start in the order in which they were begun.

        The calling thread does not work on it, so all but one of `threads` do, and at least one. `after` is called once
        when the batch is done, on the thread that ended it (the caller's if there are no tasks); it must be short and
        must not raise: its error becomes the batch's if no task failed, for later joins.
        """
        batch = Batch(tasks, after)
        helpers = self._helpers
        if not self._share(batch, helpers if helpers < batch.tasks else batch.tasks):  # no thread could be started
            batch.drain()
        return batch

    def close(self) -> None:
        """Finish all batches and join the workers. Call it when no `run` is under way; a later one starts new workers.
        If an interrupt ends the wait, the workers end by themselves."""
        with self._lock:
            workers, self._workers = self._workers, self._new_workers()  # before an interrupt may come
            workers.stop()
            workers.join()

    def _share(self, batch: Batch, helpers: int) -> bool:
        """Have so many `helpers` work on `batch`; return False if there is none, at the limit of threads."""
        if helpers <= 0:
            return False
        if not self._workers:
            with self._lock, suppress(RuntimeError):
                self._workers.start()
            if not self._workers:
                return False
        self._workers.submit(partial(_drain, batch, helpers - 1, self._workers.submit))
        return True
