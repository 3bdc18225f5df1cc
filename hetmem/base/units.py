"""Converts bytes to text and back, and seconds to text. GiB is 2**30 bytes, GB is 10**9 bytes."""

from __future__ import annotations

import math
import re

from hetmem.errors import BudgetError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "k": 1 << 10,  # one letter is binary, as in `docker run --memory 20g` and `sbatch --mem=20G`
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}
_SPARKS = "▁▂▃▄▅▆▇█"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(size: int | str, what: str = "size") -> int:
    """Return the bytes of `size`: an int of bytes, or a number with a unit ("512MiB", "20GB", "1.5 TiB"; "20G" is GiB).

    Raises `BudgetError` (a ValueError) for a negative number, an unknown unit or anything else.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BudgetError(f"{what} must be an int of bytes or a string like '20GiB', got {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise BudgetError(f"{what} must not be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        known = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB (K, M, G, T are KiB, MiB, GiB, TiB)"
        raise BudgetError(f"{what} {size!r} is not a size: write a number and one of {known}, e.g. '20GiB'")
    nbytes = float(match[1]) * _UNITS[match[2].lower()]
    if nbytes == float("inf"):
        raise BudgetError(f"{what} must be a finite number of bytes, got {len(match[1])} digits")
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """Format `nbytes` in binary units: "1.50 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_enough(nbytes: int) -> str:
    """Format `nbytes` as `format_size` does, but rounded up: for bytes that an error asks for."""
    unit = next((unit for unit in (1 << 40, GIB, MIB, KIB) if nbytes >= unit), 1)
    return format_size(math.ceil(100 * nbytes / unit) / 100 * unit)


def format_seconds(seconds: float) -> str:
    """Format `seconds` with a unit: "1.25 s", "12.5 ms", "80 µs"."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Return the greatest multiple of `multiple` that is not above `value`."""
    return value // multiple * multiple


def sparks(seconds: list[float]) -> str:
    """Draw `seconds` as bars, the longest of them the highest."""
    longest = max(seconds, default=0.0)
    return "".join(_SPARKS[min(7, int(8 * each / longest))] for each in seconds) if longest else ""
