"""The shape of a saved plan: what each of its keys may hold. docs/schemas.md describes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, get_args

from hetmem.base.config import ActivationsName
from hetmem.base.schema import (
    FLAG,
    SchemaError,
    anything,
    list_of,
    number,
    one_of,
    or_null,
    record,
    table_of,
    text,
    whole,
)
from hetmem.schedule.blocks import Link
from hetmem.schedule.formats import FORMATS

TIERS = ("device", "host", "nvme")
RESOURCES = {
    "compute": "compute",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "update": "optimizer update",
    "decode": "decoding",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
}
"""The terms of a plan, and their names in its text."""

_BYTES = whole(0, 10**18)
_COUNT = whole(0, 10**18)
_SECONDS = number(0.0, 1e12, "seconds")
_SHARE = number(0.0, 1.0 + 1e-6, "a share")
_OF_TIERS = record(dict.fromkeys(TIERS, _BYTES))
_LINKS = tuple(link.value for link in Link)

_scale = number(0.0, 1e308)


def _loss_scale(value: Any) -> None:
    """Allow "dynamic", or a number."""
    if value != "dynamic":
        _scale(value)


_by_pattern = table_of(one_of(None, *FORMATS))


def _frozen(value: Any) -> None:
    """Allow null, a format of quantised weights, or such formats by patterns of names."""
    if isinstance(value, dict):
        _by_pattern(value)
    else:
        one_of(None, *FORMATS)(value)


_PLAN = record(
    {
        "model": text(1000),
        "hardware": text(1000),
        "parameters": _COUNT,
        "rows": _COUNT,
        "tokens": _COUNT,
        "micro_batches": whole(1, 10**9),
        "accumulate": FLAG,
        "other_order": or_null(
            record(
                {
                    "step_seconds": or_null(_SECONDS),
                    "device_peak_bytes": _BYTES,
                    "link_bytes": table_of(_BYTES, _LINKS),
                }
            )
        ),
        "checkpointing": FLAG,
        "mixed_precision": one_of(None, "bfloat16", "float16"),
        "frozen": _frozen,
        "fits": FLAG,
        "capacity_bytes": _OF_TIERS,
        "budget_bytes": _OF_TIERS,
        "peak_bytes": _OF_TIERS,
        "role_bytes": record(dict.fromkeys(TIERS, table_of(_BYTES))),
        "step_seconds": or_null(_SECONDS),
        "stall_seconds": or_null(_SECONDS),
        "terms": table_of(_SECONDS, RESOURCES),
        "binding": or_null(one_of(*RESOURCES)),
        "link_bytes": table_of(_BYTES, _LINKS),
        "flops": whole(0, 10**30),
        "recomputed_flops": whole(0, 10**30),
        "activations": one_of(*get_args(ActivationsName)),
        "activation_bytes": table_of(_BYTES, ("as written", "with checkpointing")),
        "activation_choices": list_of(
            record(
                {
                    "choice": text(100),
                    "step_seconds": or_null(_SECONDS),
                    "moved_bytes": _BYTES,
                    "kept_bytes": _BYTES,
                    "nvme_bytes": _BYTES,
                    "times": number(),
                    "rows": _COUNT,
                    "sequence": _COUNT,
                }
            )
        ),
        "layers": or_null(
            record({"of": text(), "count": _COUNT, "recomputed": _COUNT, "moved_bytes": _BYTES, "kept_bytes": _BYTES})
        ),
        "chunk_waste": _SHARE,
        "slot_bytes": _BYTES,
        "chunk_bytes": or_null(whole(1, 10**18)),
        "device_chunks": or_null(_BYTES),
        "home_copies": one_of(None, True, False),
        "device_update_share": _SHARE,
        "optimizer": record(
            {},
            {
                "overlap": one_of("backward", "forward"),
                "max_grad_norm": number(0.0, 1e308),
                "loss_scale": _loss_scale,
                "moments": one_of("bfloat16", "8bit"),
                "stochastic_rounding": one_of(True),
            },
        ),
        "approximations": list_of(record({"advice": text(), "step_seconds": _SECONDS})),
        "changes": list_of(text()),
        "as_asked": text(),
        "combined": anything,  # a plan, which is checked as it is made
        "inference": FLAG,
        "generation": or_null(
            record(
                {
                    "rows": _COUNT,
                    "prompt": _COUNT,
                    "new_tokens": _COUNT,
                    "cache_bytes": _BYTES,
                    "prefill_seconds": or_null(_SECONDS),
                    "token_seconds": or_null(_SECONDS),
                }
            )
        ),
        "between_steps": or_null(
            record(
                {
                    "saved_bytes": _BYTES,
                    "save_seconds": _SECONDS,
                    "hides": FLAG,
                    "parked_bytes": _BYTES,
                    "park_seconds": _SECONDS,
                    "wake_seconds": _SECONDS,
                }
            )
        ),
        "loss": one_of(None, "chunked"),
        "setup": list_of(text()),
        "at_peak": list_of(record({"what": text(), "bytes": _BYTES})),
        "peak_operator": text(),
        "logits_bytes": _BYTES,
        "compute_bound_rows": or_null(_COUNT),
        "compute_bound_micro_batches": or_null(_COUNT),
        "largest_parameters": _COUNT,
        "missing_bytes": table_of(_BYTES, TIERS),
        "reasons": list_of(text()),
        "advice": list_of(text()),
        "nvme_directories": list_of(text(4096)),
    }
)
_FITS = record(
    {"step_seconds": number(1e-12, 1e12, "seconds"), "stall_seconds": _SECONDS, "binding": one_of(*RESOURCES)},
    others=True,
)


def digest_of(data: Mapping[str, Any]) -> str:
    """Return what tells these fields of a plan from others."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_plan(data: Mapping[str, Any]) -> None:
    """Raise `SchemaError` unless `data` are the fields of a plan, `combined` aside, that agree with each other."""
    _PLAN(data)
    if not data["fits"]:
        return
    _FITS(data)
    if data["binding"] not in data["terms"]:
        raise SchemaError(f"expected one of the terms, {', '.join(data['terms'])}, got {data['binding']!r}").within(
            "binding"
        )
