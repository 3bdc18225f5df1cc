"""The pass of a step over states of unmanaged parameters: what lies in host memory beside its parameters is
updated in place; all else passes through slots, piece by piece, with the next ones on their way in and the last ones on
their way out.

It knows memory and transfers, and in which order; not where gradients come from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from hetmem.cpu.workers import WorkerPool
from hetmem.memory.chunk import Role, elements
from hetmem.memory.nvme_store import NvmeStore
from hetmem.optim.options import ParameterUpdate, Rule
from hetmem.optim.shards import Shard
from hetmem.optim.state_memory import StateBlock, StateMemory
from hetmem.optim.states_report import PassCounts


@dataclass(slots=True, eq=False)
class ShardUpdate:
    """One parameter's share of a step: its gradient as `Shard.gradient` returns it, the options of its group, and its
    scalars before and, once it is done, after."""

    shard: Shard
    group: dict[str, Any]
    gradient: torch.Tensor
    seen: tuple[torch.Tensor, int]
    """What `p.grad` was, and its version."""
    before: dict[str, Any]
    roles: tuple[Role, ...]
    fresh: frozenset[str]
    """The states that are new: zero, and unknown to the rule."""
    after: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of the states in `block`: whole pages, or what is updated in place."""

    block: StateBlock
    start: int
    stop: int

    @property
    def in_place(self) -> bool:
        """Whether it passes through no slot."""
        return self.block.in_place

    def concerns(self, updates: Container[Shard]) -> bool:
        """Return whether a parameter in it is among `updates`."""
        return any(shard in updates for shard, _, _ in self.cuts())

    def cuts(self) -> Iterator[tuple[Shard, slice, slice]]:
        """Yield each parameter in it: its elements that are in the piece, and where they are in it."""
        for shard, offset in zip(self.block.shards, self.block.offsets, strict=True):
            start, stop = max(self.start, offset), min(self.stop, offset + shard.numel)
            if start < stop:
                yield shard, slice(start - offset, stop - offset), slice(start - self.start, stop - self.start)


@dataclass(slots=True, eq=False)
class Passing:
    """A piece in `slot`, on its way in or out: `transfers` of the drive, and a `mark` behind those of the device."""

    piece: Piece
    slot: memoryview
    flats: dict[str, torch.Tensor]
    """What is in the slot, 1-D: states by their names, `PARAM` and `GRAD`."""
    transfers: list[Future[int]] = field(default_factory=list)
    mark: Any = None
    written: bool = False
    """Whether its states are on their way to the drive, or there."""

    def ended(self) -> bool:
        """Return whether nothing of it is under way."""
        return all(each.done() for each in self.transfers) and (self.mark is None or self.mark.query())

    def settle(self) -> None:
        """Wait until nothing of it is under way. Raises the first error."""
        errors = [error for each in self.transfers if (error := each.exception()) is not None]
        if self.mark is not None:
            self.mark.synchronize()
        if errors:
            raise errors[0]


PARAM, GRAD = "param", "grad"


