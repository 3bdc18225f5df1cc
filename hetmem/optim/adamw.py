"""AdamW over managed parameters: chunk by chunk on the host, states streamed from and to their tier.

It owns the optimizer's arithmetic and state; where anything is, and how it gets here, is the runtime's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from hetmem.errors import ManageError
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.memory.transfer import Link
from hetmem.optim.kernels import AdamWStep, adamw, adamw_on_device
from hetmem.optim.workers import WorkerPool
from hetmem.plan.trace import Tier
from hetmem.runtime import registry
from hetmem.runtime.events import Span
from hetmem.runtime.gradients import honour_written_gradients, is_home_gradient
from hetmem.runtime.interception import Interception
from hetmem.runtime.relayout import arrange_by_use
from hetmem.runtime.runtime import Runtime

_STATES = {"exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}
_OWN = ("_workers", "_versions", "_owners")
_ROLES = (Role.PARAM, Role.GRAD, Role.EXP_AVG, Role.EXP_AVG_SQ)


class AdamW(Optimizer):
    """`torch.optim.AdamW` for the parameters of managed modules; bit for bit what `fused=True` computes on the CPU.

    Parameter groups, schedulers, closures, hooks and `state_dict` are torch's own, and checkpoints interchange with
    `torch.optim.AdamW`. `state[p]["exp_avg"]` and `["exp_avg_sq"]` are the states' homes. A parameter whose `grad` is
    None is neither updated nor decayed. Creating it reserves memory for gradients and states on their tiers.

    Raises `ManageError` for parameters that are not managed, `BudgetError` if the states have no room, and ValueError
    for values that torch refuses too. An error of a transfer in `step` leaves every chunk either before or after its
    update, and its home readable.
    """

    writes_homes = True
    """Tells hetmem that it knows what this optimizer writes."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value, fine in (
            ("learning rate", lr, float(lr) >= 0),
            ("epsilon value", eps, eps >= 0),
            ("weight_decay value", weight_decay, weight_decay >= 0),
            ("beta parameter at index 0", betas[0], 0 <= betas[0] < 1),
            ("beta parameter at index 1", betas[1], 0 <= betas[1] < 1),
        ):
            if not fine:
                raise ValueError(f"Invalid {name}: {value}")
        self._workers = WorkerPool()
        self._owners: set[Interception] = set()
        self._versions: dict[tuple[int, str], int] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the parameters must be managed, and their gradients and states get homes here."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._reserve(group["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    def _reserve(self, parameters: Iterable[torch.Tensor]) -> None:
        chunks: dict[Interception, dict[Chunk, None]] = {}
        for parameter in parameters:
            found = registry.of_parameter(parameter)
            if found is None:
                raise ManageError(
                    f"hetmem.AdamW got a parameter of shape {tuple(parameter.shape)} that is not managed: call "
                    f"hetmem.manage(model, …) before making the optimizer, or use torch.optim.AdamW for this one"
                )
            if not parameter.dtype.is_floating_point:
                raise ManageError(f"hetmem.AdamW cannot update {found[1].name} of dtype {parameter.dtype}")
            if parameter.requires_grad:
                chunks.setdefault(found[0], {})[found[1].chunk] = None
        self._owners |= set(chunks)
        for interception, used in chunks.items():
            runtime = interception.runtime
            runtime.traffic.ensure_homes(used, state_roles(runtime))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrange_by_use()
        work: dict[Interception, dict[Chunk, list[tuple[ManagedParameter, dict[str, Any]]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout is not torch.strided:
                    raise RuntimeError("hetmem.AdamW does not support sparse gradients")
                interception, managed = self._managed(parameter)
                work.setdefault(interception, {}).setdefault(managed.chunk, []).append((managed, group))
        for interception, chunks in work.items():
            _Step(self, interception, self._workers, self._versions).run(chunks)
        return loss

    def _arrange_by_use(self) -> None:
        """Before the first update: chunks in order of use, as the first forward showed it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                found = registry.of_parameter(parameter)
                if found is not None and not found[0].arranged and found[0].runtime.memory.streams:
                    interception = found[0]
                    interception.arranged = True
                    fresh = not any(managed.parameter in self.state for managed in interception.runtime.parameters)
                    if fresh:
                        interception.reset()
                        interception.segments.settle()
                        arrange_by_use(interception.runtime)

    @staticmethod
    def _managed(parameter: torch.Tensor) -> tuple[Interception, ManagedParameter]:
        found = registry.of_parameter(parameter)
        if found is None:
            raise ManageError(
                f"hetmem.AdamW cannot step a parameter of shape {tuple(parameter.shape)} that is not managed any more "
                f"(its model was released): make an ordinary optimizer and load this one's state_dict into it"
            )
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, also from a checkpoint of `torch.optim.AdamW`: the states are copied to their homes."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            _, managed = self._managed(parameter)
            for name, role in _STATES.items():
                home = managed.view(role)
                home.copy_(state[name])
                state[name] = home
                self._versions[id(managed), name] = -1  # whatever is staged of it is old

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._workers = getattr(self, "_workers", None) or WorkerPool()
        self._versions = getattr(self, "_versions", {})
        self._owners = getattr(self, "_owners", set())


def state_roles(runtime: Runtime) -> tuple[Role, ...]:
    """The roles that training needs beside the parameters; on the device gradients stay autograd's own."""
    return _ROLES[1:] if runtime.memory.streams else _ROLES[2:]


class _Step:
    """One step over the chunks of one runtime."""

    def __init__(
        self,
        optimizer: AdamW,
        interception: Interception,
        workers: WorkerPool,
        versions: dict[tuple[int, str], int],
    ) -> None:
        self._state = optimizer.state
        self._interception = interception
        self._runtime: Runtime = interception.runtime
        self._workers = workers
        self._versions = versions

    def run(self, chunks: dict[Chunk, list[tuple[ManagedParameter, dict[str, Any]]]]) -> None:
        """Update `chunks`, in the order of their homes."""
        runtime = self._runtime
        self._interception.reset()
        self._interception.segments.begin_step()
        for chunk in sorted(chunks, key=lambda chunk: chunk.spec.index):
            start = time.perf_counter()
            self._chunk(chunk, chunks[chunk])
            runtime.events.updates.append(Span(f"chunk {chunk.spec.index}", start, time.perf_counter()))
        runtime.traffic.drain()
        runtime.statistics.steps += 1
        runtime.after_step()

    def _chunk(self, chunk: Chunk, updates: list[tuple[ManagedParameter, dict[str, Any]]]) -> None:
        runtime = self._runtime
        runtime.traffic.ensure_homes(
            [chunk], state_roles(runtime)
        )  # a parameter that was frozen when the optimizer was made
        self._notice(chunk, updates)
        first = not any(self._state[managed.parameter] for managed in chunk.parameters if self._has_state(managed))
        loads = {Role.PARAM: True, Role.GRAD: True, Role.EXP_AVG: not first, Role.EXP_AVG_SQ: not first}
        opened: dict[Role, torch.Tensor] = {}
        try:
            for role in _ROLES:
                if role in chunk.homes and (role is not Role.GRAD or any(is_home_gradient(m) for m, _ in updates)):
                    opened[role] = runtime.traffic.open_role(chunk, role, load=loads[role])
            if first:
                opened[Role.EXP_AVG].zero_()
                opened[Role.EXP_AVG_SQ].zero_()
            self._update(chunk, updates, opened)
        finally:
            for role in opened:
                runtime.traffic.close_role(chunk, role, dirty=role is not Role.GRAD)
        for managed, _ in updates:
            torch.autograd.graph.increment_version(managed.parameter)
            managed.version = managed.parameter._version
        runtime.traffic.settle(chunk.homes[role] for role in opened if role is not Role.GRAD)

    def _has_state(self, managed: ManagedParameter) -> bool:
        return managed.parameter in self._state

    def _update(
        self, chunk: Chunk, updates: list[tuple[ManagedParameter, dict[str, Any]]], opened: dict[Role, torch.Tensor]
    ) -> None:
        runtime = self._runtime
        if opened[Role.PARAM].device.type != "cpu":
            self._update_on_device(updates, opened)
            runtime.traffic.renew_device_copy(chunk)
            return
        copy = runtime.traffic.device_copy(chunk)
        here = chunk.homes[Role.PARAM].tier is Tier.DEVICE
        in_pass = copy is not None and chunk.compute_dtype is not chunk.dtype
        in_pass = in_pass and (here or runtime.traffic.engine.unlimited(Link.HOST_TO_DEVICE))
        for managed, group in updates:
            state = self._state_of(managed)
            state["step"] += 1
            gradient = managed.parameter.grad
            assert gradient is not None
            home = is_home_gradient(managed) and Role.GRAD in opened
            adamw(
                self._workers,
                _hyper_parameters(group, int(state["step"].item())),
                managed.part(opened[Role.PARAM]),
                managed.part(opened[Role.GRAD]) if home else _flat(gradient, managed),
                managed.part(opened[Role.EXP_AVG]),
                managed.part(opened[Role.EXP_AVG_SQ]),
                managed.part(copy) if in_pass and copy is not None else None,
            )
        if copy is not None:
            if in_pass and len(updates) == len(chunk.parameters):
                if not here:
                    runtime.traffic.engine.copy_now(Link.HOST_TO_DEVICE, lambda: None, chunk.compute_nbytes)
            else:
                runtime.traffic.renew_device_copy(chunk)

    def _update_on_device(
        self, updates: list[tuple[ManagedParameter, dict[str, Any]]], opened: dict[Role, torch.Tensor]
    ) -> None:
        """Homes and gradients are on the GPU: all parameters of one group and age together."""
        together: dict[tuple[AdamWStep, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}
        for managed, group in updates:
            state = self._state_of(managed)
            state["step"] += 1
            gradient = managed.parameter.grad
            assert gradient is not None
            tensors = (
                managed.part(opened[Role.PARAM]),
                _flat(gradient, managed),
                managed.part(opened[Role.EXP_AVG]),
                managed.part(opened[Role.EXP_AVG_SQ]),
            )
            hyper = _hyper_parameters(group, int(state["step"].item()))
            together.setdefault((hyper, managed.chunk.dtype), []).append(tensors)
        for (hyper, _), tensors_of in together.items():
            params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*tensors_of, strict=True))
            adamw_on_device(hyper, params, grads, exp_avgs, exp_avg_sqs)

    def _state_of(self, managed: ManagedParameter) -> dict[str, Any]:
        state: dict[str, Any] = self._state[managed.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name, role in _STATES.items():
                state[name] = managed.view(role)
                self._versions[id(managed), name] = state[name]._version
        return state

    def _notice(self, chunk: Chunk, updates: list[tuple[ManagedParameter, dict[str, Any]]]) -> None:
        """Whatever the user wrote to parameters, gradients or states at home counts."""
        runtime = self._runtime
        for managed, _ in updates:
            if runtime.writes.changed(managed):
                runtime.writes.by_user(managed)
        honour_written_gradients(runtime, chunk)
        for name, role in _STATES.items():
            for managed in chunk.parameters:
                if not self._has_state(managed) or name not in self._state[managed.parameter]:
                    continue
                tensor = self._state[managed.parameter][name]
                home = managed.view(role)
                if tensor.data_ptr() != home.data_ptr():
                    home.copy_(tensor)
                    self._state[managed.parameter][name] = tensor = home
                    self._versions[id(managed), name] = -1
                if self._versions.get((id(managed), name)) != tensor._version:
                    self._versions[id(managed), name] = tensor._version
                    if chunk.homes[role].tier is Tier.NVME:
                        runtime.traffic.superseded(chunk, role)


def _hyper_parameters(group: dict[str, Any], step: int) -> AdamWStep:
    beta1, beta2 = group["betas"]
    return AdamWStep(
        float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step, bool(group["maximize"])
    )


def _flat(gradient: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
    """A gradient that the user set, in the order in which the parameter's elements lie in memory."""
    if gradient.stride() == managed.stride and gradient.dtype == managed.chunk.dtype:
        return torch.as_strided(gradient, (managed.numel,), (1,))
    ordered = torch.empty(managed.numel, dtype=managed.chunk.dtype, device=gradient.device)
    ordered.as_strided(managed.shape, managed.stride).copy_(gradient)
    return ordered
