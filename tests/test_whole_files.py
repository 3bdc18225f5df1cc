"""A file that hetmem writes is the whole old one or the whole new one, whatever happens, and nothing lies beside it."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import cli, planner
from hetmem.base import whole_files
from hetmem.base.whole_files import publish, read_regular, write_whole
from hetmem.errors import StoreError
from hetmem.planner import Plan
from tests.test_planning import BATCH, GPT


@functools.cache
def plan() -> Plan:
    return planner.plan(GPT, BATCH, hetmem.Budget(device="64MiB", host="16MiB"))


SAVES: dict[str, Callable[[Path], object]] = {
    "plan": lambda path: plan().save(path),
    "text": lambda path: write_whole(path, "new"),
    "status": lambda path: publish(path, "new"),
    "checkpoint": lambda path: hetmem.save(path, torch.nn.Linear(2, 2)),
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
        assert caught.value.errno == 28
        assert "No space left on device" in str(caught.value)
        assert f"'{target}'" in str(caught.value)


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


@pytest.mark.parametrize("save", SAVES)
def test_nothing_is_written_through_what_lies_beside(
    save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of the names that a save may choose, and all that can be known of those."""
    (private := tmp_path / "private").write_text("private")
    opens, names = os.open, []

    def watched(path: Any, flags: int, *more: Any, **keywords: Any) -> int:
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL, "what lies there would be opened"
            assert flags & os.O_NOFOLLOW
            names.append(Path(path).name)
        return opens(path, flags, *more, **keywords)

    monkeypatch.setattr(os, "open", watched)
    for number, plant in enumerate((os.symlink, os.link)):
        (folder := tmp_path / f"folder {number}").mkdir()
        for name in ("c.partial", *names):
            plant(private, folder / name)
        SAVES[save](folder / "c")
        assert private.read_text() == "private"
        assert not (folder / "c").is_symlink()
        assert (folder / "c").stat().st_nlink == 1
    assert len({*names}) == len(names) == 2


@pytest.mark.parametrize("save", SAVES)
def test_a_name_that_is_taken_is_not_used(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, folder = tmp_path / "private", tmp_path / "folder"
    folder.mkdir()
    private.write_text("private")
    monkeypatch.setattr(whole_files.secrets, "token_hex", lambda size: "0" * 2 * size)
    (folder / f".hetmem-{zlib.crc32(b'c'):08x}-{'0' * 16}").symlink_to(private)
    with pytest.raises(OSError, match="File exists"):
        SAVES[save](folder / "c")
    assert private.read_text() == "private"
    assert not (folder / "c").exists()


def another_users(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what lies at `path` that of neither this user nor root."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("save", SAVES)
def test_modes(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask's; an own file's stays; a file of another user, who could write to it for good, counts for nothing."""
    target = tmp_path / "c"

    def mode_after(before: int | None) -> int:
        if before is not None:
            target.chmod(before)
        SAVES[save](target)
        return stat.S_IMODE(target.stat().st_mode)

    umask = os.umask(0o027)
    try:
        assert mode_after(None) == 0o640
        assert mode_after(0o600) == 0o600
        assert mode_after(0o4755) == 0o755
        another_users(target, monkeypatch)
        assert mode_after(0o666) == 0o640
    finally:
        os.umask(umask)
    monkeypatch.undo()
    assert target.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("save", SAVES)
def test_a_link_stays_and_its_target_is_replaced(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another user has made it. A second name of a file keeps what it had."""
    target, link, other = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "other"
    target.parent.mkdir()
    target.write_text("old")
    os.link(target, other)
    (tmp_path / "folder" / "link").symlink_to("target")
    link.symlink_to("folder/link")
    SAVES[save](link)
    assert link.is_symlink()
    assert (tmp_path / "folder" / "link").is_symlink()
    assert target.read_bytes() != b"old"
    assert other.read_text() == "old"
    target.write_text("private")
    another_users(link, monkeypatch)
    with pytest.raises(OSError, match=r"a link of user \d+ lies there: remove it, or name another file"):
        SAVES[save](link)
    assert target.read_text() == "private"
    link.unlink()
    link.symlink_to(link)
    monkeypatch.undo()
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        SAVES[save](link)


@pytest.mark.parametrize("save", SAVES)
def test_what_a_killed_process_left_is_removed_by_the_next_save_to_the_same_path(
    save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(path: str, number: int) -> Path:
        name = tmp_path / f".hetmem-{zlib.crc32(path.encode()):08x}-{number:016x}"
        name.write_text("left")
        return name

    def after_a_save() -> set[Path]:
        SAVES[save](tmp_path / "c")
        return {*tmp_path.iterdir()} - {tmp_path / "c"}

    mine, others = left("c", 1), left("d", 2)
    assert after_a_save() == {others}
    mine, named_alike = left("c", 3), tmp_path / f"{mine.name}.json"
    named_alike.write_text("a file of this user")
    (linked := left("c", 4)).unlink()
    linked.symlink_to(others)
    with mine.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert after_a_save() == {mine, others, named_alike, linked}, "another save writes it"
        assert file.read() == b"left"
    another_users(mine, monkeypatch)
    assert after_a_save() == {mine, others, named_alike, linked}


def test_a_filesystem_without_locks_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", without)
    (left := tmp_path / f".hetmem-{zlib.crc32(b'c'):08x}-{'0' * 16}").write_text("perhaps being written")
    write_whole(tmp_path / "c", "new")
    assert (tmp_path / "c").read_text() == "new"
    assert left.exists()


def test_standard_output_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where it is a file: what it has already stays, and it is not replaced."""
    profile = planner.load_profile("l4")
    monkeypatch.setattr("hetmem.tools.probe.probe", lambda *_, **__: profile)
    print("before")
    assert cli.main(["probe", "-o", "/dev/stdout"]) == 0
    assert capfd.readouterr().out == "before\n" + profile.to_json()
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("ab") as file:
        write_whole(f"/dev/fd/{file.fileno()}", "new\n")
        file.write(b"after\n")
    assert log.read_text() == "before\nnew\nafter\n"
    with pytest.raises(StoreError, match="it is no file that a checkpoint could replace"):
        hetmem.save("/dev/stdout", torch.nn.Linear(2, 2))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(save: str, name: str) -> None:
    with pytest.raises(OSError, match="no file can have this name"):
        SAVES[save](name)  # type: ignore[arg-type]


def test_a_pipe_of_another_user_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    another_users(tmp_path / "pipe", monkeypatch)
    with pytest.raises(OSError, match=r"a pipe of user \d+ lies there"):
        write_whole(tmp_path / "pipe", "new")


def test_only_regular_files_are_read_and_no_more_than_allowed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(bytes(2048))
    assert read_regular(tmp_path / "file", 2048) == bytes(2048)
    with pytest.raises(ValueError, match=r"it has more than 1.00 KiB"):
        read_regular(tmp_path / "file", 1024)
    for special in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="it is no regular file"):
            read_regular(special, 5)
    with pytest.raises(IsADirectoryError, match=rf"'{tmp_path}'"):
        read_regular(tmp_path, 5)
    with pytest.raises(OSError, match="no file can have this name"):
        read_regular("a\0b", 5)
