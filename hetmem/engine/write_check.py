"""Detects writes to weights by the program, outside compute, and by operators within it, and makes copies stale.

Note "writes": the version counter of a parameter shows most of them. Others (`parameter.data`, some `_foreach_`
operators, NumPy) count no version:

- An operator may have written to a device copy: that is compared with its home, the one place that waits for the
  device. Only models that write to weights get there.
- Between its calls the parameters of a model are watched (`intercept.watched`): functions of torch that may write are
  seen as they are called, and tensors that share a weight's memory as compute ends and begins (`touched`). Copies of
  these are made anew before the next forward, backward or step. What C++ writes through a pointer that it kept, of
  which nothing tells, is not seen.
- A model that is whole on the device is not watched from a step to the next forward, which makes the copies of all that
  is trained anew: that crosses no link, and a look at a watched parameter takes some calls of Python.
- Gradients that are staged from NVMe are compared with their home by one element of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import chain, compress
from operator import attrgetter, ne

import torch

from hetmem.engine.gradient_views import is_home_gradient
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings, storage_references
from hetmem.engine.sampling import as_integers, as_sampled, sample_of
from hetmem.engine.traffic import Traffic
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, give_away
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.trace import Tier

_VERSION = attrgetter("_version")
_COUNTED, _VERSION_SEEN = attrgetter("counter._version"), attrgetter("version")
_PARAMETERS = attrgetter("parameters")
_TRAINS = attrgetter("parameter.requires_grad")
_SHOWN_AND_SEEN: list[tuple[Callable[[torch.Tensor], object], Callable[[ManagedParameter], object]]] = [
    (_VERSION, _VERSION_SEEN),
    (torch.Tensor.data_ptr, attrgetter("home_address")),
    (attrgetter("shape"), attrgetter("shape")),
    (torch.Tensor.stride, attrgetter("stride")),
]
"""What a parameter shows of a write, and as it was last seen."""


class WriteCheck:
    """The writes to the parameters of one model: makes homes right, and drops the copies that a write superseded."""

    def __init__(self, parameters: list[ManagedParameter], bindings: Bindings, traffic: Traffic) -> None:
        self._bindings, self._traffic = bindings, traffic
        self._parameters = parameters
        self._chunks = list(dict.fromkeys(managed.chunk for managed in parameters))
        self._cast_at_home = [chunk for chunk in self._chunks if Role.COMPUTE in chunk.homes]
        self.uncounted: set[int] = set()
        """The `id`s of parameters whose copies were ever found to be written without a version."""
        self.touched: set[ManagedParameter] = {*parameters}
        """Parameters that the program may have written to without a version since their copies were made: a function in
        place, or one whose result shares their memory, was called (`intercept.watched`)."""
        self.kept: set[ManagedParameter] = set()
        """Parameters whose memory a tensor of the program shared as the last backward began, or that a hook in it was
        handed: their updates do not begin before `step()`."""
        self.noticed: set[int] = set()
        """The `id`s of parameters with a write that was seen since `notice_counted` of their chunk."""
        self.unwatched = True
        """Whether the program may have written to what is trained while that was not watched."""
        self.stepped = self.handed_out = False
        """Whether an optimizer has stepped since the last forward; and whether the program had weights at hand that
        it may write to (an average of weights takes `p.data`) between the last step and the forward behind it: then
        nothing is fetched ahead behind the next step, as it would be fetched once more."""
        self._gradients_left: dict[ManagedParameter, tuple[int, int] | None] = {}
        """`_gradient` of parameters as the last backward has left it."""

    @property
    def has_copies(self) -> bool:
        """Return whether a write can make anything stale."""
        return bool(self._traffic.executor.chunk_of_block)

    # ---- by the program, to the home ---------------------------------------------------------------------------

    def notice_all(self, *, seen: bool = False) -> None:
        """Honour writes to each parameter since it was last used, as a forward begins, past `__torch_function__`.
        `seen`: all were watched up to now, so that what got another `.data` is in `touched`."""
        self._traffic.executor.poll()  # a copy that has arrived must not pass for one in flight
        unwatched, self.unwatched = self.unwatched, True  # as it is if this raises: all is looked at again
        self._gradients_left.clear()
        for managed in self._counted_but_data() if seen and not unwatched else self.all_counted(self._parameters):
            self._traffic.wait_for_update(managed.chunk)  # which writes to a copy in staging
            self.by_user(managed)
        due = {managed.chunk for managed in self.touched}
        if unwatched:
            due.update(chunk for chunk in self._chunks if any(map(_TRAINS, chunk.parameters)))
        if self.stepped:
            self.stepped, self.handed_out = False, bool(self.touched)
        self._renew(due)
        self.touched.clear()
        self.unwatched = False

    def renew_touched(self) -> bool:
        """Make copies of what the program may have written to since the forward anew, as a backward or a step begins,
        past `__torch_function__`. Returns whether there are such."""
        touched = [*self.touched]
        self.kept = {managed for managed in touched if storage_references(managed.home) > managed.home_references}
        if touched:
            if self.stepped:  # a backward of another model comes before the forward
                self.stepped, self.handed_out = False, True
            self._renew({managed.chunk for managed in touched})
        self.touched = {managed for managed in touched if _is_replaced(managed)}  # `notice_all` brings that home
        return bool(touched)

    def _renew(self, due: set[Chunk]) -> None:
        """Make the copies of the chunks in `due` anew, where operators see copies."""
        traffic = self._traffic
        chunks = [chunk for chunk in self._chunks if chunk in due and chunk.operand_block >= 0]
        at_home = [chunk for chunk in chunks if chunk.homes[Role.PARAM].tier is Tier.DEVICE]
        if at_home:
            traffic.executor.copy_homes_again(at_home)
        for chunk in chunks if len(at_home) < len(chunks) else ():
            if chunk.homes[Role.PARAM].tier is not Tier.DEVICE:
                traffic.wait_for_update(chunk)
                if chunk.operand == Role.COMPUTE:
                    traffic.superseded(chunk, Role.PARAM)
                    traffic.wait_until_written([chunk.homes[Role.COMPUTE]])  # a write in flight must not come later
                    chunk.recast()
                traffic.superseded(chunk, chunk.operand)

    @staticmethod
    def all_counted(parameters: list[ManagedParameter]) -> list[ManagedParameter]:
        """Return those of `parameters` with a write that torch itself shows: `counted` of all before each forward and
        step, so without a call of Python for each fact."""
        tensors = [managed.parameter for managed in parameters]
        if all([*map(shown, tensors)] == [*map(seen, parameters)] for shown, seen in _SHOWN_AND_SEEN):
            return []  # as mostly
        facts = [map(ne, map(shown, tensors), map(seen, parameters)) for shown, seen in _SHOWN_AND_SEEN]
        return list(compress(parameters, map(any, zip(*facts, strict=True))))

    def _counted_but_data(self) -> list[ManagedParameter]:
        """Return what `all_counted` does, where only those in `touched` can have got another `.data`, and others may
        have made copies stale: what is fetched from here on is as it was written."""
        among = self.copied()
        shown, seen = [*map(_COUNTED, among)], [*map(_VERSION_SEEN, among)]
        found = {*filter(self.counted, self.touched)}
        if shown != seen:
            found.update(compress(among, map(ne, shown, seen)))
        return [managed for managed in self._parameters if managed in found] if found else []

    def copied(self) -> list[ManagedParameter]:
        """Return the parameters of which there may be copies, also on their way: however many others there are, this
        takes no look at them."""
        chunk_of_block, resident = self._traffic.executor.chunk_of_block, self._traffic.residency.resident
        blocks = (*resident(Tier.DEVICE), *resident(Tier.HOST))
        chunks = dict.fromkeys([*self._cast_at_home, *[chunk_of_block[block][0] for block in blocks]])
        return [*chain.from_iterable(map(_PARAMETERS, chunks))]

    def leave_gradients(self, arrived: Iterable[ManagedParameter]) -> None:
        """Note the gradients of `arrived` as the backward that is over has left them."""
        there = [managed for managed in arrived if managed.parameter.grad is not None]
        gradients = [managed.parameter.grad for managed in there]
        self._gradients_left.update(dict.fromkeys(arrived))
        self._gradients_left.update(
            zip(there, zip(map(id, gradients), map(_VERSION, gradients), strict=True), strict=True)
        )

    def edited_gradients(self) -> list[ManagedParameter]:
        """Return the parameters whose gradients were cleared, or written to with a version, since the last backwards:
        accumulation leaves them alone, a step by hand does not."""
        return [managed for managed, left in self._gradients_left.items() if _gradient(managed) != left]

    def notice_counted(self, chunk: Chunk) -> None:
        """Honour the writes to `chunk` that torch itself shows, and clear `noticed` of it."""
        for managed in chunk.parameters:
            if self.counted(managed):
                self.by_user(managed)
        self.noticed.difference_update(map(id, chunk.parameters))

    @staticmethod
    def counted(managed: ManagedParameter) -> bool:
        """Return whether torch shows a write to `managed` since hetmem last saw it, outside compute."""
        return managed.counter._version != managed.version or _is_replaced(managed)

    def by_user(self, managed: ManagedParameter) -> None:
        """Honour a write to `managed` outside compute, also `p.data = t`: its home counts, its copies are
        superseded."""
        parameter = managed.parameter
        resting = managed.rest is not managed.home and parameter.data_ptr() == managed.rest.data_ptr()
        if _is_replaced(managed) and not resting:
            new = parameter.data
            _refuse_another_kind(managed, new, managed.home.dtype)
            source = self._bindings.of_storage(new)
            if source not in (None, managed) and not _is_replaced(source):
                raise _shared(managed, source)
            self._leave_home_to_holders(managed, hetmem_holds=2)
            managed.home.copy_(new)
            self._bindings.show_home(managed)
        managed.version = managed.counter._version
        self.noticed.add(id(managed))
        self._supersede(managed)

    def by_optimizer(self, stepped: list[ManagedParameter]) -> None:
        """Honour a step of an optimizer that is not hetmem's: not each counts versions (the fused ones of torch do
        not). What is left where this raises, as a drive has failed, the next forward honours."""
        self.touched.update(stepped)
        for managed in stepped:
            self.by_user(managed)
            self.touched.discard(managed)

    def of_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """Honour `parameter.data = value` within compute: the value goes home, and counts from the next use on."""
        _refuse_another_kind(managed, value, value.dtype)
        source = self._bindings.of_storage(value)
        if source not in (None, managed):
            raise _shared(managed, source)
        self._bindings.leave_to_holders(managed)
        at_home = managed.parameter.data_ptr() == managed.home.data_ptr()
        self._leave_home_to_holders(managed, hetmem_holds=2 + at_home)
        managed.home.copy_(value)
        managed.data_sets += 1
        self.noticed.add(id(managed))
        self._supersede(managed)

    def _leave_home_to_holders(self, managed: ManagedParameter, *, hetmem_holds: int) -> None:
        """Leave the old values of `managed`, whose home gets new ones, to tensors of the program that hold more than
        the `hetmem_holds` references to them (`kept = p.data`, a state dict): in torch these are two tensors. So keeps
        a storage that was given other memory (`p.data.share_memory_()`) that memory."""
        at_its_place = managed.home.data_ptr() == managed.home_address
        kept = managed.numel and at_its_place and storage_references(managed.home) > hetmem_holds
        if kept and not give_away(managed.home):
            raise ManageError(
                f"{managed.name}.data was set to another tensor, and what it was before is still held (as in "
                f"`kept = p.data`): keep a clone of it, as hetmem copies the new values to its place"
            )
        if managed.home.data_ptr() != managed.home_address:  # its storage has other memory
            home = managed.view(Role.PARAM)
            self._bindings.move_home(managed, home, managed.rest if managed.rest is not managed.home else home)

    def _supersede(self, managed: ManagedParameter, *, but_device: bool = False) -> None:
        """Make the 16-bit copy at home anew, and drop all other copies, but perhaps the device's."""
        traffic, chunk = self._traffic, managed.chunk
        if chunk.operand == Role.COMPUTE:
            traffic.superseded(chunk, Role.PARAM)
            traffic.wait_until_written([chunk.homes[Role.COMPUTE]])  # a write in flight must not come later
            managed.recast(managed.home)
        traffic.superseded(chunk, chunk.operand, but_device=but_device)

    # ---- by operators, to the device copy ----------------------------------------------------------------------

    def by_view(self, managed: ManagedParameter) -> None:
        """Compare the device copy of `managed`, of which the program holds a view whose writes count no versions. A
        copy that is superseded, or whose home was written to, is older than that, and says nothing of it."""
        if self._traffic.copy_counts(managed.chunk) and managed not in self.touched:
            self.compare(managed)

    def compare(self, managed: ManagedParameter) -> None:
        """Compare the device copy of `managed` with its home; if they differ, the copy counts."""
        device = managed.device
        assert device is not None
        if not same_bits(device, managed.home.to(device)):
            self.uncounted.add(id(managed))
            self.by_operator(managed)

    def by_operator(self, managed: ManagedParameter) -> None:
        """Write the device copy of `managed`, which an operator has changed, home now."""
        assert managed.device is not None
        source, home = managed.device, managed.home
        where = managed.chunk.homes[Role.PARAM]
        self._traffic.wait_until_written([where])  # an update that is being written must not come after this
        self._traffic.gradients.send_now(where, lambda: _copy_changes(home, source), home.nbytes)
        managed.version = managed.counter._version
        self.noticed.add(id(managed))
        self._supersede(managed, but_device=True)

    # ---- gradients in staging ------------------------------------------------------------------------------------

    def wait_for_staged_gradients(self, chunks: Iterable[Chunk]) -> None:
        """Wait until no gradients of `chunks` are being read from NVMe: those that the program wrote to meanwhile can
        be compared with their home, by `honour_written_gradients`, only then."""
        residency = self._traffic.residency
        for chunk in chunks:
            home = chunk.homes.get(Role.GRAD)
            if home is not None and home.tier is Tier.NVME and home.block is not None:
                while residency.state(home.block, Tier.HOST) is CopyState.LOADING:
                    self._traffic.wait_for_one()

    def honour_written_gradients(self, chunk: Chunk, taken: Container[ManagedParameter] = ()) -> None:
        """Drop the staged gradients of `chunk` if the program has changed them at home (clipping, `zero_grad`).
        `taken`: parameters whose `p.grad` is away while one that arrives is added."""
        written = False
        for managed in chunk.parameters:
            if managed.grad_home is not None and managed.grad_home._version != managed.grad_version:
                managed.grad_version = managed.grad_home._version
                written = True
        home = chunk.homes.get(Role.GRAD)
        if home is None or home.tier is not Tier.NVME:
            return  # nothing is staged
        torn = home.block in self._traffic.executor.torn_reads.torn
        if written or torn or self._staged_differs(chunk, taken):
            self._traffic.superseded(chunk, Role.GRAD)

    def _staged_differs(self, chunk: Chunk, taken: Container[ManagedParameter]) -> bool:
        """Return whether gradients on NVMe were written to without a version, as `GradScaler.unscale_` does. One
        element of each parameter is read, as each may cost an access of the disk."""
        home, residency = chunk.homes.get(Role.GRAD), self._traffic.residency
        if home is None or home.tier is not Tier.NVME or home.block is None or residency.dirty(home.block):
            return False
        if residency.state(home.block, Tier.HOST) is not CopyState.VALID:
            return False
        staged, at_home = self._traffic.newest(chunk, Role.GRAD), chunk.flat(Role.GRAD)
        for managed in chunk.parameters:
            if is_home_gradient(managed) or managed in taken:
                sample = sample_of(managed.part(staged))
                if sample is not None and not all(as_sampled([(sample, managed.part(at_home))])):
                    return True
        return False


