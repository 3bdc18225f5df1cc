"""Moves bytes between tiers behind compute; counts bytes and busy seconds per link.

It executes jobs in order per link, and reports each one done or failed once. It decides nothing. The device determines
how bytes cross between it and the host: on threads (`ThreadCopier`), or on streams (`StreamCopier`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hetmem.base.weak import weakly
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import Extent, NvmeStore
from hetmem.schedule.blocks import Link, LinkUse

_POLL_SECONDS = 0.0005
"""Interval at which copies are polled while other jobs may end before them."""


@dataclass(slots=True)
class Finished:
    """The end of a job: `tag` is the one it was submitted with, `error` is None if it succeeded. `external`: the copier
    did not do it."""

    tag: Any
    error: BaseException | None = field(default=None)
    external: bool = False


_WOKEN = Finished(None)
"""No job has finished: an interrupt has come during a wait."""


class Job(NamedTuple):
    """`work` moves `nbytes` over `link`."""

    tag: Any
    link: Link
    work: Callable[[], None]
    nbytes: int


Seen = Callable[[Job, float, float], None]
"""Called with a job that was carried out, and its start and end in seconds of `time.perf_counter`."""


class ComputeClock:
    """Measures when compute gets where: marks in its stream whose times can be read once they are passed.

    Times are seconds of `now`, which is `time.perf_counter` unless time is simulated. A clock keeps neither a copier
    nor a model alive. This one is for a device whose operators end before they return: marks are times.
    """

    now = timed_mark = staticmethod(time.perf_counter)
    """Return the time, and a mark behind all compute so far; the mark is None while a CUDA graph is captured."""

    def passed(self, mark: Any) -> bool:
        """Return whether compute, or a copy, has passed `mark`; never waits."""
        return True

    def wait(self, mark: Any) -> None:
        """Wait until `mark` is passed."""

    def when(self, mark: Any) -> float:
        """Return the time at which `mark` was passed."""
        return float(mark)


HOST_CLOCK = ComputeClock()


class Copier:
    """Carries out jobs between host and device, in order per link. The methods here are for a copier with threads of
    its own, which report finished jobs.

    `ordered`: compute may continue before a copy has arrived, by being ordered behind it (`order_compute_after`), and a
    copy may overwrite a place only after a `mark` of the compute that used it. Otherwise the caller itself waits.
    """

    ordered = False
    clock: ComputeClock = HOST_CLOCK

    def start(self, job: Job, after: Sequence[Any]) -> None:
        """Begin `job` once the marks in `after` are passed. Its end is reported, also if it cannot begin."""
        raise NotImplementedError

    def now(self, job: Job) -> None:
        """Carry `job` out, behind all compute so far, and wait for it."""
        raise NotImplementedError

    def unlimited(self, link: Link) -> bool:
        """Return whether the caller can copy over `link` as fast as the copier can."""
        return False

    def mark(self) -> Any:
        """Return a mark behind all compute so far."""

    def end_of(self, tag: Any) -> Any:
        """Return the mark at the end of the copy with `tag`, for `clock`; None if it has ended, or there is none."""

    def order_compute_after(self, tag: Any) -> bool:
        """Order later compute behind the job with `tag`, unless it has ended; False if the job could not begin, which
        is reported."""
        raise AssertionError("compute on this device is not ordered behind copies")

    def poll(self) -> None:
        """Report finished jobs, if no thread of the copier does."""

    def busy(self) -> bool:
        """Return whether there is a job that only `poll` will report."""
        return False

    def wait(self) -> bool:
        """Wait for the oldest job, unless a younger one has ended, and report it; False if there is none."""
        return False

    def close(self) -> None:
        """Wait for all jobs and stop. Idempotent."""

    def abandon(self) -> None:
        """Accept no more jobs. Called by the garbage collector: takes no lock and joins no thread."""


class ThreadCopier(Copier):
    """One thread for each direction. `rates` are bytes per second per link, None = as fast as memory is."""

    def __init__(self, rates: dict[Link, int | None], seen: Seen, finished: Callable[[Finished], None]) -> None:
        self._rates, self._seen, self._finished = rates, seen, finished
        self._threads = {link: ThreadPoolExecutor(1, thread_name_prefix=f"hetmem-{link.value}") for link in rates}

    def start(self, job: Job, after: Sequence[Any]) -> None:
        # All compute has ended when a copy is requested here, so `after` needs no wait.
        finished, tag = self._finished, job.tag
        try:
            future = self._threads[job.link].submit(self._last_use, [job])
        except RuntimeError as error:  # no thread can be started
            finished(Finished(tag, error))
            return
        future.add_done_callback(lambda ended: finished(Finished(tag, ended.exception())))

    def _last_use(self, jobs: list[Job]) -> None:
        """Release the job's memory before its end is reported: the receiver may rely on owning it alone."""
        self.now(jobs.pop())

    def now(self, job: Job) -> None:
        start = time.perf_counter()
        job.work()
        rate = self._rates[job.link]
        if rate:
            time.sleep(max(0.0, job.nbytes / rate - (time.perf_counter() - start)))
        self._seen(job, start, time.perf_counter())

    def unlimited(self, link: Link) -> bool:
        return not self._rates[link]

    def close(self) -> None:
        for executor in self._threads.values():
            executor.shutdown(wait=True)

    def abandon(self) -> None:
        self._threads = {}


