"""Every backward of the process comes through here, before and after torch's engine runs it (ADR 20).

Note "one thread": torch runs the nodes of each device on a thread of that device, and those of the host on the thread
that has called the backward. A graph has nodes of both where weights, or gradients of them, are used at home: a penalty
on weights, or on their gradients. Two threads at once would wait for each other's copies, add to one `p.grad` at the
same time, and sum gradients in the order in which they happen to come. So the thread that calls runs all nodes of such
a graph, in torch's order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from hetmem.engine.live_bytes import nodes_behind
from hetmem.intercept import registry
from hetmem.intercept.dynamo import opaque, uncompiled
from hetmem.intercept.forward_scope import forget_backward_that_raised
from hetmem.intercept.phases import RUNNING, in_backward
from hetmem.intercept.requested_gradients import accumulators, differentiate
from hetmem.memory.interrupts import HELD_BACK

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
    outermost = False
    try:
        outermost = _begins()
        if any(interception.gradients.counts_arrivals() for interception in registry.interceptions()):
            _tell_of_arrivals(outputs)
        with _threads(outputs) if outermost else contextlib.nullcontext():
            return differentiate(_engine, outputs, *args, **kwargs)
    except BaseException:
        with HELD_BACK:
            forget_backward_that_raised()
            if outermost:
                RUNNING.end()
                _settle_after_error()
        raise
    finally:
        if outermost:
            RUNNING.end()


def _begins() -> bool:
    """A backward is called; whether it is within no other."""
    if in_backward():
        return False
    with HELD_BACK:
        for interception in registry.interceptions():
            interception.segments.settle_if_raised()
    RUNNING.begin()
    return True


@uncompiled
def _threads(outputs: Any) -> AbstractContextManager[None]:
    """Those that run the nodes behind `outputs`: see note "one thread"."""
    memories = (interception.runtime.memory for interception in registry.interceptions())
    may_cross = any(memory.streams and memory.device.torch_device.type != "cpu" for memory in memories)
    if may_cross and any(each.device.type == "cpu" for node in nodes_behind(outputs) for each in node._input_metadata):
        return torch.autograd.set_multithreading_enabled(False)
    return contextlib.nullcontext()


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
