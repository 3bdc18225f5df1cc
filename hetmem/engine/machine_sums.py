"""Adds the gradients of the machines that a group spans: each has the sum of its ranks in its homes, and gets that of
all, in the order of machines. What was there before a backward is in the sum of the first machine alone.

A thread exchanges a chunk once all ranks of this machine have passed their last turn of it, while the backward goes on;
what is left when that has ended, the thread that trains does. All machines take chunks in one order: that in which the
first machine had made the gradients of its last backward.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetmem.engine.ranked_writes import RankedWrites
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.ranks.group import Ranks
from hetmem.ranks.words import Doing

if TYPE_CHECKING:
    from hetmem.ranks.machines import Machines  # imports torch.distributed, which one process does without

_ANNOUNCED = 6
"""Bytes in front of what a machine says of each parameter: what it does, whether its program got states, and a hash of
what that has written."""
_PAUSE_SECONDS = 1e-3
"""How often the thread looks whether the next chunk is complete."""


class MachineSums:
    """The sums of one rank, for the chunks that are its part of those of its machine."""

    def __init__(
        self, ranks: Ranks, machines: Machines, parameters: Sequence[ManagedParameter], writes: RankedWrites
    ) -> None:
        self._ranks, self._machines, self._writes = ranks, machines, writes
        self._parameters = parameters
        self._numbers: dict[Chunk, list[int]] = {}
        for number, managed in enumerate(parameters):
            self._numbers.setdefault(managed.chunk, []).append(number)
        own = (chunk for chunk in self._numbers if chunk.spec.index % ranks.count == ranks.rank)
        self._order = sorted(own, key=lambda chunk: -chunk.spec.index)
        """The chunks that this rank exchanges, in the order in which all machines do."""
        self._places = {chunk: place for place, chunk in enumerate(self._order)}
        self._last_made: dict[Chunk, None] = {}
        """Those of which this rank has made gradients in this backward, in the order of the last one of each."""
        self._left: deque[Chunk] = deque()
        """Those that are still to be exchanged in this backward."""
        self._backward, self._is_announced = 0, False
        self.any_got_states = False
        """Whether the program of any machine ever got the states of the optimizer that steps."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._computed = True

    def made(self, chunk: Chunk) -> None:
        """Note that this rank has made a gradient of `chunk`."""
        self._last_made.pop(chunk, None)
        self._last_made[chunk] = None

    def all_step(self) -> bool:
        """Return whether all machines have come to a step, as this one has. If not, the next backward of this one is
        that of the others. Raises `PeerError` as `begin` and `end` do."""
        self._is_announced = not self._announce(Doing.STEP, self._machines)
        return not self._is_announced

    def begin(self, backward: int, *, passes_unused: bool) -> None:
        """Enter `backward`, and exchange what is complete while it runs. `passes_unused`: nothing is added to what no
        backward has given a gradient yet."""
        self._backward, self._computed, self._error = backward, False, None
        self._stop = threading.Event()
        self._last_made.clear()
        filled = self._ranks.words.filled
        self._left = deque(chunk for chunk in self._order if not passes_unused or filled[self._numbers[chunk]].any())
        self._thread = threading.Thread(target=self._run_beside, name="hetmem machines", daemon=True)
        self._thread.start()

    def compare(self, number: int, what: str) -> None:
        """Raise `PeerError` that names `what`, if another machine has another `number`."""
        rows = self._machines.gathered(torch.tensor([number], device="cpu"), "what the other machines do")
        self._machines.compare(rows.numpy(), lambda at: what)

    def computed(self, late: Sequence[int]) -> None:
        """Note that this rank has made all gradients of its backward; `late`: the parameters of those that came
        late."""
        self._computed = True
        if late:
            self._ranks.words.late[self._ranks.rank] = self._backward

    def abandon(self) -> None:
        """End a backward that an error has ended."""
        self._stop.set()

    def end(self, open_home: Callable[[Chunk], None]) -> bool:
        """Exchange what is left, once this machine has added all gradients. Return whether any machine has some that
        came late. Raises `PeerError` if another one is lost, or has begun the backward otherwise."""
        thread = self._thread
        assert thread is not None
        self._stop.set()
        self._machines.wait(lambda: not thread.is_alive(), "sums of gradients of the other machines")
        if self._error is not None:
            raise self._error
        while self._left:
            chunk = self._left[0]
            self._ranks.waits.until(partial(self._is_complete, chunk), "updates that other ranks compute")
            self._exchange(chunk, self._machines, open_home)
            self._left.popleft()
        any_late = self._agree()
        self._ranks.summed()
        return any_late

    # ---- inside ------------------------------------------------------------------------------------------------

    def _run_beside(self) -> None:
        beside = self._machines.beside()
        try:
            if not self._is_announced:
                self._announce(Doing.BACKWARD, beside)
            self._is_announced = False
            while self._left and self._awaits(self._left[0]):
                self._exchange(self._left[0], beside)
                self._left.popleft()
        except BaseException as error:
            self._error = error

    def _awaits(self, chunk: Chunk) -> bool:
        """Wait until `chunk` is complete. Return False if the thread that trains is to exchange it, which has come to
        the end, and may open a home."""
        while not self._is_complete(chunk):
            if self._stop.wait(_PAUSE_SECONDS) or self._ranks.words.error(self._ranks.rank):
                return False
        return Role.GRAD in chunk.homes and not self._stop.is_set()

    def _is_complete(self, chunk: Chunk) -> bool:
        """Return whether all ranks of this machine have passed their turns of `chunk`, and no update of an earlier step
        reads its gradients any more."""
        passed = bool((self._ranks.words.passed[:, self._numbers[chunk]] >= self._backward).all())
        return passed and self._ranks.updates.computed_by_all([chunk.spec.index])  # which makes what they wrote visible

    def _announce(self, doing: Doing, machines: Machines) -> bool:
        """Say what this machine has come to, and return whether all have come to a step. Raises `PeerError` if another
        one has gradients of other parameters, or has written something else."""
        there = self._ranks.words.has_gradient[self._ranks.rank]
        written = zlib.crc32(repr(sorted(self._writes.told.items())).encode()) if self._writes.told else 0
        got_states = self._ranks.words.handed_out.any()
        mine = np.concatenate([np.array([doing, got_states, *written.to_bytes(4, "little")], np.uint8), there])
        found = machines.gathered(torch.from_numpy(mine), "the other machines").numpy()
        self.any_got_states = bool(found[:, 1].any())
        if (found[:, 2:_ANNOUNCED] != found[0, 2:_ANNOUNCED]).any():
            raise self._writes.refuse_others(machines)
        machines.compare(found[:, _ANNOUNCED:], lambda at: f"whether {self._parameters[at].name}.grad is None")
        return bool((found[:, 0] == Doing.STEP).all())

    def _exchange(self, chunk: Chunk, machines: Machines, open_home: Callable[[Chunk], None] | None = None) -> None:
        """Give the home of the gradients of `chunk` the sums of all machines, and note which parameters have one."""
        words, numbers = self._ranks.words, self._numbers[chunk]
        made = np.array(words.filled[numbers] == self._backward)
        has: Any = machines.gathered(
            torch.from_numpy(made.view(np.uint8)), "which gradients the other machines have"
        ).numpy()
        new = has.any(axis=0).tolist()
        if not any(new):
            return
        if Role.GRAD not in chunk.homes:
            assert open_home is not None, "the thread leaves these"
            open_home(chunk)
        there = words.has_gradient[self._ranks.rank]
        spans = []
        for at, number in enumerate(numbers):
            if new[at]:
                managed = self._parameters[number]
                parts = [one for one in range(machines.count) if has[one, at] or (one == 0 and there[number])]
                spans.append((slice(managed.offset, managed.offset + managed.numel), parts))
                words.filled[number] = self._backward
        nbytes = machines.add(chunk.flat(Role.GRAD), sorted(spans, key=lambda span: span[0].start))
        self._ranks.figures.exchanged(nbytes, beside=not self._computed)

    def _agree(self) -> bool:
        """Take over the order of the first machine, and return whether any has gradients that came late."""
        late = bool((self._ranks.words.late == self._backward).any())
        made = [chunk for chunk in self._last_made if chunk in self._places]
        order = made + [chunk for chunk in self._order if chunk not in self._last_made]
        mine = torch.tensor([late, *map(self._places.__getitem__, order)], device="cpu")
        found = self._machines.gathered(mine, "the other machines").tolist()
        own = [*self._places]
        self._order = [own[place] for place in found[0][1:]]
        return any(row[0] for row in found)
