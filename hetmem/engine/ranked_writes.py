"""Takes what a program writes to homes that ranks share, and that all ranks have written alike, home.

Note "private pages": a page that the program writes is its rank's own, and the home keeps its values. Forwards of the
rank read what it has written, without the others. As a backward or a step begins, where all ranks come, they compare
hashes of their private pages; each copies its share of them home, and all show the home again.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Container, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from hetmem.base.units import format_size
from hetmem.engine.traffic import Traffic
from hetmem.errors import BudgetError, PeerError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of
from hetmem.memory.host_memory import free_host_bytes
from hetmem.ranks.group import Ranks, not_yet
from hetmem.schedule.trace import Tier

if TYPE_CHECKING:
    from hetmem.ranks.machines import Machines  # imports torch.distributed, which one process does without

PageOfHome = tuple[int, str, int]
"""Chunk, name of the role, and number of a page in that home: the same on all machines."""


class RankedWrites:
    """What the program of one rank of `ranks` has written to the homes of `chunks`."""

    def __init__(self, ranks: Ranks, chunks: list[Chunk], traffic: Traffic) -> None:
        self._ranks, self._chunks, self._traffic = ranks, chunks, traffic
        self.pages: list[int] = []
        """The numbers of the pages that the other ranks were told of, and that are not home yet."""
        self.told: dict[PageOfHome, int] = {}
        """What they were told of last, and the hash of each page."""
        self._announced: dict[ManagedParameter, int] = {}
        """The weights that the program was about to write to since it has told of its writes, and their bytes."""
        self._free_bytes = 0
        """What the host had left for each rank as the first of them was announced."""

    def refuse_without_room(self, parameters: Collection[ManagedParameter]) -> None:
        """Raise `BudgetError` before the program writes to `parameters`, if this rank's copies of their pages would
        take more than its part of what the host has left."""
        if not self._announced:
            self._free_bytes = free_host_bytes() // self._ranks.count
        new = {managed: _bytes_of(managed) for managed in parameters if managed not in self._announced}
        nbytes = sum(self._announced.values()) + sum(new.values())
        if nbytes > self._free_bytes:
            name = next((managed.name for managed in new), "weights")
            raise BudgetError(
                f"the program is about to write to {name}: copies of what it writes before the next backward or step, "
                f"which each of {self._ranks.count} ranks has until then, would take {format_size(nbytes)}, and the "
                f"machine has {format_size(self._free_bytes)} left for each. hetmem's optimizers, max_grad_norm=, "
                f"loss_scale=, hetmem.load and hetmem.load_weights need none"
            )
        self._announced |= new

    def tell(self) -> None:
        """Tell the other ranks what the program has written, as this one comes to a backward or a step, once all have
        compared what they were told in the last step, which this rank may have left before."""
        words, rank, mapping = self._ranks.words, self._ranks.rank, self._ranks.pool.mapping
        steps, own = words.steps, int(words.steps[rank])
        self._ranks.waits.until(lambda: bool((steps >= own).all()), "what ranks compare in a step")
        self._announced.clear()
        pages = self._find()
        cast = [chunk for chunk, role, _ in self._homes_of(pages) if role == Role.PARAM and Role.COMPUTE in chunk.homes]
        for chunk in cast:
            chunk.recast()
        self.pages = self._find() if cast else pages
        hashes = [*map(mapping.hash_of, self.pages)]
        words.page_hashes[rank, self.pages] = hashes
        words.wrote[rank] = len(self.pages)
        if self._ranks.machines is not None:
            self.told = self._without_places(dict(zip(self.pages, hashes, strict=True)))

    def compare(self) -> None:
        """Raise `PeerError` if the program of another rank has written something else. All ranks have told."""
        words, counts = self._ranks.words, self._ranks.words.wrote
        if not counts.any():
            return
        hashes = words.page_hashes
        mine = hashes[:, self.pages]
        if len(self.pages) and (counts == counts[0]).all() and (mine == mine[0]).all():
            return
        page = int((hashes != hashes[0]).any(axis=0).argmax())
        words.page_shown[self._ranks.rank] = self._ranks.pool.mapping.seen(page)
        self._ranks.brought("what the program has written")
        differ = words.page_shown != words.page_shown[0]
        rank = int(differ.any(axis=1).argmax())
        first = self._ranks.waits.first
        name = self._name(page * mmap.PAGESIZE + int(differ[rank].argmax()))
        raise PeerError(
            f"the program has written other values to {name} on rank {first + rank} than on rank {first}, or on one of "
            f"them only: write alike on all ranks, as in replicas"
        )

    def refuse_others(self, machines: Machines) -> PeerError:
        """Return the error for writes that differ between `machines`, all of which call this."""
        told = machines.gathered_objects(self.told)
        key = next(key for key in sorted({*chain(*told)}) if any(one.get(key) != told[0].get(key) for one in told))
        seen = [np.frombuffer(page, np.uint8) for page in machines.gathered_objects(self._seen(key))]
        other = next(at for at, page in enumerate(seen) if page.tobytes() != seen[0].tobytes())
        at = int((seen[0] != seen[other]).argmax()) if len(seen[0]) == len(seen[other]) else 0
        home = self._home(key)
        name = key[1] if home is None else _name_in(home[0], home[1], key[2] * mmap.PAGESIZE + at)
        return PeerError(
            f"the program has written other values to {name} on machine {machines.names[other]} than on machine "
            f"{machines.names[0]}, or on one of them only: write alike on all ranks, as in replicas"
        )

    def bring_home(self) -> None:
        """Bring what all ranks have written alike home; each copies its share."""
        if not self.pages:
            return
        ranks, mapping, pages = self._ranks, self._ranks.pool.mapping, self.pages
        mapping.bring_home(np.array_split(pages, ranks.count)[ranks.rank].tolist())
        ranks.brought("the writes of the program at home")
        mapping.show_home(pages)
        ranks.words.page_hashes[ranks.rank, pages] = 0
        self.pages = []
        for chunk, role, _ in self._homes_of(pages):
            if role == chunk.operand or chunk.homes[role].tier is Tier.NVME:
                self._traffic.superseded(chunk, role)

    def exchange(self, where: str) -> None:
        """Bring what all ranks have written alike home, as all come to `where`. Raises what `compare` does."""
        with self._ranks.waits.at(where):
            self.tell()
            self._ranks.meet(where)
            self.compare()
            self.bring_home()

    def refuse(self) -> None:
        """Raise `ManageError` if the program has written within a backward; what it has written is dropped."""
        if pages := self._find():
            mapping = self._ranks.pool.mapping
            first = pages[0] * mmap.PAGESIZE
            name = self._name(first + mapping.first_difference(pages[0]))
            mapping.show_home(pages)
            raise not_yet(f"a write of the program to {name} within a backward")

    def refuse_in(self, begun: Container[Chunk]) -> None:
        """Raise RuntimeError if the program has written to chunks whose updates of this step have `begun`; what it has
        written is dropped."""
        first = next((first for chunk, _, first in self._homes_of(self.pages) if chunk in begun), None)
        if first is None:
            return
        mapping = self._ranks.pool.mapping
        page = next(page for page in self.pages if (page + 1) * mmap.PAGESIZE > first)
        name = self._name(page * mmap.PAGESIZE + mapping.first_difference(page))
        mapping.show_home(self.pages)
        raise RuntimeError(
            f"the program has written to {name}, or beside it, after updates had begun (overlap=): write before the "
            f"backward or after step(), or set overlap='off'"
        )

    def refuse_in_compute(self, managed: ManagedParameter) -> None:
        """Raise `ManageError` for a write of an operator to the device copy of `managed`; the home has not got it."""
        managed.version = managed.counter._version
        raise not_yet(f"a write of the program to {managed.name} within a forward")

    def chunks(self) -> set[Chunk]:
        """Return the chunks that the program has written to and that are not home yet."""
        return {chunk for chunk, _, _ in self._homes_of(self._find())}

    # ---- inside ------------------------------------------------------------------------------------------------

    def _find(self) -> list[int]:
        return self._ranks.pool.written()

    def _homes_of(self, pages: list[int]) -> Iterator[tuple[Chunk, Role, int]]:
        """Yield each home that lies in any of `pages`: chunk, role, and its offset."""
        start, sorted_pages = self._ranks.pool.mapping.address, np.array(pages, np.int64)
        for chunk in self._chunks if pages else ():
            for role, home in [*chunk.homes.items()]:
                first = address_of(home.memory) - start
                ends = first // mmap.PAGESIZE, -(-(first + chunk.home_nbytes(role)) // mmap.PAGESIZE)
                if np.subtract(*np.searchsorted(sorted_pages, ends)):
                    yield chunk, role, first

    def _without_places(self, hashes: dict[int, int]) -> dict[PageOfHome, int]:
        """Return `hashes` of pages by what these are in their homes, which are elsewhere on each machine."""
        found = {}
        for chunk, role, first in self._homes_of([*hashes]):
            begin = first // mmap.PAGESIZE
            for page in range(begin, -(-(first + chunk.home_nbytes(role)) // mmap.PAGESIZE)):
                if page in hashes:
                    found[chunk.spec.index, role.name, page - begin] = hashes[page]
        return found

    def _seen(self, page: PageOfHome) -> bytes:
        """Return what the program sees in `page`; nothing, if this machine has no such home."""
        home = self._home(page)
        return b"" if home is None else bytes(self._ranks.pool.mapping.seen(home[2] // mmap.PAGESIZE + page[2]))

    def _home(self, page: PageOfHome) -> tuple[Chunk, Role, int] | None:
        """Return the home that has `page`: chunk, role, and its offset."""
        for chunk in self._chunks:
            for role, home in chunk.homes.items():
                if (chunk.spec.index, role.name) == page[:2]:
                    return chunk, role, address_of(home.memory) - self._ranks.pool.mapping.address
        return None

    def _name(self, offset: int) -> str:
        """Return what lies at `offset`."""
        for chunk, role, first in self._homes_of([offset // mmap.PAGESIZE]):
            if first <= offset < first + chunk.home_nbytes(role):
                return _name_in(chunk, role, offset - first)
        return "the memory of the group"


def _bytes_of(managed: ManagedParameter) -> int:
    """Return the bytes at home that a write to a weight changes: its own, and those of its 16-bit copy."""
    chunk = managed.chunk
    roles = (Role.PARAM, Role.COMPUTE) if Role.COMPUTE in chunk.homes else (Role.PARAM,)
    return managed.numel * sum(chunk.dtype_of(role).itemsize for role in roles)


def _name_in(chunk: Chunk, role: Role, offset: int) -> str:
    """Return what lies at `offset`, in bytes, in the home of `role` of `chunk`."""
    at = offset // chunk.dtype_of(role).itemsize
    after = (each for each in chunk.parameters if each.offset + each.numel > at)
    name = next((each.name for each in after), chunk.label(role))
    return name + {Role.PARAM: "", Role.GRAD: ".grad"}.get(role, f", its {role.name}")
