"""Writes the homes of a model to a checkpoint in the background, while the program trains on.

Note "moment": the file is of the moment of the call. What lies in no home (buffers, step counts, `extra`, states of
torch's optimizers), and homes whose memory the program holds (`kept = p.data`), are written before the call returns.
Before anything else writes to another home, an update or a function of the program, it waits until the chunk is written
(`engine.outgoing`). A write that nothing announced shows in the version of its tensor, and ends the save: see `_count`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from hetmem.checkpoint.disk import THREADS, BlockBuffer, own_stream, write_block
from hetmem.checkpoint.layout import Stored
from hetmem.engine.outgoing import Outgoing
from hetmem.engine.runtime import Runtime
from hetmem.errors import CheckpointError, ManageError, PeerError
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, RawMemory, Role, address_of, elements
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import NvmeStore

_YIELD_SECONDS = 0.002


@dataclass(slots=True, eq=False)
class PieceAtHome:
    """A tensor of a file that lies in a home: a view of that for hetmem alone, and a tensor that has its version."""

    stored: Stored
    view: torch.Tensor
    versioned: torch.Tensor
    version: int
    checks: list[int] = field(default_factory=list)
    """The CRC-32 of its blocks."""


class SaveHandle:
    """A save in the background, of `hetmem.save(…, wait=False)`. May be used from any thread, and dropped."""

    def __init__(
        self, path: str, fd: int, data_start: int, nbytes: int, pieces: Mapping[Chunk, list[PieceAtHome]]
    ) -> None:
        self._path, self._fd, self._data_start = path, fd, data_start
        self.process, self._lock, self._ended = os.getpid(), threading.Lock(), threading.Event()
        self._pieces = dict(pieces)
        self._queues = {chunk: deque(_blocks_of(of)) for chunk, of in pieces.items()}
        self._left = {chunk: len(queue) for chunk, queue in self._queues.items()}
        """By chunk that is not out yet, its blocks that are still to be written."""
        self._wanted: deque[Chunk] = deque()
        self._calls: list[tuple[set[Chunk], Callable[[], object]]] = []
        self._last_calls: list[Callable[[], object]] = []
        self._stores = list[NvmeStore]()
        """Where homes are, if they are on drives."""
        self._error: BaseException | None = None
        self._nbytes, self._began = nbytes, time.monotonic()

    def end(self) -> None:
        """Note that all was written before the call returned."""
        self._ended.set()

    def done(self) -> bool:
        """Return whether the save has ended: the file is on the disk, or `wait` raises the error."""
        self._refuse_a_fork()
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the file is on the disk. Raises the error with which the save has failed: `StoreError` (the drive;
        with path, offset, bytes and errno) or `CheckpointError` (the program wrote to a weight or a state that was not
        written yet; names it). The earlier file is as it was then."""
        self._refuse_a_fork()
        while not self._ended.wait(0.05):
            HELD_BACK.raise_here()
        if self._error is not None:
            _UNSEEN.pop(id(self), None)
            raise self._error

    def _refuse_a_fork(self) -> None:
        if os.getpid() != self.process:
            raise ManageError("this process was made by fork(), and the save runs in its parent: ask there")

    # ---- for those who are about to write: see `ChunkWriter` -------------------------------------------------------

    def is_out(self, chunks: Collection[Chunk]) -> bool:
        """Return whether no home of `chunks` is read any more."""
        return not any(map(self._left.__contains__, chunks))  # other threads remove from it

    def call_when_out(self, chunks: Collection[Chunk] | None, call: Callable[[], object]) -> None:
        """Write `chunks` next, and then `call`, on any thread; None: at the end."""
        with self._lock:
            if chunks is None and not self._ended.is_set():
                self._last_calls.append(call)
                return
            missing = set(() if chunks is None else chunks) & self._left.keys()
            if missing:
                self._wanted.extend(missing)
                self._calls.append((missing, call))
                return
        call()

    def raise_unseen(self) -> None:
        """Raise the error with which the save has ended, unless that was raised already."""
        if self._error is not None and id(self) in _UNSEEN:
            del _UNSEEN[id(self)]
            raise self._error

    # ---- threads ---------------------------------------------------------------------------------------------------

    def begin(self, finish: Callable[[dict[str, list[int]]], None], file: ExitStack, of: list[Runtime]) -> None:
        """Begin to write. `finish` writes the header, from the CRC-32 of blocks by name; `file` puts the new file in
        its place, or, after an error, removes it; once this has returned, that is done here. `of`: the models."""
        helpers, own = list[threading.Thread](), ExitStack()
        models = [each.outgoing for each in of]
        self._stores = [each.memory.store for each in of if each.memory.store is not None]
        last = self._thread(lambda: self._run(helpers, finish, own, models))
        with HELD_BACK:
            try:
                for _ in range(THREADS - 1):
                    helper = self._thread(partial(self._write_blocks, yields=len(helpers) > 0))
                    helper.start()
                    helpers.append(helper)
                own.push(file.pop_all())
                for each in of:
                    each.outgoing.save = self
                    each.marks.watch_for_save()
                last.start()
            except BaseException as error:  # no more threads
                self._fail(error)
                for each in of:
                    each.outgoing.save = None
                for helper in helpers:
                    helper.join()
                file.push(own.pop_all())
                raise

    @staticmethod
    def _thread(target: Callable[[], None]) -> threading.Thread:
        """Return a thread that the interpreter waits for at its end."""
        return threading.Thread(target=target, name="hetmem-checkpoint", daemon=False)

    def _run(
        self,
        helpers: list[threading.Thread],
        finish: Callable[[dict[str, list[int]]], None],
        file: ExitStack,
        models: list[Outgoing],
    ) -> None:
        """Write blocks, and end the file once all threads have."""
        try:
            with file:
                self._write_blocks()
                for thread in helpers:
                    thread.join()
                if self._error is not None:
                    raise self._error
                finish({piece.stored.name: piece.checks for of in self._pieces.values() for piece in of})
        except BaseException as error:
            self._fail(error)
            _UNSEEN[id(self)] = (self._path, error)
        finally:
            with self._lock:
                for each in models:
                    each.ended(self, None if self._error is not None else self._nbytes, time.monotonic() - self._began)
                self._ended.set()
                calls, self._last_calls = self._last_calls, []
            self._pieces.clear()
            for call in calls:
                call()

    @torch.no_grad()
    def _write_blocks(self, *, yields: bool = False) -> None:
        """Write one block after the other, those of chunks that are waited for first. `yields`: no others while homes
        are moved to or from a drive, which a step may wait for."""
        buffer = BlockBuffer()
        try:
            with own_stream(piece.view for of in self._pieces.values() for piece in of):
                while (taken := self._take(yields=yields)) is not None:
                    chunk, piece, number = taken
                    block = piece.stored.blocks()[number]
                    start = self._data_start + piece.stored.start
                    piece.checks[number] = write_block(self._fd, self._path, start, piece.view, block, buffer)
                    self._count(chunk)
        except BaseException as error:
            self._fail(error)

    def _take(self, *, yields: bool) -> tuple[Chunk, PieceAtHome, int] | None:
        while yields and self._queues and not self._wanted and any(store.is_busy for store in self._stores):
            time.sleep(_YIELD_SECONDS)
        with self._lock:
            while self._wanted and self._wanted[0] not in self._queues:
                self._wanted.popleft()
            chunk = self._wanted[0] if self._wanted else next(iter(self._queues), None)
            if chunk is None:
                return None
            queue = self._queues[chunk]
            piece, number = queue.popleft()
            if not queue:
                del self._queues[chunk]
            return chunk, piece, number

    def _count(self, chunk: Chunk) -> None:
        """Note that a block of `chunk` is written."""
        with self._lock:
            if chunk not in self._left:
                return
            self._left[chunk] -= 1
            if self._left[chunk]:
                return
        for piece in self._pieces.get(chunk, ()):
            if piece.versioned._version != piece.version:
                raise CheckpointError(
                    f"{self._path!r} was not written: the program wrote to {piece.stored.name} before the save in the "
                    f"background had come to it. Wait for the save (handle.wait()) before such a write"
                )
        with self._lock:
            self._left.pop(chunk, None)
            calls = self._due()
        for call in calls:
            call()

    def _due(self) -> list[Callable[[], object]]:
        """Remove and return the calls for chunks that are all out."""
        due = [call for chunks, call in self._calls if chunks.isdisjoint(self._left)]
        self._calls = [each for each in self._calls if not each[0].isdisjoint(self._left)]
        return due

    def _fail(self, error: BaseException) -> None:
        """Note `error`, and let all go on that wait: there will be no file."""
        with self._lock:
            self._error = self._error or error
            self._queues.clear()
            self._left.clear()
            calls = self._due()
        for call in calls:
            call()


