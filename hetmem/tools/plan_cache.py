"""Keeps plans of configuration files in the user's cache directory, by the content of all that they follow from.

A file there is the plan as `Plan.save` writes it; one that is damaged counts as missing. The directory is the user's
alone, or nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import hetmem
from hetmem.base import config
from hetmem.base.hardware import HardwareProfile
from hetmem.base.whole_files import publish, read_regular
from hetmem.planner import Plan, PlanError

MOST_PLANS = 64
"""The most plans that are kept, those that were used last: some 20 KiB each, and at most 4 MiB."""


def key_of(options: Mapping[str, Any], profile: HardwareProfile) -> str | None:
    """Return the name of the plan that follows from the `options` of `hetmem plan`, the content of the configuration
    that they name, and `profile`, with these versions of the code that plans. None where it follows from more: from the
    user's functions, or a real step."""
    if not options["hf_config"] or options["real"] or ":" in (options["loss"] or ""):
        return None
    asked = {name: value for name, value in sorted(options.items()) if name not in _NOT_PLANNED}
    digest = hashlib.sha256(json.dumps([config.VERSION, *_versions(), asked, profile.to_dict()]).encode())
    with suppress(OSError, ValueError):  # the planner says what is wrong with it
        for content in (read_regular(options["hf_config"], _MOST_CONFIG), *_sources()):
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()
    return None


_NOT_PLANNED = frozenset({"command", "run", "output", "write", "hf_config", "hardware", "gradients"})
_MOST_CONFIG = 1 << 24


def _versions() -> Iterator[str]:
    for name in ("torch", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _sources() -> Iterator[bytes]:
    """Yield the sources of hetmem, which change without a version where it is developed."""
    folder = Path(hetmem.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        yield path.read_bytes()


def kept(key: str | None) -> Plan | None:
    """Return the plan that was kept under `key`, or None. A damaged file counts as none."""
    folder = _folder()
    if folder is None or key is None:
        return None
    path = folder / f"{key}.json"
    try:
        plan = Plan.load(path)
    except (PlanError, OSError):
        return None
    with suppress(OSError):
        os.utime(path)
    return plan


def keep(key: str | None, plan: Plan) -> None:
    """Keep `plan` under `key`, if there is one, and drop those that were not used for the longest time. Errors of the
    disk are dropped, as the next command only takes longer."""
    folder = _folder()
    if folder is None or key is None:
        return
    with suppress(OSError):
        publish(folder / f"{key}.json", json.dumps(plan.to_dict()))
        found = sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime_ns, reverse=True)
        for path in found[MOST_PLANS:]:
            path.unlink(missing_ok=True)


def _folder() -> Path | None:
    """Return the directory of plans, made if it is missing; None if it cannot be made, or others may write to it."""
    folder = config.plan_cache_directory()
    if folder is None:
        return None
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return folder
    return None
