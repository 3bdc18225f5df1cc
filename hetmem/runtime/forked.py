"""Tensors in homes, as a process made by `fork()` sees them: it has neither their memory nor hetmem's threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from hetmem.errors import ManageError


class InForkedChild(torch.nn.Parameter):
    """A tensor whose home the process does not have: every function of torch over it raises `ManageError`."""

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise ManageError(
            "this tensor lies in memory of hetmem, and this process, made by fork(), has none of it: use the model in "
            "the process that manages it. Give workers of a DataLoader ordinary tensors (weight.detach().clone()), or "
            "make them before hetmem.manage, or by multiprocessing_context='spawn'"
        )


def refuse_in_child(tensor: torch.Tensor) -> None:
    """Let every use of `tensor` raise; called in the child, where reading it would be a segmentation fault."""
    tensor.__class__ = InForkedChild
