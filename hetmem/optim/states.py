"""States of optimizers: their memory, what users see of them, which optimizer owns them, and where loaded ones go.

The tensors in `optimizer.state` are the homes. This module knows of no steps; it neither updates nor waits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, compress, repeat
from operator import attrgetter
from typing import Any, Protocol

import torch

from hetmem.base import schema
from hetmem.base.units import format_enough, format_size
from hetmem.engine.gradients import GradientSink
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import is_shared
from hetmem.engine.upward import GradientListener
from hetmem.errors import BudgetError, ManageError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, address_of
from hetmem.optim.chunk_update import ADDRESS, VERSION
from hetmem.optim.members import Members, are_same, missing_in
from hetmem.optim.options import Overlap, Rule
from hetmem.schedule.staging import slots_for_staging

_STEPPED_BY = attrgetter("stepped_by")

Homes = dict[str, tuple[Role, torch.Tensor]]
"""The homes of a parameter's states, by the names of the states."""


class States:
    """The states of one optimizer. `shown` is its `state`: entries by parameter, as torch's optimizers have them. A
    parameter has one home for states of one name, so one optimizer steps it: the last one that was made over it, or has
    loaded states of it."""

    def __init__(self) -> None:
        self.shown: Any = {}
        self.token = object()
        """Identifies the optimizer, also after it was collected."""
        self._clean: set[Chunk] = set()
        """Chunks to whose states the program cannot have written since `written` last checked them."""
        self.handed_out = False
        """Whether the program ever got `shown`, and may hold parts of it."""
        self._seen: tuple[list[Any], ...] = ()
        """Identities, versions and addresses that `look` found."""

    def hand_out(self) -> Any:
        """Return `shown` for the program, which may write to it and to what is in it."""
        self.handed_out = True
        return self.shown

    def replace(self, shown: Any) -> None:
        """Replace all entries by `shown`."""
        self.shown, self.handed_out = shown, True
        self._clean.clear()

    def of(self, managed: ManagedParameter) -> dict[str, Any]:
        """Return the entry of `managed` in `shown`, empty if it was never updated."""
        found: dict[str, Any] = self.shown[managed.parameter]
        return found

    def take(self, parameters: Iterable[ManagedParameter]) -> None:
        """Make the optimizer the one that steps `parameters`."""
        for managed in parameters:
            managed.stepped_by = self.token

    def steps(self, managed: ManagedParameter) -> bool:
        """Return whether the optimizer steps `managed`."""
        return managed.stepped_by is self.token

    def steps_all(self, parameters: Collection[ManagedParameter]) -> bool:
        """Return whether the optimizer steps all of `parameters`. In C alone."""
        return {*map(_STEPPED_BY, parameters)} <= {self.token}

    def check(self, parameters: Iterable[ManagedParameter]) -> None:
        """Raise RuntimeError if another optimizer steps any of `parameters`; this one steps those that none did."""
        parameters = [*parameters]
        if self.steps_all(parameters):
            return
        for managed in parameters:
            if managed.stepped_by is None:
                managed.stepped_by = self.token
            if not self.steps(managed):
                raise RuntimeError(
                    f"{managed.name} is another optimizer's, which was made over it, or loaded states of it, after "
                    f"this one: hetmem keeps the states of one for a parameter. Load a state_dict into this one to go "
                    f"on with it, or use torch.optim for one of the two"
                )

    def refuse_incomplete(self, members: Members, updated: str) -> None:
        """Raise `ManageError`, which ends with `updated`, if entries of `members` lack what an update needs."""
        for managed, missing in members.incomplete(self.shown):
            raise incomplete(managed.name, self.of(managed), missing, f". {updated}")

    def forget_empty(self, managed: ManagedParameter) -> None:
        """Remove the entry of a parameter without states, as torch has none for it."""
        if not self.shown.get(managed.parameter, True):
            del self.shown[managed.parameter]

    def show(self, managed: ManagedParameter, role: Role) -> None:
        """Put the home of `role` of `managed` into its entry."""
        for name, home in managed.views(role).items():
            self.shown[managed.parameter][name] = home

    def make(self, managed: ManagedParameter, roles: Iterable[Role]) -> None:
        """Make those of `roles` that `managed` lacks, all zero, in their homes."""
        for role in roles:
            if self.of(managed).get(role.name) is None:
                managed.chunk.homes[role].written = True
                self.show(managed, role)
                for name in managed.byte_offsets(role):
                    self.of(managed)[name].zero_()

    def load(self, managed: ManagedParameter, homes: Homes, saved: Mapping[str, Any]) -> None:
        """Copy what was `saved` for `managed` to its homes (from `meta` nothing). Step counts and other scalars, which
        torch has moved to the device for a fused optimizer, go to host memory, where each step reads them."""
        state = self.shown[managed.parameter]
        self._clean.discard(managed.chunk)  # staged states are stale
        for name, (role, home) in homes.items():
            managed.chunk.homes[role].written = True
            if not saved[name].is_meta:
                home.copy_(saved[name])
            state[name] = home
        for name, value in state.items():
            if name not in homes and isinstance(value, torch.Tensor):
                state[name] = value.cpu()

    def look(self) -> None:
        """Detect whether the program has written to states or replaced entries of `shown`, before a step reads them.
        Runs in each step over all states: in C alone."""
        if not self.handed_out:
            return
        entries = [*self.shown.values()]
        values = [*chain.from_iterable(map(dict.values, entries))]
        tensors = [*compress(values, map(getattr, values, repeat("shape"), repeat(())))]  # no plain numbers
        facts = [*self.shown, *entries, *tensors], [*map(VERSION, tensors)], [*map(ADDRESS, tensors)]
        if not self._seen or facts[1:] != self._seen[1:] or not are_same(facts[0], self._seen[0]):
            self._seen = facts
            self._clean.clear()

    def written(self, chunk: Chunk, is_home: Callable[[int], bool]) -> bool:
        """Return whether the program may have written to states of `chunk` since the last call, as far as `look` has
        detected. A tensor that replaces a home in an entry is copied home. Raises RuntimeError if it lies in another
        home, as `is_home` says of its address: that may have got other values by then."""
        if chunk in self._clean:
            return False
        self._clean.add(chunk)
        for managed in chunk.parameters:
            state = self.shown.get(managed.parameter, {})
            for role, home in chunk.homes.items():
                if not (role.is_state and managed.numel) or state.get(role.name) is None:
                    continue
                for name, offset in managed.byte_offsets(role).items():
                    if state[name].shape != (needed := managed.views(role)[name].shape):
                        self._clean.discard(chunk)
                        raise ManageError(
                            f"{name} of {managed.name} is {tuple(state[name].shape)} in optimizer.state, expected "
                            f"{tuple(needed)}: assign a tensor of that shape, or copy into the one that was there"
                        )
                    if (at := state[name].data_ptr()) != address_of(home.shown) + offset:
                        if is_home(at):
                            self._clean.discard(chunk)
                            raise RuntimeError(
                                f"optimizer.state has a tensor of another parameter as {name} of {managed.name}: "
                                f"assign a clone of it, or copy into the tensor that was there"
                            )
                        state[name], self._seen = managed.views(role)[name].copy_(state[name]), ()
        return True

    def held(self, chunk: Chunk) -> bool:
        """Return whether the program holds views of states of `chunk` beside those in `state`."""
        return any(is_shared(shown) for shown, _ in self._shown(chunk))

    def moved(self, chunk: Chunk) -> None:
        """Point the tensors in `state` at the new homes of `chunk`; they stay the same objects."""
        for shown, home in self._shown(chunk):
            shown.data = home

    def _shown(self, chunk: Chunk) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that `state` shows of `chunk`, with its home."""
        for managed in chunk.parameters:
            state = self.shown.get(managed.parameter, {})
            for role in chunk.homes:
                if managed.numel and state.get(role.name) is not None:
                    for name, home in managed.views(role).items():
                        yield state[name], home


def saved_homes(
    state_dict: dict[str, Any],
    groups: list[dict[str, Any]],
    with_homes: Callable[[torch.Tensor, dict[str, Any]], tuple[ManagedParameter, tuple[Role, ...], tuple[str, ...]]],
) -> list[tuple[int, ManagedParameter, Homes]]:
    """Return the homes of the states in `state_dict`, by numbers of parameters.

    `groups` are the optimizer's own; `with_homes` reserves homes for the states of a parameter with the options of a
    group, and says what its updates need. Raises `ManageError` for states of other shapes or of another kind than these
    homes are for, and for incomplete ones of a parameter that is trained.
    """
    found = []
    for mine, theirs in zip(groups, state_dict["param_groups"], strict=False):
        for parameter, number in zip(mine["params"], theirs["params"], strict=False):
            if number not in state_dict["state"]:
                continue
            state = state_dict["state"][number]
            managed, roles, needs = with_homes(parameter, {**mine, **theirs})
            homes = {
                name: (role, home)
                for role in roles
                if state.get(role.name) is not None
                for name, home in managed.views(role).items()
            }
            check_states(managed.name, state, roles, {name: home for name, (_, home) in homes.items()})
            if state and parameter.requires_grad and (missing := missing_in(state, needs)):
                raise incomplete(managed.name, state, missing)
            found.append((number, managed, homes))
    return found


def incomplete(parameter: str, state: Mapping[str, Any], missing: list[str], and_more: str = "") -> ManageError:
    """Return the error for a `state` of `parameter` that lacks what is `missing`: zeros in its place would be wrong."""
    return ManageError(
        f"the state of {parameter} has {', '.join(map(str, state))}, but no {', '.join(missing)}: it is damaged, or of "
        f"another kind of optimizer. Load a whole one, or leave all of it out (del optimizer.state[p]), so that it "
        f"begins anew{and_more}"
    )


def check_states(
    parameter: str, state: Mapping[str, Any], roles: tuple[Role, ...], homes: Mapping[str, torch.Tensor]
) -> None:
    """Raise `ManageError` if `state`, saved for `parameter`, does not fit into `homes`, those of `roles`."""
    for name in homes:
        if name in state and not isinstance(state[name], torch.Tensor):
            raise ManageError(f"{name} of {parameter} is {schema.shown(state[name])} in this checkpoint, no tensor")
    for role in roles:
        scaled = f"{role.name}_scale" in state
        if state.get(role.name) is not None and scaled != bool(role.scale_block):
            raise ManageError(
                f"{role.name} of {parameter} is {state[role.name].dtype} {'with' if scaled else 'without'} scales in "
                f"this checkpoint, and this optimizer keeps it as {homes[role.name].dtype}: make it with moments= as "
                f"the one that was saved"
            )
    if isinstance(state.get("step"), (int, float)):
        raise ManageError(
            f"step of {parameter} is a number in this checkpoint, as torch before 1.12 saved it: load it into torch's "
            f"optimizer, and save the state_dict() of that"
        )
    for name, value in state.items():
        if name in homes and value.shape != homes[name].shape:
            raise ManageError(
                f"{name} of {parameter} is {tuple(value.shape)} in this checkpoint and {tuple(homes[name].shape)} here"
            )
        if name not in homes and isinstance(value, torch.Tensor) and value.dim():
            raise ManageError(
                f"{name} of {parameter}, {tuple(value.shape)} in this checkpoint, is no state of this optimizer: it is "
                f"of another kind"
            )


class SteppingOptimizer(Protocol):
    """What a step needs of its optimizer; attributes may change between steps."""

    overlap: Overlap
    max_grad_norm: float | None
    rule: Rule
    states: States

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the factor of gradients depends on all of them."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as torch's optimizers have them."""

    def expected_scale(self) -> float:
        """Return the factor of gradients that undoes the loss scale."""

    def groups_by_parameter(self) -> dict[int, dict[str, Any]]:
        """Return the group of each parameter, by its `id`."""

    def number_of(self, managed: ManagedParameter) -> int:
        """Return the index of `managed` among all parameters of the optimizer."""


