"""What may stand in the file of a plan: the kind of every field, and what of it a run or a reader relies on.

Pure: a name and a value in, what was expected out. It raises nothing, and knows no plan.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hetmem.schedule.prefetch import Prefetch

MARGIN_SHARE = 0.05
"""Of the planned peak of a tier: so much more a run is given."""
TIERS = ("device", "host", "nvme")
OPTIONS: dict[str, tuple[str | bool, ...]] = {
    "overlap": ("off", "backward", "forward"),
    "gradients": ("visible", "streamed"),
    "moments": ("float32", "bfloat16", "8bit"),
    "stochastic_rounding": (False, True),
}
"""What a plan knows of `hetmem.AdamW`; the first of each is the default."""

TUPLES = ("reasons", "advice", "nvme_directories", "alternatives", "approximations", "at_peak", "setup")
_NUMBER, _NULL = (float, int), type(None)
_NUMBERS = ("terms", "link_bytes", "activation_bytes", "missing_bytes")
"""Of each key a number."""
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "hardware", "peak_operator"), (str,)),
    **dict.fromkeys(("fits", "checkpointing", "inference"), (bool,)),
    **dict.fromkeys(("mixed_precision", "profile_name", "binding"), (str, _NULL)),
    **dict.fromkeys(("prefetch", "streaming", "profile", "combined"), (dict, _NULL)),
    **dict.fromkeys(("device_update_share", "streamed_update_share", "chunk_waste"), _NUMBER),
    "home_copies": (bool, _NULL),
    **dict.fromkeys(("rows", "tokens", "parameters", "micro_batches", "slot_bytes", "flops"), (int,)),
    **dict.fromkeys(("largest_parameters", "logits_bytes"), (int,)),
    **dict.fromkeys(("chunk_bytes", "device_chunks", "compute_bound_rows"), (int, _NULL)),
    **dict.fromkeys(("step_seconds", "stall_seconds"), (*_NUMBER, _NULL)),
    **dict.fromkeys(("capacity_bytes", "budget_bytes", "peak_bytes", "role_bytes", "optimizer", *_NUMBERS), (dict,)),
    **dict.fromkeys(TUPLES, (list, tuple)),
}
_MOST = 1e40
_OF_ALTERNATIVES: dict[str, tuple[type, ...]] = {
    "advice": (str,),
    "micro_batches": (int,),
    "step_seconds": _NUMBER,
    "activation_bytes": (int,),
}


def expected(name: str, value: Any) -> str | None:
    """What the field `name` of a plan should be; None if `value` is that."""
    kinds = _KINDS[name]
    if not _is(value, kinds):
        return " or ".join("null" if kind is _NULL else kind.__name__ for kind in kinds)
    if not _is_sound(value):
        return "numbers of zero or more"
    if name == "mixed_precision" and value not in (None, "bfloat16", "float16"):
        return "bfloat16, float16 or null"
    if name == "prefetch" and value is not None:
        whole = all(type(number) is int and number > 0 for number in value.values())
        if set(value) != {spec.name for spec in fields(Prefetch)} or not whole:
            return "uses_ahead and in_flight, whole numbers above zero"
    if name in _NUMBERS and not all(_is(number, _NUMBER) for number in value.values()):
        return "a number for each"
    if name == "streaming" and value is not None:
        names = ("share", "step_seconds", "host_step_seconds")
        return None if all(_is(value.get(key), _NUMBER) for key in names) else f"numbers for {', '.join(names)}"
    if name == "optimizer" and any(value[option] not in OPTIONS.get(option, ()) for option in value):
        return "at most " + " and ".join(
            f"{option} ({' or '.join(map(str, known))})" for option, known in OPTIONS.items()
        )
    if name == "at_peak":
        return None if all(_is(v, (dict,)) and _is(v.get("bytes"), (int,)) for v in value) else "objects with bytes"
    if name in ("alternatives", "approximations"):
        sound = all(isinstance(v, dict) and all(_is(v.get(k), of) for k, of in _OF_ALTERNATIVES.items()) for v in value)
        return None if sound else f"objects with {', '.join(_OF_ALTERNATIVES)}"
    if name in TUPLES and not all(isinstance(text, str) for text in value):
        return "a list of strings"
    return _of_tiers(name, value)


def _of_tiers(name: str, value: Any) -> str | None:
    kind = {"capacity_bytes": int, "budget_bytes": int, "peak_bytes": int, "role_bytes": dict}.get(name)
    if kind is None:
        return None
    if not all(type(value.get(tier)) is kind for tier in TIERS):
        return f"one {kind.__name__} each for {', '.join(TIERS)}"
    if name == "role_bytes" and not all(_is(n, (int,)) for tier in TIERS for n in value[tier].values()):
        return "whole numbers of bytes by role"
    return None


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """As `isinstance`, but that True and False are no numbers."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_sound(value: Any) -> bool:
    """Whether all numbers in `value` are such as a plan has: none below zero, NaN or beyond all bounds."""
    if isinstance(value, dict):
        return all(map(_is_sound, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_sound, value))
    return not isinstance(value, (int, float)) or 0 <= value <= _MOST
