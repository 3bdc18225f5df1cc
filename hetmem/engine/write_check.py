"""Writes that were not hetmem's own: by the user outside compute, and by operators within it.

Note "writes": a parameter's version counter tells of most of them. Those that count no version (`parameter.data`, some
`_foreach_` operators, numpy) are seen otherwise. Where an operator may have written to a copy, that is compared with
its home: the one place that waits for the device, and only models that write to weights get there. Outside compute,
weights that are trained may be written to after a step, between forwards with and without gradients, and where
gradients were cleared. Then every copy of them is made anew for the next forward, and behind a step nothing is read
ahead from their homes before it; 16-bit copies at home are compared instead, see `home_copies`. Where none of this has
happened (forwards alone, accumulation, frozen weights) copies stay, and the home is compared with what it was in a few
elements. A home on the device can be looked at only by waiting, so its copy is made anew for each forward: a pass over
memory of the device, behind nobody's back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetmem.engine.build import recast
from hetmem.engine.param_views import Bindings, storage_references
from hetmem.engine.sampling import HomeCopies, same_bits
from hetmem.engine.traffic import Traffic
from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.nvme_store import NvmeStore
from hetmem.memory.tensor_views import give_away
from hetmem.schedule.blocks import PLACED, CopyState
from hetmem.schedule.trace import Tier


class Writes:
    """Notices writes to managed parameters and makes them count: home is right, and no superseded copy is used."""

    def __init__(
        self, parameters: list[ManagedParameter], bindings: Bindings, traffic: Traffic, store: NvmeStore | None
    ) -> None:
        self._bindings = bindings
        self._chunks = list(dict.fromkeys(managed.chunk for managed in parameters))
        self._traffic, self._store = traffic, store
        self.unsure: set[Chunk] = set()
        """Those that were on their way from NVMe when all were looked at: `make_sure` before a use."""
        self.uncounted: set[int] = set()
        """By `id`, those whose copies were ever found to be written without a version."""
        self.noticed: set[int] = set()
        """By `id`, those that somebody has written to since `notice_counted` looked at their chunk, as was seen."""
        self.home_copies = HomeCopies()
        self._ties: dict[ManagedParameter, ManagedParameter] = {}
        """Those whose `.data` was last set to that of another one, within the forward that runs."""
        self.stepped = True
        """Whether an optimizer has stepped since the last forward, so that the user may have written to weights."""
        self._gradients_wanted: bool | None = None
        self._gradients_left: dict[ManagedParameter, tuple[int, int] | None] = {}
        """Of backwards since the last forward but one that made copies anew, as they left them: see `_gradient`."""

    # ---- by the user, to the home ------------------------------------------------------------------------------

    def notice_all(self) -> None:
        """A forward begins: look at every parameter for changes by the user since it was last used."""
        self._traffic.pending.poll()  # a copy that has arrived must not look as if it were still on its way
        self.unsure.clear()
        stepped, self.stepped = self.stepped, False
        trained = stepped or torch.is_grad_enabled() is not self._gradients_wanted or self._gradients_taken()
        if trained:
            self._gradients_left.clear()
        self._gradients_wanted = torch.is_grad_enabled()
        chunks, counted = self._chunks, self._all_counted()
        due = {each.chunk for chunk in chunks if trained for each in chunk.parameters if each.parameter.requires_grad}
        self.look_ahead(chunk for chunk in chunks if not (stepped and chunk in due))
        compared: list[Chunk] = []
        copied = bool(self._traffic.executor.chunk_of_block)
        for chunk in chunks:
            if chunk in counted:
                self._notice_counted_of(chunk, counted[chunk])
            elif not copied or chunk.operand_block is None:
                continue  # operators see the home itself
            elif chunk not in due and self._coming(chunk):
                self.unsure.add(chunk)  # by what was there before, perhaps; waiting would hold the others up
            elif not (stepped and chunk in due) and self._differs(chunk):
                self._by_values(chunk)
            if chunk.homes[Role.PARAM].tier is Tier.DEVICE:
                self._traffic.copy_home_again(chunk)
            elif chunk.operand == Role.COMPUTE and self._may_be_stale(chunk, due=chunk in due):
                compared.append(chunk)
            elif chunk in due:
                self._traffic.outdate(chunk)
        self.home_copies.begin(compared)
        self.unsure.update(self.home_copies.unchecked)
        self._traffic.residency.lift()

    def _all_counted(self) -> dict[Chunk, list[ManagedParameter]]:
        """Those of which torch itself tells of a write, by their chunks: `_counted` of all before each forward, so that
        torch is asked without Python's calls."""
        found: dict[Chunk, list[ManagedParameter]] = {}
        all_of_them = [managed for chunk in self._chunks for managed in chunk.parameters]
        tensors = [managed.parameter for managed in all_of_them]
        facts = map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors)
        for managed, address, stride in zip(all_of_them, *facts, strict=True):
            parameter = managed.parameter
            same = parameter._version == managed.version and address == managed.home_address
            if not same or managed.shape != parameter.shape or stride != managed.stride:
                found.setdefault(managed.chunk, []).append(managed)
        return found

    def _notice_counted_of(self, chunk: Chunk, counted: list[ManagedParameter]) -> None:
        self._traffic.wait_for_update(chunk)  # it has a copy in staging that it will write to
        others = [each for each in chunk.parameters if each not in counted and self._differs(chunk, each)]
        for managed in counted:
            self.by_user(managed)
        for managed in others:  # seen before: no copy is left now that they could be compared with
            self.noticed.add(id(managed))
            self._supersede(managed)

    def _may_be_stale(self, chunk: Chunk, *, due: bool) -> bool:
        """Whether the 16-bit copy of `chunk` is to be compared. While its update trails it is not the user's turn."""
        if chunk in self._traffic.updating:
            return False
        seen = self._traffic.executor.fingerprints
        return due or seen.differ(chunk, chunk.flat(Role.PARAM))

    def leave_gradients(self, arrived: Iterable[ManagedParameter]) -> None:
        """A backward is over, in which gradients of `arrived` arrived."""
        for managed in arrived:
            gradient = managed.parameter.grad  # as `_gradient`
            self._gradients_left[managed] = None if gradient is None else (id(gradient), gradient._version)

    def edited_gradients(self) -> list[ManagedParameter]:
        """Those whose gradients are not as the last backwards have left them, as far as versions tell."""
        return [managed for managed, left in self._gradients_left.items() if _gradient(managed) != left]

    def _gradients_taken(self) -> bool:
        """Whether the user has cleared gradients since, as after a step of his own; accumulation leaves them alone."""
        return bool(self.edited_gradients())

    def look_ahead(self, chunks: Iterable[Chunk]) -> None:
        """The homes of `chunks` are looked at next: what is looked at on NVMe is read together."""
        residency, fingerprints = self._traffic.residency, self._traffic.executor.fingerprints
        if self._store is None:
            return
        for chunk in chunks:
            home = chunk.homes[Role.PARAM]
            if home.extent is None or home.block is None or chunk in self._traffic.updating:
                continue
            on_host, on_device = (residency.state(home.block, tier) for tier in (Tier.HOST, Tier.DEVICE))
            if (on_host is CopyState.VALID or on_device in PLACED) and not residency.dirty(home.block):
                self._store.cache_pages(home.extent, fingerprints.offsets(chunk))

    def make_sure(self, chunk: Chunk) -> None:
        """`chunk` is used next: wait for what is on its way, or is compared, and see whether that is what its home
        says."""
        self.unsure.discard(chunk)
        if chunk in self._traffic.updating:  # which makes it, and its copy, anew
            self.home_copies.renewed(chunk)
        elif chunk.operand == Role.COMPUTE:
            self._traffic.executor.fingerprints.take(chunk, chunk.flat(Role.PARAM))
            stale = self.home_copies.stale(chunk)
            self.noticed.update(map(id, stale))
            if stale:
                self._traffic.superseded(chunk, Role.COMPUTE)
        elif self._differs(chunk):
            self._by_values(chunk)

    def _by_values(self, chunk: Chunk) -> None:
        """Something of `chunk` was written without a version. Its copies are of all of it."""
        self.noticed.update(id(managed) for managed in chunk.parameters if self._differs(chunk, managed))
        for managed in chunk.parameters:
            self._supersede(managed)

    def _coming(self, chunk: Chunk) -> bool:
        block = chunk.homes[Role.PARAM].block
        return block is not None and self._traffic.residency.state(block, Tier.HOST) is CopyState.LOADING

    def changed(self, managed: ManagedParameter) -> bool:
        """Whether somebody else has written to `managed` since hetmem last saw it, outside compute."""
        return self._counted(managed) or self._differs(managed.chunk, managed)

    def notice_counted(self, chunk: Chunk) -> None:
        """Of what torch tells of by itself, since the forward. What comes after this is remembered."""
        for managed in chunk.parameters:
            if self._counted(managed):
                self.by_user(managed)
        self.noticed.difference_update(map(id, chunk.parameters))

    @staticmethod
    def _counted(managed: ManagedParameter) -> bool:
        """Whether torch itself tells of a write."""
        return managed.parameter._version != managed.version or _is_replaced(managed)

    def by_user(self, managed: ManagedParameter) -> None:
        """`managed` was changed outside compute: its home counts, copies of it are superseded."""
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
            parameter.data = managed.home
        managed.version = parameter._version
        self.noticed.add(id(managed))
        self._supersede(managed)

    def of_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within compute: the value goes home, where it counts from the next use on."""
        _refuse_another_kind(managed, value, value.dtype)
        source = self._bindings.of_storage(value)
        self._ties.pop(managed, None)
        if source not in (None, managed):
            self._ties[managed] = source
        self._bindings.leave_to_holders(managed)
        at_home = managed.parameter.data_ptr() == managed.home.data_ptr()
        self._leave_home_to_holders(managed, hetmem_holds=2 + at_home)
        managed.home.copy_(value)
        managed.data_sets += 1
        self.noticed.add(id(managed))
        self._supersede(managed)

    def refuse_ties(self) -> None:
        """A forward is over. Raises `ManageError` if it has left a weight the memory of another one."""
        if self._ties:
            managed, source = self._ties.popitem()
            self._ties.clear()
            raise _shared(managed, source)

    def _leave_home_to_holders(self, managed: ManagedParameter, *, hetmem_holds: int) -> None:
        """The home of `managed` becomes another tensor's values. Who holds more than the `hetmem_holds` references to
        the old ones (`kept = p.data`, a state dict) keeps them, as in torch, where these are two tensors. So do those
        who hold a storage that was given other memory (`p.data.share_memory_()`), as they have that."""
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
        """What is at home counts: the 16-bit copy there is made anew, and no other may be used, but perhaps the
        device's."""
        traffic, chunk = self._traffic, managed.chunk
        if chunk.operand == Role.COMPUTE:
            traffic.superseded(chunk, Role.PARAM)
            traffic.wait_until_written([chunk.homes[Role.COMPUTE]])  # what is on its way home must not come later
            recast(managed, managed.home)
        traffic.superseded(chunk, chunk.operand, but_device=but_device)

    def _differs(self, chunk: Chunk, managed: ManagedParameter | None = None) -> bool:
        """Whether the home of `chunk`, or of `managed` in it, was written since copies of it were made."""
        home, traffic = chunk.homes[Role.PARAM], self._traffic
        residency, fingerprints = traffic.residency, traffic.executor.fingerprints
        if home.block is None or home.tier is Tier.DEVICE or chunk in traffic.updating or residency.dirty(home.block):
            return False  # without a copy, or what is at home is older than every copy
        while self._coming(chunk):  # perhaps what was there before
            traffic.wait_for_one()
        at_home = chunk.flat(Role.PARAM)
        if chunk.operand == Role.COMPUTE:  # which speaks for the device's copy
            return fingerprints.unequal(chunk, traffic.newest(chunk, Role.COMPUTE), at_home, managed)
        if residency.state(home.block, Tier.DEVICE) in PLACED and fingerprints.differ(chunk, at_home, managed):
            return True
        if residency.state(home.block, Tier.HOST) is not CopyState.VALID:
            return False
        return fingerprints.unequal(chunk, traffic.newest(chunk, Role.PARAM), at_home, managed)

    # ---- by operators, to the device copy ----------------------------------------------------------------------

    def by_view(self, managed: ManagedParameter) -> None:
        """Somebody holds a view of the device copy whose writes count no versions. A copy that is superseded (by an
        update, or by the user) is older than the home, and says nothing of it."""
        if self._traffic.copy_counts(managed.chunk) and not self._differs(managed.chunk, managed):
            self.compare(managed)

    def compare(self, managed: ManagedParameter) -> None:
        """Somebody may have written to the device copy without a version: if it differs from home, it counts."""
        device = managed.device
        assert device is not None
        if not same_bits(device, managed.home.to(device)):
            self.uncounted.add(id(managed))
            self.by_operator(managed)

    def by_operator(self, managed: ManagedParameter) -> None:
        """An operator changed the device copy: write it home now."""
        assert managed.device is not None
        source, home = managed.device, managed.home
        where = managed.chunk.homes[Role.PARAM]
        self._traffic.wait_until_written([where])  # an update that trails must not come after this
        self._traffic.gradients.send_now(where, lambda: _copy_changes(home, source), home.nbytes)
        managed.version = managed.parameter._version
        self.noticed.add(id(managed))
        self._supersede(managed, but_device=True)
        self._traffic.copy_equals_home(managed.chunk)


