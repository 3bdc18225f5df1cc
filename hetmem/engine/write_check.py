"""Detects writes to weights by the program outside compute, and by operators within it, and makes copies stale.

Note "writes": the version counter of a parameter shows most of them. Others (`parameter.data`, some `_foreach_`
operators, NumPy) count no version:

- An operator may have written to a device copy, which is then compared with its home. Only this waits for the device,
  and only for models that write to weights.
- Between its calls the parameters of a model are watched (`intercept.watched`): torch functions that may write are seen
  as they are called, and tensors that share a weight's memory as compute begins and ends (`touched`). Copies of these
  weights are remade before the next forward, backward or step. A write by C++ through a pointer that it kept is not
  seen. Parameters that have no copy, and that no function of the program has met, are not looked at (ADR 59).
- A model that is whole on the device is not watched from a step to the next forward, which remakes the copies of all
  trained weights: that crosses no link, and each access to a watched parameter takes some Python calls.
- Gradients on NVMe are watched too while the program has them (`gradient_watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain, compress
from operator import attrgetter, is_not, ne
from typing import NoReturn

import torch

from hetmem.engine.gradient_watch import INTEGERS
from hetmem.engine.outgoing import Outgoing
from hetmem.engine.param_views import Bindings, get_data, learn_tensor, storage_address, storage_references
from hetmem.engine.traffic import Traffic
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, give_away
from hetmem.schedule.trace import Tier

_VERSION = attrgetter("_version")
_COUNTED, _VERSION_SEEN = attrgetter("counter._version"), attrgetter("version")
_OWN, _OWN_SEEN = attrgetter("__dict__"), attrgetter("own")
_PARAMETER, _PARAMETERS = attrgetter("parameter"), attrgetter("parameters")
_TRAINS = attrgetter("parameter.requires_grad")
_SHOWN_AND_SEEN: list[tuple[Callable[[torch.Tensor], object], Callable[[ManagedParameter], object]]] = [
    (_VERSION, _VERSION_SEEN),
    (torch.Tensor.data_ptr, attrgetter("home_address")),
    (attrgetter("shape"), attrgetter("shape")),
    (torch.Tensor.stride, attrgetter("home_stride")),
]
"""Functions of a parameter that a write changes, and of its record as last seen."""


class WriteCheck:
    """Honours writes to the parameters of one model: updates homes, and drops copies that a write made stale."""

    def __init__(
        self, parameters: list[ManagedParameter], bindings: Bindings, traffic: Traffic, outgoing: Outgoing
    ) -> None:
        self._bindings, self._traffic, self._outgoing = bindings, traffic, outgoing
        self.source_of: Callable[[torch.Tensor], ManagedParameter | None] = bindings.of_storage
        """Returns the parameter, of whatever model, that a tensor is a view of, or None."""
        self.refused: Callable[[ManagedParameter], None] | None = None
        """Raises for a write by an operator to a parameter that other ranks have, too; None without others."""
        self.announced: Callable[[Collection[ManagedParameter]], None] | None = None
        """Raises before the program writes to parameters at home if there is no memory for this rank's copies of their
        pages; None without other ranks."""
        self._parameters = parameters
        self._chunks = list(dict.fromkeys(managed.chunk for managed in parameters))
        self._cast_at_home = {chunk for chunk in self._chunks if Role.COMPUTE in chunk.homes}
        self.uncounted: set[int] = set()
        """`id`s of parameters whose copies were ever written without a version."""
        self.touched: set[ManagedParameter] = {*parameters}
        """Parameters that the program may have written to without a version since their copies were made: a function in
        place, or one whose result shares their memory, was called (`intercept.watched`)."""
        self.shared: set[ManagedParameter] = set()
        """Parameters whose memory a tensor of the program shared as the last backward began, or that a hook in it got:
        their updates do not begin before `step()`."""
        self.noticed: set[int] = set()
        """`id`s of parameters with a write that was seen since `notice_counted` of their chunk."""
        self.trained: set[Chunk] = set()
        """`find_trained` as the last step ended: these are not watched from then to the next forward."""
        self.unwatched = True
        """Whether the program may have written to trained parameters while they were not watched."""
        self.stepped = self.handed_out = False
        """Whether an optimizer has stepped since the last forward; and whether the program may have written to weights
        (an average of weights takes `p.data`) between the last step and the forward after it: then nothing is fetched
        ahead after the next step, as it would be fetched twice."""

    @property
    def has_copies(self) -> bool:
        """Whether operators see copies, which a write can make stale."""
        return bool(self._traffic.executor.chunk_of_block)

    # ---- by the program, to the home ---------------------------------------------------------------------------

    def find_trained(self) -> set[Chunk]:
        """Return the chunks with a parameter that requires a gradient."""
        return {chunk for chunk in self._chunks if any(map(_TRAINS, chunk.parameters))}

    def notice_all(self, *, seen: bool = False) -> None:
        """Honour writes to each parameter since it was last used, as a forward begins. `seen`: all were watched until
        now, so that parameters whose `.data` was set are in `touched`. Call it without `__torch_function__`."""
        self._traffic.executor.poll()  # a copy that has arrived must not count as in flight
        unwatched, self.unwatched = self.unwatched, True  # stays so if this raises: all is checked again
        found = self._counted_but_data() if seen and not unwatched else self.all_counted(self._parameters)
        refuse_common_memory(found, self._parameters)
        for managed in found:
            self._traffic.wait_for_update(managed.chunk)  # which writes to a copy in staging
            self.by_user(managed)
        due = {managed.chunk for managed in self.touched}
        if unwatched:
            due |= self.trained | self.find_trained()
        if self.stepped:
            self.stepped, self.handed_out = False, bool(self.touched)
        self._renew(due)
        self.touched.clear()
        self.unwatched = False

    def renew_touched(self) -> bool:
        """Remake copies of weights that the program may have written to since the forward, as a backward or a step
        begins. Returns whether there are any. Call it without `__torch_function__`."""
        touched = [*self.touched]
        self.shared = {managed for managed in touched if storage_references(managed.home) > managed.home_references}
        if touched:
            if self.stepped:  # a backward of another model came before the forward
                self.stepped, self.handed_out = False, True
            self._renew({managed.chunk for managed in touched})
        self.touched = {managed for managed in touched if _is_replaced(managed)}  # `notice_all` brings that home
        return bool(touched)

    def _renew(self, due: set[Chunk]) -> None:
        """Remake the copies of the chunks in `due`, if operators see copies."""
        traffic = self._traffic
        chunks = [chunk for chunk in self._chunks if chunk in due and chunk.operand_block >= 0]
        there = dict.fromkeys(chunk for chunk in chunks if chunk.moved and not chunk.codes)
        if there:
            traffic.executor.copy_homes_again([*there])
        for chunk in chunks if len(there) < len(chunks) else ():
            if chunk not in there:
                traffic.wait_for_update(chunk)
                if chunk.operand == Role.COMPUTE:
                    traffic.superseded(chunk, Role.PARAM)
                    traffic.wait_until_written([chunk.homes[Role.COMPUTE]])  # a write in flight must not come later
                    chunk.recast()
                traffic.superseded(chunk, chunk.operand)

    @staticmethod
    def all_counted(parameters: list[ManagedParameter]) -> list[ManagedParameter]:
        """Return those of `parameters` that are `counted`. Runs for all before each forward and step, so in C."""
        tensors = [*map(_PARAMETER, parameters)]
        exchanged = [*map(is_not, map(_OWN, tensors), map(_OWN_SEEN, parameters))]
        for shown, seen in _SHOWN_AND_SEEN:
            if [*map(shown, tensors)] != [*map(seen, parameters)]:
                break
        else:
            return [*compress(parameters, exchanged)]  # usually none
        facts = [map(ne, map(shown, tensors), map(seen, parameters)) for shown, seen in _SHOWN_AND_SEEN]
        return list(compress(parameters, map(any, zip(exchanged, *facts, strict=True))))

    def _counted_but_data(self) -> list[ManagedParameter]:
        """Return `all_counted` of parameters with copies, where only those in `touched` can have another `.data`. What
        is fetched later is as it was written."""
        among = self.copied()
        shown, seen = [*map(_COUNTED, among)], [*map(_VERSION_SEEN, among)]
        found = {*filter(self.counted, self.touched)}
        if shown != seen:
            found.update(compress(among, map(ne, shown, seen)))
        return [managed for managed in self._parameters if managed in found] if found else []

    def copied(self) -> list[ManagedParameter]:
        """Return the parameters of chunks that have copies, in flight or cast at home too; looks at no others."""
        chunk_of_block, resident = self._traffic.executor.chunk_of_block, self._traffic.residency.resident
        chunks = {chunk_of_block[block][0] for block in (*resident(Tier.DEVICE), *resident(Tier.HOST))}
        return [*chain.from_iterable(map(_PARAMETERS, self._cast_at_home | chunks))]

    def notice_counted(self, chunk: Chunk) -> None:
        """Honour the writes to `chunk` that are `counted`, and clear its parameters in `noticed`."""
        if found := self.all_counted(chunk.parameters):
            refuse_common_memory(self.touched.union(found), self._parameters)  # the others may be in other chunks
            self.by_users(found)
        self.noticed -= {*map(id, chunk.parameters)}

    @staticmethod
    def counted(managed: ManagedParameter) -> bool:
        """Return whether the version, or another `.data`, shows a write to `managed` outside compute."""
        return managed.counter._version != managed.version or _is_replaced(managed)

    def by_users(self, found: list[ManagedParameter]) -> None:
        """Do `by_user` for each of `found`. Raises what `refuse_common_memory` does, with none done."""
        refuse_common_memory(found, self._parameters)
        for managed in found:
            self.by_user(managed)

    def by_user(self, managed: ManagedParameter) -> None:
        """Honour a write to `managed` outside compute, also `p.data = t`, `p.set_(t)` and
        `torch.utils.swap_tensors(p, q)`: the home has the values, copies are stale."""
        parameter = managed.parameter
        if managed.code is not None:
            seen, managed.version = managed.version, managed.counter._version
            if _is_replaced(managed) or seen != managed.version:
                raise refused_write(managed)
            return
        if _is_replaced(managed):
            new = parameter.data
            _refuse_another_class(managed)
            _refuse_another_kind(managed, new, managed.home.dtype)
            source = self.source_of(new)
            if source not in (None, managed) and not _is_replaced(source):
                raise _shared(managed, source)
            self._outgoing.wait_for((managed.chunk,))
            self._leave_home_to_holders(managed, hetmem_holds=2)
            managed.replaced += not torch.equal(managed.home, new.to(managed.home))  # not by `share_memory_`
            managed.home.copy_(new)
            self._bindings.show_home(managed)
            if parameter.__dict__ is not managed.own:
                learn_tensor(managed)
        managed.version = managed.counter._version
        self.noticed.add(id(managed))
        self._supersede(managed)

    def by_optimizer(self, stepped: list[ManagedParameter]) -> None:
        """Honour a step of another optimizer than hetmem's, which may count no versions (torch's fused ones do not). If
        this raises, as a drive has failed, the next forward honours the rest. Quantised ones among `stepped` have no
        gradients, so it has skipped them."""
        stepped = [managed for managed in stepped if managed.code is None]
        self.touched.update(stepped)
        refuse_common_memory(stepped, self._parameters)
        for managed in stepped:
            self.by_user(managed)
            self.touched.discard(managed)

    def _leave_home_to_holders(self, managed: ManagedParameter, *, hetmem_holds: int) -> None:
        """Leave the old values of `managed`, whose home gets new ones, to tensors of the program (`kept = p.data`, a
        state dict), if the storage has more than the `hetmem_holds` references: in torch these are two tensors. A
        storage that was moved to other memory (`p.data.share_memory_()`) keeps that, and hetmem makes a new view."""
        in_place = managed.home.data_ptr() == managed.home_address
        is_held = managed.numel and in_place and storage_references(managed.home) > hetmem_holds
        if is_held and not give_away(managed.home):
            raise ManageError(
                f"{managed.name}.data was set to another tensor, and what it was before is still held (as in "
                f"`kept = p.data`): keep a clone of it, as hetmem copies the new values to its place"
            )
        if managed.home.data_ptr() != managed.home_address:  # its storage has other memory
            home = managed.view(Role.PARAM)
            self._bindings.move_home(managed, home)

    def _supersede(self, managed: ManagedParameter, *, but_device: bool = False, recasts: bool = True) -> None:
        """Remake the 16-bit copy at home, and drop all other copies; `but_device`: all but the device's."""
        traffic, chunk = self._traffic, managed.chunk
        if chunk.operand == Role.COMPUTE:
            traffic.superseded(chunk, Role.PARAM)
            traffic.wait_until_written([chunk.homes[Role.COMPUTE]])  # a write in flight must not come later
            if recasts:
                managed.recast(managed.home)
        traffic.superseded(chunk, chunk.operand, but_device=but_device)

    # ---- by operators, to the device copy ----------------------------------------------------------------------

    def by_view(self, managed: ManagedParameter) -> None:
        """Honour writes through a view of the device copy of `managed` that count no versions. A copy that is stale, or
        whose home was written to, is not compared."""
        if self._traffic.copy_counts(managed.chunk) and managed not in self.touched:
            self.compare(managed)

    def compare(self, managed: ManagedParameter) -> None:
        """Compare the device copy of `managed` with its home; if they differ, write the copy back."""
        device = managed.device
        assert device is not None
        if managed.code is not None:
            if not same_bits(device, managed.decoded().to(device)):
                self._refuse_copy(managed)
            return
        if not same_bits(device, managed.home.to(device)):
            self.uncounted.add(id(managed))
            self.by_operator(managed)

    def by_operator(self, managed: ManagedParameter) -> None:
        """Write the device copy of `managed`, which an operator has changed, back to its home now."""
        assert managed.device is not None
        if self.refused is not None:
            self.refused(managed)
        if managed.code is not None:
            self._refuse_copy(managed)
        source, home = managed.device, managed.home
        where = managed.chunk.homes[Role.PARAM]
        self._outgoing.wait_for((managed.chunk,))
        self._traffic.wait_until_written([where])  # an update must not be written after this
        self._traffic.gradients.send_now(where, lambda: _copy_changes(home, source), home.nbytes)
        managed.version = managed.counter._version
        self.noticed.add(id(managed))
        self._supersede(managed, but_device=True)

    def by_loading(self, managed: ManagedParameter, *, recasts: bool = True) -> None:
        """Honour values, or codes, that hetmem has written to the home of `managed`. The 16-bit copy at home is cast
        anew if it `recasts`; otherwise another rank does that."""
        self._supersede(managed, recasts=recasts)

    def _refuse_copy(self, managed: ManagedParameter) -> NoReturn:
        """Raise for a write to the device copy of `managed`, which is quantised; the copy is dropped."""
        managed.version = managed.counter._version
        self.touched.add(managed)  # the next forward fetches it anew
        raise refused_write(managed)


