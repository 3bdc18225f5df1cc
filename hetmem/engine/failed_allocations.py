"""What the device's allocator has refused: how much more it would have needed, and what is said of it.

It moves nothing, as it is told on any thread, in the middle of an allocation.
"""

from __future__ import annotations

import logging

from hetmem import torch_private
from hetmem.base.units import format_size
from hetmem.engine.homes import Memory
from hetmem.engine.out_of_memory import Shortage


class Refusals:
    """Of one runtime, from when it is made."""

    def __init__(self, memory: Memory, shortage: Shortage) -> None:
        self._memory, self._shortage = memory, shortage
        self.room_bytes = 0
        """What would have been enough beside chunks; 0 while nothing was refused."""
        self.said = ""
        """Who held what when it happened last."""
        memory.device.tell_refusals(self.refused)

    def refused(self, asked_bytes: int, allocated_bytes: int) -> None:
        """The device's allocator has refused `asked_bytes`, with `allocated_bytes` handed out; on any thread.

        From the next moment on chunks have so much less than they have now. An operator of a forward is tried again
        then; nobody can try a part of a backward again, so there this says who holds what, before torch raises.
        """
        memory = self._memory
        chunks = memory.device_pool.held_bytes() + memory.device_home_bytes
        self.room_bytes = max(self.room_bytes, min(memory.usable_bytes - chunks + asked_bytes, memory.usable_bytes))
        live_bytes = max(0, allocated_bytes - chunks)
        what = f"an allocation of {format_size(asked_bytes)}"
        error = self._shortage.error(what, live_bytes, refused_bytes=asked_bytes)
        given = min(asked_bytes, memory.device_pool.held_bytes())
        self.said = f"{error}. From now on chunks leave {format_size(given)} more: the next step may have room"
        if torch_private.current_graph_task() != -1:  # Python sees no error of a backward's node before it
            logging.getLogger("hetmem").error(self.said)
