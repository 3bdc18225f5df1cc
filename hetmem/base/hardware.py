"""Profiles of a machine: rates, latencies and memory sizes, written by a probe or by hand, with their sources.

Pure: turns text and dicts into a checked `HardwareProfile`. Reads no files and measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from hetmem.base.json_files import parse_json
from hetmem.errors import HetmemError

PROFILE_VERSION = 1
_T = TypeVar("_T")


class ProfileError(HetmemError, ValueError):
    """A hardware profile is malformed; the message names the field, what was expected and what it got."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A link or a disk in one direction: a transfer of n bytes takes `latency_seconds + n / bytes_per_second`.

    `by_the_caller`: no copy engine; the thread that needs a copy makes it itself (a simulated device).
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    by_the_caller: bool = False

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a transfer of `nbytes` on an idle link."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The accelerator. `matrix_flops`: reached floating-point operations per second by dtype name ("bfloat16").

    `operator_seconds`: the cost of launching an operator, beside its work; `allocator_share`: the part of the memory
    that is lost to fragmentation.
    """

    memory_bytes: int
    bytes_per_second: float
    matrix_flops: Mapping[str, float] = field(hash=False)
    operator_seconds: float = 5e-6
    allocator_share: float = 0.0

    def flops_per_second(self, dtype: str) -> float:
        """Return the matrix rate of `dtype`, or that of the slowest known one."""
        return self.matrix_flops.get(dtype, min(self.matrix_flops.values()))


@dataclass(frozen=True, slots=True)
class HostProfile:
    """The host. `copy_bytes_per_second` counts bytes copied (each read and written once); `update_bytes_per_second`
    counts all traffic of the optimizer's update, 28 bytes a parameter, by all its threads, and
    `update_core_bytes_per_second` by one; zero where that was not measured. `beside_updates`: how many times as long
    what the training thread does takes while other threads update; 1 where it was not measured.
    `ranks_copy_bytes_per_second` counts bytes that processes copy from one memory at once, in all, of the number of
    processes with most; `page_lock_bytes_per_second`: of memory that processes share; zero where that was not measured.
    """

    memory_bytes: int
    cores: int
    copy_bytes_per_second: float
    update_bytes_per_second: float
    numa_nodes: int = 1
    update_core_bytes_per_second: float = 0.0
    beside_updates: float = 1.0
    ranks_copy_bytes_per_second: float = 0.0
    page_lock_bytes_per_second: float = 0.0

    @property
    def traffic_bytes_per_second(self) -> float:
        """The most bytes read and written that were measured of the host's memory."""
        return max(self.update_bytes_per_second, 2 * self.copy_bytes_per_second)

    @property
    def ranks_traffic_bytes_per_second(self) -> float:
        """The most bytes read and written that ranks reach at once; where that was not measured, those of one."""
        if not self.ranks_copy_bytes_per_second:
            return self.traffic_bytes_per_second
        return max(self.update_bytes_per_second, 2 * self.ranks_copy_bytes_per_second)

    @property
    def shared_update_bytes_per_second(self) -> float:
        """The rate of an update while the thread that trains works on something else: what the other cores reach."""
        others = max(1, self.cores - 1)
        one = self.update_core_bytes_per_second or self.update_bytes_per_second / self.cores
        return min(self.update_bytes_per_second, others * one)


