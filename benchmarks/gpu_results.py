"""The files that `benchmarks.gpu` leaves behind: JSON and Markdown. It measures nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any


def markdown(found: dict[str, Any]) -> str:
    lines = [f"# {found['environment']['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in found["environment"].items()]
    for part in found:
        if part != "environment":
            lines += ["", f"## {part}", "", "```json", json.dumps(found[part], indent=2), "```"]
    return "\n".join(lines) + "\n"


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
