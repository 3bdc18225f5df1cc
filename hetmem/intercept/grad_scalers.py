"""torch's `GradScaler` on a GPU, and gradients in host memory: what it sends there it does not wait for.

The scale, and whether something was not finite, are tensors of the device. Where gradients are elsewhere torch copies
both with `non_blocking=True`, which is in order on a device. In host memory the CPU reads at once, and finds what lay
there before: a wrong scale, or an overflow that nobody sees. So who copies them to host memory waits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hetmem.intercept import registry

_FOR_FUSED = ("grad_scale", "found_inf")
_replicator: Any = getattr(torch.amp.grad_scaler, "_MultiDeviceReplicator", None)
_get: Any = getattr(_replicator, "get", None)


@cache
def watch() -> None:
    """From now on. In a torch that has other names for it nothing is done."""
    if _get is not None:
        _replicator.get = _get_here
    register_optimizer_step_pre_hook(_before_any_optimizer)


def _get_here(self: Any, device: torch.device) -> torch.Tensor:
    """In the place of `_MultiDeviceReplicator.get`."""
    found: torch.Tensor = _get(self, device)
    if found.device.type == "cpu" and self.master.device.type == "cuda":
        torch.cuda.current_stream(self.master.device).synchronize()
    return found


def _before_any_optimizer(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """A fused optimizer of torch's gets the scale from a scaler, and sends it where its parameters are."""
    for name in _FOR_FUSED:
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu" and _has_some_at_home(optimizer):
            setattr(optimizer, name, value.cpu())


def _has_some_at_home(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any managed parameter of `optimizer` is in host memory."""
    return any(
        parameter.device.type == "cpu" and registry.of_parameter(parameter) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
