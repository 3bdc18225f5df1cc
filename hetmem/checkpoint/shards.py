"""The tensors of a model that were saved in files of safetensors, one or many. Must not know models."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from hetmem.checkpoint.layout import Stored, parse_tensors
from hetmem.checkpoint.opening import OpenFile, named, opened
from hetmem.errors import CheckpointError, StoreError

_INDEX = ".safetensors.index.json"
_SHOWN = 5
"""Names in a message."""


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
