"""Weights of other programs: files of safetensors, one or many, read straight into a model on whatever tiers it is.

Names, shapes and dtypes of all files are compared before anything is written. Unlike a checkpoint such files have no
checksums, no optimizer, and often other names and dtypes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hetmem.checkpoint.contents import ModelState, of_model
from hetmem.checkpoint.layout import Stored, parse_tensors
from hetmem.checkpoint.loading import partly_loaded
from hetmem.checkpoint.moving import checksums, read_tensors
from hetmem.checkpoint.opening import OpenFile, named, opened
from hetmem.errors import CheckpointError

_INDEX = ".safetensors.index.json"
_SHOWN = 5
"""Names in a message."""


class LoadedWeights(NamedTuple):
    """What did not match, as `torch.nn.Module.load_state_dict` tells it."""

    missing_keys: list[str]
    """Of the model, not in the files; tied ones count once."""
    unexpected_keys: list[str]
    """In the files, not of the model."""


def load_weights(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    rounding: bool = False,
) -> LoadedWeights:
    """Load the weights of a pretrained model, in safetensors, into `model`, which may be managed.

    `path`: one file, an index (`….safetensors.index.json`, beside its files), or a directory with either, as Hugging
    Face's `save_pretrained` and `snapshot_download` leave it. `rename` gets each name in the files and returns the
    model's, or None for a tensor to leave out. `strict=False` loads what matches by name and returns the rest.

    Values go block by block to their homes: the model is never in host memory as a whole. Wider dtypes take narrower
    ones exactly (bfloat16 files into float32 masters); a cast that rounds is refused unless `rounding=True`. The
    optimizer keeps what states it has.

    Raises `CheckpointError` (a ValueError; names the tensors) and `StoreError` (an OSError; path, offset and bytes).
    Everything but the values themselves is compared first, and such errors change nothing; a disk that fails later
    leaves the model partly loaded, and the message says so. No code of a file's choice runs.
    """
    with ExitStack() as stack:
        sources = _sources(os.fspath(path), rename, stack)
        state = of_model(model)
        keys = _compared(state, sources)
        if strict and any(keys):
            problems = [f"the files have no {name}" for name in keys.missing_keys]
            problems += [f"the model has no {name}" for name in keys.unexpected_keys]
            raise _other_model(problems, "rename= translates names, strict=False loads what matches")
        targets = list(_targets(state, sources, rounding))
        with partly_loaded("the model is"):
            for file in dict.fromkeys(source.file for source, _ in targets):
                mine = [(source.stored, tensor) for source, tensor in targets if source.file is file]
                read_tensors(file, sorted(mine, key=lambda target: target[0].start))
    return keys


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A tensor in one of the files."""

    file: OpenFile
    stored: Stored


def _sources(path: str, rename: Callable[[str], str | None] | None, stack: ExitStack) -> dict[str, _Source]:
    """The tensors of all files by the names that the model should have for them; files stay open with `stack`."""
    found: dict[str, _Source] = {}
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
            found[new], names[new] = _Source(file, stored), name
    return found


def _files(path: str) -> list[str]:
    if path.endswith(".json"):
        return _indexed(path)
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


def _compared(state: ModelState, sources: dict[str, _Source]) -> LoadedWeights:
    found = set(sources)
    missing = [name for name, aliases in _aliases(state).items() if not found & {*aliases}]
    missing += [name for name in state.made if name not in found]
    return LoadedWeights(missing, sorted(found - state.names))


def _aliases(state: ModelState) -> dict[str, list[str]]:
    """All names of each tensor, by the first."""
    aliases = {name: [name] for name in state.tensors}
    for name, first in state.tied.items():
        aliases[first].append(name)
    return aliases


def _targets(state: ModelState, sources: dict[str, _Source], rounding: bool) -> Iterator[tuple[_Source, torch.Tensor]]:
    """Which tensor of the model gets which of the files. Raises `CheckpointError` that names what does not match."""
    problems: list[str] = []
    targets: list[tuple[_Source, torch.Tensor]] = []
    several: list[list[str]] = []
    for name, aliases in _aliases(state).items():
        there = [alias for alias in aliases if alias in sources]
        if len(there) > 1:
            several.append(there)
        for alias in there:
            problems += _differences(alias, sources[alias].stored, state.tensors[name], rounding)
        targets += [(sources[alias], state.tensors[name]) for alias in there[:1]]
    problems += [f"{name} is not a tensor in the model" for name in state.made if name in sources]
    if problems:
        raise _other_model(problems)
    for there in several:
        if len({_values(sources[alias]) for alias in there}) > 1:
            raise _other_model([f"{' and '.join(there)} are one tensor in the model, and differ in the files"])
    return iter(targets)


def _values(source: _Source) -> tuple[object, ...]:
    return (source.stored.dtype, *checksums(source.file, source.stored))


def _differences(name: str, stored: Stored, tensor: torch.Tensor, rounding: bool) -> Iterator[str]:
    if tensor.is_meta:
        yield f"{name} is on the meta device in the model, without memory to load into"
    if stored.shape != tuple(tensor.shape):
        yield f"{name} has the shape {stored.shape} in the files and {tuple(tensor.shape)} in the model"
    if stored.dtype == tensor.dtype:
        return
    if not (stored.dtype.is_floating_point and tensor.dtype.is_floating_point):
        yield f"{name} is of {stored.dtype} in the files and of {tensor.dtype} in the model"
    elif not rounding and not _is_exact(stored.dtype, tensor.dtype):
        yield f"{name} would be rounded from {stored.dtype} to {tensor.dtype}: allow it with rounding=True"


def _is_exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of the one is a value of the other."""
    mine, theirs = torch.finfo(narrow), torch.finfo(wide)
    return (
        theirs.eps <= mine.eps
        and theirs.max >= mine.max
        and theirs.smallest_normal * theirs.eps <= mine.smallest_normal * mine.eps
    )


def _other_model(problems: list[str], *ways_out: str) -> CheckpointError:
    more = [f"… {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return CheckpointError(f"the weights are of another model: {'; '.join([*problems[:_SHOWN], *more, *ways_out])}")
