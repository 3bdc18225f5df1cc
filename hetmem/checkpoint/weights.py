"""Weights of other programs: files of safetensors, one or many, read straight into a model on whatever tiers it is.

Names, shapes and dtypes of all files are compared before anything is written. Unlike a checkpoint such files have no
checksums, no optimizer, and often other names, dtypes and tensors.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hetmem.checkpoint.contents import ModelState, all_of, cannot_fill, of_model, other_model, refuse_half_stepped
from hetmem.checkpoint.disk import OpenFile, Source, read_names, read_tensors
from hetmem.checkpoint.layout import Stored
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
    """What the files have for a tensor of the model: a tensor as it is, or what a `conversion` makes of several."""

    name: str
    shape: tuple[int, ...]
    sources: list[Source]
    conversion: Conversion | None


def _made(declared: Declared, sources: dict[str, Source]) -> dict[str, _Made]:
    """Return what the files have, by the model's names. Raises `CheckpointError` for what nothing can be made of."""
    plain, conversions = declared.sort(sources)
    made = {name: _Made(name, sources[key].stored.shape, [sources[key]], None) for name, key in plain.items()}
    for conversion in conversions:
        for name, tensor in conversion.planned().items():
            if name in made:
                there = made[name].sources[0].stored.name
                raise CheckpointError(
                    f"{there} and {shown(conversion.names)} in the files are both {name} of the model"
                )
            made[name] = _Made(name, tuple(tensor.shape), conversion.sources, conversion)
    return made


def _read(targets: list[tuple[_Made, torch.Tensor]]) -> None:
    """Fill the tensors, in the order of the files."""
    files: dict[OpenFile, list[tuple[Stored, torch.Tensor]]] = {}
    converted: dict[Conversion, dict[str, torch.Tensor]] = {}
    for made, tensor in targets:
        if made.conversion is not None:
            converted.setdefault(made.conversion, {})[made.name] = tensor
        else:
            files.setdefault(made.sources[0].file, []).append((made.sources[0].stored, tensor))
    for file, mine in files.items():
        read_tensors(file, sorted(mine, key=lambda target: target[0].start))
    for conversion, tensors in converted.items():
        conversion.fill(tensors)


def _compared(state: ModelState, made: dict[str, _Made], declared: Declared) -> LoadedWeights:
    missing = [name for name, aliases in state.aliases.items() if not made.keys() & {*aliases}]
    missing += [name for name in state.made if name not in made]
    return LoadedWeights(*declared.wanted(missing, sorted(made.keys() - state.names)))


def _targets(state: ModelState, made: dict[str, _Made], rounding: bool) -> list[tuple[_Made, torch.Tensor]]:
    """Return which tensor of the model gets what. Raises `CheckpointError` that names what does not match."""
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
    return tuple((source.stored.dtype, *read_tensors(source.file, [(source.stored, None)])) for source in made.sources)


def _differences(made: _Made, tensor: torch.Tensor, rounding: bool) -> Iterator[str]:
    name = made.name
    yield from cannot_fill(name, tensor)
    if made.shape != tuple(tensor.shape):
        of = "" if made.conversion is None else f", made of {shown(made.conversion.names)}"
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
    less, more = torch.finfo(narrow), torch.finfo(wide)
    return more.eps <= less.eps and more.smallest_normal * more.eps <= less.smallest_normal * less.eps


# ---- What Hugging Face's transformers declares about files of a model: other names, tensors that are merged or cut.
# There is no table here: transformers itself is asked, about a model of its own only, so it is there already. What is
# made of several tensors it makes in host memory, one conversion at a time.

