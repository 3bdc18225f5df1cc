"""Writes that were not hetmem's own: by the user outside compute, and by operators within it.

Note "writes": a parameter's version counter tells of most of them. Those that count no version (`parameter.data`, some
`_foreach_` operators, numpy) are seen where a copy differs from its home: all of it where an operator may have
written, a few sampled elements everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.plan.cache import CopyState
from hetmem.plan.trace import Tier
from hetmem.runtime.construction import recast
from hetmem.runtime.traffic import Traffic

_SAMPLES = 16


class Writes:
    """Notices writes to managed parameters and makes them count: home is right, and no superseded copy is used."""

    def __init__(self, parameters: list[ManagedParameter], traffic: Traffic) -> None:
        self._parameters = parameters
        self._traffic = traffic

    # ---- by the user, to the home ------------------------------------------------------------------------------

    def notice_all(self) -> None:
        """Look at every parameter for changes by the user since it was last used."""
        for managed in self._parameters:
            if self.changed(managed):
                self.by_user(managed)

    def changed(self, managed: ManagedParameter) -> bool:
        """Whether somebody else has written to `managed` since hetmem last saw it, outside compute."""
        parameter = managed.parameter
        if parameter._version != managed.version or parameter.data_ptr() != managed.home.data_ptr():
            return True
        return bool(managed.numel) and self._copy_differs(managed)

    def by_user(self, managed: ManagedParameter) -> None:
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
        self._supersede(managed)

    def of_data(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """`parameter.data = value` within compute: the value goes home, where it counts from the next use on."""
        managed.home.copy_(value)
        self._supersede(managed)

    def _supersede(self, managed: ManagedParameter, *, but_device: bool = False) -> None:
        """What is at home counts: the 16-bit copy there is made anew, and no other may be used, but perhaps the
        device's."""
        traffic, chunk = self._traffic, managed.chunk
        if chunk.operand == Role.COMPUTE:
            traffic.superseded(chunk, Role.PARAM)
            traffic.wait_until_written([chunk.homes[Role.COMPUTE]])  # what is on its way home must not come later
            recast(managed, managed.home)
        traffic.superseded(chunk, chunk.operand, but_device=but_device)

    def _copy_differs(self, managed: ManagedParameter) -> bool:
        """Whether a few sampled elements of a copy differ from the home: a write that no version counted.

        Of a home on NVMe only one is read, as each may cost an access of the disk.
        """
        chunk, residency = managed.chunk, self._traffic.residency
        home = chunk.homes[Role.PARAM]
        if home.block is None or chunk in self._traffic.updating:
            return False
        if residency.dirty(home.block):
            return False  # what is at home is older than every copy
        self._traffic.poll()  # a copy that has arrived must not look as if it were still on its way
        step = max(1, managed.numel // (1 if home.tier is Tier.NVME else _SAMPLES))
        mine = slice(managed.offset, managed.offset + managed.numel, step)
        at_home = chunk.flat(Role.PARAM)[mine]
        return any(not _same_bits(copy[mine].cpu(), at_home.to(copy).cpu()) for copy in self._copies(chunk))

    def _copies(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """What must say what the parameters of `chunk` say at home. A 16-bit copy at home speaks for the device's."""
        carrier, residency, role = self._traffic.carrier, self._traffic.residency, chunk.operand
        block = chunk.operand_block
        assert block is not None
        if residency.state(block, Tier.HOST) is CopyState.VALID:
            yield carrier.staged(chunk, role, residency.slot(block, Tier.HOST))
        elif role == Role.COMPUTE:
            yield chunk.flat(role)
        if role == Role.PARAM and residency.state(block, Tier.DEVICE) is CopyState.VALID:
            yield carrier.on_device(chunk, residency.slot(block, Tier.DEVICE))

    # ---- by operators, to the device copy ----------------------------------------------------------------------

    def compare(self, managed: ManagedParameter) -> None:
        """Somebody may have written to the device copy without a version: if it differs from home, it counts."""
        device = managed.device
        assert device is not None
        if not _same_bits(device, managed.home.to(device)):
            self.by_operator(managed)

    def by_operator(self, managed: ManagedParameter) -> None:
        """An operator changed the device copy: write it home now."""
        assert managed.device is not None
        source, home = managed.device, managed.home
        where = managed.chunk.homes[Role.PARAM]
        self._traffic.wait_until_written([where])
        self._traffic.send_home(where, lambda: _copy_changes(home, source), home.nbytes)
        managed.version = managed.parameter._version
        self._supersede(managed, but_device=True)


def _copy_changes(home: torch.Tensor, device: torch.Tensor) -> None:
    """Take over what was written to the device copy; where a narrower copy says the same as before, home keeps its
    own bits, which are more."""
    with torch.no_grad():
        device = device.to(home.device)
        if home.dtype != device.dtype:
            device = torch.where(device == home.to(device.dtype), home, device.to(home.dtype))
        home.copy_(device)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN for NaN."""
    return bool(torch.equal(left, right) or ((left == right) | (left.isnan() & right.isnan())).all())
