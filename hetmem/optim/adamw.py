"""AdamW over managed parameters."""

from __future__ import annotations

from typing import Any

import torch

from hetmem.memory.chunk import Role
from hetmem.optim.kernels import AdamWStep, Task, adamw_on_device, adamw_tasks
from hetmem.optim.offloaded import OffloadedOptimizer
from hetmem.optim.rule import ParameterUpdate
from hetmem.optim.scaling import LossScale

_ROLES = (Role("exp_avg"), Role("exp_avg_sq"))


class AdamW(OffloadedOptimizer):
    """`torch.optim.AdamW` for the parameters of managed modules; bit for bit what `fused=True` computes on the CPU.

    Checkpoints interchange with `torch.optim.AdamW`. Everything else is said at `OffloadedOptimizer`.
    """

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
        loss_scale: LossScale | float | str | None = None,
        overlap: str = "off",
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, AdamWRule(), overlap=overlap, max_grad_norm=max_grad_norm, scale=loss_scale)


class AdamWRule:
    """The arithmetic of `torch.optim.AdamW(fused=True)`."""

    emits_copy = True

    def roles(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[Role, ...]:
        """Two moments, in the parameter's dtype."""
        return _ROLES

    def tasks(self, update: ParameterUpdate) -> list[Task]:
        """One pass over everything."""
        states = update.states
        return adamw_tasks(
            _count(update), update.param, update.grad, states["exp_avg"], states["exp_avg_sq"], update.copy
        )

    def on_device(self, updates: list[ParameterUpdate]) -> None:
        """All parameters of one group, age and dtype in a few launches."""
        together: dict[tuple[AdamWStep, torch.dtype], list[ParameterUpdate]] = {}
        for update in updates:
            together.setdefault((_count(update), update.param.dtype), []).append(update)
        for (step, _), alike in together.items():
            adamw_on_device(
                step,
                [update.param for update in alike],
                [update.grad for update in alike],
                [update.states["exp_avg"] for update in alike],
                [update.states["exp_avg_sq"] for update in alike],
            )


def _count(update: ParameterUpdate) -> AdamWStep:
    """One more step of this parameter, and its hyper-parameters."""
    group, state = update.group, update.state
    if "step" not in state:
        states = dict(state)
        state.clear()
        state.update(step=torch.zeros((), dtype=torch.float32), **states)  # in torch's order
    state["step"] += 1
    beta1, beta2 = group["betas"]
    return AdamWStep(
        float(group["lr"]),
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        int(state["step"].item()),
        bool(group["maximize"]),
        update.grad_scale,
    )
