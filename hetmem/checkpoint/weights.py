"""Loads weights of other programs: one or many files of safetensors, read straight into a model on any tiers.

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

from hetmem.checkpoint.coded import CodedWeight, written
from hetmem.checkpoint.contents import (
    ModelState,
    all_of,
    cannot_fill,
    end_saves,
    of_model,
    other_model,
    refuse_half_stepped,
    refuse_other_than_modules,
)
from hetmem.checkpoint.disk import OpenFile, Source, read_names, read_tensors
from hetmem.checkpoint.layout import Stored
from hetmem.checkpoint.quantised_files import QuantisedTensor, grouped, renamed
from hetmem.checkpoint.save_load import partly_loaded
from hetmem.checkpoint.sharing import Sharing
from hetmem.errors import CheckpointError


class LoadedWeights(NamedTuple):
    """The names that did not match, as `torch.nn.Module.load_state_dict` returns them."""

    missing_keys: list[str]
    """Names of the model that the files lack; tied ones count once."""
    unexpected_keys: list[str]
    """Names in the files that the model lacks."""


@torch.inference_mode(False)  # tensors made here are written to later
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
    Face's `save_pretrained` and `snapshot_download` leave it. A model of transformers gets the same values as from its
    `from_pretrained`: renamed tensors, experts saved one by one, a base model's weights for a model with a head and the
    reverse. `rename` gets each name in the files first, and returns the model's, or None for a tensor to leave out.
    `strict=False` loads the tensors whose names match and returns the other names.

    Values go block by block to their homes: the model is never in host memory as a whole. A parameter that transformers
    merges from several saved tensors (experts of a layer) is in host memory with them, one parameter at a time. Casts
    to wider dtypes (bfloat16 files into float32 masters) are exact; a cast that rounds is refused unless
    `rounding=True`. Quantised weights (`frozen=` of `manage`) are encoded as they are read, one at a time; files that
    are quantised in the same format are taken as they are. The states of an optimizer stay as they are.

    Raises `CheckpointError` (a ValueError; names the tensors) and `StoreError` (an OSError; path, offset and bytes).
    Everything but the values themselves is compared first, and such errors change nothing; a disk that fails later,
    or an interrupt, leaves the model partly loaded, and the message says so. A file cannot run code.
    """
    refuse_other_than_modules(model)
    with all_of(model, "loading weights"), ExitStack() as stack:
        end_saves(model)
        sharing = Sharing(model)
        sharing.bring_writes_home()

        def check() -> tuple[LoadedWeights, ModelState, list[tuple[_Made, _Target]]]:
            return _checked(os.fspath(path), model, stack, strict=strict, rename=rename, rounding=rounding)

        keys, state, targets = sharing.together("the check of hetmem.load_weights", check, lambda found: str(found[0]))
        with partly_loaded("the model is"):
            with written(state.coded.values()):
                sharing.together("the reading of hetmem.load_weights", lambda: _read(targets, sharing))
            sharing.together("the end of hetmem.load_weights", lambda: sharing.renew_copies(model.parameters()))
    return keys


def _checked(
    path: str,
    model: torch.nn.Module,
    stack: ExitStack,
    *,
    strict: bool,
    rename: Callable[[str], str | None] | None,
    rounding: bool,
) -> tuple[LoadedWeights, ModelState, list[tuple[_Made, _Target]]]:
    """Compare the files at `path`, open until `stack` closes, with `model`: what does not match, its state, and what to
    fill of which source."""
    state = of_model(model)
    refuse_half_stepped(model, "call optimizer.step(), or its forget_step(), first")
    declared = Declared(model, state.names)
    sources, quantised = grouped(read_names(path, renamed(rename), stack))
    made = _made(declared, sources, quantised)
    keys = _compared(state, made, declared)
    if strict and any(keys):
        problems = [f"the files have no {name}" for name in keys.missing_keys]
        problems += [f"the model has no {name}" for name in keys.unexpected_keys]
        raise other_model("the weights are", problems, "rename= translates names, strict=False loads what matches")
    targets = _targets(state, made, rounding)
    for source, _ in targets:
        if source.quantised is not None:
            source.quantised.check()
    return keys, state, targets


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """The source of a tensor of the model: one tensor in the files, or the result of a `conversion` of several."""

    name: str
    shape: tuple[int, ...]
    sources: list[Source]
    conversion: Conversion | None
    quantised: QuantisedTensor | None = None


