"""The code of the pages for language models runs as it is printed, on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest

import hetmem
from tests.test_docs_code import run, snippets

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # its names of activation checkpointing


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_long_sequence_needs_checkpoints_moves_and_chunks() -> None:
    (code,) = snippets("docs/long-context.md")
    names: dict[str, Any] = {}
    assert "chunked loss: chunks of 1024 tokens" in run(code, names)
    report = hetmem.report(names["model"]).to_dict()
    assert report["steps"] == 2
    assert report["tiers"]["device"]["peak_bytes"] <= 44 << 20
    assert report["activations"]["bytes"]["device_to_host"] > 0, "nothing had to move"