class ParameterMarks:
    """The parameters of one model that are watched between its calls. Within a forward or a backward there are none:
    `Bindings` watches what is not bound."""

    def __init__(
        self, memory: Memory, bindings: Bindings, writes: WriteCheck, read_at_home: Callable[[ManagedParameter], None]
    ) -> None:
        self._memory, self._bindings, self._writes, self._read_at_home = memory, bindings, writes, read_at_home
        self._step_runs: Callable[[], bool | None] | None = None
        """Returns whether the step that has begun is on the stack, which may ask for the type of a parameter."""
        self._watches = self._trails = self._but_trained = False
        self._shared: set[ManagedParameter] = set()
        """Those whose memory a tensor shared when that was last looked at."""

    def resume(self) -> None:
        """End compute: mark again, unless a step runs."""
        if self._step_runs is not None and self._step_runs():
            self._writes.unwatched = True
        elif self._watches:
            self._look_for_holders()
            self._bindings.watch(but_trained=self._but_trained)
        else:
            self._bindings.unwatch()

    def _look_for_holders(self) -> None:
        """Touch what a tensor of the program shares the memory of (`kept = p.data`), through which it may be read and
        written. That was handed out by a function that told of it, or to who met an ordinary parameter; what is handed
        out past both (`other.data = p`) is found where there are copies."""
        writes = self._writes
        among = *self._shared, *writes.touched, *writes.kept, *self._bindings.exposed, *writes.copied()
        self._shared = {*self._bindings.shared(among)}
        writes.touched.update(self._shared)

    def pause(self) -> bool:
        """Begin compute, which leaves copies of parameters on the device. Return whether all were marked so far, and
        functions that set `.data` of any are known."""
        seen = not self._bindings.exposed
        if self._watches:
            self._look_for_holders()
        self._watches, self._but_trained = self._writes.has_copies, False
        return seen

    def begin_step(self, runs: Callable[[], bool | None] | None = None) -> None:
        """Mark none until `end_step`. `runs` says whether the step is on the stack, also while it computes; None: it is
        hetmem's, which looks at parameters past `__torch_function__`, so that they stay of their class."""
        self.pause()
        if runs is not None or self._memory.resident:
            self._bindings.unwatch()
        self._step_runs, self._trails = runs or _always, False
        self._writes.unwatched = True

    def updates_trail(self) -> None:
        """The step leaves updates behind: reads wait for them. Those of parameters whose memory a tensor of the program
        shares are waited for here, as no function of torch tells of its use."""
        self._trails = True
        for managed in self._bindings.shared([*self._bindings.by_id.values()]):
            self._read_at_home(managed)

    def end_step(self) -> None:
        """End `begin_step`; where the model is whole on the device and nothing trails, only what is frozen is marked
        until the next forward."""
        if self._step_runs is None:
            return
        self._step_runs = None
        self._but_trained = self._memory.resident and not self._trails
        if not self._but_trained:
            self._writes.unwatched = False

    def stop(self) -> None:
        """Mark no more: the model is released."""
        self._bindings.unwatch()
        self._watches = False

    def mark_again(self, used: Iterable[ManagedParameter]) -> None:
        """Watch `used` again, which were watched until the program read them."""
        if self._watches:
            self._bindings.rest(used)