def ends_with_its_optimizer(listener: GradientListener, sink: GradientSink, token: object) -> Callable[[Any], None]:
    """Return a callback for the end of an optimizer: it removes `listener` and `token` from `sink`, whatever else holds
    them."""
    own, sinks = weakref.ref(listener), weakref.ref(sink)

    def gone(_: Any) -> None:
        alive, watched = own(), sinks()
        if alive is not None and watched is not None:
            watched.listeners.discard(alive)
            watched.loans.consumers.discard(token)

    return gone


def checked(parameter: torch.Tensor, optimizer: str) -> tuple[Interception, ManagedParameter]:
    """Return what manages `parameter`. Raises `ManageError` if `optimizer` cannot update it."""
    found = registry.of_parameter(parameter)
    if found is None and (added := registry.added_as(parameter)) is not None:
        raise ManageError(
            f"{optimizer} got {added}, which was added to its model after hetmem.manage: call "
            f"hetmem.release(model) and hetmem.manage(model, …) again, or use torch's for this one"
        )
    if found is None:
        raise ManageError(
            f"{optimizer} got a parameter of shape {tuple(parameter.shape)} that is not managed: call "
            f"hetmem.manage(model, …) before making the optimizer, or, to offload nothing but the optimizer's states, "
            f"give it budget=hetmem.Budget(host=…)"
        )
    if parameter.requires_grad and not parameter.dtype.is_floating_point:  # frozen ones get no gradient
        raise ManageError(f"{optimizer} cannot update {found[1].name} of dtype {parameter.dtype}")
    return found


