"""Copies across the link of a GPU by its copy engine; bytes are cast and added on the device.

This module knows tensors, streams and kernels; not chunks, nor what waits for a copy. It gives the bits of torch's
operators, but for NaN: one stays a NaN, and a kernel's is the quiet one without a payload.

Note "staging": what is cast goes through two small buffers on the device, a piece at a time, so that nothing is
allocated once they are there, however large the chunk. A piece is copied on the caller's stream and cast on another
one, so the copy engine brings the next piece meanwhile. An event of each buffer says when it is free again; only the
device waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from hetmem.base.units import MIB
from hetmem.cuda.backend import Backend
from hetmem.cuda.kernels import CASTS, cast

PIECE_BYTES = 64 * MIB  # some 1.2 ms of a link of 53 GB/s, twenty times what asking for a piece costs the host
_BUFFERS = 2


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
            with torch.inference_mode(False):  # it serves training too
                found = self._views[dtype, numel] = self.memory[: numel * dtype.itemsize].view(dtype)
        return found


class Staging:
    """Two buffers, taken in turn. They are made on the stream that first uses them, as large as the largest piece that
    was asked for, and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """What it has taken of the device."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def take(self, stream: torch.cuda.Stream, nbytes: int) -> _Buffer:
        """The next buffer, of `nbytes` or more; work on `stream`, which is current, comes after its last use from now
        on."""
        if not self._buffers or self._buffers[0].memory.numel() < nbytes:
            for buffer in self._buffers:
                buffer.free.synchronize()  # its memory is given back to the allocator, which knows of one stream only
            self._buffers = [_Buffer(nbytes, self._device) for _ in range(_BUFFERS)]
            for buffer in self._buffers:  # of memory that this stream may have given back and be still working on
                buffer.free.record(stream)
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._buffers[self._turn]
        stream.wait_event(buffer.free)
        return buffer


class Moves:
    """The moves of one GPU. Work is asked for on the stream that is current; tensors must stay until it has passed.
    Several threads may use it."""

    def __init__(self, device: torch.device, kernels: Backend) -> None:
        self.kernels = kernels
        self._device = device
        self._staging = {"in": Staging(device), "out": Staging(device)}
        self._casting = torch.cuda.Stream(device)
        self._turn = threading.Lock()  # buffers are shared by all models on this device

    @property
    def staging_bytes(self) -> int:
        """Device memory that staging has taken."""
        return sum(staging.nbytes for staging in self._staging.values())

    # ---- weights in --------------------------------------------------------------------------------------------

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Host memory `source` to device memory `target`, both 1-D, contiguous and as long; cast if dtypes differ."""
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
                copying.wait_event(last.free)  # casts are in order: what follows on this stream finds all of them done

    # ---- gradients out -----------------------------------------------------------------------------------------

    def gradient_out(self, target: torch.Tensor, arrived: torch.Tensor, *, add: bool) -> None:
        """`arrived`, on the device, over host memory `target` (dense, of the same shape), or added to it."""
        if not _lie_alike(target, arrived):
            self._in_another_order(target, arrived, add=add)
            return
        if not add and target.dtype is arrived.dtype:
            target.copy_(arrived, non_blocking=True)  # they lie alike: one copy, whatever their strides
        else:
            with self._turn:
                self._from_staging(_flat(target), _flat(arrived), add=add)

    def _from_staging(self, home: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
        """Cast and add on the device, so that only copies without a cast cross, which need no host."""
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
        """Strides differ, which autograd avoids: through memory of the target's layout, made on the present stream."""
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


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether equal elements have equal places. `one`, a home, has no gaps."""
    alike = one.stride() == other.stride() or all(
        size == 1 or here == there for size, here, there in zip(one.shape, one.stride(), other.stride(), strict=True)
    )
    return alike and not other.is_conj() and not other.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))
