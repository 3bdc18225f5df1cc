"""Sends gradients of working weights home, in a hook that autograd calls as each has arrived (`placing.working`).

The parameters stay at home, and autograd knows nothing of them: hooks that the program has registered on one are called
here, at the moments at which torch would call them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch

from hetmem import torch_private
from hetmem.engine.gathered_gradients import GatheredGradients
from hetmem.engine.gradient_views import clear_consumed, take_gradient
from hetmem.engine.sink import Sink
from hetmem.engine.summed_gradients import SummedGradients
from hetmem.memory.chunk import ManagedParameter

_HOOKS_BEHIND = attrgetter("_post_accumulate_grad_hooks")


class ArrivalHooks(NamedTuple):
    """Factories, which are given a `GradientSink`, of autograd hooks that run before and after a gradient of the
    parameter with an `id` is accumulated, and the function that orders these among the user's; `working`: of the hook
    that runs after a gradient of the working weight of a parameter."""

    before: Callable[[Any, int], Callable[[torch.Tensor], None]]
    after: Callable[[Any, int], Callable[[torch.Tensor], None]]
    order: Callable[[Any, torch.Tensor], list[Any]]
    working: Callable[[Any, ManagedParameter], Callable[[torch.Tensor], None]]


class WorkingGradients:
    """The gradients of one model's working weights."""

    def __init__(self, sink: Sink, hooks: ArrivalHooks, summed: SummedGradients) -> None:
        self._sink = cast("Callable[[], Sink]", weakref.ref(sink))
        self._hooks = hooks
        self.gathered, self._summed = GatheredGradients(sink), summed

    def hook(self, managed: ManagedParameter) -> Callable[[torch.Tensor], None]:
        """Return a hook for the working weight of `managed`, for after a gradient of it."""
        return self._hooks.working(self._sink(), managed)

    def arrived(self, managed: ManagedParameter, weight: torch.Tensor) -> None:
        """Send the gradient of `weight`, a working weight of `managed`, home, and call the user's hooks of
        the parameter as torch does. Hooks find the parameter, and all gradients, at home."""
        parameter: Any = managed.parameter
        sink = self._sink()
        segments, monitor = sink.segments, sink.runtime.monitor
        try:
            if not sink.runtime.in_backward:
                with torch_private.NoFunctionsOfSubclasses():
                    segments.on_backward()
            with torch_private.NoFunctions() if segments.places else torch_private.NoFunctionsOfSubclasses():
                arrived = weight.grad
                if arrived is None:  # frozen since the forward
                    return
                gathered, summed = self.gathered, self._summed
                fresh = managed in gathered.fresh and parameter.grad is None
                if (fresh or summed.runs) and not sink.parts and arrived.layout is torch.strided:
                    plain = segments.unseen or segments.places
                    monitor.own = segments.unseen
                    plain = plain and not (arrived.requires_grad or sink.runtime.bindings.met)
                    if plain and (gathered if fresh else summed).take(managed, weight, arrived):
                        return
                    monitor.own = False
                if fresh:
                    gathered.note_alone(managed)
                if managed.chunk in gathered.chunks:
                    gathered.send(managed.chunk)
                take_gradient(weight)
                before = _of_the_user(parameter._backward_hooks)
                later = _of_the_user(parameter._post_accumulate_grad_hooks)
        except BaseException:  # as a Ctrl-C: the next backward would add to it
            with torch_private.NoFunctionsOfSubclasses():
                take_gradient(weight)
            raise
        finally:
            monitor.own = False
        if before or later:
            sink.runtime.uses.read_at_home(managed)
            sink.send_home(managed)
            sink.wait_until_home()
        for hook in before:
            arrived = _result(hook, arrived)
        with torch_private.NoFunctionsOfSubclasses():
            if sink.notifies or sink.runtime.traffic.updating:
                sink.tell_coming(managed)
            if parameter.grad is not None:
                clear_consumed(managed.parameter)
            sink.add(managed, arrived, parameter.grad)
        for hook in later:
            hook(parameter)


def _of_the_user(hooks: dict[int, Any] | None) -> list[Any]:
    """Return the hooks of the program among `hooks` of a parameter, in their order."""
    if not hooks or len(hooks) == 1:
        return []
    return [hook for hook in hooks.values() if not getattr(hook, "hetmem_own", False)]


def _result(hook: Callable[[torch.Tensor], torch.Tensor | None], gradient: torch.Tensor) -> torch.Tensor:
    """Return what `hook`, a hook of a tensor, makes of `gradient`. Raises RuntimeError as torch does."""
    result = hook(gradient)
    if result is None:
        return gradient
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(result).__name__}'")
    same = result.shape == gradient.shape and result.dtype is gradient.dtype and result.device == gradient.device
    if not same:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise RuntimeError(f"hook '{name}' has changed the size or type of value")
    return result


def has_hooks_of_the_user(parameter: torch.Tensor) -> bool:
    """Return whether hooks of the program may change gradients of `parameter` as they arrive."""
    hooks: Any = parameter._post_accumulate_grad_hooks  # None where it is frozen
    return hooks is not None and len(hooks) > 1


def have_hooks_of_the_user(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether `has_hooks_of_the_user` of any of `parameters`. In C alone."""
    return max(map(len, filter(None, map(_HOOKS_BEHIND, parameters))), default=0) > 1
