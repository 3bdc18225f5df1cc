"""Rehearses a few training steps of a workload in an arrangement on the simulator: times, peaks and busy links.

It is a run (forward, backward, gradients, optimizer) written as calls of `SimulatedTraffic`; the counterpart of
`engine.runtime`, `engine.gradients` and `optim.adamw`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from operator import sub

from hetmem.base.hardware import ThreadCosts
from hetmem.errors import CapacityError
from hetmem.planner.activations import SimulatedActivations
from hetmem.planner.reservation import ROLES, Arrangement, moved, to_the_device
from hetmem.planner.simulated_engine import (
    BACKWARD,
    FORWARD,
    Notes,
    SimulatedUpdates,
    Staged,
    Update,
)
from hetmem.planner.simulated_gradients import SimulatedGradients
from hetmem.planner.simulator import SimulatedTraffic
from hetmem.planner.workload import Event, Kind, Phase, Setting, StepResult, Workload
from hetmem.schedule.blocks import Block, in_flight_bytes
from hetmem.schedule.placement import COPY_BYTES, NoRoom
from hetmem.schedule.trace import STEP, Tier, Turns

UPDATE_BYTES = 28
"""Memory traffic of the update of one float32 parameter: 16 bytes read, 12 written."""


class Rehearsal:
    """A simulated run of `workload` with `setting`. `step()` is one optimizer step; early steps record the trace that
    later ones prefetch by."""

    def __init__(self, workload: Workload, arrangement: Arrangement, setting: Setting) -> None:
        self._workload = workload
        capacities, hardware, micro_batches = setting.capacities, setting.hardware, setting.micro_batches
        self._hardware, self._micro_batches, self._how = hardware, micro_batches, setting.updating
        ground = arrangement.ground
        self._traffic = SimulatedTraffic(
            {Tier.DEVICE: ground.device_slots, Tier.HOST: ground.staging_slots},
            hardware,
            device_bytes=capacities.device_bytes,
            slot_bytes=ground.slot_bytes,
        )
        self._blocks: dict[tuple[str, int], int] = {}
        self._register(arrangement)
        home_bytes = sum(arrangement.bytes_by_role(Tier.DEVICE).values())
        window = in_flight_bytes(capacities.device_bytes)
        ahead = window if workload.moves and not hardware.host_to_device.by_the_caller else 0
        self._notes = Notes(self._traffic, capacities, ground, home_bytes, ahead)
        self._activations: SimulatedActivations | None = None
        if workload.moves:
            self._activations = SimulatedActivations(
                self._traffic, workload, window, self._notes.has_room_ahead, arrangement.spilled_bytes
            )
        self._seconds = [
            tuple(phase.work.seconds(hardware.device, workload.dtype) for phase in (event.during, event.after))
            for event in workload.events
        ]
        self._held: dict[int, int] = {}
        self._gone: list[int] = []
        self._turns = Turns(workload.micro_batches)
        self._gradients = workload.gradients()
        self._usual = {number: micro_batches * count for number, count in self._gradients.items()}
        self._begun: set[int] = set()
        self._updates = SimulatedUpdates(self._traffic, hardware.host, self._notes)
        awaited = None if self._how.overlapped else self._members
        self._sink = SimulatedGradients(
            self._traffic,
            self._notes,
            self._blocks,
            arrangement,
            awaited,
            self._hurry,
            self._gradients,
            turns=workload.micro_batches > 1,
        )
        self._costs = hardware.thread if self._blocks else ThreadCosts()
        self._moved: dict[str, dict[str, int]] = {}
        self._steps = 0
        self._hurries = False

    def _register(self, arrangement: Arrangement) -> None:
        """Register the blocks in the order of a run."""
        for role in ROLES:
            for chunk, tier in arrangement.homes.get(role, {}).items():
                if arrangement.ground.device_slots:
                    home = Tier.HOST if tier is Tier.DEVICE else tier  # a copy on the device is one transfer away
                    block = Block(f"{role} of chunk {chunk}", home, arrangement.ground.chunks[chunk].span)
                    number = self._traffic.add(block, arrangement.role_bytes(chunk, role))
                    self._blocks[role, chunk] = number
                    if role == "param" and (coded := arrangement.ground.chunks[chunk].coded_bytes):
                        values = arrangement.numels[chunk] * arrangement.ground.chunks[chunk].itemsize
                        self._traffic.decoded[number] = coded + values
                    if tier is Tier.DEVICE:
                        self._traffic.on_device.add(number)

    @property
    def arrangement(self) -> Arrangement:
        """The current arrangement; it changes when homes move to idle device memory."""
        return self._sink.arrangement

    # ---- a step ------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Simulate one step. Raises `NoRoom` where the run would be out of device memory."""
        traffic, capacities = self._traffic, self._notes.capacities
        before, decoded = self._reading(), traffic.decoding.load.seconds
        self._updates.seconds = 0.0
        self._sink.arrivals.clear()
        self._begun.clear()
        try:
            for _ in range(self._micro_batches):
                self._micro_batch()
            compute = traffic.now - before[0] - (traffic.stall_seconds - before[1])
            self._optimize()
        except CapacityError as error:
            raise NoRoom(f"a step does not fit: {error}", Tier.DEVICE, self.arrangement.ground.slot_bytes) from error
        self._steps += 1
        self._notes.peaks.device_in_use(self._notes.chunk_bytes(), 0)
        seconds, stalled, *loads = map(sub, self._reading(), before)
        return StepResult(
            seconds,
            stalled,
            {"compute": compute, "update": self._updates.seconds, **dict(zip(traffic.links, loads[4:], strict=True))}
            | ({"decode": traffic.decoding.load.seconds - decoded} if traffic.decoded else {}),
            {name: int(nbytes) for name, nbytes in zip(traffic.links, loads[:4], strict=True)},
            capacities.usable_bytes if self._workload.fills_device else self._notes.peaks.device_peak_bytes,
            self._notes.peaks.chunk_peak_bytes,
            self._notes.peaks.non_model_peak_bytes,
            {tier: dict(roles) for tier, roles in self._moved.items()},
            self._part_of({chunk for chunk, tier in self.arrangement.homes["param"].items() if tier is Tier.DEVICE}),
            {tier.name.lower(): nbytes for tier, nbytes in self._sink.new_bytes.items()},
            self._sink.loaned_bytes - self._sink.new_bytes[Tier.HOST] if self._sink.loaned_bytes else 0,
        )

    def _reading(self) -> tuple[float, ...]:
        """Return the clock, the stalls, the bytes of each link and the busy seconds of each link."""
        traffic, loads = self._traffic, [queue.load for queue in self._traffic.links.values()]
        numbers = (*(load.bytes for load in loads), *(load.seconds for load in loads))
        return traffic.now, traffic.stall_seconds, *numbers

    def _micro_batch(self) -> None:
        moves = self._activations
        for index, event in enumerate(self._workload.events):
            if moves is not None:
                moves.before(index)
            self._event(index, event)
            if moves is not None:
                moves.after(index)

    def _part_of(self, chunks: set[int]) -> float:
        """Return the share of the trained elements that lie in `chunks`."""
        elements, chunk_of = self.arrangement.elements, self.arrangement.chunk_of
        trained = {index: elements[index] for index in self._workload.trainable}
        return sum(n for index, n in trained.items() if chunk_of[index] in chunks) / max(1, sum(trained.values()))

    def _event(self, index: int, event: Event) -> None:
        self._gone += event.let_go
        match event.kind:
            case Kind.FORWARD:
                self._notes.begin((*FORWARD, self._turns))
            case Kind.BACKWARD:
                self._notes.begin((*BACKWARD, self._turns))
                if self._blocks:
                    blocks = set(map(self._block_of, range(len(self.arrangement.chunk_of))))
                    self._notes.all_at_once(blocks)
                    self._sink.begin(alone=self._notes.measured or self._notes.capacities.ranks > 0)
                self._traffic.gradients.complete.begin()
                self._sink.prepare_sums(self._begun)
            case Kind.USE | Kind.SAVED if self._blocks:
                self._use(index, event)
                return
            case Kind.GRADIENT:
                self._traffic.takes(self._costs.gradient_seconds)
                self._send(event.parameters[0])
                self._notes.sent(event.live_bytes)
                self._arrived(event.parameters[0])
            case Kind.END:
                self._arrive()
        self._phase(event.during, self._seconds[index][0])
        self._phase(event.after, self._seconds[index][1])

    def _use(self, index: int, event: Event) -> None:
        self._traffic.takes(self._costs.use_seconds if event.kind is Kind.USE else self._costs.gradient_seconds)
        self._let_go()
        used = [(p, self._block_of(p)) for p in event.parameters]
        self._notes.moment(event.operator, tuple(dict.fromkeys(block for _, block in used)), event.live_bytes)
        new = used if event.kind is Kind.USE else [(p, block) for p, block in used if p not in self._held]
        for _, block in new:
            self._notes.acquire(block, event.live_bytes)
        self._phase(event.during, self._seconds[index][0])
        for parameter, block in new:
            if parameter in event.held and parameter not in self._held:
                self._held[parameter] = block
            else:
                self._traffic.release(block, Tier.DEVICE)
        self._phase(event.after, self._seconds[index][1])

    def _let_go(self) -> None:
        """Release the copies of parameters whose last view has died."""
        for parameter in self._gone:
            block = self._held.pop(parameter, None)
            if block is not None:
                self._traffic.release(block, Tier.DEVICE)
        self._gone.clear()

    def _block_of(self, parameter: int) -> int:
        return self._blocks[self._operand(self.arrangement.chunk_of[parameter])]

    def _operand(self, chunk: int) -> tuple[str, int]:
        """Return the role of `chunk` that device copies are fetched from, and `chunk`."""
        return ("compute" if chunk in self.arrangement.homes.get("compute", {}) else "param"), chunk

    def _phase(self, phase: Phase, seconds: float) -> None:
        self._notes.grew(phase.peak_bytes)
        if phase.rows_bytes and not self.arrangement.ground.is_whole:
            self._traffic.read_rows(phase.rows_bytes)
        self._traffic.now += seconds
        self._traffic.takes(phase.calls * self._costs.call_seconds)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _send(self, parameter: int) -> None:
        """Send the gradient of `parameter` home, or count it where it stays on the device."""
        itemsize = self._workload.compute_itemsizes[parameter]
        if self._notes.capacities.ranks:  # which divide it in the dtype of its home
            itemsize = self.arrangement.ground.itemsize
        device_bytes = self.arrangement.elements[parameter] * itemsize
        if not self.arrangement.ground.resident:
            self._sink.send(parameter, device_bytes)
        elif not self._blocks and parameter not in self._sink.arrivals:
            self._notes.gradient_bytes += device_bytes * (self._steps == 0)

    def _arrived(self, parameter: int) -> None:
        """Count a gradient of `parameter`; with overlap begin the chunk's update if it was the last one missing."""
        arrivals = self._sink.arrivals
        arrivals[parameter] += 1
        chunk = self.arrangement.chunk_of[parameter]
        if self._how.lends and self._blocks and (self._steps or self._hurries):
            if chunk not in self._begun and self._complete(chunk):
                self._begin(chunk, self._members(chunk))
            self._updates.pump()

    def _complete(self, chunk: int) -> bool:
        usual, arrivals = self._usual, self._sink.arrivals
        return all(member in usual and arrivals[member] == usual[member] for member in self._members(chunk))

    def _hurry(self) -> bool:
        """Begin the updates of all chunks that have their gradients, in a first step that keeps no more. Raises
        `NoRoom` where a step of several backwards has to keep them."""
        if self._steps or self._hurries:
            return False
        if self._micro_batches > 1:
            arrangement = self.arrangement
            sums = sum(arrangement.ground.home_bytes(chunk, "grad") for chunk in arrangement.lent)
            raise NoRoom(
                "gradients of several backwards, which updates that overlap keep in host memory until the last, have "
                "no room there",
                Tier.HOST,
                max(1, sums - arrangement.left.host_bytes),
            )
        self._hurries = True
        due = [
            chunk for chunk in self.arrangement.homes["exp_avg"] if chunk not in self._begun and self._complete(chunk)
        ]
        for chunk in due:
            self._begin(chunk, self._members(chunk))
        return bool(due)

    def _arrive(self) -> None:
        """End a backward: wait until every gradient is at home, and written if that is NVMe."""
        if self._blocks:
            self._sink.end()
            self._traffic.wait_for_gradients()
            self._traffic.wait_until_written(self._on_nvme("grad"))

    def _on_nvme(self, role: str) -> list[int]:
        homes = self.arrangement.homes.get(role, {})
        return [self._blocks[role, chunk] for chunk, tier in homes.items() if tier is Tier.NVME]

    # ---- the optimizer -----------------------------------------------------------------------------------------

    def _fill_idle(self) -> None:
        """Move homes into idle device memory, as `placing.rehome` does."""
        arrangement = self.arrangement
        if (
            self._how.on_host_only
            or self._notes.capacities.ranks
            or arrangement.ground.resident
            or not self._blocks
            or not self._notes.knows_a_backward()
        ):
            return
        chosen = to_the_device(arrangement, self._workload, self._notes.idle_bytes())
        if chosen:
            self._synchronize()
        chosen = [chunk for chunk in chosen if not self._sink.waits(chunk)]
        for chunk, (role, homes) in product(chosen, arrangement.homes.items()):
            if chunk in homes:
                home = Block(f"{role} of chunk {chunk}", Tier.HOST, arrangement.ground.chunks[chunk].span)
                lent = role == "grad" and chunk in arrangement.lent
                fresh = self._steps == 0 and chunk not in self._begun and role in ("exp_avg", "exp_avg_sq")
                nbytes = arrangement.ground.home_bytes(chunk, role)
                self._traffic.move_in(
                    self._blocks[role, chunk], home, 0 if lent or fresh else arrangement.role_bytes(chunk, role)
                )
                if lent:  # a borrowed home takes, and frees, no memory of its own
                    continue
                self._notes.home_bytes += nbytes
                left = self._moved.setdefault(homes[chunk].name.lower(), {})
                left[role] = left.get(role, 0) + nbytes
        self._sink.move_in(moved(arrangement, self._workload, chosen))

    def _members(self, chunk: int) -> set[int]:
        """Return the parameters of `chunk` that an update changes."""
        return set(self.arrangement.ground.chunks[chunk].parameters) & self._workload.trainable

    def _optimize(self) -> None:
        self._notes.begin(STEP)
        if not self._how.into_forward:
            self._updates.finish()
        self._fill_idle()
        for chunk in sorted(self.arrangement.homes["exp_avg"]):
            members = self._members(chunk)
            if members and chunk not in self._begun:
                self._begin(chunk, members)
        if self._how.into_forward:
            self._updates.pump()
        else:
            self._updates.finish()
            self._traffic.wait_until_written(self._on_nvme("param"))
        self._let_go()
        self._notes.end()

    def _synchronize(self) -> None:
        """Finish the updates that run into the next forward, and write everything home."""
        if self._how.into_forward:
            self._updates.finish()
            for role in self.arrangement.homes:
                self._traffic.wait_until_written(self._on_nvme(role))

    def _begin(self, chunk: int, members: set[int]) -> None:
        """Queue the update of `members` of `chunk`."""
        self._begun.add(chunk)
        homes, ground, hardware = self.arrangement.homes, self.arrangement.ground, self._hardware
        copies, here = chunk in homes.get("compute", {}), homes["param"][chunk] is Tier.DEVICE
        itemsize = ground.chunks[chunk].itemsize
        nbytes = UPDATE_BYTES * itemsize / 4 - 4 * (itemsize - ground.role_itemsize(chunk, "exp_avg"))
        nbytes += COPY_BYTES * copies - itemsize + ground.role_itemsize(chunk, self.arrangement.gradient(chunk))
        nbytes *= sum(self.arrangement.elements[index] for index in members)
        whole = len(members) == len(ground.chunks[chunk].parameters)
        self._traffic.takes(len(members) * hardware.thread.queue_seconds)
        on_device = here and not hardware.host_to_device.by_the_caller
        update = Update(
            chunk,
            self._blocks.get(self._operand(chunk)),
            tuple(self._staged(chunk, whole=whole)),
            len(members) * hardware.thread.update_seconds + hardware.thread.chunk_seconds,
            0 if on_device else nbytes,
            nbytes / hardware.device.bytes_per_second if on_device else 0.0,
            ready=lambda: not self._traffic.gradients.arriving(chunk) and not self._sink.is_gathered(chunk),
            done=lambda: self._sink.retire(chunk),
        )
        self._updates.add(update)

    def _staged(self, chunk: int, *, whole: bool) -> Iterator[Staged]:
        """Yield the blocks on NVMe that the update of `chunk` opens; `whole`: it updates all of its parameters."""
        homes = self.arrangement.homes
        for role in ROLES:
            if homes.get(role, {}).get(chunk) is Tier.NVME:
                fresh = self._steps == 0 and role in ("exp_avg", "exp_avg_sq")
                written = role == "compute" and whole
                yield Staged(self._blocks[role, chunk], not (fresh or written), role != "grad")


