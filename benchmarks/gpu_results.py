"""The files that `benchmarks.gpu` leaves behind, JSON and Markdown, and on what machine it was. It measures nothing."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from hetmem.tools.bench import Row, Transfers

ROOT = Path(__file__).parents[1]


def markdown(found: dict[str, Any]) -> str:
    lines = [f"# {found['environment']['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in found["environment"].items()]
    for part in found:
        if part != "environment":
            lines += ["", f"## {part}", "", *_section(found[part])]
    return "\n".join(lines) + "\n"


def _section(found: dict[str, Any]) -> list[str]:
    if "ceilings" not in found:
        return ["```json", json.dumps(found, indent=2), "```"]
    rows = tuple(Row(**{**row, "seconds": tuple(row["seconds"])}) for row in found["rows"])
    return [str(Transfers(**{**found, "rows": rows, "skipped": tuple(found["skipped"])}))]


def begun(environment: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What there is to add to: what was found on this device on the same day at the same commit, or nothing yet."""
    try:
        found: dict[str, Any] = json.loads(_target(environment, directory, ".json").read_text())
        same = found["environment"].get("commit") == environment.get("commit")
    except (OSError, ValueError, KeyError, AttributeError):
        same = False
    return {**(found if same else {}), "environment": environment}


def write(found: dict[str, Any], directory: Path) -> None:
    """As JSON and Markdown, named after the device and the day."""
    directory.mkdir(parents=True, exist_ok=True)
    for ending, text in ((".json", json.dumps(found, indent=2) + "\n"), (".md", markdown(found))):
        target = _target(found["environment"], directory, ending)
        new = target.with_name(f".{target.name}.new")
        new.write_text(text)
        os.replace(new, target)  # whoever ends us leaves the old file or the new one


def _target(environment: dict[str, Any], directory: Path, ending: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", environment["device"])  # "RTX 6000/8000" is a name too
    return directory / f"gpu-{name}-{environment['date']}{ending}"


def environment() -> dict[str, Any]:
    def said(*command: str) -> str:
        try:
            ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unknown ({type(error).__name__})"
        return ended.stdout.strip() or "unknown"

    return {
        "device": torch.cuda.get_device_name(),
        "device memory GiB": torch.cuda.get_device_properties(0).total_memory / (1 << 30),
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "commit": said("git", "rev-parse", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
    }