class PeerHandle(SaveHandle):
    """On another rank, the save in the background of rank 0. `is_over` says whether that has ended; `wait_for_it` waits
    until then, and raises `PeerError` if it has failed."""

    def __init__(self, path: str, is_over: Callable[[], bool], wait_for_it: Callable[[], None]) -> None:
        super().__init__(path, -1, 0, 0, {})
        self._is_over, self._wait_for_it, self._seen = is_over, wait_for_it, False

    def done(self) -> bool:
        self._refuse_a_fork()
        return self._ended.is_set() or self._is_over()

    def wait(self) -> None:
        self._refuse_a_fork()
        if not self._ended.is_set():
            try:
                self._wait_for_it()
            except PeerError as error:
                self._error = error
            self._ended.set()
        self._seen = True
        if self._error is not None:
            raise self._error

    def end_unseen(self) -> None:
        """Wait, and raise the error unless `wait` has."""
        if not self._seen:
            self.wait()


_UNSEEN: dict[int, tuple[str, BaseException]] = {}
"""Errors of saves that were not raised yet, with their paths."""


@atexit.register
def _tell() -> None:
    for path, error in _UNSEEN.values():
        print(f"hetmem.save({path!r}, wait=False) has failed: {error}", file=sys.stderr)


def _blocks_of(pieces: Iterable[PieceAtHome]) -> Iterator[tuple[PieceAtHome, int]]:
    for piece in pieces:
        piece.checks = [0] * len(piece.stored.blocks())
        for number in range(len(piece.checks)):
            yield piece, number


