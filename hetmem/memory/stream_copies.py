"""Copies on device streams: events order compute behind them, and the host does not wait. On a GPU bytes are cast and
added on the device, so that its copy engine moves them.

This module knows tensors, streams and kernels; not chunks, nor who waits for a copy. A cast gives the bits of torch's
operators, but for NaN: one stays a NaN, and a kernel's is the quiet one without a payload.

Note "stream order": a copy has ended when its end event has passed, and only then is it reported, so it owns the host
memory that it reads or writes until then. Compute does not wait for that: it is ordered behind the event. In turn, a
copy into a slot is ordered behind a mark of the compute that last used the slot.

Note "marks": a mark is the number of the first later event behind compute. Events are recorded when a copy needs one,
and at every few marks, so that none of them ends much later than what it marks: most uses need none.

Note "staging": casts go through two small buffers on the device, a piece at a time, so that nothing is allocated once
they exist, however large the chunk. A piece is copied on the caller's stream and cast on another one, so the copy
engine moves the next piece meanwhile. An event of each buffer marks when it is free again; only the device waits for
it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hetmem.base.units import MIB, round_up
from hetmem.cuda.backend import Backend
from hetmem.cuda.dequantise import dequantise, dequantise_parts, parts_of
from hetmem.cuda.kernels import CASTS, cast
from hetmem.memory.coded import CodedHome, CodedPart
from hetmem.memory.transfer import Copier, Finished, Job, Seen
from hetmem.schedule.blocks import Link
from hetmem.schedule.formats import CODED_PIECE_ELEMENTS

_RETAINED = 64
"""Number of events that are retained for marks; older marks use the oldest of them, which is only later."""
_USES_AN_EVENT = 4
"""At most this many marks share an event."""


class _InFlight(NamedTuple):
    number: int
    job: Job  # holds the memory that the copy reads and writes
    asked: float
    after: list[Any]
    end: Any


class StreamCopier(Copier):
    """A `Copier` over `streams` (see `CudaStreams`). Jobs of one link end in the order in which they were started."""

    ordered = True

    def __init__(self, streams: Any, seen: Seen, finished: Callable[[Finished], None]) -> None:
        self._streams, self._seen, self._finished = streams, seen, finished
        self.clock = streams
        self._queues: dict[Link, deque[_InFlight]] = {
            Link.HOST_TO_DEVICE: deque(),
            Link.DEVICE_TO_HOST: deque(),
        }
        self._numbers = itertools.count()
        self._ends: dict[Any, Any] = {}
        self._not_asked: set[Any] = set()
        self._over_at = dict.fromkeys(self._queues, 0.0)
        self._events: deque[Any] = deque(maxlen=_RETAINED)
        self._recorded = self._unmarked = 0

    def start(self, job: Job, after: Sequence[Any]) -> None:
        """Begin `job`; a copy from the device comes after all compute so far, which may still compute its source."""
        self._not_asked.discard(job.tag)
        try:
            begun = self._begin(job, [self._event(mark) for mark in after])
        except Exception as error:  # nothing was launched (out of memory for a cast, say)
            self._not_asked.add(job.tag)
            self._finished(Finished(job.tag, error))
            return
        self._queues[job.link].append(begun)
        self._ends[job.tag] = begun.end

    def _begin(self, job: Job, after: list[Any], *, behind_compute: bool = False) -> _InFlight:
        if behind_compute or job.link is Link.DEVICE_TO_HOST:
            after.append(self._record())
        asked = self._streams.now()
        end = self._streams.enqueue(job.link, after, job.work)
        return _InFlight(next(self._numbers), job, asked, after, end)

    def now(self, job: Job) -> None:
        begun = self._begin(job, [], behind_compute=True)
        self._streams.wait(begun.end)
        self._tell(begun)

    def mark(self) -> int:
        """Return a mark; see note "marks"."""
        self._streams.see_compute()
        self._unmarked += 1
        if self._unmarked < _USES_AN_EVENT:
            return self._recorded
        self._record()
        return self._recorded - 1

    def _record(self) -> Any:
        event = self._streams.mark()
        self._unmarked = 0
        self._recorded += 1
        self._events.append(event)
        return event

    def _event(self, mark: int) -> Any:
        """Return the first event behind compute that was recorded after `mark`."""
        at = mark - self._recorded + len(self._events)
        return self._record() if at >= len(self._events) else self._events[max(0, at)]

    def end_of(self, tag: Any) -> Any:
        """Return the mark at the end of the copy with `tag`, until that end has been reported."""
        return self._ends.get(tag)

    def order_compute_after(self, tag: Any) -> bool:
        end = self._ends.get(tag)
        if end is not None:
            self._streams.order_compute(end)
        return tag not in self._not_asked

    def poll(self) -> None:
        passed = self._streams.passed  # called at every use of a weight, so `_is_over` is inlined
        for jobs in self._queues.values():
            while jobs:
                try:
                    if not passed(jobs[0].end):
                        break
                except Exception:  # of a device that failed
                    pass
                self._report(jobs.popleft())

    def busy(self) -> bool:
        return any(self._queues.values())

    def wait(self) -> bool:
        heads = sorted(jobs[0] for jobs in self._queues.values() if jobs)
        if not heads:
            return False
        over = next((head for head in heads[1:] if self._is_over(head)), heads[0])
        self._wait_for(over.job.link)
        return True

    def _wait_for(self, link: Link) -> None:
        """Wait for the oldest job of `link`, and report it."""
        with contextlib.suppress(Exception):  # a device that failed
            self._streams.wait(self._queues[link][0].end)
        self._report(self._queues[link].popleft())

    def close(self) -> None:
        for link, jobs in self._queues.items():
            while jobs:
                self._wait_for(link)

    def abandon(self) -> None:
        """Wait for the device only: it must not write into memory that is freed."""
        for jobs in self._queues.values():
            if jobs:
                with contextlib.suppress(Exception):  # a device that failed writes no more
                    self._streams.wait(jobs[-1].end)

    def _is_over(self, job: _InFlight) -> bool:
        """Return whether `job` has ended, as it has if the device has failed (by an assertion in a kernel, say)."""
        try:
            return bool(self._streams.passed(job.end))
        except Exception:
            return True

    def _report(self, ended: _InFlight) -> None:
        """Report a job, also after an error, as it would be waited for for ever otherwise."""
        if self._ends.get(ended.job.tag) is ended.end:
            del self._ends[ended.job.tag]
        failure = None
        try:
            self._tell(ended)
        except Exception as error:
            failure = error
        self._finished(Finished(ended.job.tag, failure))

    def _tell(self, ended: _InFlight) -> None:
        """Report when a copy ran: from its request, or from the end of all work before it, if later."""
        when, link = self._streams.when, ended.job.link
        end = when(ended.end)
        start = max(ended.asked, self._over_at[link], *map(when, ended.after))
        self._over_at[link] = end
        self._seen(ended.job, min(start, end), end)


# ---- copies of a GPU -------------------------------------------------------------------------------------------------

PIECE_BYTES = 64 * MIB  # about 1.2 ms of a 53 GB/s link, twenty times the host's cost of launching a piece
_BUFFERS = 2
_ALIGNMENT_BYTES = 16


class _Buffer:
    """One staging buffer. `free` is behind its last use, `full` behind the copy into it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free, self.full = torch.cuda.Event(), torch.cuda.Event()
        self._views: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def elements(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        found = self._views.get((dtype, numel))
        if found is None:
            with torch.inference_mode(False):  # training uses it too
                found = self._views[dtype, numel] = self.memory[: numel * dtype.itemsize].view(dtype)
        return found


class Staging:
    """Two buffers, used in turn. They are allocated on the stream that first uses them, as large as the largest piece
    requested, and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that staging takes."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def release(self) -> None:
        """Give the buffers back to the allocator, after their last use."""
        for buffer in self._buffers:
            buffer.free.synchronize()
        self._buffers = []

    def take(self, stream: torch.cuda.Stream, nbytes: int) -> _Buffer:
        """Return the next buffer, of `nbytes` or more; later work on `stream`, which is current, comes after its last
        use."""
        if not self._buffers or self._buffers[0].memory.numel() < nbytes:
            self.release()  # the allocator knows of one stream only
            self._buffers = [_Buffer(nbytes, self._device) for _ in range(_BUFFERS)]
            for buffer in self._buffers:  # their memory may still be in use by this stream's earlier work
                buffer.free.record(stream)
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._buffers[self._turn]
        stream.wait_event(buffer.free)
        return buffer


class Moves:
    """The copies of one GPU. Work is launched on the current stream; tensors must stay allocated until it is done.
    Several threads may use it."""

    def __init__(self, device: torch.device, kernels: Backend) -> None:
        self.kernels = kernels
        self._device = device
        self._staging = {"in": Staging(device), "out": Staging(device)}
        self._casting = torch.cuda.Stream(device)
        self._turn = threading.Lock()  # buffers are shared by all models on this device

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory that staging takes."""
        return sum(staging.nbytes for staging in self._staging.values())

    def release_staging(self) -> None:
        """Give staging back to the allocator; the next copy takes it again."""
        with self._turn:
            for staging in self._staging.values():
                staging.release()

    # ---- weights in --------------------------------------------------------------------------------------------

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy host memory `source` to device memory `target`, with a cast: both 1-D, contiguous, of one length."""
        if source.dtype is target.dtype:
            target.copy_(source, non_blocking=True)
        else:
            with self._turn:
                self._through_staging(target, source)

    def _through_staging(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copying = torch.cuda.current_stream(self._device)
        has_cast = self.kernels.native and (source.dtype, target.dtype) in CASTS
        last: _Buffer | None = None
        try:
            for part in _pieces(source.numel(), PIECE_BYTES // source.itemsize):
                buffer = self._staging["in"].take(copying, min(source.nbytes, PIECE_BYTES))
                landed = buffer.elements(source.dtype, part.stop - part.start)
                landed.copy_(source[part], non_blocking=True)
                buffer.full.record(copying)
                self._casting.wait_event(buffer.full)
                if has_cast:
                    cast(self.kernels, landed, target[part], stream=self._casting)
                else:
                    with torch.cuda.stream(self._casting):
                        target[part].copy_(landed)
                buffer.free.record(self._casting)
                last = buffer
        finally:
            if last is not None:
                copying.wait_event(last.free)  # casts are in order, so later work on this stream finds all of them done

    def decode(self, slot: torch.Tensor, home: CodedHome) -> None:
        """Decode `home` to `slot`, both in device memory, one kernel a piece."""
        for part, target in home.targets(slot):
            codes = part.bytes_in(home.codes)
            for piece in part.coding.parts(CODED_PIECE_ELEMENTS):
                dequantise(self.kernels, part.coding, codes, target[piece], piece.start)

    def decode_in(self, slot: torch.Tensor, home: CodedHome) -> None:
        """Decode `home`, in host memory, to `slot`, in device memory: the bytes of each weight go through staging, a
        piece at a time, and one kernel decodes each piece."""
        copying, last = torch.cuda.current_stream(self._device), None
        with self._turn:
            try:
                for part, target in home.targets(slot):
                    for piece in part.coding.parts(CODED_PIECE_ELEMENTS):
                        last = self._decode_piece(home, part, target[piece], piece.start, copying)
            finally:
                if last is not None:
                    copying.wait_event(last.free)

    def _decode_piece(
        self, home: CodedHome, part: CodedPart, target: torch.Tensor, first: int, copying: torch.cuda.Stream
    ) -> _Buffer:
        parts = parts_of(part.coding, part.bytes_in(home.codes), first, target.numel())
        starts = [0, *itertools.accumulate(round_up(each.numel(), _ALIGNMENT_BYTES) for each in parts)]
        buffer = self._staging["in"].take(copying, max(starts[-1], min(home.nbytes, CODED_PIECE_ELEMENTS)))
        landed = [buffer.memory[start : start + each.numel()] for start, each in zip(starts, parts, strict=False)]
        for to, each in zip(landed, parts, strict=True):
            to.copy_(each, non_blocking=True)
        buffer.full.record(copying)
        self._casting.wait_event(buffer.full)
        codes, scales, nested = landed
        dequantise_parts(self.kernels, part.coding, codes, scales, nested, target, first, stream=self._casting)
        buffer.free.record(self._casting)
        return buffer

    # ---- gradients out -----------------------------------------------------------------------------------------

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """Copy `arrived`, on the device, to host memory `target` (dense, of the same shape), or add it to that."""
        if not _same_layout(target, arrived):
            self._in_another_order(target, arrived, add=add)
            return
        if not add and target.dtype is arrived.dtype:
            target.copy_(arrived, non_blocking=True)  # equal layouts: one copy, whatever the strides
        else:
            with self._turn:
                self._from_staging(_flat(target), _flat(arrived), add=add)

    def _from_staging(self, home: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        """Cast and add on the device, so that plain copies cross the link, without the host."""
        stream = torch.cuda.current_stream(self._device)
        for part in _pieces(home.numel(), PIECE_BYTES // home.itemsize):
            buffer = self._staging["out"].take(stream, min(home.nbytes, PIECE_BYTES))
            there = buffer.elements(home.dtype, part.stop - part.start)
            if add:
                there.copy_(home[part], non_blocking=True)
                there.add_(gradient[part])
            else:
                there.copy_(gradient[part])
            home[part].copy_(there, non_blocking=True)
            buffer.free.record(stream)

    def _in_another_order(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """Copy between different strides, which autograd avoids, by way of a tensor of the target's layout."""
        there = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=self._device)
        if add:
            there.copy_(target, non_blocking=True)
            there.add_(arrived)
        else:
            there.copy_(arrived)
        target.copy_(there, non_blocking=True)


def _pieces(numel: int, most: int) -> Iterator[slice]:
    for start in range(0, numel, most):
        yield slice(start, min(start + most, numel))


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether equal elements have equal offsets. `one`, a home, has no gaps."""
    alike = one.stride() == other.stride() or all(
        size == 1 or here == there for size, here, there in zip(one.shape, one.stride(), other.stride(), strict=True)
    )
    return alike and not other.is_conj() and not other.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as they lie in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))
