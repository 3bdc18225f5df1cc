"""hetmem within the frameworks that people train with: docs/integrations.md shows each in ten lines.

No framework is imported before one of its names is asked for, and nothing of one is replaced: `for_trainer` is for the
`Trainer` of transformers and those of TRL, `LightningCallback` for Lightning; accelerate needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetmem.integrations.scalars import scalars, write

if TYPE_CHECKING:
    from hetmem.integrations.lightning import LightningCallback
    from hetmem.integrations.trainer import for_trainer

__all__ = ["LightningCallback", "for_trainer", "scalars", "write"]


def __getattr__(name: str) -> Any:
    if name == "for_trainer":
        from hetmem.integrations.trainer import for_trainer

        return for_trainer
    if name == "LightningCallback":
        from hetmem.integrations.lightning import LightningCallback

        return LightningCallback
    raise AttributeError(f"module 'hetmem.integrations' has no attribute {name!r}")