def no_longer_managed(parameter: torch.Tensor, optimizer: str) -> ManageError:
    """Return the error for a step of `optimizer` on a `parameter` that is not managed any more."""
    return ManageError(
        f"{optimizer} cannot step a parameter of shape {tuple(parameter.shape)} that is not managed any "
        f"more: its model was released, or is a copy, as this is. Make an ordinary optimizer, or call "
        f"hetmem.manage(model, …) and make {optimizer} again, and load this one's state_dict into it"
    )


def managed_again(managed: ManagedParameter, optimizer: str) -> ManageError:
    """Return the error for states of `optimizer` from before the model was released and managed again."""
    return ManageError(
        f"{optimizer} has states of {managed.name} from before its model was released and managed again: "
        f"make it again and load this one's state_dict into it, or load its own state_dict() into itself"
    )


# ---- Room for homes, and what to do if there is too little. ----


def reserve_homes(
    optimizer: SteppingOptimizer, interception: Interception, roles_of: Mapping[Chunk, tuple[Role, ...]], name: str
) -> None:
    """Reserve homes for gradients of the chunks in `roles_of`, and for the states there.

    Raises `BudgetError` if they have no room.
    """
    memory, traffic, sink = interception.runtime.memory, interception.runtime.traffic, interception.gradients
    overlaps = memory.uses_copies and optimizer.overlap is not Overlap.OFF and not memory.resident
    lends = overlaps and memory.ranks is None and not optimizer.needs_all_gradients
    narrows = overlaps and memory.ranks is None  # ranks add gradients of all in one home of full precision
    if not memory.resident:
        check_room(memory, roles_of, name, lends=lends, narrow=narrows)
    for chunk, roles in roles_of.items():
        memory.expect(chunk, (Role.GRAD, *roles))
    narrow = [chunk for chunk in roles_of if narrows and chunk.may_be_narrow] if not lends else []
    if lends:
        traffic.ensure_homes([chunk for chunk in roles_of if chunk in memory.unstaged], (Role.GRAD,))
        new = [chunk for chunk in roles_of if not (chunk.moved or chunk in memory.unstaged or memory.lends(chunk))]
        memory.set_aside(new)
        sink.loans.lends = True
    elif memory.uses_copies:  # otherwise autograd keeps gradients, on the device
        if memory.staging_slots:
            memory.narrow_gradients(narrow)
        apart = {*narrow} if not memory.staging_slots else set[Chunk]()
        traffic.ensure_homes([chunk for chunk in roles_of if chunk not in apart], (Role.GRAD,))  # in their order
    alike: dict[tuple[Role, ...], list[Chunk]] = {}
    for chunk, roles in roles_of.items():
        check_staging(memory, chunk, len(roles))
        alike.setdefault(roles, []).append(chunk)
    for roles, chunks in alike.items():
        for chunk in chunks:
            interception.share.before_reserving(chunk, set(roles))
        traffic.ensure_homes(chunks, roles)
    if not memory.staging_slots:
        memory.keep_narrow(narrow)
    if memory.staying:
        on_device = optimizer.rule.runs_on_device or memory.device.torch_device.type == "cpu"
        has_all = all(c in roles_of for c in memory.chunks if any(m.parameter.requires_grad for m in c.parameters))
        if has_all and not (memory.in_codes and on_device):
            interception.share.bring_home(lends=lends)
        if memory.staying and not on_device:
            raise stays_on_device(memory, name)
        trained = [chunk for chunk in memory.staying if chunk in roles_of]
        if lends:
            memory.set_aside_on_device([chunk.lent_nbytes for chunk in trained])
        else:
            traffic.ensure_homes(trained, (Role.GRAD,))


