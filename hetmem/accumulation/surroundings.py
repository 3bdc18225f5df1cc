"""Carries what torch keeps for each thread, or for the process, into the threads of micro-batches."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch

from hetmem import torch_private

_Generator = torch.Generator
_AUTOCAST = ("cpu", "cuda")
_LARGEST_SEED = 2**63 - 1
_STATE = methodcaller("get_state")


class RandomStates:
    """States of torch's default generators, one for each micro-batch, which replace each other as the baton goes on.

    Each micro-batch begins as behind `torch.manual_seed(seed)`, with a seed of its own, drawn at the call. So a
    micro-batch draws the same numbers whatever runs between two of its layers.
    """

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        """Draw `count` seeds from `generator`, or from the default generator of the CPU."""
        device = "cpu" if generator is None else generator.device
        self.seeds: list[int] = torch.randint(_LARGEST_SEED, (count,), generator=generator, device=device).tolist()
        self._generators = _default_generators()
        self._before = [*map(_STATE, self._generators)]
        self._states: list[list[torch.Tensor] | None] = [None] * count

    def enter(self, number: int) -> None:
        """Set the states of the micro-batch `number`."""
        states = self._states[number]
        if states is not None:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            return
        for generator in self._generators:
            generator.manual_seed(self.seeds[number])

    def leave(self, number: int) -> None:
        """Keep the states that the micro-batch `number` has come to."""
        self._states[number] = [*map(_STATE, self._generators)]

    def restore(self) -> None:
        """Set the states of all generators as they were behind the draw of the seeds."""
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)


def _default_generators() -> list[Any]:
    """Return the generators that `torch.manual_seed` seeds and that have been used: of the CPU and of GPUs."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]


class ThreadState:
    """What torch and Python keep for the thread that makes this, for other threads to enter."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]
        self._cache = torch.is_autocast_cache_enabled()
        self._function_modes = [*torch_private.function_mode_stack()]
        self._dispatch_modes = [*torch_private.dispatch_mode_stack()]
        self._saved_hooks = torch_private.autograd._top_saved_tensors_default_hooks(True)
        self._streams = None
        if torch.cuda.is_initialized():
            self._streams = torch.cuda.current_device(), torch.cuda.current_stream()

    def forget_casts(self) -> None:
        """Clear the casts that autocast has cached in other threads, unless it is on here, where it keeps them."""
        if not any(enabled for _, enabled, _ in self._autocast):
            torch.clear_autocast_cache()

    def run(self, function: Callable[[], None]) -> None:
        """Call `function` with this state on the calling thread, which ends afterwards."""
        self._context.copy().run(self._run, function)

    def _run(self, function: Callable[[], None]) -> None:
        if self._streams is not None:
            torch.cuda.set_device(self._streams[0])
            torch.cuda.set_stream(self._streams[1])
        torch.set_grad_enabled(self._grad)
        torch.autograd.set_multithreading_enabled(False)  # else a GPU's nodes run on a thread of their own
        torch.autocast_increment_nesting()  # casts that one micro-batch has cached stay when another leaves autocast
        torch.set_autocast_cache_enabled(self._cache)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        with _modes(self._function_modes, self._dispatch_modes):
            if self._saved_hooks is None:
                function()
                return
            with torch.autograd.graph.saved_tensors_hooks(*self._saved_hooks):
                function()


@contextmanager
def _modes(functions: Sequence[Any], operators: Sequence[Any]) -> Iterator[None]:
    """Push modes of another thread, whose own `__enter__` has run there."""
    for mode in operators:
        torch_private.push_dispatch_mode(mode)
    for mode in functions:
        torch_private.push_mode(mode)
    try:
        yield
    finally:
        for _ in functions:
            torch_private.pop_mode()
        for _ in operators:
            torch_private.pop_dispatch_mode()
