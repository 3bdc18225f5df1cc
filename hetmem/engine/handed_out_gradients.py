"""Watches gradients on NVMe while the program may read and write them: what it writes makes staged copies stale."""

from __future__ import annotations

from hetmem import torch_private
from hetmem.engine.gradient_views import is_home_gradient
from hetmem.engine.gradient_watch import Flights, end_watch_of, watch_gradients
from hetmem.engine.runtime import Runtime
from hetmem.memory.chunk import Chunk, ManagedParameter, Role
from hetmem.schedule.trace import Tier


class HandedOutGradients:
    """The gradients of one model that the program may read and write, from `begin` to `end`."""

    def __init__(self, runtime: Runtime, flights: Flights) -> None:
        self._runtime, self._flights = runtime, flights
        self._watched: dict[Chunk, None] | None = None
        """While the program may: chunks whose gradients, on NVMe, are watched."""

    def begin(self) -> None:
        """Let the program read and write gradients until `end`."""
        self._watched = self._on_nvme()
        with torch_private.NoFunctionsOfSubclasses():
            for chunk in self._watched:
                watch_gradients(chunk)

    def end(self) -> None:
        """End `begin`, if it may: drop the staged copies of gradients that the program may have written to at home,
        those of chunks that have moved to NVMe meanwhile among them. Within a backward the program waits for the next
        use."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        with torch_private.NoFunctionsOfSubclasses():
            for chunk in watched | self._on_nvme():
                if chunk not in watched or end_watch_of(chunk):
                    self._runtime.traffic.superseded(chunk, Role.GRAD)
                for managed in filter(_is_shown, chunk.parameters if self._runtime.in_backward else ()):
                    self._flights.begin(managed)

    def _on_nvme(self) -> dict[Chunk, None]:
        chunks = self._runtime.chunks if self._runtime.memory.staging_slots else ()  # else none is on NVMe
        return dict.fromkeys(chunk for chunk in chunks if not chunk.hides and _is_on_nvme(chunk))


def _is_on_nvme(chunk: Chunk) -> bool:
    """Return whether gradients of `chunk` have their home on NVMe."""
    return Role.GRAD in chunk.homes and chunk.homes[Role.GRAD].tier is Tier.NVME


def _is_shown(managed: ManagedParameter) -> bool:
    """Return whether `p.grad` is the home of the gradient and the program can read it."""
    return managed.grad_view is None and is_home_gradient(managed)
