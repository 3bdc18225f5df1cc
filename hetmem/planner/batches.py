"""How large a batch is. Knows tensors; must not know the model that is called with them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def rows_of(batch: Any, without: int) -> int:
    """How many rows `batch` has: what most of its tensors have, or the first of as many; positions and masks, which all
    rows share, have other numbers. `without` tensors it is that."""
    sizes = Counter(tensor.shape[0] for tensor in _tensors(batch))
    return sizes.most_common(1)[0][0] if sizes else without


def rows_and_tokens(batch: Any) -> tuple[int, int]:
    """Tokens are the elements of the largest tensor of whole numbers; without one, rows."""
    rows = rows_of(batch, 1)
    return rows, max((tensor.numel() for tensor in _tensors(batch) if not tensor.dtype.is_floating_point), default=rows)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
