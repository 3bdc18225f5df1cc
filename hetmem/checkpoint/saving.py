"""A model and an optimizer to one file, which is complete or is not there."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from hetmem.checkpoint.contents import all_of, encode_optimizer, of_model, refuse_half_stepped
from hetmem.checkpoint.disk import replacing, write_at
from hetmem.checkpoint.layout import EXTRA, arrange, data_nbytes, header
from hetmem.checkpoint.moving import write_tensors
from hetmem.checkpoint.values import Encoder


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Save `model`, `optimizer` and `extra` to the file `path`, block by block, from whatever tier they are on.

    The file is in the format of safetensors: weights under the keys of `model.state_dict()`, so that any reader of that
    format finds them; see docs/checkpoints.md. Host memory beyond what they take already: a few blocks of 16 MiB at
    most. Model and optimizer may be managed or plain, and of any placement: `hetmem.load` does not care which it was.
    `extra`: None, bool, int, float, complex, str, bytes, tensors, arrays and numbers of numpy, dtypes, and lists,
    tuples, sets and dicts of them, such as the `state_dict()` of a scheduler, of a second optimizer or of a scaler.

    Crash-safe: the new file is written beside `path` (as `path` + ".partial"), reaches the disk, and then takes its
    place in one step; until then the earlier checkpoint is whole, whatever happens. When this returns, the new one is
    on the disk.

    Raises `CheckpointError` (a ValueError) for what cannot be saved, during a forward, a backward or a half-done step,
    and `StoreError` (an OSError, with path, offset, bytes and errno) when the disk is full or fails. The earlier file
    is as it was then. Save between steps: another thread that trains waits meanwhile. Gradients are not saved.
    """
    with all_of(model, "a checkpoint"):
        _save(path, model, optimizer, extra)


def _save(
    place: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> None:
    state, encoder = of_model(model), Encoder()
    refuse_half_stepped(
        model,
        "save after optimizer.step(), not between backward() and step(), and call a step that failed again first",
    )
    metadata: dict[str, Any] = {"tied": state.tied}
    if optimizer is not None:
        metadata["optimizer"] = encode_optimizer(optimizer, model, encoder)
    tensors = dict(state.tensors)
    tensors |= {name: made for name, made in state.made.items() if isinstance(made, torch.Tensor)}
    objects = {name: made for name, made in state.made.items() if name not in tensors}
    metadata["objects"] = {name: encoder.encode(made, f"{EXTRA}:object {name}") for name, made in objects.items()}
    metadata["extra"] = encoder.encode(extra, "extra")
    tensors |= encoder.tensors

    texts = {f"hetmem.{name}": json.dumps(value) for name, value in metadata.items()}
    stored = arrange(tensors)
    blank = header(stored, texts, {one.name: [0] * len(one.blocks()) for one in stored})
    path = os.fspath(place)
    with replacing(path, len(blank) + data_nbytes(stored)) as fd:
        checks = write_tensors(fd, path, len(blank), stored, tensors)
        write_at(fd, path, memoryview(header(stored, texts, checks)), 0)
