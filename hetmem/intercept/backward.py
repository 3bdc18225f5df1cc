"""Wraps autograd's engine: every backward of the process comes through here (ADR 20).

Note "one thread": torch runs the nodes of each device on a thread of that device, and those of the host on the thread
that called the backward. A graph has nodes of both where weights, or their gradients, are used at home: in a penalty on
weights or on gradients. Two threads would wait for each other's copies, add to one `p.grad` at the same time, and sum
gradients in the order of arrival. So the calling thread runs all nodes, in torch's order, which is the same for a graph
of one device: searching the graph for nodes of the host would cost more than it saves.

Note "accumulators": users ask for gradients by parameter, `torch.autograd.grad(loss, parameters)` and
`backward(inputs=parameters)`. torch finds a parameter in a graph by the node that accumulates its gradients, and
forgets that node where `.data` gets another dtype or device. So it does for a parameter that computes on the device, or
in 16 bits, and is its home afterwards: torch would take it for unused. With mixed precision a graph may have working
weights in the place of all parameters, float32 ones too. Nodes are looked up in the graph instead, and gradients that
arrive there are converted to the dtype and device of the parameter.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from hetmem import torch_private
from hetmem.base.calls import call_all
from hetmem.engine.param_views import owners_of, works_for
from hetmem.engine.runtime import REHEARSAL, Runtime, Turn, acting_thread, in_backward
from hetmem.errors import DeviceOutOfMemoryError, ManageError
from hetmem.intercept import registry
from hetmem.intercept.diagnostics import refuse_gradients_by_node, refused_stream
from hetmem.intercept.dynamo import opaque, skipped, told, uncompiled
from hetmem.intercept.faults import run_again
from hetmem.intercept.forward_scope import drop_ended_modes
from hetmem.intercept.interceptor import Interception
from hetmem.intercept.phases import BACKWARDS, RunningBackward
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.live_bytes import nodes_behind

_ENGINE = "_engine_run_backward"
_engine: Any = getattr(torch.autograd, _ENGINE, None)
_VARIABLE = attrgetter("variable")


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Rehearse on this thread: backwards, which are of no managed model, run as torch runs them, and models that are
    managed cannot be used."""
    REHEARSAL.runs = True
    try:
        yield
    finally:
        REHEARSAL.runs = False


@cache
def watch() -> None:
    """Wrap torch's engine, once. If torch lacks it, gradients asked for by managed parameter look unused."""
    if _engine is not None:
        setattr(torch.autograd, _ENGINE, _run)


@opaque
def _run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward: the replacement of `torch.autograd._engine_run_backward`. A backward recorded by a compiler is of
    no managed model: copies made by hetmem meanwhile would be recorded with it."""
    if REHEARSAL.runs:
        return _engine(outputs, *args, **kwargs)
    if torch_private.dispatch_mode(torch_private.PROXY) is not None:
        running = RunningBackward()  # an enclosing forward may have saved what this backward unpacks
        BACKWARDS.running.append(running)
        try:
            return _engine(outputs, *args, **kwargs)
        finally:
            BACKWARDS.running.pop()
            _settle(running)
            running.give_back()
    try:
        return differentiate(_backward, outputs, *args, **kwargs)
    except DeviceOutOfMemoryError as error:
        raise told(error) from None


@skipped
def _backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's engine between the begin and the end of a backward for each model that it may be of."""
    outermost, running, began = not in_backward(), RunningBackward(), list[Interception]()
    depth = 0 if outermost else len(BACKWARDS.running)
    try:
        if outermost:
            _take_turns(outputs, running)
        accumulates = kwargs.get("accumulate_grad", True)
        _begin_for_all(began, accumulates=accumulates)
        if not accumulates and any(each.runtime.memory.uses_copies for each in began):
            refuse_gradients_by_node()
        BACKWARDS.running[depth:] = [running]  # replaces what an interrupt has left
        several = [each.gradients.listeners for each in began if each.segments.several]
        early = any(listener.begins_early for listeners in several for listener in listeners)
        if early or any(each.gradients.is_parted for each in began):
            _expect_arrivals(outputs)
        with ExitStack() as stack:
            if outermost and _may_cross():
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            lacking = [each.runtime for each in began if each.segments.expects_a_backward]
            lacking = [runtime for runtime in lacking if _may_lack_memory(runtime)] if outermost else []
            if lacking:
                stack.enter_context(_RunsAgain(lacking))
            gradients = _engine(outputs, *args, **kwargs)
        _settle(running)
        return gradients
    except BaseException as error:
        _fail(error, running, began)
        raise
    finally:
        _end(running, began, depth)


