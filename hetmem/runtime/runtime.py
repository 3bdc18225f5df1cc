"""The one caller of `plan.residency` and `memory.transfer`: brings what operators, autograd and optimizers need.

Hooks tell it what is about to be used; it asks the residency, has the commands carried out, and waits if it must.
It knows nothing of torch's hooks and modes, and nothing of optimizers.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hetmem.errors import CapacityError, DeviceOutOfMemoryError, ManageError
from hetmem.memory.chunk import Chunk, Home, ManagedParameter, Role
from hetmem.memory.device import DevicePool
from hetmem.memory.nvme import NvmeStore
from hetmem.memory.pools import HostPool
from hetmem.memory.transfer import Finished, Link, TransferEngine
from hetmem.plan.cache import CopyState
from hetmem.plan.residency import Command, Drop, Fetch, Residency, Write
from hetmem.plan.trace import Tier
from hetmem.runtime.bindings import Bindings
from hetmem.runtime.construction import Memory
from hetmem.runtime.monitor import DeviceMonitor
from hetmem.runtime.statistics import Statistics
from hetmem.runtime.tracer import STEP, StepTracer
from hetmem.units import format_size

_GRADIENT = "gradient"
_GRADIENTS_IN_FLIGHT = 4
_SAMPLES = 16
_SMALL_BYTES = 1 << 20  # below this, handing a copy to a thread costs more than the copy
_LOADING = (CopyState.WAITING, CopyState.LOADING)


class Runtime:
    """Everything hetmem knows of one managed module. One thread at a time calls it: the one that trains.

    `residency` owns where copies are, the pools own bytes, `engine` owns threads; the runtime owns the order of
    events. Guarantees after every public method, also one that raised: every parameter outside compute is its home,
    no capacity is exceeded, and no copy is lost.
    """

    def __init__(self, memory: Memory, residency: Residency, engine: TransferEngine, *, sanitize: bool) -> None:
        self.memory = memory
        self.chunks: list[Chunk] = memory.chunks
        self.residency = residency
        self.engine = engine
        self.sanitize = sanitize
        self.tracer = StepTracer()
        self.statistics = Statistics()
        self.parameters = [managed for chunk in self.chunks for managed in chunk.parameters]
        self.bindings = Bindings(self.parameters)
        self.monitor = DeviceMonitor(
            memory.is_home_address, memory.is_device_address, _WeakGrown(self), strict=sanitize
        )
        self._chunk_of_block: dict[int, tuple[Chunk, Role]] = {}
        for chunk in self.chunks:
            self.register_home(chunk, Role.PARAM)
        self._held: dict[int, ManagedParameter] = {}
        self._limit = self.device_pool.slots
        self._gradients = 0
        self._first_uses = 0
        self._untracked: set[int] = set()
        self._commands: deque[tuple[Command, bool]] = deque()
        self._executing = False
        self._ended: Hashable | None = None
        self._finalizer = weakref.finalize(self, _close, engine, memory.store)

    @property
    def device_pool(self) -> DevicePool:
        """The slots of the device."""
        return self.memory.device_pool

    @property
    def host_pool(self) -> HostPool:
        """Host memory."""
        return self.memory.host_pool

    def register_home(self, chunk: Chunk, role: Role) -> None:
        """Let the residency know the home of `role`, unless it is on the device, where it stays."""
        home = chunk.homes[role]
        if home.tier is not Tier.DEVICE:
            home.block = self.residency.add(self.memory.block(chunk, role))
            self._chunk_of_block[home.block] = (chunk, role)

    def ensure_homes(self, chunks: Iterable[Chunk], roles: Iterable[Role]) -> None:
        """Give each of `roles` of `chunks` a home where it has none. Raises `BudgetError` if there is no room."""
        for role in roles:
            missing = [chunk for chunk in chunks if role not in chunk.homes]
            self.memory.reserve(missing, role)
            for chunk in missing:
                self.register_home(chunk, role)

    def close(self) -> None:
        """Wait for what is in flight and stop all threads; the homes stay readable as long as somebody holds them."""
        self._finalizer()

    # ---- segments and moments ----------------------------------------------------------------------------------

    def begin_segment(self, key: Hashable, *, measured: bool) -> None:
        """A forward, a backward or a step begins; `key` says which, so that its trace can be found again."""
        before = self.tracer.key if self.tracer.key is not None else self._ended
        self._ended = None
        self.tracer.begin(key, measured=measured)
        if before is not None:
            self.tracer.book.follows(before, key)
        self.poll()
        self.expect(key)

    def expect(self, key: Hashable) -> None:
        """Plan for the segment `key` and what usually comes after it."""
        for tier, schedule in self.tracer.schedules(key).items():
            self._execute(self.residency.expect(tier, schedule))

    def _moment(self, operator: str, blocks: tuple[int, ...]) -> None:
        live = self.monitor.live_bytes if self.tracer.measured else self.memory.buffer_bytes
        expected = self.tracer.moment(operator, blocks, live)
        self._set_limit(expected)
        self.residency.reach(blocks, Tier.DEVICE)
        self.statistics.device_in_use(self.chunk_bytes(), expected)

    def _set_limit(self, non_model_bytes: int) -> None:
        """Leave room for `non_model_bytes` beside chunks."""
        limit = self.memory.device_slots(non_model_bytes)
        if limit != self._limit:
            shrunk = limit < self._limit
            self._limit = limit
            self._execute(self.residency.limit(Tier.DEVICE, limit))
            if shrunk:
                self.device_pool.give_back(self.residency.free_slots(Tier.DEVICE), limit)

    def chunk_bytes(self) -> int:
        """Device bytes that chunks hold now."""
        return self.residency.used_slots(Tier.DEVICE) * self.device_pool.slot_bytes + self.memory.device_home_bytes

    def non_model_grew(self, operator: str, live_bytes: int) -> None:
        """An operator of a measured segment needs memory: give up idle chunks, as a GPU's allocator would be made to.

        Raises `DeviceOutOfMemoryError` if what is left in use does not fit beside it.
        """
        self.tracer.grew(live_bytes)
        with self.unwatched():
            self._set_limit(live_bytes)
            while self.chunk_bytes() + live_bytes > self.memory.device_bytes and self.residency.in_flight():
                self._wait_for_one()
        if self.chunk_bytes() + live_bytes > self.memory.device_bytes:
            raise DeviceOutOfMemoryError(
                f"out of device memory in {operator}: activations and other tensors take {format_size(live_bytes)} "
                f"and chunks in use {format_size(self.chunk_bytes())}, together more than the "
                f"{format_size(self.memory.device_bytes)} of the device budget. {self._ways_out()}"
            )
        self.statistics.device_in_use(self.chunk_bytes(), live_bytes)

    def _ways_out(self) -> str:
        if self.memory.device_home_bytes:
            return "Set Budget(device_chunks=…) lower, so that chunks are streamed, or use a smaller batch"
        return "Raise Budget(device=…), use a smaller batch, activation checkpointing or a smaller chunk_bytes"

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What hetmem itself does is no operator of the model, nor of a `torch.func` transform around it."""
        paused = self.monitor.paused
        self.monitor.paused = True
        transformed = torch._C._functorch.maybe_current_level() is not None
        inference = torch.is_inference_mode_enabled()  # views made in it could not be written to outside
        try:
            with (
                torch.inference_mode(False) if inference else nullcontext(),
                temporarily_clear_interpreter_stack() if transformed else nullcontext(),
            ):
                yield
        finally:
            self.monitor.paused = paused

    # ---- parameters on the device ------------------------------------------------------------------------------

    def use(self, operator: str, used: list[ManagedParameter]) -> None:
        """Bind `used` to their device copies for one operator. Nothing is bound if this raises."""
        with self.unwatched():
            self._let_go()
            for managed in used:
                if managed.first_use < 0:
                    managed.first_use = self._first_uses = self._first_uses + 1
                if managed.parameter._version != managed.version:
                    self.user_wrote(managed)
            self._moment(operator, tuple(dict.fromkeys(_param_block(managed) for managed in used)))
            acquired: list[ManagedParameter] = []
            try:
                for managed in used:
                    self._acquire_device(managed, operator)
                    acquired.append(managed)
            except BaseException:
                for managed in acquired:
                    self._release_device(managed)
                raise
            for managed in used:
                self.bindings.bind(managed)

    def end_use(self, used: list[ManagedParameter], *, untracked: bool = False, writes: bool = False) -> None:
        """The operator is over: parameters rest, what it wrote goes home, what nobody holds may be evicted.

        `untracked`: it handed out a view whose writes count no versions (`parameter.data`); `writes`: it may itself
        have written without counting one.
        """
        with self.unwatched():
            for managed in used:
                self.bindings.unbind(managed)
            for managed in used:
                if managed.parameter._version != managed.version:
                    self._operator_wrote(managed)
                elif writes:
                    self._compare_home(managed)
                if self.bindings.held(managed) and id(managed) not in self._held:
                    self._held[id(managed)] = managed
                    if untracked:
                        self._untracked.add(id(managed))
                else:
                    self._release_device(managed)

    def saved(self, managed: ManagedParameter) -> torch.Tensor:
        """The device view of `managed` for autograd; it stays on the device until nobody holds the view any more."""
        with self.unwatched():
            self._let_go()
            self._moment(f"backward of {managed.name}", (_param_block(managed),))
            if id(managed) not in self._held:
                self._acquire_device(managed, f"backward of {managed.name}")
                self._held[id(managed)] = managed
            assert managed.device is not None
            return managed.device

    def _acquire_device(self, managed: ManagedParameter, operator: str) -> None:
        block = _param_block(managed)
        try:
            self._acquire(block, Tier.DEVICE)
        except CapacityError as error:
            raise DeviceOutOfMemoryError(
                f"{operator} does not fit on the device: {error}. Chunks are {format_size(self.device_pool.slot_bytes)}"
                f" each; of {format_size(self.memory.device_bytes)}, {self._limit} slots are left beside activations "
                f"and other tensors. {self._ways_out()}"
            ) from error
        self.bindings.open_device(managed, self.device_pool, self.residency.slot(block, Tier.DEVICE))

    def _release_device(self, managed: ManagedParameter) -> None:
        self._execute(self.residency.release(_param_block(managed), Tier.DEVICE))

    def notice_writes_to_views(self) -> None:
        """An operator met no parameter, but it may have written to a view of one: then that goes home too."""
        for managed in self._held.values():
            if managed.parameter._version != managed.version and managed.device is not None:
                with self.unwatched():
                    self._operator_wrote(managed)

    def _let_go(self) -> None:
        """Release the copies whose last holder is gone."""
        for key, managed in list(self._held.items()):
            if id(managed) in self._untracked:
                self._compare_home(managed)
            if not self.bindings.held(managed):
                del self._held[key]
                self._untracked.discard(id(managed))
                self._release_device(managed)

    # ---- writes that were not hetmem's -------------------------------------------------------------------------

    def notice_writes(self) -> None:
        """Look at every parameter for changes by the user since it was last used."""
        for managed in self.parameters:
            if self.changed(managed):
                self.user_wrote(managed)

    def changed(self, managed: ManagedParameter) -> bool:
        """Whether somebody else has written to `managed` since hetmem last saw it, outside compute."""
        parameter = managed.parameter
        if parameter._version != managed.version or parameter.data_ptr() != managed.home.data_ptr():
            return True
        return bool(managed.numel) and self._copy_differs(managed)

    def home_rewritten(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within compute: the value goes home, where it counts from the next use on."""
        managed.home.copy_(value)
        self._untracked.discard(id(managed))
        self.superseded(managed.chunk, Role.PARAM)

    def _copy_differs(self, managed: ManagedParameter) -> bool:
        """Whether a few sampled elements of a copy differ from the home: a write that no version counted.

        Of a home on NVMe only one is read, as each may cost an access of the disk.
        """
        home = managed.chunk.homes[Role.PARAM]
        if home.block is None:
            return False
        step = max(1, managed.numel // (1 if home.tier is Tier.NVME else _SAMPLES))
        mine = slice(managed.offset, managed.offset + managed.numel, step)
        for tier in (Tier.DEVICE, Tier.HOST):
            if self.residency.state(home.block, tier) is CopyState.VALID:
                slot = self.residency.slot(home.block, tier)
                copy = self._copy_in(managed.chunk, tier, slot)[mine]
                if not _same_bits(copy, managed.chunk.flat(Role.PARAM)[mine].to(copy.dtype)):
                    return True
        return False

    def _copy_in(self, chunk: Chunk, tier: Tier, slot: int) -> torch.Tensor:
        if tier is Tier.DEVICE:
            return self.device_pool.flat(slot, chunk.compute_dtype, chunk.numel)
        return torch.frombuffer(self.host_pool.staged(slot, chunk.nbytes), dtype=chunk.dtype)

    def user_wrote(self, managed: ManagedParameter) -> None:
        """`managed` was changed outside compute: its home counts, copies of it are superseded."""
        parameter, home = managed.parameter, managed.home
        if parameter.data_ptr() != home.data_ptr() and parameter.data_ptr() != managed.rest.data_ptr():
            new = parameter.data
            if new.shape != managed.shape or new.dtype != home.dtype:
                raise ManageError(
                    f"{managed.name} was {managed.shape} of {home.dtype} when it became managed and is {new.shape} of "
                    f"{new.dtype} now: call hetmem.release(model) first, change it, and manage it again"
                )
            home.copy_(new)
            parameter.data = home
        managed.version = parameter._version
        self.superseded(managed.chunk, Role.PARAM)

    def superseded(self, chunk: Chunk, role: Role) -> None:
        """The home of `role` was written to directly: no copy of it may be used any more."""
        home = chunk.homes[role]
        if home.block is None:
            return
        for tier in (Tier.DEVICE, Tier.HOST):
            while self.residency.state(home.block, tier) in _LOADING and self.residency.in_flight():
                self._wait_for_one()
            self._execute(self.residency.invalidate(home.block, tier))

    def _compare_home(self, managed: ManagedParameter) -> None:
        """Somebody may have written to the device copy without a version: if it differs from home, it counts."""
        device = managed.device
        assert device is not None
        if not _same_bits(device, managed.home.to(device.dtype)):
            self._operator_wrote(managed)

    def _operator_wrote(self, managed: ManagedParameter) -> None:
        """An operator changed the device copy: write it home now."""
        assert managed.device is not None
        source, home = managed.device, managed.home
        self.engine.copy_now(Link.DEVICE_TO_HOST, lambda: _copy_changes(home, source), home.nbytes)
        managed.version = managed.parameter._version
        block = _param_block(managed)
        if self.residency.state(block, Tier.HOST) is not None:
            self._execute(self.residency.invalidate(block, Tier.HOST))

    # ---- host memory -------------------------------------------------------------------------------------------

    def open_role(self, chunk: Chunk, role: Role, *, load: bool) -> torch.Tensor:
        """`role` of `chunk` in host (or device) memory as a flat tensor, to be closed by `close_role`.

        With `load=False` its content is undefined where it was not in staging already.
        """
        home = chunk.homes[role]
        if home.tier is not Tier.NVME:
            return chunk.flat(role)
        assert home.block is not None
        self.tracer.host_use(home.block)
        self.residency.reach((home.block,), Tier.HOST)
        self._acquire(home.block, Tier.HOST, load=load)
        while self.residency.writing(home.block):
            self._wait_for_one()
        return self._copy_in(chunk, Tier.HOST, self.residency.slot(home.block, Tier.HOST))

    def close_role(self, chunk: Chunk, role: Role, *, dirty: bool) -> None:
        """End the use of `open_role`."""
        block = chunk.homes[role].block
        if chunk.homes[role].tier is Tier.NVME:
            assert block is not None
            self._execute(self.residency.release(block, Tier.HOST, dirty=dirty))

    def send_gradient(self, work: Callable[[], None], nbytes: int) -> None:
        """Run `work`, which takes a gradient of `nbytes` home. Small ones go at once, others behind the backward."""
        if nbytes < _SMALL_BYTES and not self._gradients and self.engine.unlimited(Link.DEVICE_TO_HOST):
            self.engine.copy_now(Link.DEVICE_TO_HOST, work, nbytes)
            return
        self._gradients += 1
        self.engine.copy(_GRADIENT, Link.DEVICE_TO_HOST, work, nbytes)
        while self._gradients > _GRADIENTS_IN_FLIGHT:
            self._wait_for_one()

    def wait_for_gradients(self) -> None:
        """Every gradient has arrived at home."""
        while self._gradients:
            self._wait_for_one()
        self.drain()

    def settle(self, homes: Iterable[Home]) -> None:
        """Start to write the dirty ones among `homes` to NVMe."""
        for home in homes:
            if home.tier is Tier.NVME:
                assert home.block is not None
                self._execute(self.residency.settle(home.block))

    def drain(self) -> None:
        """Wait until nothing is in flight; an error of a transfer is raised here."""
        while self.residency.in_flight():
            self._wait_for_one()

    def device_copy(self, chunk: Chunk) -> torch.Tensor | None:
        """The device copy of `chunk` as a flat tensor, if there is one."""
        block = chunk.homes[Role.PARAM].block
        if block is None:
            return None
        while self.residency.state(block, Tier.DEVICE) in _LOADING:
            self._wait_for_one()
        if self.residency.state(block, Tier.DEVICE) is not CopyState.VALID:
            return None
        return self._copy_in(chunk, Tier.DEVICE, self.residency.slot(block, Tier.DEVICE))

    def renew_device_copy(self, chunk: Chunk) -> None:
        """The home of `chunk` has changed: drop the device copy and start to fetch it again."""
        block = chunk.homes[Role.PARAM].block
        if block is None or self.residency.state(block, Tier.DEVICE) is None:
            return
        self._execute(self.residency.invalidate(block, Tier.DEVICE))
        self._execute(self.residency.prefetch(block, Tier.DEVICE))

    def forget_copies(self) -> None:
        """Drop every copy on every tier; nothing may be in use."""
        self.drain()
        self._let_go()
        for tier in (Tier.DEVICE, Tier.HOST):
            for block in self.residency.resident(tier):
                self._execute(self.residency.invalidate(block, tier))

    def relearn(self) -> None:
        """Chunks hold other parameters now: what was traced is void."""
        self.bindings.learn(self.parameters)
        for block, (chunk, role) in self._chunk_of_block.items():
            self.residency.blocks[block] = self.memory.block(chunk, role)
        self.tracer = StepTracer()
        self._ended = None

    def after_step(self) -> None:
        """The weights are new: plan for what usually follows, and start to fetch for it."""
        self.tracer.end()
        follower = self.tracer.book.follower(STEP)
        self._ended = STEP
        if follower is not None:
            self.expect(follower)

    # ---- carrying commands out ---------------------------------------------------------------------------------

    def _acquire(self, block: int, tier: Tier, *, load: bool = True) -> None:
        """One more use of `block` on `tier`, waiting until it is there. No use is left behind if this raises."""
        commands = self.residency.acquire(block, tier, load=load)
        try:
            self._execute(commands, urgent=block)
            while self.residency.state(block, tier) is not CopyState.VALID:
                if not self.residency.in_flight():
                    raise self.residency.withdraw(block, tier)
                self._wait_for_one()
        except BaseException:
            self._abandon(block, tier)
            raise

    def _abandon(self, block: int, tier: Tier) -> None:
        state = self.residency.state(block, tier)
        if state is CopyState.WAITING:
            self.residency.withdraw(block, tier)
        elif state is not None and self.residency.uses(block, tier):
            self._execute(self.residency.release(block, tier))

    def poll(self) -> None:
        """Take note of what has finished meanwhile."""
        while (finished := self.engine.take(wait=False)) is not None:
            self._note(finished)

    def _wait_for_one(self) -> None:
        start = time.perf_counter()
        finished = self.engine.take(wait=True)
        self.statistics.stall_seconds += time.perf_counter() - start
        assert finished is not None
        self._note(finished)

    def _note(self, finished: Finished) -> None:
        if finished.tag is _GRADIENT:
            self._gradients -= 1
            if finished.error is not None:
                raise finished.error
            return
        command: Fetch | Write = finished.tag
        if finished.error is None:
            self._execute(self.residency.done(command))
        else:
            self._execute(self.residency.failed(command))
            raise finished.error

    def _execute(self, commands: list[Command], urgent: int | None = None) -> None:
        """Carry `commands` out, in the order in which the residency gave them. The fetch of `urgent` to the device is
        done here and now where nothing is gained by another thread.

        What follows from a command that is done at once goes behind the commands that were given with it: otherwise
        a slot could be filled before the drop of what it held.
        """
        self._commands.extend((command, command.block == urgent) for command in commands)
        if self._executing:
            return
        self._executing = True
        try:
            while self._commands:
                self._carry_out(*self._commands.popleft())
        finally:
            self._executing = False
        self.statistics.host_in_use(self.host_pool.reserved_bytes)

    def _carry_out(self, command: Command, now: bool) -> None:
        if isinstance(command, Drop):
            self._drop(command)
            return
        chunk, role = self._chunk_of_block[command.block]
        if isinstance(command, Fetch) and command.target is Tier.DEVICE:
            self._fetch_to_device(command, now=now)
            return
        extent = chunk.homes[role].extent
        assert extent is not None, f"{chunk.label(role)} is not on NVMe"
        memory = self.host_pool.staged(command.slot, chunk.nbytes)
        if isinstance(command, Write):
            self.engine.write(command, extent, memory)
        else:
            self.engine.read(command, extent, memory)

    def _fetch_to_device(self, command: Fetch, *, now: bool) -> None:
        chunk, _ = self._chunk_of_block[command.block]
        home = chunk.homes[Role.PARAM]
        if home.tier is Tier.HOST:
            source = chunk.flat(Role.PARAM)
        else:
            source = self._copy_in(chunk, Tier.HOST, self.residency.slot(command.block, Tier.HOST))
        target = self._copy_in(chunk, Tier.DEVICE, command.slot)
        if now and self.engine.unlimited(Link.HOST_TO_DEVICE):
            start = time.perf_counter()
            self.engine.copy_now(Link.HOST_TO_DEVICE, lambda: _copy(target, source), chunk.nbytes)
            self.statistics.stall_seconds += time.perf_counter() - start
            self._execute(self.residency.done(command))
        else:
            self.engine.copy(command, Link.HOST_TO_DEVICE, lambda: _copy(target, source), chunk.nbytes)

    def _drop(self, command: Drop) -> None:
        chunk, _ = self._chunk_of_block[command.block]
        span = self.residency.blocks[command.block].span
        if command.tier is Tier.DEVICE:
            self.bindings.close_device(chunk)
            if self.sanitize:
                self.device_pool.poison(command.slot, span)


def _param_block(managed: ManagedParameter) -> int:
    block = managed.chunk.homes[Role.PARAM].block
    assert block is not None, f"{managed.name} has its home on the device"
    return block


def _copy_changes(home: torch.Tensor, device: torch.Tensor) -> None:
    """Take over what was written to the device copy; where a narrower copy says the same as before, home keeps its
    own bits, which are more."""
    with torch.no_grad():
        if home.dtype != device.dtype:
            device = torch.where(device == home.to(device.dtype), home, device.to(home.dtype))
        home.copy_(device)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN for NaN."""
    return bool(torch.equal(left, right) or ((left == right) | (left.isnan() & right.isnan())).all())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


class _WeakGrown:
    """`Runtime.non_model_grew` without keeping the runtime alive."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    def __call__(self, operator: str, live_bytes: int) -> None:
        runtime = self._runtime()
        if runtime is not None:
            runtime.non_model_grew(operator, live_bytes)


def _close(engine: TransferEngine, store: NvmeStore | None) -> None:
    engine.close()
    if store is not None:
        store.close()  # views that are still held stay readable
