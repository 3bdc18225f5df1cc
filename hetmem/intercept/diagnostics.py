"""Refuses uses of a managed model that cannot work, and explains errors of torch within its forward.

Parameters added to a module after `hetmem.manage`, and buffers, are used as they are. That works until an operator gets
one together with a copy by hetmem (in 16 bits, or on another device). torch's error says only that dtypes or devices
differ; here the tensors that may be the cause are named. Nothing here changes a tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from hetmem import torch_private
from hetmem.errors import DeviceAccessError, ManageError
from hetmem.intercept.forward_scope import calling_frame
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.device import Device


class ScriptError(ManageError, AttributeError):
    """The error of torch.jit.script, which asks hooks for names, and for others the usual one for a missing name."""

    def __init__(self) -> None:
        super().__init__(
            "a managed model cannot be scripted by torch.jit: call hetmem.release(model) first, or script a module "
            "that is built anew and has loaded its state_dict()"
        )


NOT_TRACED = (
    "a managed model cannot be exported or traced: do that with copy.deepcopy(model), which is an ordinary module with "
    "the same weights"
)


def refuse_a_surrounding(model: torch.nn.Module, *, streams: bool) -> None:
    """Raise `ManageError` where the caller of `model` would read its weights or gradients without hetmem: an exporter,
    FSDP or DDP. `streams`: weights are on the device only for operators."""
    if torch.compiler.is_exporting() or torch_private.tracing_state() is not None:
        raise ManageError(NOT_TRACED)
    if hasattr(type(model), "set_requires_gradient_sync"):  # a method of torch's `FSDPModule`
        raise ManageError(
            "torch's fully_shard has replaced the parameters of this managed model, and hetmem would train none of "
            "them: leave fully_shard out and build the model again, as ranks share weights (hetmem.manage, group=)"
        )
    ddp = DistributedDataParallel._active_ddp_module if streams else None
    if ddp is not None and any(part is model for part in ddp.modules()):
        raise ManageError(
            "this model is called by torch's DistributedDataParallel, which reads each gradient before it is at home: "
            "leave it out, as ranks that share a model (hetmem.manage, group=) add gradients up themselves"
        )


def refuse_gradients_by_node() -> None:
    """Raise `ManageError` within the backward of a pipeline's stage that computes gradients of inputs and of weights
    apart: it looks for nodes of the parameters in the graph, which has those of copies, and would train nothing."""
    apart = torch_private.backward_of_inputs_alone()
    frame = sys._getframe() if apart else None
    while frame is not None:
        if frame.f_code is apart:
            raise ManageError(
                "a managed model is a stage of a pipeline whose schedule computes gradients of inputs and of weights "
                "apart (zero bubble), by nodes of parameters that its graph does not have: take ScheduleGPipe, "
                "Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS"
            )
        frame = frame.f_back


def refuse_a_fork(what: str, process: int) -> None:
    """Raise `ManageError` if this process is a fork of `process`, whose threads and memory `what` needs."""
    if os.getpid() != process:
        raise ManageError(
            f"{what} in a forked process: the memory and the threads that hold the model are the parent's. Compute "
            f"there, fork before hetmem.manage, or fork with a copy.deepcopy(model), which is an ordinary one"
        )


def refuse_a_stream(what: str, device: Device, moves: Callable[[], bool] = lambda: True) -> None:
    """Raise `ManageError` for `what` on another stream of `device` than its default one, or that a CUDA graph
    captures, whose replays would run without hetmem, if anything of the model `moves`."""
    try:
        if not device.captures():
            return
    except ManageError:
        if moves():
            raise
        return
    if moves():
        raise ManageError(
            f"{what} within torch.cuda.graph: what is replayed would find weights where they were, and moves none. "
            "Capture copy.deepcopy(model), which is an ordinary one, or no graph; torch.compile works without"
        )


def refused_stream(device: Device) -> ManageError | None:
    """Return the error for a model's backward if the current stream of `device` is not its default one: where a node of
    the model runs the stream is that of its forward."""
    try:
        device.captures()
    except ManageError as error:
        return error
    return None


def refuse_conversion(
    converted: list[ManagedParameter],
    convert: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    *,
    computes: bool,
    mixed: bool,
) -> None:
    """Raise `ManageError` if `convert`, of `Module.to` and the like, gives any of `converted` another dtype or other
    strides, or torch is set to exchange parameters meanwhile. `computes`: within a forward. `mixed`: with 16-bit
    copies."""
    if converted and torch.__future__.get_swap_module_params_on_conversion():
        raise ManageError(
            "torch.__future__.set_swap_module_params_on_conversion(True) has .to() and the like exchange parameters, "
            "and those that hetmem manages stay as they are: set it to False before, or convert before hetmem.manage"
        )
    chunks = {managed.chunk for managed in converted}
    for dtype in {chunk.compute_dtype if computes else chunk.dtype for chunk in chunks}:
        asked = convert(torch.empty(0, dtype=dtype, device=device)).dtype
        if asked != dtype and computes and mixed:
            raise ManageError(
                f"a module casts its weights in forward, from {dtype}, which mixed_precision computes in, to {asked}: "
                f"cast what it computes with in their place (self.weight.to({asked})), or leave mixed_precision out "
                f"and compute under torch.autocast"
            )
        if asked != dtype:
            raise ManageError(
                f"parameters of {dtype} that are managed cannot become {asked}: call hetmem.release(model) first, "
                f"convert it, and manage it again. To compute in 16 bits with such masters there is mixed_precision=…"
            )
    for managed in converted:
        if _changes_layout(managed.like(), convert, device):
            raise ManageError(
                f"{managed.name} is managed and cannot get another memory format: call .to(memory_format=…) before "
                f"hetmem.manage, or call hetmem.release(model) first, convert it, and manage it again"
            )


def _changes_layout(home: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> bool:
    """Return whether `convert` gives a tensor like `home`, of 4 or 5 dimensions, other strides."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(home.dim())
    if last is None or (home.is_contiguous() and home.is_contiguous(memory_format=last)):
        return False  # contiguous in both formats, as with a single pixel
    now = torch.contiguous_format if home.is_contiguous() else last
    like = torch.empty((2,) * home.dim(), device=device, memory_format=now)
    return convert(like).stride() != like.stride()


