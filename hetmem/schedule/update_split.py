"""Where updates run, if bytes may go anywhere: shares such that the slowest of all links and memories is done soonest.

Pure: costs in; shares out. A run asks here how much to stream (`optim.update_placement`), and a plan what that would
bring. What lives on the device is `schedule.resident_share`'s: idle memory of the device is filled with homes,
whatever the shares.

Note "busy": a resource is busy for the bytes that go through it. The cores of the host have what they update. Its
memory has that too, and whatever crosses the link, which is read or written there; its rate is twice that of a copy.

Note "balance": with shares h + s + r = 1 (host, streamed, resident) each resource is busy for a linear function of the
shares, and all are busy at the same time. The least of the greatest of linear functions over a polygon lies where two
of the lines that bound it, or along which two functions are equal, cross (D. Bertsimas, J. Tsitsiklis, "Introduction to
Linear Optimization", 1997, chapter 2). There are few of them, so that all are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from hetmem.schedule.hardware import HardwareProfile

_CLOSE = 1e-9
WORTH = 0.97
"""What is not done by default has to be this much faster: streaming states takes slots on the device and a second way
through every step, and other settings have to be told to a run."""

UPDATE_BYTES = 28
"""Traffic of the memory in which a float32 parameter is updated: 16 bytes read, 12 written."""
_STATE_BYTES = 12
"""Of a float32 parameter and its two moments: what crosses a link each way if its states are streamed."""
_GRADIENT_BYTES = 4
"""Of its gradient, which comes back with the states if it has gone home."""


class Way(Enum):
    """Where a parameter is updated, and where its states live meanwhile."""

    HOST = "host"
    STREAMED = "streamed"
    RESIDENT = "resident"


Costs = Mapping[Way, Mapping[str, float]]
"""For each way, the seconds that each resource is busy if all parameters are updated so."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of all parameters, which add up to one. `seconds` is how long the slowest resource is busy, `slowest`."""

    host: float
    streamed: float
    resident: float
    seconds: float
    slowest: str


def update_costs(
    hardware: HardwareProfile,
    parameters: int,
    *,
    copy_bytes: float,
    gradient_bytes: float,
    fetched_bytes: float = 0.0,
    home_copy_bytes: float = 0.0,
    gradients_stay: bool = False,
) -> dict[Way, dict[str, float]]:
    """The costs of one step of AdamW over `parameters` float32 parameters, in seconds.

    Bytes for each parameter: `copy_bytes` of the copy that operators see, as it crosses the link, `gradient_bytes` of
    the gradient that does; `fetched_bytes` of copies that a step brings to the device beside those that an update
    renews (micro-batches times two, where they do not fit), which a parameter whose home is on the device never needs.
    With streamed states the gradient comes back to the device, or `gradients_stay` there, the copy is made there, and
    `home_copy_bytes` of it go home with the states.
    """
    up, down = hardware.host_to_device.bytes_per_second, hardware.device_to_host.bytes_per_second
    both, host = hardware.both_ways_bytes_per_second, hardware.host
    returned = 0 if gradients_stay else _GRADIENT_BYTES
    memory = max(2 * host.copy_bytes_per_second, host.update_bytes_per_second)
    moved = {  # to the device, to the host, through the cores of the host, of device memory
        Way.HOST: (fetched_bytes + copy_bytes, gradient_bytes, UPDATE_BYTES, 2 * copy_bytes),
        Way.STREAMED: (
            fetched_bytes + _STATE_BYTES + returned,
            (0.0 if gradients_stay else gradient_bytes) + _STATE_BYTES + home_copy_bytes,
            0,
            UPDATE_BYTES + 2 * _STATE_BYTES + returned + copy_bytes,
        ),
        Way.RESIDENT: (0.0, 0.0, 0, UPDATE_BYTES + copy_bytes),
    }
    return {
        way: {
            "host_to_device": parameters * to / up,
            "device_to_host": parameters * back / down,
            "both_ways": parameters * (to + back) / both,
            "host_cores": parameters * on_host / host.update_bytes_per_second,
            "host_memory": parameters * (on_host + to + back) / memory,
            "device_memory": parameters * in_device / hardware.device.bytes_per_second,
        }
        for way, (to, back, on_host, in_device) in moved.items()
    }


