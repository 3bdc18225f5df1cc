"""The notebook: its cells run from top to bottom, without a GPU, and the last one shows the report."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import hetmem
from tests.test_docs_code import run

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


@pytest.mark.nightly
def test_the_tour_runs_and_ends_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "outputs are of another run"
    *_, last = sources = ["".join(cell["source"]) for cell in cells]
    names: dict[str, Any] = {}
    said = "".join(run(source, names) for source in sources)
    assert "losses and weights are equal, bit for bit" in said
    assert "paste (" in said and "{'step': 5}" in said
    report = eval(compile(ast.Expression(ast.parse(last).body[-1].value), "last", "eval"), names)  # type: ignore[attr-defined]
    assert isinstance(report, hetmem.MemoryReport)
    assert report.to_dict()["fetches"] and report._repr_html_().startswith("<iframe")
