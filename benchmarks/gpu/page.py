"""The page of a run, as Markdown and HTML: each number beside its ceiling and beside what the plan foretold.

It reads the lines that stages have written, and measures nothing: `python -m benchmarks.gpu.page FOLDER` makes it anew.
"""

from __future__ import annotations

import html
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.notes import COMPLETE, lines_of
from benchmarks.gpu.stages import STAGES

HEAD = ("what", "measured", "ceiling", "of the ceiling", "planned", "plan is off by", "more")
READ = (
    "A ceiling is the best that the number could be on this machine: of a rate the link's own, of a time what the "
    "longest of compute, links and host alone would take. Of the ceiling: 1.00 is the best, for rates and times alike. "
    "Planned is what hetmem.plan foretold from rates measured in the same run, or, where these are not there, from the "
    "shipped profile. A dash: there is none, or it is not known."
)
Row = tuple[str, ...]


def write(folder: Path, out: Path | None = None) -> None:
    """Write `folder`.md and `folder`.html, into `out` or beside `folder`."""
    out = folder.parent if out is None else out
    machine = json.loads((folder / "machine.json").read_text())
    found = lines_of(folder, [stage.name for stage in STAGES])
    for ending, text in ((".md", markdown(machine, found)), (".html", as_html(machine, found))):
        new = out / f".{folder.name}{ending}.new"
        new.write_text(text)
        os.replace(new, out / f"{folder.name}{ending}")  # whoever ends us leaves the old page or the new one


def rows_of(lines: list[dict[str, Any]]) -> list[Row]:
    """A row of `HEAD` for each number and each fact, the last one of each name."""
    last = {line["name"]: line for line in lines if "name" in line}
    return [row for name, line in last.items() for row in _row(name, line)]


def _row(name: str, line: dict[str, Any]) -> Iterator[Row]:
    if "text" in line:
        yield (name, line["text"], "-", "-", "-", "-", "")
    elif "skipped" in line:
        yield (name, "not measured", "-", "-", "-", "-", line["skipped"])
    elif "failed" in line:
        yield (name, "failed", "-", "-", "-", "-", line["failed"])
    elif "value" in line:
        value, unit, ceiling, planned = (line.get(key) for key in ("value", "unit", "ceiling", "planned"))
        of_ceiling = "-" if not (ceiling and value) else _figure(_share(value, ceiling, unit), 2)
        off = "-" if not (planned and value) else f"{100 * (planned / value - 1):+.0f} %"
        more = ", ".join(f"{key} {_said(what)}" for key, what in line.get("details", {}).items())
        figures = (f"{_figure(value)} {unit}", _figure(ceiling), of_ceiling, _figure(planned), off)
        yield (name, *figures, more)


def _share(value: float, ceiling: float, unit: str) -> float:
    """1 is the best. Of times the ceiling is the least, of rates the most."""
    return value / ceiling if "/s" in unit else ceiling / value


def _figure(number: Any, places: int | None = None) -> str:
    if number is None:
        return "-"
    if not isinstance(number, (int, float)):
        return str(number)
    return f"{number:.{places}f}" if places is not None else f"{number:,.4g}" if abs(number) < 1e4 else f"{number:,.0f}"


def _said(what: Any) -> str:
    if isinstance(what, dict):
        return f"({', '.join(f'{key} {_said(each)}' for key, each in what.items())})"
    return _figure(what) if isinstance(what, float) else what if isinstance(what, str) else json.dumps(what)


def status(lines: list[dict[str, Any]]) -> str:
    """How the stage ended, in a sentence."""
    failed = sum("failed" in line for line in lines)
    ended = lines[-1].get("ended", "under way, or ended from outside") if lines else "not run"
    count = sum("value" in line for line in lines)
    return f"{ended}; {count} numbers" + (f", {failed} failures" if failed else "")


def failures(lines: list[dict[str, Any]]) -> list[str]:
    """The first traceback as it is; of later failures the row in the table says enough, and the .jsonl all."""
    return [line["traceback"] for line in lines if line.get("traceback")][:1]


def _facts(machine: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if value and name != "remark"}


def markdown(machine: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> str:
    """The page as Markdown."""
    lines = [f"# {machine['GPU']}, {machine['date']}", ""]
    lines += [f"**{machine['remark']}**", ""] if machine.get("remark") else []
    lines += [f"- {name}: {_said(value)}" for name, value in _facts(machine).items()] + ["", READ]
    for stage in STAGES:
        if stage.name not in found:
            continue
        lines += ["", f"## {stage.name}", "", f"{stage.about} Ended: {status(found[stage.name])}.", ""]
        rows = rows_of(found[stage.name])
        lines += _table(rows) if rows else []
        for traceback in failures(found[stage.name]):
            lines += ["", "The first failure:", "", "```", traceback.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *(f"| {' | '.join(row)} |" for row in cells)]


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;margin:.5rem 0}td,th{border-bottom:1px solid #ddd;padding:.25rem .6rem;
text-align:left;vertical-align:top}td:nth-child(2){overflow-wrap:anywhere}td:first-child{min-width:14rem}
td:nth-child(n+3):nth-child(-n+6){white-space:nowrap;font-variant-numeric:tabular-nums}
td:last-child{color:#666;font-size:13px}.bad{color:#b00020}.remark{background:#fff3cd;padding:.5rem 1rem}
pre{background:#f6f6f6;padding:.7rem;overflow:auto;font-size:12px}"""


def as_html(machine: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> str:
    """The page as one file of HTML, which loads nothing."""
    title = html.escape(f"{machine['GPU']}, {machine['date']}")
    parts = [f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>']
    parts += [f"<h1>{title}</h1>"]
    parts += [f'<p class="remark">{html.escape(machine["remark"])}</p>'] if machine.get("remark") else []
    facts = "".join(f"<li>{html.escape(f'{name}: {_said(value)}')}</li>" for name, value in _facts(machine).items())
    parts += [f"<ul>{facts}</ul><p>{html.escape(READ)}</p>"]
    for stage in STAGES:
        if stage.name not in found:
            continue
        lines = found[stage.name]
        mark = "" if lines and lines[-1].get("ended") == COMPLETE else ' class="bad"'
        parts += [f"<h2>{stage.name}</h2><p>{html.escape(stage.about)} <span{mark}>Ended: "]
        parts += [f"{html.escape(status(lines))}.</span></p>"]
        head = "".join(f"<th>{name}</th>" for name in HEAD)
        parts += [f"<table><tr>{head}</tr>", *map(_html_row, rows_of(lines)), "</table>"]
        parts += [f"<p>The first failure:</p><pre>{html.escape(text)}</pre>" for text in failures(lines)]
    return "\n".join(parts) + "</html>\n"


def _html_row(row: Row) -> str:
    mark = ' class="bad"' if row[1] in ("failed", "not measured") else ""
    return f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
