"""Gradients of an earlier backward that the user keeps: `kept = p.grad`, and `p.grad = None` or `zero_grad()`.

torch leaves such a tensor alone and makes another one. Here the next gradient goes to the same home, so whoever keeps
the tensor gets memory of its own for it first. Views of it (`p.grad.detach()`) cannot be told apart from the memory
that they show: of those there is a warning.
"""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import torch

from hetmem.engine.param_views import is_shared, references
from hetmem.memory.chunk import ManagedParameter
from hetmem.torch_private import storage_address

_nobody = SimpleNamespace(grad_home=object())
_REFERENCES = sys.getrefcount(_nobody.grad_home)
"""Of what one attribute alone refers to, as they are counted here."""


class OldGradients:
    """Those of one model."""

    def __init__(self) -> None:
        self.warned = False

    def leave_to_the_user(self, managed: ManagedParameter, *, others: int = 0) -> None:
        """The home of the gradient of `managed`, which stands in no `p.grad`, is about to be overwritten. `others`: how
        often hetmem itself refers to it elsewhere, as the update that has used it does."""
        if managed.grad_home is None or not managed.numel or not is_kept(managed, others=others):
            return
        if is_shared(managed.grad_home) and not self.warned:
            self.warned = True
            warnings.warn(
                f"a view of an earlier p.grad of {managed.name} is kept, and will show the next gradient, as hetmem "
                f"puts that in the same place: keep p.grad itself, or a clone of it (said once)",
                stacklevel=2,
            )
        with torch.no_grad():
            managed.grad_home.data = managed.grad_home.clone()
        managed.grad_home = None


def is_kept(managed: ManagedParameter, *, others: int = 0) -> bool:
    """Whether somebody else has the home of the gradient of `managed`, which stands in no `p.grad`, or a view of it."""
    if sys.getrefcount(managed.grad_home) > _REFERENCES + others:
        return managed.grad_home is not None
    return managed.grad_home is not None and references(storage_address(managed.grad_home)) > 1
