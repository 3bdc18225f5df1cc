"""Saves a model and an optimizer to one file, atomically; at once, or in the background."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, Literal, overload

import torch

from hetmem.checkpoint.background import SaveHandle, held_chunks, pieces_at_home
from hetmem.checkpoint.contents import (
    Encoder,
    all_of,
    encode_optimizer,
    end_saves,
    of_model,
    refuse_half_stepped,
    refuse_other_than_modules,
)
from hetmem.checkpoint.disk import replacing, write_at, write_tensors
from hetmem.checkpoint.kept import Kept
from hetmem.checkpoint.layout import EXTRA, arrange, data_nbytes, header
from hetmem.checkpoint.sharing import Sharing
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk
from hetmem.memory.heap import trimmed
from hetmem.memory.interrupts import HELD_BACK


@overload
def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    wait: Literal[True] = True,
    keep: int | None = None,
) -> None: ...
@overload
def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    wait: Literal[False],
    keep: int | None = None,
) -> SaveHandle: ...
def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    wait: bool = True,
    keep: int | None = None,
) -> SaveHandle | None:
    """Save `model`, `optimizer` and `extra` to the file `path`, block by block, from whatever tier they are on.

    The file is in the format of safetensors: weights under the keys of `model.state_dict()`, so that any reader of that
    format finds them; see docs/checkpoints.md. It takes a few blocks of 16 MiB of host memory at most. Model and
    optimizer may be managed or plain, and in any placement, when they are saved and when they are loaded.
    `extra`: None, bool, int, float, complex, str, bytes, tensors, arrays and numbers of numpy, dtypes, and lists,
    tuples, sets and dicts of them, such as the `state_dict()` of a scheduler, of a second optimizer or of a scaler.

    Crash-safe: the new file is written beside `path` (as `.hetmem-…`, with a random name), synced to the disk, and then
    renamed to `path`; until then the earlier checkpoint stays whole. When this returns, the new one is on the disk. A
    link at `path` stays, and its target is replaced; what a killed save has left is removed by the next one to `path`.

    `wait=False`: return a `SaveHandle` at once, and write the weights and states of managed models in the background.
    The file is of the moment of the call, byte for byte. Training goes on: an update, or a function of the program that
    may write to a weight, waits for the chunks that it changes and that are not written yet. All else is written before
    the call returns: buffers, `extra`, models that are not managed, states of optimizers that are not hetmem's, and
    weights and states of which the program holds the memory (`kept = p.data`). Another save, or a load, of the model
    waits for this one, and so does the end of the process. An error is raised by `handle.wait()`, or else by the next
    forward, step, save or load of the model.

    `keep`: `path` has fields of `extra` in its name, as in "run-{step}.safetensors" with `extra={"step": 100}`. Once
    the new file is complete, all but the newest `keep` files of that pattern that are checkpoints of hetmem's are
    deleted, and what killed saves have left in the directory. `hetmem.latest(directory)` finds the newest one.

    Raises `CheckpointError` (a ValueError) for values that cannot be saved, and within a forward, a backward or an
    unfinished step; `StoreError` (an OSError, with path, offset, bytes and errno) if the disk is full or fails. Both
    leave the earlier file as it was. Save between steps; other threads that train with `model` wait meanwhile.
    Gradients are not saved. Of a group of ranks, rank 0 writes the file, alone, or with the others, which call this
    too, each some blocks: `PeerError` where another rank fails. With `wait=False` rank 0 writes all of it, and they get
    handles that end with its own.
    """
    refuse_other_than_modules(model)
    kept = None if keep is None else Kept(os.fspath(path), extra, keep)
    file = os.fspath(path) if kept is None else kept.path
    with trimmed(), all_of(model, "a checkpoint"):
        models, sharing = end_saves(model), Sharing(model)
        if wait:
            sharing.save(file, lambda: _write(file, model, *_contents(model, optimizer, extra), kept, sharing).wait())
            return None
        held = held_chunks(models) | sharing.written()
        return sharing.begin_save(
            file,
            lambda ends: _write(file, model, *_contents(model, optimizer, extra), kept, sharing, models, held, ends),
        )


def _write(
    file: str,
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    texts: dict[str, str],
    kept: Kept | None,
    sharing: Sharing,
    models: Sequence[Interception] = (),
    held: Collection[Chunk] = (),
    ends: ExitStack | None = None,
) -> SaveHandle:
    """Write `tensors` and `texts` to `file`: in the background what lies in homes of `models`, but in `held` chunks, as
    all ranks of `sharing` see them; without `ends`, which is closed once all is done, all at once with these ranks."""
    stored = arrange(tensors)
    blank = header(stored, texts, {one.name: [0] * len(one.blocks()) for one in stored})
    nbytes = len(blank) + data_nbytes(stored)
    with ExitStack() as stack:
        if ends is not None:
            stack.push(ends)
        if kept is not None:
            stack.push(kept.after)
        with HELD_BACK:  # no interrupt between the new file and its removal
            fd = stack.enter_context(replacing(file, nbytes))
        later = pieces_at_home(models, stored, sharing.shared(tensors), _counters(model), held) if models else {}
        names = {piece.stored.name for pieces in later.values() for piece in pieces}
        checks = sharing.write_blocks(fd, file, len(blank), stored, tensors) if ends is None else {}
        own = [one for one in stored if one.name not in names and one.name not in checks]
        checks |= write_tensors(fd, file, len(blank), own, tensors)

        def finish(others: dict[str, list[int]]) -> None:
            found = {**checks, **others}
            in_order = {one.name: found[one.name] for one in stored}
            write_at(fd, file, memoryview(header(stored, texts, in_order)), 0)

        handle = SaveHandle(file, fd, len(blank), nbytes, later)
        if later:
            handle.begin(finish, stack, [each.runtime for each in models])
        else:
            finish({})
            handle.end()
    return handle


def _contents(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a checkpoint, and the text of its `__metadata__`, by name."""
    state, encoder = of_model(model), Encoder()
    refuse_half_stepped(
        model,
        "save after optimizer.step(), not between backward() and step(), and call a step that failed again first",
    )
    metadata: dict[str, Any] = {"tied": state.tied}
    if optimizer is not None:
        metadata["optimizer"] = encode_optimizer(optimizer, model, encoder)
    if state.coded:
        metadata["codings"] = {name: coded.described() for name, coded in state.coded.items()}
    tensors = dict(state.tensors)
    tensors |= {name: made for name, made in state.made.items() if isinstance(made, torch.Tensor)}
    objects = {name: made for name, made in state.made.items() if name not in tensors}
    metadata["objects"] = {name: encoder.encode(made, f"{EXTRA}:object {name}") for name, made in objects.items()}
    metadata["extra"] = encoder.encode(extra, "extra")
    return tensors | encoder.tensors, {f"hetmem.{name}": json.dumps(value) for name, value in metadata.items()}


def _counters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return, by the name of each managed weight, a tensor without memory that has its version."""
    named = dict(model.named_parameters(remove_duplicate=False))
    records = {id(each.parameter): each for of in registry.managed_among(named.values()).values() for each in of}
    return {name: records[id(weight)].counter for name, weight in named.items() if id(weight) in records}
