"""Names of checkpoints with the number of a step in them: makes one, finds the newest, and deletes the oldest."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hetmem.base.whole_files import remove_unfinished
from hetmem.checkpoint.disk import opened
from hetmem.checkpoint.header import parse
from hetmem.errors import CheckpointError, StoreError


class Kept:
    """The files of one pattern, of which `most` stay. Raises `CheckpointError` for a pattern that cannot be filled."""

    def __init__(self, pattern: str, extra: Any, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise CheckpointError(f"keep must be a whole number above zero, got {most!r}")
        directory, name = os.path.split(pattern)
        self._directory = os.path.abspath(directory)  # a save in the background deletes later, perhaps elsewhere
        self._most, self._known = most, ""
        made, fields = "", 0
        try:
            parsed = [*string.Formatter().parse(name)]
        except ValueError as error:
            raise CheckpointError(f"{pattern!r} is no pattern: {error}") from error
        for text, field, spec, conversion in parsed:
            made, self._known = made + text, self._known + re.escape(text)
            if field is None:
                continue
            value = extra.get(field) if isinstance(extra, Mapping) else None
            if isinstance(value, int) and not re.fullmatch(r"0?\d*d?", spec or ""):
                raise CheckpointError(f"{pattern!r} writes {field} as {spec!r}, by which older files cannot be found")
            if isinstance(value, bool) or not isinstance(value, (int, str)) or conversion or not field.isidentifier():
                raise CheckpointError(
                    f"{pattern!r} has the field {{{field}}}, for which extra must have a number or a text, as in "
                    f"extra={{'step': 100}} for {{step}}; got {value!r}"
                )
            made, fields = made + format(value, spec or ""), fields + 1
            self._known += r" *-?\d+" if isinstance(value, int) else re.escape(format(value, spec or ""))
        if not fields or "/" in made:
            raise CheckpointError(
                f"keep={most} needs a file name with a field of extra in it, as in 'run-{{step}}.safetensors', got "
                f"{pattern!r}"
            )
        self.path = os.path.join(self._directory, made)

    def after(self, kind: object, error: BaseException | None, at: object) -> None:
        """End a context in which `path` is written: `delete_older`, if there was no `error`. Files that cannot be
        deleted stay: the new one is complete."""
        if error is None:
            with suppress(StoreError):
                self.delete_older()

    def delete_older(self) -> None:
        """Delete all but the newest files of the pattern that are checkpoints of hetmem's, and what killed saves have
        left beside them: those of other numbers and the same texts. `path` is complete, and counts as the newest."""
        remove_unfinished(self._directory)
        known = re.compile(self._known)
        names = [name for name in _by_age(self._directory) if known.fullmatch(name)]
        names = [name for name in names if not os.path.samefile(os.path.join(self._directory, name), self.path)]
        for name in [each for each in names if _is_checkpoint(os.path.join(self._directory, each))][self._most - 1 :]:
            with suppress(OSError):
                os.unlink(os.path.join(self._directory, name))


def latest(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint of `hetmem.save` in `directory`, judged by the time at which it was
    written; None if there is none. Other files, and what a killed save has left, do not count. Raises `StoreError` if
    the directory cannot be read."""
    folder = os.fspath(directory)
    paths = (os.path.join(folder, name) for name in _by_age(folder))
    return next(filter(_is_checkpoint, paths), None)


def _by_age(directory: str) -> list[str]:
    """Return the names of the regular files in `directory`, the newest first."""
    found = list[tuple[int, str]]()
    try:
        with os.scandir(directory or os.curdir) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False) and not entry.name.startswith(".hetmem-"):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    except OSError as error:
        raise StoreError(error.errno, f"cannot read the directory {directory!r}: {error.strerror}") from error
    return [name for _, name in sorted(found, reverse=True)]


def _is_checkpoint(path: str) -> bool:
    """Return whether `path` is a whole file of `hetmem.save`, judged by its header, which has a checksum."""
    try:
        with opened(path) as file:
            parse(file.header, file.data_nbytes)
    except (CheckpointError, StoreError):
        return False
    return True
