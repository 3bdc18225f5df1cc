"""What `manage` and the optimizer will reserve for a model within a budget: chunks, slots, staging and homes.

Chunks, slots and staging come from `placement.survey`, as in a run. The placement of homes repeats that of
`placing.build` on sizes alone; a test compares the two. Returns an `Arrangement`, or raises `NoRoom` with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetmem.base.units import format_size, round_down, round_up
from hetmem.cpu.norm import sums_nbytes
from hetmem.errors import BudgetError
from hetmem.planner.workload import AS_IT_IS, Updating, Workload
from hetmem.schedule.blocks import in_flight_bytes
from hetmem.schedule.gradients import more_aside, set_aside
from hetmem.schedule.layout import ALIGNMENT_ELEMENTS, used_ends
from hetmem.schedule.placement import (
    PAGE_BYTES,
    Candidate,
    Capacities,
    Ground,
    NoRoom,
    Room,
    choose,
    loaned_bytes,
    place,
    place_copies,
    survey,
)
from hetmem.schedule.staging import MOST_ROLES, STAGED_ROLES
from hetmem.schedule.trace import Tier

ROLES = ("param", "compute", "grad", "exp_avg", "exp_avg_sq")
"""The roles in the order in which they get homes: the most traffic per byte first. "compute" is optional."""

_SAVED = {"float32": 0.0, "bfloat16": 1.0, "8bit": 1.49}
"""The memory that smaller moments save, in units of the float32 parameters' bytes, scales counted."""

OWN = ("param", "grad", "exp_avg", "exp_avg_sq")
"""The roles that every trained chunk needs."""


_IN_HOST = ("param", "grad")
"""The roles that ranks keep in host memory alone."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the roles of the chunks of `ground` live. `homes[role][chunk]` is a tier; roles a chunk lacks are absent.

    `numels[chunk]` elements of a chunk are transferred; parameter i lies in `chunk_of[i]` and has `elements[i]`.
    `left`: host memory and NVMe that homes leave free. Gradients of `lent` chunks have no home of their own: when one
    arrives, its chunk borrows one of the `set_aside` places in host memory (their bytes), or memory that is left,
    until the update has read it; one whose homes are on the device, of those that are `aside_there`. A gradient in such
    a place keeps the dtype it arrived in.
    """

    ground: Ground
    homes: Mapping[str, Mapping[int, Tier]]
    numels: tuple[int, ...]
    chunk_of: tuple[int, ...]
    elements: tuple[int, ...]
    left: Room
    lent: frozenset[int] = frozenset()
    set_aside: tuple[int, ...] = ()
    aside_there: tuple[int, ...] = ()
    away_bytes: int = 0
    """The peak of offloaded activations in host memory and on NVMe together."""
    spilled_bytes: int = 0
    """The part of `away_bytes` that lies on NVMe."""
    squares_bytes: int = 0
    """Sums of squares that ranks share, for the norm of gradients."""

    def __hash__(self) -> int:
        return hash((self.numels, self.set_aside, len(self.lent), self.spilled_bytes))  # `homes`, of dicts, has no hash

    def as_rehearsed(self, left: Room) -> Arrangement:
        """Return this arrangement with `left`, less what no step depends on, so that equal steps are rehearsed once."""
        ground = replace(self.ground, host_bytes=0, missing_bytes=0, state_bytes=0, whole_bytes=0, copied=frozenset())
        return replace(self, ground=ground, left=left)

    def may_borrow(self) -> Room:
        """Return the part of `left` that gradients can borrow: with NVMe, where states take all that is left, none."""
        lent = self.lent_on(Tier.HOST)
        sizes = (self._gradient_bytes(chunk) + self.ground.home_bytes(chunk, "arriving") for chunk in lent)
        return Room(0 if self.ground.staging_slots else min(self.left.host_bytes, sum(sizes)), 0)

    def lent_on(self, tier: Tier) -> list[int]:
        """Return the chunks whose gradients borrow memory on `tier`, in order."""
        return [
            chunk for chunk in sorted(self.lent) if (self.homes["grad"][chunk] is Tier.DEVICE) == (tier is Tier.DEVICE)
        ]

    def role_bytes(self, chunk: int, role: str) -> int:
        """Return the bytes that a transfer of `role` of `chunk` moves."""
        if role == "param" and (coded := self.ground.chunks[chunk].coded_bytes):
            return coded
        return self.numels[chunk] * self.ground.role_itemsize(chunk, role)

    def gradient(self, chunk: int) -> str:
        """Return the role that gives the dtype of stored gradients of `chunk`: "arriving" where their home is lent."""
        return "arriving" if chunk in self.lent else "grad"

    def bytes_by_role(self, tier: Tier) -> dict[str, int]:
        """Return the bytes of homes on `tier` by role, and of the staging ring; roles of 0 bytes are left out."""
        found = {
            role: sum(self.ground.home_bytes(chunk, role) for chunk, at in homes.items() if at is tier)
            for role, homes in self.homes.items()
        }
        for chunk, at in self.homes.get("param", {}).items():
            spec = self.ground.chunks[chunk]
            if spec.coded_bytes and at is tier:
                role = f"{spec.format} codes"
                found["param"] -= spec.coded_bytes
                found[role] = found.get(role, 0) + spec.coded_bytes
        if tier is not Tier.NVME:
            aside = self.set_aside if tier is Tier.HOST else self.aside_there
            found["grad"] = found.get("grad", 0) + sum(aside) - sum(map(self._gradient_bytes, self.lent_on(tier)))
        if tier is Tier.HOST:
            found["activations"] = self.away_bytes - self.spilled_bytes
            found["staging"] = self.ground.staging_bytes
            found["squares"] = self.squares_bytes
        if tier is Tier.NVME:
            found["activations"] = self.spilled_bytes
        return {role: nbytes for role, nbytes in found.items() if nbytes}

    def _gradient_bytes(self, chunk: int) -> int:
        return self.ground.home_bytes(chunk, "grad")


