"""What tests of `hetmem.schedule` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem.base.hardware import DeviceProfile, HostProfile, Rate
from hetmem.base.units import GIB, MIB, round_up
from hetmem.schedule.blocks import Block, Command, CopyState, Drop, Fetch, PlaceMap, SlotMap, Write
from hetmem.schedule.cache import FIFO, LRU, NOTHING, Cache, NextUse, Order
from hetmem.schedule.gradients import GradientSends, Lending, Send, set_aside
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
    STAGED_ROLES,
    Room,
    fits_device,
    largest_chunk_elements,
    place,
    place_copies,
    staging_slots,
)
from hetmem.schedule.residency import Residency
from hetmem.schedule.saved import SavedInterval, SavedRound, StepPace, homes_beside, to_leave
from hetmem.schedule.supply import Supply
from hetmem.schedule.trace import NEVER, STEP, Moment, Schedule, SegmentTrace, Tier, TraceBook, UseSequence
from hetmem.schedule.update_split import (
    MARGIN_SHARE,
    Candidate,
    Costs,
    Facts,
    Fitting,
    StreamedShare,
    Way,
    choose,
    idle_bytes,
    spread,
    streamed_part,
    update_costs,
)
from hetmem.schedule.updates import Turns

__all__ = [
    "ALIGNMENT_ELEMENTS",
    "FIFO",
    "GIB",
    "LRU",
    "MARGIN_SHARE",
    "MIB",
    "NEVER",
    "NOTHING",
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
    "Costs",
    "DeviceProfile",
    "Drop",
    "Facts",
    "Fetch",
    "Fitting",
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
    "StepPace",
    "StreamedShare",
    "Supply",
    "Tier",
    "TraceBook",
    "Turns",
    "UseSequence",
    "Way",
    "Write",
    "build_layout",
    "choose",
    "fits_device",
    "homes_beside",
    "idle_bytes",
    "largest_chunk_elements",
    "place",
    "place_copies",
    "round_up",
    "search_chunk_elements",
    "set_aside",
    "spread",
    "staging_slots",
    "streamed_part",
    "to_leave",
    "update_costs",
]
