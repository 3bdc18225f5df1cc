"""Whoever waits for the engine is told of what is over first, wherever that was under way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engine.harness import comes_to_be
from tests.memory.tested import (
    Finished,
    Job,
    Link,
    Mapping,
    NvmeStore,
    Seen,
    StreamCopier,
    ThreadCopier,
    TransferEngine,
)

BLOCK = 4096


class StreamsBehindCompute:
    """Copies that are over only once somebody has waited for them, and waits that are counted."""

    def __init__(self) -> None:
        self.waits = 0
        self.over: set[int] = set()

    def see_compute(self) -> None: ...

    def mark(self) -> int:
        return 0

    def now(self) -> float:
        return 0.0

    def timed_mark(self) -> int:
        return 0

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> int:
        return 1

    def order_compute(self, event: int) -> None: ...

    def passed(self, event: int) -> bool:
        return event in self.over

    def wait(self, event: int) -> None:
        self.waits += 1
        self.over.add(event)

    def when(self, event: int) -> float:
        return 0.0


class Device:
    def __init__(self) -> None:
        self.streams = StreamsBehindCompute()

    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> StreamCopier:
        return StreamCopier(self.streams, seen, finished)


def nothing() -> None:
    """A copy."""


def test_what_the_disk_has_read_is_told_of_while_a_copy_is_behind_compute(tmp_path: Path) -> None:
    device, store = Device(), NvmeStore([tmp_path], BLOCK)
    engine = TransferEngine(device.copier, store)
    engine.copy("copy", Link.DEVICE_TO_HOST, nothing, 1)
    engine.read("read", store.reserve(BLOCK), Mapping(BLOCK).buffer(0, BLOCK))
    first = engine.take(wait=True)
    assert first is not None
    assert (first.tag, device.streams.waits) == ("read", 0)
    second = engine.take(wait=True)  # nothing but the copy is left to wait for
    assert second is not None
    assert (second.tag, device.streams.waits) == ("copy", 1)
    store.close()


def test_the_end_of_a_job_is_told_of_while_a_copy_is_behind_compute() -> None:
    device = Device()
    engine = TransferEngine(device.copier, None)
    report = engine.reporter("job")
    engine.copy("copy", Link.HOST_TO_DEVICE, nothing, 1)
    threading.Timer(0.01, report).start()
    tags = [taken.tag for _ in range(2) if (taken := engine.take(wait=True)) is not None]
    assert tags == ["job", "copy"]
    assert device.streams.waits == 1


def test_waiting_for_copies_alone_looks_at_no_clock(monkeypatch: Any) -> None:
    device = Device()
    engine = TransferEngine(device.copier, None)
    engine.reporter("over before")()
    assert engine.take(wait=True) is not None
    engine.copy("copy", Link.HOST_TO_DEVICE, nothing, 1)
    monkeypatch.setattr(engine, "_finished", NoTimeouts(engine._finished))
    taken = engine.take(wait=True)
    assert taken is not None
    assert (taken.tag, device.streams.waits) == ("copy", 1)


def test_a_copy_that_is_over_is_told_of_while_a_job_goes_on() -> None:
    device = Device()
    engine = TransferEngine(device.copier, None)
    report = engine.reporter("job")
    engine.copy("copy", Link.HOST_TO_DEVICE, nothing, 1)
    threading.Timer(0.01, lambda: device.streams.over.add(1)).start()
    threading.Timer(1.0, report).start()
    taken = engine.take(wait=True)
    assert taken is not None
    assert (taken.tag, device.streams.waits) == ("copy", 0)


def test_a_transfer_of_the_disk_is_told_of_although_nobody_could_note_it(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], BLOCK)
    engine = TransferEngine(Device().copier, store)

    def fails(*_: object) -> None:
        raise MemoryError

    engine.log = fails
    extent, memory = store.reserve(BLOCK), Mapping(BLOCK).buffer(0, BLOCK)
    for begin in (engine.read, engine.write):
        begin("job", extent, memory)
        assert comes_to_be(lambda: not engine.none_finished())
        taken = engine.take(wait=False)
        assert taken is not None and taken.tag == "job"
        assert isinstance(taken.error, MemoryError)
    store.close()


class NoTimeouts:
    """A queue of which nobody waits for so long only."""

    def __init__(self, queue: Any) -> None:
        self.put, self.get_nowait, self.empty = queue.put, queue.get_nowait, queue.empty

    def get(self, timeout: float | None = None) -> Any:
        raise AssertionError(f"a look every {timeout} s")


def test_nobody_holds_what_a_copy_was_of_when_it_is_said_to_be_over() -> None:
    """Whoever waited for device memory to come free found that the last gradient was still held by the thread."""
    source, held = bytearray(8), threading.Event()

    class Source:
        def copy(self) -> None:
            source[:] = bytes(8)

    here = Source()
    known, dead = weakref.ref(here), []

    def finished(_: Finished) -> None:
        dead.append(known() is None)
        held.set()

    copier = ThreadCopier({Link.DEVICE_TO_HOST: 100}, lambda *_: None, finished)
    copier.start(Job("tag", Link.DEVICE_TO_HOST, here.copy, 10), ())
    del here
    assert held.wait(30)
    assert dead == [True]
    copier.close()
