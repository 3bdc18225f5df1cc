"""Numbers that all gradients of a step are multiplied by: the clip factor and the loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch


class LossScale:
    """What a float16 loss is multiplied by, so that small gradients do not vanish: `torch.amp.GradScaler`'s rule.

    A step whose gradients are not all finite is skipped, and the scale multiplied by `backoff_factor`; after
    `growth_interval` steps in a row without that it is multiplied by `growth_factor`. With both factors 1 it is static.
    `value` is the present scale, `skipped` the number of steps that were skipped.

    Raises ValueError for a scale that is not positive and finite, and for factors on the wrong side of 1.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (is_number(value) and value > 0 and math.isfinite(value)):
            raise ValueError(f"a loss scale must be positive and finite, got {value!r}")
        factors = is_number(growth_factor) and is_number(backoff_factor)
        if not (factors and 1 <= growth_factor < math.inf and 0 < backoff_factor <= 1):
            raise ValueError(
                f"expected growth_factor >= 1 and 0 < backoff_factor <= 1, got {growth_factor!r} and {backoff_factor!r}"
            )
        if not (isinstance(growth_interval, int) and growth_interval >= 1):
            raise ValueError(f"growth_interval must be an int of steps, at least 1, got {growth_interval!r}")
        self.value = value
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.skipped = 0
        """Steps skipped so far."""
        self._finite_in_a_row = 0

    def update(self, *, finite: bool) -> None:
        """A step had gradients that were all `finite`, or not. The optimizer calls it, once a step."""
        if not finite:
            self.value *= self.backoff_factor
            self.skipped += 1
            self._finite_in_a_row = 0
            return
        self._finite_in_a_row += 1
        if self._finite_in_a_row == self.growth_interval:
            grown = self.value * self.growth_factor
            self.value = grown if math.isfinite(grown) else self.value
            self._finite_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on."""
        return {"value": self.value, "skipped": self.skipped, "finite_in_a_row": self._finite_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self.value, self.skipped = float(state["value"]), int(state["skipped"])
        self._finite_in_a_row = int(state["finite_in_a_row"])


def loss_scale(wanted: LossScale | float | str | None) -> LossScale | None:
    """What users may say: "dynamic", a number that stays, a `LossScale`, or None."""
    if wanted is None or isinstance(wanted, LossScale):
        return wanted
    if wanted == "dynamic":
        return LossScale()
    if isinstance(wanted, bool) or not is_number(wanted):
        raise ValueError(f"loss_scale must be 'dynamic', a number or a LossScale, got {wanted!r}")
    return LossScale(float(wanted), growth_factor=1.0, backoff_factor=1.0)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return hasattr(value, "__float__")


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients of that norm by; NaN if the norm is."""
    if max_norm is None:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
