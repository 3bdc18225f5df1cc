"""Bytes of one file: read and written whole or not at all, a file that takes another's place when it is complete, and
where the header and the data of a file of safetensors are.

Knows descriptors and errors of disks. Must not know tensors, nor what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from hetmem.base.units import format_size
from hetmem.checkpoint.layout import MAX_HEADER_BYTES, Stored, parse_tensors
from hetmem.errors import CheckpointError, StoreError

_INDEX = ".safetensors.index.json"
_SHOWN = 5
"""Names in a message."""


def write_at(fd: int, path: str, memory: memoryview, offset: int) -> None:
    """Write all of `memory` at `offset`. Raises `StoreError` with path, offset and bytes."""
    done = 0
    try:
        while done < memory.nbytes:
            done += os.pwrite(fd, memory[done:], offset + done)
    except OSError as error:
        raise _failure(error, f"cannot write {memory.nbytes} bytes at offset {offset} of {path!r}", done) from error


def read_at(fd: int, path: str, memory: memoryview, offset: int) -> None:
    """Fill all of `memory` from `offset` on. Raises `StoreError` with path, offset and bytes, also at the end of the
    file."""
    done = 0
    try:
        while done < memory.nbytes:
            moved = os.preadv(fd, [memory[done:]], offset + done)
            if not moved:
                raise OSError(errno.EIO, "end of file")
            done += moved
    except OSError as error:
        raise _failure(error, f"cannot read {memory.nbytes} bytes at offset {offset} of {path!r}", done) from error


@contextlib.contextmanager
def replacing(path: str, nbytes: int) -> Iterator[int]:
    """A descriptor of a new file of `nbytes` that takes the place of `path` when the block ends without an error.

    What was at `path` stays whole until then, and so it does if the process is killed, the machine loses power or the
    disk fails; what is at `path` afterwards is on the disk. The new file is `path` + ".partial" meanwhile: removed
    after an error, and used again by the next one after a kill. Raises `StoreError`, also if another process or thread
    is writing it.
    """
    path = os.path.realpath(path)  # a link stays one
    if os.path.isdir(path):
        raise StoreError(errno.EISDIR, f"cannot write {path!r}: it is a directory, and a checkpoint is one file")
    if os.path.exists(path) and not os.path.isfile(path):
        raise StoreError(errno.EINVAL, f"cannot write {path!r}: it is no file, and a checkpoint takes the place of it")
    partial = f"{path}.partial"
    fd = _open_alone(partial)
    try:
        try:
            _reserve(fd, partial, nbytes)
            yield fd
            _flush(fd, f"cannot get {partial!r} onto the disk")
            _rename(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    finally:
        os.close(fd)
    failure = f"{path!r} is the new one, but a power failure may bring the earlier one back"
    try:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:  # who may write to a directory may not always read it
        raise _failure(error, failure) from error
    try:
        _flush(folder, failure)
    finally:
        os.close(folder)


def _open_alone(path: str) -> int:
    """Open or make `path` with a lock that ends with the process, if no other process holds it."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _failure(error, f"cannot write {path!r}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise StoreError(error.errno, f"cannot write {path!r}: another save to it is under way") from error
        except FileNotFoundError:
            pass  # its last owner has just given it its name
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                return fd  # a filesystem without locks
            os.close(fd)
            raise _failure(error, f"cannot write {path!r}") from error
        os.close(fd)


def _reserve(fd: int, path: str, nbytes: int) -> None:
    """Disk blocks for all of the file, so that a full disk is known before anything is written."""
    free = 0
    try:
        os.ftruncate(fd, 0)
        disk = os.fstatvfs(fd)
        free = disk.f_bavail * disk.f_frsize
        # Asked first because a failing fallocate fills the disk, for every process on it, before it says so.
        if nbytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        sizes = f"{nbytes} bytes ({format_size(nbytes)}), {free} ({format_size(free)}) were free"
        raise _failure(error, f"cannot reserve {path!r} of {sizes}") from error


