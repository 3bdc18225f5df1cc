"""Finds the ranks that manage a model together, by torch's process group, compares what they ask for, and opens the
memory that they share. After that a step has no collective: ranks meet in their memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hetmem.base.config import missing_of_launcher, rank_timeout_seconds, restarts, world_size
from hetmem.base.units import format_size, round_up
from hetmem.errors import BudgetError, ManageError, PeerError
from hetmem.memory.nvme_io import open_unnamed
from hetmem.ranks.drive import SharedDrive
from hetmem.ranks.group import Ranks
from hetmem.ranks.machines import Machines
from hetmem.ranks.memory import SharedMapping, SharedPool, make_file, open_file
from hetmem.ranks.waits import Waits
from hetmem.ranks.words import Words

T = TypeVar("T")
_PATIENCE_SECONDS = 1800.0


class JoinedRanks:
    """The ranks of a process group, before they share memory."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def await_all(self) -> None:
        """Wait until all ranks are here. Raises `PeerError`, which names those that are not, as far as the group's
        backend can tell."""
        if dist.get_backend(self._group) != "gloo":
            return
        patience = timedelta(seconds=rank_timeout_seconds() or _PATIENCE_SECONDS)
        try:
            dist.monitored_barrier(self._group, patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise PeerError(f"not all ranks have come to hetmem.manage (HETMEM_RANK_TIMEOUT): {error}") from error

    def exchange(self, mine: T) -> list[T]:
        """Return what each rank gives, by rank."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def together(self, what: str, do: Callable[[], T]) -> T:
        """Return `do()`, once all ranks have done it. Raises its error, or `PeerError` for that of another rank."""
        try:
            result = do()
        except Exception as error:
            self.exchange(f"{type(error).__name__}: {error}")
            raise
        self.refuse(self.exchange(""), f"could not {what}")
        return result

    def refuse(self, told: Sequence[str], what: str) -> None:
        """Raise `PeerError` if any rank has told an error."""
        for rank, text in enumerate(told):
            if text:
                raise PeerError(f"rank {rank} {what}: {text}")

    def compare(self, facts: Sequence[tuple[str, str]]) -> None:
        """Raise `PeerError` with the first of `facts`, names and values, that differs from those of rank 0."""
        of_all = self.exchange([*facts])
        for rank, theirs in enumerate(of_all):
            for one, other in zip_longest(of_all[0], theirs, fillvalue=("", "nothing")):
                if one != other:
                    name = one[0] or other[0]
                    first, second = (value if label == name else "nothing" for label, value in (one, other))
                    raise PeerError(f"{name} is {first} on rank 0 and {second} on rank {rank}: all ranks need the same")

    def share(self, buffer: torch.Tensor) -> None:
        """Give `buffer`, in host memory, the values of rank 0."""
        with torch.no_grad():
            values = buffer.detach().contiguous()
            dist.broadcast(values, group=self._group, group_src=0)
            buffer.copy_(values)

    def open(self, home_bytes: int, parameters: int, chunks: int, drive: tuple[str, int] | None = None) -> Ranks:
        """Share memory for homes of up to `home_bytes` with the ranks of this machine, and find their counterparts on
        others; also a file of so many bytes in a directory, of `drive`. Raises `ManageError` if a rank cannot open the
        memory of the first one of its machine, and `BudgetError` if that cannot make the file."""
        machines = self._machines()
        index = next(at for at, (_, ranks) in enumerate(machines) if self.rank in ranks)
        here = machines[index][1]
        first, own = here[0], self.rank - here[0]
        nbytes = max(mmap.PAGESIZE, home_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        on_drive = 0 if drive is None else round_up(drive[1], mmap.PAGESIZE)
        sizes = len(here), parameters, chunks, (nbytes + on_drive) // mmap.PAGESIZE
        skipped = round_up(Words(None, *sizes).nbytes, mmap.PAGESIZE)
        nonce, descriptor, drive_file, refused = secrets.randbits(62), -1, -1, ""
        if own == 0:
            drive_file, refused = (-1, "") if drive is None else _make_on_drive(drive[0], on_drive)
            descriptor, failed = _make_in_memory(skipped + nbytes, nonce)
            refused = refused or failed
        offers = self.exchange((os.getpid(), descriptor, nonce, drive_file, refused))
        if failed := next((offer[-1] for offer in offers if offer[-1]), ""):
            raise BudgetError(failed)
        text = ""
        if own > 0:
            descriptor, text = _open(first, offers[first][:3])
            if drive is not None and not text:
                drive_file = open_file(offers[first][0], offers[first][3])
        for rank, refusal in enumerate(self.exchange(text)):
            if refusal:
                raise ManageError(f"rank {rank} cannot share the memory of {refusal}")
        patience = rank_timeout_seconds() or _PATIENCE_SECONDS
        there = None if drive is None else (drive_file, on_drive)

        def mapped() -> tuple[Words, Waits, SharedPool]:
            words = Words(memoryview(SharedMapping(descriptor, 0, skipped).buffer(0, skipped)), *sizes)
            waits = Waits(words, own, [offers[rank][0] for rank in here], patience, first)
            mapping = SharedMapping(descriptor, skipped, nbytes, there)
            return words, waits, SharedPool(nbytes, mapping, words, descriptor)

        words, waits, pool = self.together("map the memory of the group", mapped)
        others = None
        if len(machines) > 1:
            counterparts = [ranks[own] for _, ranks in machines]
            names = [name for name, _ in machines]
            others = Machines(index, names, counterparts, self._group_of(counterparts, patience), waits)
        self.exchange("")  # the first ranks keep their files until all have them
        ranks = Ranks(own, len(here), words, waits, pool, others)
        if drive is not None:
            ranks.drive = SharedDrive(drive[0], on_drive, drive_file, pool, words, ranks.owns)
            os.close(drive_file)
        return ranks

    def _machines(self) -> list[tuple[str, list[int]]]:
        """Return the names and ranks of the machines of this group. Raises `ManageError` unless each has as many ranks,
        one after the other."""
        of_all = self.exchange(_machine())
        found = [(key[0], [*ranks]) for key, ranks in groupby(range(self.count), of_all.__getitem__)]
        if len(found) > len({*of_all}) or len({len(ranks) for _, ranks in found}) > 1:
            told = ", ".join(f"{name}: {len(ranks)}" for name, ranks in found)
            raise ManageError(f"each machine needs as many ranks, one after the other, as torchrun starts them: {told}")
        return found

    def _group_of(self, ranks: list[int], patience: float) -> Any:
        """Return the process group of some `ranks` of this one, which all call this."""
        world = [dist.get_global_rank(self._group, rank) for rank in ranks]
        timeout = timedelta(seconds=patience)
        return dist.new_group(world, timeout=timeout, use_local_synchronization=True)


def _make_in_memory(nbytes: int, nonce: int) -> tuple[int, str]:
    """Return the descriptor of a new file of `nbytes` in memory, which begins with `nonce`, or why there is none."""
    descriptor = make_file()
    try:
        os.ftruncate(descriptor, nbytes)
        os.pwrite(descriptor, nonce.to_bytes(8, "little"), 0)
    except OSError as error:
        os.close(descriptor)
        what = f"the system gives no {format_size(nbytes)} of memory that ranks share: {error}"
        return -1, f"{what}. Lower Budget(host=…), or allow it (ulimit -f)"
    return descriptor, ""


def _make_on_drive(directory: str, nbytes: int) -> tuple[int, str]:
    """Return the descriptor of a new unnamed file of `nbytes`, or why there is none."""
    try:
        descriptor = open_unnamed(directory)
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        return -1, f"cannot keep an NVMe store of {nbytes} bytes in {directory!r}: {error}. Name a writable directory"
    return descriptor, ""


def _open(rank: int, offer: tuple[int, int, int]) -> tuple[int, str]:
    """Return a descriptor of the file that `rank` offers, or its name and why it cannot be opened."""
    process, descriptor, nonce = offer
    try:
        opened = open_file(process, descriptor)
    except OSError as error:
        path = f"/proc/{process}/fd/{descriptor}"
        return -1, f"rank {rank}: {path} cannot be opened ({error}): run all ranks as one user, in one container"
    if os.pread(opened, 8, 0) != nonce.to_bytes(8, "little"):
        os.close(opened)
        return -1, f"rank {rank}: it sees other processes than rank {rank}: run all ranks in one container"
    return opened, ""


_pretended: list[str] = []


def on_machine(name: str) -> None:
    """Have this process take itself for one on machine `name`, for tests."""
    _pretended[:] = [name]


def _machine() -> tuple[str, str]:
    """Return the name of this machine, and what identifies it since it was started."""
    if _pretended:
        return _pretended[0], "of a test"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


def join(group: Any) -> JoinedRanks | None:
    """Return the ranks of `group`, as `hetmem.manage` takes it; None if this process manages a model of its own."""
    if group is False:
        return None
    found = _found(group)
    if found is None:
        return None
    if found is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(found) < 0:
        raise ManageError("this process is in none of the ranks of group=: call manage there only, or with group=False")
    if dist.get_world_size(found) == 1:
        return None
    joined = JoinedRanks(found)
    joined.await_all()
    return joined


def _found(group: Any) -> Any:
    """Return a process group; None without one."""
    if not dist.is_available():
        return None
    if group is not None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ManageError(f"group= has {group.ndim} dimensions: give it one of them, mesh[name]")
            return group.get_group()
        if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise ManageError(
                f"group must be None, False, a ProcessGroup or a DeviceMesh of one dimension, got {group!r}"
            )
        return group
    if not dist.is_initialized():
        if world_size() == 1:
            return None
        if missing := missing_of_launcher():
            raise ManageError(
                f"WORLD_SIZE is {world_size()}, and {', '.join(missing)} not set, so the ranks cannot find each other: "
                f"start them by torchrun, or give each a model of its own by group=False"
            )
        _make_group()
    return dist.group.WORLD


def _make_group() -> None:
    """Make the process group of torchrun's variables. Its processes find each other in a store that, with torchrun's
    `--standalone`, outlives them: after a restart the addresses of those before are still in it, and gloo waits for
    these (torch 2.13). So each start has names of its own there."""
    store, rank, count = next(rendezvous("env://"))
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    own = PrefixStore(f"hetmem/{restarts()}", store)
    dist.init_process_group(backends, store=own, rank=rank, world_size=count)