def rehearse(workload: Workload, arrangement: Arrangement, setting: Setting, steps: int = 4) -> StepResult:
    """Simulate up to `steps` steps and return the last: the first ones record the trace and fill the tiers. Stops once
    a step equals the one before. Raises `NoRoom`.

    The first micro-batch of a step finds the copies that the step before left, the last one may begin updates, and
    those between are alike. So of many micro-batches only `_REHEARSED` are simulated, and the rest extrapolated.

    Updates that run into the next step delay it, so that it leaves fewer of its own behind: steps are long and short by
    turns. With such updates twice as many steps are simulated, and the mean of the second half is returned.
    """
    if setting.micro_batches > sum(_REHEARSED):
        few, more = (
            rehearse(workload, arrangement, replace(setting, micro_batches=count), steps) for count in _REHEARSED
        )
        times = (setting.micro_batches - _REHEARSED[-1]) / (_REHEARSED[-1] - _REHEARSED[0])
        return StepResult.total([(-times, few), (1 + times, more)])
    run = Rehearsal(workload, arrangement, setting)
    if setting.updating.into_forward:
        return StepResult.total([(1 / steps, run.step()) for _ in range(2 * steps)][-steps:])
    last = run.step()
    for _ in range(steps - 1):
        before, last = last, run.step()
        if last.is_as(before):
            break
    return StepResult.total([(1, last)])


_REHEARSED = (3, 6)
"""Micro-batches of two simulated steps; more are extrapolated from them. With (2, 6) homes on NVMe were 1 % off."""
