"""The worker pool keeps its promises."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from tests.cpu.tested import WorkerPool, workers
from tests.engine.harness import comes_to_be, hetmem_threads
from tests.forked import end_in_a_fork

_OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_earlier_tests() -> None:
    """Optimizers that earlier tests dropped end their threads when they are collected, which may be later."""
    _OTHERS.clear()
    _OTHERS.update(hetmem_threads())


def workers_alive() -> list[str]:
    """Of the test that runs."""
    return [thread.name for thread in hetmem_threads() - _OTHERS if thread.name.startswith("hetmem-worker")]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_task_runs_once(threads: int) -> None:
    pool, ran = WorkerPool(threads), [0] * 100

    def task(index: int) -> None:
        ran[index] += 1

    for _ in range(20):
        pool.run([partial(task, index) for index in range(100)])
    pool.close()
    assert ran == [20] * 100


def test_whoever_joins_finds_what_tasks_held_free() -> None:
    class Slow:
        """A lock that the worker is slow to go on from."""

        def __init__(self, lock: threading.Lock) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *error: object) -> None:
            self._lock.release()
            if threading.current_thread().name.startswith("hetmem-worker"):
                time.sleep(0.05)

    class Held:
        """Memory of a chunk, say."""

    pool, meeting = WorkerPool(2), threading.Barrier(2)
    held = [Held(), Held()]
    known = [weakref.ref(one) for one in held]
    batch = workers.Batch([partial(lambda _: meeting.wait(30) and None, one) for one in held])
    vars(batch)["_lock"] = Slow(batch._lock)
    held.clear()
    pool._share(batch, 1)
    batch.join()
    assert [reference() for reference in known] == [None, None]
    pool.close()


def test_tasks_run_on_as_many_threads_as_asked() -> None:
    pool, meeting = WorkerPool(3), threading.Barrier(3)
    pool.run([lambda: meeting.wait(30) and None] * 3)  # a third thread missing breaks the barrier
    pool.close()


def test_threads_start_with_the_first_batch_that_needs_them_and_end_with_close() -> None:
    pool = WorkerPool(3)
    pool.run([])
    pool.run([lambda: None])
    assert workers_alive() == []
    pool.run([lambda: None] * 2)
    assert sorted(workers_alive()) == ["hetmem-worker-1", "hetmem-worker-2"]
    pool.close()
    assert workers_alive() == []
    pool.close()
    pool.run([lambda: None] * 2)
    assert sorted(workers_alive()) == ["hetmem-worker-1", "hetmem-worker-2"]
    pool.close()
    assert workers_alive() == []


def test_one_thread_means_the_callers() -> None:
    seen: set[int] = set()
    WorkerPool(1).run([lambda: seen.add(threading.get_ident())] * 10)
    assert seen == {threading.get_ident()}
    assert workers_alive() == []


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_is_raised_after_all_tasks_have_run(threads: int) -> None:
    pool, ran = WorkerPool(threads), []

    def task(index: int) -> None:
        ran.append(index)
        if index == 3:
            raise KeyError("three")

    for _ in range(2):
        ran.clear()
        with pytest.raises(KeyError, match="three"):
            pool.run([partial(task, index) for index in range(10)])
        assert sorted(ran) == list(range(10))
    pool.close()


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    pool, meeting = WorkerPool(2), threading.Barrier(2)

    def task() -> None:
        meeting.wait(30)  # one of the two runs in the worker
        if threading.current_thread() is not threading.main_thread():
            raise OSError("in a worker")

    with pytest.raises(OSError, match="in a worker"):
        pool.run([task] * 2)
    pool.run([lambda: None] * 2)
    pool.close()


def test_idle_workers_hold_no_memory_even_after_an_error() -> None:
    pool, meeting = WorkerPool(2), threading.Barrier(2)

    class Memory:
        def touch(self) -> None:
            meeting.wait(30)
            raise ValueError("its traceback holds the task")

    memory = Memory()
    released = weakref.ref(memory)
    with contextlib.suppress(ValueError):
        pool.run([memory.touch] * 2)
    del memory
    deadline = time.monotonic() + 30  # the worker may still be on its way from the task to its queue
    while released() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
        gc.collect()
    assert released() is None
    pool.close()


def test_run_returns_after_the_slowest_task() -> None:
    pool, meeting, ended = WorkerPool(2), threading.Barrier(2), []

    def task() -> None:
        meeting.wait(30)  # one of the two runs in the worker
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        ended.append(True)

    pool.run([task] * 2)
    assert len(ended) == 2
    pool.close()


def test_runs_from_several_threads_and_from_tasks_do_not_mix() -> None:
    pool, sums = WorkerPool(2), [0] * 4

    def add(index: int) -> None:
        sums[index] += 1

    def caller(index: int) -> None:
        for _ in range(100):
            pool.run([lambda: pool.run([partial(add, index)] * 2)])

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(30)
    pool.close()
    assert sum(sums) == 800


def test_a_forgotten_pool_ends_its_threads() -> None:
    pool = WorkerPool(2)
    pool.run([lambda: None] * 2)
    (worker,) = [thread for thread in threading.enumerate() if thread.name == "hetmem-worker-1"]
    del pool
    worker.join(30)
    assert not worker.is_alive()


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, got 0"):
        WorkerPool(0)


def test_a_begun_batch_runs_while_the_caller_goes_on() -> None:
    pool, started, go_on = WorkerPool(1), threading.Event(), threading.Event()
    batch = pool.begin([lambda: started.set(), lambda: go_on.wait(30) and None])
    assert started.wait(30)  # by a worker: this thread only waits
    assert not batch.done
    go_on.set()
    batch.join()
    assert batch.done
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_task_of_every_begun_batch_runs_once(threads: int) -> None:
    pool, ran = WorkerPool(threads), [[0] * 20 for _ in range(50)]

    def task(batch: int, index: int) -> None:
        ran[batch][index] += 1

    batches = [pool.begin([partial(task, batch, index) for index in range(20)]) for batch in range(50)]
    for batch in reversed(batches):
        batch.join()
    pool.close()
    assert ran == [[1] * 20] * 50


def test_who_joins_works_while_all_workers_are_busy() -> None:
    pool, ran, release = WorkerPool(2), [], threading.Event()
    busy = pool.begin([lambda: release.wait(30) and None])
    later = pool.begin([lambda: ran.append(threading.get_ident())] * 3)
    later.join()
    assert ran == [threading.get_ident()] * 3
    assert not busy.done
    release.set()
    busy.join()
    pool.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_batches_start_in_the_order_in_which_they_were_begun(threads: int) -> None:
    pool, order = WorkerPool(threads), []
    batches = [pool.begin([partial(order.append, index)] * 2) for index in range(20)]
    pool.close()
    assert all(batch.done for batch in batches)  # what was begun is finished before the workers end
    assert order == sorted(order)
    assert len(order) == 40


@pytest.mark.parametrize("count", [0, 1, 5])
def test_after_is_called_once_when_the_batch_is_done(count: int) -> None:
    pool, seen, woken = WorkerPool(2), [], threading.Event()
    box: list[workers.Batch] = []
    gate = threading.Event()

    def after() -> None:
        seen.append(not box or box[0].done)  # without tasks it runs before `begin` returns
        woken.set()

    batch = pool.begin([lambda: gate.wait(30) and None] * count, after)
    box.append(batch)
    gate.set()
    assert woken.wait(30)
    batch.join()
    batch.join()
    pool.close()
    assert seen == [True]


def test_after_is_called_after_an_error_too_and_join_raises_the_first() -> None:
    pool, woken = WorkerPool(1), threading.Event()

    def fail() -> None:
        raise KeyError("first")

    batch = pool.begin([fail, lambda: None], woken.set)
    assert woken.wait(30)
    for _ in range(2):
        with pytest.raises(KeyError, match="first"):
            batch.join()
    pool.run([lambda: None] * 2)
    pool.close()


def test_an_error_in_after_ends_no_worker() -> None:
    pool, second = WorkerPool(1), threading.Event()

    def after() -> None:
        raise OSError("in after")

    first = pool.begin([lambda: None], after)
    pool.begin([lambda: None], second.set)
    assert second.wait(30)
    with pytest.raises(OSError, match="in after"):
        first.join()
    pool.close()


def test_a_done_batch_holds_no_memory() -> None:
    class Memory:
        def touch(self) -> None:
            pass

    pool, memory, woken = WorkerPool(1), Memory(), threading.Event()
    released = weakref.ref(memory)
    batch = pool.begin([memory.touch], lambda memory=memory: woken.set())
    assert woken.wait(30)
    batch.join()
    pool.close()
    del memory
    assert released() is None
    assert batch.done


def test_begin_starts_one_worker_where_the_pool_has_one_thread_and_leaves_a_core_otherwise() -> None:
    for threads, expected in ((1, 1), (2, 1), (3, 2)):
        pool = WorkerPool(threads)
        pool.begin([lambda: None] * 5).join()
        assert len(workers_alive()) == expected
        pool.close()


def cores_of_a_worker(pool: WorkerPool) -> set[int]:
    seen: list[set[int]] = []
    ended = threading.Event()
    pool.begin([lambda: seen.append(os.sched_getaffinity(0))], ended.set)
    assert ended.wait(30)
    pool.close()
    return seen[0]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be bound here")
def test_workers_bind_to_the_given_cores_and_nobody_else_does() -> None:
    mine = os.sched_getaffinity(0)
    core = max(mine)
    assert cores_of_a_worker(WorkerPool(2, cores=[core])) == {core}
    assert cores_of_a_worker(WorkerPool(2, cores=[core, 100_000])) == {core}
    assert os.sched_getaffinity(0) == mine
    assert WorkerPool(cores=[core]).threads == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be bound here")
@pytest.mark.parametrize("cores", [None, [], [100_000]])
def test_cores_that_cannot_be_used_are_ignored(cores: list[int] | None) -> None:
    assert cores_of_a_worker(WorkerPool(2, cores)) == os.sched_getaffinity(0)
    assert WorkerPool(cores=cores).threads == WorkerPool().threads


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to choose from"
)
def test_workers_never_leave_the_cores_that_the_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    allowed, forbidden = sorted(mine)[:2]
    os.sched_setaffinity(0, {allowed})
    try:
        assert cores_of_a_worker(WorkerPool(2, cores=[forbidden])) == {allowed}
        assert cores_of_a_worker(WorkerPool(2, cores=[allowed, forbidden])) == {allowed}
        assert WorkerPool(cores=[allowed, forbidden]).threads == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_a_refused_binding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    pool, ended = WorkerPool(1, cores=[0]), threading.Event()
    pool.begin([lambda: None], ended.set)
    assert ended.wait(30)
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_who_joins_does_the_work() -> None:
    pool = WorkerPool(2)
    pool.begin([lambda: None]).join()

    def act() -> None:
        ran: list[int] = []
        pool.begin([lambda: ran.append(1)] * 3).join()
        assert len(ran) == 3

    assert end_in_a_fork(act) == 0
    pool.close()


def test_a_pool_whose_close_is_interrupted_starts_anew() -> None:
    """It counted on workers that were about to end: what was begun later was never run, and its end waited for for
    ever."""
    pool, may_end, ended = WorkerPool(2), threading.Event(), threading.Event()
    before = pool.begin([may_end.wait])
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    may_end.set()
    pool.begin([lambda: None], ended.set)
    assert ended.wait(30)
    before.join()
    pool.close()
    assert comes_to_be(lambda: not workers_alive()), "those of before are waited for by nobody"


def test_tasks_for_which_no_thread_can_be_started_are_run_by_who_begins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[int] = []
    batch = WorkerPool(threads=2).begin([lambda at=at: done.append(at) for at in range(3)])
    assert batch.done
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize(
    ("siblings", "allowed", "left"),
    [
        ({cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}, range(16), {7, 15}),
        ({cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(4)}, range(4), {2, 3}),
        ({cpu: f"{cpu}" for cpu in range(16)}, range(16), {14, 15}),  # as virtual machines hide them
        ({cpu: f"{cpu}" for cpu in range(4)}, range(4), {3}),
        ({}, range(2), {1}),
        (dict.fromkeys(range(2), "0-1"), range(2), {1}),
        ({}, [5], set()),
    ],
)
def test_updates_leave_a_physical_core_to_the_thread_that_trains(
    siblings: dict[int, str], allowed: Iterable[int], left: set[int], tmp_path: Path
) -> None:
    for cpu, listed in siblings.items():
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(listed + "\n")
    assert workers.left_to_training(set(allowed), tmp_path) == left
