"""Gives the weights of a model to an inference engine: by name, in its dtype, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from hetmem import torch_private
from hetmem.checkpoint.adapters import adapters_alone, base_name, has_adapters, merge, merges_of
from hetmem.checkpoint.contents import all_of, of_model, refuse_half_stepped
from hetmem.errors import CheckpointError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import ManagedParameter, Role


def export_weights(
    model: torch.nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    adapters: Literal["merged", "only"] = "merged",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over `(name, tensor)` of the weights of `model`, for an inference engine to load.

    Names and order are those of `model.state_dict()`, a tied weight once, under its first name: what `load_weights` of
    vLLM's models takes, as TRL's `GRPOTrainer` calls it, and `update_weights_from_tensor` of SGLang's engine. Weights
    come in `dtype`, buffers as they are. A tensor is valid until the next is asked for, and not to be written to: where
    a managed model has 16-bit copies at home it is the copy itself; else one weight is cast, or decoded, into memory of
    its own. Other threads that train with `model` wait until the iterator ends or is dropped.

    With adapters of PEFT, "merged" adds those that are active to a copy of their base, one weight at a time, with the
    bits of PEFT's `merge_adapter()` and under the names of the base model; quantised weights are decoded for it.
    "only" gives the adapters alone, by the names in PEFT's files, for an engine that takes adapters.

    Raises `CheckpointError` (a ValueError) within a forward, a backward or an unfinished step; if the model steps while
    the iterator is in use; and, with "merged", for other adapters than plain LoRA, by name.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype must be one of floating point, such as torch.bfloat16, got {dtype!r}")
    if adapters not in ("merged", "only"):
        raise CheckpointError(f"adapters must be 'merged' or 'only', got {adapters!r}")
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(f"expected a torch.nn.Module, got {type(model).__name__}")
    return _exported(model, dtype, only=adapters == "only")


def _exported(model: torch.nn.Module, dtype: torch.dtype, *, only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    with all_of(model, "exporting weights"):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        models = registry.managed_among(parameters.values())
        current = {managed for each in models for managed in _with_current_copies(each, dtype)}
        state = of_model(model)
        refuse_half_stepped(model, "export weights after optimizer.step(), not between backward() and step()")
        merges: dict[int, list[Any]] = {}
        if only:
            chosen = adapters_alone(model, state.tensors)
        elif has_adapters(model):
            merges = merges_of(model)
            named = ((base_name(name), tensor) for name, tensor in state.tensors.items())
            chosen = {name: tensor for name, tensor in named if name is not None}
        else:
            chosen = state.tensors
        names = {id(tensor): name for name, tensor in state.tensors.items()}
        begun = [each.runtime.statistics.steps for each in models]
        for name, tensor in chosen.items():
            if [each.runtime.statistics.steps for each in models] != begun:
                raise CheckpointError("the model has stepped while its weights were exported: export all of them anew")
            parameter = parameters.get(names.get(id(tensor), ""))
            if parameter is None:
                yield name, tensor if not only else _cast(tensor, dtype)
            else:
                managed = registry.of_parameter(parameter)
                record = None if managed is None else managed[1]
                layers = merges.get(id(parameter), [])
                if record in current and not layers:
                    yield name, record.at_home(Role.COMPUTE)
                else:
                    yield name, _made(tensor, record, layers, dtype, name)


@torch.no_grad()
def _made(
    tensor: torch.Tensor, managed: ManagedParameter | None, layers: list[Any], dtype: torch.dtype, name: str
) -> torch.Tensor:
    """Return the weight that is `tensor` at home, its codes if `managed` is quantised, in `dtype`, with the adapters of
    `layers` merged."""
    values = tensor
    if managed is not None and managed.code is not None:
        values = managed.decoded()
    elif layers:
        values = tensor.clone()
    for layer in layers:
        merge(layer, values, name)
    return _cast(values, dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _with_current_copies(by: Interception, dtype: torch.dtype) -> Iterator[ManagedParameter]:
    """Yield the parameters of a model with copies in `dtype` at home that no write of the program can have made
    stale."""
    runtime, writes = by.runtime, by.runtime.writes
    have = [each for each in runtime.parameters if Role.COMPUTE in each.chunk.homes]
    if not have or have[0].chunk.compute_dtype is not dtype or writes.unwatched:
        return
    with torch_private.NoFunctionsOfSubclasses():
        changed = {*writes.touched, *filter(writes.counted, have), *runtime.bindings.shared(have)}
    yield from (each for each in have if each not in changed)
