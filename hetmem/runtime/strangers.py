"""Parameters that a managed module got after `hetmem.manage`: torch computes with them as they are.

That works until one meets what hetmem brings (16-bit copies, another device). torch's error says only that dtypes or
devices differ; here it is told which parameter is the cause. Knows modules and errors. It changes no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from hetmem.memory.chunk import ManagedParameter
from hetmem.runtime.compute import calling_frame

_SHOWN = 5
"""Names in a message."""
_KNOWN = "The model has parameters that were not there when hetmem.manage was called"


def explain(error: RuntimeError, model: torch.nn.Module, managed: Mapping[int, ManagedParameter]) -> None:
    """Add to `error`, which torch raised in a forward of `model`, which of its parameters are not `managed` (by `id`).

    Once: the hooks of all modules that it leaves ask for it.
    """
    strangers = [
        f"{name} ({parameter.dtype}, {parameter.device})"
        for name, parameter in model.named_parameters()
        if id(parameter) not in managed and parameter.is_floating_point()
    ]
    if not strangers or _KNOWN in str(error):
        return
    more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
    error.args = (
        f"{error}\n{_KNOWN}: {', '.join(strangers[:_SHOWN])}{more}. They stay as they are, while "
        f"managed ones are used on the device, with mixed_precision in 16 bits. Call hetmem.release(model), then "
        f"hetmem.manage(model, …) again",
    )


def raised_in_call(error: BaseException, module: torch.nn.Module) -> bool:
    """Whether `error` comes from the call of `module` that a hook of it is at, not from around that."""
    frame, trace = calling_frame(module, sys._getframe()), error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None