@uncompiled
@HELD_BACK
def _fail(error: BaseException, running: RunningBackward, began: list[Interception]) -> None:
    """Settle a backward that has raised `error`, which counts more than what this meets."""
    with contextlib.suppress(Exception):
        for each in began:
            each.gradients.backward_raised(error)
    with contextlib.suppress(Exception):
        _settle(running)
    if not in_backward():
        _forget_nodes_that_did_not_run()


@uncompiled
def _forget_nodes_that_did_not_run() -> None:
    """Free the graph of a backward that has raised.

    Autograd keeps the nodes that were ready to run in a queue of the thread, and with them the graph behind them: saved
    tensors, and the model. It drops them as the thread's next backward begins, of which there may be none: so run one.
    """
    with torch_private.NoFunctions(), torch.inference_mode(False), torch.enable_grad():
        nothing = torch.zeros((), device="cpu", requires_grad=True)
        _engine((nothing,), (torch.ones_like(nothing),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _RunsAgain(TorchFunctionMode):
    """Retries a recomputed function with the memory of all models' idle chunks where the device is full.

    Entered on the thread that runs all nodes; does not see nodes in C++.
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
def _take_turns(outputs: Any, running: RunningBackward) -> None:
    """Take the turns of the models that `running`, an outermost backward, may be of."""
    HELD_BACK.begin_segment()
    for turn in _turns(outputs):
        running.take(turn)


@uncompiled
@HELD_BACK
def _settle(running: RunningBackward) -> None:
    running.settle()


@uncompiled
def _turns(outputs: Any) -> list[Turn]:
    """Return the turns of the models that this thread has computed a graph with, and of other threads' models whose
    parameters are in the graph of `outputs`."""
    here = acting_thread()
    trained = [found.runtime.turn for found in registry.interceptions() if found.runtime.turn.trainers]
    turns = [turn for turn in trained if here in turn.trainers]
    if len(turns) < len(trained):
        reached = (registry.of_parameter(parameter_of(node)) for node in accumulators(outputs))
        turns += {found[0].runtime.turn for found in reached if found is not None} - {*turns}
    return sorted(turns, key=lambda turn: turn.number)


@uncompiled
@HELD_BACK
def _begin_for_all(began: list[Interception], *, accumulates: bool) -> None:
    """Begin a backward for each model that it may be of, and add these to `began`. `accumulates`: it gives parameters
    gradients, and does not return them."""
    for interception in registry.interceptions():
        if _may_be_of(interception):
            begin_for(interception, accumulates=accumulates)
            began.append(interception)


@uncompiled
@HELD_BACK
def _end(running: RunningBackward, began: list[Interception], depth: int) -> None:
    """End a backward, also one that has raised: `running`, the backward of each of `began`, and those of this thread
    but the outermost `depth`. Does all of it, also if a part raises."""
    ends: list[Callable[[], object]] = [partial(end_for, interception) for interception in reversed(began)]
    ends += drop_ended_modes, partial(BACKWARDS.end, depth), running.give_back
    if not in_backward():
        ends += (HELD_BACK.end_segment,)
    call_all(iter(ends))


def begin_for(interception: Interception, *, accumulates: bool) -> None:
    """Have parameters rest, as the backward may recompute a part of a forward."""
    runtime, joined = interception.runtime, interception.segments.joined
    if joined is not None and joined.in_forwards:
        raise ManageError(
            "a backward within the forward of hetmem.accumulate, whose weights other micro-batches use meanwhile: "
            "return the sum of all losses, and differentiate nothing in the forward"
        )
    if joined is None and not in_backward():
        interception.segments.end_backward()  # an interrupt has ended it
    interception.backwards += 1
    if not runtime.memory.uses_copies:
        return
    interception.segments.refused = refused_stream(runtime.memory.device)
    if interception.backwards == 1:
        if interception.stretches.here:
            interception.current(sys._getframe())  # ends what an interrupt has ended
        runtime.marks.pause()
        runtime.renew_touched()
    with torch_private.NoFunctionsOfSubclasses():  # parameters are watched
        interception.working.begin_backward(accumulates=accumulates)
    runtime.bindings.leave_home()
    interception.gradients.rest_again()


def end_for(interception: Interception) -> None:
    """End `begin_for`, also of a backward that has raised."""
    bindings, gradients, working = interception.runtime.bindings, interception.gradients, interception.working
    bindings.exposed.update(gradients.sent_home)
    if not interception.backwards:
        return
    interception.backwards -= 1
    if bindings.away:  # False for a model that is resident on the device
        if interception.backwards:  # the outer one may recompute with weights whose gradients have arrived
            gradients.rest_again()
        interception.current(sys._getframe())
        bindings.go_home()
        if not bindings.away:
            gradients.sent_home.clear()
    if not interception.backwards and working.in_backward and working.end_backward():
        interception.segments.forget_forwards()
    if not interception.backwards and not interception.stretches.here:
        interception.runtime.marks.resume()


def _may_be_of(interception: Interception) -> bool:
    """Return whether a backward of this thread may compute something of this model: also if its forward made no graph,
    as within a checkpoint."""
    last = interception.last_forward
    mine = last is not None and last.thread == threading.get_ident()
    return os.getpid() == interception.process and (mine or interception.runtime.turn.is_mine())


def _may_lack_memory(runtime: Runtime) -> bool:
    """Return whether a backward may need unknown memory, on a device whose allocations hetmem does not count."""
    unknown = runtime.sanitize or runtime.tracer.measured or runtime.tracer.unseen_growth > 1
    return runtime.memory.uses_copies and not runtime.memory.device.watched and unknown


def _may_cross() -> bool:
    """Return whether a graph may have nodes of the host and of a device (see note "one thread")."""
    devices = (each.runtime.memory.device for each in registry.interceptions())
    return any(device.torch_device.type != "cpu" for device in devices)


@uncompiled
@HELD_BACK
def _expect_arrivals(outputs: Any) -> None:
    """Tell models how often a gradient arrives at each parameter used by several forwards, once for each, or in a
    forward in which the model has left the device."""
    parameters = [parameter_of(node) for node in accumulators(outputs)]
    counts, by_id = Counter(map(id, parameters)), {id(parameter): parameter for parameter in parameters}
    for key, count in counts.items():
        found = registry.of_parameter(by_id[key]) if count > 1 else None
        if found is not None:
            gradients = found[0].gradients
            for listener in gradients.listeners:
                listener.expect(found[1], count)
            if gradients.is_parted:
                gradients.parts[found[1]] = count, None


# ---- gradients by parameter: see note "accumulators" -----------------------------------------------------------------


def differentiate(
    engine: Any, outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *more: Any, **kw: Any
) -> Any:
    """Return what torch's `engine` returns for `inputs`, also for managed parameters; see note "accumulators"."""
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
    """Return the `AccumulateGrad` nodes behind `outputs`: each forward has its own for a parameter that is in another
    memory or dtype between forwards."""
    return (node for node in nodes_behind(outputs) if type(node).__name__ == "AccumulateGrad")


def parameter_of(node: Any) -> Any:
    """Return the parameter whose gradients `node` accumulates, also if it does for its working weight."""
    variable = node.variable
    managed = works_for(variable)
    return variable if managed is None else managed.parameter


def parameters_of(nodes: Iterable[Any]) -> list[Any]:
    """Return `parameter_of` each of `nodes`, in C but for working weights."""
    variables = [*map(_VARIABLE, nodes)]
    managed = owners_of(variables)
    return [each if of is None else of.parameter for each, of in zip(variables, managed, strict=True)]


@uncompiled
def _lost(outputs: Any, inputs: Iterable[Any]) -> dict[int, list[Any]]:
    """Return the accumulators of those of `inputs` that torch would not find, by `id` of the input."""
    wanted = {id(asked) for asked in inputs if _is_lost(asked)}
    found: dict[int, list[Any]] = {}
    for node in accumulators(outputs) if wanted else ():
        if (key := id(parameter_of(node))) in wanted:
            found.setdefault(key, []).append(node)
    return found


def _is_lost(asked: Any) -> bool:
    found = registry.of_parameter(asked) if isinstance(asked, torch.nn.Parameter) else None
    if found is None:
        return False
    return found[0].runtime.memory.uses_copies


@uncompiled
def _sum(parameter: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part.to(parameter.device, parameter.dtype) for part in parts if part is not None]
    return sum(present[1:], present[0]) if present else None