@functools.lru_cache(maxsize=16)
def ground_of(
    workload: Workload,
    capacities: Capacities,
    chunk_bytes: int | None = None,
    how: Updating = AS_IT_IS,
    *,
    sums: bool = False,
) -> Ground:
    """Return the chunks, slots and staging of a managed run of `workload`: by default those of `manage`, which knows of
    no optimizer. `sums` as for `arrange`. Raises `NoRoom`."""
    lends = how.lends and not capacities.ranks  # whose gradients have homes
    narrow = how.overlapped and how.needs_all and not (sums or capacities.ranks)
    ground = survey(
        workload.parameters,
        workload.compute_itemsizes,
        workload.trainable,
        capacities,
        copies=workload.mixed_precision,
        chunk_bytes=chunk_bytes,
        beside_bytes=workload.peak_live_bytes,
        roles=STAGED_ROLES - lends - 0.5 * (narrow and workload.mixed_precision) - _SAVED[how.moments],
        lends=lends,
        third_state=False,
    )
    return replace(ground, moments=how.moments, narrow=narrow and not ground.resident)


def arrange(
    workload: Workload,
    capacities: Capacities,
    chunk_bytes: int | None = None,
    how: Updating = AS_IT_IS,
    *,
    sums: bool = False,
) -> Arrangement:
    """Return what a managed run of `workload` reserves; with overlap gradients borrow their homes. `sums`: a
    step has several backwards, of which gradients that all stay are summed. Raises `NoRoom` where the run would raise
    `BudgetError`."""
    if not capacities.nvme_bytes:
        _check_room(capacities.host_bytes - workload.away_bytes, workload, Tier.HOST)
        capacities = replace(capacities, host_bytes=capacities.host_bytes - workload.away_bytes)
    ground = ground_of(workload, capacities, chunk_bytes, how, sums=sums)
    roles = [role for role in OWN if role != "grad" or workload.mixed_precision or not ground.resident]
    lends = how.lends and not ground.resident and not capacities.ranks
    loaned = loaned_bytes(capacities, ground.staging_bytes)
    loaned *= ground.uses_nvme and workload.away_bytes > 0
    squares = _squares_bytes(ground, len(workload.parameters)) if capacities.ranks > 1 and how.needs_all else 0
    smaller = replace(capacities, host_bytes=capacities.host_bytes - loaned - squares)
    homes, left, set_apart = _homes(ground, smaller, roles, lends=lends)
    spilled = 0
    if capacities.nvme_bytes and workload.away_bytes:
        largest = max(move.nbytes for move in workload.moves)
        _check_room(left.host_bytes + loaned - 2 * largest, workload, Tier.HOST)
        apart = largest + in_flight_bytes(capacities.device_bytes)  # as `Spill` keeps free
        spilled = min(workload.away_bytes, max(0, workload.away_bytes - (left.host_bytes + loaned - apart)))
        nvme = left.nvme_bytes if ground.uses_nvme else capacities.nvme_bytes
        _check_room(nvme - spilled, workload, Tier.NVME)
    there = [ground.home_bytes(chunk, "arriving") for chunk in sorted(ground.staying & ground.trainable)]
    return Arrangement(
        ground,
        homes,
        used_ends(ground.layout),
        tuple(placement.chunk for placement in ground.layout.placements),
        tuple(spec.numel for spec in workload.parameters),
        left,
        frozenset(homes["grad"]) - ground.unstaged if lends else frozenset(),
        set_apart,
        more_aside(there, ()) if lends else (),
        workload.away_bytes,
        spilled,
        squares,
    )


