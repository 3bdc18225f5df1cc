"""Writes reports as JSON with a versioned schema, as an HTML page or as a trace, atomically; and shows, converts and
compares saved ones.

It knows dicts and files; not the runtime, and not the meaning of the numbers.
"""

from __future__ import annotations

import errno
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any

from hetmem.base.json_files import read_json
from hetmem.base.schema import SchemaError, shown
from hetmem.base.whole_files import write_whole
from hetmem.report.shape import check_report
from hetmem.report.step import TERM_NAMES
from hetmem.report.text import comparison, made_with, table

SCHEMA = "hetmem.report"
SCHEMA_VERSION = 3

_HOW = "save one with hetmem.report(model).save('run.json')"


def json_text(data: dict[str, Any]) -> str:
    """Return `data` as JSON, one line for each of its keys. Raises ValueError for a number that is not finite."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in data.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(data: dict[str, Any], path: Path) -> None:
    """Write `data` in the format that the suffix of `path` names. Raises ValueError for an unknown one."""
    write_atomically(path, _format_of(path)(data))


def _format_of(path: Path) -> Callable[[dict[str, Any]], str]:
    formats = {".trace.json": trace_text, ".json": json_text, ".html": page_text}
    for ending, format_ in formats.items():
        if path.name.endswith(ending) and path.name != ending:
            return format_
    raise ValueError(f"a report can be saved as {', '.join(formats)}; got {path.name!r}")


def page_text(data: dict[str, Any]) -> str:
    """Return one self-contained HTML page: page.html with style, script and data inlined. Names in `data` are the
    user's: the page gets them as JSON and shows them as text, never as markup."""
    source = resources.files("hetmem.report")

    def text_of(*names: str) -> str:
        return "\n".join(source.joinpath(name).read_text(encoding="utf-8") for name in names)

    parts = {
        "style": text_of("page.css"),
        "script": text_of("page_axis.js", "page_charts.js", "page.js"),
        "data": _json_in_script(data),
        "table": html.escape(table(data)),
        "made_with": html.escape(made_with(data)),
    }
    return re.sub(r"{{(\w+)}}", lambda field: parts[field[1]], text_of("page.html"))  # in one pass: no field in a part


def _json_in_script(data: dict[str, Any]) -> str:
    """Return `data` as JSON without "<", which could end the script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` atomically. Raises FileNotFoundError, which names the directory, if that is missing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "cannot write here: there is no such directory", str(path.parent))
    write_whole(path, text)


# ---- saved reports, shown -------------------------------------------------------------------------------------------


def show(path: str | os.PathLike[str]) -> str:
    """Return the report saved at `path` (".json") as a text table. Raises ValueError for any other file."""
    return table(_saved(path))


def render(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the report saved at `path` (".json") to `out`, in the format that its suffix names.

    Raises ValueError if `path` is no report or `out` has another suffix than ".json", ".html" or ".trace.json".
    """
    format_ = _format_of(Path(out))
    write_atomically(Path(out), format_(_saved(path)))


def compare(path_a: str | os.PathLike[str], path_b: str | os.PathLike[str]) -> str:
    """Return two saved reports side by side, with the change to the second. Raises ValueError for any other file."""
    names = [Path(path).name for path in (path_a, path_b)]
    if names[0] == names[1]:
        names = [os.fspath(path) for path in (path_a, path_b)]
    return comparison(names[0], _saved(path_a), names[1], _saved(path_b))


