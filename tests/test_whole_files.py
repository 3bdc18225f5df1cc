"""A file that hetmem writes is the whole old one or the whole new one, whatever happens, and nothing lies beside it."""

from __future__ import annotations

import functools
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetmem
from hetmem import cli, planner
from hetmem.base import whole_files
from hetmem.base.whole_files import write_whole
from hetmem.planner import Plan
from tests.test_planning import BATCH, GPT


@functools.cache
def plan() -> Plan:
    return planner.plan(GPT, BATCH, hetmem.Budget(device="64MiB", host="16MiB"))


SAVES: dict[str, Callable[[Path], object]] = {
    "plan": lambda path: plan().save(path),
    "text": lambda path: write_whole(path, "new"),
}


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("failure", [no_space, interrupted])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    save: str, failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file.json"
    target.write_text("old")
    monkeypatch.setattr(whole_files.os, "replace", failure)
    with pytest.raises((OSError, KeyboardInterrupt)) as caught:
        SAVES[save](target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    if isinstance(caught.value, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{target}'"


def test_a_plan_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at its name is read just before and just after the new one is put there."""
    target = tmp_path / "plan.json"
    plan().save(target)
    replace, seen = os.replace, []

    def watched(source: Path, target: Path) -> None:
        seen.append(Plan.load(target))
        replace(source, target)
        seen.append(Plan.load(target))

    monkeypatch.setattr(whole_files.os, "replace", watched)
    plan().with_nvme("/mnt/other").save(target)
    assert [there.nvme_directories for there in seen] == [(), ("/mnt/other",)]


def test_what_a_link_leads_to_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("new", 0o600)


def test_what_is_no_ordinary_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """Replaced, /dev/null would be a file for whoever may do that."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "new")
    reader.join(10)
    assert read == ["new"]
    assert pipe.is_fifo()


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    write_whole(target, "new")
    assert target.read_text() == "new"


def test_what_was_measured_is_printed_if_it_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = planner.load_profile("l4")
    monkeypatch.setattr("hetmem.tools.probe.probe", lambda *_, **__: profile)
    monkeypatch.setattr(whole_files.os, "replace", no_space)
    assert cli.main(["probe", "-o", str(tmp_path / "machine.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == profile.to_json()
    assert "No space left on device" in captured.err


def test_nothing_is_measured_for_a_directory_that_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hetmem.tools.probe.probe", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    assert cli.main(["probe", "-o", str(tmp_path / "machine.json")]) == 2
    assert f"nothing may be written in {tmp_path}" in capsys.readouterr().err
