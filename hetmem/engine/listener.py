"""Who is told of gradients on their way, and of homes that move: what the runtime knows of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hetmem.memory.chunk import Chunk, ManagedParameter
from hetmem.memory.tensor_views import Memory


class GradientListener(Protocol):
    """An optimizer that updates while backward goes on."""

    @property
    def begins_early(self) -> bool:
        """Whether it does so."""
        ...

    @property
    def is_to_be_told(self) -> bool:
        """Whether it has to know of each gradient of the backward that begins, by `coming` and `arrived`. It is told,
        too, as long as updates are under way."""
        ...

    def expect(self, managed: ManagedParameter, arrivals: int) -> None:
        """So many more gradients of `managed` arrive in the backward that begins."""

    def coming(self, managed: ManagedParameter) -> None:
        """A gradient of `managed` is there, and will be added to its home. Raises if that must not be written now."""

    def arrived(self, managed: ManagedParameter) -> None:
        """It is on its way home: `GradientCopies.arriving` says whether it is there."""

    def lost(self, chunk: Chunk) -> None:
        """A gradient of `chunk` did not get home, which is raised in the backward: no update may read it."""

    def backward_over(self) -> None:
        """The backward is over, and its gradients are where the user finds them."""

    def consumed(self, chunk: Chunk, parameters: Iterable[ManagedParameter]) -> None:
        """The gradients of `parameters`, which are in `chunk`, were shown until now and are gone."""

    def used_again(self, managed: ManagedParameter) -> None:
        """An operator uses `managed` between the begin of a backward and the end of its step. Raises if that is not
        what the forward has used any more."""

    def begun(self) -> Iterable[ManagedParameter]:
        """Those of which it has begun an update in the present step."""
        ...

    def updates_on_device(self) -> set[int]:
        """The `id`s of parameters whose update has the same bits where it is made on the device, with homes there."""
        ...

    def settle(self) -> None:
        """Let nothing be under way."""

    def give_device_back(self) -> None:
        """Let go of what it has taken of the device beside homes and copies. Waits for what uses that."""

    def place_on_device(self, chunk: Chunk) -> Memory | None:
        """Memory of the device for the gradients of `chunk`, where its update will read them there; None: they go home.
        Waits for updates that use such memory."""
        ...

    def may_move(self, chunk: Chunk) -> bool:
        """Whether it can follow if the homes of `chunk` move: nobody else holds its states there. Waits for what it
        reads there itself."""
        ...

    def moved(self, chunk: Chunk) -> None:
        """The homes of `chunk` have moved."""