def _made(declared: Declared, sources: dict[str, Source], quantised: Mapping[str, QuantisedTensor]) -> dict[str, _Made]:
    """Return the sources of tensors by the model's names. Raises `CheckpointError` for two of one name, and for tensors
    that cannot be converted."""
    plain, conversions = declared.sort(sources)
    made: dict[str, _Made] = {}
    for name, key in plain.items():
        shape = quantised[key].shape if key in quantised else sources[key].stored.shape
        made[name] = _Made(name, shape, [sources[key]], None, quantised.get(key))
    for conversion in conversions:
        if merged := [key for key in conversion.names if key in quantised]:
            raise CheckpointError(
                f"{shown(merged)} in the files are quantised, and merged into {conversion.name} of the model: load "
                f"files of 16 bits, which are encoded as they are read"
            )
    for conversion in conversions:
        for name, tensor in conversion.planned().items():
            if name in made:
                other = made[name].sources[0].stored.name
                raise CheckpointError(
                    f"{other} and {shown(conversion.names)} in the files are both {name} of the model"
                )
            made[name] = _Made(name, tuple(tensor.shape), conversion.sources, conversion)
    return made


_Target = torch.Tensor | CodedWeight


def _read(targets: list[tuple[_Made, _Target]], sharing: Sharing) -> None:
    """Fill the tensors in the order of the files; quantised weights one by one. Of what ranks share, each reads its
    part, and converts one of every N."""
    files: dict[OpenFile, list[tuple[Stored, torch.Tensor]]] = {}
    shared: dict[OpenFile, list[tuple[Stored, torch.Tensor]]] = {}
    converted: dict[Conversion, dict[str, _Target]] = {}
    for made, tensor in sorted(targets, key=lambda target: target[0].sources[0].stored.start):
        if made.conversion is not None:
            converted.setdefault(made.conversion, {})[made.name] = tensor
        elif isinstance(tensor, CodedWeight) and made.quantised is not None:
            made.quantised.fill(tensor)
        elif isinstance(tensor, CodedWeight):
            source = made.sources[0]
            values = torch.empty(source.stored.shape, dtype=source.stored.dtype, device="cpu")
            read_tensors(source.file, [(source.stored, values)])
            tensor.encode(values)
        else:
            home = sharing.home(tensor)
            of_file = (files if home is None else shared).setdefault(made.sources[0].file, [])
            of_file.append((made.sources[0].stored, tensor if home is None else home))
    for found, part in ((files, slice(None)), (shared, sharing.part)):
        for file, mine in found.items():
            read_tensors(file, sorted(mine, key=lambda target: target[0].start), part=part)
    for number, (conversion, tensors) in enumerate(converted.items()):
        shown = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        homes = {name: home for name, each in shown.items() if (home := sharing.home(each)) is not None}
        if sharing.owns(number) or len(homes) < len(tensors):
            conversion.fill({**tensors, **homes})


def _compared(state: ModelState, made: dict[str, _Made], declared: Declared) -> LoadedWeights:
    missing = [name for name, aliases in state.aliases.items() if not made.keys() & {*aliases}]
    missing += [name for name in state.made if name not in made]
    return LoadedWeights(*declared.wanted(missing, sorted(made.keys() - state.names)))


def _targets(state: ModelState, made: dict[str, _Made], rounding: bool) -> list[tuple[_Made, _Target]]:
    """Return the sources with the tensors to fill. Raises `CheckpointError`, which names mismatches."""
    problems: list[str] = []
    targets: list[tuple[_Made, _Target]] = []
    several: list[list[str]] = []
    for name, aliases in state.aliases.items():
        present = [alias for alias in aliases if alias in made]
        if len(present) > 1:
            several.append(present)
        for alias in present:
            coded = state.coded.get(name)
            tensor = state.tensors[name] if coded is None else coded.managed.like()
            if (quantised := made[alias].quantised) is not None:
                problems += quantised.differences(name, coded)
                continue
            problems += _differences(made[alias], tensor, rounding or coded is not None, memory=coded is None)
        targets += [(made[alias], state.coded.get(name, state.tensors[name])) for alias in present[:1]]
    problems += [f"{name} is not a tensor in the model" for name in state.made if name in made]
    if problems:
        raise other_model("the weights are", problems)
    for tied in several:
        if len({_values(made[alias]) for alias in tied}) > 1:
            raise other_model(
                "the weights are", [f"{' and '.join(tied)} are one tensor in the model, and differ in the files"]
            )
    return targets


