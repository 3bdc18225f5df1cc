"""The cheapest way in which a model fits with the bits of the same training: no drive before a drive, then changes of
the program in the order of what they cost. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetmem.base.units import format_seconds, format_size
from hetmem.planner.decide import Decision, Judged, largest_parameters, missing_bytes, search
from hetmem.planner.workload import Setting, Workload
from hetmem.schedule.placement import NoRoom


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the program that keeps the bits: in words, the `workload` with it (None: it cannot be made), and the
    keywords of `plan_of` that tell it."""

    text: str
    workload: Callable[[], Workload | None]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A way that fits. `changes`: what it needs beyond what was asked for, none if that fits as cheaply; `as_asked`
    says what is wrong with that."""

    decision: Decision
    changes: tuple[str, ...] = ()
    as_asked: str = ""
    keywords: dict[str, Any] | None = None


def cheapest_way(workload: Workload, asked: Setting, changes: Sequence[Change]) -> Way | None:
    """Return the first way that fits: `asked`, then with updates that overlap, then with one of `changes` too, all of
    them without a drive, and then with the one that was asked for. None if none fits."""
    first = search(workload, asked)
    if isinstance(first, Judged) and not _uses_drive(first):
        return Way(Decision(workload, asked, first, largest_parameters(workload, asked, first)))
    how, with_overlap = asked.updating, _overlapping(asked)
    rooms = [asked.within(nvme_bytes=0), asked] if asked.capacities.nvme_bytes else [asked]
    made = {0: workload}
    for room in rooms:
        for at, change in enumerate((Change("", lambda: workload, {}), *changes)):
            if at not in made:
                found = change.workload()
                made |= {} if found is None else {at: found}
            for updating in (how, with_overlap):
                if at not in made or updating is None or (updating == how and not change.text and room == asked):
                    continue
                setting = replace(room, updating=updating)
                candidate = search(made[at], setting)
                if isinstance(candidate, Judged):
                    said = [_OVERLAP] if updating != how else []
                    said += [change.text] if change.text else []
                    largest = largest_parameters(made[at], setting, candidate)
                    decision = Decision(made[at], replace(asked, updating=updating), candidate, largest)
                    return Way(decision, tuple(said), _wrong_with(workload, asked, first), change.keywords)
        if room is asked:
            break
        if isinstance(first, Judged):
            return Way(Decision(workload, asked, first, largest_parameters(workload, asked, first)))
    return None


_OVERLAP = 'overlap="backward"'


def _overlapping(asked: Setting) -> Any:
    """Return how updates overlap, which keep no gradients at home; None if they do as asked."""
    return None if asked.updating.overlapped else replace(asked.updating, overlapped=True)


def _uses_drive(found: Judged) -> bool:
    return found.arrangement.ground.uses_nvme or found.arrangement.spilled_bytes > 0


def _wrong_with(workload: Workload, asked: Setting, first: Judged | NoRoom) -> str:
    """Return what is wrong with what was asked for."""
    if isinstance(first, NoRoom):
        missing = missing_bytes(workload, asked)
        return f"missing: {' and '.join(f'{format_size(nbytes)} on {tier}' for tier, nbytes in missing.items())}"
    written = format_size(first.result.bytes["nvme_write"])
    return f"{format_seconds(first.result.seconds)} a step, in which {written} are written to a drive"
