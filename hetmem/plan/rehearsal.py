"""A few training steps of a workload in an arrangement, rehearsed on the simulator: times, peaks and what binds.

It is the program of a run (forward, backward, gradients, optimizer) written as calls of `SimulatedTraffic`; the
counterpart of `runtime.runtime`, `runtime.gradients` and `optim.adamw`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetmem.errors import CapacityError
from hetmem.plan.arrangement import ROLES, Arrangement, by_first_use
from hetmem.plan.cache import Block
from hetmem.plan.hardware import HardwareProfile
from hetmem.plan.notes import BACKWARD, FORWARD, Notes
from hetmem.plan.placement import COPY_BYTES, Capacities, NoRoom
from hetmem.plan.policy import EvictionPolicy
from hetmem.plan.prefetch import Prefetch
from hetmem.plan.share import Candidate, choose, idle_bytes
from hetmem.plan.simulator import SimulatedTraffic
from hetmem.plan.trace import STEP, Tier
from hetmem.plan.workload import Event, Kind, Phase, Workload

UPDATE_BYTES = 28
"""Host memory traffic of the update of one float32 parameter: 16 bytes read, 12 written."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step. `terms` are the busy seconds of each resource; `bytes` of each link. Peaks are of the whole run."""

    seconds: float
    stall_seconds: float
    terms: dict[str, float]
    bytes: dict[str, int]
    device_peak_bytes: int
    chunk_peak_bytes: int
    non_model_peak_bytes: int
    fetches: int
    faults: int
    events: int
    moved_bytes: dict[str, dict[str, int]]
    """Homes that have moved to the device by now, by the tier that they left and by role."""
    device_updates: float
    """The share of the trained elements whose update runs on the device, where their states live."""


