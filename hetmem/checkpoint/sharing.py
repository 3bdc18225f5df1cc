"""The part of one rank in a file that a group of ranks saves or loads; a model of one process is the whole group.

Homes are there once for all ranks. So each rank that saves writes blocks of them to the file, and rank 0 the rest:
what each rank has for itself (buffers, step counts, `extra`). In loading, each rank checks one of every N blocks, and
brings one of every N to the homes; what it has for itself each reads whole.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch

from hetmem.checkpoint.background import PeerHandle, SaveHandle
from hetmem.checkpoint.disk import BlockBuffer, is_memory, run, write_at
from hetmem.checkpoint.layout import Stored
from hetmem.errors import ManageError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, Role, elements
from hetmem.memory.interrupts import HELD_BACK
from hetmem.ranks.group import Ranks
from hetmem.ranks.saves import SharedBlocks
from hetmem.schedule.trace import Tier

T = TypeVar("T")


class Sharing:
    """What the ranks that manage `model` share of a file; none do for a model of one process."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raise `ManageError` for a model with parts that are managed apart, if a group has one of them."""
        found = registry.managed_among(model.parameters()) if isinstance(model, torch.nn.Module) else {}
        of_groups = [each for each in found if each.runtime.memory.ranks is not None]
        if of_groups and len(found) > 1:
            raise ManageError("a group of ranks manages a part of this model: save and load that part alone")
        self._by: Interception | None = of_groups[0] if of_groups else None
        self._ranks: Ranks | None = None if self._by is None else self._by.runtime.memory.ranks

    def save(self, path: str, write: Callable[[], None]) -> None:
        """Do `write()`, which writes the file `path`, on one rank; the others of its machine `write_blocks` with it."""
        if self._ranks is None:
            write()
        elif self._ranks.machines is None or self._ranks.machines.index == 0:
            self._ranks.saves.together(path, write, partial(_write_blocks, path, self._ranks))

    def write_blocks(
        self, fd: int, path: str, data_start: int, stored: Iterable[Stored], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, list[int]]:
        """Write those of `tensors` that all ranks see alike in homes, with the ranks that save `path` too, and return
        the CRC-32 of every block of each. The rest, which lies elsewhere or in another order than in the file, and what
        the program of this rank has written and that is not home yet, is not written."""
        if self._ranks is None:
            return {}
        mapping, own = self._ranks.pool.mapping, {*self._ranks.pool.written()}
        shared, blocks = list[Stored](), list[tuple[int, int, int]]()
        for one in stored:
            tensor = tensors[one.name]
            start = tensor.data_ptr() - mapping.private_address
            if self.home(tensor) is None or not is_memory(tensor):
                continue
            pages = range(start // mmap.PAGESIZE, -(-(start + one.nbytes) // mmap.PAGESIZE))
            if own.isdisjoint(pages):
                shared.append(one)
                first = data_start + one.start
                blocks += ((start + block.offset, block.nbytes, first + block.offset) for block in one.blocks())
        write = partial(_write_blocks, path, self._ranks)
        checks = iter(self._ranks.saves.offered(path, fd, blocks, write))
        return {one.name: [next(checks) for _ in one.blocks()] for one in shared}

    def begin_save(self, path: str, write: Callable[[ExitStack], SaveHandle]) -> SaveHandle:
        """Return the handle of a save of `path` in the background: on one rank that of `write(file)`, which closes
        `file` at the end; on the others of its machine one that waits for that."""
        if self._ranks is None:
            return write(ExitStack())
        if self._ranks.machines is not None and self._ranks.machines.index:
            others = SaveHandle(path, -1, 0, 0, {})
            others.end()
            return others
        saves, waits = self._ranks.saves, self._ranks.waits
        key = saves.key(path)
        if self._ranks.rank:
            peer = PeerHandle(path, partial(saves.is_noted, key), partial(saves.await_rank_0, path, key))
            saves.end_last = peer.end_unseen
            return peer
        file = ExitStack()
        file.push(lambda kind, error, at: saves.note(key, failed=error is not None))
        handle = saves.begin(key, lambda: write(file))
        waits.saves = lambda: not handle.done()
        return handle

    def together(self, what: str, do: Callable[[], T], said: Callable[[T], str] = str) -> T:
        """Return `do()`, once all ranks have done it, as `Ranks.together` does."""
        return do() if self._ranks is None else self._ranks.together(what, do, said)

    @property
    def part(self) -> slice:
        """The blocks that this rank handles, of any list of them: one of every N."""
        return slice(None) if self._ranks is None else slice(self._ranks.rank, None, self._ranks.count)

    def owns(self, number: int) -> bool:
        """Return whether this rank does what has this `number`, as one of every N."""
        return self._ranks is None or number % self._ranks.count == self._ranks.rank

    def home(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the memory that all ranks share and of which this one sees `tensor`; None if it is its own."""
        if self._ranks is None or not tensor.is_cpu or not tensor.numel():
            return None
        mapping = self._ranks.pool.mapping
        start = tensor.data_ptr() - mapping.private_address
        if not 0 <= start < mapping.nbytes:
            return None
        flat = elements(mapping.buffer(start, tensor.nbytes), tensor.dtype, tensor.numel())
        return flat.as_strided(tensor.shape, tensor.stride())

    def shared(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `tensors`, those that lie in homes in the memory that all ranks share."""
        homes = ((name, tensor, self.home(tensor)) for name, tensor in tensors.items())
        return {name: tensor if home is None else home for name, tensor, home in homes}

    def written(self) -> set[Chunk]:
        """Return the chunks that the program has written to, whose homes have not got that yet: they are in the file as
        this rank sees them."""
        ranked = None if self._by is None else self._by.gradients.ranked
        return set() if ranked is None else ranked.writes.chunks()

    def bring_writes_home(self) -> None:
        """Bring what the programs of all ranks have written alike home, which would hide what is loaded there. Raises
        `PeerError` if they have written something else."""
        if self._by is not None and self._by.gradients.ranked is not None:
            self._by.gradients.ranked.writes.exchange("the begin of loading")

    @HELD_BACK
    def renew_copies(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop the copies of `parameters`, whose homes all ranks have filled; each 16-bit copy is cast by one rank."""
        if self._by is None or self._ranks is None:
            return
        with self._by.runtime.unwatched():
            for managed in registry.managed_among(parameters)[self._by]:
                if Role.COMPUTE in managed.chunk.homes and self.owns(managed.chunk.spec.index):
                    managed.at_home(Role.COMPUTE).copy_(managed.at_home(Role.PARAM))
                self._by.runtime.writes.by_loading(managed, recasts=False)
                for role in [role for role, home in managed.chunk.homes.items() if home.tier is Tier.NVME]:
                    self._by.runtime.traffic.superseded(managed.chunk, role)


def _write_blocks(path: str, ranks: Ranks, blocks: SharedBlocks) -> None:
    """Take and write blocks of the file `path` until none is left."""

    def write_one(_: BlockBuffer) -> None:
        if (taken := blocks.take()) is None:
            return
        number, (start, nbytes, offset) = taken
        memory = ranks.pool.mapping.buffer(start, nbytes)
        write_at(blocks.file, path, memory, offset)
        blocks.wrote(number, zlib.crc32(memory))
        ranks.waits.sign()

    run(write_one for _ in range(blocks.left))
