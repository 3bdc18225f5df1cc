"""What `manage` and the optimizer will reserve for a model within a budget: chunks, slots, staging and homes.

The pure counterpart of `runtime.construction` and `runtime.relayout`, number for number (a test holds them to each
other), so that a plan is made of what a run will do. Sizes in, an `Arrangement` or a reasoned refusal out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetmem.errors import BudgetError
from hetmem.plan.layout import PAGE_ELEMENTS, ChunkSpec, Layout, ParameterSpec, build_layout, search_chunk_elements
from hetmem.plan.placement import Room, fits_device, largest_chunk_elements, place, staging_slots
from hetmem.plan.trace import Tier
from hetmem.plan.workload import Workload
from hetmem.units import format_size, round_down, round_up

ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")
"""In the order in which they get homes: the most traffic per byte first."""

MINIMUM_CHUNK_ELEMENTS = 256 * 1024


@dataclass(frozen=True, slots=True)
class Capacities:
    """A budget in bytes: hard limits. `device_chunk_bytes` caps what chunks take of the device (None: all of it)."""

    device_bytes: int
    host_bytes: int
    nvme_bytes: int = 0
    device_chunk_bytes: int | None = None
    device_fragment_bytes: int = 0
    """What an allocator of the device leaves unused."""

    @property
    def chunk_cap_bytes(self) -> int:
        """The most that chunks may take of the device."""
        return self.device_bytes if self.device_chunk_bytes is None else self.device_chunk_bytes


class NoRoom(BudgetError):  # noqa: N818 - it is one of the errors of a budget, and says which
    """The budget is too small by `missing_bytes` on `tier`."""

    def __init__(self, message: str, tier: Tier, missing_bytes: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.missing_bytes = missing_bytes


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Chunks and where their roles live. `homes[role][chunk]` is a tier; roles a chunk lacks are absent.

    `resident`: every home is on the device; `whole_bytes` is what that takes or would take.
    `numels[chunk]` elements of a chunk move, `capacities[chunk]` are reserved; `order[chunk]` are its parameters.
    """

    layout: Layout
    itemsize: int
    compute_itemsize: int
    resident: bool
    whole_bytes: int
    device_slots: int
    staging_slots: int
    homes: Mapping[str, Mapping[int, Tier]]
    numels: tuple[int, ...]
    chunk_of: tuple[int, ...]
    elements: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot on the device."""
        return self.layout.chunk_elements * self.compute_itemsize

    @property
    def staging_slot_bytes(self) -> int:
        """Bytes of a slot of the staging ring."""
        return self.layout.chunk_elements * self.itemsize

    @property
    def chunks(self) -> tuple[ChunkSpec, ...]:
        """The chunks, by number."""
        return self.layout.chunks

    def home_bytes(self, chunk: int) -> int:
        """Bytes that a home of one role of `chunk` takes."""
        spec = self.layout.chunks[chunk]
        return spec.span * self.layout.chunk_elements * spec.itemsize

    def bytes_by_role(self, tier: Tier) -> dict[str, int]:
        """Bytes of homes on `tier` by role, and of the staging ring; roles without any are left out."""
        found = {
            role: sum(self.home_bytes(chunk) for chunk, at in homes.items() if at is tier)
            for role, homes in self.homes.items()
        }
        if tier is Tier.HOST:
            found["staging"] = self.staging_slots * self.staging_slot_bytes
        return {role: nbytes for role, nbytes in found.items() if nbytes}


def arrange(workload: Workload, capacities: Capacities, chunk_bytes: int | None = None) -> Arrangement:
    """What a managed run of `workload` reserves. Raises `NoRoom` where the run would raise `BudgetError`."""
    specs = workload.parameters
    itemsize = max(spec.itemsize for spec in specs)
    compute_itemsize = max(workload.compute_itemsizes)
    cap = capacities.chunk_cap_bytes
    nvme = capacities.nvme_bytes > 0
    upper = largest_chunk_elements(cap, capacities.host_bytes, compute_itemsize, itemsize, nvme)
    elements = _chunk_elements(specs, chunk_bytes, itemsize, upper)
    layout = build_layout(specs, elements)
    trainable = {chunk.index for chunk in layout.chunks if workload.trainable & set(chunk.parameters)}
    total = sum(chunk.span for chunk in layout.chunks)
    copies = total * elements * compute_itemsize * workload.mixed_precision
    whole = _padded_bytes(layout, trainable) + copies
    resident = fits_device(whole, capacities.device_bytes, capacities.device_chunk_bytes)
    if not resident:
        _check_device(layout, elements * compute_itemsize, cap, specs)
    roles = [role for role in ROLES if role != "grad" or workload.mixed_precision or not resident]
    homes, staging = _homes(layout, trainable, capacities, resident, elements * itemsize, roles)
    slots = (total * workload.mixed_precision) if resident else min(cap // (elements * compute_itemsize), total)
    chunk_of = tuple(placement.chunk for placement in layout.placements)
    sizes = tuple(spec.numel for spec in specs)
    return Arrangement(
        layout, itemsize, compute_itemsize, resident, whole, slots, staging, homes, _used_ends(layout), chunk_of, sizes
    )


def state_bytes(workload: Workload) -> int:
    """Bytes of parameters, gradients and two optimizer states, without waste."""
    return sum(
        spec.numel * spec.itemsize * (len(ROLES) if index in workload.trainable else 1)
        for index, spec in enumerate(workload.parameters)
    )


def by_first_use(arrangement: Arrangement, workload: Workload) -> Arrangement:
    """The chunks as they are from the first update on: parameters in the order in which the forward used them."""
    if arrangement.resident and not workload.mixed_precision:
        return arrangement
    rank = {index: at for at, index in enumerate(workload.first_uses())}
    numels, chunk_of = list(arrangement.numels), list(arrangement.chunk_of)
    chunks = list(arrangement.layout.chunks)
    groups: dict[str, list[ChunkSpec]] = {}
    for chunk in arrangement.layout.chunks:
        if chunk.span == 1 and chunk.index in arrangement.homes["grad"]:
            groups.setdefault(chunk.group, []).append(chunk)
    for own in groups.values():
        order = sorted((index for chunk in own for index in chunk.parameters), key=rank.__getitem__)
        layout = build_layout([workload.parameters[i] for i in order], arrangement.layout.chunk_elements)
        together = [{order[index] for index in chunk.parameters} for chunk in layout.chunks]
        if len(layout.chunks) > len(own) or together == [set(chunk.parameters) for chunk in own]:
            continue
        for chunk in own:
            numels[chunk.index] = 0
            chunks[chunk.index] = replace(chunk, parameters=(), used_elements=0)
        for new, old, end in zip(layout.chunks, own, _used_ends(layout), strict=False):
            numels[old.index] = end
            members = tuple(order[index] for index in new.parameters)
            chunks[old.index] = replace(old, parameters=members, used_elements=new.used_elements)
        for placement in layout.placements:
            chunk_of[order[placement.parameter]] = own[placement.chunk].index
    return replace(
        arrangement,
        layout=replace(arrangement.layout, chunks=tuple(chunks)),
        numels=tuple(numels),
        chunk_of=tuple(chunk_of),
    )


def check_device(workload: Workload, arrangement: Arrangement, capacities: Capacities) -> None:
    """Raise `NoRoom` if some operator alone needs more than the device has; the quick part of a rehearsal."""
    needed, held, name, slots = 0, set[int](), "", 0
    for event in workload.events:
        held = held - set(event.let_go) | set(event.held)
        chunks = {arrangement.chunk_of[parameter] for parameter in held.union(event.parameters)}
        spans = 0 if arrangement.resident else sum(arrangement.chunks[chunk].span for chunk in chunks)
        most = event.peak_bytes + spans * arrangement.slot_bytes
        if most > needed:
            needed, name, slots = most, event.operator, spans
    if needed > capacities.device_bytes:
        raise NoRoom(
            f"{name} needs {format_size(needed)} of the device at once: activations and other tensors, and {slots} "
            f"slots of {format_size(arrangement.slot_bytes)}",
            Tier.DEVICE,
            needed - capacities.device_bytes,
        )


def _chunk_elements(specs: Sequence[ParameterSpec], chunk_bytes: int | None, itemsize: int, upper: int) -> int:
    if chunk_bytes is not None:
        return max(PAGE_ELEMENTS, round_down(chunk_bytes // itemsize, PAGE_ELEMENTS))
    upper = max(PAGE_ELEMENTS, upper)
    lower = min(MINIMUM_CHUNK_ELEMENTS, upper // 4)
    return search_chunk_elements(specs, minimum_elements=max(PAGE_ELEMENTS, lower), maximum_elements=upper)


def _check_device(layout: Layout, slot_bytes: int, cap: int, specs: Sequence[ParameterSpec]) -> None:
    largest = max(layout.chunks, key=lambda chunk: chunk.span)
    needed = largest.span * slot_bytes
    if needed > cap:
        biggest = max(largest.parameters, key=lambda index: specs[index].numel)
        raise NoRoom(
            f"the chunk of {specs[biggest].name} alone needs {format_size(needed)} of the device, chunks may take "
            f"{format_size(cap)}",
            Tier.DEVICE,
            needed - cap,
        )


def _padded_bytes(layout: Layout, trainable: set[int]) -> int:
    sizes = [chunk.span * layout.chunk_elements * chunk.itemsize for chunk in layout.chunks]
    return sum(size * (len(ROLES) if index in trainable else 1) for index, size in enumerate(sizes))


def _homes(
    layout: Layout,
    trainable: set[int],
    capacities: Capacities,
    resident: bool,
    staging_slot_bytes: int,
    roles: Sequence[str],
) -> tuple[dict[str, dict[int, Tier]], int]:
    """Homes by role and chunk, and the slots of the staging ring."""
    sizes = [chunk.span * layout.chunk_elements * chunk.itemsize for chunk in layout.chunks]
    owners = {role: [c.index for c in layout.chunks if role == "param" or c.index in trainable] for role in ROLES}
    if resident:
        return {role: dict.fromkeys(owners[role], Tier.DEVICE) for role in roles}, 0
    padded = _padded_bytes(layout, trainable)
    host, nvme, staging = round_down(capacities.host_bytes, 4096), capacities.nvme_bytes, 0
    if nvme == 0 or padded <= capacities.host_bytes:
        nvme = 0
    else:
        staging = staging_slots([chunk.span for chunk in layout.chunks], host // staging_slot_bytes)
        if staging * staging_slot_bytes > host:
            needed = staging * staging_slot_bytes
            raise NoRoom(f"staging needs {format_size(needed)} of host memory", Tier.HOST, needed - host)
        host -= staging * staging_slot_bytes
    homes: dict[str, dict[int, Tier]] = {}
    short = 0
    for role in ROLES:
        try:
            tiers = place([sizes[chunk] for chunk in owners[role]], Room(host, nvme), role)
        except BudgetError:
            tiers = []
            short += sum(sizes[chunk] for chunk in owners[role])
        homes[role] = dict(zip(owners[role], tiers, strict=False))
        taken = [round_up(sizes[c], 4096) for c, tier in homes[role].items() if tier is Tier.HOST]
        host -= sum(taken)
        nvme -= sum(sizes[c] for c, tier in homes[role].items() if tier is Tier.NVME)
    if short:
        where = Tier.NVME if capacities.nvme_bytes else Tier.HOST
        missing = padded + staging * staging_slot_bytes - round_down(capacities.host_bytes, 4096)
        missing -= capacities.nvme_bytes
        raise NoRoom(f"the states take {format_size(padded)} beside staging", where, max(1, missing))
    return homes, staging


def _used_ends(layout: Layout) -> tuple[int, ...]:
    """Per chunk, the elements up to its last parameter's end, rounded up to whole pages of any itemsize."""
    ends = [1] * len(layout.chunks)
    for placement in layout.placements:
        ends[placement.chunk] = max(ends[placement.chunk], placement.offset + placement.numel)
    return tuple(round_up(end, PAGE_ELEMENTS) for end in ends)
