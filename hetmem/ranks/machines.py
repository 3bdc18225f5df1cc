"""What the machines of a group exchange: each keeps one copy of all homes, for its ranks, and sums of gradients cross
the network, through a process group of the counterparts: one rank of each machine.

Every rank of a machine exchanges a part, with its counterparts, and all of them in one order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetmem.errors import PeerError
from hetmem.ranks.waits import Waits

T = TypeVar("T")
PIECE_ELEMENTS = 1 << 20
"""So many elements cross at once."""

_GATHERED = 4
"""Up to so many machines get the parts of all others; more add one share each, and then get the sums."""

_HAS_FAILED = -1
_TAG = 53
"""Of words that no machine receives."""


class Machines:
    """Machine `index` of those with `names`, as a rank whose counterparts, of the numbers `ranks`, are `group` sees
    them."""

    def __init__(
        self, index: int, names: Sequence[str], ranks: Sequence[int], group: Any, waits: Waits, *, beside: bool = False
    ) -> None:
        self.index, self.count, self.names, self._ranks = index, len(names), names, ranks
        self._group, self._waits, self._beside = group, waits, beside
        self._last_words: list[Any] = []
        """Kept until this rank ends."""

    def beside(self) -> Machines:
        """Return these machines for a thread that runs beside the one that trains, and looks after nothing else."""
        return Machines(self.index, self.names, self._ranks, self._group, self._waits, beside=True)

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for `what`, which comes from the other machines. Raises `PeerError` if it cannot come."""
        self._waits.until(reached, f"{what} ({self._told(self._others())})", busy=lambda: True)

    def gathered(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        """Return `mine`, a tensor in host memory, of all machines, a row each. Raises `PeerError` if one is lost."""
        found = mine.new_empty((self.count, *mine.shape))
        self._end(dist.all_gather([*found], mine.contiguous(), group=self._group, async_op=True), what)
        return found

    def gathered_objects(self, mine: T) -> list[T]:
        """Return `mine`, which can be pickled, of all machines."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def compare(self, rows: Any, names: Callable[[int], str]) -> None:
        """Raise `PeerError` with the name of the first column of `rows`, an array with one of each machine, that
        differs."""
        differ = (rows != rows[0]).nonzero()
        if len(differ[0]):
            machine, at = (int(found[0]) for found in differ)
            raise PeerError(
                f"{names(at)} differs on machines {self.names[0]} and {self.names[machine]}: all ranks need the same"
            )

    def refuse_verdicts(self, what: str, said: str) -> PeerError | None:
        """Return the error for `what` if another machine has failed in it, or does something else than this one, which
        has `said` what it does; "" if it has failed."""
        mine = torch.tensor([zlib.crc32(said.encode()) if said else _HAS_FAILED])
        found = self.gathered(mine, f"{what} on the other machines")[:, 0].tolist()
        for name, verdict in zip(self.names, found, strict=True):
            if verdict == _HAS_FAILED:
                return PeerError(f"a rank of machine {name} has failed in {what}")
            if verdict != int(mine):
                return PeerError(f"machine {name} does something else in {what} than {self.names[self.index]}")
        return None

    def add(self, home: torch.Tensor, spans: Sequence[tuple[slice, list[int]]]) -> int:
        """Give each of `spans` of `home`, a flat tensor in host memory, the sum over the machines that have it, in
        their order; return how many bytes this rank has got for that. Spans are ascending."""
        elements = 0
        for start in range(0, home.numel(), PIECE_ELEMENTS):
            piece = slice(start, min(start + PIECE_ELEMENTS, home.numel()))
            within = [*_within(spans, piece)]
            if within:
                elements += self._add_piece(home[piece], within)
        return elements * home.element_size()

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first machine's `values`, in host memory."""
        found = values.detach().to("cpu", copy=self.index > 0).contiguous()
        self._end(dist.broadcast(found, group=self._group, group_src=0, async_op=True), "values of the first machine")
        return found

    # ---- inside ------------------------------------------------------------------------------------------------

    def _add_piece(self, home: torch.Tensor, spans: list[tuple[slice, list[int]]]) -> int:
        """Do `add` for a piece, and return how many elements this rank has got."""
        others = self.count - 1
        if self.count <= _GATHERED:
            _sum(self.gathered(home, "sums of gradients of the other machines"), spans, home)
            return others * home.numel()
        share = -(-home.numel() // self.count)
        padded = home.new_zeros(self.count * share)
        padded[: home.numel()] = home
        parts = torch.empty_like(padded)
        self._end(dist.all_to_all_single(parts, padded, group=self._group, async_op=True), "sums of the other machines")
        mine = slice(self.index * share, (self.index + 1) * share)
        total = padded[mine].clone()
        _sum(parts.view(self.count, share), [*_within(spans, mine)], total)
        summed = self.gathered(total, "sums of the other machines").flatten()
        for span, _ in spans:
            home[span] = summed[span]
        return 2 * others * share

    def _end(self, work: Any, what: str) -> None:
        """Wait for `work`. Raises `PeerError` if a counterpart is lost, or gives no sign."""
        if not self._beside:
            self.wait(work.is_completed, what)
        try:
            work.wait()
        except RuntimeError as error:
            lost = [at for at in self._others() if self._is_closed(at)] or self._others()
            raise PeerError(
                f"the connection to another machine ({self._told(lost)}) has ended while this rank awaited {what}: "
                f"{str(error).splitlines()[0]}. {self._waits.where()}"
            ) from error

    def _others(self) -> list[int]:
        return [at for at in range(self.count) if at != self.index]

    def _told(self, machines: list[int]) -> str:
        return " or ".join(f"{self.names[at]}, rank {self._ranks[at]}" for at in machines)

    def _is_closed(self, at: int) -> bool:
        """Return whether the connection to a machine is known to have ended: all have once an exchange took too long,
        and then `monitored_barrier` cannot tell who is missing either."""
        word = torch.zeros(1, device="cpu")
        try:
            self._last_words.append((word, dist.isend(word, group=self._group, group_dst=at, tag=_TAG)))
        except RuntimeError:
            return True
        return False


def _within(spans: Sequence[tuple[slice, list[int]]], piece: slice) -> Iterator[tuple[slice, list[int]]]:
    """Yield what lies in `piece` of `spans`, counted from its start."""
    for span, machines in spans:
        start, stop = max(span.start, piece.start), min(span.stop, piece.stop)
        if start < stop:
            yield slice(start - piece.start, stop - piece.start), machines


def _sum(rows: torch.Tensor, spans: Sequence[tuple[slice, list[int]]], target: torch.Tensor) -> None:
    for span, machines in spans:
        total = rows[machines[0]][span].clone()
        for machine in machines[1:]:
            total += rows[machine][span]
        target[span] = total
