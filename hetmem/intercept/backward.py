"""Every backward of the process comes through here, before and after torch's engine runs it (ADR 20).

Note "one thread": torch runs the nodes of each device on a thread of that device, and those of the host on the thread
that has called the backward. A graph has nodes of both where weights, or gradients of them, are used at home: a penalty
on weights, or on their gradients. Two threads at once would wait for each other's copies, add to one `p.grad` at the
same time, and sum gradients in the order in which they happen to come. So the thread that calls runs all nodes, in
torch's order, which is the same for a graph of one device: to look for nodes of the host would cost more than it saves.

Note "accumulators": users ask for gradients by parameter, `torch.autograd.grad(loss, parameters)` and
`backward(inputs=parameters)`. torch finds a parameter in a graph by the node that accumulates its gradients, and
forgets that where `.data` gets another dtype or device. So it does for a parameter that computes on the device, or in
16 bits, and is its home afterwards: it would look as if it were not used. Its nodes are looked up in the graph instead,
and what arrives there becomes what the parameter is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from hetmem import torch_private
from hetmem.engine.runtime import Runtime, Section, Turn, in_backward
from hetmem.intercept import registry
from hetmem.intercept.dynamo import opaque, skipped, uncompiled
from hetmem.intercept.faults import run_again
from hetmem.intercept.forward_scope import forget_what_is_over
from hetmem.intercept.interceptor import Interception
from hetmem.intercept.phases import BACKWARDS, StepSegments, forget_nodes_that_did_not_run
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.live_bytes import nodes_behind

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
    """In the place of torch's function of that name. A backward that a compiler records is of no managed model: what
    hetmem did meanwhile, such as a copy, would be recorded with it."""
    if torch_private.dispatch_mode(torch_private.PROXY) is not None:
        met = list[StepSegments]()  # a forward of one may be around it, and has saved what is unpacked
        BACKWARDS.began.append(met)
        try:
            return _engine(outputs, *args, **kwargs)
        finally:
            BACKWARDS.began.pop()
            _settle(met)
    return differentiate(_backward, outputs, *args, **kwargs)


def _backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch's own does, with all told that manage a model which it may be of."""
    outermost, taken, began = not in_backward(), list[tuple[Turn, Section]](), list[Interception]()
    met, depth = list[StepSegments](), 0 if outermost else len(BACKWARDS.began)
    try:
        if outermost:
            _take_turns(outputs, taken)
        _tell_of_begin(began)
        BACKWARDS.began[depth:] = [met]  # in the place of what an interrupt has left
        several = [each.gradients.listeners for each in began if each.segments.several]
        if any(listener.begins_early for listeners in several for listener in listeners):
            _tell_of_arrivals(outputs)
        with ExitStack() as around:
            if outermost and _may_cross():
                around.enter_context(torch.autograd.set_multithreading_enabled(False))
            lacking = [each.runtime for each in began if _may_lack_memory(each.runtime)] if outermost else []
            if lacking:
                around.enter_context(_RunsAgain(lacking))
            gradients = _engine(outputs, *args, **kwargs)
        if met:
            _settle(met)
        return gradients
    except BaseException:
        with HELD_BACK, contextlib.suppress(Exception):  # the error that is raised counts
            _settle(met)
            if outermost:
                forget_nodes_that_did_not_run()
        raise
    finally:
        _tell_of_end(began)
        del BACKWARDS.began[depth:]
        for turn, section in reversed(taken):
            turn.give(section)


class _RunsAgain(TorchFunctionMode):
    """Give what a backward recomputes the memory of idle chunks, of all models, where the device has none left.

    It is entered on the thread that runs all nodes; those of C++ do not come here.
    """

    def __init__(self, runtimes: list[Runtime]) -> None:
        super().__init__()
        self._runtimes = runtimes

    @skipped
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_again(self._runtimes, func, args, kwargs or {})


@HELD_BACK
def _take_turns(outputs: Any, taken: list[tuple[Turn, Section]]) -> None:
    """A backward that is within no other one is called; `taken` are the turns of models that it may be of."""
    taken.extend((turn, turn.take("a backward")) for turn in _turns(outputs))


@uncompiled
@HELD_BACK
def _settle(met: list[StepSegments]) -> None:
    """The backward is over, of the models in `met`."""
    while met:
        met.pop().end_backward()


@uncompiled
def _turns(outputs: Any) -> list[Turn]:
    """Those of the models that this thread has computed a graph with. Of what other threads have made graphs of, those
    whose parameters are in that of `outputs`."""
    here = threading.get_ident()
    trained = [found.runtime.turn for found in registry.interceptions() if found.runtime.turn.trainers]
    turns = [turn for turn in trained if here in turn.trainers]
    if len(turns) < len(trained):
        reached = (registry.of_parameter(parameter_of(node)) for node in accumulators(outputs))
        turns += {found[0].runtime.turn for found in reached if found is not None} - {*turns}
    return sorted(turns, key=lambda turn: turn.number)


@uncompiled
@HELD_BACK
def _tell_of_begin(began: list[Interception]) -> None:
    """All that it may be of are told, and are in `began` then."""
    HELD_BACK.begin_segment()
    for interception in registry.interceptions():
        if _may_be_of(interception):
            _begin_of(interception)
            began.append(interception)


