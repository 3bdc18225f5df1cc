"""Operations of random programs around training: averages, autocast, hooks of modules, threads, views, Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

import hetmem
from hetmem import testing
from tests.engine.parts import WRITTEN_IN_FORWARD

if TYPE_CHECKING:
    from tests.engine.operations import Side

_OURS = str(Path(hetmem.__file__).parent)
_TESTING = testing.__file__


def average(side: Side, draw: Random) -> Any:
    """An exponential average of the weights; sometimes they are exchanged for it, and back after an evaluation."""
    parameters = list(side.module.parameters())
    with torch.no_grad():
        if not side.averages:
            side.averages = [parameter.detach().clone() for parameter in parameters]
        for mean, parameter in zip(side.averages, parameters, strict=True):
            mean.lerp_(parameter, 0.5)
        if draw.random() < 0.7 or (side.program.early and side.arrived):
            return [mean.clone() for mean in side.averages]
        side.losses.clear()
        kept = [parameter.clone() for parameter in parameters]
        _exchange(side, side.averages)
        found = side.evaluate(draw)
        _exchange(side, kept)
    return found


def _exchange(side: Side, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(side.module.parameters(), values, strict=True):
        parameter.copy_(value)
    side.refresh()


def autocast(side: Side, draw: Random) -> Any:
    """Forwards that cast weights, and keep what they have cast for the next operator that asks."""
    if side.program.mixed:
        return None
    with torch.autocast("cpu", torch.bfloat16):
        loss = side.net(side.tokens(draw))
        if draw.random() < 0.5:
            loss = loss + side.net(side.tokens(draw))
    return side.backward_of(loss)


def module_hook(side: Side, draw: Random) -> None:
    """A hook that changes what goes into a layer, comes out of it, or comes back."""
    part: Any = draw.choice((*side.net.parts, side.net.head))
    way = draw.randrange(3)
    if way == 0:
        side.hooks.append(part.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:])))
    elif way == 1:
        side.hooks.append(part.register_forward_hook(lambda _, __, output: output * 2))
    else:
        side.hooks.append(part.register_full_backward_hook(lambda _, gradients, __: tuple(map(_halved, gradients))))


def _halved(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient * 0.5


def dropped(side: Side, draw: Random) -> None:
    """Ctrl-C somewhere in a forward or its backward, or not at all; what has come of it is dropped."""
    trains = any(parameter.requires_grad for parameter in side.module.parameters())
    if side.program.early or side.program.uses_up or not trains:  # one side would be interrupted before it is refused
        return
    before = [buffer.clone() for buffer in side.module.buffers()]
    written = [parameter.detach().clone() for parameter in side.module.parameters()]
    side.skip(draw)
    with side.struck(draw), suppress(KeyboardInterrupt):
        side.backward_of(side.net(side.tokens(draw)))
    side.skip(draw)
    with torch.no_grad():
        for buffer, value in zip(side.module.buffers(), before, strict=True):
            buffer.copy_(value)
        for parameter, value in zip(side.module.parameters(), written, strict=True):
            parameter.copy_(value)
    side.refresh()


def unseen_within(side: Side, draw: Random) -> Any:
    """A hook of a layer writes to its weights, before or behind their use, so that no version counts it."""
    if side.program.mixed or side.program.disk == "failing":  # a twin has other weights; a write cannot be given up
        return None
    part: Any = draw.choice(side.net.parts)
    register = part.register_forward_pre_hook if draw.random() < 0.5 else part.register_forward_hook
    handle = register(_shrink)
    try:
        loss = side.net(side.tokens(draw))
    finally:
        handle.remove()
    return side.backward_of(loss)


def _shrink(part: torch.nn.Module, *_: Any) -> None:
    for parameter in part.parameters():
        parameter.data.mul_(0.875)


def looked(side: Side, draw: Random) -> Any:
    """What `hold` keeps of a forward is looked at in another one."""
    return [side.evaluate(draw), *(view.clone() for view in side.shown)]


def served(side: Side, draw: Random) -> Any:
    """A step beside which another thread evaluates: with the weights before it, or behind it."""
    if side.program.disk == "failing" or any(kind in WRITTEN_IN_FORWARD for kind, _ in side.program.parts):
        return None
    tokens = side.tokens(draw)

    def evaluated() -> torch.Tensor:
        with torch.no_grad():
            return side.net(tokens).clone()

    side.net.eval()  # where nothing is left to chance
    before, loss = evaluated(), side.net(tokens)
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(evaluated)
        if not side.has_turns:
            beside.result()
        side.backward_of(loss)
        side.step(draw)
        found, after = beside.result(), evaluated()
    side.net.train()
    assert any(torch.equal(found, each) for each in (before, after))
    return [before, after]


def uncleared(side: Side, draw: Random) -> Any:
    """The gradients of a step are not cleared, and the next backward adds to them."""
    if side.program.disk == "failing":  # a step cannot be given up
        return None
    norm = side.stepped()
    return [norm, side.backward_of(side.net(side.tokens(draw)))]


@contextmanager
def ctrl_c_at_line(number: int) -> Iterator[None]:
    """At that line of hetmem's that runs within, on this thread."""
    left = number

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                signal.raise_signal(signal.SIGINT)
        return count

    def enter(frame: FrameType, *_: Any) -> Any:
        file = frame.f_code.co_filename
        return count if left > 0 and file.startswith(_OURS) and file != _TESTING else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
