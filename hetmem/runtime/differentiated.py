"""Gradients that users ask for by parameter: `torch.autograd.grad(loss, parameters)`, `backward(inputs=parameters)`.

Note "accumulators": torch finds a parameter in a graph by the node that accumulates its gradients, and forgets that
where `.data` gets another dtype or device. So it does for a parameter that computes on the device, or in 16 bits, and
is its home afterwards: it would look as if it were not used. Its nodes are looked up in the graph instead, and what
arrives there becomes what the parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from hetmem.memory.interrupts import HELD_BACK
from hetmem.runtime import registry
from hetmem.runtime.compiled import opaque, uncompiled
from hetmem.runtime.compute import forget_backward_that_raised
from hetmem.runtime.monitor import nodes_behind

_ENGINE = "_engine_run_backward"
_engine: Any = getattr(torch.autograd, _ENGINE, None)


@cache
def watch() -> None:
    """Every backward of this process goes through here from now on: those that name no managed parameter as ever. In a
    torch that has another name for it such parameters look as if they were not used (ADR 20)."""
    if _engine is not None:
        setattr(torch.autograd, _ENGINE, _run)


@opaque
def _run(outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's function of that name."""
    nodes = _accumulators(outputs, inputs) if inputs else {}
    if not nodes:
        return _differentiate(outputs, gradients, retain, create, inputs, *args, **kwargs)
    asked = [[GradientEdge(node, 0) for node in nodes.get(id(each), ())] or [each] for each in inputs]
    edges = tuple(edge for each in asked for edge in each)
    found = _differentiate(outputs, gradients, retain, create, edges, *args, **kwargs)
    if kwargs.get("accumulate_grad"):
        return found
    each_one = iter(found)
    arrived = zip(inputs, [[next(each_one) for _ in each] for each in asked], strict=True)
    return tuple(_sum(each, parts) if id(each) in nodes else parts[0] for each, parts in arrived)


def _differentiate(*args: Any, **kwargs: Any) -> Any:
    try:
        return _engine(*args, **kwargs)
    except BaseException:
        with HELD_BACK:
            forget_backward_that_raised()
        raise


@uncompiled
def _accumulators(outputs: Any, inputs: Iterable[Any]) -> dict[int, list[Any]]:
    """The nodes behind `outputs` that accumulate gradients of those of `inputs` that torch would not find, by `id`:
    each forward has its own."""
    wanted = {id(asked) for asked in inputs if _is_lost(asked)}
    found: dict[int, list[Any]] = {}
    for node in nodes_behind(outputs) if wanted else ():
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) in wanted:
            found.setdefault(id(node.variable), []).append(node)
    return found


def _is_lost(asked: Any) -> bool:
    found = registry.of_parameter(asked) if isinstance(asked, torch.nn.Parameter) else None
    return found is not None and found[1].rest is not found[1].home


@uncompiled
def _sum(parameter: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part.to(parameter.device, parameter.dtype) for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None