class StatePass:
    """Passes over `memory` by `rule`, on the threads of `workers`. After an error of a transfer each piece is either
    before or after its update, and `carry_out` called again with the same updates does the rest. `apart`: parameters
    that are updated in place are a piece each."""

    def __init__(self, memory: StateMemory, rule: Rule, workers: WorkerPool, *, apart: bool) -> None:
        self._memory, self._rule, self._workers, self._apart = memory, rule, workers, apart
        self.done: set[Piece] = set()
        """The pieces that are updated in the step that is under way or has failed."""
        self.corrupt = False
        """Whether an update has failed half-way: its parameters and states belong to no step."""
        self._slots: list[memoryview] = []
        self._writing: deque[Passing] = deque()
        self._moved = {"nvme_read": 0, "nvme_write": 0, "device_to_host": 0, "host_to_device": 0}
        self._update_seconds, self._updated = 0.0, 0

    def counts(self) -> PassCounts:
        """Return what has been done so far."""
        return PassCounts(self._updated, self._update_seconds, {**self._moved})

    def carry_out(
        self, updates: dict[Shard, ShardUpdate], grad_scale: float, pieces: Iterable[Piece] | None = None
    ) -> None:
        """Update all in `updates`, or `pieces` of them, with gradients times `grad_scale`, and set what they have
        `after`."""
        self.write_back()
        self._slots = [*self._memory.slots]
        todo = [piece for piece in self.pieces() if piece.concerns(updates)] if pieces is None else pieces
        todo = [piece for piece in todo if piece not in self.done]
        waiting, opened = deque(piece for piece in todo if not piece.in_place), deque[Passing]()
        try:
            self._open(waiting, opened, updates)
            self._run(updates, [(piece, None) for piece in todo if piece.in_place], grad_scale)
            while opened:
                passed = opened.popleft()
                passed.settle()
                self._run(updates, [(passed.piece, passed)], grad_scale)
                self._write(passed, updates)
                self._open(waiting, opened, updates)
            assert not waiting, "a slot is free as soon as none is in use"
            self.write_back()
        finally:
            for passed in opened:  # their slots are used again
                wait_for(passed)

    def write_back(self) -> None:
        """Wait until all that was updated is at home. Writes again what a drive has refused; raises its error if it
        does so again."""
        for passed in self._writing:
            if not passed.written or any(each.exception() for each in passed.transfers):
                self._write_states(passed)
        while self._writing:
            self._writing[0].settle()
            self._slots.append(self._writing.popleft().slot)

    def forget(self) -> None:
        """Begin a new step."""
        self.done.clear()

    def pieces(self) -> Iterator[Piece]:
        """Yield those of a step of all parameters."""
        size = self._memory.piece_elements
        for block in self._memory.blocks:
            if not block.in_place:
                yield from (Piece(block, at, min(at + size, block.numel)) for at in range(0, block.numel, size))
            elif self._apart:
                for shard, offset in zip(block.shards, block.offsets, strict=True):
                    yield Piece(block, offset, offset + shard.numel)
            else:
                yield Piece(block, 0, block.numel)

    def _run(
        self, updates: dict[Shard, ShardUpdate], pieces: list[tuple[Piece, Passing | None]], grad_scale: float
    ) -> None:
        """Compute the updates of `pieces`, which are in their slots or in place."""
        made = [each for piece, passed in pieces for each in self._updates_of(piece, passed, updates, grad_scale)]
        made += [_of_nothing(each) for each in updates.values() if not each.shard.numel and each.after is None]
        if made:
            began = time.perf_counter()
            try:
                self._workers.run(self._rule.tasks([given for _, given in made]))
            except BaseException:
                self.corrupt = True
                raise
            self._update_seconds += time.perf_counter() - began
            self._updated += sum(given.param.numel() for _, given in made)
        for update, given in made:
            update.after = {name: value for name, value in given.state.items() if name not in given.states}
        self.done.update(piece for piece, _ in pieces)

    def _updates_of(
        self, piece: Piece, passed: Passing | None, updates: dict[Shard, ShardUpdate], grad_scale: float
    ) -> Iterator[tuple[ShardUpdate, ParameterUpdate]]:
        flats = {} if passed is None else passed.flats
        for role in piece.block.kind.roles:
            if role.name not in flats:
                flats[role.name] = piece.block.flat(role, piece.start, piece.stop)
        for shard, own, here in piece.cuts():
            if (update := updates.get(shard)) is None:
                continue
            yield (
                update,
                ParameterUpdate(
                    update.group,
                    {name: copied(value) for name, value in update.before.items()},
                    flats[PARAM][here] if PARAM in flats else shard.memory()[own],
                    flats[GRAD][here] if GRAD in flats else update.gradient[own],
                    {role.name: flats[role.name][here] for role in piece.block.kind.roles},
                    grad_scale,
                    update.fresh,
                    shard.number,
                ),
            )

    # ---- slots -------------------------------------------------------------------------------------------------

    def _open(self, waiting: deque[Piece], opened: deque[Passing], updates: dict[Shard, ShardUpdate]) -> None:
        """Begin to bring pieces in, as long as slots are free; wait for one if none is on its way in."""
        while waiting:
            while self._writing and (self._writing[0].ended() or not (self._slots or opened)):
                self._writing[0].settle()
                self._slots.append(self._writing.popleft().slot)
            if not self._slots:
                return
            passed = self._passing(waiting[0], self._slots.pop())
            opened.append(passed)
            self._fetch(passed, updates)
            waiting.popleft()

    def _passing(self, piece: Piece, slot: memoryview) -> Passing:
        kind, numel, at = piece.block.kind, piece.stop - piece.start, 0
        flats: dict[str, torch.Tensor] = {}
        for name in (PARAM, GRAD) if kind.device.type != "cpu" else ():
            flats[name] = elements(slot, kind.dtype, numel, at)
            at += numel * kind.dtype.itemsize
        for role in kind.roles if piece.block.extent is not None else ():
            flats[role.name] = elements(slot, role.dtype or kind.dtype, numel, at)
            at += numel * kind.itemsize(role)
        return Passing(piece, slot, flats)

    def _fetch(self, passed: Passing, updates: dict[Shard, ShardUpdate]) -> None:
        piece, block = passed.piece, passed.piece.block
        if block.extent is not None:
            for role in block.kind.roles:
                into, store = bytes_of(passed.flats[role.name]), self._store
                passed.transfers.append(store.read(block.part(role, piece.start, piece.stop), into))
                self._moved["nvme_read"] += into.nbytes
        if PARAM in passed.flats:
            for shard, own, here in piece.cuts():
                if (update := updates.get(shard)) is not None:
                    for name, source in ((PARAM, shard.memory()), (GRAD, update.gradient)):
                        passed.flats[name][here].copy_(source[own], non_blocking=True)
                        self._moved["device_to_host"] += (own.stop - own.start) * source.itemsize
            passed.mark = marked(block.kind.device)

    def _write(self, passed: Passing, updates: dict[Shard, ShardUpdate]) -> None:
        self._writing.append(passed)
        passed.mark = None
        if PARAM in passed.flats:
            for shard, own, here in passed.piece.cuts():
                if shard in updates:
                    shard.memory()[own].copy_(passed.flats[PARAM][here], non_blocking=True)
                    self._moved["host_to_device"] += (own.stop - own.start) * shard.dtype.itemsize
            passed.mark = marked(passed.piece.block.kind.device)
        self._write_states(passed)

    def _write_states(self, passed: Passing) -> None:
        piece, block = passed.piece, passed.piece.block
        passed.written, passed.transfers = False, []
        for role in block.kind.roles if block.extent is not None else ():
            source = bytes_of(passed.flats[role.name])
            passed.transfers.append(self._store.write(block.part(role, piece.start, piece.stop), source))
            self._moved["nvme_write"] += source.nbytes
        passed.written = True

    @property
    def _store(self) -> NvmeStore:
        assert self._memory.store is not None, "a block on NVMe"
        return self._memory.store


