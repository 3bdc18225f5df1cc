"""Fits a model into a budget: chunks, slots, the staging ring, the tier of each home, and which chunks' homes move to
idle device memory, where the device updates them.

Pure: from sizes and capacities it makes numbers, tiers or an error that says what is missing. A run and a plan use it
alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetmem.base.units import format_size, round_down, round_up
from hetmem.errors import BudgetError
from hetmem.schedule.blocks import in_flight_bytes
from hetmem.schedule.gradients import more_aside, set_aside
from hetmem.schedule.layout import (
    ALIGNMENT_ELEMENTS,
    PAGE_ELEMENTS,
    ChunkSpec,
    Layout,
    ParameterSpec,
    build_layout,
    search_chunk_elements,
)
from hetmem.schedule.layout import PAGE_BYTES as PAGE_BYTES
from hetmem.schedule.staging import STAGED_ROLES, never_staged, staging_slots
from hetmem.schedule.trace import Tier

COPY_BYTES = 2
"""Bytes of an element of a 16-bit copy."""

ROWS_SHARE = 0.5
"""Rows of a frozen embedding are read from its home if a batch names at most this share of as many as it has."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENT_BYTES = {"bfloat16": 2, "8bit": 1}
SCALED_ELEMENTS = 256
"""How many elements of an 8-bit moment share a scale."""

MINIMUM_CHUNK_ELEMENTS = 256 * 1024
PIECE_BYTES = 64 << 30
"""Drivers page-lock no more than this in one call (r580 fails at 512 GiB). No transfer may cross two such pieces, so no
home crosses a multiple of it in host memory."""

_ASIDE = 4
"""Weights leave at most one in this many bytes of host memory to gradients."""

_LEAST_SLOTS = 4
"""Slots for copies, beside those of the largest chunk, that stay free where homes are on the device."""

DEVICE_SHARE = 0.5
"""A whole model stays on the device if its states take at most this share of it; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Hard limits in bytes. `device_chunk_bytes` limits what chunks take of the device (None: all of it).
    `home_copies`: whether 16-bit copies have homes; None: if host memory has room for them beside gradients and three
    states, the most that torch's optimizers keep. `ranks`: how many share the homes, which are in host memory then,
    states also on NVMe; 0 in one process."""

    device_bytes: int
    host_bytes: int
    nvme_bytes: int = 0
    device_chunk_bytes: int | None = None
    device_fragment_bytes: int = 0
    """What an allocator of the device cannot use."""
    home_copies: bool | None = None
    ranks: int = 0

    @property
    def usable_bytes(self) -> int:
        """Bytes of the device that an allocator can hand out."""
        return self.device_bytes - self.device_fragment_bytes

    @property
    def chunk_cap_bytes(self) -> int:
        """The most bytes of the device that chunks may take."""
        return self.device_bytes if self.device_chunk_bytes is None else self.device_chunk_bytes


