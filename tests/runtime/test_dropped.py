"""A managed model that nobody holds any more ends without anybody waiting for it."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from tests.runtime.harness import (
    PLACEMENTS,
    Recipe,
    Tower,
    comes_to_be,
    hetmem_threads,
    pair,
    token_batches,
    train_both,
)


def trained_and_dropped(placement: str, directory: Path) -> None:
    plain, managed = pair(Tower, placement, directory)
    train_both(plain, managed, token_batches(2), Recipe(steps=2))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_collecting_a_dropped_model_joins_no_thread(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in the middle of anything: in a thread that starts and holds threading's own lock, joining one
    waits for ever. It did, about once in ten thousand tests."""
    gc.collect()
    trained_and_dropped(placement, tmp_path)
    joined: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda self, timeout=None: joined.append(self.name))
        gc.collect()
    assert joined == []
    assert comes_to_be(lambda: not hetmem_threads()), "they end by themselves"
    assert list(tmp_path.iterdir()) == []
