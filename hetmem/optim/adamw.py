"""AdamW over managed parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import torch

from hetmem import torch_private
from hetmem.base.config import Budget, OverlapName
from hetmem.cpu import (
    GROUP_ELEMENTS,
    AdamWStep,
    PreparedRuns,
    Task,
    adamw_on_device,
    prepare_small,
)
from hetmem.cpu.adamw import adamw_as_on_host, equals_host
from hetmem.cpu.small_states import check_numba
from hetmem.errors import ManageError
from hetmem.memory.chunk import Role
from hetmem.optim.optimizer import OffloadedOptimizer
from hetmem.optim.options import LossScale, ParameterUpdate, Rule, is_number, refuse_others
from hetmem.optim.unmanaged import UnmanagedOptimizer, refuse_managed

Moments = torch.dtype | Literal["float32", "bfloat16", "8bit"] | None
_NAMED: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROLES = (Role("exp_avg"), Role("exp_avg_sq"))
_STATES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
_KIND, _GRADIENT, _OWN = attrgetter("device.type", "dtype"), attrgetter("grad"), attrgetter("own")
_step_of = lru_cache(maxsize=16)(AdamWStep)  # most parameters use the same one


class AdamW(OffloadedOptimizer):
    """`torch.optim.AdamW` for the parameters of managed modules; bit for bit what `fused=True` computes on the CPU.

    `params`, `lr` (a float or a tensor of one element), `betas`, `eps`, `weight_decay`, `maximize`: as in torch.
    Parameters of any floating dtype; moments in the parameter's dtype (which `moments` may name) and shape, in
    `state[p]` as `exp_avg` and `exp_avg_sq`. Checkpoints interchange with `torch.optim.AdamW`. `max_grad_norm`,
    `loss_scale`, `overlap`, and the errors: see `OffloadedOptimizer`.

    Two options change the mathematics, for fewer bytes. `moments=torch.bfloat16` or `"8bit"`: 2 or about 1 byte for
    each moment in place of 4, rounded stochastically. `stochastic_rounding=True`: parameters in bfloat16 are too, so
    that they need no float32 master. The random bits are a hash of `seed`, parameter, step and element: a run can be
    repeated, and continues from a checkpoint as if it had not stopped. `state[p]` shows 8-bit codes beside their
    scales: `exp_avg * exp_avg_scale` (of 256 elements) is the first moment, and `(exp_avg_sq * exp_avg_sq_scale) ** 2`
    the second.

    With `budget=hetmem.Budget(host=…, nvme=…, nvme_dir=…)` the parameters are those of an unmanaged model,
    plain tensors or the DTensors of `fully_shard`, and what is made is an `UnmanagedOptimizer`: without the two options
    above, and with `overlap="off"` or `"backward"`.
    """

    def __new__(cls, *args: Any, budget: Budget | None = None, **options: Any) -> Any:
        """Make an `UnmanagedOptimizer` if there is a `budget`."""
        return super().__new__(cls) if budget is None else UnmanagedAdamW(*args, budget=budget, **options)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | float | Literal["dynamic"] | None = None,
        overlap: OverlapName = "off",
        moments: torch.dtype | Literal["float32", "bfloat16", "8bit"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        budget: Budget | None = None,
        **others: Any,
    ) -> None:
        refuse_others("AdamW", others)
        defaults, rule = _defaults(lr, betas, eps, weight_decay, maximize), _rule(moments, stochastic_rounding, seed)
        super().__init__(
            params,
            defaults,
            rule,
            overlap=overlap,
            max_grad_norm=max_grad_norm,
            scale=loss_scale,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with `fused=True` in each group, so that a `torch.optim.AdamW` that loads it goes
        on with the same bits."""
        return _fused_too(super().state_dict())


AdamW.__new__.__wrapped__ = AdamW.__init__  # type: ignore[attr-defined]  # the signature, for `help`


class UnmanagedAdamW(UnmanagedOptimizer):
    """`AdamW` with `budget=`."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        budget: Budget,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | float | Literal["dynamic"] | None = None,
        overlap: OverlapName = "off",
        **managed: Any,
    ) -> None:
        refuse_managed(managed, "hetmem.AdamW")
        defaults, rule = _defaults(lr, betas, eps, weight_decay, maximize), AdamWRule(None, None)
        name = "hetmem.AdamW"
        super().__init__(
            params,
            defaults,
            rule,
            budget=budget,
            name=name,
            max_grad_norm=max_grad_norm,
            scale=loss_scale,
            overlap=overlap,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with `fused=True` in each group; see `AdamW.state_dict`."""
        return _fused_too(super().state_dict())


def _fused_too(state_dict: dict[str, Any]) -> dict[str, Any]:
    for group in state_dict["param_groups"]:  # copies
        group["fused"] = True
    return state_dict


