"""The checkpoint at a path is the old one or the new one, whole, whatever happens while it is saved."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.checkpoint.disk import replacing
from hetmem.errors import StoreError
from tests.engine import harness
from tests.forked import end_in_a_fork


class Crash(BaseException):
    """The power goes off."""


class Disk:
    """The calls that a save makes, in order; at the `stops_at`th one `fault` happens instead of it.

    Also what a power failure would leave: a file has the bytes of its last fsync, and a directory the names of its
    last one, or any later ones.
    """

    CALLS = ("pwritev", "fsync", "replace", "posix_fallocate", "unlink")

    def __init__(self, folder: Path, *, stops_at: int = -1, fault: Callable[[], None] = lambda: None) -> None:
        self.calls: list[str] = []
        self._folder, self._stops_at, self._fault = folder, stops_at, fault
        self._lock = threading.Lock()
        self._synced = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.names = [self._present()]
        """What the directory was at each moment since its last fsync."""

    def _present(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self._folder.iterdir() if path.is_file()}

    @contextlib.contextmanager
    def used(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.CALLS:
                patch.setattr(os, name, self._call(name, getattr(os, name)))
            yield self

    def _call(self, name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            with self._lock:
                number = len(self.calls)
                self.calls.append(name)
                if number == self._stops_at:
                    self._fault()
                result = real(*args)
                if name == "fsync" and os.path.samestat(os.fstat(args[0]), self._folder.stat()):
                    self.names = [self._present()]
                elif name == "fsync":
                    self._synced[os.fstat(args[0]).st_ino] = os.pread(args[0], os.fstat(args[0]).st_size, 0)
                elif name == "replace":
                    self.names.append(self._present())
                return result

        return call

    def after_power_failure(self, name: str) -> set[bytes | None]:
        """All that the file `name` may be."""
        return {self._synced.get(names[name], b"lost") if name in names else None for names in self.names}


def power_failure() -> None:
    raise Crash


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken() -> None:
    raise OSError(errno.EIO, "Input/output error")


def model(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def value_of(path: Path) -> float:
    module = model(0)
    assert hetmem.load(path, module) == "extra"
    values = {float(value) for parameter in module.parameters() for value in parameter.detach().flatten()}
    assert len(values) == 1, "some of the old checkpoint and some of the new one"
    return values.pop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    hetmem.save(tmp_path / "c", model(1), extra="extra")
    return tmp_path / "c"


def save_and_wait(path: Path, value: float) -> None:
    hetmem.save(path, model(value), extra="extra")


def save_in_the_background(path: Path, value: float) -> None:
    managed = harness.manage(model(value), "host", path.parent)
    hetmem.save(path, managed, extra="extra", wait=False).wait()


Save = Callable[[Path, float], None]
ways = pytest.mark.parametrize("save", [save_and_wait, save_in_the_background])


def calls_of_a_save(path: Path, save: Save = save_and_wait) -> list[str]:
    with Disk(path.parent).used() as disk:
        save(path, 1)
    return disk.calls


@ways
def test_the_order_of_a_save(save: Save, path: Path) -> None:
    calls = calls_of_a_save(path, save)
    assert calls[0] == "posix_fallocate"
    assert calls[-3:] == ["fsync", "replace", "fsync"]
    assert set(calls[1:-3]) == {"pwritev"}
    assert [entry.name for entry in path.parent.iterdir()] == ["c"]


@ways
def test_a_power_failure_at_any_moment_leaves_the_old_or_the_new_one(save: Save, path: Path, tmp_path: Path) -> None:
    found = set()
    for number in range(len(calls_of_a_save(path, save))):
        hetmem.save(path, model(1), extra="extra")
        disk = Disk(path.parent, stops_at=number, fault=power_failure)
        with disk.used(), pytest.raises(Crash):
            save(path, 2)
        for data in disk.after_power_failure("c"):
            assert data is not None, "neither the old nor the new one has the name"
            (tmp_path / "after").mkdir(exist_ok=True)
            (tmp_path / "after" / "c").write_bytes(data)
            found.add(value_of(tmp_path / "after" / "c"))
    assert found == {1, 2}


def test_after_a_save_the_new_one_is_on_the_disk(path: Path, tmp_path: Path) -> None:
    with Disk(path.parent).used() as disk:
        hetmem.save(path, model(2), extra="extra")
    (data,) = disk.after_power_failure("c")
    assert data == path.read_bytes()
    assert value_of(path) == 2


@ways
@pytest.mark.parametrize("fault", [full, broken])
def test_an_error_of_the_disk_at_any_moment_keeps_the_old_one_and_leaves_nothing(
    fault: Callable[[], None], save: Save, path: Path
) -> None:
    calls = calls_of_a_save(path, save)
    for number, call in enumerate(calls):
        hetmem.save(path, model(1), extra="extra")
        with (
            Disk(path.parent, stops_at=number, fault=fault).used(),
            pytest.raises(StoreError, match=str(path)) as caught,
        ):
            save(path, 2)
        assert caught.value.errno == (errno.ENOSPC if fault is full else errno.EIO)
        if call == "pwritev":
            assert caught.match(r"cannot write \d+ bytes at offset \d+ of .* after 0 bytes")
        is_new = number == len(calls) - 1  # it has its name, and only the directory may not be on the disk
        assert value_of(path) == (2 if is_new else 1)
        assert [entry.name for entry in path.parent.iterdir()] == ["c"]


def test_a_disk_without_room_is_known_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Small)
    with (
        Disk(path.parent).used() as disk,
        pytest.raises(StoreError, match=r"4256 bytes \(4.16 KiB\), 4096 .*were free"),
    ):
        hetmem.save(path, model(2), extra="extra")
    assert disk.calls == ["unlink"]
    assert value_of(path) == 1


def test_writes_that_take_less_than_asked_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real(fd, [parts[0][:7]], offset))
    hetmem.save(path, model(2), extra="extra")
    assert value_of(path) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@ways
def test_a_process_that_is_killed_at_any_moment_leaves_the_old_or_the_new_one(save: Save, path: Path) -> None:

    def save_on(disk: Disk) -> None:
        with disk.used():
            save(path, 2)

    def killed_at(number: int) -> float:
        disk = Disk(path.parent, stops_at=number, fault=lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert end_in_a_fork(lambda: save_on(disk)) == -signal.SIGKILL
        return value_of(path)

    count = len(calls_of_a_save(path, save))
    assert killed_at(1) == 1
    assert len(list(path.parent.iterdir())) == 2, "it leaves a file, which the next one removes first"
    assert [killed_at(number) for number in range(count + 1)] == [1] * count + [2]
    assert killed_at(1) == 2
    hetmem.save(path, model(3), extra="extra")
    assert value_of(path) == 3
    assert [entry.name for entry in path.parent.iterdir()] == ["c"]


def test_an_interrupt_keeps_the_old_one(path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with Disk(path.parent, stops_at=4, fault=interrupt).used(), pytest.raises(KeyboardInterrupt):
        hetmem.save(path, model(2), extra="extra")
    assert value_of(path) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["c"]


def test_two_saves_to_one_path_at_once_do_not_meet(path: Path) -> None:
    with replacing(str(path), 10) as fd:
        hetmem.save(path, model(2), extra="extra")
        assert value_of(path) == 2
        assert os.fstat(fd).st_nlink == 1, "the second one has removed the file of the first"
    assert path.read_bytes() == bytes(10)


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("c")
    hetmem.save(tmp_path / "latest", model(2), extra="extra")
    assert (tmp_path / "latest").is_symlink()
    assert value_of(path) == 2


def test_a_directory_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="it is a directory"):
        hetmem.save(tmp_path, model(2))
    with pytest.raises(StoreError, match=r"cannot write '.*/none/c': No such file or directory"):
        hetmem.save(tmp_path / "none" / "c", model(2))
    assert not list(tmp_path.iterdir())


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match=r"pipe': it is no file"):
        hetmem.save(tmp_path / "pipe", model(2))
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_may_be_written_and_not_read_has_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = os.open

    def unreadable(name: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opens(name, flags, *more)

    monkeypatch.setattr(os, "open", unreadable)
    with pytest.raises(StoreError, match=r"c' is the new one, but a power failure .*: Permission denied") as caught:
        hetmem.save(path, model(2), extra="extra")
    assert caught.value.errno == errno.EACCES
    assert value_of(path) == 2