# ---- errors of torch -------------------------------------------------------------------------------------------------

_SHOWN = 5
"""The most names in a message."""
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


def explain(
    error: BaseException | None,
    module: torch.nn.Module,
    model: torch.nn.Module,
    managed: Mapping[int, ManagedParameter],
) -> None:
    """Add to `error`, if torch raised it in the call of `module` whose hook asks, which parameters of `model` are not
    `managed` (by `id`). Does so once, though the hook of each enclosing module calls this.
    """
    if not (isinstance(error, RuntimeError) and _is_of_torch(error) and _raised_in_call(error, module)):
        return
    if type(error).__name__ == "UncapturedHigherOrderOpError" and _BRANCHES not in str(error):
        error.args = (f"{error}\n{_BRANCHES}",)
    _explain_buffers(error, model, managed)
    unmanaged = [
        f"{name} ({parameter.dtype}, {parameter.device})"
        for name, parameter in model.named_parameters()
        if id(parameter) not in managed and parameter.is_floating_point()
    ]
    if not unmanaged or _KNOWN in str(error) or _EXCHANGED in str(error):
        return
    names = {each.name for each in managed.values()}
    if any(name.partition(" ")[0] in names for name in unmanaged):
        dtypes = {str(each.chunk.compute_dtype) for each in managed.values()}
        error.args = (f"{error}\n{_EXCHANGED} {' or '.join(sorted(dtypes))}, copy=True)}}",)
        return
    more = f" and {len(unmanaged) - _SHOWN} more" if len(unmanaged) > _SHOWN else ""
    error.args = (
        f"{error}\n{_KNOWN}: {', '.join(unmanaged[:_SHOWN])}{more}. They stay as they are, while "
        f"managed ones are used on the device, with mixed_precision in 16 bits. Call hetmem.release(model), then "
        f"hetmem.manage(model, …) again",
    )


def _explain_buffers(error: RuntimeError, model: torch.nn.Module, managed: Mapping[int, ManagedParameter]) -> None:
    """Add float32 buffers to `error`: batch normalization, for one, needs running means in the dtype of its weights."""
    narrow = {each.chunk.compute_dtype for each in managed.values() if each.chunk.compute_dtype is not each.chunk.dtype}
    wide = [f"{name} ({buffer.dtype})" for name, buffer in model.named_buffers() if buffer.dtype is torch.float32]
    if not (narrow and wide) or "scalar type" not in str(error) or _BUFFERS in str(error):
        return
    more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
    error.args = (
        f"{error}\n{_BUFFERS}: {', '.join(wide[:_SHOWN])}{more}. Convert those that are meant to "
        f"{', '.join(map(str, narrow))}, or leave mixed_precision out and compute under torch.autocast",
    )


def _is_of_torch(error: RuntimeError) -> bool:
    """Return whether `error` may be of a dtype or a device: torch's own, or that of the simulated device."""
    return type(error) in (RuntimeError, DeviceAccessError) or type(error).__name__ == "UncapturedHigherOrderOpError"


def _raised_in_call(error: BaseException, module: torch.nn.Module) -> bool:
    """Return whether `error` was raised within the call of `module` whose hook asks, not around it."""
    frame, trace = calling_frame(module, sys._getframe()), error.__traceback__
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None