def _defaults(
    lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float, maximize: bool
) -> dict[str, Any]:
    """Return the defaults of groups. Raises ValueError for invalid ones."""
    defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    _check(defaults)
    for name, value, fine in (
        ("learning rate", lr, float(lr) >= 0),
        ("epsilon value", eps, eps >= 0),
        ("weight_decay value", weight_decay, weight_decay >= 0),
        ("beta parameter at index 0", betas[0], 0 <= betas[0] < 1),
        ("beta parameter at index 1", betas[1], 0 <= betas[1] < 1),
    ):
        if not fine:
            raise ValueError(f"Invalid {name}: {value}")
    return defaults


def _rule(moments: Any, stochastic_rounding: bool, seed: int) -> AdamWRule:
    """Return the rule for these options. Raises ValueError for invalid ones."""
    moments = _NAMED.get(moments, moments) if isinstance(moments, str) else moments
    if moments not in (None, torch.float32, torch.bfloat16, "8bit"):
        raise ValueError(f"moments must be None, torch.float32, torch.bfloat16 or '8bit', got {moments!r}")
    if not isinstance(stochastic_rounding, bool):
        raise ValueError(f"stochastic_rounding must be True or False, got {stochastic_rounding!r}")
    if not isinstance(seed, int):
        raise ValueError(f"seed must be an int, got {seed!r}")
    small = moments not in (None, torch.float32) or stochastic_rounding
    return AdamWRule(moments, seed if small else None, stochastic_rounding=stochastic_rounding)


def _check(group: dict[str, Any]) -> None:
    """Raise ValueError for options that only torch's AdamW has, and for hyper-parameters that are not numbers."""
    if group.get("amsgrad"):
        raise ValueError("hetmem.AdamW has no amsgrad: use hetmem.optim.offload(torch.optim.AdamW, …, amsgrad=True)")
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not is_number(group[name]):
            raise ValueError(f"{name} must be a number, got {group[name]!r}")
    betas = group.get("betas", (0.0, 0.0))
    if not (isinstance(betas, Sequence) and len(betas) == 2 and all(map(is_number, betas))):
        raise ValueError(f"betas must be two numbers, got {betas!r}")


