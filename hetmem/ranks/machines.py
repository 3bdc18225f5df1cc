"""What the machines of a group exchange: each keeps one copy of all homes, for its ranks, and sums of gradients cross
the network, through a process group of the counterparts: one rank of each machine.

Every rank of a machine exchanges a part, with its counterparts, and all of them in one order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hetmem.errors import PeerError
from hetmem.ranks.waits import Waits
from hetmem.ranks.words import Doing

PIECE_ELEMENTS = 1 << 20
"""So many elements cross at once."""

_GATHERED = 4
"""Up to so many machines get the parts of all others; more add one share each, and then get the sums."""

_HAS_FAILED = -1


class Machines:
    """Machine `index` of `count`, as a rank whose counterparts are `group` sees them."""

    def __init__(self, index: int, names: Sequence[str], group: Any, waits: Waits) -> None:
        self.index, self.count = index, len(names)
        self._names, self._group, self._waits = names, group, waits

    def all_step(self, doing: Doing) -> bool:
        """Return whether the counterparts on all machines have come to a step, as this rank says what it is doing."""
        return set(self._gathered(torch.tensor([doing]), "the other machines")[:, 0].tolist()) == {Doing.STEP}

    def compare(self, numbers: Sequence[int], names: Callable[[int], str]) -> None:
        """Raise `PeerError` with the name of the first of `numbers` that other machines have otherwise."""
        found = self._gathered(torch.tensor(numbers), "what the other machines do")
        differ = (found != found[0]).nonzero()
        if len(differ):
            machine, at = differ[0].tolist()
            raise PeerError(
                f"{names(at)} differs on machines {self._names[0]} and {self._names[machine]}: all ranks need the same"
            )

    def refuse_verdicts(self, what: str, said: str) -> PeerError | None:
        """Return the error for `what` if another machine has failed in it, or does something else than this one, which
        has `said` what it does; "" if it has failed."""
        mine = torch.tensor([zlib.crc32(said.encode()) if said else _HAS_FAILED])
        found = self._gathered(mine, f"{what} on the other machines")[:, 0].tolist()
        for name, verdict in zip(self._names, found, strict=True):
            if verdict == _HAS_FAILED:
                return PeerError(f"a rank of machine {name} has failed in {what}")
            if verdict != int(mine):
                return PeerError(f"machine {name} does something else in {what} than {self._names[self.index]}")
        return None

    def present(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the rows of flags, uint8, of all machines."""
        return self._gathered(mine, "which gradients the other machines have")

    def add(self, home: torch.Tensor, spans: Sequence[tuple[slice, list[int]]]) -> None:
        """Give each of `spans` of `home`, a flat tensor in host memory, the sum over the machines that have it, in
        their order. Spans are ascending."""
        start = 0
        while start < home.numel():
            piece = slice(start, min(start + PIECE_ELEMENTS, home.numel()))
            within = [*_within(spans, piece)]
            if within:
                self._add_piece(home[piece], within)
            start = piece.stop

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first machine's `values`, in host memory."""
        found = values.detach().to("cpu", copy=self.index > 0).contiguous()
        self._end(dist.broadcast(found, group=self._group, group_src=0, async_op=True), "values of the first machine")
        return found

    # ---- inside ------------------------------------------------------------------------------------------------

    def _add_piece(self, home: torch.Tensor, spans: list[tuple[slice, list[int]]]) -> None:
        if self.count <= _GATHERED:
            _sum(self._gathered(home, "sums of gradients of the other machines"), spans, home)
            return
        share = -(-home.numel() // self.count)
        padded = home.new_zeros(self.count * share)
        padded[: home.numel()] = home
        parts = torch.empty_like(padded)
        self._end(dist.all_to_all_single(parts, padded, group=self._group, async_op=True), "sums of the other machines")
        mine = slice(self.index * share, (self.index + 1) * share)
        total = padded[mine].clone()
        _sum(parts.view(self.count, share), [*_within(spans, mine)], total)
        summed = self._gathered(total, "sums of the other machines").flatten()
        for span, _ in spans:
            home[span] = summed[span]

    def _gathered(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        """Return `mine` of all machines, a row each."""
        found = mine.new_empty((self.count, *mine.shape))
        self._end(dist.all_gather([*found], mine.contiguous(), group=self._group, async_op=True), what)
        return found

    def _end(self, work: Any, what: str) -> None:
        """Wait for `work`. Raises `PeerError` if a counterpart is lost, or gives no sign."""
        self._waits.until(work.is_completed, what, busy=lambda: True)
        try:
            work.wait()
        except RuntimeError as error:
            others = [name for at, name in enumerate(self._names) if at != self.index]
            raise PeerError(
                f"the connection to another machine ({', '.join(others)}) has ended while this rank awaited {what}: "
                f"{str(error).splitlines()[0]}. {self._waits.where()}"
            ) from error


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
