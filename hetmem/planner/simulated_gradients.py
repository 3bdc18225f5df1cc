"""Gradients of a simulated run: what `engine.gathered_gradients` and `engine.summed_gradients` do in a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hetmem.planner.reservation import Arrangement, with_own_gradients
from hetmem.planner.simulated_engine import Notes
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.schedule.gradients import Lending
from hetmem.schedule.trace import Tier


@dataclass(slots=True)
class _SimulatedSum:
    """The sum of a parameter's gradients, of `nbytes`, of which `left` more are expected."""

    chunk: int
    nbytes: int
    home_bytes: int
    left: int


class SimulatedGradients:
    """Gradients of the chunks of one run. `arrivals` counts those of each parameter in a step; `arrangement` is the
    current one: it changes when gradients get a permanent home.

    A chunk of `arrangement.lent` borrows a home for gradients from their first arrival to their update. `new_bytes`, by
    tier: permanent homes that gradients got during the run. `hurry` begins updates in the first step, if it may: see
    `schedule.gradients.GradientMemory`. A chunk's gradients are written to NVMe once those of its `awaited` parameters
    have arrived; None: when the backward is over. `expected`: how many gradients a backward gives each parameter;
    `turns`: of several micro-batches.
    """

    def __init__(
        self,
        traffic: SimulatedTraffic,
        notes: Notes,
        blocks: Mapping[tuple[str, int], int],
        arrangement: Arrangement,
        awaited: Callable[[int], Collection[int]] | None,
        hurry: Callable[[], bool],
        expected: Mapping[int, int],
        *,
        turns: bool,
    ) -> None:
        self.arrangement = arrangement
        self._traffic, self._notes, self._blocks, self._awaited = traffic, notes, blocks, awaited
        self._expected, self._turns = expected, turns
        self.arrivals: Counter[int] = Counter()
        self.new_bytes: Counter[Tier] = Counter()
        self._lending = {Tier.HOST: Lending(arrangement.set_aside), Tier.DEVICE: Lending(arrangement.aside_there)}
        self._lent: dict[int, int] = {}
        """The bytes of the places that chunks borrow, by chunk."""
        self._loans: dict[int, int] = {}
        """Those of memory that was not set aside."""
        self.loaned_bytes = 0
        """The most of that, beside `new_bytes`, at one time."""
        self._hurry = hurry
        self.gathers = False
        """Whether gradients of a chunk wait on the device until all are there: in backwards that follow a trace."""
        self.gathered: dict[int, tuple[int, int, int]] = {}
        """By chunk, how many are missing, and the bytes at home and on the device of those that wait."""
        self._came: Counter[int] = Counter()
        """How many gradients of each chunk were gathered and sent in this backward."""
        self._sums: dict[int, _SimulatedSum] = {}
        self._open: dict[int, set[int]] = {}
        """By chunk, the parameters whose sum may be made on the device, and is not complete."""
        traffic.send_sums, traffic.send_gathered = self._send_all_sums, self.send_all_gathered

    def begin(self, *, alone: bool) -> None:
        """Begin a backward. `alone`: each gradient is sent by itself."""
        self.gathers = not (alone or self._turns)
        self._came.clear()
        self._open.clear()
        for parameter, count in self._expected.items() if self._turns else ():
            chunk = self.arrangement.chunk_of[parameter]
            tier = self.arrangement.homes["grad"][chunk]
            if count > 1 and tier is Tier.HOST and parameter not in self.arrivals:
                self._open.setdefault(chunk, set()).add(parameter)

    def end(self) -> None:
        """End a backward: send what waits."""
        self.send_all_gathered()
        self._send_all_sums()

    def is_gathered(self, chunk: int) -> bool:
        """Return whether gradients of `chunk` wait on the device."""
        return chunk in self.gathered or any(each.chunk == chunk for each in self._sums.values())

    def send(self, parameter: int, device_bytes: int) -> None:
        """Send a gradient of `parameter`, of `device_bytes` on the device, home. Raises `NoRoom` if no home can be
        borrowed and there is no room for a permanent one."""
        arrangement, sends = self.arrangement, self._traffic.gradients
        chunk, ground = arrangement.chunk_of[parameter], arrangement.ground
        if parameter in self._open.get(chunk, ()):
            if self._add(parameter, chunk, device_bytes):
                return
            self._leave(parameter)
        self._find_home(chunk, adds=parameter in self.arrivals)
        arrangement = self.arrangement
        nbytes = arrangement.elements[parameter] * ground.role_itemsize(chunk, self._role(chunk))
        tier = arrangement.homes["grad"][chunk]
        if tier is Tier.HOST:
            self._send_to_host(chunk, nbytes, device_bytes)
        if tier is not Tier.NVME:
            return
        block = self._blocks["grad", chunk]
        if self._awaited is not None:
            sends.complete.add(chunk, parameter, self._awaited)
        load = any(other in self.arrivals for other in ground.chunks[chunk].parameters)
        self._notes.staged(block, reads=load)
        self._traffic.open_staged(block, load=load)
        self._traffic.send_gradient(chunk, nbytes, device_bytes, partial(self._staged, chunk, block))

    def _role(self, chunk: int) -> str:
        """Return the role that gives the dtype of stored gradients of `chunk`."""
        return "grad" if self._turns else self.arrangement.gradient(chunk)

    def _find_home(self, chunk: int, *, adds: bool) -> None:
        """Have gradients of `chunk` a home, of full precision if it `adds` them up."""
        ground = self.arrangement.ground
        if chunk in self.arrangement.lent and not self.waits(chunk):
            self._traffic.gradients.find_place(chunk, self)
        elif adds and ground.role_itemsize(chunk, self._role(chunk)) < ground.chunks[chunk].itemsize:
            self._widen(chunk)

    # ---- sums: see `engine.summed_gradients` -----------------------------------------------------------------------

    def _add(self, parameter: int, chunk: int, device_bytes: int) -> bool:
        known, traffic = self._sums.get(parameter), self._traffic
        whole = self.arrangement.elements[parameter] * self.arrangement.ground.chunks[chunk].itemsize
        more = device_bytes if known is None else whole - known.nbytes
        if more and not self._notes.has_room_for_sums(traffic.summed_bytes + more, traffic.summed_bytes):
            return False
        if known is None:
            self._find_home(chunk, adds=True)
            if self.arrangement.homes["grad"][chunk] is not Tier.HOST:
                return False
            known = self._sums[parameter] = _SimulatedSum(chunk, 0, whole, self._expected[parameter])
        known.nbytes += more
        known.left -= 1
        self._count(more)
        if not known.left:
            self._close(parameter, chunk)
        return True

    def _leave(self, parameter: int) -> None:
        chunk = self.arrangement.chunk_of[parameter]
        self._send_sums(chunk, [parameter] if parameter in self._sums else [])
        self._close(parameter, chunk)

    def _close(self, parameter: int, chunk: int) -> None:
        self._open[chunk].discard(parameter)
        if not self._open[chunk]:
            self._send_sums(chunk, [each for each, found in self._sums.items() if found.chunk == chunk])

    def _send_all_sums(self) -> None:
        for chunk in dict.fromkeys(each.chunk for each in self._sums.values()):
            self._open.pop(chunk, None)
            self._send_sums(chunk, [each for each, found in self._sums.items() if found.chunk == chunk])

    def _send_sums(self, chunk: int, parameters: Collection[int]) -> None:
        sums = [self._sums.pop(parameter) for parameter in parameters]
        if sums:
            self._open.get(chunk, set()).difference_update(parameters)
            on_device = sum(each.nbytes for each in sums)
            self._count(-on_device)
            self._traffic.send_gradient(chunk, sum(each.home_bytes for each in sums), on_device)

    def _count(self, nbytes: int) -> None:
        self._traffic.gathered_bytes += nbytes
        self._traffic.summed_bytes += nbytes

    # ---- one transfer for a chunk: see `engine.gathered_gradients` -------------------------------------------------

    def _send_to_host(self, chunk: int, nbytes: int, device_bytes: int) -> None:
        """Send a gradient of `chunk`; where they are gathered, all of them with the last: see `gathered_gradients`."""
        traffic = self._traffic
        if not self.gathers:
            traffic.send_gradient(chunk, nbytes, device_bytes)
            return
        members = self.arrangement.ground.chunks[chunk].parameters
        most = sum(self._expected.get(member, 0) for member in members) - self._came[chunk]
        missing, at_home, on_device = self.gathered.get(chunk, (most, 0, 0))
        self.gathered[chunk] = missing - 1, at_home + nbytes, on_device + device_bytes
        self._came[chunk] += 1
        traffic.gathered_bytes += device_bytes
        allowed = traffic.gradients.room_bytes(max(0, self._notes.beside_chunks()))
        if missing == 1 or traffic.gathered_bytes > allowed:
            self.send_gathered([chunk] if missing == 1 else [*self.gathered])

    def send_gathered(self, chunks: Collection[int]) -> None:
        """Send the gradients of `chunks` that wait for others."""
        for chunk in chunks:
            _, nbytes, device_bytes = self.gathered.pop(chunk)
            self._traffic.gathered_bytes -= device_bytes
            self._traffic.send_gradient(chunk, nbytes, device_bytes)

    def send_all_gathered(self) -> bool:
        """Do `send_gathered` for all chunks; return whether there was one."""
        found = [*self.gathered]
        self.send_gathered(found)
        return bool(found)

    def _staged(self, chunk: int, block: int) -> None:
        """Release `block`, now that a gradient of `chunk` is in it in staging, and write it if it is complete."""
        self._traffic.release(block, Tier.HOST, dirty=True)
        if self._traffic.gradients.to_be_written(chunk):
            self._traffic.execute(self._traffic.residency.settle(block))

    # ---- memory: see `schedule.gradients.GradientMemory` ---------------------------------------------------------

    def lend(self, chunk: int) -> bool:
        """Lend gradients of `chunk` a home that was set aside, or what is free; False if there is none now."""
        arrangement = self.arrangement
        nbytes = self._lent_bytes(chunk)
        tier = self._beside(chunk)
        place = self._lending[tier].take(nbytes)
        if place is not None:
            self._lent[chunk] = place
        elif tier is Tier.HOST and not arrangement.ground.staging_slots and nbytes <= arrangement.left.host_bytes:
            self._loans[chunk] = nbytes
            self._borrow(nbytes)
        return self.waits(chunk)

    def _borrow(self, nbytes: int) -> None:
        left = self.arrangement.left
        self.arrangement = replace(self.arrangement, left=replace(left, host_bytes=left.host_bytes - nbytes))
        self._note_loans()

    def _note_loans(self) -> None:
        self.loaned_bytes = max(self.loaned_bytes, sum(self._loans.values()) + self.new_bytes[Tier.HOST])

    def hurry(self) -> bool:
        """Send what is gathered, so that its update gives memory back, or have updates begin early in the first step;
        return whether there was any."""
        return self.send_all_gathered() or self._hurry()

    def may_lend(self, chunk: int) -> bool:
        """Return whether a home large enough for gradients of `chunk` was set aside, lent or not."""
        return self._lending[self._beside(chunk)].lends(self._lent_bytes(chunk))

    def _beside(self, chunk: int) -> Tier:
        """Return the tier on which gradients of `chunk` are lent memory."""
        return Tier.DEVICE if self.arrangement.homes["grad"][chunk] is Tier.DEVICE else Tier.HOST

    def move_in(self, arrangement: Arrangement) -> None:
        """Take over `arrangement`, in which homes have moved to the device, with what gradients borrow there."""
        have = len(self.arrangement.aside_there)
        self.arrangement = arrangement
        for nbytes in arrangement.aside_there[have:]:
            self._lending[Tier.DEVICE].add(nbytes)
            self._notes.home_bytes += nbytes
            self.new_bytes[Tier.DEVICE] += nbytes

    def _lent_bytes(self, chunk: int) -> int:
        return self.arrangement.ground.home_bytes(chunk, "grad" if self._turns else "arriving")

    def give_own(self, chunk: int) -> None:
        """Give gradients of `chunk` a permanent home. Raises `NoRoom` if there is no room."""
        self.arrangement = arrangement = with_own_gradients(self.arrangement, chunk)
        tier = arrangement.homes["grad"][chunk]
        nbytes = arrangement.ground.home_bytes(chunk, "grad")
        self.new_bytes[tier] += nbytes
        self._note_loans()
        if tier is Tier.DEVICE:
            self._notes.home_bytes += nbytes
        else:
            self._traffic.rehome(self._blocks["grad", chunk], tier)

    def waits(self, chunk: int) -> bool:
        """Return whether gradients of `chunk` wait in a borrowed home for their update."""
        return chunk in self._lent or chunk in self._loans

    def retire(self, chunk: int) -> None:
        """Give the borrowed home of `chunk` back, now that the update has read its gradients."""
        if chunk in self._lent:
            self._lending[self._beside(chunk)].give(self._lent.pop(chunk))
        elif chunk in self._loans:
            self._borrow(-self._loans.pop(chunk))

    def prepare_sums(self, begun: Collection[int]) -> None:
        """As another backward of the step begins, move gradients that wait, and that no update has `begun` to read,
        where sums are exact: the last loans first, as their memory is beside what is free."""
        ground = self.arrangement.ground
        for chunk in (*self._lent, *reversed(self._loans)):
            if chunk not in begun and ground.role_itemsize(chunk, "arriving") < ground.chunks[chunk].itemsize:
                self._widen(chunk)

    def _widen(self, chunk: int) -> None:
        """Give gradients of `chunk` a permanent home, as their sum needs a wider dtype than a single one."""
        self._traffic.wait_for_gradients()
        if chunk in self.arrangement.lent:
            self.give_own(chunk)
        self.retire(chunk)
