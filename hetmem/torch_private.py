"""The private names of torch that hetmem uses, each with its reason, for torch 2.11 to 2.13.

No other module of hetmem reads a private name of torch's modules: `tests/test_torch_private.py` holds that, and checks
what hetmem relies on, so that a torch that changes one fails there, by name. Of torch's objects hetmem reads the
private attributes in `ATTRIBUTES`. Private operators (`torch.ops.aten._…`) and `torch._dynamo.graph_break`, which is
imported late, are named where they are used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

__all__ = [
    "SUPPORTED_NODES",
    "NamedMemberAccessor",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "temporarily_clear_interpreter_stack",
    "tree_leaves",
    "tree_map",
]

_C: Any = torch._C
without_modes = _python_dispatch._disable_current_modes  # operators as if no mode of dispatch were active

ATTRIBUTES = {
    "_version": "writes to a tensor that autograd counts; torch's notes on autograd name it",
    "_cdata": "the address of a storage's C++ object, which all its views share: the key of maps from storages",
    "_parameters": "a module's own parameters, without the cost of generators",
    "_buffers": "a module's own buffers, the same",
    "_backward_hooks": "whether a gradient has hooks of the program, which may change it",
    "_post_accumulate_grad_hooks": "the same, after the accumulation",
    "_forward_pre_hooks": "hooks that compute a weight before each call, as torch's spectral_norm does",
    "_sequence_nr": "the number by which autograd orders a node of a graph",
    "_compiled_call_impl": "what a compiled module calls instead of its hooks and its `forward`",
    "_apply": "the method that `to`, `cuda` and `half` of a module call",
}

# ---- autograd ----
current_graph_task = _C._current_graph_task_id  # which backward runs on this thread; -1: none
current_node = _C._current_autograd_node  # within which node of it: a custom function's backward, an accumulation
next_node_number: Any = _C._autograd._get_sequence_nr  # by which autograd orders the nodes that this thread makes
autograd = _C._autograd  # saved-tensor hooks: whether they are enabled, and the innermost ones

# ---- GPUs ----
raw_current_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)  # a tenth of what `current_stream` costs

# ---- modes of functions and operators ----
NoFunctions = _C.DisableTorchFunction  # hetmem's own operators are no uses of weights, for modes and subclasses
NoFunctionsOfSubclasses = _C.DisableTorchFunctionSubclass  # the same, for subclasses only
NoDispatch = _C._DisableTorchDispatch  # and no modes of operators
function_modes_around = _C._len_torch_function_stack  # how many modes of the user's are in force
dispatch_modes_around = _C._len_torch_dispatch_stack
function_mode_stack = _get_current_function_mode_stack
push_mode, pop_mode = _push_mode, _pop_mode  # a mode that begins in one hook and ends in another
dispatch_mode_stack = _get_current_dispatch_mode_stack
push_dispatch_mode, pop_dispatch_mode = (
    _python_dispatch._push_mode,
    _python_dispatch._pop_mode,
)  # the modes of another thread
without_dispatch_keys = _C._SetExcludeDispatchKeyGuard  # a view under inference_mode keeps its base
DispatchKey = _C.DispatchKey
has_kernel = _C._dispatch_has_kernel_for_dispatch_key  # whether an operator decomposes on this device

# ---- torch.func ----
transform_level = _C._functorch.maybe_current_level  # None outside of transforms
is_of_a_transform = _C._functorch.is_functorch_wrapped_tensor  # such a tensor has no storage of its own
is_of_an_old_transform = _C._functorch.is_legacy_batchedtensor

# ---- profiling ----
profiler_runs = _C._autograd._profiler_enabled  # whether torch.profiler records on this thread
labelled = _C._profiler._RecordFunctionFast  # `record_function` without an operator, which modes of operators would see

# ---- modules and compilers ----
SAVES_STATE = torch.nn.Module._save_to_state_dict.__code__  # what `state_dict()` runs for each module
NormBase: Any = _NormBase  # what BatchNorm and InstanceNorm share: running statistics, which stay in float32
call_of_a_module = torch.nn.Module._call_impl  # its frames, between a caller's and a hook's
checkpoint_hook = torch.utils.checkpoint._checkpoint_hook  # the hooks of saved tensors of a checkpoint's forward
recomputation_hook = torch.utils.checkpoint._recomputation_hook  # and of its recomputation
HigherOrderOperator = torch._ops.HigherOrderOperator  # `cond`, `while_loop`: operators that call functions
eval_frame = _C._dynamo.eval_frame  # gets and sets Dynamo's callback of a thread
tracing_state = _C._get_tracing_state  # a trace by torch.jit would keep addresses
dispatch_mode, PROXY = _C._get_dispatch_mode, _C._TorchDispatchModeKey.PROXY  # whether a compiler records operators

# ---- what hetmem replaces, where torch has no hook: the reasons are with the replacements ----
REPLACED = {
    "torch.autograd._engine_run_backward": "intercept.backward: the begin and the end of every backward",
    "torch.amp.grad_scaler._MultiDeviceReplicator.get": "intercept.registry: waits for copies to host memory",
    "NamedMemberAccessor.swap_tensors_dict": "intercept.registry: `functional_call` exchanges weights of a module",
    "torch.nn.Module._apply, of one instance": "intercept.hooks: `to`, `cuda`, `half` leave weights at home",
    "Parameter.__class__": "engine.param_views: hetmem sees the functions that get an unbound weight (ADR 25)",
}

# ---- memory ----
storage_address = _C._storage_address  # the same as `_cdata` of the storage of a tensor, in one call
storage_references = _C._storage_Use_Count  # how many tensors hold a storage: the use count of a copy (ADR 2)
make_subclass = torch.Tensor._make_subclass  # one with the memory of another tensor
make_wrapper = torch.Tensor._make_wrapper_subclass  # one without memory, which answers for another tensor
without_functions = _C._disabled_torch_function_impl  # as `__torch_function__`: a subclass whose attributes are torch's
tensor_references: Any = _C.TensorBase._use_count  # how often C++ refers to a tensor: whether a graph may hold a weight
swap_impl = _C._swap_tensor_impl  # a parameter gets memory of its own and stays the same object
from_dlpack, to_dlpack = _C._from_dlpack, _C._to_dlpack  # the public ones may wait for a stream
negative_view = torch._neg_view  # restores a saved view that was lazily negated
foreach_add, foreach_sub = torch._foreach_add_, torch._foreach_sub_  # of many step counts in one call, as torch's AdamW
foreach_copy = torch._foreach_copy_  # remakes all copies of a model that is whole on the device in one call
foreach_zero, foreach_neg = torch._foreach_zero_, torch._foreach_neg_  # and all its gradients, which begin as -0.0
group_by_device_and_dtype = _C._group_tensors_by_device_and_dtype  # as torch's AdamW does before its kernel
fused_adamw = torch._fused_adamw_  # the kernel behind AdamW(fused=True), whose bits hetmem promises


def is_default_device(mode: object) -> bool:
    """Return whether `mode` is that of `torch.set_default_device`, whose module torch imports as it is first called."""
    module = sys.modules.get("torch.utils._device")
    return module is not None and isinstance(mode, module.DeviceContext)


def backward_of_inputs_alone() -> Any:
    """Return the code that computes gradients of a pipeline stage's inputs alone; None where no pipeline is in use."""
    pipelines = sys.modules.get("torch.distributed.pipelining._backward")
    return pipelines and pipelines.stage_backward_input.__code__


def out_of_memory_observer() -> Any:
    """Return the function that attaches an observer to the CUDA allocator; None in builds without CUDA."""
    return getattr(_C, "_cuda_attach_out_of_memory_observer", None)


def placed_as(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor over `local` with the mesh, placements and shape of the DTensor `tensor`: `DTensor.from_local`
    would copy it to the device of the mesh."""
    from torch.distributed.tensor import DTensor

    made: Any = DTensor
    placed: torch.Tensor = made(local, tensor._spec, requires_grad=False)
    return placed


def is_flat(parameter: Any) -> bool:
    """Return whether `parameter` is a flat one of FSDP1, by the mark that its own metaclass reads."""
    return bool(getattr(parameter, "_is_flat_param", False))