def _flush(fd: int, failure: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise _failure(error, failure) from error


def _rename(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except OSError as error:
        raise _failure(error, f"cannot rename {source!r} to {target!r}") from error


def _failure(error: OSError, what: str, done: int | None = None) -> StoreError:
    after = "" if done is None else f" after {done} bytes"
    return StoreError(error.errno, f"{what}: {error.strerror or error}{after}")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """`header`: its text, without the length before it. The data, `data_nbytes`, begin at byte `data_start`."""

    fd: int
    path: str
    header: bytes
    data_start: int
    data_nbytes: int


@contextmanager
def opened(path: str) -> Iterator[OpenFile]:
    """The file at `path`, until the block ends. Raises `StoreError`, and `CheckpointError` for what is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(error.errno, f"cannot open the checkpoint {path!r}: {error.strerror}") from error
    try:
        nbytes = os.fstat(fd).st_size
        length = bytearray(8)
        if nbytes >= 8:
            read_at(fd, path, memoryview(length), 0)
        header_nbytes = int.from_bytes(length, "little")
        if not 0 < header_nbytes <= min(nbytes - 8, MAX_HEADER_BYTES):
            pickled = length.startswith((b"PK\x03\x04", b"\x80\x02"))
            raise CheckpointError(
                f"{path!r} of {nbytes} bytes is no file of safetensors, or cut off"
                + (
                    ": it looks like one of torch.save. Read it with torch.load(path, weights_only=True) and call "
                    "model.load_state_dict, which writes to a managed model too"
                    if pickled
                    else ""
                )
            )
        text = bytearray(header_nbytes)
        read_at(fd, path, memoryview(text), 8)
        yield OpenFile(fd, path, bytes(text), 8 + header_nbytes, nbytes - 8 - header_nbytes)
    finally:
        os.close(fd)


@contextmanager
def named(path: str) -> Iterator[None]:
    """What is found to be wrong with the file at `path` in the block is said with its name."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"cannot load {path!r}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor in one of the files."""

    file: OpenFile
    stored: Stored


def read_names(path: str, rename: Callable[[str], str | None] | None, stack: ExitStack) -> dict[str, Source]:
    """The tensors of all files at `path` by what `rename` makes of their names; files stay open with `stack`."""
    found: dict[str, Source] = {}
    names: dict[str, str] = {}
    for each in _files(path):
        file = stack.enter_context(opened(each))
        with named(each):
            tensors = parse_tensors(file.header, file.data_nbytes)
        for name, stored in tensors.items():
            new = name if rename is None else rename(name)
            if new is None:
                continue
            if new in found:
                raise CheckpointError(
                    f"{name} in {each!r} and {names[new]} in {found[new].file.path!r} are both called {new}"
                )
            found[new], names[new] = Source(file, stored), name
    return found


def _files(path: str) -> list[str]:
    if path.endswith(".json"):
        return _indexed(path)
    if not os.path.exists(path):
        raise StoreError(
            errno.ENOENT,
            f"there is no file or directory {path!r}: expected what save_pretrained leaves, or "
            f"huggingface_hub.snapshot_download(name), which returns the directory",
        )
    if not os.path.isdir(path):
        return [path]
    entries = sorted(os.listdir(path))
    indices = [name for name in entries if name.endswith(_INDEX)]
    files = [name for name in entries if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        return [os.path.join(path, "model.safetensors")]
    if len(indices) > 1 or (not indices and len(files) > 1):
        raise CheckpointError(f"{path!r} has more than one model: name one of {', '.join(indices or files)}")
    if indices:
        return _indexed(os.path.join(path, indices[0]))
    if not files:
        raise CheckpointError(
            f"{path!r} has no *.safetensors (it has {', '.join(entries[:_SHOWN]) or 'nothing'}): weights that were "
            f"pickled can run code; load those with torch.load(weights_only=True) and save them as safetensors"
        )
    return [os.path.join(path, files[0])]


def _indexed(path: str) -> list[str]:
    """The files that the index at `path` names, which must lie beside it."""
    try:
        with open(path, "rb") as file:
            weight_map = json.load(file)["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except OSError as error:
        raise CheckpointError(f"cannot read the index {path!r}: {error.strerror}") from error
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path!r} is no index of safetensors: {error!r}") from error
    foreign = [name for name in files if os.path.basename(name) != name or name in ("", ".", "..")]
    if foreign:
        raise CheckpointError(f"{path!r} names {foreign[0]!r}, which is not beside it")
    return [os.path.join(os.path.dirname(path), name) for name in files]
