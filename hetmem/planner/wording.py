"""Sentences of a plan's text: lines of at most 80 columns, numbers with a magnitude, what a generation takes. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from hetmem.base.units import format_seconds, format_size

LOGITS_SHARE = 0.25
"""Logits are told of from this share of the peak of activations on."""
_WIDTH = 80
_FULL_WRITES = 600
"""How many times its capacity a common drive is rated to be written."""
_DAY = 86400
TIMES = "times: seven steps measured on an H100 took 1.00 to 1.24 of what is planned"
"""How well times are known: what `benchmarks/planned_steps.py` prints."""


def wrapped(text: str, indent: str = "  ") -> str:
    """Return `text` in lines of at most 80 columns, all but the first with `indent` before them."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def count(number: float) -> str:
    """Format `number` with a letter for its magnitude: 70.6 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def as_source(value: int | bool | str | list[str]) -> str:
    """Return `value` as Python source; whole KiB, MiB or GiB as a string with the unit."""
    if isinstance(value, bool):
        return str(value)
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if isinstance(value, int) and value and value % size == 0:
            return f'"{value // size}{unit}"'
    return json.dumps(value)


def speed(flops: int, recomputed: int, seconds: float) -> str:
    """Return the rate of `flops` in `seconds`; if some of them are `recomputed`, also of those that are not."""
    rate, without = flops / seconds / 1e12, (flops - recomputed) / seconds / 1e12
    if not recomputed:
        return f"{rate:.1f} TFLOP/s"
    return f"{rate:.1f} TFLOP/s with recomputation, {without:.1f} without"


def drive_life(written: int, seconds: float, capacity: int) -> tuple[float, str]:
    """Return the bytes a day, and how long a drive of `capacity` bytes lasts, if `written` bytes take `seconds`."""
    daily = written / seconds * _DAY
    days = _FULL_WRITES * capacity / daily
    return daily, f"{days:.1f} days" if days < 10 else f"{days:.0f} days"


def between_line(found: Mapping[str, Any]) -> str:
    """Return a sentence on a checkpoint in the background, and on parking, from `Plan.between_steps`."""
    behind = "hides behind a step" if found["hides"] else "longer than a step"
    parked = f"; parking takes {format_seconds(found['park_seconds'])}" if found["parked_bytes"] else ""
    return wrapped(
        f"checkpoint: {format_size(found['saved_bytes'])} in {format_seconds(found['save_seconds'])} at the drive's "
        f"rate, {behind}{parked}"
    )


def drive_line(written: int, seconds: float, capacity: int) -> str:
    """Return what a step writes to a drive of `capacity` bytes, and how long that lasts."""
    daily, life = drive_life(written, seconds, capacity)
    return wrapped(
        f"NVMe: {format_size(written)} written a step, {format_size(daily)} a day; a drive of {format_size(capacity)} "
        f"that is rated for {_FULL_WRITES} full writes lasts {life}"
    )


def cache_line(generation: Mapping[str, Any]) -> str:
    """Return the bytes of keys and values, of a token and at the end."""
    tokens = generation["rows"] * (generation["prompt"] + generation["new_tokens"] - 1)
    total = generation["cache_bytes"]
    return wrapped(f"cache of keys and values: {format_size(total / tokens)} a token, {format_size(total)} at the end")


def generation_lines(generation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the seconds of a prompt and of a token, in a plan that fits."""
    rows, prompt = generation["rows"], generation["prompt"]
    prefill, token = generation["prefill_seconds"], generation["token_seconds"]
    yield f"  prefill: {format_seconds(prefill)}, {rows * prompt / prefill:.1f} tokens/s"
    if token is not None:
        each = "one token" if rows == 1 else f"one token of each of {rows} rows"
        yield f"  then {each}: {format_seconds(token)}, {rows / token:.1f} tokens/s"


def logits_line(model: str, nbytes: int) -> str:
    """Return what avoids the logits of a model of the class `model`, which take `nbytes` at the peak."""
    how = "a loss that is computed in chunks of tokens avoids them"
    if model.endswith(("ForCausalLM", "LMHeadModel")):
        how = "hetmem.chunked_loss(model) in place of the model's own loss avoids them (--loss chunked)"
    return wrapped(f"logits and their gradients are {format_size(nbytes)} of that: {how}")


def choice_line(choice: Mapping[str, Any], of_tokens: bool) -> str:
    """Return what one of `Plan.activation_choices` takes and lets fit; `of_tokens`: rows are sequences."""
    seconds = choice["step_seconds"]
    how = "does not fit" if seconds is None else f"{format_seconds(seconds)} a step"
    moved = f"{format_size(choice['moved_bytes'])} moved"
    moved += f", {format_size(choice['nvme_bytes'])} of it to NVMe" if choice["nvme_bytes"] else ""
    most = f"batches or sequences up to {choice['times']:.2f} times as large fit: {choice['rows']:,} rows"
    most += f", or a sequence of {choice['sequence']:,}" if of_tokens else ""
    kept = format_size(choice["kept_bytes"])
    return wrapped(f"activations={choice['choice']}: {how}, {moved}, {kept} kept; {most}")


def other_order_line(other: Mapping[str, Any], seconds: float, *, accumulates: bool) -> str:
    """Return what `other`, `Plan.other_order` of a plan of `seconds` a step that `accumulates` or not, takes."""
    name = "a loop over the micro-batches" if accumulates else "hetmem.accumulate (--accumulate)"
    if other["step_seconds"] is None:
        return wrapped(f"{name} does not fit")
    times, peak = other["step_seconds"] / seconds, format_size(other["device_peak_bytes"])
    moved = format_size(other["link_bytes"]["host_to_device"])
    took = f"{format_seconds(other['step_seconds'])} a step, {times:.2f} times this"
    return wrapped(f"{name}: {took}; {peak} of the device, {moved} a step to it")
