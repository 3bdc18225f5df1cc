"""What tests of `hetmem.schedule` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem.base.hardware import DeviceProfile, HostProfile, Rate
from hetmem.base.units import GIB, MIB, round_up
from hetmem.schedule.blocks import (
    FIFO,
    LRU,
    Block,
    Command,
    CopyState,
    Drop,
    Fetch,
    NextUse,
    Order,
    PlaceMap,
    SlotMap,
    Write,
)
from hetmem.schedule.cache import Cache
from hetmem.schedule.gradients import GradientSends, Lending, Send, set_aside, wait_until
from hetmem.schedule.layout import (
    ALIGNMENT_ELEMENTS,
    PAGE_ELEMENTS,
    TARGET_ELEMENTS,
    ChunkSpec,
    Layout,
    ParameterSpec,
    Placement,
    build_layout,
    search_chunk_elements,
)
from hetmem.schedule.placement import (
    MARGIN_SHARE,
    Candidate,
    Room,
    choose,
    fits_device,
    idle_bytes,
    largest_chunk_elements,
    place,
    place_copies,
)
from hetmem.schedule.residency import Residency
from hetmem.schedule.saved import SavedInterval, SavedRound, to_leave
from hetmem.schedule.staging import STAGED_ROLES, never_staged, staging_slots
from hetmem.schedule.supply import Supply
from hetmem.schedule.trace import NEVER, STEP, Moment, Schedule, SegmentTrace, Tier, TraceBook, UseSequence

__all__ = [
    "ALIGNMENT_ELEMENTS",
    "FIFO",
    "GIB",
    "LRU",
    "MARGIN_SHARE",
    "MIB",
    "NEVER",
    "PAGE_ELEMENTS",
    "STAGED_ROLES",
    "STEP",
    "TARGET_ELEMENTS",
    "Block",
    "Cache",
    "Candidate",
    "ChunkSpec",
    "Command",
    "CopyState",
    "DeviceProfile",
    "Drop",
    "Fetch",
    "GradientSends",
    "HostProfile",
    "Layout",
    "Lending",
    "Moment",
    "NextUse",
    "Order",
    "ParameterSpec",
    "PlaceMap",
    "Placement",
    "Rate",
    "Residency",
    "Room",
    "SavedInterval",
    "SavedRound",
    "Schedule",
    "SegmentTrace",
    "Send",
    "SlotMap",
    "Supply",
    "Tier",
    "TraceBook",
    "UseSequence",
    "Write",
    "build_layout",
    "choose",
    "fits_device",
    "idle_bytes",
    "largest_chunk_elements",
    "never_staged",
    "place",
    "place_copies",
    "round_up",
    "search_chunk_elements",
    "set_aside",
    "staging_slots",
    "to_leave",
    "wait_until",
]
