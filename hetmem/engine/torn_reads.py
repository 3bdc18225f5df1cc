"""Gradients that were read from NVMe while the user had them before him: a copy in staging may be of before and after.

Whoever scales gradients through `parameter.data` counts no version, and hetmem compares one element of a copy with its
home. That tells an old copy from a new one, but nothing of one whose read was under way just then: some of its blocks
are old, others new. So no such copy is used as it is.
"""

from __future__ import annotations

from hetmem.memory.chunk import Chunk, Role
from hetmem.schedule.blocks import CopyState
from hetmem.schedule.residency import Residency
from hetmem.schedule.trace import Tier


class Exposed:
    """Of the blocks in `chunk_of_block`, those of gradients that `residency` has in staging and that may be mixed."""

    def __init__(self, residency: Residency, chunk_of_block: dict[int, tuple[Chunk, Role]]) -> None:
        self._residency, self._chunk_of_block = residency, chunk_of_block
        self._mixed: set[int] = set()
        self._users_turn = True

    def show(self) -> None:
        """The user may write to gradients from now on, also to those that are being read."""
        if not self._users_turn:
            self._users_turn = True
            for block, (chunk, role) in self._chunk_of_block.items():
                if role is Role.GRAD and self._residency.state(block, Tier.HOST) is CopyState.LOADING:
                    self.reads(block, chunk, role)

    def hide(self) -> None:
        """A backward or a step has begun: nobody writes to gradients but hetmem."""
        self._users_turn = False

    def reads(self, block: int, chunk: Chunk, role: Role) -> None:
        """A read of the home of `block` begins. Of gradients that trail behind a step nobody knows."""
        self._mixed.discard(block)
        shown = (each for each in chunk.parameters if each.grad_home is not None) if role is Role.GRAD else ()
        if self._users_turn and any(each.parameter.grad is each.grad_home for each in shown):
            self._mixed.add(block)

    def mixed(self, block: int) -> bool:
        """Whether the copy of `block` in staging may be of before and after a write."""
        return block in self._mixed

    def forget(self, block: int) -> None:
        """That copy counts no more, or says what its home says."""
        self._mixed.discard(block)
