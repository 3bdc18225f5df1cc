"""What tests of `hetmem.report` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem import planner
from hetmem.base.packed_log import Log
from hetmem.base.units import format_size
from hetmem.engine.events import CopyChange, EventLog, Fault, MomentSeen, Span, Stall, Transfer
from hetmem.intercept import registry
from hetmem.report import files, live
from hetmem.report.files import compare, page_text, render, show, trace_text
from hetmem.report.report import MemoryReport
from hetmem.report.step import (
    Window,
    clip,
    format_seconds,
    history,
    last_window,
    length,
    overlap,
    step_section,
    union,
    without,
)
from hetmem.report.text import comparison, table
from hetmem.report.timeline import BlockFacts, timeline_section
from hetmem.schedule.blocks import Link

__all__ = [
    "BlockFacts",
    "CopyChange",
    "EventLog",
    "Fault",
    "Link",
    "Log",
    "MemoryReport",
    "MomentSeen",
    "Span",
    "Stall",
    "Transfer",
    "Window",
    "clip",
    "compare",
    "comparison",
    "files",
    "format_seconds",
    "format_size",
    "history",
    "last_window",
    "length",
    "live",
    "overlap",
    "page_text",
    "planner",
    "registry",
    "render",
    "show",
    "step_section",
    "table",
    "timeline_section",
    "trace_text",
    "union",
    "without",
]