# ---- which tensors lie in homes --------------------------------------------------------------------------------------


def held_chunks(models: Iterable[Interception]) -> set[Chunk]:
    """Return the chunks of which the program holds memory: it may write to that without any function of a weight."""
    found = set[Chunk]()
    for each in models:
        found.update(managed.chunk for managed in each.runtime.bindings.shared(each.runtime.parameters))
        for listener in each.gradients.listeners:
            found.update(filter(listener.has_held_states, each.runtime.chunks))
    return found


def pieces_at_home(
    models: Iterable[Interception],
    stored: Iterable[Stored],
    tensors: Mapping[str, torch.Tensor],
    counters: Mapping[str, torch.Tensor],
    held: Collection[Chunk],
) -> dict[Chunk, list[PieceAtHome]]:
    """Return the tensors of a file that lie in homes of `models`, but in those of `held` chunks. `counters`: by name, a
    tensor without memory that shares the version of a weight."""
    homes = sorted(
        (
            (address_of(home.memory), chunk.home_nbytes(role), chunk, home.memory)
            for each in models
            for chunk in each.runtime.chunks
            for role, home in chunk.homes.items()
            if role not in (Role.GRAD, Role.COMPUTE) and chunk not in held
        ),
        key=lambda home: home[0],
    )
    begins = [begin for begin, *_ in homes]
    found: dict[Chunk, list[PieceAtHome]] = {}
    for one in stored:
        tensor = tensors[one.name]
        at = bisect_right(begins, tensor.data_ptr()) - 1
        if at < 0 or not one.nbytes or tensor.data_ptr() >= begins[at] + homes[at][1]:
            continue
        chunk, memory = homes[at][2], homes[at][3]
        view, versioned = _view(memory, tensor, begins[at]), counters.get(one.name, tensor)
        version = 0 if versioned.is_inference() else versioned._version
        found.setdefault(chunk, []).append(PieceAtHome(one, view, versioned, version))
    return dict(sorted(found.items(), key=lambda item: item[0].spec.index))


def _view(memory: RawMemory, tensor: torch.Tensor, begin: int) -> torch.Tensor:
    """Return `tensor`, which lies in `memory`, as a tensor with a storage of its own: one that shared the storage would
    count as memory that the program holds."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = elements(memory, tensor.dtype, span, tensor.data_ptr() - begin)
    return flat.as_strided(tensor.shape, tensor.stride())