def check_room(
    memory: Memory, roles_of: Mapping[Chunk, Collection[Role]], name: str, *, lends: bool, narrow: bool
) -> None:
    """Raise `BudgetError` if host memory and NVMe lack room for what the optimizer called `name` keeps of chunks.
    `lends`: gradients use lent buffers; `narrow`: they keep the dtype in which they arrive."""
    wanted: Counter[str] = Counter()
    for chunk, roles in roles_of.items():
        for role in (*roles, *(() if lends and chunk not in memory.unstaged else (Role.GRAD,))):
            if role not in chunk.homes and not chunk.moved:
                nbytes = chunk.lent_nbytes if narrow and role is Role.GRAD else chunk.home_nbytes(role)
                wanted["gradients" if role is Role.GRAD else "states"] += nbytes
    room, total = memory.room(of_all=True), sum(wanted.values())
    missing = total - room.host_bytes - room.nvme_bytes
    if missing <= 0:
        return
    here = total + memory.host_pool.reserved_bytes + (memory.store.reserved_bytes if memory.store else 0)
    device = f", the device holds {format_size(memory.device_home_bytes)}" if memory.device_home_bytes else ""
    tiers = f"Budget(host=…) is {format_size(memory.host_pool.capacity_bytes)}"
    tiers += f" and Budget(nvme=…) {format_size(memory.nvme_bytes)}" if memory.store else ""
    kinds = ", ".join(f"{what} {format_size(nbytes)}" for what, nbytes in wanted.items())
    raise BudgetError(
        f"{name} has no room: weights, gradients and states take {format_size(here)} in all beside the device ({kinds} "
        f"still to come), and {tiers}{device}, so {format_enough(missing)} are missing; {room.unreachable}raise "
        f"Budget(host=…) to {format_enough(memory.host_pool.capacity_bytes + missing)}"
        f"{'' if room.unreachable else ', or give Budget(nvme=…, nvme_dir=…)'}; "
        f"`hetmem plan` says what else would do"
    )


def stays_on_device(memory: Memory, name: str) -> BudgetError:
    """Return the error of an optimizer that updates in host memory only and lacks room there."""
    missing = format_enough(memory.device_home_bytes)
    return BudgetError(
        f"{name} with these options updates in host memory, and {missing} of weights and states have no room there: "
        f"raise Budget(host=…) by {missing}, or give Budget(nvme=…, nvme_dir=…)"
    )


def check_staging(memory: Memory, chunk: Chunk, states: int) -> None:
    """Raise `BudgetError` if an update of `chunk`, with so many `states`, has no room in staging."""
    slots = memory.staging_slots
    needed = (2 + states) * chunk.spec.span
    if 0 < slots < needed and chunk not in memory.unstaged:
        raise BudgetError(
            f"staging between NVMe and the device has {slots} slots, an update of {chunk.label(Role.PARAM)} with "
            f"{states} states needs {needed} at once: raise Budget(host=…) to "
            f"{format_size(slots_for_staging(needed) * memory.host_pool.slot_bytes)}, or set a smaller chunk_bytes"
        )
