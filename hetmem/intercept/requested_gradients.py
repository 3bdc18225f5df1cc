"""Gradients that users ask for by parameter: `torch.autograd.grad(loss, parameters)`, `backward(inputs=parameters)`.

Note "accumulators": torch finds a parameter in a graph by the node that accumulates its gradients, and forgets that
where `.data` gets another dtype or device. So it does for a parameter that computes on the device, or in 16 bits, and
is its home afterwards: it would look as if it were not used. Its nodes are looked up in the graph instead, and what
arrives there becomes what the parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from hetmem.intercept import registry
from hetmem.intercept.dynamo import uncompiled
from hetmem.memory.live_bytes import nodes_behind


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


@uncompiled
def _lost(outputs: Any, inputs: Iterable[Any]) -> dict[int, list[Any]]:
    """The accumulators of those of `inputs` that torch would not find, by `id`."""
    wanted = {id(asked) for asked in inputs if _is_lost(asked)}
    found: dict[int, list[Any]] = {}
    for node in accumulators(outputs) if wanted else ():
        if id(node.variable) in wanted:
            found.setdefault(id(node.variable), []).append(node)
    return found


def _is_lost(asked: Any) -> bool:
    found = registry.of_parameter(asked) if isinstance(asked, torch.nn.Parameter) else None
    return found is not None and found[1].rest is not found[1].home


@uncompiled
def _sum(parameter: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part.to(parameter.device, parameter.dtype) for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None
