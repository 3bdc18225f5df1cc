"""In which dtype each parameter computes, and which parameters may share a chunk. For a run and for its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from hetmem import torch_private
from hetmem.errors import ManageError
from hetmem.schedule.layout import ParameterSpec

Precision = torch.dtype | Literal["bf16", "bfloat16", "fp16", "float16"]
"""What users may say of a dtype that operators compute in."""

_NAMED = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


def precision_of(asked: Any) -> torch.dtype | None:
    """Return the dtype of `asked`, a `Precision` or None. Raises `ManageError` for anything else."""
    found = _NAMED.get(asked) if isinstance(asked, str) else asked
    if found in (torch.bfloat16, torch.float16) or asked is None:
        return found
    raise ManageError(f"mixed_precision must be torch.bfloat16 ('bf16'), torch.float16 ('fp16') or None, got {asked!r}")


def compute_dtypes(
    module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], mixed_precision: torch.dtype | None
) -> list[torch.dtype]:
    """What operators see of each of `parameters`: float32 ones in `mixed_precision`, if there is one.

    Those of modules that keep running statistics stay as they are: the statistics are float32 buffers, which operators
    take beside inputs of 16 bits if the weights are float32 too. They are few.
    """
    kept = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, torch_private.NormBase) and part.running_mean is not None
        for parameter in part.parameters(recurse=False)
    }
    narrow = mixed_precision or torch.float32
    return [narrow if p.dtype is torch.float32 and id(p) not in kept else p.dtype for p in parameters.values()]


def specs(parameters: Mapping[str, torch.nn.Parameter], compute: list[torch.dtype]) -> list[ParameterSpec]:
    """What a layout asks of `parameters`: those of one dtype at home and in compute that are trained, or are not, share
    chunks."""
    return [
        ParameterSpec(name, p.numel(), f"{p.dtype} {dtype} {p.requires_grad}", p.itemsize)
        for (name, p), dtype in zip(parameters.items(), compute, strict=True)
    ]
