"""Steps of an optimizer over a model that several ranks train: what they compare, where they meet, what they refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hetmem.engine.ranked_writes import refuse_writes
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.optim.options import Overlap
from hetmem.optim.states import SteppingOptimizer
from hetmem.ranks.group import Ranks, not_yet


def refuse_options(optimizer: SteppingOptimizer) -> None:
    """Raise `ManageError` for an option of `optimizer` that a group of ranks does not have yet."""
    if optimizer.overlap is not Overlap.OFF:
        raise not_yet(f"overlap={optimizer.overlap.value!r}")
    if optimizer.rule.seed is not None:
        raise not_yet("moments= and stochastic_rounding=")


class RankedSteps:
    """The steps of one rank, with an optimizer that is given to each method, over the model of `interception`."""

    def __init__(self, interception: Interception, ranks: Ranks) -> None:
        gradients = interception.gradients.ranked
        assert gradients is not None, "it is made with the ranks"
        self._gradients, self._ranks, self._memory = gradients, ranks, interception.runtime.memory

    def place(self) -> AbstractContextManager[None]:
        """Return a context in which the other ranks know that this one is in a step."""
        return self._ranks.waits.at("a step")

    def begin(self, optimizer: SteppingOptimizer) -> None:
        """Wait until all ranks have come to a step, and take part in their backwards meanwhile; then compare options,
        and which parameters have gradients."""
        refuse_options(optimizer)
        name, handed_out = f"a step of {type(optimizer).__name__}", self._ranks.words.handed_out
        handed_out[self._ranks.rank] = optimizer.states.handed_out
        self._ranks.meet(name, serve=_take_part)
        refuse_writes(self._memory)
        self._gradients.note_gradients()
        self._ranks.meet(
            f"the options of {name}", _in_words(optimizer, self._gradients.number_of, counts=handed_out.any())
        )
        self._gradients.compare()
        self._ranks.words.steps[self._ranks.rank] += 1

    def meet(self, what: str) -> None:
        """Wait until all ranks have computed their part of `what`."""
        self._ranks.meet(what)


def _take_part() -> None:
    """Take part in the backwards of other ranks over any model of this process."""
    for interception in registry.interceptions():
        if interception.gradients.ranked is not None and not interception.runtime.in_backward:
            interception.gradients.ranked.take_part()


def _in_words(optimizer: SteppingOptimizer, number_of: Callable[[torch.Tensor], int], *, counts: bool) -> str:
    """Return what a step of `optimizer` depends on beside weights, gradients and states in homes, for ranks to compare;
    `number_of` returns the number of a parameter. `counts`: also the counts of steps."""
    lines = [f"max_grad_norm {optimizer.max_grad_norm}, gradients times {optimizer.expected_scale()}"]
    for at, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        numbers = [*map(number_of, group["params"])]
        lines.append(f"group {at}: {options}, parameters {zlib.crc32(repr(numbers).encode()):x}")
    if counts:  # the program of some rank may have changed them
        entries = [*optimizer.states.shown.values()]
        found = [float(value) for entry in entries for value in entry.values() if _is_number(value)]
        lines.append(f"counts of steps {zlib.crc32(repr(found).encode()):x}")
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.dim())
