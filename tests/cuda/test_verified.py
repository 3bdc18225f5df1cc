"""Tests of changed kernels are left out only where nothing has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cuda import verified


@pytest.mark.parametrize("changed", ["cuda/cast.cu", "cuda/floats.cuh", "cuda/kernels.py", "cuda/backend.py"])
def test_a_change_of_a_kernel_or_of_what_launches_it_is_seen(changed: str, tmp_path: Path) -> None:
    shutil.copytree(verified.FOLDERS[0], tmp_path / "cuda")
    before = verified.digest([tmp_path / "cuda"])
    assert before == verified.digest([verified.FOLDERS[0]])
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    assert verified.digest([tmp_path / "cuda"]) != before


def test_what_has_changed_since_is_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "SEEN", tmp_path / "verified.json")
    assert not verified.is_verified()
    with pytest.raises(SystemExit, match="have changed since"):
        verified.main(["another"])
    assert not verified.is_verified()
    (tmp_path / "verified.json").write_text('{"sources": "another"}')
    assert not verified.is_verified()
