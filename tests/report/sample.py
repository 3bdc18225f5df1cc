"""A report as it is saved, of a run that never was."""

from __future__ import annotations

from typing import Any

from tests.report.tested import (
    files,
)

LINKS = ("host_to_device", "device_to_host", "nvme_read", "nvme_write")

EMPTY_TIMELINE: dict[str, Any] = {
    "covers": "step",
    "seconds": 2.0,
    "segments": [],
    "launched": [],
    "operators": [],
    "moments": {"at_us": [], "operator": [], "blocks": []},
    "memory": {},
    "blocks": [],
    "copies": {"block": [], "tier": [], "from_us": [], "valid_us": [], "until_us": []},
    "transfers": {"link": [], "block": [], "from_us": [], "until_us": [], "bytes": []},
    "stalls": {"block": [], "from_us": [], "until_us": []},
    "faults": {"block": [], "at_us": []},
    "updates": {"what": [], "from_us": [], "until_us": []},
}
_TIER = {"capacity_bytes": 100, "peak_bytes": 50, "used_bytes": 50, "homes": {}}
SAMPLE: dict[str, Any] = {
    "schema": files.SCHEMA,
    "schema_version": files.SCHEMA_VERSION,
    "created_at": "2026-01-01T00:00:00+00:00",
    "model": "Sample",
    "device": "simulated device",
    "hardware": None,
    "options": {"mixed_precision": None, "activations": "keep", "sanitize": False, "optimizers": []},
    "versions": {"hetmem": "0", "torch": "2", "python": "3"},
    "history": {"of": "step", "seconds": [2.0], "stall_seconds": [0.0], "tokens": [0]},
    "parameters": 10,
    "steps": 2,
    "tiers": {"device": {**_TIER, "chunk_peak_bytes": 40}, "host": _TIER, "nvme": _TIER},
    "links": {link: {"bytes": 1, "seconds": 0.0} for link in LINKS},
    "fetches": 0,
    "evictions": 0,
    "faults": 0,
    "staging_faults": 0,
    "stall_seconds": 0.0,
    "host_wait_seconds": 0.0,
    "chunks": 1,
    "chunk_bytes": 4096,
    "chunk_waste": 0.0,
    "bytes_per_parameter": 16.0,
    "missing": [],
    "step": {
        "of": "step",
        "seconds": 2.0,
        "tokens": 0,
        "tokens_per_second": 0.0,
        "terms": {"compute": 1.0, **dict.fromkeys(LINKS, 0.5), "host_optimizer": 0.5},
        "binding": "compute",
        "overlap": 0.5,
        "exposed_seconds": {},
        "bytes": dict.fromkeys(LINKS, 1),
        "stall_seconds": 0.0,
        "host_wait_seconds": 0.0,
        "caught_up_seconds": 0.0,
        "faults": 0,
        "moments": 0,
        "nvme_written_bytes_per_day": 0,
        "sentence": "Compute binds.",
    },
    "timeline": None,
}
