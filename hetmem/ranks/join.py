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
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hetmem.base.config import missing_of_launcher, rank_timeout_seconds, world_size
from hetmem.base.units import round_up
from hetmem.errors import ManageError, PeerError
from hetmem.ranks.group import Ranks
from hetmem.ranks.memory import SharedMapping, SharedPool, make_file, open_file
from hetmem.ranks.waits import Waits
from hetmem.ranks.words import Words

T = TypeVar("T")
_PATIENCE_SECONDS = 1800.0
_HOMES_OF_A_CHUNK = 16


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

    def open(self, home_bytes: int, parameters: int, chunks: int) -> Ranks:
        """Share memory for homes of up to `home_bytes`. Raises `ManageError` if a rank cannot open that of rank 0."""
        rows = chunks * _HOMES_OF_A_CHUNK
        nbytes = max(mmap.PAGESIZE, home_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        sizes = self.count, parameters, rows, nbytes // mmap.PAGESIZE
        skipped = round_up(Words(None, *sizes).nbytes, mmap.PAGESIZE)
        nonce, descriptor = secrets.randbits(62), -1
        if self.rank == 0:
            descriptor = make_file()
            os.ftruncate(descriptor, skipped + nbytes)
            os.pwrite(descriptor, nonce.to_bytes(8, "little"), 0)
        offers = self.exchange((os.getpid(), descriptor, nonce, _machine()))
        text = ""
        if self.rank > 0:
            descriptor, text = _open(offers[0], offers[self.rank][-1])
        for rank, refusal in enumerate(self.exchange(text)):
            if refusal:
                raise ManageError(f"rank {rank} cannot share the memory of rank 0: {refusal}")
        words = Words(memoryview(SharedMapping(descriptor, 0, skipped).buffer(0, skipped)), *sizes)
        waits = Waits(words, self.rank, [offer[0] for offer in offers], rank_timeout_seconds() or _PATIENCE_SECONDS)
        pool = SharedPool(nbytes, SharedMapping(descriptor, skipped, nbytes), words, descriptor)
        self.exchange("")  # rank 0 keeps the file until all have it
        return Ranks(self.rank, self.count, words, waits, pool)


def _open(offer: tuple[int, int, int, tuple[str, str]], here: tuple[str, str]) -> tuple[int, str]:
    """Return a descriptor of the file of `offer`, or why it cannot be opened `here`."""
    process, descriptor, nonce, there = offer
    if here != there:
        return -1, f"it is on another machine ({here[0]}, and rank 0 on {there[0]}); a group is of one machine so far"
    try:
        opened = open_file(process, descriptor)
    except OSError as error:
        return (
            -1,
            f"/proc/{process}/fd/{descriptor} cannot be opened ({error}): run all ranks as one user, in one container",
        )
    if os.pread(opened, 8, 0) != nonce.to_bytes(8, "little"):
        os.close(opened)
        return -1, "it sees other processes than rank 0: run all ranks in one container"
    return opened, ""


def _machine() -> tuple[str, str]:
    """Return the name of this machine, and what identifies it since it was started."""
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
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return dist.group.WORLD
