"""Reads and writes whole files: plans, profiles, reports, the status of a run, kernels, checkpoints.

Note "what lies at a name": directories may be writable for others, who may have put anything at a name before. Reading
takes regular files only. Writing makes a new file of a random name beside the old one and renames it, so that a reader
sees the whole old or the whole new one, and nothing is written through what lay at the name. Two things are used as
they are, if this user or root owns them: a link is followed, and its target replaced; a pipe or a device is written to.

A process that is killed leaves its new file. Each has a lock for as long as it is written, and a name that is made of
that of the file that it replaces: the next write there removes those of this user that no process holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hetmem.base.units import format_size

_MOST_LINKS = 40
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


# ---- reading ---------------------------------------------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read the regular file `path`. Never waits, as opening a pipe would. Raises OSError, which
    names `path`, if it cannot be opened, and ValueError, which does not, if it is of another kind."""
    fd = os.open(checked_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise ValueError("it is no regular file")


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of the regular file `path`. Raises what `open_regular` does, and ValueError for a file of more
    than `most_bytes`."""
    with open(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {format_size(most_bytes)}")
    return data


def checked_path(path: str | os.PathLike[str]) -> str:
    """Return `path` as text. Raises OSError for one that no file can have: with a NUL or a lone surrogate."""
    text = os.fsdecode(path)
    with suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(text):
            return text
    raise OSError(errno.EINVAL, "no file can have this name", ascii(text))


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, atomically, and onto the disk: a reader sees the whole old file or the
    whole new one. See the note "what lies at a name". Raises OSError, which names `path`."""
    _write(path, content, synced=True)


def publish(path: str | os.PathLike[str], content: str) -> None:
    """Write `content` as `write_whole` does, but without waiting for the disk: for what only running processes read."""
    _write(path, content, synced=False)


def _write(path: str | os.PathLike[str], content: str | bytes, *, synced: bool) -> None:
    data = content.encode() if isinstance(content, str) else content
    try:
        target = target_of(path)
        if isinstance(target, int):
            _write_to(target, data)
        elif is_replaceable(target):
            with replacing(target, synced=synced) as fd:
                _write_all(fd, data)
        else:
            with open(target, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def target_of(path: str | os.PathLike[str]) -> str | int:
    """Return the path that links at `path` lead to; the descriptor of an open file of this process ("/dev/stdout").

    Raises OSError for a link or a pipe of another user than this one and root, and for a circle of links.
    """
    name = checked_path(path)
    for _ in range(_MOST_LINKS):
        name = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        own = re.fullmatch(rf"/proc/{os.getpid()}/fd/(\d+)", name)
        if own:
            return int(own[1])
        try:
            found = os.lstat(name)
        except FileNotFoundError:
            return name
        is_link = stat.S_ISLNK(found.st_mode)
        if (is_link or stat.S_ISFIFO(found.st_mode)) and found.st_uid not in (os.geteuid(), 0):
            what = "link" if is_link else "pipe"
            problem = f"a {what} of user {found.st_uid} lies there: remove it, or name another file"
            raise OSError(errno.EPERM, problem, os.fspath(path))
        if not is_link:
            return name
        name = os.path.join(os.path.dirname(name), os.readlink(name))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))


def is_replaceable(path: str) -> bool:
    """Return whether `path` is a regular file, or not there yet."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


@contextmanager
def replacing(path: str, *, synced: bool = True) -> Iterator[int]:
    """Yield a descriptor of a new file that replaces `path` when the block ends without an error.

    It lies beside `path`, with a random name, and is removed after an error. Its mode is that of an earlier file of
    this user, else by the umask. If it is `synced`, its bytes are on the disk before it is renamed. Two that replace
    one path at once do not meet: the file is that of the last to end. `path` is no link: see `target_of`.
    """
    directory, name = os.path.split(path)
    prefix = f".hetmem-{zlib.crc32(os.fsencode(name)):08x}-"  # the name itself may be too long
    remove_unfinished(directory, prefix)
    fd, unfinished = _new_file(directory, prefix)
    try:
        _take_mode(fd, path)
        yield fd
        if synced:
            os.fsync(fd)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    finally:
        os.close(fd)


def _new_file(directory: str, prefix: str) -> tuple[int, str]:
    """Make a file with a lock, which ends with this process; return its descriptor and path."""
    while True:
        path = os.path.join(directory, prefix + secrets.token_hex(8))
        fd = os.open(path, _NEW, 0o666)
        try:
            if _lock(fd, path):
                return fd, path
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd, path
            os.close(fd)
            os.unlink(path)
            raise
        os.close(fd)  # another write has just taken it for one of a killed process


def _lock(fd: int, path: str) -> bool:
    """Lock the open file `fd`. Returns False if another process has the lock, or has removed `path`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def remove_unfinished(directory: str, prefix: str = ".hetmem-[0-9a-f]{8}-") -> None:
    """Remove the new files in `directory` that killed processes of this user have left, for all paths or for that of
    one `prefix`. Where the filesystem has no locks they stay."""
    known = re.compile(prefix + "[0-9a-f]{16}")
    with suppress(OSError), os.scandir(directory or os.curdir) as entries:
        for path in [entry.path for entry in entries if known.fullmatch(entry.name)]:
            with suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and _lock(fd, path):
            os.unlink(path)
    finally:
        os.close(fd)


def _take_mode(fd: int, path: str) -> None:
    with suppress(FileNotFoundError):
        earlier = os.lstat(path)
        if stat.S_ISREG(earlier.st_mode) and earlier.st_uid == os.geteuid():
            os.fchmod(fd, stat.S_IMODE(earlier.st_mode) & 0o777)


def _write_to(descriptor: int, data: bytes) -> None:
    """Write to an open file of this process, behind what its streams hold."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    _write_all(descriptor, data)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
