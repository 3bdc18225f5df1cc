"""What tests of `hetmem.planner` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace

from hetmem import planner
from hetmem.base import config
from hetmem.base.hardware import HardwareProfile, Rate, ThreadCosts
from hetmem.base.units import KIB, MIB, format_enough, format_seconds, parse_size, round_down
from hetmem.planner import Plan, PlanError, step_program, wording, workload
from hetmem.planner.decide import Decision, Judged, Variant, arranged, combined
from hetmem.planner.decide import decide as decide_within
from hetmem.planner.meta_results import Results
from hetmem.planner.model import TracedCall, checkpointed, divided, trace
from hetmem.planner.plan import KEPT, LOANED
from hetmem.planner.reservation import ROLES, arrange, state_bytes
from hetmem.planner.simulated_engine import Notes, SimulatedUpdates, Staged, Update
from hetmem.planner.simulator import LinkQueue, SimulatedTraffic
from hetmem.planner.step_program import Rehearsal, rehearse
from hetmem.planner.workload import Event, Kind, Phase, StepResult, Updating, Work, Workload, larger_by
from hetmem.schedule.blocks import FIFO, LRU, Block, CopyState, NextUse
from hetmem.schedule.gradients import Complete
from hetmem.schedule.layout import PAGE_ELEMENTS, ParameterSpec, build_layout
from hetmem.schedule.placement import Capacities, NoRoom
from hetmem.schedule.trace import Schedule, Tier
from hetmem.tools import plan_cache, stages
from hetmem.tools.script import MOST_LINES

deciding = sys.modules[Judged.__module__]
"""The module, whose name in the package is that of a function."""

Setting = functools.partial(workload.Setting, hardware=planner.load_profile("h100"))
"""What is judged on the machine that `judge` is told."""


def judge(
    of: Workload, setting: workload.Setting, on: HardwareProfile, micro_batches: int, *, steps: int = 4
) -> Judged:
    found = deciding.judged(of, replace(setting, hardware=on, micro_batches=micro_batches), steps=steps)
    assert isinstance(found, Judged), found
    return found


def judged(of: Workload, setting: workload.Setting, on: HardwareProfile, micro_batches: int) -> Judged | NoRoom:
    return deciding.judged(of, replace(setting, hardware=on, micro_batches=micro_batches))


def decide(
    of: Workload,
    within: Capacities,
    on: HardwareProfile,
    *,
    chunk_bytes: int | None = None,
    micro_batches: int = 1,
    updating: Updating | None = None,
    variants: Sequence[Variant] = (),
) -> Decision:
    asked = workload.Setting(within, chunk_bytes, on, micro_batches, updating or Updating())
    return decide_within(of, asked, variants)


__all__ = [
    "FIFO",
    "KEPT",
    "KIB",
    "LOANED",
    "LRU",
    "MIB",
    "MOST_LINES",
    "PAGE_ELEMENTS",
    "ROLES",
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
    "SimulatedTraffic",
    "SimulatedUpdates",
    "Staged",
    "StepResult",
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
    "combined",
    "config",
    "decide",
    "deciding",
    "divided",
    "format_enough",
    "format_seconds",
    "judge",
    "judged",
    "larger_by",
    "parse_size",
    "plan_cache",
    "planner",
    "rehearse",
    "round_down",
    "stages",
    "state_bytes",
    "step_program",
    "trace",
    "wording",
]
