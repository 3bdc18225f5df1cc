"""Loads all of a checkpoint, or nothing.

Note "all or nothing": names, shapes, dtypes and sizes are compared first, then every byte is read and its checksum
compared, and only then anything is overwritten. The old values are not backed up, which would take a copy of the whole
model: if the disk fails in the second reading, after the first has succeeded, or that is interrupted, the model is
partly loaded, and the error says so.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetmem.base.schema import shown
from hetmem.base.units import format_size
from hetmem.checkpoint.coded import CodedWeight, differences, written
from hetmem.checkpoint.contents import (
    ModelState,
    all_of,
    cannot_fill,
    check_beside,
    decode,
    end_saves,
    name_numbers,
    of_model,
    other_model,
    parameter_names,
    parameters_of,
    refuse_half_stepped,
    refuse_option,
    refuse_other_than_modules,
    refuse_state,
    strides_of,
)
from hetmem.checkpoint.disk import (
    OpenFile,
    named,
    opened,
    read_tensors,
)
from hetmem.checkpoint.header import Header, parse
from hetmem.checkpoint.layout import EXTRA, OPTIMIZER, Stored
from hetmem.checkpoint.sharing import Sharing
from hetmem.errors import CheckpointError, PeerError, StoreError
from hetmem.memory.heap import trimmed
from hetmem.optim.optimizer import OffloadedOptimizer

_EXTRA_STATE = "_extra_state"
"""The end of the keys of what modules return from `get_extra_state`."""
Targets = list[tuple[Stored, torch.Tensor]]


@torch.inference_mode(False)  # tensors made here are written to later
def load(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load the file that `hetmem.save` wrote to `path` into `model` and `optimizer`; return the saved `extra`.

    Values are written in place, block by block, on whatever tier they live: budget, chunk size and placement may differ
    from when it was saved, and a plain model's checkpoint loads into a managed one and the reverse. Training continues
    with the same bits as without the break: weights, buffers, states, step counts, options of parameter groups and the
    loss scale are restored. Parameters are matched by name. Without `optimizer` the one in the file is ignored.
    Host memory: a few blocks of 16 MiB, `extra`, and the states of an optimizer that is not hetmem's.

    All or nothing: everything is compared first (names, shapes, dtypes, sizes, groups), and every byte to be loaded is
    read and checked against its CRC-32, before anything is changed. So `CheckpointError` (a ValueError, which names
    the parameter) and `StoreError` (an OSError, with path, offset and bytes) leave model and optimizer as they were.
    The one exception: bytes are read twice, and a disk that fails only in the second reading, or an interrupt there,
    leaves them partly loaded; the message says so, also that of the `KeyboardInterrupt`. Load again then, this or
    another checkpoint.

    A file cannot run code. Updates that `optimizer` has begun (during backward) are discarded; call
    `optimizer.zero_grad()` if there are gradients. Raises `CheckpointError` if another optimizer has begun a step of
    `model`. A group of ranks loads together; an error on one of them is a `PeerError` on the others, with nothing
    changed on any.
    """
    handled = sys.exc_info()[1]
    try:
        return _load_whole(path, model, optimizer)
    except BaseException as error:
        _forget_locals(error, handled)
        raise


