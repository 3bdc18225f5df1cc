"""Every backward of the process comes through here, before and after torch's engine runs it (ADR 20)."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch

from hetmem.memory.interrupts import HELD_BACK
from hetmem.runtime import registry
from hetmem.runtime.compiled import opaque, uncompiled
from hetmem.runtime.compute import forget_backward_that_raised
from hetmem.runtime.differentiated import accumulators, differentiate

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
    try:
        if any(interception.gradients.counts_arrivals() for interception in registry.interceptions()):
            _tell_of_arrivals(outputs)
        return differentiate(_engine, outputs, *args, **kwargs)
    except BaseException:
        with HELD_BACK:
            forget_backward_that_raised()
        raise


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