def _is_replaced(managed: ManagedParameter) -> bool:
    """Whether `parameter.data` is another tensor than the home, or another view of it."""
    parameter = managed.parameter
    at_home = parameter.data_ptr() == managed.home_address
    return not at_home or parameter.stride() != managed.stride or parameter.shape != managed.shape


def _shared(managed: ManagedParameter, source: ManagedParameter) -> ManageError:
    return ManageError(
        f"{managed.name}.data was set to the memory of {source.name}, in which torch would train both from now on: make"
        f" them one parameter before hetmem.manage, or set .data to a clone"
    )


def _refuse_another_kind(managed: ManagedParameter, new: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `ManageError` if `new`, which `managed` is to be from now on, is not of its shape and `dtype`."""
    if new.shape != managed.shape or new.dtype != dtype:
        raise ManageError(
            f"{managed.name} was {managed.shape} of {managed.home.dtype} when it became managed and is {new.shape} of "
            f"{new.dtype} now: call hetmem.release(model) first, change it, and manage it again"
        )


def _copy_changes(home: torch.Tensor, device: torch.Tensor) -> None:
    """Take over what was written to the device copy; where a narrower copy says the same as before, home keeps its
    own bits, which are more."""
    with torch.no_grad():
        device = device.to(home.device)
        if home.dtype != device.dtype:
            device = torch.where(device == home.to(device.dtype), home, device.to(home.dtype))
        home.copy_(device)


def _gradient(managed: ManagedParameter) -> tuple[int, int] | None:
    """What tells whether `p.grad` is another one, or was written to, without holding it."""
    gradient = managed.parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