class TransferEngine:
    """All links of one managed module: the device's copier, and the store's own threads for NVMe.

    `copier` makes the copier between host memory and the device. `log` is called with every transfer, on any
    thread: the name of the link, the block (-1: of none), start and end in seconds, bytes. One to or from NVMe starts
    when it is submitted.

    Jobs are submitted, and finished ones `take`n, by one thread (the one that trains). A job owns its buffers from
    submission to its `Finished`.
    """

    def __init__(self, copier: Callable[[Seen, Callable[[Finished], None]], Copier], store: NvmeStore | None) -> None:
        self._store = store
        self._copied = {link: LinkUse() for link in (Link.HOST_TO_DEVICE, Link.DEVICE_TO_HOST)}
        self._by_caller: dict[Link, LinkUse] = {}
        """What the caller has copied itself, over links on which it is as fast as the copier; only it counts here."""
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._external = 0  # jobs under way that the copier does not do
        self._counting = threading.Lock()
        self._copier = copier(weakly(self._copied_over), self._finished.put)
        self.mark, self.end_of = self._copier.mark, self._copier.end_of
        self.order_compute_after = self._copier.order_compute_after
        self.ordered = self._copier.ordered
        """Whether compute is ordered behind copies instead of waiting for them; see `Copier`."""
        for link in self._copied:
            if not self.ordered and self._copier.unlimited(link):
                self._by_caller[link] = LinkUse()
        self.unlimited = self._by_caller.__contains__
        """Whether the caller can do a copy over a link as fast as the copier can."""
        self.clock = self._copier.clock
        self.none_finished: Callable[[], bool] = self._finished.empty if not self.ordered else self._none_finished
        """Whether `take` would return None. Called at each use of a weight: usually it would."""
        self.log: Callable[[tuple[Link, int, float, float, int]], object] = deque[Any](maxlen=0).append  # forgets it

    def copy(self, tag: Any, link: Link, work: Callable[[], None], nbytes: int, after: Sequence[Any] = ()) -> None:
        """Begin `work`, which moves `nbytes` over `link`, once the marks in `after` are passed."""
        self._copier.start(Job(tag, link, work, nbytes), after)

    def copy_now(self, link: Link, work: Callable[..., None], nbytes: int, tag: Any = None, *given: Any) -> None:
        """Run `work(*given)` on this thread, at the link's speed, behind all compute so far. `tag`: a command, or None
        for a gradient."""
        if link not in self._by_caller:
            self._copier.now(Job(tag, link, partial(work, *given), nbytes))
            return
        start = time.perf_counter()
        work(*given)
        end = time.perf_counter()
        use = self._by_caller[link]
        use.bytes += nbytes
        use.seconds += end - start
        self.log((link, -1 if tag is None else tag.block, start, end, nbytes))

    def within_compute(self, link: Link, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which reads `nbytes` over `link` itself: on a GPU by a kernel in the stream of compute, which
        nothing waits for, and whose seconds are those of compute."""
        if not self.ordered:
            self.copy_now(link, work, nbytes)
            return
        work()
        with self._counting:
            self._copied[link].bytes += nbytes

    def read(self, tag: Any, extent: Extent, into: memoryview) -> None:
        """Read `extent` from NVMe into host memory."""
        self._submit(tag, partial(self._nvme().read, extent, into), Link.NVME_READ, len(into))

    def write(self, tag: Any, extent: Extent, source: memoryview) -> None:
        """Write host memory to `extent` on NVMe."""
        self._submit(tag, partial(self._nvme().write, extent, source), Link.NVME_WRITE, len(source))

    def _none_finished(self) -> bool:
        self._copier.poll()
        return self._finished.empty()

    def take(self, *, wait: bool) -> Finished | None:
        """Return one finished job: None if no end was noticed yet (see `none_finished`), or with `wait` once there is
        one.

        An interrupt that was held back is raised instead of waiting, and nothing is taken.
        """
        if wait:
            HELD_BACK.raise_here()
        while True:
            while not self._finished.empty():  # only this thread takes
                finished = self._finished.get_nowait()
                if finished is not _WOKEN:
                    self._external -= finished.external
                    return finished
            if not wait:
                return None
            if not self._external and self._copier.wait():
                continue
            self._copier.poll()
            if self._finished.empty():
                awaited: Finished | None = HELD_BACK.wait(self._next, self._wake)
                if awaited is not None and awaited is not _WOKEN:  # before an interrupt, which would lose it
                    self._external -= awaited.external
                    return awaited
                HELD_BACK.raise_here()

    def _next(self) -> Finished | None:
        patience = _POLL_SECONDS if self._copier.busy() else None  # a read's end must not wait for a copy's
        with contextlib.suppress(queue.Empty):
            return self._finished.get(timeout=patience)
        return None

    def _wake(self) -> None:
        self._finished.put(_WOKEN)

    def reporter(self, tag: Any) -> Callable[[], None]:
        """Count a job that is no transfer, and return a function to call once, on any thread, when it ends: `take`
        returns it like a transfer."""
        self._external += 1
        return partial(self._finished.put, Finished(tag, external=True))

    def links(self) -> dict[Link, LinkUse]:
        """Return what every link has carried so far."""
        store, mine = self._store, self._by_caller
        return {
            **{
                link: LinkUse(use.bytes + mine[link].bytes, use.seconds + mine[link].seconds) if link in mine else use
                for link, use in self._copied.items()
            },
            Link.NVME_READ: LinkUse(store.bytes_read, store.read_seconds) if store else LinkUse(),
            Link.NVME_WRITE: LinkUse(store.bytes_written, store.write_seconds) if store else LinkUse(),
        }

    def close(self) -> None:
        """Wait for jobs in flight and stop the threads. Idempotent."""
        self._copier.close()

    def abandon(self) -> None:
        """Close, for the garbage collector: jobs in flight end by themselves."""
        self._copier.abandon()
        self._store = None

    def _copied_over(self, job: Job, start: float, end: float) -> None:
        use = self._copied[job.link]
        with self._counting:  # the thread that trains makes some copies itself
            use.bytes += job.nbytes
            use.seconds += end - start
        self.log((job.link, getattr(job.tag, "block", -1), start, end, job.nbytes))

    def _submit(self, tag: Any, begin: Callable[[], Future[Any]], link: Link, nbytes: int) -> None:
        start, finished = time.perf_counter(), self._finished
        try:
            future = begin()
        except Exception as error:  # no thread can be started, say: reported to the waiting thread
            finished.put(Finished(tag, error))
            return

        def done(ended: Future[Any]) -> None:
            error = ended.exception()
            try:
                self.log((link, getattr(tag, "block", -1), start, time.perf_counter(), nbytes))
            except Exception as failure:  # no memory, say: a job must be reported, or it is waited for for ever
                error = error or failure
            finished.put(Finished(tag, error, external=True))

        self._external += 1
        future.add_done_callback(done)

    def _nvme(self) -> NvmeStore:
        assert self._store is not None, "a transfer to NVMe without a store"
        return self._store
