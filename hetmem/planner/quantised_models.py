"""Plans models that a library has quantised before: by a copy without memory, whose weights have their true shapes and
codings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from hetmem.errors import ManageError
from hetmem.placing.taken import TakenOver
from hetmem.planner.plan import PlanError
from hetmem.schedule.formats import Coding
from hetmem.torch_private import without_modes

_CODING = "_hetmem_coding"
_STATES = ("quant_state", "state")
"""Attributes of modules of bitsandbytes that have codes and scales."""


def with_codings(build_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds the model of `build_model` or, of one that a library has quantised, a copy on `meta` that
    computes as a managed one. It raises `PlanError` for weights that `manage` refuses."""
    if isinstance(build_model, nn.Module) or not callable(build_model):
        return build_model  # which is refused with the reason

    def build() -> nn.Module:
        model = build_model()
        if not isinstance(model, nn.Module):
            return model
        try:
            with without_modes(), torch.device("cpu"):
                taken = TakenOver(model)
        except ManageError as error:
            raise PlanError(str(error)) from error
        return _copy(model, taken) if taken.found else model

    return build


def taken_codings(named: Mapping[str, nn.Parameter]) -> dict[str, Coding]:
    """Return the codings of those of the parameters `named` that a library has quantised, by name."""
    return {name: each.__dict__[_CODING] for name, each in named.items() if _CODING in each.__dict__}


def _copy(model: nn.Module, taken: TakenOver) -> nn.Module:
    copies: dict[int, Any] = {}
    for part in model.modules():
        copies |= {id(each): _empty(each, taken) for each in _tensors(part)}
        copies |= {id(vars(part)[name]): SimpleNamespace() for name in _STATES if vars(part).get(name) is not None}
    made = copy.deepcopy(model, copies)
    for weight in taken.found.values():
        if weight.forward is not None:
            part = made.get_submodule(weight.name.rpartition(".")[0])
            part.forward = MethodType(weight.forward, part)
    return made


def _tensors(part: nn.Module) -> Iterator[torch.Tensor]:
    for each in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
        if isinstance(each, torch.Tensor):
            yield each


def _empty(tensor: Any, taken: TakenOver) -> torch.Tensor:
    """Return a tensor in the place of `tensor`, on `meta`."""
    if (weight := taken.of(tensor)) is not None:
        made = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
        made.__dict__[_CODING] = weight.coding
        return made
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