def _saved(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the report saved at `path`. Raises ValueError for any other file, also for a truncated report or one that
    was edited so that it cannot be shown, and OSError if it cannot be read."""
    name = os.fspath(path)
    try:
        data = read_json(path)
    except ValueError as error:
        raise ValueError(f"{name} is not a saved report: {error}; {_HOW}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{name} is not a saved report: {_HOW}")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{name} has version {shown(data.get('schema_version'))} of the report's schema, this hetmem reads "
            f"{SCHEMA_VERSION}: use the version of hetmem that wrote it"
        )
    try:
        check_report(data)
    except SchemaError as error:
        raise ValueError(f"{name} is not a whole report: {error}; {_HOW}") from error
    return data


# ---- the timeline as Chrome trace events -----------------------------------------------------------------------------

_LINKS = ("host_to_device", "device_to_host", "nvme_read", "nvme_write")
_PROCESS = 1
_TRAINING, _OPTIMIZER, _COMPUTE, _FIRST_LINK = 1, 2, 999, 1000
_LANES_PER_LINK = 100
Event = dict[str, Any]


def trace_text(data: dict[str, Any]) -> str:
    """Return the timeline of a report as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing; without a timeline,
    track names alone.

    One track for the training thread, and one for compute where that is asynchronous; for the host optimizer's updates,
    and for each link, as many tracks as were busy at once; a counter for the bytes of each tier.
    """
    events = [_named("process_name", 0, f"hetmem: {data['model']}")]
    if data["timeline"] is not None:
        events += _trace_events(data["timeline"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _trace_events(timeline: dict[str, Any]) -> Iterator[Event]:
    yield _named("thread_name", _TRAINING, "Training thread")
    launched = timeline["launched"]
    for what, start, end in launched or timeline["segments"]:
        yield _complete(what, _TRAINING, start, end)
    yield from _moments(timeline)
    compute = _COMPUTE if launched else _TRAINING
    if launched:
        yield _named("thread_name", _COMPUTE, "Compute")
        for what, start, end in timeline["segments"]:
            yield _complete(what, _COMPUTE, start, end)
    stalls = timeline["stalls"]
    for start, end in zip(stalls["from_us"], stalls["until_us"], strict=True):
        yield _complete("stall", compute, start, end)
    faults = timeline["faults"]
    for block, at in zip(faults["block"], faults["at_us"], strict=True):
        name = f"fault: {_label(timeline, block)}"
        yield {"ph": "i", "name": name, "pid": _PROCESS, "tid": _TRAINING, "ts": at, "s": "t"}
    updates = zip(*(timeline["updates"][key] for key in ("from_us", "until_us", "what")), strict=True)
    yield from _lanes(_OPTIMIZER, "Host optimizer", [(*update, {}) for update in updates])
    crossed: list[list[tuple[int, int, str, dict[str, Any]]]] = [[] for _ in _LINKS]
    columns = [timeline["transfers"][key] for key in ("from_us", "until_us", "link", "block", "bytes")]
    for start, end, link, block, nbytes in zip(*columns, strict=True):
        crossed[link].append((start, end, _label(timeline, block), {"bytes": nbytes}))
    for link, rows in enumerate(crossed):
        yield from _lanes(_FIRST_LINK + link * _LANES_PER_LINK, TERM_NAMES[_LINKS[link]], rows)
    for tier, memory in timeline["memory"].items():
        for index, at in enumerate(memory["at_us"]):
            values = {role: column[index] for role, column in memory["bytes"].items()}
            yield {"ph": "C", "name": f"{tier} bytes", "pid": _PROCESS, "ts": at, "args": values}


def _moments(timeline: dict[str, Any]) -> Iterator[Event]:
    """Yield operators as events that last until the next one, or until the end of their segment."""
    moments, ends = timeline["moments"], [end for _, _, end in timeline["launched"] or timeline["segments"]]
    at = moments["at_us"]
    for index, operator in enumerate(moments["operator"]):
        following = [end for end in ends if end >= at[index]]
        end = min([*at[index + 1 : index + 2], *following[:1]], default=at[index])
        yield _complete(timeline["operators"][operator], _TRAINING, at[index], end)


def _lanes(first: int, name: str, rows: Iterable[tuple[int, int, str, dict[str, Any]]]) -> Iterator[Event]:
    """Yield `rows` of start, end, name and arguments on tracks from number `first` on. Overlapping ones go to different
    tracks, as events of one track must nest."""
    free_at: list[int] = []
    for start, end, what, arguments in sorted(rows, key=itemgetter(0, 1)):
        lane = next((index for index, free in enumerate(free_at) if free <= start), len(free_at))
        if lane == len(free_at):
            yield _named("thread_name", first + lane, f"{name} {lane + 1}")
        free_at[lane : lane + 1] = [end]
        yield {**_complete(what, first + lane, start, end), "args": arguments}


def _label(timeline: dict[str, Any], block: int) -> str:
    if block < 0:
        return "gradient"
    facts = timeline["blocks"][block]
    return f"{facts['role']} of chunk {facts['chunk']}"


def _named(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _complete(name: str, track: int, start: int, end: int) -> Event:
    return {"ph": "X", "name": name, "pid": _PROCESS, "tid": track, "ts": start, "dur": end - start}