def loaned_bytes(capacities: Capacities, staging_bytes: int) -> int:
    """Return how many bytes of host memory beside `staging_bytes` stay free of homes for activations, if these are
    offloaded and homes are on NVMe: a few times what gradients may have in flight."""
    room = max(0, capacities.host_bytes - staging_bytes)
    return round_down(min(4 * in_flight_bytes(capacities.device_bytes), room // 4), PAGE_BYTES)


class NoRoom(BudgetError):  # noqa: N818 - it is one of the errors of a budget, and says which
    """The budget lacks `missing_bytes` on `tier`. `state_bytes`: those of all homes, if the message names them."""

    def __init__(self, message: str, tier: Tier, missing_bytes: int, state_bytes: int = 0) -> None:
        super().__init__(message)
        self.tier = tier
        self.missing_bytes = missing_bytes
        self.state_bytes = state_bytes


@dataclass(frozen=True, slots=True)
class Ground:
    """What `survey` settles before homes are placed. `trainable` has the numbers of trained chunks, and `copied` of
    those whose 16-bit copies are to have homes: see `place_copies`."""

    layout: Layout
    itemsize: int
    compute_itemsize: int
    trainable: frozenset[int]
    state_bytes: int
    whole_bytes: int
    """What the device needs to hold all homes, and the copies that operators need beside them."""
    resident: bool
    in_codes: bool
    """Whether all homes are on the device though operators see copies: quantised weights as codes, which are decoded
    into slots there."""
    device_slots: int
    uses_nvme: bool
    staging_slots: int
    """Slots of a staging ring, of which each rank has one."""
    unstaged: frozenset[int]
    """Chunks with all homes in host memory, as staging them would take as much: see `schedule.staging`."""
    copied: frozenset[int]
    staying: frozenset[int]
    """Chunks with all homes on the device: all of them `in_codes`, else those for which the other tiers lack room."""
    missing_bytes: int
    """What host memory lacks for the homes of all other chunks."""
    host_bytes: int
    """The most bytes of host memory that the run can use."""
    arriving: tuple[int, ...]
    """By chunk, bytes of an element of a gradient in the dtype in which autograd makes it."""
    aside_bytes: int
    """What weights leave of host memory to gradients, so that streamed ones have buffers."""
    narrow: bool = False
    """Whether gradients at home keep the dtype in which autograd makes them."""
    moments: str = "float32"
    """The format of each moment: see `planner.workload.Updating`."""
    rings: int = 1
    """How many ranks share the homes, or one process."""

    @property
    def is_whole(self) -> bool:
        """Whether all homes are on the device, as it has room for them."""
        return self.resident or self.in_codes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot on the device."""
        return self.layout.chunk_elements * self.compute_itemsize

    @property
    def staging_slot_bytes(self) -> int:
        """Bytes of a slot of the staging ring."""
        return self.layout.chunk_elements * self.itemsize

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging rings of all ranks."""
        return self.rings * self.staging_slots * self.staging_slot_bytes

    @property
    def chunks(self) -> tuple[ChunkSpec, ...]:
        """The chunks, by number."""
        return self.layout.chunks

    def home_bytes(self, chunk: int, role: str) -> int:
        """Return the bytes that a home of `role` of `chunk` takes."""
        if role == "param":
            return self.layout.home_bytes(self.chunks[chunk])
        elements = self.chunks[chunk].span * self.layout.chunk_elements
        nbytes = elements * self.role_itemsize(chunk, role)
        if role in MOMENTS and self.moments == "8bit":
            parameters = min(len(self.layout.placements), elements // ALIGNMENT_ELEMENTS)
            nbytes += round_up(4 * (elements // SCALED_ELEMENTS + parameters), PAGE_BYTES)
        return nbytes

    def role_itemsize(self, chunk: int, role: str) -> int:
        """Return the bytes of an element of `role` of `chunk` at home; "compute" is the 16-bit copy, "arriving" a
        gradient in the dtype in which autograd makes it."""
        if role == "arriving" or (role == "grad" and self.narrow and chunk not in self.staying):
            return self.arriving[chunk]
        if role in MOMENTS and self.moments != "float32":
            return min(_MOMENT_BYTES[self.moments], self.chunks[chunk].itemsize)
        return COPY_BYTES if role == "compute" else self.chunks[chunk].itemsize


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes still free on the tiers that can hold homes. `unreachable`: why there are none on a drive that the budget
    has, and what helps beside more host memory: the beginning of a sentence."""

    host_bytes: int
    nvme_bytes: int
    unreachable: str = ""


def place(sizes: Sequence[int], room: Room, what: str) -> list[Tier]:
    """Return a tier for each block of `sizes` bytes, in order: HOST while there is room, then NVMe.

    Callers place roles in order of traffic per byte (parameters, gradients, states), so that what is used most often is
    nearest. Raises `BudgetError` naming the bytes that are missing.
    """
    host, nvme = room.host_bytes, room.nvme_bytes
    tiers = []
    for size in sizes:
        if size <= host:
            tiers.append(Tier.HOST)
            host -= size
        else:
            tiers.append(Tier.NVME)
            nvme -= size
    if nvme < 0:
        raise BudgetError(
            f"the budget has no place for {what}: {format_size(sum(sizes))} needed, {format_size(room.host_bytes)} of "
            f"host memory and {format_size(room.nvme_bytes)} of NVMe are left, so {format_size(-nvme)} are missing; "
            f"{room.unreachable}raise Budget(host=…){'' if room.unreachable else ', or Budget(nvme=…, nvme_dir=…)'}"
        )
    return tiers


def place_copies(sizes: Sequence[int], beside: Sequence[Tier], room: Room) -> list[Tier | None]:
    """Return a tier for each 16-bit copy of `sizes` bytes whose parameters lie `beside` it, in order: HOST, beside
    parameters there, while there is room. None: no copy. Beside parameters on NVMe a copy gains nothing: each step it
    would have to be compared with them, which reads as much as it saves."""
    host = room.host_bytes
    tiers: list[Tier | None] = []
    for size, tier in zip(sizes, beside, strict=True):
        fits = tier is Tier.HOST and size <= host
        tiers.append(Tier.HOST if fits else None)
        host -= size if fits else 0
    return tiers


def fits_device(state_bytes: int, device_bytes: int, device_chunk_bytes: int | None) -> bool:
    """Return whether everything (parameters, gradients, states) fits on the device for the whole run."""
    allowed = DEVICE_SHARE * device_bytes if device_chunk_bytes is None else device_chunk_bytes
    return state_bytes <= allowed


def largest_chunk_elements(device_bytes: int, host_bytes: int, compute_itemsize: int, itemsize: int, nvme: bool) -> int:
    """Return an upper bound of the chunk size: a slot takes at most 1/64 of the device, as smaller ones would leave
    activations hardly more, and with NVMe a staging ring takes at most a quarter of host memory."""
    bound = device_bytes // (64 * compute_itemsize)
    if nvme:
        bound = min(bound, host_bytes // (4 * 3 * STAGED_ROLES * itemsize))
    return bound


def survey(
    specs: Sequence[ParameterSpec],
    compute_itemsizes: Sequence[int],
    trainable: Collection[int],
    capacities: Capacities,
    *,
    copies: bool,
    chunk_bytes: int | None,
    beside_bytes: int = 0,
    roles: float = STAGED_ROLES,
    lends: bool = False,
    third_state: bool = True,
) -> Ground:
    """Choose chunks, slots and staging for `specs` (those numbered in `trainable` have states) within `capacities`.

    `copies`: operators use copies in another dtype even of homes on the device. `chunk_bytes`: of a chunk at home, None
    = searched. `beside_bytes`: known bytes on the device beside chunks. `roles`: what the homes of a trained chunk take
    elsewhere than on the device, as a multiple of its parameters. `lends`: a few gradients are lent buffers in
    addition. `third_state`: the optimizer may keep one more state than AdamW, so NVMe is opened where only that one
    exceeds host memory and staging still fits there. Raises `NoRoom` with the tier, the missing bytes and the parameter
    that needs them.
    """
    itemsize, compute_itemsize = max(spec.itemsize for spec in specs), max(compute_itemsizes)
    cap, host_bytes = capacities.chunk_cap_bytes, capacities.host_bytes
    upper = largest_chunk_elements(cap, host_bytes, compute_itemsize, itemsize, capacities.nvme_bytes > 0)
    elements = _chunk_elements(specs, chunk_bytes, itemsize, upper)
    layout = build_layout(specs, elements)
    trained_ones = set(trainable)
    with_states = frozenset(chunk.index for chunk in layout.chunks if not trained_ones.isdisjoint(chunk.parameters))
    role_sizes = {chunk.index: layout.home_bytes(chunk) for chunk in layout.chunks}
    states = sum(size * (STAGED_ROLES if index in with_states else 1) for index, size in role_sizes.items())
    slot_bytes = elements * compute_itemsize
    total = sum(chunk.span for chunk in layout.chunks)
    spans = {chunk.index: chunk.span for chunk in layout.chunks}
    least_slots = min(total, _LEAST_SLOTS + max(spans.values()))
    coded = any(spec.coded_bytes for spec in specs)  # operators need values beside the codes, a few at a time
    whole = states + (least_slots if coded else total * copies) * slot_bytes
    in_host, rings = capacities.ranks > 0, max(1, capacities.ranks)
    fits = fits_device(whole, capacities.device_bytes, capacities.device_chunk_bytes) and not in_host
    resident, in_codes = fits and not coded, fits and coded
    if not resident:
        _check_device(layout, slot_bytes, cap, specs)
    uses_nvme = capacities.nvme_bytes > 0 and not fits and states > host_bytes
    arriving = tuple(min(compute_itemsizes[chunk.parameters[0]], chunk.itemsize) for chunk in layout.chunks)
    cast = [chunk for chunk in layout.chunks if compute_itemsizes[chunk.parameters[0]] < chunk.itemsize]
    copy_sizes = {chunk.index: chunk.span * elements * COPY_BYTES for chunk in cast}
    copy_bytes = sum(copy_sizes.values())
    trained_sizes = [role_sizes[index] for index in sorted(with_states)]
    most = states + copy_bytes + sum(trained_sizes)  # a third state, of other optimizers
    copied = not fits and (most <= host_bytes if capacities.home_copies is None else capacities.home_copies)
    unstaged, staging, slot = frozenset[int](), 0, elements * itemsize
    if uses_nvme:
        host_slots = round_down(host_bytes, PAGE_BYTES) // slot
        unstaged, staging = never_staged(spans, with_states, host_slots, slot)
        if rings > 1:
            staging = staging_slots([spans[index] for index in spans.keys() - unstaged], host_slots // rings, slot)
        _check_staging(layout, rings * staging, slot, host_bytes, specs)
    if third_state and capacities.nvme_bytes > 0 and not (fits or uses_nvme) and most - copy_bytes > host_bytes:
        least = (STAGED_ROLES + 1) * max(spans.values())
        if states + copy_bytes * copied + rings * least * slot <= host_bytes:
            uses_nvme, staging = True, least
    gradients = [spans[index] * elements * arriving[index] for index in with_states - unstaged]
    beside_staging = host_bytes - rings * staging * slot
    aside = sum(set_aside(gradients, beside_staging // _ASIDE)) if uses_nvme and not in_host else 0
    if beside_staging - aside + capacities.nvme_bytes < sum(role_sizes.values()) + 2 * max(role_sizes.values()):
        aside = 0  # weights need all the room
    device = min(cap, capacities.usable_bytes - beside_bytes)
    device -= least_slots * slot_bytes

    def stay(roles: float, *, lends: bool) -> tuple[frozenset[int], int]:
        missing = states + copy_bytes * bool(capacities.home_copies) + staging * slot
        missing -= round_down(host_bytes, PAGE_BYTES)
        missing -= int((STAGED_ROLES - roles) * sum(trained_sizes))
        if lends:
            missing += sum(set_aside(gradients, host_bytes))
            missing += sum(role_sizes[index] for index in unstaged & with_states)
        if uses_nvme:  # a home too large for the rest of one tier goes to the other
            missing -= capacities.nvme_bytes - 2 * max(role_sizes.values())
        elsewhere = {index: int(roles * role_sizes[index]) for index in with_states}
        for index in elsewhere.keys() & copy_sizes.keys() if capacities.home_copies else ():
            elsewhere[index] += copy_sizes[index]
        lent = {index: spans[index] * elements * arriving[index] for index in with_states} if lends else {}
        return _staying(layout, role_sizes, elsewhere, lent, missing, device)

    staying, missing = frozenset(spans if in_codes else ()), 0
    if not (fits or in_host):
        staying, missing = stay(roles, lends=lends)
    if missing > 0 and not lends:
        with_overlap, short = stay(roles - 1, lends=True)
        staying = staying if short else with_overlap  # then only an optimizer that consumes gradients has room
    return Ground(
        layout,
        itemsize,
        compute_itemsize,
        with_states,
        states,
        whole,
        resident,
        in_codes,
        total * copies if resident else min(cap // slot_bytes, total),
        uses_nvme,
        staging,
        unstaged - staying,
        frozenset(chunk.index for chunk in cast if copied and chunk.index not in staying),
        staying,
        missing,
        host_bytes if uses_nvme else min(host_bytes, most + most // PIECE_BYTES * max(role_sizes.values())),
        arriving,
        aside,
        rings=rings,
    )


def _staying(
    layout: Layout,
    sizes: Mapping[int, int],
    elsewhere: Mapping[int, int],
    lent: Mapping[int, int],
    missing: int,
    room: int,
) -> tuple[frozenset[int], int]:
    """Return the chunks that stay in `room` bytes of the device with all roles, so that `missing` bytes fit elsewhere,
    and what is still missing then. Parameters of a chunk take `sizes`, and its homes would take `elsewhere` off the
    device. Gradients of chunks in `lent` borrow buffers of these bytes there. Small chunks are chosen first, so that
    little more than `missing` stays."""
    chosen, borrowed, buffers = set[int](), list[int](), list[int]()
    for index in sorted(elsewhere, key=lambda index: (layout.chunks[index].span, index)):
        if missing <= 0:
            break
        size, more = STAGED_ROLES * sizes[index], tuple[int, ...]()
        if index in lent:
            more = more_aside([*borrowed, lent[index]], buffers)
            size += sum(more) - sizes[index]
        if size <= room:
            chosen.add(index)
            missing, room = missing - elsewhere[index], room - size
            buffers += more
            borrowed += (lent[index],) if index in lent else ()
    return frozenset(chosen), max(0, missing)


def _chunk_elements(specs: Sequence[ParameterSpec], chunk_bytes: int | None, itemsize: int, upper: int) -> int:
    if chunk_bytes is not None:
        least = PAGE_ELEMENTS * itemsize
        if chunk_bytes < least:
            raise BudgetError(
                f"chunk_bytes must be at least {format_size(least)} ({least} bytes: {PAGE_ELEMENTS} elements of "
                f"{itemsize} bytes, of which a chunk has a multiple), got {chunk_bytes}"
            )
        return round_down(chunk_bytes // itemsize, PAGE_ELEMENTS)
    upper = max(PAGE_ELEMENTS, upper)
    lower = min(MINIMUM_CHUNK_ELEMENTS, upper // 4)
    return search_chunk_elements(specs, minimum_elements=max(PAGE_ELEMENTS, lower), maximum_elements=upper)


def _largest(layout: Layout, specs: Sequence[ParameterSpec]) -> tuple[int, str]:
    """Return the span of the largest chunk, and the name of its largest parameter."""
    largest = max(layout.chunks, key=lambda chunk: chunk.span)
    return largest.span, specs[max(largest.parameters, key=lambda index: specs[index].numel)].name


def _check_device(layout: Layout, slot_bytes: int, cap: int, specs: Sequence[ParameterSpec]) -> None:
    span, name = _largest(layout, specs)
    needed = span * slot_bytes
    if needed > cap:
        raise NoRoom(
            f"the device budget is below the minimum: chunks may take {format_size(cap)} ({cap} bytes) of the device, "
            f"the chunk of {name} alone needs {format_size(needed)} ({needed} bytes); raise Budget(device=…), or set a "
            f"smaller chunk_bytes",
            Tier.DEVICE,
            needed - cap,
        )


def _check_staging(
    layout: Layout, slots: int, slot_bytes: int, host_bytes: int, specs: Sequence[ParameterSpec]
) -> None:
    """Raise `NoRoom` if `host_bytes` do not hold `slots` of staging, all roles of the largest chunk."""
    needed = slots * slot_bytes
    if needed > round_down(host_bytes, PAGE_BYTES):
        span, name = _largest(layout, specs)
        raise NoRoom(
            f"the host budget is below the minimum: {format_size(host_bytes)} ({host_bytes} bytes) given, staging "
            f"between NVMe and the device needs {format_size(needed)} ({needed} bytes) for the largest chunk, that of "
            f"{name}: {span} slot(s) of {format_size(slot_bytes)} in {STAGED_ROLES} roles; raise Budget(host=…), "
            f"or set a smaller chunk_bytes",
            Tier.HOST,
            needed - round_down(host_bytes, PAGE_BYTES),
        )


# ---- homes in idle device memory, in a run and in a plan alike -------------------------------------------------------

MARGIN_SHARE = 1 / 16
"""Share of the device that stays free beside the most that anything but chunks ever needed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk whose homes may move: the bytes they take of the device, and how many of these lie on NVMe now.
    `lent_bytes`: of a buffer there that its gradients borrow, if they have no home."""

    device_bytes: int
    nvme_bytes: int = 0
    lent_bytes: int = 0


def room_bytes(usable_bytes: int, chunk_cap_bytes: int, non_model_bytes: int, home_bytes: int) -> int:
    """Return the bytes left for copies on a device of `usable_bytes`, beside `home_bytes` of homes and
    `non_model_bytes` of everything else; below zero if none. Homes and copies take at most `chunk_cap_bytes`."""
    return min(chunk_cap_bytes, usable_bytes - non_model_bytes) - home_bytes


def idle_bytes(usable_bytes: int, chunk_cap_bytes: int, non_model_bytes: int, chunk_bytes: int) -> int:
    """Return the bytes of a device of `usable_bytes` that are never used; below zero if memory is short.

    `chunk_cap_bytes`: the most that chunks may take; `non_model_bytes`: the most that everything else has taken at one
    time; `chunk_bytes`: homes on the device, and a copy of each chunk: if not all copies fit, nothing is idle, as a
    slot saves more bytes of the link in a step than a home of its size.
    """
    margin = int(MARGIN_SHARE * usable_bytes)
    return room_bytes(usable_bytes, chunk_cap_bytes, non_model_bytes + margin, chunk_bytes)


def choose(
    candidates: Sequence[Candidate], idle: int, there: Iterable[int] = (), buffers: Iterable[int] = ()
) -> list[int]:
    """Return the numbers of the candidates that move into `idle` bytes, in the order in which they move.

    First those with the greatest part on NVMe, the slowest tier; of equal ones the first given, which should be the
    first used: its gradient arrives last, and a step waits for its update. Candidates that do not fit are skipped.
    `there`: the `lent_bytes` of the chunks that are on the device; `buffers`: the bytes of those set aside there.
    """
    order = sorted(range(len(candidates)), key=lambda at: -candidates[at].nvme_bytes / candidates[at].device_bytes)
    chosen, lent, have = list[int](), [*there], [*buffers]
    for at in order:
        candidate = candidates[at]
        more = more_aside([*lent, candidate.lent_bytes], have) if candidate.lent_bytes else ()
        if candidate.device_bytes + sum(more) <= idle:
            chosen.append(at)
            idle -= candidate.device_bytes + sum(more)
            have += more
            lent += (candidate.lent_bytes,) if candidate.lent_bytes else ()
    return chosen
