"""Weights of other programs: files of safetensors, one or many, read straight into a model on whatever tiers it is.

Names, shapes and dtypes of all files are compared before anything is written. Unlike a checkpoint such files have no
checksums, no optimizer, and often other names, dtypes and tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hetmem.checkpoint.contents import ModelState, all_of, cannot_fill, of_model, other_model, refuse_half_stepped
from hetmem.checkpoint.conversions import Declared, Merge, merge, shown
from hetmem.checkpoint.disk import OpenFile, Source, read_names
from hetmem.checkpoint.layout import Stored
from hetmem.checkpoint.moving import checksums, read_tensors
from hetmem.checkpoint.save_load import partly_loaded
from hetmem.errors import CheckpointError


class LoadedWeights(NamedTuple):
    """What did not match, as `torch.nn.Module.load_state_dict` tells it."""

    missing_keys: list[str]
    """Of the model, not in the files; tied ones count once."""
    unexpected_keys: list[str]
    """In the files, not of the model."""


@torch.inference_mode(False)  # what is made here takes writes later
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
    Face's `save_pretrained` and `snapshot_download` leave it. A model of transformers gets what its `from_pretrained`
    would read: names that transformers declares others for, experts that are saved one by one, a base model's weights
    for one with a head and the other way round. `rename` gets each name in the files first, and returns the model's,
    or None for a tensor to leave out. `strict=False` loads what matches by name and returns the rest.

    Values go block by block to their homes: the model is never in host memory as a whole. What transformers makes of
    several saved tensors (experts of a layer) is held in host memory beside them, one parameter at a time. Wider dtypes
    take narrower ones exactly (bfloat16 files into float32 masters); a cast that rounds is refused unless
    `rounding=True`. The optimizer keeps what states it has.

    Raises `CheckpointError` (a ValueError; names the tensors) and `StoreError` (an OSError; path, offset and bytes).
    Everything but the values themselves is compared first, and such errors change nothing; a disk that fails later,
    or an interrupt, leaves the model partly loaded, and the message says so. No code of a file's choice runs.
    """
    with all_of(model, "loading weights"), ExitStack() as stack:
        state = of_model(model)
        refuse_half_stepped(model, "call optimizer.step(), or its forget_step(), first")
        declared = Declared(model, state.names)
        made = _made(declared, read_names(os.fspath(path), rename, stack))
        keys = _compared(state, made, declared)
        if strict and any(keys):
            problems = [f"the files have no {name}" for name in keys.missing_keys]
            problems += [f"the model has no {name}" for name in keys.unexpected_keys]
            raise other_model("the weights are", problems, "rename= translates names, strict=False loads what matches")
        targets = _targets(state, made, rounding)
        with partly_loaded("the model is"):
            _read(targets)
    return keys


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What the files have for a tensor of the model: a tensor as it is, or, of a `merge`, the one of that `name`."""

    name: str
    shape: tuple[int, ...]
    sources: list[Source]
    merge: Merge | None


def _made(declared: Declared, sources: dict[str, Source]) -> dict[str, _Made]:
    """By the names that the model should have for them. Raises `CheckpointError` for what nothing can be made of."""
    plain, conversions = declared.sort(sources)
    made = {name: _Made(name, sources[key].stored.shape, [sources[key]], None) for name, key in plain.items()}
    for conversion in conversions:
        merged = merge(conversion, [sources[key] for key in conversion.names])
        for name, tensor in merged.made.items():
            if name in made:
                there = made[name].sources[0].stored.name
                raise CheckpointError(
                    f"{there} and {shown(conversion.names)} in the files are both {name} of the model"
                )
            made[name] = _Made(name, tuple(tensor.shape), merged.sources, merged)
    return made


def _read(targets: list[tuple[_Made, torch.Tensor]]) -> None:
    """Fill the tensors, in the order of the files."""
    files: dict[OpenFile, list[tuple[Stored, torch.Tensor]]] = {}
    merges: dict[Merge, dict[str, torch.Tensor]] = {}
    for made, tensor in targets:
        if made.merge is not None:
            merges.setdefault(made.merge, {})[made.name] = tensor
        else:
            files.setdefault(made.sources[0].file, []).append((made.sources[0].stored, tensor))
    for file, mine in files.items():
        read_tensors(file, sorted(mine, key=lambda target: target[0].start))
    for merged, tensors in merges.items():
        merged.fill(tensors)


def _compared(state: ModelState, made: dict[str, _Made], declared: Declared) -> LoadedWeights:
    missing = [name for name, aliases in state.aliases.items() if not made.keys() & {*aliases}]
    missing += [name for name in state.made if name not in made]
    return LoadedWeights(*declared.wanted(missing, sorted(made.keys() - state.names)))


def _targets(state: ModelState, made: dict[str, _Made], rounding: bool) -> list[tuple[_Made, torch.Tensor]]:
    """Which tensor of the model gets what. Raises `CheckpointError` that names what does not match."""
    problems: list[str] = []
    targets: list[tuple[_Made, torch.Tensor]] = []
    several: list[list[str]] = []
    for name, aliases in state.aliases.items():
        there = [alias for alias in aliases if alias in made]
        if len(there) > 1:
            several.append(there)
        for alias in there:
            problems += _differences(made[alias], state.tensors[name], rounding)
        targets += [(made[alias], state.tensors[name]) for alias in there[:1]]
    problems += [f"{name} is not a tensor in the model" for name in state.made if name in made]
    if problems:
        raise other_model("the weights are", problems)
    for there in several:
        if len({_values(made[alias]) for alias in there}) > 1:
            raise other_model(
                "the weights are", [f"{' and '.join(there)} are one tensor in the model, and differ in the files"]
            )
    return targets


def _values(made: _Made) -> tuple[object, ...]:
    return tuple((source.stored.dtype, *checksums(source.file, source.stored)) for source in made.sources)


def _differences(made: _Made, tensor: torch.Tensor, rounding: bool) -> Iterator[str]:
    name = made.name
    yield from cannot_fill(name, tensor)
    if made.shape != tuple(tensor.shape):
        of = "" if made.merge is None else f", made of {shown(made.merge.conversion.names)}"
        yield f"{name} has the shape {made.shape} in the files{of}, and {tuple(tensor.shape)} in the model"
    for dtype in dict.fromkeys(source.stored.dtype for source in made.sources):
        if dtype == tensor.dtype:
            continue
        if not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            yield f"{name} is of {dtype} in the files and of {tensor.dtype} in the model"
        elif not rounding and not _is_exact(dtype, tensor.dtype):
            yield f"{name} would be rounded from {dtype} to {tensor.dtype}: allow it with rounding=True"


def _is_exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of the one is a value of the other: as many digits, and as small a least one."""
    mine, theirs = torch.finfo(narrow), torch.finfo(wide)
    return theirs.eps <= mine.eps and theirs.smallest_normal * theirs.eps <= mine.smallest_normal * mine.eps
