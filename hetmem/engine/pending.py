"""What is under way on other threads, whoever began it, and waiting for some of it.

It knows who works behind training and how many jobs are not over; what they do with chunks it does not know.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from hetmem.base.weak import WeakOnes, weakly
from hetmem.engine.executor import Executor
from hetmem.memory.chunk import Chunk
from hetmem.memory.transfer import TransferEngine
from hetmem.schedule.blocks import Link
from hetmem.schedule.residency import Residency


class Worker(Protocol):
    """Does something with chunks behind everything else, on other threads."""

    def pump(self) -> None:
        """Go on as far as that needs no waiting."""

    def hasten(self, chunk: Chunk) -> None:
        """Somebody waits for `chunk`: if it is to be worked on, that comes first."""

    def give_way(self) -> bool:
        """Let go of memory that is held but not worked with yet; False if there is none."""
        ...

    def close(self) -> None:
        """Carry everything out and end all threads."""


class Pending:
    """Commands that `residency` gave and `executor` has begun, and jobs, which are no commands."""

    def __init__(self, residency: Residency, engine: TransferEngine, executor: Executor) -> None:
        self._residency, self._engine, self._executor = residency, engine, executor
        self._jobs = 0
        self.workers: WeakOnes[Worker] = WeakOnes()
        self._at_work: Callable[[], set[object] | None] = lambda: None

    # ---- workers -----------------------------------------------------------------------------------------------

    def keep_in(self, at_work: set[object]) -> None:
        """Let `keep` count as long as `at_work` is held, where the model is: what a worker does holds the runtime,
        which must not hold it."""
        self._at_work = weakref.ref(at_work)

    def keep(self, owner: object) -> None:
        """Keep `owner`, whose worker has begun something, alive until `forget`, or until the model is dropped."""
        if (at_work := self._at_work()) is not None:
            at_work.add(owner)

    def forget(self, owner: object) -> None:
        """End `keep`: its worker has done everything."""
        if (at_work := self._at_work()) is not None:
            at_work.discard(owner)

    def hasten(self, chunk: Chunk) -> None:
        """Somebody waits for `chunk`: whoever is to work on it does that first."""
        for worker in self.workers:
            worker.hasten(chunk)

    def make_way(self, worker: Worker | None = None) -> bool:
        """Have some worker, other than `worker`, give memory up; False if none does."""
        return any(other.give_way() for other in self.workers if other is not worker)

    def end_workers(self) -> None:
        """Nothing is done behind training any more."""
        for worker in list(self.workers):
            worker.close()

    # ---- jobs --------------------------------------------------------------------------------------------------

    def expect(self, done: Callable[[BaseException | None], None]) -> int:
        """Something begins that is no command, and that waiting for memory may have to wait for. Returns what to tag it
        with: the thread that trains calls `done`, with its error, when it is over."""
        self._jobs += 1
        return self._executor.expect(partial(weakly(self._over), done))

    def expect_job(self, done: Callable[[], None]) -> Callable[[], None]:
        """The same for what tells of its errors by itself. Returns what any thread calls at its end."""
        return self._engine.reporter(self.expect(lambda _: done()))

    def copy_beside(
        self,
        link: Link,
        work: Callable[[], None],
        nbytes: int,
        done: Callable[[BaseException | None], None],
        after: Sequence[Any] = (),
    ) -> None:
        """Begin `work`, which moves `nbytes` that are no block's over `link`, once the marks in `after` are passed. The
        thread that trains calls `done` when it is over, with its error."""
        self._engine.copy(self.expect(done), link, work, nbytes, after)

    def _over(self, done: Callable[[BaseException | None], None], error: BaseException | None) -> None:
        self._jobs -= 1
        done(error)

    # ---- waiting -----------------------------------------------------------------------------------------------

    def wait_for_one(self) -> None:
        """Wait until one transfer, or job, has ended: see `Executor.wait_for_one`."""
        self._executor.wait_for_one()

    def busy(self) -> bool:
        """Whether anything is under way that `Executor.wait_for_one` can wait for."""
        return bool(self._residency.in_flight() or self._jobs)

    def pump(self) -> None:
        """Have all who work go on."""
        for worker in self.workers:
            worker.pump()

    def poll(self) -> None:
        """Take note of what has finished meanwhile."""
        if self._engine.anything_over() and self._executor.poll():
            self.pump()

    def go_on(self) -> bool:
        """Wait for something that is under way, or have somebody give memory up; False if there is neither."""
        self.pump()
        if self.busy():
            self._executor.wait_for_one()
            return True
        return self.make_way()

    def drain(self) -> None:
        """Wait until no command is in flight; an error of a transfer is raised here."""
        while self._residency.in_flight():
            self._executor.wait_for_one()

    def quiesce(self) -> None:
        """Wait until nothing is under way, whatever fails; then the first error is raised. A disk that hangs is waited
        for once."""
        first: BaseException | None = None
        while self.busy() and not (isinstance(first, OSError) and first.errno == errno.ETIMEDOUT):
            try:
                self._executor.wait_for_one()
            except Exception as error:  # noqa: PERF203 - each wait may fail
                first = first or error
        try:
            if first is not None:
                raise first
        finally:
            del first  # as in `Executor.execute`
