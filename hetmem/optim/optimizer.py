"""A torch optimizer whose states live on hetmem's tiers: its public interface.

A `Rule` does the arithmetic, a `Stepper` orders the work, and the runtime owns homes and transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from hetmem import torch_private
from hetmem.base.config import OverlapName
from hetmem.base.weak import weakly
from hetmem.cpu import total
from hetmem.cpu.workers import WorkerPool
from hetmem.engine.gradient_views import refuse_consumed
from hetmem.intercept import registry
from hetmem.intercept.diagnostics import refuse_a_fork
from hetmem.intercept.dynamo import uncompiled
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.interrupts import HELD_BACK
from hetmem.optim.chunk_update import WholeUpdate
from hetmem.optim.members import AllMembers, Members
from hetmem.optim.options import LossScale, Rule, check_max_grad_norm, choice, clip_factor, loss_scale
from hetmem.optim.states import Homes, States, checked, managed_again, no_longer_managed, reserve_homes, saved_homes
from hetmem.optim.step import ChunkWork, Stepper

_PARAMETERS, _MANAGED = itemgetter("params"), attrgetter("managed")
_SETTINGS = ("overlap", "max_grad_norm", "loss_scale", "grad_norm", "rule")


class OffloadedOptimizer(Optimizer):
    """Base of hetmem's optimizers: updates chunk by chunk, with states streamed from and to their tier.

    Parameter groups, schedulers, closures, hooks and `state_dict` are torch's own. `state[p]` holds the states' homes.
    A parameter whose `grad` is None is not changed. Creating the optimizer reserves memory for gradients and states.

    `max_grad_norm`: gradients are scaled down if the norm of all of them (L2, summed in float64) is greater, within the
    pass that updates, and `grad_norm` is the norm of the last step, None without `max_grad_norm` or `loss_scale`.
    `loss_scale`: "dynamic", a number, or a `LossScale`: gradients are those of `scale(loss)`, and a step whose
    gradients are not all finite changes nothing. `overlap`: see `Overlap`; the bits do not depend on it.

    Raises `ManageError` for parameters that are not managed, `BudgetError` if the states have no room, and ValueError
    for values that torch refuses too. An error of a transfer in `step` leaves every chunk either before or after its
    update, and its home readable; `step` called again, with the same gradients, does the rest. If the arithmetic itself
    fails in memory that it changes in place, every further `step` says that a checkpoint must be loaded.
    """

    writes_homes = True
    """Tells hetmem that this optimizer reports its own writes to parameters."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        *,
        overlap: OverlapName = "off",
        max_grad_norm: float | None = None,
        scale: LossScale | float | str | None = None,
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        self.overlap = choice(overlap)
        self.max_grad_norm = max_grad_norm
        self.loss_scale = loss_scale(scale)
        self.grad_norm: float | None = None
        self.rule = rule
        self._begin_empty()
        self._all_at_once = True
        super().__init__(params, defaults)
        self._all_at_once = False
        self._reserve(self.param_groups)

    def _begin_empty(self) -> None:
        self._all_at_once = False
        self._workers: WorkerPool | None = None
        self._steppers: dict[Interception, Stepper] = {}
        self.states = States()
        self._numbers: dict[int, int] = {}
        self._members = AllMembers[Stepper](self.rule)
        self._to_load: list[tuple[ManagedParameter, Homes, dict[str, Any]]] = []

    # ---- interface of torch's optimizers -----------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The states of each parameter, as tensors at home. Waits until all updates have been written there.

        Raises RuntimeError between a backward that has updated some and the end of its step, and `ManageError` in a
        forked process, which has none of that memory.
        """
        for interception, stepper in self._steppers.items():
            refuse_a_fork("reading optimizer states", interception.process)
            stepper.refuse_states()
        self._before_states_change()
        return self.states.hand_out()

    @state.setter
    def state(self, value: Any) -> None:
        for stepper in self._steppers.values():
            stepper.refuse_states()
        if self._all_at_once:  # torch's own constructor, which keeps no reference
            self.states.shown = value
            return
        self._before_states_change()  # updates under way use the old states
        self.states.replace(value)

    @HELD_BACK
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its parameters must be managed, and get homes for gradients and states."""
        super().add_param_group(param_group)
        self._numbers = {}
        if self._all_at_once:
            return
        try:
            self._reserve(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient once; return the closure's loss, if there is a closure.

        Raises `StoreError` if a drive fails (call `step` again: see above), and RuntimeError if hyper-parameters or
        weights changed, or gradients were dropped, after their update had begun during backward.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._step()
        return loss

    @HELD_BACK
    def _step(self) -> None:
        self._steppers = {found: stepper for found, stepper in self._steppers.items() if not found.removed}
        for stepper in self._steppers.values():  # first, as the failed update may have used up gradients
            stepper.refuse_corrupt()
        with torch_private.NoFunctionsOfSubclasses():  # parameters are watched
            refuse_consumed(chain.from_iterable(map(_PARAMETERS, self.param_groups)))
            with self._turns("a step"):
                try:
                    with ExitStack() as places:
                        for stepper in self._steppers.values():
                            places.enter_context(stepper.place())
                        self._step_all()
                finally:
                    for interception in self._steppers:  # updates behind the step may be another optimizer's
                        interception.segments.end_step()

    @contextmanager
    def _turns(self, what: str) -> Iterator[None]:
        """Keep other threads from computing with the models of this optimizer."""
        with ExitStack() as turns:
            for turn in sorted((found.runtime.turn for found in self._steppers), key=attrgetter("number")):
                turns.enter_context(turn.held(what))
            yield

    def _step_all(self) -> None:
        for stepper in self._steppers.values():
            stepper.begin()
        for interception in self._steppers:
            interception.share.grow()
        work, whole = self._work()
        grad_scale = self._grad_scale(work, [update for _, update in whole])
        try:
            for stepper, chunks in work.items():
                if grad_scale is None:
                    stepper.skip()
                else:
                    stepper.update(chunks, grad_scale)
            if grad_scale is not None:
                self._update_whole(whole, grad_scale)
        except BaseException:
            for stepper in work:  # also those that are done, as this step may be repeated
                stepper.failed = True
            raise
        for stepper in work:
            stepper.end(updated=grad_scale is not None)
        if self.loss_scale is not None:
            self.loss_scale.update(finite=grad_scale is not None)

    def _update_whole(self, whole: list[tuple[Stepper, WholeUpdate]], grad_scale: float) -> None:
        """Carry out the updates of groups, the largest parameters first: if room is short, the first one raises."""
        made: list[tuple[Stepper, WholeUpdate]] = []
        try:
            for stepper, update in sorted(whole, key=lambda one: -one[1].members.largest_bytes):
                update.carry_out(self.rule, grad_scale)
                made.append((stepper, update))
        except BaseException:
            for stepper, update in made:
                stepper.mark_corrupt(update.members.managed)
            raise

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does."""
        with self._turns("zero_grad()"):
            if not set_to_none:
                self.synchronize()  # an update under way reads them
            with torch_private.NoFunctionsOfSubclasses() if set_to_none else nullcontext():  # else it writes to them
                super().zero_grad(set_to_none)

    @HELD_BACK
    @torch.inference_mode(False)  # as inference tensors refuse later writes
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states into their homes, also from a checkpoint of the torch optimizer that computes the same.

        A state on the `meta` device only gets a home, for the caller to write to. Raises `ManageError`, with nothing
        changed, if states are of another kind (8-bit moments or not), or if that of a parameter to be trained lacks
        entries, where torch's `step` would raise KeyError.
        """
        with self._turns("load_state_dict()"):
            self._before_states_change()
            last_hook = self.register_load_state_dict_pre_hook(lambda _, given: self._take_homes_out(given))
            try:
                super().load_state_dict(state_dict)
            finally:
                last_hook.remove()
                self._to_load = []

    @HELD_BACK
    @torch.inference_mode(False)
    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise what `load_state_dict` raises for states of another kind; reserve homes, and change nothing else."""
        with self._turns("check_state_dict()"):
            saved_homes(state_dict, self.param_groups, self._with_homes)

    def _take_homes_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return `state_dict` without states that have homes: torch would cast those to the parameter's dtype."""
        found = saved_homes(state_dict, self.param_groups, self._with_homes)
        saved = state_dict["state"]
        self._to_load = [(managed, homes, saved[number]) for number, managed, homes in found]
        numbers = {
            number: {name: None if name in homes else value for name, value in saved[number].items()}
            for number, _, homes in found
        }
        return {**state_dict, "state": {**saved, **numbers}}

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in _SETTINGS}
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_steppers" not in self.__dict__:
            self.rule = state["rule"]
            self._begin_empty()
        if "state" in state:
            self.states.replace(state.pop("state"))
        super().__setstate__(state)
        for group in self.param_groups:  # options that older versions of torch did not save
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for managed, homes, saved in self._to_load:  # before torch calls hooks that read them
            self._managed(managed.parameter)
            self.states.take([managed])
            self.states.load(managed, homes, saved)

    # ---- beyond torch's interface ------------------------------------------------------------------------------

    @HELD_BACK
    def synchronize(self) -> None:
        """Wait until all updates are done and written home, also to NVMe. Raises their errors."""
        with self._turns("synchronize()"):
            for stepper in self._steppers.values():
                stepper.synchronize()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the present `loss_scale`, to call `backward` on; without one, `loss` itself."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    # ---- for checkpoints ---------------------------------------------------------------------------------------

    @property
    def half_stepped(self) -> bool:
        """Whether a step that has not ended has updated something: during backward, or in a step that failed."""
        return any(stepper.half_stepped for stepper in self._steppers.values())

    @HELD_BACK
    def forget_step(self) -> None:
        """Give up a step that was begun in a backward (`overlap`) or has failed, in place of calling `step`.

        What is updated stays updated, the rest is as it was, and the next backward begins a step of its own. Clear the
        gradients too: `zero_grad()`. Raises the error of a transfer that failed, and RuntimeError if an update has
        failed half-way, so that a checkpoint must be loaded.
        """
        with self._turns("forget_step()"):
            for stepper in self._steppers.values():
                stepper.give_up()
            self.synchronize()
            try:
                for stepper in self._steppers.values():
                    stepper.refuse_corrupt()
            finally:
                for stepper in self._steppers.values():
                    stepper.forget()

    def beside_states(self) -> dict[str, Any]:
        """Return what later bits depend on beside `state_dict()`: the loss scale, and the random seed."""
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        return {"loss_scale": scale, "seed": self.rule.seed}

    def load_beside_states(self, values: dict[str, Any]) -> None:
        """Load `values` of `beside_states`, as far as this optimizer has a loss scale or a seed."""
        if self.loss_scale is not None and values["loss_scale"] is not None:
            self.loss_scale.load_state_dict(values["loss_scale"])
        if self.rule.seed is not None and values["seed"] is not None:
            self.rule.seed = values["seed"]

    # ---- for the stepper ---------------------------------------------------------------------------------------

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the factor of gradients depends on all of them."""
        return self.max_grad_norm is not None or self.loss_scale is not None

    def expected_scale(self) -> float:
        """Return the factor of gradients if nothing is clipped."""
        return 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.value

    def groups_by_parameter(self) -> dict[int, dict[str, Any]]:
        """Return the group of each parameter, by its `id`."""
        found: dict[int, dict[str, Any]] = {}
        for group in self.param_groups:
            found.update(zip(map(id, group["params"]), repeat(group)))
        return found

    def number_of(self, managed: ManagedParameter) -> int:
        """Return the index of `managed` among all parameters of the optimizer, as in `state_dict`."""
        if not self._numbers:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        return self._numbers[id(managed.parameter)]

    # ---- inside ------------------------------------------------------------------------------------------------

    def _before_states_change(self) -> None:
        """Wait until all updates are done, and no save in the background has states yet to write."""
        self.synchronize()
        for interception in self._steppers:
            interception.runtime.outgoing.wait_for(interception.runtime.chunks)

    @HELD_BACK
    def _reserve(self, groups: Iterable[dict[str, Any]]) -> None:
        """Reserve homes for the states and gradients of `groups`."""
        roles_of: dict[Interception, dict[Chunk, tuple[Role, ...]]] = {}
        of: dict[Interception, list[ManagedParameter]] = {}
        found = [(group, *checked(parameter, self._name())) for group in groups for parameter in group["params"]]
        for group, interception, managed in found:
            of.setdefault(interception, []).append(managed)
            if managed.parameter.requires_grad:
                chunks, chunk = roles_of.setdefault(interception, {}), managed.chunk
                roles = (*chunks.get(chunk, ()), *self.rule.roles(group, chunk.dtype))
                chunks[chunk] = tuple(dict.fromkeys(roles))
        for interception, parameters in of.items():
            self._stepper(interception).refuse_begun(parameters)
        for interception, chunks in roles_of.items():
            reserve_homes(self, interception, chunks, self._name())
        self.states.take(managed for _, _, managed in found)
        for interception, chunks in roles_of.items():
            if self._steppers[interception].begins_early and interception.runtime.memory.uses_copies:
                interception.gradients.loans.consumers.add(self.states.token)
            interception.gradients.loans.hide(chunks)

    def _with_homes(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> tuple[ManagedParameter, tuple[Role, ...], tuple[str, ...]]:
        """Reserve homes for `parameter` with the options of `group`; return it, the roles of its states, and what
        updates of it need."""
        stepper, managed = self._managed(parameter, loads=True)
        stepper.refuse_begun([managed])
        dtype = managed.chunk.dtype
        roles = self.rule.roles(group, dtype)
        stepper.ensure_homes(managed.chunk, roles)
        return managed, roles, self.rule.needs(group, dtype)

    def _all_members(self) -> dict[Stepper, dict[Chunk, Members]]:
        return self._members.of(self.param_groups, self._steppers, self._managed)

    def _work(self) -> tuple[dict[Stepper, ChunkWork], list[tuple[Stepper, WholeUpdate]]]:
        """Return the work of a step, for all parameters with a gradient: that by chunk, and that of whole groups."""
        work, name = dict[Stepper, ChunkWork](), type(self).__name__
        all_members, have = self._all_members(), self._members.with_gradients()
        if None in have:
            self._managed(have[None])  # raises
        for stepper, chunks in all_members.items():
            found = {chunk: members.with_gradients(name) for chunk, members in chunks.items() if members in have}
            work[stepper] = {chunk: members for chunk, members in found.items() if members is not None}
        whole = [(stepper, group, members.with_gradients(name)) for stepper, group, members in self._members.whole]
        of_chunks = chain.from_iterable(map(dict.values, work.values()))
        stepped = chain(of_chunks, (members for _, _, members in whole if members is not None))
        self.states.check(chain.from_iterable(map(_MANAGED, stepped)))
        for stepper, chunks in work.items() if self.states.handed_out else ():
            for members in chunks.values():
                stepper.refuse_incomplete(members)
        return work, [(to, to.whole_update(group, members)) for to, group, members in whole if members is not None]

    def _grad_scale(self, work: dict[Stepper, ChunkWork], whole: list[WholeUpdate]) -> float | None:
        """Return the factor of all gradients; None if they are not all finite and the step is to be skipped."""
        if not self.needs_all_gradients:
            return 1.0
        sums = [sums for stepper, chunks in work.items() for sums in stepper.square_sums(chunks)]
        assert self._workers is not None
        sums += [sums for update in whole for sums in update.square_sums(self._workers)]
        unscale = self.expected_scale()
        self.grad_norm = total(sums) ** 0.5 * unscale
        if self.loss_scale is not None and self.grad_norm - self.grad_norm != 0:
            return None
        return unscale * clip_factor(self.grad_norm, self.max_grad_norm)

    def _managed(self, parameter: torch.Tensor, *, loads: bool = False) -> tuple[Stepper, ManagedParameter]:
        for interception, stepper in self._steppers.items():  # runs for each parameter, and is faster than the registry
            known = interception.runtime.bindings.by_id.get(id(parameter))
            if known is not None and not interception.removed:
                return stepper, known
        found = registry.of_parameter(parameter)
        if found is None:
            raise no_longer_managed(parameter, self._name())
        interception, managed = found
        if not loads and interception not in self._steppers and self.states.shown.get(parameter):
            raise managed_again(managed, self._name())
        return self._stepper(interception), managed

    def _stepper(self, interception: Interception) -> Stepper:
        if interception not in self._steppers:
            if self._workers is None:  # one pool for all models, on cores near the first one's device
                memory = interception.runtime.memory
                processes = 1 if memory.ranks is None else memory.ranks.count
                self._workers = WorkerPool(cores=memory.device.cores, processes=processes)
            self._steppers[interception] = Stepper(self, interception, self._workers, weakly(self._all_members))
        return self._steppers[interception]

    def _name(self) -> str:
        return f"hetmem.{type(self).__name__}"
