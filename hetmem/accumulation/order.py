"""Has backwards of several micro-batches take turns where their forwards did, and gradients arrive in their order.

Each micro-batch runs a backward of its own, on its thread: the one that a loop would run, so sums within it have the
bits of the loop. Autograd runs the node with the highest number that is ready, and numbers the nodes that a thread
makes upwards: so all nodes behind a border have run before the first one in front of it does, where the turn is passed
on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import methodcaller
from typing import Any

import torch

from hetmem.accumulation.baton import Baton
from hetmem.accumulation.borders import Borders
from hetmem.intercept.backward import parameters_of

_ACCUMULATES: Any = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""The kind of the nodes that accumulate gradients."""
_NUMBER = methodcaller("_sequence_nr")
_HIDES = "CheckpointFunctionBackward"
"""A node that runs a backward of its own: the parameters within are not in the graph."""


@dataclass(slots=True)
class Graph:
    """The graph of one loss, in stretches between borders."""

    first: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """By stretch, the number and the node of it that runs first in a backward."""
    last: dict[int, tuple[int, int, Any]] = field(default_factory=dict)
    """By `id` of each tensor whose gradient is accumulated, the number, the stretch and the node that runs last before
    that."""
    hides: tuple[int, ...] = ()
    """The stretches of the nodes within which gradients are accumulated, where they cannot be seen."""
    stretches: int = 0

    @classmethod
    def of(cls, loss: torch.Tensor, starts: Sequence[int]) -> Graph:
        """Look at all nodes behind `loss`. Those behind each border have at least the number in `starts`."""
        graph = cls(stretches=len(starts))
        nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
        met, ends = dict.fromkeys(nodes), list[tuple[int, Any]]()
        for at, node in enumerate(nodes):  # some 50 of a layer: without a call of Python for each
            for following, _ in node.next_functions:
                if following is None or following in met:
                    continue
                if following.__class__ is _ACCUMULATES:
                    ends += ((at, following),)
                else:
                    met[following] = None
                    nodes += (following,)
        numbers = [*map(_NUMBER, nodes)]
        if any(kind.__name__ == _HIDES for kind in set(map(type, nodes))):
            hiding = [number for node, number in zip(nodes, numbers, strict=True) if type(node).__name__ == _HIDES]
            graph.hides = (*sorted(map(bisect_right, repeat(starts), hiding)),)
        last: dict[int, int] = {}
        for key, (at, _) in zip(map(id, parameters_of([node for _, node in ends])), ends, strict=True):
            if key not in last or numbers[at] < numbers[last[key]]:
                last[key] = at
        runs = [numbers[at] for at in last.values()]
        found = zip(runs, map(bisect_right, repeat(starts), runs), map(nodes.__getitem__, last.values()), strict=True)
        graph.last = dict(zip(last, found, strict=True))
        stretch = len(starts)
        for number, at in sorted(zip(numbers, range(len(nodes)), strict=True), reverse=True):
            while stretch and number < starts[stretch - 1]:
                stretch -= 1
            if stretch not in graph.first:
                graph.first[stretch] = number, nodes[at]
        return graph


class BackwardOrder:
    """The turns of the backwards behind `graphs`, of micro-batches that have `passed` these borders."""

    def __init__(self, graphs: Sequence[Graph], borders: Borders, baton: Baton) -> None:
        self._baton = baton
        passed = borders.passed
        self._missing: dict[int, list[int]] = {}
        """By `id` of a tensor, the micro-batches whose gradients of it have not arrived, if these might not come in
        order."""
        differ = any(each != passed[0] for each in passed)
        hiding = {graph.hides for graph in graphs}  # in a checkpoint of one, and in the graph of another one
        if any(hiding) and (differ or len(hiding) > 1 or borders.share_parameters):
            return  # each backward runs as a whole: in the order of the loop
        for number, graph in enumerate(graphs):
            self._pass_on_in(number, graph)
        for key in {key for graph in graphs for key in graph.last}:
            having = [number for number, graph in enumerate(graphs) if key in graph.last]
            if differ or len({graphs[number].last[key][1] for number in having}) > 1:
                self._missing[key] = having
                for number in having:
                    graphs[number].last[key][2].register_prehook(partial(self._before_last, number, key))

    def _pass_on_in(self, number: int, graph: Graph) -> None:
        above = graph.stretches
        for stretch in sorted(graph.first, reverse=True):
            if above > stretch:
                graph.first[stretch][1].register_prehook(partial(self._pass_on, number, above - stretch))
            above = stretch

    def _pass_on(self, number: int, times: int, _: object) -> None:
        if self._baton.mine.number == number:  # a node may be in several graphs
            for _ in range(times):
                self._baton.pass_on(number)

    def _before_last(self, number: int, key: int, _: object) -> None:
        if self._baton.mine.number == number:
            missing = self._missing[key]
            while missing and missing[0] < number:
                self._baton.pass_on(number)
            missing.remove(number)