@uncompiled
@HELD_BACK
def _tell_of_end(began: list[Interception]) -> None:
    while began:
        _end_of(began.pop())
    forget_what_is_over()
    HELD_BACK.end_segment()


def _begin_of(interception: Interception) -> None:
    """Have parameters rest, as a part of the backward may be computed once more, whether a forward is around it or
    not."""
    runtime = interception.runtime
    if not in_backward():
        interception.segments.end_backward()  # of one that an interrupt has ended
    interception.backwards += 1
    if not runtime.memory.uses_copies:
        return
    if interception.backwards == 1:
        if interception.stretches.here:
            interception.current(sys._getframe())  # which an interrupt may have ended
        runtime.marks.pause()
        runtime.renew_touched()
    with torch_private.NoFunctionsOfSubclasses():  # parameters are watched
        interception.working.begin_backward()
    runtime.bindings.leave_home(stay=True)
    interception.gradients.rest_again()


def _end_of(interception: Interception) -> None:
    """End `_begin_of`, also of a backward that has raised."""
    bindings, gradients, working = interception.runtime.bindings, interception.gradients, interception.working
    if not interception.backwards:
        return
    interception.backwards -= 1
    if bindings.away:  # not of a model that is whole on the device
        if interception.backwards:  # what is computed next may be a function of weights whose gradients have arrived
            gradients.rest_again()
        bindings.end_rest()
        interception.current(sys._getframe())
        bindings.go_home()
        if not bindings.away:
            bindings.exposed.update(gradients.sent_home)
            gradients.sent_home.clear()
    if not interception.backwards and working.in_backward:
        working.end_backward()
        interception.segments.forget_forwards()
    if not interception.backwards and not interception.stretches.here:
        interception.runtime.marks.resume()


def _may_be_of(interception: Interception) -> bool:
    """Whether a backward of this thread may compute something of this model, also one whose forward had no graph, as a
    checkpoint around it has none."""
    last = interception.last_forward
    mine = last is not None and last.thread == threading.get_ident()
    return os.getpid() == interception.process and (mine or interception.runtime.turn.is_mine())


def _may_lack_memory(runtime: Runtime) -> bool:
    """Whether a backward may ask the device for memory that is not known of, and refused without a look at it."""
    unknown = runtime.sanitize or runtime.tracer.measured or runtime.tracer.unseen_growth > 1
    return runtime.memory.uses_copies and not runtime.memory.device.watched and unknown


def _may_cross() -> bool:
    """Whether a graph may have nodes of the host beside those of a device (see note "one thread")."""
    devices = (each.runtime.memory.device for each in registry.interceptions())
    return any(device.torch_device.type != "cpu" for device in devices)


@uncompiled
@HELD_BACK
def _tell_of_arrivals(outputs: Any) -> None:
    """A gradient of a parameter arrives once for each forward that has used it: the first is not all of it."""
    parameters = [parameter_of(node) for node in accumulators(outputs)]
    counts, by_id = Counter(map(id, parameters)), {id(parameter): parameter for parameter in parameters}
    for key, count in counts.items():
        found = registry.of_parameter(by_id[key]) if count > 1 else None
        if found is not None:
            for listener in found[0].gradients.listeners:
                listener.expect(found[1], count)


# ---- gradients by parameter: see note "accumulators" -----------------------------------------------------------------


def differentiate(
    engine: Any, outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *more: Any, **kw: Any
) -> Any:
    """What `engine`, torch's, gives for `inputs`: those that name no managed parameter as ever."""
    nodes = _lost(outputs, inputs) if inputs else {}
    if not nodes:
        return engine(outputs, grads, retain, create, inputs, *more, **kw)
    asked = [[GradientEdge(node, 0) for node in nodes.get(id(each), ())] or [each] for each in inputs]
    edges = tuple(edge for each in asked for edge in each)
    found = engine(outputs, grads, retain, create, edges, *more, **kw)
    if kw.get("accumulate_grad"):
        return found
    each_one = iter(found)
    arrived = zip(inputs, [[next(each_one) for _ in each] for each in asked], strict=True)
    return tuple(_sum(each, parts) if id(each) in nodes else parts[0] for each, parts in arrived)


def accumulators(outputs: Any) -> Iterator[Any]:
    """The nodes behind `outputs` that accumulate gradients of what their `variable` is: each forward has its own for a
    parameter that is somewhere else, or of another dtype, between forwards."""
    return (node for node in nodes_behind(outputs) if type(node).__name__ == "AccumulateGrad")


def parameter_of(node: Any) -> Any:
    """What `node` accumulates gradients of, or the parameter for which that works."""
    variable = node.variable
    return variable if (parameter := vars(variable).get("hetmem_parameter")) is None else parameter()


@uncompiled
def _lost(outputs: Any, inputs: Iterable[Any]) -> dict[int, list[Any]]:
    """The accumulators of those of `inputs` that torch would not find, by `id`."""
    wanted = {id(asked) for asked in inputs if _is_lost(asked)}
    found: dict[int, list[Any]] = {}
    for node in accumulators(outputs) if wanted else ():
        if (key := id(parameter_of(node))) in wanted:
            found.setdefault(key, []).append(node)
    return found


def _is_lost(asked: Any) -> bool:
    found = registry.of_parameter(asked) if isinstance(asked, torch.nn.Parameter) else None
    return found is not None and found[1].rest is not found[1].home


@uncompiled
def _sum(parameter: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part.to(parameter.device, parameter.dtype) for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None