def refused_write(managed: ManagedParameter, what: str = "a write to it") -> ManageError:
    """Return the error for `what`, which the program has done with `managed`, whose home has codes."""
    assert managed.code is not None
    return ManageError(
        f"{managed.name} is frozen, and kept as codes of {managed.code.coding.format}: {what} is not possible. Call "
        f"hetmem.release(model) first, or leave the weight out of frozen=… (a mapping of name patterns) to train it"
    )


def refused_data(managed: ManagedParameter) -> ManageError:
    """Return the error for `managed.parameter.data = tensor` within compute."""
    if managed.code is not None:
        return refused_write(managed)
    return ManageError(
        f"{managed.name}.data is set to another tensor within a forward or a recomputation: set it before or after the "
        f"call of the model, or write to the weight: with torch.no_grad(): weight.copy_(tensor)"
    )


def _is_replaced(managed: ManagedParameter) -> bool:
    """Return whether `.data` is another tensor than the home, or another view of it, or the parameter was swapped."""
    parameter = managed.parameter
    at_home = parameter.data_ptr() == managed.home_address and parameter.__dict__ is managed.own
    return not at_home or parameter.stride() != managed.home_stride or parameter.shape != managed.shape


def _shared(managed: ManagedParameter, source: ManagedParameter) -> ManageError:
    return ManageError(
        f"{managed.name}.data was set to the memory of {source.name}, in which torch would train both from now on: make"
        f" them one parameter before hetmem.manage, or set .data to a clone"
    )


