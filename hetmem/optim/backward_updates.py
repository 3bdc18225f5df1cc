"""Updates of unmanaged parameters that begin during the backward: of each piece of states once all of its gradients
have arrived, on a thread beside the one that trains.

It knows when and where, and not what an update is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hetmem.base.threads import Threads
from hetmem.base.weak import weakly
from hetmem.optim.shards import Shard
from hetmem.optim.state_pass import Piece, marked


class BackwardUpdates:
    """Calls `carry_out` with pieces whose gradients are there, on a thread of its own, which is not two times at work.

    `arrived` is called by autograd, with a parameter that has got its gradient. Neither keeps its owner alive.
    """

    def __init__(self, arrived: Callable[[torch.Tensor], None], carry_out: Callable[[Sequence[Piece]], None]) -> None:
        self._arrived, self._carry_out = weakly(arrived), weakly(carry_out)
        self._threads = Threads(1, "hetmem-update")
        self._handles: list[RemovableHandle] = []
        self.unhook = weakref.finalize(self, _remove, self._handles)
        self.unhook.atexit = False
        self._idle = threading.Condition()
        self._working = False
        self._error: BaseException | None = None
        self._of: dict[Shard, list[Piece]] = {}
        """The pieces of each shard whose gradient is awaited, in the step that has begun."""
        self._missing: dict[Piece, int] = {}
        """How many of its gradients have not arrived."""
        self._ready: list[tuple[Piece, Any]] = []
        """Pieces to be updated, with a mark behind what computes their last gradient."""

    def watch(self, shards: Iterable[Shard]) -> None:
        """Have `arrived` called for those of `shards` that need gradients."""
        for shard in shards:
            if shard.parameter.requires_grad:
                self._handles.append(shard.parameter.register_post_accumulate_grad_hook(self._arrived))

    def begin(self, shard: Shard, pieces: Callable[[], Iterable[Piece]]) -> None:
        """Count the gradient of `shard`, and begin the pieces that have all of theirs now; `pieces()` are those of a
        step."""
        with self._idle:
            if not self._of:
                self._await(pieces())
            for piece in self._of.get(shard, ()):
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    self._ready.append((piece, _behind_the_gradient_of(shard)))
            if self._ready and not self._working:
                if not self._threads:
                    self._threads.start()
                self._working = True
                self._threads.submit(self._work)

    def join(self) -> None:
        """Wait for all updates that have begun, and begin a new step. Raises their first error."""
        with self._idle:
            self._of = {}
            while self._working:
                self._idle.wait()
            error, self._error, self._ready = self._error, None, []
        if error is not None:
            raise error

    def _await(self, pieces: Iterable[Piece]) -> None:
        self._missing = {}
        for piece in pieces:
            shards = [shard for shard, _, _ in piece.cuts() if shard.parameter.requires_grad]
            self._missing[piece] = len(shards)
            for shard in shards:
                self._of.setdefault(shard, []).append(piece)

    def _work(self) -> None:
        while True:
            with self._idle:
                ready, self._ready = self._ready, []
                if not ready or self._error is not None:
                    self._working = False
                    self._idle.notify_all()
                    return
            try:
                for _, mark in ready:
                    if mark is not None:
                        mark.synchronize()
                with _beside_the_backward({piece.block.kind.device for piece, _ in ready}):
                    self._carry_out([piece for piece, _ in ready])
            except BaseException as error:  # `join` raises it
                self._error = error


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _behind_the_gradient_of(shard: Shard) -> Any:
    """Return an event behind all that has been launched, or None without a GPU: FSDP's copy of a gradient to host
    memory may be under way too."""
    if shard.device.type != "cpu":
        return marked(shard.device)
    return marked(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_initialized() else None


@contextmanager
def _beside_the_backward(devices: set[torch.device]) -> Iterator[None]:
    """Launch copies on a stream that does not wait for the rest of the backward."""
    of_cuda = [device for device in devices if device.type == "cuda"]
    if not of_cuda:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(of_cuda[0])):
        yield
