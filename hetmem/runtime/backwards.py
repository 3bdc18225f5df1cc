"""Every backward of the process comes through here, before and after torch's engine runs it (ADR 20).

Note "one thread": torch runs the nodes of each device on a thread of that device, and those of the host on the thread
that has called the backward. A graph has nodes of both where weights, or gradients of them, are used at home: a penalty
on weights, or on their gradients. Two threads at once would wait for each other's copies, add to one `p.grad` at the
same time, and sum gradients in the order in which they happen to come. So the thread that calls runs all nodes, in
torch's order, which is the same for a graph of one device: to look for nodes of the host would cost more than it saves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import cache
from typing import Any

import torch

from hetmem.memory.interrupts import HELD_BACK
from hetmem.runtime import registry
from hetmem.runtime.compiled import opaque, uncompiled
from hetmem.runtime.differentiated import accumulators, differentiate
from hetmem.runtime.segments import RUNNING, in_backward

_AS_IT_IS = contextlib.nullcontext()
_ENGINE = "_engine_run_backward"
_engine: Any = getattr(torch.autograd, _ENGINE, None)


@cache
def watch() -> None:
    """From now on. In a torch that has another name for it nothing is told, and parameters look as if they were not
    used where gradients are asked for by parameter."""
    if _engine is not None:
        setattr(torch.autograd, _ENGINE, _run)


@opaque
def _run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's function of that name."""
    return differentiate(_backward, outputs, *args, **kwargs)


def _backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch's own does, with all told that manage a model."""
    outermost, began = not in_backward(), list[Any]()
    try:
        _begins(began, outermost=outermost)
        if any(interception.gradients.counts_arrivals() for interception in began):
            _tell_of_arrivals(outputs)
        with torch.autograd.set_multithreading_enabled(False) if outermost and _may_cross(began) else _AS_IT_IS:
            return _engine(outputs, *args, **kwargs)
    except BaseException:
        with HELD_BACK:
            if outermost:
                RUNNING.end()
                _settle_after_error()
        raise
    finally:
        if outermost:
            RUNNING.end()
        _ends(began)


@uncompiled
@HELD_BACK
def _begins(began: list[Any], *, outermost: bool) -> None:
    """A backward is called, which is told to all that manage a model, `began`; `outermost`: it is within no other."""
    HELD_BACK.begin_segment()
    if outermost:
        for interception in registry.interceptions():
            interception.segments.settle_if_raised()
        RUNNING.begin()
    for interception in registry.interceptions():
        interception.backward_begins()
        began.append(interception)


@uncompiled
@HELD_BACK
def _ends(began: list[Any]) -> None:
    while began:
        began.pop().backward_ends()
    HELD_BACK.end_segment()


def _may_cross(began: list[Any]) -> bool:
    """Whether a graph may have nodes of the host beside those of a device: see note "one thread"."""
    memories = (interception.runtime.memory for interception in began)
    return any(memory.streams and memory.device.torch_device.type != "cpu" for memory in memories)


@uncompiled
def _settle_after_error() -> None:
    """The error that is raised is the one that counts: what did not arrive is tried again."""
    for interception in registry.interceptions():
        with contextlib.suppress(Exception):
            interception.segments.settle_if_raised()


@uncompiled
@HELD_BACK
def _tell_of_arrivals(outputs: Any) -> None:
    """A gradient of a parameter arrives once for each forward that has used it: the first is not all of it."""
    parameters = [node.variable for node in accumulators(outputs)]
    counts, by_id = Counter(map(id, parameters)), {id(parameter): parameter for parameter in parameters}
    for key, count in counts.items():
        found = registry.of_parameter(by_id[key]) if count > 1 else None
        if found is not None:
            found[0].gradients.expect(found[1], count)
