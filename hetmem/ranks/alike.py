"""What the ranks of a group must have alike, and what a group does not do yet.

All refusals come before the first parameter is changed, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from hetmem.base.config import VERSION, Budget
from hetmem.errors import ManageError
from hetmem.ranks.group import not_yet


def facts(module: torch.nn.Module, budget: Budget | None, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of what has to be the same on all ranks, in the order in which differences are named."""
    asked = budget or Budget()
    found = [("hetmem", VERSION), ("torch", torch.__version__), ("the model", type(module).__name__)]
    found += [(f"Budget({field.name})", repr(getattr(asked, field.name))) for field in fields(asked)]
    found += [(f"manage({name})", repr(value)) for name, value in options.items()]
    for name, parameter in module.named_parameters():
        grad = "trained" if parameter.requires_grad else "frozen"
        found.append((name, f"{tuple(parameter.shape)} {parameter.stride()} {parameter.dtype} {grad}"))
    found += [(name, f"{tuple(buffer.shape)} {buffer.dtype}") for name, buffer in module.named_buffers()]
    return found


def refuse_wrapped(module: torch.nn.Module) -> None:
    """Raise `ManageError` if `module`, or a part of it, is wrapped for gradients to be added up between processes."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            raise ManageError(
                f"{name or 'the model'} is a DistributedDataParallel: leave it out, as ranks that share a model add "
                f"gradients up themselves; or give hetmem.manage group=False"
            )


def refuse(budget: Budget | None, options: Mapping[str, Any]) -> None:
    """Raise `ManageError` for what a group of several ranks does not do yet."""
    limits = None if budget is None else budget.limits()
    if limits is not None and len(limits.nvme_directories) > 1:
        raise not_yet("Budget(nvme_dir=…) of several directories")
    if options["plan"] is not None:
        raise not_yet("manage(plan=…)")