def refuse_common_memory(found: Iterable[ManagedParameter], model: list[ManagedParameter]) -> None:
    """Raise `ManageError` if the program has put several of `found` into one memory that a tensor beside the parameters
    of `model` shares (a flat buffer), or at one address: torch would let them share all writes from then on."""
    if all(len(within) == 1 for within in _by_memory(found).values()):
        return
    for within in _by_memory(model).values():  # the program may have put others there, too
        alone = storage_references(get_data(within[0].parameter)) == len(within) + 2  # that tensor, and Python's handle
        if len(within) > 1 and not (alone and len({each.parameter.data_ptr() for each in within}) == len(within)):
            raise ManageError(
                f"{within[0].name}.data and {within[1].name}.data were set to one memory, which another tensor shares "
                f"(a flat buffer, as that of vector_to_parameters) or which is the same: in torch writes to it reach "
                f"both. Copy the values (p.data.copy_(part)), or drop the other tensor (del vector) before this"
            )


def _by_memory(found: Iterable[ManagedParameter]) -> dict[int, list[ManagedParameter]]:
    """Return those of `found` that are not at home, by the address of their storage."""
    at: dict[int, list[ManagedParameter]] = {}
    for managed in found:
        if managed.numel and managed.parameter.data_ptr() != managed.home_address:
            at.setdefault(storage_address(managed.parameter), []).append(managed)
    return at


