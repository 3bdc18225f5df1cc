"""What Hugging Face's transformers declares about the files of a model: other names, tensors that are merged or cut.

There is no table here: transformers itself is asked, and only about a model of its own, so it is there already. Knows
names and transformers' conversions.

Tensors that a conversion makes of others are read block by block, straight to where they belong, if it only moves
elements: which ones it puts where is found out without their values, as it runs on stand-ins.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hetmem.checkpoint.disk import OpenFile, Source
from hetmem.checkpoint.layout import Stored
from hetmem.checkpoint.moving import read_tensors
from hetmem.errors import CheckpointError

_BUFFERS = ("rotary_emb.inv_freq", "position_ids")
"""That transformers once saved, and no longer does; it leaves them out of files for every model that has such."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Saved tensors that make others of the model: the first is `name`. `converter` is one of transformers'."""

    name: str
    converter: Any
    model: Any
    collected: list[tuple[str, str]] = field(default_factory=list)
    """Pattern of the converter and name of a tensor, in the order in which they are merged."""

    @property
    def names(self) -> list[str]:
        """Of the saved tensors."""
        return [name for _, name in self.collected]

    def convert(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the model by name, out of `tensors`, one for each of `names`."""
        converter = copy.deepcopy(self.converter)
        for (pattern, name), tensor in zip(self.collected, tensors, strict=True):
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
        self._renamings: list[Callable[[str], str]] = []
        self._converters: list[Any] = []
        self._order: Callable[[str], Any] = str
        if self._model is None:
            return
        try:
            from transformers import conversion_mapping, core_model_loading
        except ImportError:  # transformers 4
            self._renamings = _renamings_of_4(self._model)
            return
        self._order = core_model_loading.dot_natural_key
        for transform in conversion_mapping.get_model_conversion_mapping(self._model):
            if isinstance(transform, core_model_loading.WeightConverter):
                self._converters.append(transform)
            else:
                self._renamings.append(partial(_renamed_by, transform))

    def sort(self, keys: Iterable[str]) -> tuple[dict[str, str], list[Conversion]]:
        """Which of the `keys` of files are which names of the model, and which have to be converted.

        A name that the model does not have is one of the result too. Raises `CheckpointError` for two of one name.
        """
        plain: dict[str, str] = {}
        conversions: dict[str, Conversion] = {}
        for key in sorted(keys, key=self._order):  # experts.2 before experts.10; some renamings depend on it, too
            name, converter, pattern = self._renamed(key)
            if converter is not None:
                conversion = conversions.setdefault(name, Conversion(name, converter, self._model))
                conversion.collected.append((pattern, key))
            elif name in plain:
                raise CheckpointError(f"{plain[name]} and {key} in the files are both {name} of the model")
            else:
                plain[name] = key
        for name in conversions.keys() - self._names:  # which may need to see the tensor that they make
            plain.setdefault(name, conversions.pop(name).names[0])
        return plain, list(conversions.values())

    def _renamed(self, key: str) -> tuple[str, Any, str]:
        """The name of the model, the converter that makes it, if any does, and the pattern of that."""
        name, pattern = key, ""
        for rename in self._renamings:
            name = rename(name)
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
        """As a model with a head names what its base model saved, or the other way round."""
        prefix = f"{self._prefix}."
        if self._prefix and name.startswith(prefix) and name[len(prefix) :] in self._names:
            return name[len(prefix) :]
        return prefix + name if self._prefix and prefix + name in self._names else name

    def wanted(self, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
        """Those that are not declared to be of no matter."""
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
    """`model`, if it is of transformers; seen as the class of transformers that it is derived from, as what is declared
    goes by that. None for any other."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    known: Any = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))
    if known in (type(model), library.PreTrainedModel):
        return model
    seen = known.__new__(known)
    seen.__dict__.update(model.__dict__)
    return seen


def _renamed_by(transform: Any, key: str) -> str:
    return str(transform.rename_source_key(key)[0])


def _renamings_of_4(model: Any) -> list[Callable[[str], str]]:
    """Of transformers before 5, which renames only."""
    mapping: dict[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    fix: Any = getattr(model, "_fix_state_dict_key_on_load", None)

    def fixed(key: str) -> str:
        new = key if fix is None else fix(key)
        return new if isinstance(new, str) else str(new[0])  # with whether it is another one, since 4.48

    def mapped(key: str) -> str:
        for pattern, new in mapping.items():
            key, count = re.subn(pattern, new, key)
            if count:
                break
        return key

    return [fixed, mapped]


Place = Callable[[torch.Tensor], torch.Tensor]
"""The view of a whole that one part of it has."""


_TENSOR: Any = torch.Tensor
_GET_DATA = _TENSOR.data.__get__
_BY_STRIDES = {torch.as_strided, torch.Tensor.as_strided}


class NotFollowedError(ValueError):
    """The operation does more than to move elements, or moves them in another way than those known here."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of the stand-in `number` from element `first` on, in their order, which belong `into` that view."""

    number: int
    first: int
    into: torch.Tensor


@dataclass(slots=True, eq=False)
class _StandIn:
    """A contiguous tensor without memory, whose views torch itself keeps account of; `parts`: what it was joined of."""

    tensor: torch.Tensor
    parts: list[tuple[Place, torch.Tensor]] = field(default_factory=list)


class Rearranging(TorchFunctionMode):
    """Within this mode what runs on `stand_ins` is followed: `torch.stack`, `torch.cat` and whatever makes views.

    Copies to other strides (`contiguous`) are left out, as they move nothing that matters here.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        with torch.inference_mode(False):  # where tensors count versions
            self.stand_ins = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        self._numbers = {_storage(each): number for number, each in enumerate(self.stand_ins)}
        self._known = {_storage(each): _StandIn(each) for each in self.stand_ins}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        if func in _BY_STRIDES:
            raise NotFollowedError("it goes by strides, which are others here")
        with torch.inference_mode(False):
            if func is torch.cat or func is torch.stack:
                return self._joined(func, *args, **(kwargs or {}))
            if func == _GET_DATA:  # writes to which would count no version
                return args[0].detach()
            return func(*args, **(kwargs or {}))

    def _joined(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        made: torch.Tensor = func(tensors, dim)
        joined, first = _StandIn(made), 0
        for number, part in enumerate(tensors):
            if func is torch.stack:
                place: Place = partial(torch.select, dim=dim, index=number)
            else:
                place = partial(torch.narrow, dim=dim, start=first, length=part.shape[dim])
                first += part.shape[dim]
            joined.parts.append((place, part))
        self._known[_storage(made)] = joined
        return made

    def runs(self, made: torch.Tensor, into: torch.Tensor) -> Iterator[Run]:
        """Where the elements of `made`, which came out of the operations, come from, for all of `into`, of that shape.

        Raises `NotFollowedError` where that is not known.
        """
        known = self._known.get(_storage(made))
        if known is None or known.tensor._version or made.is_conj() or made.is_neg():
            raise NotFollowedError("its values are not those of the tensors that it is made of")
        if made.dtype != known.tensor.dtype or made.shape != into.shape:
            raise NotFollowedError("its elements are others than those of the tensors that it is made of")
        order = _order(made)
        made, into = made.permute(order), into.permute(order)
        if not known.parts:
            yield from _runs(self._numbers[_storage(made)], made, into)
            return
        if not made.is_contiguous():
            raise NotFollowedError("parts of what was joined are used")
        order = _order(known.tensor)  # torch joins tensors with channels last to one with channels last
        into = _viewed(into, known.tensor.permute(order).shape).permute(
            sorted(range(len(order)), key=order.__getitem__)
        )
        for place, part in known.parts:
            yield from self.runs(part, place(into))


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of `tensor` as they lie in memory."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _runs(number: int, made: torch.Tensor, into: torch.Tensor) -> Iterator[Run]:
    if made.is_contiguous():
        yield Run(number, int(made.storage_offset()), into)
        return
    if made.dim() < 2:
        raise NotFollowedError("single elements are picked")
    for index in range(made.shape[0]):
        yield from _runs(number, made[index], into[index])


def _viewed(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    try:
        return tensor.view(shape)
    except RuntimeError as error:
        raise NotFollowedError("dimensions are merged that do not lie together") from error


def _storage(tensor: torch.Tensor) -> int:
    """Tells storages apart, as long as they live."""
    return int(tensor.untyped_storage()._cdata)


Reads = list[tuple[OpenFile, Stored, torch.Tensor]]
"""What is to be read from which file into which tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """`made`: by the names of the model, what `conversion` makes of `sources`, without memory."""

    conversion: Conversion
    sources: list[Source]
    made: dict[str, torch.Tensor]
    _followed: Rearranging | None

    def reads(self, name: str, into: torch.Tensor) -> Reads | None:
        """What fills `into`, which is to be `name`, of the shape that is made. None if only `fill` can."""
        if self._followed is None:
            return None
        try:
            runs = list(self._followed.runs(self.made[name], into))
        except NotFollowedError:
            return None
        stored = [source.stored for source in self.sources]
        return [
            (self.sources[run.number].file, _part(stored[run.number], run.first, run.into), run.into) for run in runs
        ]

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """The same by the conversion itself, in host memory: as much as `sources` and what is made of them."""
        tensors = [torch.empty(source.stored.shape, dtype=source.stored.dtype, device="cpu") for source in self.sources]
        for source, tensor in zip(self.sources, tensors, strict=True):
            read_tensors(source.file, [(source.stored, tensor)])
        with torch.no_grad():
            made = self.conversion.convert(tensors)
            for name, tensor in targets.items():
                tensor.copy_(made[name])


def merge(conversion: Conversion, sources: Sequence[Source]) -> Merge:
    """What `conversion` would make of `sources`, one for each of its names; nothing is read.

    Raises `CheckpointError` if it cannot make anything of them.
    """
    shapes = [(source.stored.shape, source.stored.dtype) for source in sources]
    followed = Rearranging(shapes)
    try:
        with followed:
            return Merge(conversion, list(sources), conversion.convert(followed.stand_ins), followed)
    except Exception:  # whatever it is, an operation that is not understood here may be right
        pass
    try:
        made = conversion.convert([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
    except Exception as error:
        raise CheckpointError(f"{conversion.name} cannot be made of {shown(conversion.names)}: {error}") from error
    return Merge(conversion, list(sources), made, None)


def shown(names: Sequence[str]) -> str:
    """`names`, or their number and two of them."""
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({names[0]} … {names[-1]})"


def _part(stored: Stored, first: int, into: torch.Tensor) -> Stored:
    """The elements of `stored` from `first` on that fill `into`."""
    return replace(stored, shape=tuple(into.shape), start=stored.start + first * stored.dtype.itemsize)