class Rehearsal:
    """A run in the making. `step()` is one optimizer step; the steps before the last learn what comes next."""

    def __init__(
        self,
        workload: Workload,
        arrangement: Arrangement,
        capacities: Capacities,
        hardware: HardwareProfile,
        *,
        micro_batches: int = 1,
        policy: EvictionPolicy | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        self._workload = workload
        self._arrangement = arrangement
        self._capacities = capacities
        self._hardware = hardware
        self._micro_batches = micro_batches
        ground = arrangement.ground
        self._traffic = SimulatedTraffic(
            {Tier.DEVICE: ground.device_slots, Tier.HOST: ground.staging_slots}, hardware, policy, prefetch
        )
        self._blocks: dict[tuple[str, int], int] = {}
        self._register()
        homes = ((chunk, role) for role, chunks in arrangement.homes.items() for chunk in chunks)
        on_device = sum(ground.home_bytes(*home) for home in homes) if ground.resident else 0
        self._notes = Notes(self._traffic, capacities, ground.slot_bytes, ground.device_slots, on_device)
        self._seconds = [
            tuple(phase.work.seconds(hardware.device, workload.dtype) for phase in (event.during, event.after))
            for event in workload.events
        ]
        self._held: dict[int, int] = {}
        self._gone: list[int] = []
        self._arrived: set[int] = set()
        self._compute = self._update = 0.0
        self._use_seconds = hardware.thread.use_seconds if self._blocks else 0.0
        self._moved: dict[str, dict[str, int]] = {}
        self._steps = 0

    def _register(self) -> None:
        """Blocks in the order in which the run registers them."""
        arrangement = self._arrangement
        for role in ROLES:
            for chunk, tier in arrangement.homes.get(role, {}).items():
                if arrangement.ground.device_slots:
                    home = Tier.HOST if tier is Tier.DEVICE else tier  # a copy of it is one step away
                    block = Block(f"{role} of chunk {chunk}", home, arrangement.ground.chunks[chunk].span)
                    number = self._traffic.add(block, arrangement.role_bytes(chunk, role))
                    self._blocks[role, chunk] = number
                    if tier is Tier.DEVICE:
                        self._traffic.on_device.add(number)

    @property
    def arrangement(self) -> Arrangement:
        """As it is now: homes move to the device once a step has shown what is idle there."""
        return self._arrangement

    # ---- a step ------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """One step. Raises `NoRoom` where the run would be out of device memory."""
        traffic = self._traffic
        start, stalled, events = traffic.now, traffic.stall_seconds, traffic.events
        before = {name: (link.load.bytes, link.load.seconds) for name, link in traffic.links.items()}
        counts = traffic.residency.counts
        fetches, faults = sum(counts.fetches.values()), counts.faults[Tier.DEVICE]
        self._compute = self._update = 0.0
        self._arrived.clear()
        try:
            for _ in range(self._micro_batches):
                for index, event in enumerate(self._workload.events):
                    self._event(index, event)
            self._rearrange()
            self._optimize()
        except CapacityError as error:
            raise NoRoom(f"a step does not fit: {error}", Tier.DEVICE, self._arrangement.ground.slot_bytes) from error
        self._steps += 1
        self._notes.peaks.note(self._notes.chunk_bytes(), 0)
        load = {
            name: (link.load.bytes - before[name][0], link.load.seconds - before[name][1])
            for name, link in traffic.links.items()
        }
        terms = {"compute": self._compute, "update": self._update, **{n: s for n, (_, s) in load.items()}}
        return StepResult(
            traffic.now - start,
            traffic.stall_seconds - stalled,
            terms,
            {name: nbytes for name, (nbytes, _) in load.items()},
            self._notes.peaks.device,
            self._notes.peaks.chunk,
            self._notes.peaks.other,
            sum(counts.fetches.values()) - fetches,
            counts.faults[Tier.DEVICE] - faults,
            traffic.events - events,
            {tier: dict(roles) for tier, roles in self._moved.items()},
            self._device_updates(),
        )

    def _device_updates(self) -> float:
        homes, elements = self._arrangement.homes["param"], self._arrangement.elements
        trained = {index: elements[index] for index in self._workload.trainable}
        here = (n for index, n in trained.items() if homes[self._arrangement.chunk_of[index]] is Tier.DEVICE)
        return sum(here) / max(1, sum(trained.values()))

    def _event(self, index: int, event: Event) -> None:
        self._gone += event.let_go
        match event.kind:
            case Kind.FORWARD:
                self._notes.begin(FORWARD)
            case Kind.BACKWARD:
                self._notes.begin(BACKWARD)
            case Kind.USE | Kind.SAVED:
                self._use(index, event)
                return
            case Kind.GRADIENT:
                self._traffic.now += self._use_seconds
                self._send(event.parameters[0])
            case Kind.END:
                self._arrive()
        self._phase(event.during, self._seconds[index][0])
        self._phase(event.after, self._seconds[index][1])

    def _use(self, index: int, event: Event) -> None:
        if not self._blocks:
            self._phase(event.during, self._seconds[index][0])
            self._phase(event.after, self._seconds[index][1])
            return
        self._traffic.now += self._use_seconds
        for parameter in self._gone:
            block = self._held.pop(parameter, None)
            if block is not None:
                self._traffic.release(block, Tier.DEVICE)
        self._gone.clear()
        used = [(p, self._blocks[self._operand(self._arrangement.chunk_of[p])]) for p in event.parameters]
        self._notes.moment(event.operator, tuple(dict.fromkeys(block for _, block in used)), event.live_bytes)
        new = [(p, block) for p, block in used if event.kind is Kind.USE or p not in self._held]
        for _, block in new:
            self._traffic.acquire(block, Tier.DEVICE)
        self._phase(event.during, self._seconds[index][0])
        for parameter, block in new:
            if parameter in event.held and parameter not in self._held:
                self._held[parameter] = block
            else:
                self._traffic.release(block, Tier.DEVICE)
        self._phase(event.after, self._seconds[index][1])

    def _operand(self, chunk: int) -> tuple[str, int]:
        """The role of `chunk` that copies on the device are fetched from."""
        return ("compute" if chunk in self._arrangement.homes.get("compute", {}) else "param"), chunk

    def _phase(self, phase: Phase, seconds: float) -> None:
        self._notes.grew(phase.peak_bytes)
        self._compute += seconds
        self._traffic.now += seconds

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _send(self, parameter: int) -> None:
        arrangement, traffic = self._arrangement, self._traffic
        chunk = arrangement.chunk_of[parameter]
        numel = arrangement.elements[parameter]
        nbytes = numel * arrangement.ground.chunks[chunk].itemsize
        device_bytes = numel * self._workload.compute_itemsizes[parameter]
        if arrangement.ground.resident and self._blocks:
            return
        if arrangement.ground.resident:
            if parameter not in self._arrived:
                self._notes.kept_bytes += device_bytes * (self._steps == 0)
                self._arrived.add(parameter)
            return
        if arrangement.homes["grad"][chunk] is Tier.DEVICE:
            self._arrived.add(parameter)
            return
        if arrangement.homes["grad"][chunk] is Tier.HOST:
            traffic.send_gradient(nbytes, device_bytes)
            self._arrived.add(parameter)
            return
        block = self._blocks["grad", chunk]
        self._notes.staged(block)
        traffic.open_staged(block, load=bool(self._arrived & set(arrangement.ground.chunks[chunk].parameters)))
        traffic.send_home(nbytes)
        traffic.release(block, Tier.HOST, dirty=True)
        self._arrived.add(parameter)

    def _arrive(self) -> None:
        if not self._blocks:
            return
        self._traffic.wait_for_gradients()
        self._settle("grad", list(self._arrangement.homes["grad"]))
        self._traffic.drain()

    def _settle(self, role: str, chunks: list[int]) -> None:
        for chunk in chunks:
            if self._arrangement.homes.get(role, {}).get(chunk) is Tier.NVME:
                self._traffic.execute(self._traffic.residency.settle(self._blocks[role, chunk]))

    # ---- the optimizer -----------------------------------------------------------------------------------------

    def _rearrange(self) -> None:
        """Before the first update chunks are filled in order of use."""
        if self._steps or not self._blocks:
            return
        arrangement = by_first_use(self._arrangement, self._workload)
        if arrangement.chunk_of == self._arrangement.chunk_of:
            return
        for block in self._held.values():
            self._traffic.release(block, Tier.DEVICE)
        self._held.clear()
        self._traffic.forget_copies()
        self._arrangement = arrangement
        for (role, chunk), block in self._blocks.items():
            self._traffic.sizes[block] = arrangement.role_bytes(chunk, role)
        self._notes.forget()

    def _fill_idle(self) -> None:
        """As `runtime.share`."""
        arrangement, capacities = self._arrangement, self._capacities
        if arrangement.ground.resident or not self._blocks or not self._notes.knows_a_backward():
            return
        copies = sum(chunk.span for chunk in arrangement.ground.chunks) * arrangement.ground.slot_bytes
        usable = capacities.device_bytes - capacities.device_fragment_bytes
        idle = idle_bytes(usable, capacities.chunk_cap_bytes, self._notes.peaks.other, self._notes.home_bytes + copies)
        homes, trainable = arrangement.homes, self._workload.trainable
        chunks = [
            chunk
            for chunk in homes["exp_avg"]
            if homes["param"][chunk] is not Tier.DEVICE and trainable & set(arrangement.ground.chunks[chunk].parameters)
        ]
        chosen = [chunks[at] for at in choose([self._candidate(chunk) for chunk in chunks], idle)]
        for chunk in chosen:
            for role in (role for role in ROLES if chunk in homes.get(role, {})):
                home = Block(f"{role} of chunk {chunk}", Tier.HOST, arrangement.ground.chunks[chunk].span)
                counts = self._steps > 0 or role in ("param", "compute", "grad")
                nbytes = arrangement.ground.home_bytes(chunk, role)
                self._traffic.move_in(self._blocks[role, chunk], home, nbytes * counts)
                self._notes.home_bytes += nbytes
                left = self._moved.setdefault(homes[role][chunk].name.lower(), {})
                left[role] = left.get(role, 0) + nbytes
        moved = {role: {**at, **{chunk: Tier.DEVICE for chunk in chosen if chunk in at}} for role, at in homes.items()}
        self._arrangement = replace(arrangement, homes=moved)

    def _candidate(self, chunk: int) -> Candidate:
        at = {role: tiers[chunk] for role, tiers in self._arrangement.homes.items() if chunk in tiers}
        sizes = {role: self._arrangement.ground.home_bytes(chunk, role) for role in at}
        return Candidate(sum(sizes.values()), sum(sizes[role] for role in at if at[role] is Tier.NVME))

    def _optimize(self) -> None:
        self._notes.begin(STEP)
        self._fill_idle()
        for chunk in sorted(self._arrangement.homes["exp_avg"]):
            members = set(self._arrangement.ground.chunks[chunk].parameters) & self._workload.trainable
            if members:
                self._update_chunk(chunk, members)
        self._traffic.drain()
        self._notes.end()

    def _update_chunk(self, chunk: int, members: set[int]) -> None:
        traffic, homes = self._traffic, self._arrangement.homes
        copies = chunk in homes.get("compute", {})
        staged = [role for role in ROLES if homes.get(role, {}).get(chunk) is Tier.NVME]
        for role in staged:
            self._notes.staged(self._blocks[role, chunk])
            fresh = self._steps == 0 and role in ("exp_avg", "exp_avg_sq")
            whole = role == "compute" and len(members) == len(self._arrangement.ground.chunks[chunk].parameters)
            traffic.open_staged(self._blocks[role, chunk], load=not (fresh or whole))
        block = self._blocks.get(self._operand(chunk))
        copied = block is not None and traffic.wait_for_copy(block)
        nbytes = UPDATE_BYTES * self._arrangement.ground.chunks[chunk].itemsize / 4 + COPY_BYTES * copies
        here = homes["param"][chunk] is Tier.DEVICE
        on_device = here and not self._hardware.host_to_device.by_the_caller
        device_rate, host_rate = self._hardware.device.bytes_per_second, self._hardware.host.update_bytes_per_second
        seconds = sum(self._arrangement.elements[index] for index in members) * nbytes
        seconds /= device_rate if on_device else host_rate
        thread = self._hardware.thread
        seconds += len(members) * thread.update_seconds + thread.chunk_seconds
        self._update += seconds
        traffic.now += seconds
        if block is not None and copied:
            if self._workload.mixed_precision and here:
                pass  # the update writes the copy too
            elif self._workload.mixed_precision and self._hardware.host_to_device.by_the_caller and not copies:
                copy_bytes = self._arrangement.numels[chunk] * self._arrangement.ground.compute_itemsize
                traffic.host_to_device.load.bytes += copy_bytes
            else:
                traffic.renew(block)
        for role in staged:
            traffic.release(self._blocks[role, chunk], Tier.HOST, dirty=role != "grad")
        for role in ROLES:
            if role != "grad":
                self._settle(role, [chunk])


def rehearse(
    workload: Workload,
    arrangement: Arrangement,
    capacities: Capacities,
    hardware: HardwareProfile,
    *,
    micro_batches: int = 1,
    policy: EvictionPolicy | None = None,
    prefetch: Prefetch | None = None,
    steps: int = 4,
) -> StepResult:
    """The last of `steps` steps: the first ones learn the trace and fill the tiers. Raises `NoRoom`."""
    run = Rehearsal(
        workload, arrangement, capacities, hardware, micro_batches=micro_batches, policy=policy, prefetch=prefetch
    )
    result = run.step()
    for _ in range(steps - 1):
        result = run.step()
    return result