def _of_nothing(update: ShardUpdate) -> tuple[ShardUpdate, ParameterUpdate]:
    """Return the update of a parameter of which this process has no elements: only its steps are counted."""
    numbers = {name: copied(value) for name, value in update.before.items()}
    nothing = torch.empty(0, dtype=update.shard.dtype, device="cpu")
    states = {role.name: nothing for role in update.roles}
    return update, ParameterUpdate(update.group, numbers, nothing, nothing, states, fresh=update.fresh)


def wait_for(passed: Passing) -> None:
    """Wait until nothing of `passed` is under way, whatever becomes of it."""
    for each in passed.transfers:
        each.exception()
    if passed.mark is not None:
        passed.mark.synchronize()


def marked(device: torch.device) -> Any:
    """Return an event behind all that the current stream of `device` was asked for."""
    event = torch.Event(device)
    event.record()
    return event


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a 1-D tensor."""
    memory: Any = flat.view(torch.uint8).numpy()
    return memoryview(memory)


def copied(value: Any) -> Any:
    """Return a tensor's clone, and all else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same_inputs(update: ShardUpdate, other: ShardUpdate) -> bool:
    """Return whether both stand for the same update."""
    return update.seen[0] is other.seen[0] and update.seen[1] == other.seen[1] and update.group == other.group
