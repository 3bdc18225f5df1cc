"""From a module and a budget to memory: layout, pools, and parameters moved to their homes.

Everything that can be refused is refused before the first parameter is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from hetmem.config import Limits
from hetmem.errors import ManageError
from hetmem.memory import views
from hetmem.memory.chunk import Chunk, Home, ManagedParameter, Role
from hetmem.memory.device import Device, DevicePool
from hetmem.memory.nvme import NvmeStore
from hetmem.memory.pools import HostPool
from hetmem.plan.cache import Block
from hetmem.plan.layout import ALIGNMENT_ELEMENTS, Layout, ParameterSpec, used_ends
from hetmem.plan.placement import Capacities, Room, place, place_copies, survey
from hetmem.plan.share import idle_bytes
from hetmem.plan.trace import Tier
from hetmem.runtime.bindings import stand_in, storage_references

HOST_SHARE = 0.6
"""Without a budget: this share of the memory that is free now. The rest is the system's and the program's own."""


ALLOCATOR_SHARE = 0.03
"""Of a GPU's budget: torch's allocator rounds up and cannot join what lies apart."""


@dataclass(slots=True, eq=False)
class Memory:
    """All memory of one managed module, and the addresses that tell homes and slots from everything else."""

    layout: Layout
    chunks: list[Chunk]
    device: Device
    device_bytes: int
    device_chunk_bytes: int
    device_pool: DevicePool
    host_pool: HostPool
    store: NvmeStore | None
    nvme_bytes: int
    buffer_bytes: int
    staging_slots: int
    mixed_precision: torch.dtype | None
    unpin: Callable[[], None]
    resident: bool
    device_home_bytes: int = 0
    moved_bytes: int = 0
    """Of the homes on the device, those that have moved there."""
    spare_bytes: int = 0
    """Host memory that was set aside and is nobody's home now."""
    _spare: dict[int, list[memoryview]] = field(default_factory=dict)
    _home_ranges: list[tuple[int, int]] = field(default_factory=list)
    _device_ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        host = self.host_pool.mapping.address
        self._home_ranges.append((host, host + self.host_pool.capacity_bytes))

    @property
    def streams(self) -> bool:
        """Whether operators see copies; False if every home is on the device in the dtype that computes."""
        return not self.resident or self.mixed_precision is not None

    def reserve(self, chunks: Iterable[Chunk], role: Role) -> None:
        """Give `role` of each of `chunks` a home. Raises `BudgetError`, with nothing reserved, if there is no room."""
        chunks = [chunk for chunk in chunks if role not in chunk.homes]
        for chunk in chunks if self.resident else [chunk for chunk in chunks if chunk.moved]:
            self._settle(chunk, role, self.device.allocate(chunk.home_nbytes(role)))
        chunks = [chunk for chunk in chunks if role not in chunk.homes]
        sizes = [chunk.home_nbytes(role) for chunk in chunks]
        tiers = place(sizes, self._room(), f"{role.name} of {len(chunks)} chunks")
        self._place(role, list(zip(chunks, sizes, tiers, strict=True)))

    def reserve_copies(self, chunks: Iterable[Chunk]) -> None:
        """Give 16-bit copies of `chunks`, which compute in 16 bits, homes as far as there is room."""
        wanted = [(chunk, chunk.home_nbytes(Role.COMPUTE)) for chunk in chunks]
        beside = [chunk.homes[Role.PARAM].tier for chunk, _ in wanted]
        tiers = place_copies([nbytes for _, nbytes in wanted], beside, self._room())
        placed = [
            (chunk, nbytes, tier) for (chunk, nbytes), tier in zip(wanted, tiers, strict=True) if tier is not None
        ]
        self._place(Role.COMPUTE, placed)

    def _room(self) -> Room:
        nvme = self.nvme_bytes - self.store.reserved_bytes if self.store else 0
        return Room(self.host_pool.free_bytes, nvme)

    def _place(self, role: Role, placed: list[tuple[Chunk, int, Tier]]) -> None:
        """Take memory for homes of so many bytes on those tiers."""
        on_disk = [(chunk, size) for chunk, size, tier in placed if tier is Tier.NVME]
        if on_disk:
            assert self.store is not None
            extents = self.store.reserve_many([size for _, size in on_disk])
            for (chunk, size), extent in zip(on_disk, extents, strict=True):
                memory = self.store.view(extent)
                chunk.homes[role] = Home(Tier.NVME, memory, extent=extent)
                self._home_ranges.append(_range(memory, size))
        for chunk, size, tier in placed:
            if tier is Tier.HOST:
                chunk.homes[role] = Home(Tier.HOST, self.host_pool.reserve(size))

    def _settle(self, chunk: Chunk, role: Role, memory: views.Memory) -> Home:
        """Make `memory`, which is the device's, the home of `role`."""
        home = chunk.homes[role] = Home(Tier.DEVICE, memory)
        nbytes = chunk.home_nbytes(role)
        self._device_ranges.append(_range(memory, nbytes))
        self.device_home_bytes += nbytes
        return home

    def move_in(self, chunk: Chunk, memories: Mapping[Role, views.Memory]) -> None:
        """`memories`, which are the device's, are homes of `chunk` from now on; the places that it had stay its own."""
        for role, memory in memories.items():
            before = chunk.homes.get(role)
            home = self._settle(chunk, role, memory)
            if before is not None:
                home.away, home.block, home.written = before, before.block, before.written
            self.moved_bytes += chunk.home_nbytes(role)

    def move_back(self, chunk: Chunk, role: Role) -> None:
        """End `move_in` of one role: its home is what it was, or there is none, if there was none."""
        home = chunk.homes.pop(role)
        nbytes = chunk.home_nbytes(role)
        self._device_ranges.remove(_range(home.memory, nbytes))
        self.device_home_bytes -= nbytes
        self.moved_bytes -= nbytes
        if home.away is not None:
            home.away.written = home.written
            chunk.homes[role] = home.away

    def idle_bytes(self, non_model_bytes: int) -> int:
        """See `plan.share`."""
        copies = sum(chunk.spec.span for chunk in self.chunks) * self.device_pool.slot_bytes
        held = self.device_home_bytes + copies
        return idle_bytes(self.usable_bytes, self.device_chunk_bytes, non_model_bytes, held)

    def take_device(self, nbytes: int) -> views.Memory:
        """Memory of the device for what comes there beside copies; it may be asked back, as homes that moved are."""
        memory = self.device.allocate(nbytes)
        self._device_ranges.append(_range(memory, nbytes))
        self.device_home_bytes += nbytes
        self.moved_bytes += nbytes
        return memory

    def give_device(self, memory: views.Memory, nbytes: int) -> None:
        """End `take_device`."""
        self._device_ranges.remove(_range(memory, nbytes))
        self.device_home_bytes -= nbytes
        self.moved_bytes -= nbytes

    def set_aside(self, chunks: Iterable[Chunk], role: Role, count: int) -> None:
        """Host memory for `role` of any `count` of `chunks` at a time, to be lent; less if there is less left."""
        for nbytes in sorted((chunk.home_nbytes(role) for chunk in chunks), reverse=True)[:count]:
            if nbytes <= self.host_pool.free_bytes:
                self._spare.setdefault(nbytes, []).append(self.host_pool.reserve(nbytes))
                self.spare_bytes += nbytes

    def lends(self, chunk: Chunk, role: Role) -> bool:
        """Whether memory for `role` of `chunk` was set aside at all."""
        return chunk.home_nbytes(role) in self._spare

    def lend(self, chunk: Chunk, role: Role) -> bool:
        """Give `role` of `chunk` a home in memory that was set aside; False if all of its size is lent."""
        nbytes = chunk.home_nbytes(role)
        if not self._spare.get(nbytes):
            return False
        chunk.homes[role] = Home(Tier.HOST, self._spare[nbytes].pop())
        self.spare_bytes -= nbytes
        return True

    def take_back(self, chunk: Chunk, role: Role) -> None:
        """End `lend`."""
        memory = chunk.homes.pop(role).memory
        assert isinstance(memory, memoryview)
        self._spare.setdefault(memory.nbytes, []).append(memory)
        self.spare_bytes += memory.nbytes

    def block(self, chunk: Chunk, role: Role) -> Block:
        """What the residency has to know of `role` of `chunk`. A copy in 16 bits is as far from a home on the device
        as from one in host memory: one step."""
        home = chunk.homes[role].tier
        span = chunk.spec.span
        if role.dtype is not None:  # it is only ever staged, in slots that are for elements of the widest dtype
            span = -(-chunk.home_nbytes(role) // self.host_pool.slot_bytes) if self.host_pool.slot_bytes else 1
        return Block(chunk.label(role), Tier.HOST if home is Tier.DEVICE else home, span)

    def device_slots(self, non_model_bytes: int) -> int:
        """How many slots chunks may take while everything else takes `non_model_bytes`."""
        room = self.room_bytes(non_model_bytes)
        return max(0, room // self.device_pool.slot_bytes) if self.streams else 0

    def room_bytes(self, non_model_bytes: int) -> int:
        """What is left for copies while everything else takes `non_model_bytes`; below zero if homes take more."""
        return min(self.device_chunk_bytes, self.usable_bytes - non_model_bytes) - self.device_home_bytes

    @property
    def usable_bytes(self) -> int:
        """The device's bytes less those that an allocator cannot use, where one hands out what chunks leave."""
        return (
            self.device_bytes if self.device.watched else self.device_bytes - int(ALLOCATOR_SHARE * self.device_bytes)
        )

    def is_home_address(self, address: int) -> bool:
        """Whether `address` lies in host memory or a mapped file that hetmem owns."""
        return any(start <= address < end for start, end in self._home_ranges)

    def is_device_address(self, address: int) -> bool:
        """Whether `address` lies in device memory that chunks own."""
        return self.device_pool.holds(address) or any(start <= address < end for start, end in self._device_ranges)


def _range(memory: views.Memory, nbytes: int) -> tuple[int, int]:
    start = views.address_of(memory)
    return start, start + nbytes


def is_lazy(parameter: torch.nn.Parameter) -> bool:
    """Whether `parameter` has no shape yet."""
    return isinstance(parameter, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def collect(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The distinct parameters of `module` by name, in order of registration; refuses what cannot be managed."""
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ManageError(f"{type(module).__name__} has no parameters, so there is nothing to manage")
    spans: list[tuple[int, int, str]] = []
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise ManageError(f"{name} has no shape yet (a lazy module): run one forward before managing the model")
        if parameter.device.type != "cpu":
            raise ManageError(
                f"{name} is on {parameter.device}, expected host memory: build the model on the CPU (or move it there "
                f"with model.cpu()); hetmem brings its parameters to the accelerator"
            )
        if parameter.layout is not torch.strided:
            raise ManageError(f"{name} has layout {parameter.layout}, expected a dense (strided) tensor")
        start = parameter.data_ptr()
        spans.append((start, start + parameter.numel() * parameter.itemsize, name))
    spans.sort()
    for (_, end, name), (start, other_end, other) in pairwise(spans):
        if start < end and start < other_end:
            raise ManageError(f"{name} and {other} share memory but are two parameters: tie them by using one object")
    return parameters


def build_memory(
    module: torch.nn.Module,
    limits: Limits,
    device: Device,
    mixed_precision: torch.dtype | None,
    chunk_bytes: int | None,
) -> Memory:
    """Lay `module` out, open the pools and move its parameters home. Nothing is changed if it raises."""
    parameters = collect(module)
    capacities = Capacities(
        _device_bytes(limits, device),
        _host_bytes(limits),
        limits.nvme_bytes,
        limits.device_chunk_bytes,
        home_copies=limits.home_copies,
    )
    compute = {name: _compute_dtype(p.dtype, mixed_precision) for name, p in parameters.items()}
    ground = survey(
        [ParameterSpec(n, p.numel(), f"{p.dtype} {p.requires_grad}", p.itemsize) for n, p in parameters.items()],
        [dtype.itemsize for dtype in compute.values()],
        [index for index, parameter in enumerate(parameters.values()) if parameter.requires_grad],
        capacities,
        copies=mixed_precision is not None,
        chunk_bytes=chunk_bytes,
    )
    store = NvmeStore(list(limits.nvme_directories), limits.nvme_bytes) if ground.uses_nvme else None
    unpin = _nothing
    try:
        host_pool = HostPool(capacities.host_bytes)
        host_pool.reserve_staging(ground.staging_slot_bytes, ground.staging_slots)
        unpin = _nothing if ground.resident else device.pin(host_pool.mapping)
        memory = Memory(
            ground.layout,
            _chunks(ground.layout, list(parameters.values()), list(compute.values())),
            device,
            capacities.device_bytes,
            capacities.chunk_cap_bytes,
            device.pool(ground.slot_bytes, ground.device_slots),
            host_pool,
            store,
            limits.nvme_bytes,
            sum(buffer.numel() * buffer.itemsize for buffer in module.buffers()),
            ground.staging_slots,
            mixed_precision,
            unpin,
            ground.resident,
        )
        memory.reserve(memory.chunks, Role.PARAM)
        memory.reserve_copies(chunk for chunk in memory.chunks if chunk.spec.index in ground.copied)
    except BaseException:
        unpin()
        if store is not None:
            store.close()
        raise
    _move_home(memory, list(parameters.items()))
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device.torch_device)
    return memory


def _compute_dtype(dtype: torch.dtype, mixed_precision: torch.dtype | None) -> torch.dtype:
    return mixed_precision if mixed_precision is not None and dtype is torch.float32 else dtype


def _nothing() -> None:
    """Host memory that no copy uses is not pinned."""


def _device_bytes(limits: Limits, device: Device) -> int:
    asked = [size for size in (limits.device_bytes, device.memory_bytes) if size is not None]
    return min(asked) if asked else device.available_bytes()


def _host_bytes(limits: Limits) -> int:
    if limits.host_bytes is not None:
        return limits.host_bytes
    return int(_available_bytes() * HOST_SHARE)


def _available_bytes() -> int:
    import psutil  # costs more than all of hetmem to import, and a budget that is said needs it not

    available: int = psutil.virtual_memory().available
    return available


def _chunks(layout: Layout, parameters: list[torch.nn.Parameter], compute: list[torch.dtype]) -> list[Chunk]:
    ends = used_ends(layout)
    return [
        Chunk(
            spec,
            spec.span * layout.chunk_elements,
            ends[spec.index],
            parameters[spec.parameters[0]].dtype,
            compute[spec.parameters[0]],
            min(len(parameters), spec.span * layout.chunk_elements // ALIGNMENT_ELEMENTS),
        )
        for spec in layout.chunks
    ]


def _move_home(memory: Memory, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
    for placement, (name, parameter) in zip(memory.layout.placements, parameters, strict=True):
        chunk = memory.chunks[placement.chunk]
        data = parameter.data
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(data)
        strides = data.stride() if dense else torch.empty(data.shape, device="meta").stride()
        empty = torch.empty(0)
        managed = ManagedParameter(
            parameter, name, chunk, placement.offset, placement.numel, data.shape, strides, empty, empty
        )
        chunk.parameters.append(managed)
        settle_in(managed, memory.device.torch_device)


def settle_in(managed: ManagedParameter, device: torch.device) -> None:
    """Move the values of `managed` to its place in its chunk, which is its home from now on."""
    home = managed.view(Role.PARAM)
    home.copy_(managed.parameter.data)
    reside(managed, home, device)


def reside(managed: ManagedParameter, home: torch.Tensor, device: torch.device) -> None:
    """`home` holds the values of `managed`, which compute on `device`: make it what `.data` is."""
    recast(managed, home)
    dtype = managed.chunk.compute_dtype
    same = dtype is managed.chunk.dtype and home.device == device
    managed.home = home
    managed.rest = home if same else stand_in(home, dtype, device)
    managed.parameter.data = home
    managed.version = managed.parameter._version
    managed.home_references = storage_references(home)


def recast(managed: ManagedParameter, home: torch.Tensor) -> None:
    """Make the 16-bit copy at home, if there is one, what `home`, which holds the values of `managed`, says."""
    if Role.COMPUTE in managed.chunk.homes:
        with torch.no_grad():
            managed.view(Role.COMPUTE).copy_(home)


def recast_all(chunk: Chunk) -> None:
    """`recast` of every parameter of `chunk`."""
    for managed in chunk.parameters:
        recast(managed, managed.home)
