"""A torch optimizer over unmanaged parameters, whose states lie in host memory and on NVMe within a budget.

Parameters and gradients stay where the program, or `fully_shard`, keeps them. Division between ranks, and all that
crosses between them, is torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from hetmem.base.config import Budget, ranks_here, refuse_budget
from hetmem.cpu import Task, square_sum_tasks
from hetmem.cpu.workers import WorkerPool, most_threads
from hetmem.errors import ManageError
from hetmem.intercept.diagnostics import refuse_a_fork
from hetmem.intercept.dynamo import uncompiled
from hetmem.memory.cuda_device import CudaDevice
from hetmem.memory.interrupts import HELD_BACK
from hetmem.optim.backward_updates import BackwardUpdates
from hetmem.optim.members import GroupOptions, missing_in
from hetmem.optim.options import LossScale, Rule, check_max_grad_norm, clip_factor, loss_scale, refuse_others
from hetmem.optim.shards import Shard, local, shards_of, square_total
from hetmem.optim.state_memory import StateMemory
from hetmem.optim.state_pass import Piece, ShardUpdate, StatePass, same_inputs
from hetmem.optim.states import check_states, incomplete
from hetmem.optim.states_report import StatesReport, StepTimes

_MANAGED = {"moments": None, "stochastic_rounding": False, "seed": 0}
"""Options of the optimizers of managed models, and their defaults."""


def refuse_managed(options: dict[str, Any], name: str) -> None:
    """Raise `ManageError` for `options` of managed models; TypeError for others, in the `name` of a function."""
    refuse_others(name, {option: value for option, value in options.items() if option not in _MANAGED})
    for option, value in options.items():
        if value != _MANAGED[option]:
            raise ManageError(f"{option}= is for managed models (hetmem.manage): leave it out, or budget=")


def _check_overlap(overlap: str, **need_all: Any) -> None:
    """Raise `ManageError` for what an unmanaged model cannot do; `need_all`: options that need all gradients."""
    if overlap not in ("off", "backward"):
        raise ManageError(f'overlap={overlap!r} is for managed models: with budget= it is "off" or "backward"')
    for option, value in need_all.items():
        if overlap != "off" and value is not None:
            raise ManageError(
                f'{option}= needs all gradients before the first update: with budget= it takes overlap="off"'
            )


class UnmanagedOptimizer(Optimizer):
    """What `hetmem.AdamW` and `hetmem.optim.offload` return with `budget=`: updates of plain tensors on any device, and
    of the local parts of DTensors (`fully_shard`, with `CPUOffloadPolicy` or without), by the processor.

    Parameter groups, schedulers, closures, hooks and `state_dict` are torch's own. `state[p]` shows the states in host
    memory or, mapped, on NVMe: for a DTensor as DTensors of its placement, which `torch.distributed.checkpoint` saves,
    and loads at any number of ranks. `max_grad_norm` is of all ranks of a DTensor's mesh. `budget`, of this process:
    its `host` has states and what passes to a device or NVMe, `nvme` has states.

    `overlap="backward"` updates each parameter as soon as its gradient is there, beside the rest of the backward, of
    which a step has one. Gradients stay, and must not be changed: `step` raises RuntimeError then.

    `grad_norm` is the norm of the last step, None without `max_grad_norm` and `loss_scale`. Raises `ManageError` for
    parameters that it cannot update, `BudgetError` if the states have no room. After an error of a drive in `step`,
    `step` called again with the same gradients does the rest.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        *,
        budget: Budget,
        name: str,
        max_grad_norm: float | None = None,
        scale: LossScale | float | str | None = None,
        overlap: str = "off",
    ) -> None:
        refuse_budget(budget)
        check_max_grad_norm(max_grad_norm)
        _check_overlap(overlap, max_grad_norm=max_grad_norm, loss_scale=scale)
        self.overlap = overlap
        self.max_grad_norm = max_grad_norm
        self.loss_scale = loss_scale(scale)
        self.grad_norm: float | None = None
        self.rule, self._name, self._budget = rule, name, budget
        self._process = os.getpid()
        self._times = StepTimes()
        self._early: BackwardUpdates | None = None
        self._shards: dict[int, Shard] = {}
        self._arriving: dict[int, GroupOptions] = {}
        """The options of the group of each parameter, when the first gradient of a step arrived."""
        self._options: list[tuple[dict[str, Any], GroupOptions]] = []
        """The groups, and their options when a step last read them."""
        self._shown: dict[Shard, dict[str, torch.Tensor]] = {}
        self._updates: dict[Shard, ShardUpdate] = {}
        """Those of a step that has failed, or that a backward has begun."""
        self._to_load: list[tuple[Shard, dict[str, torch.Tensor]]] = []
        self._dirty: set[Shard] = set()
        """Parameters whose memory for states may be other than zero."""
        super().__init__(params, defaults)
        self._make_memory()

    # ---- interface of torch's optimizers -----------------------------------------------------------------------

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient once; return the closure's loss, if there is a closure.

        Raises `StoreError` if a drive fails (call `step` again, with the same gradients).
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        with self._times.of_a_step(lambda: self._pass.counts()):
            self._step()
        return loss

    @HELD_BACK
    def _step(self) -> None:
        refuse_a_fork("a step", self._process)
        if self._early is not None:
            self._early.join()
        if self._pass.corrupt:
            raise RuntimeError(
                f"an update of {self._name} has failed half-way: some elements are those of another step. Load a "
                f"checkpoint of weights and states"
            )
        self._follow()
        updates = self._made_again(self._wanted())
        scale = self._grad_scale(updates)
        if scale is not None:
            self._updates = updates
            self._dirty.update(updates)
            self._pass.carry_out(updates, scale)
            for update in updates.values():
                self._commit(update)
            if updates:
                torch.autograd.graph.increment_version([shard.parameter for shard in updates])
        self._forget()
        if self.loss_scale is not None:
            self.loss_scale.update(finite=scale is not None)

    @HELD_BACK
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states into the memory of this optimizer, also from a checkpoint of the torch optimizer that computes
        the same. Raises `ManageError`, with nothing changed, for states of another kind, shape or placement."""
        self.synchronize()
        self._follow()
        self._forget()
        last_hook = self.register_load_state_dict_pre_hook(lambda _, given: self._take_homes_out(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
            self._to_load = []
        self._pass.corrupt = False

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict. Raises RuntimeError after a step that has failed with some parameters updated, and
        between a backward that updates parameters and its step."""
        if self._early is not None and self._updates:
            raise RuntimeError('overlap="backward" has updated some parameters already: call step() before saving')
        if self._pass.done or self._pass.corrupt:
            raise RuntimeError(
                "the last step() failed after it had updated some parameters: call it again before saving"
            )
        return super().state_dict()

    @HELD_BACK
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its states get room in the budget."""
        if "_pass" not in self.__dict__:  # within the constructor
            super().add_param_group(param_group)
            return
        self.synchronize()
        super().add_param_group(param_group)
        try:
            self._reserve()
        except BaseException:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        raise ManageError(
            f"{self._name} with budget= cannot be copied or pickled, as its memory is not: save its state_dict(), and "
            f"load it into one made with a budget of its own"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # options that older versions of torch did not save
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for shard, states in self._to_load:  # before torch calls hooks that read them
            entry = self.state[shard.parameter]
            for name, given in states.items():
                home = self._shown[shard][name]
                if not given.is_meta:
                    local(home).copy_(given)
                entry[name] = home
            self._dirty.add(shard)
            for name, value in entry.items():
                if name not in states and isinstance(value, torch.Tensor):
                    entry[name] = value.cpu()  # torch has moved it to the parameter's device

    # ---- beyond torch's interface ------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the present `loss_scale`, to call `backward` on; without one, `loss` itself."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that are used of the budget, of host memory and of NVMe."""
        return {"host": self._memory.host_bytes, "nvme": self._memory.nvme_bytes}

    def report(self) -> StatesReport:
        """Report where the states are, and what the last whole step took."""
        memory, times = self._memory, self._times
        slots = sum(map(len, memory.slots))
        return StatesReport(
            name=self._name,
            parameters=sum(shard.numel for shard in self._shards.values()),
            state_bytes={"host": memory.host_bytes - slots, "nvme": memory.nvme_bytes},
            slots_bytes=slots,
            budget_bytes={"host": memory.host_capacity_bytes, "nvme": memory.nvme_capacity_bytes},
            steps=times.steps,
            step_seconds=times.seconds,
            update_seconds=times.last.update_seconds,
            early_seconds=times.early_seconds,
            updated=times.last.updated,
            moved_bytes=times.last.moved_bytes,
        )

    def synchronize(self) -> None:
        """Write to NVMe what a step that failed has left in memory; all else is there when `step` returns. With
        `overlap="backward"`, wait for the updates that have begun."""
        if self._early is not None:
            self._early.join()
        self._pass.write_back()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _make_memory(self) -> None:
        """Make memory for the states of all parameters, which have none yet."""
        self._shards, self._shown, self._dirty = {}, {}, set()
        if self._early is not None:
            self._early.unhook()
        self._early = BackwardUpdates(self._arrived, self._carry_out) if self.overlap == "backward" else None
        self._memory = StateMemory(self._budget)
        try:
            self._reserve()
        except BaseException:
            self._memory.close()
            raise
        devices = {shard.device for shard in self._shards.values() if shard.device.type == "cuda"}
        near = CudaDevice(min(devices, key=str).index).cores if devices else ()
        threads = max(1, most_threads() // ranks_here()) if ranks_here() > 1 else None
        self._workers = WorkerPool(threads, near)
        self._pass = StatePass(self._memory, self.rule, self._workers, apart=self._early is not None)
        self._times.begin_again()

    def _reserve(self) -> None:
        """Make memory for the states of those parameters that have none. Raises `BudgetError` with nothing changed."""
        found = shards_of(self.param_groups, self._name)
        new = {key: shard for key, shard in found.items() if key not in self._shards}
        options = self._options_by_parameter()
        wanted = [(shard, options[key].now(shard.dtype)[1]) for key, shard in new.items()]
        for block in self._memory.reserve(wanted, self._name):
            for shard, homes in zip(block.shards, block.homes(), strict=True):
                self._shown[shard] = {name: shard.shown(home) for name, home in homes.items()}
        self._shards |= new
        if self._early is not None:
            self._early.watch(new.values())

    def _options_by_parameter(self) -> dict[int, GroupOptions]:
        """Return the options of the group of each parameter, by its `id`."""
        groups = self.param_groups
        if len(self._options) != len(groups) or any(map(is_not, groups, (group for group, _ in self._options))):
            self._options = [(group, GroupOptions(group, self.rule)) for group in groups]
        return {id(each): options for group, options in self._options for each in group["params"]}

    def _follow(self) -> None:
        """Follow changes of the groups' parameters: new ones, and, before the first step, others or moved ones."""
        known = self._shards
        now = {id(each): each for group in self.param_groups for each in group["params"]}
        trained = {key for key, each in now.items() if each.requires_grad or each.grad is not None}
        moved = [shard for shard in known.values() if not shard.is_as_before()]
        if moved and any(self.state.values()):
            raise ManageError(
                f"{moved[0].label} {moved[0].change()}: move the model before making {self._name}, or make it again "
                f"and load this one's state_dict"
            )
        if moved or (not known.keys() <= now.keys() and not any(self.state.values())):
            self._memory.close()
            self._make_memory()
        elif not trained <= known.keys():
            self._reserve()

    def _wanted(self) -> dict[Shard, ShardUpdate]:
        """Return the updates of all parameters that have a gradient. Raises `ManageError` for states that lack
        something."""
        options = self._options_by_parameter()
        found = (self._update(shard, options[key]) for key, shard in self._shards.items() if key in options)
        return {update.shard: update for update in found if update is not None}

    def _update(self, shard: Shard, options: GroupOptions) -> ShardUpdate | None:
        """Return the update of `shard`; None if it has no gradient."""
        gradient = shard.gradient(self._name)
        if gradient is None:
            return None
        group, roles = options.now(shard.dtype)
        shown = self._shown[shard]
        if {role.name for role in roles} != shown.keys():
            raise ManageError(
                f"{self._name} keeps {', '.join(shown) or 'no states'} of {shard.label}, and with the options of "
                f"its group now it needs {', '.join(role.name for role in roles) or 'none'}: make it again"
            )
        entry = self.state.get(shard.parameter) or {}
        self._take_over(shard, entry, options)
        seen: Any = shard.parameter.grad
        before = {name: value for name, value in entry.items() if name not in shown}
        fresh = frozenset(() if entry else shown)
        return ShardUpdate(shard, group, gradient, (seen, seen._version), before, roles, fresh)

    @HELD_BACK
    @torch.no_grad()
    def _arrived(self, parameter: torch.Tensor) -> None:
        """Begin the update of `parameter`, whose gradient a backward has completed, unless `step` is to look at it
        first. Raises RuntimeError if this step has updated it already, and `ManageError` for gradients that ranks may
        still add up."""
        if not self._updates:  # the first one of a step
            self._arriving = self._options_by_parameter()
        shard, options = self._shards.get(id(parameter)), self._arriving.get(id(parameter))
        if shard is None or options is None or self._early is None or self._pass.corrupt or not shard.is_as_before():
            return
        if not shard.gradient_is_complete():
            raise ManageError(
                f'overlap="backward" updates {shard.label} before DistributedDataParallel has added up its gradients: '
                f'use fully_shard, or overlap="off"'
            )
        if shard in self._updates:
            raise RuntimeError(
                f'{self._name} with overlap="backward" has updated {shard.label} already: call step() after each '
                f'backward, or add the gradients of several with overlap="off"'
            )
        if (update := self._update(shard, options)) is not None:
            self._updates[shard] = update
            self._dirty.add(shard)
            self._early.begin(shard, self._pass.pieces)

    def _carry_out(self, pieces: Sequence[Piece]) -> None:
        """Update `pieces`, of which all gradients have arrived."""
        shards = {shard for piece in pieces for shard, _, _ in piece.cuts()}
        updates = {shard: update for shard in shards if (update := self._updates.get(shard)) is not None}
        self._pass.carry_out(updates, 1.0, pieces)

    def _take_over(self, shard: Shard, entry: dict[str, Any], options: GroupOptions) -> None:
        """Copy states home that the program has put into `entry`; make all zero if there are none. Raises `ManageError`
        if some are missing."""
        shown = self._shown[shard]
        if not entry:
            for home in shown.values() if shard in self._dirty and shard not in self._updates else ():
                local(home).zero_()
            return
        if missing := missing_in(entry, options.needs(shard.dtype)):
            raise incomplete(shard.label, entry, missing)
        for name, home in shown.items():
            given: Any = entry.get(name)
            if given is not home:
                local(home).copy_(shard.given(name, given))
                entry[name] = home

    def _made_again(self, updates: dict[Shard, ShardUpdate]) -> dict[Shard, ShardUpdate]:
        """Return `updates`, with those of the same step that have begun before. Raises RuntimeError if this is another
        one."""
        before = self._updates
        if not (self._pass.done or self._early):
            return updates
        other = [shard for shard in before if shard not in updates or not same_inputs(updates[shard], before[shard])]
        if self._early is None:
            other += [shard for shard in updates if shard not in before]
        if other:
            named = f"{other[0].label} has another gradient or other options"
            raise RuntimeError(
                f"the last step() failed after it had updated some parameters, and now {named}: call step() with the "
                f"same gradients, or load a checkpoint of weights and states"
                if self._early is None
                else f'overlap="backward" has updated parameters in the backward, and now {named}: clip gradients and '
                f'change options with overlap="off". Load a checkpoint of weights and states'
            )
        return {**updates, **before}

    def _grad_scale(self, updates: dict[Shard, ShardUpdate]) -> float | None:
        """Return the factor of all gradients; None if they are not all finite and the step is to be skipped."""
        if self.max_grad_norm is None and self.loss_scale is None:
            return 1.0
        nothing = torch.empty(0, dtype=torch.float64, device="cpu")
        sums, tasks = dict.fromkeys(self._shards.values(), nothing), list[Task]()
        for shard, update in updates.items():
            more, sums[shard] = square_sum_tasks(update.gradient)
            tasks += more
        self._workers.run(tasks)
        unscale = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.value
        option = "loss_scale=" if self.max_grad_norm is None else "max_grad_norm="
        self.grad_norm = square_total(sums.items(), option) ** 0.5 * unscale
        if self.loss_scale is not None and self.grad_norm - self.grad_norm != 0:
            return None
        return unscale * clip_factor(self.grad_norm, self.max_grad_norm)

    def _commit(self, update: ShardUpdate) -> None:
        """Show what an update has changed."""
        shown = self._shown[update.shard]
        assert update.after is not None, "all pieces are done"
        if not (update.after or shown):
            return  # as torch, which has no entry then
        entry = self.state[update.shard.parameter]
        for name, value in update.after.items():
            number = entry.get(name)
            if isinstance(number, torch.Tensor) and isinstance(value, torch.Tensor) and number.is_cpu:
                number.copy_(value)  # the program may hold it
            else:
                entry[name] = value
        entry.update(shown)

    def _forget(self) -> None:
        self._updates = {}
        self._pass.forget()

    def _take_homes_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return `state_dict` without states that have homes, which torch would move to the parameter's device."""
        options = self._options_by_parameter()
        rest = dict(state_dict["state"])
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for parameter, number in zip(mine["params"], theirs["params"], strict=False):
                if number not in rest or (shard := self._shards.get(id(parameter))) is None:
                    continue
                saved, shown = rest[number], self._shown[shard]
                roles = self.rule.roles({**mine, **theirs}, shard.dtype)
                for name in shown:
                    if isinstance(saved.get(name), torch.Tensor):
                        shard.check_kind(name, saved[name])
                check_states(shard.label, saved, roles, shown)
                if saved and (missing := missing_in(saved, options[id(parameter)].needs(shard.dtype))):
                    raise incomplete(shard.label, saved, missing)
                given = {name: shard.given(name, saved[name]) for name in shown if saved.get(name) is not None}
                self._to_load.append((shard, given))
                rest[number] = {name: None if name in given else value for name, value in saved.items()}
        return {**state_dict, "state": rest}
