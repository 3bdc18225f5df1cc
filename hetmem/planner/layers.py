"""What becomes of the activations of repeated layers: those of the first ones are computed again, of the others some
move and some stay. By simulated time, with few of the mixes judged. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hetmem.planner.activations import moving
from hetmem.planner.search import Judged, Setting, judged, not_whole, whole_device
from hetmem.planner.workload import Workload
from hetmem.schedule.placement import Capacities
from hetmem.schedule.update_split import WORTH

_HOME_PARTS = (0.5, 1.0)
"""Of the homes of states that are given room on the device by activations that move."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A `workload` whose first `recomputed` layers are checkpointed, and of which something may move; what it runs
    within, and the seconds of a step."""

    recomputed: int
    workload: Workload
    capacities: Capacities
    seconds: float

    def told(self, layers: str, count: int) -> dict[str, Any]:
        """What a plan says of it, of the `count` layers that the expression `layers` lists."""
        moved = sum(move.nbytes for move in self.workload.moves)
        kept = sum(each.nbytes for each in self.workload.saved) - moved
        return {"of": layers, "count": count, "recomputed": self.recomputed, "moved_bytes": moved, "kept_bytes": kept}


def cheapest_mixes(
    kept: Callable[[int], Workload | None], layers: int, asked: Setting
) -> tuple[Mix | None, Mix | None]:
    """The mixes with the shortest step: of those that recompute nothing, and of those that do, which is shorter; None
    where what `activations="auto"` does by default is as good, or the former. `kept(count)` is the workload with the
    first `count` of `layers` checkpointed, and nothing moved.
    """

    def judge(count: int, home_part: float = 0.0) -> Iterator[Mix]:
        workload = kept(count)
        if workload is None:
            return
        for setting in dict.fromkeys((asked, not_whole(workload, asked) if home_part else whole_device(asked))):
            made = moving(workload, setting.capacities, all_leave=False, by_the_caller=False, home_part=home_part)
            found = judged(made, setting)
            if isinstance(found, Judged):
                yield Mix(count, made, setting.capacities, found.result.seconds)

    plain = kept(0)
    assert plain is not None
    as_asked = next((mix for mix in judge(0) if mix.capacities == asked.capacities), None)
    if as_asked is not None and WORTH * as_asked.seconds <= asked.compute_seconds(plain):
        return None, None
    moves = _shortest(as_asked, judge(0))
    for home_part in _HOME_PARTS:
        moves = _shortest(moves, judge(0, home_part))
    best = moves
    for count in sorted({layers * part // 4 for part in range(1, 5)} - {0}):
        best = _shortest(best, judge(count))
    for home_part in _HOME_PARTS if best is not moves else ():
        assert best is not None
        best = _shortest(best, judge(best.recomputed, home_part))
    return None if moves is as_asked else moves, None if best is moves else best


def _shortest(best: Mix | None, others: Iterable[Mix]) -> Mix | None:
    """`best`, unless one of `others` is worth doing in its place."""
    for other in others:
        if best is None or other.seconds < WORTH * best.seconds:
            best = other
    return best