@dataclass(frozen=True, slots=True)
class ThreadCosts:
    """The cost of hetmem itself on the training thread, in seconds; zero where it was not measured.

    `call_seconds`: for each call of a function of torch, or of a module, within a forward; `use_seconds`: beyond that
    for each operator that uses streamed parameters; `gradient_seconds`: for each weight that autograd unpacks, and for
    each gradient; `transfer_seconds`: for submitting a transfer; `queue_seconds`: for each parameter whose update is
    queued (a step queues all before it updates the first); `update_seconds`: for each parameter that is updated, and
    `chunk_seconds` for each chunk. A plan adds them to the compute time, on a GPU too: plans that took them as hidden
    behind compute were further from measured runs.
    """

    use_seconds: float = 0.0
    transfer_seconds: float = 0.0
    update_seconds: float = 0.0
    chunk_seconds: float = 0.0
    call_seconds: float = 0.0
    gradient_seconds: float = 0.0
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One machine. `both_ways_bytes_per_second`: the sum of the rates of both directions of the device's link at once.

    `nvme_both_ways_bytes_per_second`: the total rate of a disk that reads and writes equal amounts at once; zero where
    it was not measured: reads and writes are then taken as independent. `sources` says for each figure (or group of
    figures) where it comes from.
    """

    name: str
    device: DeviceProfile
    host: HostProfile
    host_to_device: Rate
    device_to_host: Rate
    nvme_read: Rate
    nvme_write: Rate
    both_ways_bytes_per_second: float
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    thread: ThreadCosts = field(default_factory=ThreadCosts)
    nvme_both_ways_bytes_per_second: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Read a profile from JSON that `to_json` or a person wrote. Raises `ProfileError`."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ProfileError(f"a hardware profile must be JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> HardwareProfile:
        """Read a profile from the dict that `to_dict` returned. Raises `ProfileError`."""
        if not isinstance(data, Mapping):
            raise ProfileError(f"a hardware profile must be an object of named fields, got {data!r}")
        version = data.get("version")
        if version != PROFILE_VERSION:
            raise ProfileError(f"hardware profile: version: expected {PROFILE_VERSION}, got {version!r}")
        return _read(cls, {key: value for key, value in data.items() if key != "version"}, "")

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain numbers, strings and dicts, with a version."""
        return {"version": PROFILE_VERSION, **asdict(self)}

    def to_json(self) -> str:
        """Return the profile as JSON, with units in the names."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _read(cls: type[_T], data: Any, path: str) -> _T:
    """Make an instance of the dataclass `cls` from `data`; every field is checked by its type."""
    where = path or "the profile"
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    hints = get_type_hints(cls)
    known = [spec.name for spec in fields(cls)]  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ProfileError(f"hardware profile: {where} has no field {key!r}; expected {', '.join(known)}")
    values = {}
    for spec in fields(cls):  # type: ignore[arg-type]
        name = f"{path}.{spec.name}" if path else spec.name
        if spec.name in data:
            values[spec.name] = _value(hints[spec.name], data[spec.name], name)
        elif spec.default is spec.default_factory:  # neither is given: both are MISSING
            raise ProfileError(f"hardware profile: {name} is missing")
    return cls(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    if is_dataclass(hint):
        return _read(hint, value, name)  # type: ignore[arg-type]
    if hint is str:
        if not isinstance(value, str):
            raise _wrong(name, "a string", value)
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value
    if hint is int or hint is float:
        return _number(value, name, whole=hint is int)
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    if hint == Mapping[str, str]:
        return {key: _value(str, item, f"{name}.{key}") for key, item in value.items()}
    if not value:
        raise _wrong(name, "at least one dtype", value)
    return {key: _number(item, f"{name}.{key}", whole=False) for key, item in value.items()}


def _number(value: Any, name: str, *, whole: bool) -> float:
    """Return `value` if it is plausible for `name`: rates and sizes above zero, latencies zero or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MOST:  # NaN is not
        raise _wrong(name, "a number", value)
    may_be_zero = name.endswith(_MAY_BE_ZERO)
    if value < 0 or (value == 0 and not may_be_zero):
        raise _wrong(name, "a number of zero or more" if may_be_zero else "a number above zero", value)
    if whole and value != int(value):
        raise _wrong(name, "a whole number", value)
    for ending, least, most, unit in _PLAUSIBLE:
        if name.endswith(ending) or name.startswith(f"device.{ending}."):
            if value and not least <= value <= most:
                raise _wrong(name, f"{unit}, {least:g} to {most:g}", value)
            break
    return int(value) if whole else float(value)


_MOST = 1e300
_MAY_BE_ZERO = (
    "_seconds",
    "memory_bytes",
    "allocator_share",
    "nvme_both_ways_bytes_per_second",
    "update_core_bytes_per_second",
    "ranks_copy_bytes_per_second",
    "page_lock_bytes_per_second",
)
_PLAUSIBLE = (
    ("memory_bytes", 1 << 20, 1e15, "bytes"),
    ("bytes_per_second", 1e4, 1e15, "bytes a second"),
    ("matrix_flops", 1e6, 1e19, "floating-point operations a second"),
    ("_seconds", 0, 10, "seconds"),
    ("beside_updates", 1, 100, "a factor"),
    ("allocator_share", 0, 0.9, "a share"),
)
"""Figures out of these ranges must be in another unit (GB/s, TFLOP/s, microseconds)."""


def _wrong(name: str, expected: str, value: Any) -> ProfileError:
    return ProfileError(f"hardware profile: {name}: expected {expected}, got {value!r}")
