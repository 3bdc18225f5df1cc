"""The report as one HTML page that needs no network and no other file: page.html with style, script and data put in."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

from hetmem.report.text import made_with, table


def page_text(data: dict[str, Any]) -> str:
    """The page. Names in `data` are the user's: they reach the page as JSON and are shown as text, never as markup."""
    source = files("hetmem.report")
    parts = {
        "{{style}}": source.joinpath("page.css").read_text(encoding="utf-8"),
        "{{script}}": "\n".join(
            source.joinpath(name).read_text(encoding="utf-8") for name in ("page_axis.js", "page_charts.js", "page.js")
        ),
        "{{data}}": _json_in_script(data),
        "{{table}}": html.escape(table(data)),
        "{{made_with}}": html.escape(made_with(data)),
    }
    page = source.joinpath("page.html").read_text(encoding="utf-8")
    before = 0
    pieces = []
    for place in sorted(parts, key=page.index):  # not str.replace: the data may hold the name of a place
        at = page.index(place)
        pieces += [page[before:at], parts[place]]
        before = at + len(place)
    return "".join([*pieces, page[before:]])


def _json_in_script(data: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for the end of its element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