def _refuse_another_class(managed: ManagedParameter) -> None:
    """Raise `ManageError` if `torch.utils.swap_tensors` has left `managed` a class that it did not have."""
    kind = type(managed.parameter)
    if kind not in (managed.kind, managed.watched_kind, managed.bound_kind):
        raise ManageError(
            f"{managed.name} was a {managed.kind.__name__} when it became managed and is a {kind.__name__} now: swap it"
            f" back, and for a torch.nn.Parameter instead, or write p.data = tensor"
        )


def _refuse_another_kind(managed: ManagedParameter, new: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `ManageError` if `new`, the new value of `managed`, has not its shape and `dtype`."""
    if new.shape != managed.shape or new.dtype != dtype:
        raise ManageError(
            f"{managed.name} was {managed.shape} of {managed.home.dtype} when it became managed and is {new.shape} of "
            f"{new.dtype} now: call hetmem.release(model) first, change it, and manage it again"
        )


def _copy_changes(home: torch.Tensor, device: torch.Tensor) -> None:
    """Copy the written elements of `device`, a copy, to `home`; where a narrower copy is unchanged, `home` keeps its
    more precise bits."""
    with torch.no_grad():
        device = device.to(home.device)
        if home.dtype != device.dtype:
            device = torch.where(device == home.to(device.dtype), home, device.to(home.dtype))
        home.copy_(device)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal, where all NaN are equal, and 0 is not -0."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    integers = INTEGERS.get(left.itemsize, left.dtype)  # there a NaN equals itself, and 0 is not -0
    one, other = left.view(integers), right.view(integers)
    return bool(torch.equal(one, other) or ((one == other) | (left.isnan() & right.isnan())).all())