class AdamWRule(Rule):
    """The arithmetic of `torch.optim.AdamW(fused=True)`; or, with a `seed`, of AdamW on states smaller than float32,
    with stochastic rounding (see `hetmem.cpu.small_states`): in host memory only."""

    def __init__(self, moments: Moments, seed: int | None, *, stochastic_rounding: bool = False) -> None:
        if seed is not None:
            check_numba()
        self._moments, self._stochastic_rounding = moments, stochastic_rounding
        self.seed = seed
        self.has_kernel = self.runs_on_device = seed is None

    def in_words(self) -> str:
        rounding = f"stochastic_rounding={self._stochastic_rounding}"
        return f"AdamW of moments={self._moments}, {rounding}, seed={self.seed}"

    def roles(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[Role, ...]:
        """Return the roles of the two moments. Raises `ManageError` for parameters of an unsupported dtype, and
        ValueError for invalid options."""
        _check(group)
        if self.seed is not None:
            if dtype not in (torch.float32, torch.bfloat16):
                raise ManageError(f"small states are for parameters in float32 or bfloat16, not in {dtype}")
            if dtype is torch.bfloat16 and not self._stochastic_rounding:
                raise ManageError(
                    "parameters in bfloat16 with small moments need random rounding: set stochastic_rounding=True, or "
                    "keep them in float32 and set mixed_precision=torch.bfloat16"
                )
            if self._moments == "8bit":
                return Role("exp_avg", torch.int8, GROUP_ELEMENTS), Role("exp_avg_sq", torch.uint8, GROUP_ELEMENTS)
            if self._moments is torch.bfloat16 and dtype is not torch.bfloat16:
                return Role("exp_avg", torch.bfloat16), Role("exp_avg_sq", torch.bfloat16)
        if self._moments not in (None, dtype):
            raise ManageError(
                f"moments={self._moments} are for parameters of that dtype, not for {dtype}: leave it out"
            )
        return _ROLES

    def needs(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
        """Return the names of the step count, the moments, and the scales of 8-bit ones."""
        roles = self.roles(group, dtype)
        scales = (f"{role.name}_scale" for role in roles if role.scale_block)
        return "step", *(role.name for role in roles), *scales

    def tasks(self, updates: list[ParameterUpdate]) -> list[Task]:
        """Return the tasks of one pass over parameters, gradients and states."""
        steps, first = _count(updates), updates[0]
        if first.kernel is None and self.seed is None:
            first.kernel = PreparedRuns([*map(_flats, updates)], [*map(_OWN, updates)])
        elif first.kernel is None:
            first.kernel = self._prepare_small(updates)
        elif type(first.kernel) is PreparedRuns:
            first.kernel.gradients_in([*map(_GRADIENT, updates)])
        made: list[Task] = first.kernel(steps)
        return made

    def _prepare_small(self, updates: list[ParameterUpdate]) -> Callable[[list[AdamWStep]], list[Task]]:
        """Return what `prepare_runs` does, for small states."""
        assert self.seed is not None
        kernels = [
            prepare_small(
                update.param,
                update.grad,
                [update.states[name] for name in _STATES if name in update.states],
                update.copy,
                key=(self.seed << 32) + update.number,
                own=update.own,
            )
            for update in updates
        ]
        return lambda steps: [task for kernel, step in zip(kernels, steps, strict=True) for task in kernel(step)]

    def equals_host(self, device: torch.device, dtype: torch.dtype, copy_dtype: torch.dtype | None) -> bool:
        """Compare the kernel on `device` with torch's on the host."""
        return equals_host(device, dtype, copy_dtype)

    def on_device(self, updates: list[ParameterUpdate]) -> None:
        """Update one parameter, or run of adjacent ones, after the other."""
        if self.seed is not None:
            raise ManageError(
                "moments= and stochastic_rounding= work on the host only, and this model is kept on the device as a "
                "whole: leave them out, or set Budget(device_chunks=…) lower, so that its states stay in host memory"
            )
        for step, update in zip(_count(updates), updates, strict=True):
            param, grad, exp_avg, exp_avg_sq, *copy = _flats(update)
            if equals_host(param.device, param.dtype, copy[0].dtype if copy else None):
                adamw_as_on_host(step, _flats(update))
                continue
            adamw_on_device(step, [param], [grad], [exp_avg], [exp_avg_sq], [_ready(update.state)])
            for each in copy:
                each.copy_(param)

    def begin(self, state: dict[str, Any]) -> None:
        """Add the step count to `state` if it has none."""
        _ready(state)

    def whole(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: Sequence[list[torch.Tensor]],
        steps: list[torch.Tensor],
        scale: float,
    ) -> None:
        """Update by torch's fused kernel; see `Rule`."""
        (beta1, beta2), (exp_avgs, exp_avg_sqs) = group["betas"], states
        step = AdamWStep(
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], 0, bool(group["maximize"]), scale
        )
        torch_private.foreach_add(steps, 1)
        try:
            adamw_on_device(step, params, grads, exp_avgs, exp_avg_sqs, steps)
        except BaseException:
            torch_private.foreach_sub(steps, 1)
            raise


def _flats(update: ParameterUpdate) -> tuple[torch.Tensor, ...]:
    copies = () if update.copy is None else (update.copy,)
    return update.param, update.grad, update.states["exp_avg"], update.states["exp_avg_sq"], *copies


def _count(updates: list[ParameterUpdate]) -> list[AdamWStep]:
    """Count one more step of these parameters, each with the same count as those beside it in `also`, and return the
    hyper-parameters of each."""
    counts = updates[0].counts
    if not counts:
        found = [[_ready(state) for state in (update.state, *update.also)] for update in updates]
        counts = updates[0].counts = [*chain.from_iterable(found)]
    ages, updates[0].ages = updates[0].ages or torch.stack(counts).tolist(), []
    torch_private.foreach_add(counts, 1)
    steps, at = list[AdamWStep](), 0
    group, age, scale = updates[0].group, ages[0], updates[0].grad_scale
    step = _step(group, age, scale)
    for update in updates:
        if update.group is not group or ages[at] != age or update.grad_scale != scale:
            group, age, scale = update.group, ages[at], update.grad_scale
            step = _step(group, age, scale)
        steps += (step,)
        at += 1 + len(update.also) if update.also else 1
    return steps


def _step(group: dict[str, Any], age: float, grad_scale: float) -> AdamWStep:
    """Return the hyper-parameters of the step behind `age` others."""
    (beta1, beta2), maximize = group["betas"], bool(group["maximize"])
    return _step_of(
        float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], int(age) + 1, maximize, grad_scale
    )


def _ready(state: dict[str, Any]) -> torch.Tensor:
    """Return the step count in `state`, after adding or moving it to host memory if necessary."""
    if "step" not in state:
        states = dict(state)
        state.clear()
        state.update(step=torch.zeros((), dtype=torch.float32, device="cpu"), **states)  # in torch's order
    if _KIND(state["step"]) != ("cpu", torch.float32):  # users may move states to a device, where each read would wait
        state["step"] = state["step"].to("cpu", torch.float32)
    return state["step"]  # type: ignore[no-any-return]