def _squares_bytes(ground: Ground, parameters: int) -> int:
    """Return the bytes of the sums of squares of chunks with trained ones of so many `parameters`."""
    sizes = [ground.layout.home_bytes(ground.chunks[at]) // ground.itemsize for at in ground.trainable]
    most = [min(parameters, size // ALIGNMENT_ELEMENTS) for size in sizes]
    return sum(round_up(sums_nbytes(*each), PAGE_BYTES) for each in zip(sizes, most, strict=True))


def _check_room(left: int, workload: Workload, tier: Tier) -> None:
    if left < 0:
        what = "on NVMe" if tier is Tier.NVME else "in host memory"
        away = format_size(workload.away_bytes)
        raise NoRoom(
            f"activations of {away} leave the device, and {format_size(-left)} are missing {what}", tier, -left
        )


def state_bytes(workload: Workload, how: Updating = AS_IT_IS) -> int:
    """Return the bytes of parameters, gradients and two moments, without padding; with overlap gradients count as
    none."""
    narrow = 0.5 * (how.overlapped and how.needs_all and workload.mixed_precision)
    roles = len(OWN) - how.lends - narrow - _SAVED[how.moments]
    return sum(
        int(spec.numel * spec.itemsize * (roles if index in workload.trainable else 1))
        for index, spec in enumerate(workload.parameters)
    )


def to_the_device(arrangement: Arrangement, workload: Workload, idle: int) -> list[int]:
    """Return the chunks whose homes move into `idle` bytes of the device, in order; see `schedule.placement`."""
    homes, chunks = arrangement.homes, arrangement.ground.chunks
    free = [
        chunk
        for chunk in homes["exp_avg"]
        if homes["param"][chunk] is not Tier.DEVICE and workload.trainable & set(chunks[chunk].parameters)
    ]
    borrowed = _borrowed(workload)
    there = [arrangement.ground.home_bytes(chunk, borrowed) for chunk in arrangement.lent_on(Tier.DEVICE)]
    candidates = [_candidate(arrangement, chunk, borrowed) for chunk in free]
    return [free[at] for at in choose(candidates, idle, there, arrangement.aside_there)]


def _borrowed(workload: Workload) -> str:
    """Return the role that gives the dtype of what gradients borrow: sums of micro-batches in turns have full
    precision."""
    return "grad" if workload.micro_batches > 1 else "arriving"


def _candidate(arrangement: Arrangement, chunk: int, borrowed: str) -> Candidate:
    at = {role: tiers[chunk] for role, tiers in arrangement.homes.items() if chunk in tiers}
    sizes = {role: arrangement.ground.home_bytes(chunk, role) for role in at}
    on_nvme = sum(sizes[role] for role in at if at[role] is Tier.NVME)
    if chunk in arrangement.lent:
        return Candidate(sum(sizes.values()) - sizes["grad"], on_nvme, arrangement.ground.home_bytes(chunk, borrowed))
    return Candidate(sum(sizes.values()), on_nvme)


def moved(arrangement: Arrangement, workload: Workload, chunks: Sequence[int]) -> Arrangement:
    """Return `arrangement` with the homes of `chunks` on the device."""
    homes = {role: {**at, **{c: Tier.DEVICE for c in chunks if c in at}} for role, at in arrangement.homes.items()}
    there = replace(arrangement, homes=homes)
    sizes = [there.ground.home_bytes(chunk, _borrowed(workload)) for chunk in there.lent_on(Tier.DEVICE)]
    return replace(there, aside_there=(*there.aside_there, *more_aside(sizes, there.aside_there)))


def check_device(workload: Workload, arrangement: Arrangement, capacities: Capacities) -> None:
    """Raise `NoRoom` if a single operator needs more than the device has; much quicker than a rehearsal."""
    ground = arrangement.ground
    needed, held, name, slots = 0, set[int](), "", 0
    homes = sum(arrangement.bytes_by_role(Tier.DEVICE).values())
    for event in workload.events:
        held = held - set(event.let_go) | set(event.held)
        chunks = {arrangement.chunk_of[parameter] for parameter in held.union(event.parameters)}
        spans = 0 if ground.resident else sum(ground.chunks[chunk].span for chunk in chunks)
        most = event.peak_bytes + spans * ground.slot_bytes + homes
        if most > needed:
            needed, name, slots = most, event.operator, spans
    if needed > capacities.usable_bytes:
        copies = f", and {slots} slots of {format_size(ground.slot_bytes)}" if slots else ""
        copies += f", beside homes of {format_size(homes)} that have no room elsewhere" if homes else ""
        raise NoRoom(
            f"{name} needs {format_size(needed)} of the device at once: activations and other tensors{copies}",
            Tier.DEVICE,
            needed - capacities.usable_bytes,
        )


def _homes(
    ground: Ground, capacities: Capacities, roles: Sequence[str], *, lends: bool
) -> tuple[dict[str, dict[int, Tier]], Room, tuple[int, ...]]:
    """Return homes by role and chunk, the room left, and the bytes of each place set aside for gradients (`lends`)."""
    chunks = [chunk.index for chunk in ground.chunks]
    owners = {role: [chunk for chunk in chunks if role == "param" or chunk in ground.trainable] for role in OWN}
    if ground.resident:
        on_device = {role: dict.fromkeys(owners[role], Tier.DEVICE) for role in roles}
        return on_device, Room(round_down(capacities.host_bytes, PAGE_BYTES), 0), ()
    host = round_down(capacities.host_bytes, PAGE_BYTES) - ground.staging_bytes
    room = Room(host - ground.aside_bytes, capacities.nvme_bytes if ground.uses_nvme else 0)
    homes: dict[str, dict[int, Tier]] = {}
    short, lacking, set_apart = False, "", tuple[int, ...]()
    staying = [chunk for chunk in ground.staying if not ground.missing_bytes]
    room = replace(room, host_bytes=room.host_bytes - _owed(ground, ()))  # what chunks never staged take of it
    for role in OWN:
        apart = [chunk for chunk in owners[role] if chunk in ground.unstaged]
        owning = [chunk for chunk in owners[role] if chunk not in ground.unstaged.union(staying)]
        homes[role] = dict.fromkeys(apart, Tier.HOST)
        short = short or room.host_bytes < 0
        if role == "grad" and lends:
            homes[role] |= dict.fromkeys(owning, Tier.HOST)
            set_apart = set_aside((ground.home_bytes(chunk, "arriving") for chunk in owning), room.host_bytes)
            room = replace(room, host_bytes=room.host_bytes - sum(set_apart))
        else:
            within = replace(room, nvme_bytes=0) if capacities.ranks and role in _IN_HOST else room
            try:
                tiers = place([ground.home_bytes(chunk, role) for chunk in owning], within, role)
            except BudgetError:
                tiers, short, lacking = [], True, lacking or role
            placed = dict(zip(owning, tiers, strict=False))
            homes[role] |= placed
            room = _left(ground, role, placed, room)
        homes[role] |= dict.fromkeys((chunk for chunk in staying if chunk in owners[role]), Tier.DEVICE)
        if role == "param":
            homes["compute"] = {} if short else _copies(ground, homes["param"], room)
            room = _left(ground, "compute", homes["compute"], room)
            known = _owed(ground, ()) - _owed(ground, OWN)  # from here on the optimizer is known
            room = replace(room, host_bytes=room.host_bytes + ground.aside_bytes + known)
    if short:
        lasting = [role for role in OWN if not (role == "grad" and lends)]
        states = sum(set_apart) + sum(ground.home_bytes(chunk, role) for role in lasting for chunk in owners[role])
        where, missing = Tier.HOST, ground.missing_bytes
        if capacities.ranks and (lacking in _IN_HOST or not ground.uses_nvme):
            least = _IN_HOST if ground.uses_nvme else lasting
            there = sum(ground.home_bytes(chunk, role) for role in least for chunk in owners[role])
            missing = there + ground.staging_bytes - round_down(capacities.host_bytes, PAGE_BYTES)
        elif ground.uses_nvme:  # chunks do not fill host memory to the last byte: more is missing than the difference
            ample = replace(capacities, nvme_bytes=capacities.nvme_bytes + 2 * ground.state_bytes)
            ample_homes, _, _ = _homes(replace(ground, missing_bytes=0), ample, roles, lends=lends)
            needed = (ground.home_bytes(c, role) for role, at in ample_homes.items() for c in at if at[c] is Tier.NVME)
            where, missing = Tier.NVME, sum(needed) - capacities.nvme_bytes
        staying_bytes = sum(STAGED_ROLES * ground.home_bytes(chunk, "param") for chunk in ground.staying)
        there_too = f", and the device holds {format_size(staying_bytes)} of them" if staying_bytes else ""
        message = f"the states take {format_size(states)} beside staging{there_too}"
        raise NoRoom(message, where, max(1, missing), states)
    return homes, room, set_apart


def _owed(ground: Ground, roles: Sequence[str]) -> int:
    """Return the bytes of host memory for homes of `roles` of chunks that are never staged; without `roles` those that
    are kept free while their optimizer is unknown."""
    nbytes = 0
    for chunk in ground.unstaged:
        trained = chunk in ground.trainable
        if roles:
            nbytes += sum(ground.home_bytes(chunk, role) for role in (roles if trained else ("param",)))
        else:
            nbytes += ground.home_bytes(chunk, "param") * (MOST_ROLES if trained else 1)
    return nbytes


def with_own_gradients(arrangement: Arrangement, chunk: int) -> Arrangement:
    """Return `arrangement` with a permanent home for gradients of `chunk`, one of `lent`. Raises `NoRoom`."""
    nbytes, left = arrangement.ground.home_bytes(chunk, "grad"), arrangement.left
    if arrangement.homes["grad"][chunk] is Tier.DEVICE:
        return replace(arrangement, lent=arrangement.lent - {chunk})
    try:
        (tier,) = place([nbytes], left, "gradients that find no home to be lent")
    except BudgetError as error:
        nvme = arrangement.ground.uses_nvme
        missing = nbytes - (left.nvme_bytes if nvme else left.host_bytes)
        raise NoRoom(str(error), Tier.NVME if nvme else Tier.HOST, missing) from error
    homes = {**arrangement.homes, "grad": {**arrangement.homes["grad"], chunk: tier}}
    left = _left(arrangement.ground, "grad", {chunk: tier}, left)
    return replace(arrangement, homes=homes, left=left, lent=arrangement.lent - {chunk})


def _copies(ground: Ground, params: Mapping[int, Tier], room: Room) -> dict[int, Tier]:
    """Return the homes of 16-bit copies, for parameters whose homes `params` are in host memory, as `room` allows."""
    wanted = [chunk.index for chunk in ground.chunks if chunk.index in ground.copied]
    sizes = [ground.home_bytes(chunk, "compute") for chunk in wanted]
    tiers = place_copies(sizes, [params[chunk] for chunk in wanted], room)
    return {chunk: tier for chunk, tier in zip(wanted, tiers, strict=True) if tier is not None}


def _left(ground: Ground, role: str, homes: Mapping[int, Tier], room: Room) -> Room:
    """Return the part of `room` that `homes` of `role` leave free."""
    sizes = {chunk: ground.home_bytes(chunk, role) for chunk in homes}
    host = sum(round_up(sizes[chunk], PAGE_BYTES) for chunk, tier in homes.items() if tier is Tier.HOST)
    nvme = sum(sizes[chunk] for chunk, tier in homes.items() if tier is Tier.NVME)
    return Room(room.host_bytes - host, room.nvme_bytes - nvme)
