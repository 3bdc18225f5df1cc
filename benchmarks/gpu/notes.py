"""What a stage finds, a line of JSON for each number, written at once: who ends the stage takes nothing away.

It knows files and time, not what is measured. A line has `stage`, `at` (seconds since the stage began), `name` and one
of: `value` with `unit`, and where there is one `ceiling`, `planned` and `details`; `text`; `failed` with the whole
`traceback`; `skipped`. The last line of a stage has `ended`. A later line takes the place of an earlier of its name.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COMPLETE = "complete"
PROFILE = "profile.json"
"""The file of a run's folder in which the hardware profile is that the stage `probe` has measured."""
_OUR_FOLDER = re.compile(re.escape(str(Path(__file__).parents[2])) + "/?")
_LIBRARIES = re.compile(r"/[^\s\"]*?/(?:site|dist)-packages/|/[^\s\"]*?/(?=python3\.\d+/|bin/python)")
_COLOURS = re.compile(r"(?:\x1b|\\u001b)\[[\d;]*m")


class Notes:
    """The lines of the stage called `stage`, in `folder`; it has `seconds`. `small`: take the least sizes.

    `through`: a module that starts Python's modules in the place of `python -m`, as the faked device needs it.
    """

    def __init__(self, folder: Path, stage: str, seconds: float, *, small: bool = False, through: str = "") -> None:
        self.folder, self.stage, self.small, self._through = folder, stage, small, through
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self.failures = 0

    def line(self, **what: Any) -> None:
        """Append a line, whole, to the stage's file."""
        at = round(time.monotonic() - self._begun, 3)
        append(self.folder, {"stage": self.stage, "at": at, **what})

    def number(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        ceiling: float | None = None,
        planned: float | None = None,
        **details: Any,
    ) -> None:
        """Write a measured number. `ceiling`: the best that it could be; `planned`: what hetmem's plan foretold."""
        known = {"ceiling": ceiling, "planned": planned, "details": details}
        self.line(name=name, value=value, unit=unit, **{key: what for key, what in known.items() if what})

    def text(self, name: str, text: object) -> None:
        """Write a fact that is no number."""
        self.line(name=name, text=str(text))

    def left(self) -> float:
        """Seconds until the stage is ended from outside."""
        return self._until - time.monotonic()

    def attempt(self, name: str, work: Callable[..., Any], *given: Any, needs: float = 1.0, **more: Any) -> Any:
        """What `work` returns, or None: what it raises is written, and the stage goes on, unless the device is dead.

        `needs`: seconds; where fewer are left it is not begun.
        """
        if self.left() < needs:
            self.line(name=name, skipped=f"{self.left():.0f} s were left, and it may take {needs:.0f}")
            return None
        try:
            return work(*given, **more)
        except Exception as error:
            self.failures += 1
            self.line(name=name, failed=_first_line(error), traceback=traceback.format_exc())
            self._end_if_dead(name)
            return None

    def _end_if_dead(self, name: str) -> None:
        """After an illegal access, and some other errors, a process can do nothing more on a GPU."""
        import torch

        try:
            torch.cuda.synchronize()
        except Exception as error:
            self.line(ended=f'the device does not work any more after "{name}": {_first_line(error)}')
            sys.exit(3)

    def program(self, module: str) -> list[str]:
        """The command that runs `module` of Python's in a process of its own."""
        return [sys.executable, "-m", *([self._through] if self._through else []), module]

    def rates(self) -> dict[str, float]:
        """Figures of a hardware profile that an earlier stage of this run has measured, by their dotted names."""
        try:
            found: dict[str, float] = json.loads((self.folder / "rates.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def keep_rates(self, rates: dict[str, float]) -> None:
        """Add to what `rates` gives to later stages."""
        (self.folder / "rates.json").write_text(json.dumps({**self.rates(), **rates}, indent=2) + "\n")


def append(folder: Path, line: dict[str, Any], before: str = "") -> None:
    """Add `line` to the file of its stage; it is on the disk when this returns. `before`: what ends a broken line."""
    with path_of(folder, line["stage"]).open("a") as file:
        file.write(f"{before}{without_paths(json.dumps(line, default=str))}\n")
        file.flush()
        os.fsync(file.fileno())


def without_paths(text: str) -> str:
    """Return `text` as it is published: paths of this machine, and colours, are left out."""
    for pattern in (_OUR_FOLDER, _LIBRARIES, _COLOURS):
        text = pattern.sub("", text)
    return text


def path_of(folder: Path, stage: str) -> Path:
    """The file of `stage`."""
    return folder / f"{stage}.jsonl"


def lines_of(folder: Path, stages: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """All lines that are whole, by stage."""
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in stages:
        path = path_of(folder, stage)
        if path.exists():
            found[stage] = [line for text in path.read_text().splitlines() for line in _parsed(text)]
    return found


def _parsed(text: str) -> list[dict[str, Any]]:
    """The line, unless its writer was ended within it."""
    try:
        return [json.loads(text)]
    except ValueError:
        return []


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:400]
