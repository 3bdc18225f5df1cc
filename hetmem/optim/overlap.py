"""When updates happen, and how long gradients stay."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Protocol, TypeVar

from hetmem.errors import ManageError


class Gradients(str, Enum):
    """What is kept of gradients.

    "visible": `p.grad` is the gradient, until it is set to None or to zero. "streamed": a gradient lives from its
    arrival to the update of its chunk, in the memory of a few chunks, and `p.grad` is used up after `step`: 12 bytes a
    parameter in place of 16 (float32 AdamW). Where states are sent to the device for the update, it stays there and
    crosses no link. It takes one backward per step, `overlap` "backward" or "forward", and nothing that needs the
    gradients of all: between the backward and `step`, where `p.grad` has been used up, it raises RuntimeError for
    whoever computes with it (`torch.nn.utils.clip_grad_norm_`, a norm that is logged).
    """

    VISIBLE = "visible"
    STREAMED = "streamed"


class Overlap(str, Enum):
    """How far updates of a step overlap with other work; the bits are the same with all of them.

    "off": all within `step`. "backward": chunk by chunk as gradients arrive; where a factor that needs all gradients
    (clipping, loss scaling) forbids it, in `step`. "forward": as "backward", and `step` returns before
    all is done: the next forward waits for what it needs, and so does whoever reads or writes a parameter;
    `torch.tensor(p)` and `torch.nn.Parameter(p)`, which torch tells nobody of, need `synchronize` before. It uses
    gradients up: a backward before `zero_grad` raises, as torch would add to them.

    With all but "off", weights and gradients must stay as they are between the backward and `step`: `step` raises where
    they were clipped, unscaled by `torch.amp.GradScaler`, set to None or written to. So does a forward there that uses
    a weight which is updated already; another thread's waits for the step.
    """

    OFF = "off"
    BACKWARD = "backward"
    FORWARD = "forward"


class _Optimizer(Protocol):
    gradients: Gradients


def advice(optimizer: _Optimizer) -> str:
    """How gradients of a parameter may come after those with which `optimizer` has begun its update."""
    if optimizer.gradients is Gradients.VISIBLE:
        return "use overlap='off'"
    return "use gradients='visible', with which a chunk waits for as many gradients as it had in the steps before"


_ChoiceT = TypeVar("_ChoiceT", Overlap, Gradients)


def choice(kind: type[_ChoiceT], wanted: str, option: str) -> _ChoiceT:
    """What users said for `option`. Raises ValueError, with all that could be said, for anything else."""
    try:
        return kind(wanted)
    except ValueError:
        *others, last = (repr(known.value) for known in kind)
        instead = "; use 'backward', which gives the same bits" if wanted == "speculative" else ""
        raise ValueError(f"{option} must be {', '.join(others)} or {last}, got {wanted!r}{instead}") from None


def check_planned(planned: Mapping[str, str], gradients: Gradients, overlap: Overlap) -> None:
    """Raises `ManageError` where visible gradients would take memory that the model's plan has given to other things.
    What is faster or slower than `planned`, in no more memory, is the user's to choose."""
    if planned.get("gradients") == Gradients.STREAMED and gradients is Gradients.VISIBLE:
        said = ", ".join(f"{name}={value!r}" for name, value in planned.items())
        raise ManageError(
            f"the model's plan is for an optimizer with {said}, got overlap={overlap.value!r}, "
            f"gradients={gradients.value!r}, which keeps the gradients of all parameters at home: make it as planned, "
            f"or plan again with gradients='visible'"
        )


def check_gradients(gradients: Gradients, overlap: Overlap, *, needs_all: bool) -> None:
    """Raises ValueError where `gradients` cannot go with `overlap`, or with what `needs_all` of them."""
    if gradients is Gradients.VISIBLE:
        return
    if overlap not in (Overlap.BACKWARD, Overlap.FORWARD):
        raise ValueError(
            f"streamed gradients are used up during backward: set overlap='backward' or 'forward', "
            f"got {overlap.value!r}"
        )
    if needs_all:
        raise ValueError(
            "streamed gradients are gone before all have arrived, so that neither max_grad_norm nor loss_scale "
            "can be known: leave those out, or gradients='visible'"
        )


def saves_nothing(chunks: int) -> None:
    """Warn that streamed gradients take as much memory as visible ones: those of a model of so few `chunks`, of which
    some have a home at any time, or (0) of one whose states all lie on the device."""
    why = f"the model has {chunks} chunk(s), all with gradients at a time" if chunks else "all is on the device"
    warnings.warn(
        f"gradients='streamed' saves nothing: {why}; leave it out{', or set a smaller chunk_bytes' if chunks else ''}",
        stacklevel=5,
    )