_BUFFERS = ("rotary_emb.inv_freq", "position_ids")
"""That transformers once saved, and no longer does; it leaves them out of files for every model that has such."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Saved tensors that make others of the model: the first is `name`. `converter` is one of transformers'."""

    name: str
    converter: Any
    model: Any
    patterns: list[str] = field(default_factory=list)
    """Of the converter, one for each of `names`."""
    names: list[str] = field(default_factory=list)
    """Of the saved tensors, in the order in which they are merged."""
    sources: list[Source] = field(default_factory=list)

    def planned(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model by name, without memory. Raises `CheckpointError` if nothing can be made."""
        try:
            with torch.device("meta"):
                return self._convert([torch.empty(one.stored.shape, dtype=one.stored.dtype) for one in self.sources])
        except Exception as error:
            raise CheckpointError(f"{self.name} cannot be made of {shown(self.names)}: {error}") from error

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Make `targets`, by name, in host memory: as much of it as `sources` and what is made of them."""
        tensors = [torch.empty(one.stored.shape, dtype=one.stored.dtype, device="cpu") for one in self.sources]
        for source, tensor in zip(self.sources, tensors, strict=True):
            read_tensors(source.file, [(source.stored, tensor)])
        with torch.no_grad():
            made = self._convert(tensors)
            for name, tensor in targets.items():
                tensor.copy_(made[name])

    def _convert(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, name, tensor in zip(self.patterns, self.names, tensors, strict=True):
            converter.add_tensor(self.name, name, pattern, tensor)
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        made = made[0] if isinstance(made, tuple) else made  # with the errors, which it raised, in 5.0
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Declared:
    """What is declared for `model`, whose state has `names`; nothing, if it is none of transformers."""

    def __init__(self, model: torch.nn.Module, names: set[str]) -> None:
        self._names = names
        self._model = _as_its_library_knows_it(model)
        self._prefix: str = getattr(self._model, "base_model_prefix", "")
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._order: Callable[[str], Any] = str
        if self._model is None:
            return
        try:
            from transformers import conversion_mapping, core_model_loading
        except ImportError:  # before transformers 5
            return
        self._order = core_model_loading.dot_natural_key
        for transform in conversion_mapping.get_model_conversion_mapping(self._model):
            converts = isinstance(transform, core_model_loading.WeightConverter)
            (self._converters if converts else self._renamings).append(transform)

    def sort(self, sources: Mapping[str, Source]) -> tuple[dict[str, str], list[Conversion]]:
        """Return which of `sources` are which names of the model, and what has to be converted.

        A name that the model does not have is one of the result too. Raises `CheckpointError` for two of one name.
        """
        plain: dict[str, str] = {}
        conversions: dict[str, Conversion] = {}
        for key in sorted(sources, key=self._order):  # experts.2 before experts.10; some renamings depend on it, too
            name, converter, pattern = self._renamed(key)
            if converter is not None:
                conversion = conversions.setdefault(name, Conversion(name, converter, self._model))
                conversion.patterns.append(pattern)
                conversion.names.append(key)
                conversion.sources.append(sources[key])
            elif name in plain:
                raise CheckpointError(f"{plain[name]} and {key} in the files are both {name} of the model")
            else:
                plain[name] = key
        for name in conversions.keys() - self._names:  # which may need to see the tensor that they make
            plain.setdefault(name, conversions.pop(name).names[0])
        return plain, list(conversions.values())

    def _renamed(self, key: str) -> tuple[str, Any, str]:
        """Return the name of the model, the converter that makes it, if any does, and the pattern of that."""
        name, pattern = key, ""
        for renaming in self._renamings:
            name = str(renaming.rename_source_key(name)[0])
        for converter in self._converters:
            name, matched = converter.rename_source_key(name)
            if matched is not None:
                pattern = matched
                break
        else:
            converter = None
        name = self._prefixed(name)
        if name not in self._names and key in self._names:
            return key, None, ""
        return name, converter, pattern

    def _prefixed(self, name: str) -> str:
        """Return `name` as a model with a head names what its base model saved, or the other way round."""
        prefix = f"{self._prefix}."
        if self._prefix and name.startswith(prefix) and name[len(prefix) :] in self._names:
            return name[len(prefix) :]
        return prefix + name if self._prefix and prefix + name in self._names else name

    def wanted(self, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return both without the names that transformers declares may be missing, or unexpected."""
        if self._model is None:
            return list(missing), list(unexpected)
        may_miss, may_be = ([*(getattr(self._model, f"_keys_to_ignore_on_load_{kind}", None) or ())] for kind in _KINDS)
        buffers = [name for name, _ in self._model.named_buffers()]
        may_be += [re.escape(end) + "$" for end in _BUFFERS if any(name.endswith(end) for name in buffers)]
        return (
            [name for name in missing if not any(re.search(pattern, name) for pattern in may_miss)],
            [name for name in unexpected if not any(re.search(pattern, name) for pattern in may_be)],
        )


_KINDS = ("missing", "unexpected")


def _as_its_library_knows_it(model: torch.nn.Module) -> Any:
    """Return `model`, if it is of transformers, seen as the class of transformers that it is derived from, as
    declarations go by that class. None for any other model."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    known: Any = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))
    if known in (type(model), library.PreTrainedModel):
        return model
    seen = known.__new__(known)
    seen.__dict__.update(model.__dict__)
    return seen


def shown(names: Sequence[str]) -> str:
    """Return `names`, or their number and two of them."""
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({names[0]} … {names[-1]})"