def best_shares(costs: Costs, most_resident: float, base: Mapping[str, float] | None = None) -> Shares:
    """The shares whose slowest resource is done soonest, with at most `most_resident` on the device for good.

    `base`: seconds that a resource is busy with other things meanwhile (compute, say). A way that `costs` lacks is not
    taken. Of equally good shares those with most on the device. Raises ValueError if no shares are left.
    """
    base = base or {}
    bounds = {
        Way.HOST: 1.0 if Way.HOST in costs else 0.0,
        Way.STREAMED: 1.0 if Way.STREAMED in costs else 0.0,
        Way.RESIDENT: min(1.0, max(0.0, most_resident)) if Way.RESIDENT in costs else 0.0,
    }
    if sum(bounds.values()) < 1:
        raise ValueError(f"no way is left for a part of the parameters: at most {bounds} of them")
    resources = sorted({name for terms in costs.values() for name in terms} | set(base))
    found = [_judged(point, costs, base, resources) for point in _corners(costs, base, resources, bounds)]
    least = min(shares.seconds for shares in found)
    return max(
        (shares for shares in found if shares.seconds <= least * (1 + _CLOSE)),
        key=lambda shares: (shares.resident, shares.host),
    )


def streamed_part(costs: Costs, most_resident: float) -> float:
    """Of the parameters that do not live on the device, the part whose states are best streamed there for their update.
    None of them, unless what is slowest is done noticeably sooner so."""
    kept: Costs = {way: terms for way, terms in costs.items() if way is not Way.STREAMED}
    best = best_shares(costs, most_resident)
    if best.seconds >= WORTH * best_shares(kept, most_resident).seconds:
        return 0.0
    return best.streamed / (best.host + best.streamed)


def _judged(point: tuple[float, float], costs: Costs, base: Mapping[str, float], resources: list[str]) -> Shares:
    streamed, resident = point
    shares = {Way.HOST: 1 - streamed - resident, Way.STREAMED: streamed, Way.RESIDENT: resident}
    busy = {
        name: base.get(name, 0.0) + sum(share * costs.get(way, {}).get(name, 0.0) for way, share in shares.items())
        for name in resources
    }
    slowest = max(resources, key=busy.__getitem__)
    return Shares(max(0.0, shares[Way.HOST]), streamed, resident, busy[slowest], slowest)


def _corners(
    costs: Costs, base: Mapping[str, float], resources: list[str], bounds: Mapping[Way, float]
) -> Iterator[tuple[float, float]]:
    """All (streamed, resident) within `bounds` at which the least of the greatest can lie."""
    lines = [(1.0, 0.0, 0.0), (1.0, 0.0, bounds[Way.STREAMED]), (0.0, 1.0, 0.0), (0.0, 1.0, bounds[Way.RESIDENT])]
    lines += [(1.0, 1.0, 1.0), (1.0, 1.0, 1.0 - bounds[Way.HOST])]
    terms = [_line(costs, base, name) for name in resources]
    lines += [(a[0] - b[0], a[1] - b[1], b[2] - a[2]) for a, b in combinations(terms, 2)]
    for (a, b, c), (d, e, f) in combinations(lines, 2):
        determinant = a * e - b * d
        if determinant:
            streamed, resident = (c * e - b * f) / determinant, (a * f - c * d) / determinant
            within = -_CLOSE <= streamed <= bounds[Way.STREAMED] + _CLOSE
            within = within and -_CLOSE <= resident <= bounds[Way.RESIDENT] + _CLOSE
            if within and 1 - bounds[Way.HOST] - _CLOSE <= streamed + resident <= 1 + _CLOSE:
                yield max(0.0, streamed), max(0.0, resident)


def _line(costs: Costs, base: Mapping[str, float], name: str) -> tuple[float, float, float]:
    """The busy seconds of `name` as a * streamed + b * resident + c."""
    host, streamed, resident = (costs.get(way, {}).get(name, 0.0) for way in (Way.HOST, Way.STREAMED, Way.RESIDENT))
    return streamed - host, resident - host, host + base.get(name, 0.0)
