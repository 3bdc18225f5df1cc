"""What tests of `hetmem.planner` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem import planner
from hetmem.base.hardware import Rate, ThreadCosts
from hetmem.base.units import KIB, MIB, format_enough, format_seconds, parse_size, round_down
from hetmem.planner import Plan, PlanError
from hetmem.planner.decide import Decision, Variant, decide
from hetmem.planner.meta_results import Results
from hetmem.planner.model import TracedCall, checkpointed, divided, trace, trace_real
from hetmem.planner.plan import KEPT, SENT_STATES
from hetmem.planner.rehearsal import step_program
from hetmem.planner.rehearsal.room import Notes
from hetmem.planner.rehearsal.simulator import LinkQueue, SimulatedTraffic
from hetmem.planner.rehearsal.step_program import Rehearsal, rehearse
from hetmem.planner.rehearsal.updates import SimulatedDeviceUpdates, SimulatedUpdates, Staged, Update
from hetmem.planner.reservation import ROLES, arrange, fits, state_bytes
from hetmem.planner.search import (
    Judged,
    Setting,
    StreamingGain,
    arranged,
    chunk_bytes_near,
    judge,
    judged,
    search,
)
from hetmem.planner.workload import Event, Kind, Phase, StepResult, Updating, Work, Workload, with_rows
from hetmem.schedule.blocks import FIFO, LRU, Block, CopyState, NextUse
from hetmem.schedule.gradients import Complete
from hetmem.schedule.layout import PAGE_ELEMENTS, ParameterSpec, build_layout
from hetmem.schedule.placement import Capacities, NoRoom
from hetmem.schedule.trace import Schedule, Tier

__all__ = [
    "FIFO",
    "KEPT",
    "KIB",
    "LRU",
    "MIB",
    "PAGE_ELEMENTS",
    "ROLES",
    "SENT_STATES",
    "Block",
    "Capacities",
    "Complete",
    "CopyState",
    "Decision",
    "Event",
    "Judged",
    "Kind",
    "LinkQueue",
    "NextUse",
    "NoRoom",
    "Notes",
    "ParameterSpec",
    "Phase",
    "Plan",
    "PlanError",
    "Rate",
    "Rehearsal",
    "Results",
    "Schedule",
    "Setting",
    "SimulatedDeviceUpdates",
    "SimulatedTraffic",
    "SimulatedUpdates",
    "Staged",
    "StepResult",
    "StreamingGain",
    "ThreadCosts",
    "Tier",
    "TracedCall",
    "Update",
    "Updating",
    "Variant",
    "Work",
    "Workload",
    "arrange",
    "arranged",
    "build_layout",
    "checkpointed",
    "chunk_bytes_near",
    "decide",
    "divided",
    "fits",
    "format_enough",
    "format_seconds",
    "judge",
    "judged",
    "parse_size",
    "planner",
    "rehearse",
    "round_down",
    "search",
    "state_bytes",
    "step_program",
    "trace",
    "trace_real",
    "with_rows",
]