def _load_whole(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    refuse_other_than_modules(model)
    with trimmed(), all_of(model, "loading a checkpoint"), ExitStack() as open_files:
        end_saves(model)
        sharing = Sharing(model)
        sharing.bring_writes_home()

        def check() -> _Load:
            return _checked(open_files.enter_context(opened(os.fspath(path))), model, optimizer, sharing)

        load = sharing.together("the check of hetmem.load", check, _Load.in_words)
        with partly_loaded("model and optimizer are"):
            with written(load.coded):
                sharing.together("the reading of hetmem.load", load.fill, lambda _: "")
            sharing.together("the end of hetmem.load", lambda: sharing.renew_copies(model.parameters()))
        return load.extra


def _forget_locals(error: BaseException | None, handled: BaseException | None) -> None:
    """Have what was called and has raised `error` hold no weights and states: a program that keeps the error would.
    What led to `handled`, which the program was handling before, stays as it is."""
    while error is not None and error is not handled:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A file that has been checked, and what it is to fill: `targets`, what `begin` returns, and `made`."""

    file: _Reader
    model: torch.nn.Module
    sharing: Sharing
    extra: Any
    targets: Targets
    begin: Callable[[], Targets]
    made: dict[str, Any]
    """What modules make for a state dict, by name."""
    coded: list[CodedWeight]

    def in_words(self) -> str:
        """Return what ranks compare: which file, and how much of it."""
        return f"load the file of header {zlib.crc32(self.file.source.header):08x}, {len(self.targets)} tensors"

    def fill(self) -> None:
        """Load all of it, and of what ranks share the part of this one."""
        targets = self.targets + self.begin()
        homes = [(stored, self.sharing.home(tensor)) for stored, tensor in targets]
        own = [target for target, (_, home) in zip(targets, homes, strict=True) if home is None]
        self.file.read([(stored, home) for stored, home in homes if home is not None], self.sharing.part)
        self.file.read(own)
        if self.made:
            self.model.load_state_dict(self.made, strict=False)


def _checked(
    source: OpenFile, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, sharing: Sharing
) -> _Load:
    """Compare `source` with `model` and `optimizer`, and check this rank's part of its bytes. Raises `CheckpointError`
    and `StoreError`; nothing is changed."""
    with named(source.path):
        file = _Reader(source, parse(source.header, source.data_nbytes))
    state = of_model(model)
    refuse_half_stepped(model, "load it with that optimizer too, or call its forget_step() first", optimizer)
    targets = _match_model(state, file.header)
    numbers = {} if optimizer is None else _match_optimizer(optimizer, model, file)
    file.check(lambda name: optimizer is not None or not name.startswith(OPTIMIZER), sharing.part)
    extra = decode(file.header.values["extra"], file.tensor, "extra")
    sources = {name: file.header.values["tied"].get(name, name) for name in state.made}
    made = {name: file.tensor(source) for name, source in sources.items() if source in file.header.stored}
    objects = file.header.values["objects"].items()
    made |= {name: decode(value, file.tensor, f"the extra state {name}") for name, value in objects}
    begin = list if optimizer is None else _prepare(optimizer, numbers, file)
    file.fill()
    return _Load(file, model, sharing, extra, targets, begin, made, [*state.coded.values()])


class _Reader:
    """The tensors of one checkpoint, read into existing tensors or into new ones."""

    def __init__(self, source: OpenFile, header: Header) -> None:
        self.source, self.header = source, header
        self._new: Targets = []

    def check(self, wanted: Callable[[str], bool], part: slice) -> None:
        """Read `part` of the blocks of tensors whose names are wanted, and compare their checksums."""
        stored = [(one, None) for name, one in self.header.stored.items() if wanted(name)]
        read_tensors(self.source, stored, self.header.checks, part)

    def read(self, targets: Targets, part: slice = slice(None)) -> None:
        """Fill `part` of the blocks of `targets`, in the order of the file."""
        targets = sorted(targets, key=lambda target: target[0].start)
        read_tensors(self.source, targets, self.header.checks, part)

    def tensor(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Make a tensor for the stored one called `name`, for `fill` to read: in host memory, or on the device of
        `like` and, if the shapes are equal, with its strides."""
        stored = self.header.stored[name]
        if like is not None and stored.shape == tuple(like.shape):
            made = torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
        else:
            device = torch.device("cpu") if like is None or not stored.shape else like.device
            try:
                made = torch.empty(stored.shape, dtype=stored.dtype, device=device)
            except RuntimeError as error:
                size = f"{stored.nbytes} bytes ({format_size(stored.nbytes)})"
                raise CheckpointError(f"there is no memory for {name}, of {size}: {error}") from error
        self._new.append((stored, made))
        return made

    def placeholder(self, name: str) -> Any:
        """Return a tensor on `meta` that stands for a state with a home; for a number, as `tensor` does."""
        stored = self.header.stored[name]
        if not stored.shape:
            return self.tensor(name)
        placeholder: Any = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        placeholder.stored = stored
        return placeholder

    def fill(self) -> None:
        """Fill the tensors that `tensor` has made."""
        self.read(self._new)
        self._new = []


@contextmanager
def partly_loaded(what: str) -> Iterator[None]:
    """Add to errors of the block that `what` ("the model is") partly loaded."""
    warning = f"{what} partly loaded now: load again, this or another checkpoint, before using it"
    try:
        yield
    except StoreError as error:
        raise StoreError(error.errno or errno.EIO, f"{error.strerror}; {warning}") from error
    except PeerError as error:
        raise PeerError(f"{error}; {warning}") from error
    except Exception as error:
        raise CheckpointError(f"{str(error) or repr(error)}; {warning}") from error
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(warning) from error


# ---- the model -------------------------------------------------------------------------------------------------------


def _match_model(state: ModelState, header: Header) -> Targets:
    """Return the stored tensor for each of the model's. Raises `CheckpointError`, which names mismatches."""
    tied: dict[str, str] = header.values["tied"]
    objects, codings = header.values["objects"], header.values.get("codings", {})
    saved = {name for name in header.stored if not name.startswith((OPTIMIZER, EXTRA))} | {*tied, *objects}
    problems = [f"the checkpoint has no {name}" for name in sorted(state.names - saved)]
    problems += [f"the model has no {name}" for name in sorted(saved - state.names)]
    targets: Targets = []
    problems += _refused_by_the_model(state, header)
    for name, aliases in state.aliases.items():
        tensor = state.tensors[name]
        sources = dict.fromkeys(tied.get(alias, alias) for alias in aliases if alias in saved)
        sources = {source: None for source in sources if source in header.stored}
        found = [header.stored[source] for source in sources]
        for one in found:
            other = [*differences(name, state.coded.get(name), codings.get(one.name))]
            problems += other or _differences(name, one, tensor)
        if len({tuple(header.checks[source]) for source in sources}) > 1:
            problems.append(f"{' and '.join(sources)} are one tensor in the model, and differ in the checkpoint")
        if not found and not problems:
            problems.append(f"{name} is no tensor in the checkpoint")
        targets += [(one, tensor) for one in found[:1]]
    if problems:
        raise other_model("the checkpoint is", problems)
    return targets


def _refused_by_the_model(state: ModelState, header: Header) -> Iterator[str]:
    """Yield what `load_state_dict` would refuse, or write to a tensor, when values that modules make are loaded."""
    made_up = {
        name: tuple(value.shape)
        for name, value in state.made.items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    for name in header.values["objects"]:
        if name in state.names and (name not in state.made or name in made_up):
            yield f"{name} is a tensor in the model and none in the checkpoint"
    for name, shape in made_up.items():
        stored = header.stored.get(header.values["tied"].get(name, name))
        if stored is not None and stored.shape != shape:
            yield f"{name} is {stored.shape} in the checkpoint and {shape} in the model"


def _differences(name: str, stored: Stored, tensor: torch.Tensor) -> Iterator[str]:
    yield from cannot_fill(name, tensor)
    saved, own = (stored.shape, stored.dtype), (tuple(tensor.shape), tensor.dtype)
    if saved != own:
        yield f"{name} is {saved[0]} of {saved[1]} in the checkpoint and {own[0]} of {own[1]} in the model"


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def _match_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, file: _Reader) -> dict[str, int]:
    """Return the numbers of the parameters of `optimizer` by all their names. Raises `CheckpointError` for a file that
    does not match."""
    if "optimizer" not in file.header.values:
        raise CheckpointError(f"{file.source.path!r} was saved without an optimizer")
    saved = file.header.values["optimizer"]
    name_numbers(optimizer, model)
    parameters, names = list(parameters_of(optimizer)), parameter_names(model)
    numbers = {name: number for number, parameter in enumerate(parameters) for name in names[id(parameter)]}
    options, saved_options = {str(name) for name in optimizer.defaults}, set(saved["defaults"])
    if options - saved_options and saved_options - options:
        raise CheckpointError(
            f"the checkpoint is of another kind of optimizer: its options are {', '.join(sorted(saved_options))}, "
            f"those of this {type(optimizer).__name__} {', '.join(sorted(options))}"
        )
    _match_groups(optimizer.param_groups, saved["groups"], numbers)
    for name in {**saved["state"], **saved["strides"]}:
        if name not in numbers:
            raise CheckpointError(f"the checkpoint has states of {name}, and the optimizer no such parameter")
    for name, strides in saved["strides"].items():
        own = strides_of(parameters[numbers[name]])
        if own != strides:
            raise CheckpointError(
                f"{name} has the strides {strides} in the checkpoint and {own} in the model, and its states are in the "
                f"order of its memory: build the model with the memory format that was saved"
            )
    return numbers


def _match_groups(groups: list[dict[str, Any]], stored: list[dict[str, Any]], numbers: dict[str, int]) -> None:
    if len(groups) != len(stored):
        raise CheckpointError(f"the checkpoint has {len(stored)} parameter groups, the optimizer {len(groups)}")
    first = 0
    for place, (own, saved) in enumerate(zip(groups, stored, strict=True)):
        expected = set(range(first, first := first + len(own["params"])))
        lacks = expected - {numbers.get(name) for name in saved["params"]}
        found = [(name, "checkpoint", "optimizer") for name in saved["params"] if numbers.get(name) not in expected]
        found += [(name, "optimizer", "checkpoint") for name, number in numbers.items() if number in lacks]
        for name, one, other in found:
            raise CheckpointError(f"{name} is in parameter group {place} of the {one}, and not in that of the {other}")


def _prepare(optimizer: torch.optim.Optimizer, numbers: dict[str, int], file: _Reader) -> Callable[[], Targets]:
    """Read all of the optimizer but states with homes. Return a function that loads it into `optimizer`, and returns
    the states still to be read; one that is not hetmem's is loaded here. If this raises, nothing has changed."""
    parameters, saved = list(parameters_of(optimizer)), file.header.values["optimizer"]
    offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
    state: dict[Any, Any] = {}
    for name, values in saved["state"].items():
        tensor = file.placeholder if offloaded else partial(file.tensor, like=parameters[numbers[name]])
        state[numbers[name]] = _decoded_dict(values, tensor, f"the state of {name}")
    others = _decoded_dict(saved["others"], file.tensor, "states of no parameter")
    first, groups = 0, list[dict[str, Any]]()
    for own, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        members = range(first, first := first + len(own["params"]))
        options = _decoded_dict(stored["options"], file.tensor, f"the options of parameter group {len(groups)}")
        groups.append({**own, **options, "params": list(members)})
    beside = decode(saved["beside"], file.tensor, "the loss scale or seed")
    file.fill()
    for place, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in group.items():
            refuse_option(f"{key} of parameter group {place}", value, own.get(key, ...))
    check_beside(beside)
    loaded = {"state": {**state, **others}, "param_groups": groups}
    for name in saved["state"]:
        refuse_state(f"the state of {name}", state[numbers[name]])
    if offloaded is None:
        _load_or_nothing(optimizer, loaded)
        return list
    offloaded.check_state_dict(loaded)

    def begin() -> Targets:
        try:
            offloaded.forget_step()
        except Exception:  # an update failed whose results are overwritten now; the second call does without it
            offloaded.forget_step()
        offloaded.load_state_dict(loaded)
        if beside is not None:
            offloaded.load_beside_states(beside)
        shown = offloaded.state  # read once: it waits for all updates
        return [
            (value.stored, shown[parameters[number]][key])
            for number, values in state.items()
            for key, value in values.items()
            if getattr(value, "is_meta", False)
        ]

    return begin


def _load_or_nothing(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Load `loaded` into an optimizer that is not hetmem's, which makes new states and groups. Raises `CheckpointError`
    with the old ones in place."""
    before = dict(vars(optimizer))
    try:
        optimizer.load_state_dict(loaded)
    except BaseException as error:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"the states in the checkpoint are not those of a {type(optimizer).__name__}, whose load_state_dict raised "
            f"{error!r}"
        ) from error


def _decoded_dict(value: Any, tensor: Callable[[str], Any], place: str) -> dict[Any, Any]:
    found = decode(value, tensor, place)
    if type(found) is not dict:
        raise CheckpointError(f"{place} in the checkpoint: expected a dict, got {shown(found)}")
    return found