def _values(made: _Made) -> tuple[object, ...]:
    return tuple((source.stored.dtype, *read_tensors(source.file, [(source.stored, None)])) for source in made.sources)


def _differences(made: _Made, tensor: torch.Tensor, rounding: bool, *, memory: bool) -> Iterator[str]:
    """Yield why `tensor`, which has `memory` to load into unless it is quantised, cannot have the values of `made`."""
    name = made.name
    if memory:
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
    """Return whether every value of dtype `narrow` is one of `wide`: by its precision, and its least subnormal."""
    less, more = torch.finfo(narrow), torch.finfo(wide)
    return more.eps <= less.eps and more.smallest_normal * more.eps <= less.smallest_normal * less.eps


# ---- What Hugging Face's transformers declares about the files of its models: renamed, merged and split tensors.
# The declarations are read from transformers itself, which any model of it has imported already. It merges tensors in
# host memory, one conversion at a time.

_BUFFERS = ("rotary_emb.inv_freq", "position_ids")
"""Buffers that transformers saved once and ignores in files now, for every model that has them."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Saved tensors that are converted to others of the model, the first of which is `name`. `converter`: an object of
    transformers."""

    name: str
    converter: Any
    model: Any
    patterns: list[str] = field(default_factory=list)
    """The converter's pattern for each of `names`."""
    names: list[str] = field(default_factory=list)
    """The names of the saved tensors, in the order in which they are merged."""
    sources: list[Source] = field(default_factory=list)

    def planned(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model by name, on `meta`. Raises `CheckpointError` if the conversion fails."""
        try:
            with torch.device("meta"):
                return self._convert([torch.empty(one.stored.shape, dtype=one.stored.dtype) for one in self.sources])
        except Exception as error:
            raise CheckpointError(f"{self.name} cannot be made of {shown(self.names)}: {error}") from error

    def fill(self, targets: Mapping[str, torch.Tensor | CodedWeight]) -> None:
        """Convert the sources into `targets`, by name; takes the memory of both in host memory."""
        tensors = [torch.empty(one.stored.shape, dtype=one.stored.dtype, device="cpu") for one in self.sources]
        for source, tensor in zip(self.sources, tensors, strict=True):
            read_tensors(source.file, [(source.stored, tensor)])
        with torch.no_grad():
            made = self._convert(tensors)
            for name, target in targets.items():
                if isinstance(target, CodedWeight):
                    target.encode(made[name])
                else:
                    target.copy_(made[name])

    def _convert(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, name, tensor in zip(self.patterns, self.names, tensors, strict=True):
            converter.add_tensor(self.name, name, pattern, tensor)
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 returns errors too, and has raised them
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Declared:
    """The declarations of transformers for `model`, whose state has `names`; none for a model of another library."""

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
        """Return the keys of `sources` by the model's names, and the conversions of the others.

        Includes names that the model does not have. Raises `CheckpointError` for two keys of one name.
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
        for name in conversions.keys() - self._names:  # a conversion may read the tensor of the model, missing here
            plain.setdefault(name, conversions.pop(name).names[0])
        return plain, list(conversions.values())

    def _renamed(self, key: str) -> tuple[str, Any, str]:
        """Return the model's name for `key`, its converter or None, and the converter's pattern that matched."""
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
        """Return `name` with the base model's prefix added or removed, where only that is a name of the model."""
        prefix = f"{self._prefix}."
        if self._prefix and name.startswith(prefix) and name[len(prefix) :] in self._names:
            return name[len(prefix) :]
        return prefix + name if self._prefix and prefix + name in self._names else name

    def wanted(self, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return both without the names that transformers declares optional."""
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
    """Return `model` as an instance of the class of transformers that it is derived from, as declarations are by class.
    None for a model of another library."""
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
    """Format `names`: one as it is, several as their number with the first and the last."""
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({names[0]} … {names[-1]})"
