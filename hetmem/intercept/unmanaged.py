"""Parameters that a managed module got after `hetmem.manage`, and buffers: torch computes with them as they are.

That works until one meets what hetmem brings (16-bit copies, another device). torch's error says only that dtypes or
devices differ; here it is told which of them may be the cause. Knows modules and errors. It changes no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from hetmem.errors import DeviceAccessError
from hetmem.intercept.forward_scope import calling_frame
from hetmem.memory.chunk import ManagedParameter

_SHOWN = 5
"""Names in a message."""
_KNOWN = "The model has parameters that were not there when hetmem.manage was called"
_EXCHANGED = (
    "Other tensors are in the place of managed weights, as torch.func.functional_call puts them there, and these are "
    "used as they are: hand over copies that are where operators compute, in the dtype in which they do, as in "
    "{name: p.detach().to(device,"
)
_BRANCHES = (
    "torch.cond, while_loop and the like trace their branches, in which weights that hetmem manages cannot be brought "
    "to the device: compile the module that calls them (module.compile()), whose weights are there for all of its "
    "call, or hand weights over as operands (self.weight.view_as(self.weight))"
)
_BUFFERS = "With mixed_precision buffers keep their dtype, and an operator may want that of its weights"


def explain(error: RuntimeError, model: torch.nn.Module, managed: Mapping[int, ManagedParameter]) -> None:
    """Add to `error`, which torch raised in a forward of `model`, which of its parameters are not `managed` (by `id`).

    Once: the hooks of all modules that it leaves ask for it.
    """
    if type(error).__name__ == "UncapturedHigherOrderOpError" and _BRANCHES not in str(error):
        error.args = (f"{error}\n{_BRANCHES}",)
    _explain_buffers(error, model, managed)
    strangers = [
        f"{name} ({parameter.dtype}, {parameter.device})"
        for name, parameter in model.named_parameters()
        if id(parameter) not in managed and parameter.is_floating_point()
    ]
    if not strangers or _KNOWN in str(error) or _EXCHANGED in str(error):
        return
    names = {each.name for each in managed.values()}
    if any(name.partition(" ")[0] in names for name in strangers):
        dtypes = {str(each.chunk.compute_dtype) for each in managed.values()}
        error.args = (f"{error}\n{_EXCHANGED} {' or '.join(sorted(dtypes))}, copy=True)}}",)
        return
    more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
    error.args = (
        f"{error}\n{_KNOWN}: {', '.join(strangers[:_SHOWN])}{more}. They stay as they are, while "
        f"managed ones are used on the device, with mixed_precision in 16 bits. Call hetmem.release(model), then "
        f"hetmem.manage(model, …) again",
    )


def _explain_buffers(error: RuntimeError, model: torch.nn.Module, managed: Mapping[int, ManagedParameter]) -> None:
    """Normalisation over a batch takes running means in the dtype of its weights, for one."""
    narrow = {each.chunk.compute_dtype for each in managed.values() if each.chunk.compute_dtype is not each.chunk.dtype}
    wide = [f"{name} ({buffer.dtype})" for name, buffer in model.named_buffers() if buffer.dtype is torch.float32]
    if not (narrow and wide) or "scalar type" not in str(error) or _BUFFERS in str(error):
        return
    more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
    error.args = (
        f"{error}\n{_BUFFERS}: {', '.join(wide[:_SHOWN])}{more}. Convert those that are meant to "
        f"{', '.join(map(str, narrow))}, or leave mixed_precision out and compute under torch.autocast",
    )


def is_of_torch(error: RuntimeError) -> bool:
    """Whether `error` may be of a dtype or a device: torch's, or the one in its place on a device that is simulated."""
    return type(error) in (RuntimeError, DeviceAccessError) or type(error).__name__ == "UncapturedHigherOrderOpError"


def raised_in_call(error: BaseException, module: torch.nn.Module) -> bool:
    """Whether `error` comes from the call of `module` that a hook of it is at, not from around that."""
    frame, trace = calling_frame(module, sys._getframe()), error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None
