"""The seventh example: a rank is killed, and all go on from the file; so does another number, under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetmem.errors import PeerError
from hetmem.testing import ranks
from tests.scripts import load_script

example = load_script("examples/07_ranks.py")


def trains(rank: int, folder: str, steps: int, kill_in: int | None = None) -> str:
    try:
        example.train(Path(folder), steps, kill_in)
    except PeerError as error:
        return str(error)
    return ""


def file_of(folder: Path, *, kill: bool) -> bytes:
    folder.mkdir()
    if kill:
        told = ranks(2, trains, str(folder), 4, 3, dies=(1,))
        assert told[0].startswith("rank 1 has died or ended. rank 0: a backward, "), told
    else:
        assert ranks(2, trains, str(folder), 2) == ["", ""]
    assert ranks(2, trains, str(folder), 4) == ["", ""]
    return (folder / example.FILE).read_bytes()


def test_the_file_is_that_of_a_run_in_which_no_rank_was_killed(tmp_path: Path) -> None:
    assert file_of(tmp_path / "killed", kill=True) == file_of(tmp_path / "whole", kill=False)


@pytest.mark.nightly
def test_under_torchrun(capfd: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--check"]) == 0
    said = capfd.readouterr().out
    assert said.count("rank 1 is killed in step 3") == 1
    assert said.count("2 ranks begin with step 2") == 1
    assert said.count("3 ranks begin with step 6") == 2
