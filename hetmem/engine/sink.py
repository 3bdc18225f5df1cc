"""What those that gather, add up and send gradients see of the `GradientSink` of a model, which is built on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hetmem.base.weak import WeakList
from hetmem.engine.gradient_views import GradientLoans
from hetmem.engine.gradient_watch import Flights
from hetmem.engine.runtime import Runtime
from hetmem.engine.upward import GradientListener, Segments
from hetmem.memory.chunk import Chunk, ManagedParameter


class Sink(Protocol):
    """Takes the gradients of one model from autograd."""

    runtime: Runtime
    segments: Segments
    loans: GradientLoans
    lent: set[Chunk]
    flights: Flights
    notifies: bool
    parts: dict[ManagedParameter, Any]
    ranked: Any
    listeners: WeakList[GradientListener]

    @property
    def tells(self) -> bool:
        """Whether listeners are told of gradients now."""

    def tell_arrived(
        self, together: list[ManagedParameter], whole: Sequence[tuple[ManagedParameter, torch.Tensor]] = ()
    ) -> None:
        """Tell listeners that gradients of `together`, of one chunk, were sent home."""

    def tell_coming(self, managed: ManagedParameter) -> None:
        """Tell listeners that a gradient of `managed` will be sent home."""

    def prepare_home(self, managed: ManagedParameter, arrived: torch.Tensor, *, adds: bool) -> None:
        """Give gradients of the chunk of `managed` a home that can take `arrived`, or its sum."""

    def send_to(self, managed: ManagedParameter, arrived: torch.Tensor, *, adds: bool) -> bool:
        """Send `arrived` to the home of the gradient of `managed`; return whether that may lack it for a while."""

    def add(self, managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> None:
        """Add `arrived` to the gradient of `managed`, `previous`."""

    def send_home(self, managed: ManagedParameter) -> None:
        """Make `managed` its home, and an ordinary parameter, for hooks of the program that run now."""

    def wait_until_home(self) -> None:
        """Wait until all gradients are at home."""