def _always() -> bool:
    return True


def _is_replaced(managed: ManagedParameter) -> bool:
    """Return whether `parameter.data` is another tensor than the home, or another view of it."""
    parameter = managed.parameter
    at_home = parameter.data_ptr() == managed.home_address
    return not at_home or parameter.stride() != managed.stride or parameter.shape != managed.shape


def _shared(managed: ManagedParameter, source: ManagedParameter) -> ManageError:
    return ManageError(
        f"{managed.name}.data was set to the memory of {source.name}, in which torch would train both from now on: make"
        f" them one parameter before hetmem.manage, or set .data to a clone"
    )


def _refuse_another_kind(managed: ManagedParameter, new: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `ManageError` if `new`, the new value of `managed`, has not its shape and `dtype`."""
    if new.shape != managed.shape or new.dtype != dtype:
        raise ManageError(
            f"{managed.name} was {managed.shape} of {managed.home.dtype} when it became managed and is {new.shape} of "
            f"{new.dtype} now: call hetmem.release(model) first, change it, and manage it again"
        )


def _copy_changes(home: torch.Tensor, device: torch.Tensor) -> None:
    """Copy the elements of `device` that were written to `home`; where a narrower copy is unchanged, `home` keeps its
    own bits, which are more."""
    with torch.no_grad():
        device = device.to(home.device)
        if home.dtype != device.dtype:
            device = torch.where(device == home.to(device.dtype), home, device.to(home.dtype))
        home.copy_(device)


def _gradient(managed: ManagedParameter) -> tuple[int, int] | None:
    """Return what changes if `p.grad` is replaced, or written to with a version, without holding it."""
    gradient = managed.parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal, where any NaN equals any other, and 0 is not -0."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    one, other = as_integers(left), as_integers(right)
    return bool(torch.equal(one, other) or ((one == other) | (left.isnan() & right.isnan())).all())
