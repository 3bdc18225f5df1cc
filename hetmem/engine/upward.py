"""What the engine calls of those that are built on it: of an optimizer, of the phases of a step, of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from hetmem.memory.chunk import Chunk, ManagedParameter


class GradientListener(Protocol):
    """An optimizer of hetmem's, which may update while a backward runs, as it is seen by what takes gradients."""

    def optimizer_options(self) -> dict[str, Any]:
        """Return, for reports, the options that decide when and where it updates."""

    @property
    def wants_each_gradient(self) -> bool:
        """Whether to call `coming` and `arrived` in the backward that begins."""

    @property
    def begins_early(self) -> bool:
        """Whether it begins updates within a backward."""

    def expect(self, managed: ManagedParameter, arrivals: int) -> None:
        """Expect `arrivals` more gradients of `managed` in the backward that begins."""

    def coming(self, managed: ManagedParameter) -> None:
        """Prepare for a gradient of `managed` that will be added to its home."""

    def arrived(self, together: list[ManagedParameter], whole: Iterable[tuple[ManagedParameter, torch.Tensor]]) -> None:
        """Count gradients of `together`, of one chunk, in flight home; `whole`: those of parameters that have no others
        at home, as they are on the device."""

    def go_on(self) -> None:
        """Begin the updates that other ranks let begin by now, and advance those that are under way."""

    def lost(self, chunk: Chunk) -> None:
        """Begin no update of `chunk`: a gradient of it was sent and has not arrived."""

    def hurry(self) -> bool:
        """Begin all updates that can begin, as host memory can keep no more gradients; return whether there are any."""

    def used_again(self, managed: ManagedParameter) -> None:
        """Raise RuntimeError if `managed` is used before the end of the step and has been updated already."""

    def begun(self) -> Iterable[ManagedParameter]:
        """Return the parameters that updates of this step have begun to change."""

    def backward_raised(self, error: BaseException) -> None:
        """Keep the text of `error`, which has ended a backward."""

    def synchronize(self) -> None:
        """Wait until all updates are done and written home. Raises their errors."""

    def updates_on_device(self) -> set[int]:
        """Return the `id`s of parameters whose update has the same bits on the device."""

    def leave_gradients(self, chunk: Chunk) -> None:
        """Wait until no pass reads gradients of `chunk`, whose home is about to move."""

    def may_move(self, chunk: Chunk) -> bool:
        """Return whether the program holds no states in homes of `chunk`."""

    def has_held_states(self, chunk: Chunk) -> bool:
        """Return whether the program holds states in homes of `chunk`, beside those that the optimizer shows."""

    def moved(self, chunk: Chunk) -> None:
        """Note that the homes of `chunk` have moved."""


class Segments(Protocol):
    """The forwards and backwards of a model, as what takes gradients sees them."""

    unseen: bool
    """Whether nothing watches the operators of the backward that runs."""
    places: bool
    """Whether a default device of torch does, and nothing else."""
    backward_thread: int | None
    """Identifier of the thread that runs a backward."""
    backward_began: Callable[[], None]
    backward_ended: Callable[[], None]
    program_waits: Callable[[], None]
    program_continues: Callable[[], None]

    def on_backward(self) -> None:
        """Begin a backward, if none runs."""


class LeavingActivations(Protocol):
    """The activations of one model that may leave the device."""

    @property
    def ahead_bytes(self) -> int:
        """Device bytes that chunks leave, if they have enough, for those that are fetched ahead."""

    def give_way(self) -> bool:
        """Drop one that was fetched ahead or is between uses, and is in host memory too; False if there is none."""

    def make_room(self, nbytes: int) -> bool:
        """Begin to move `nbytes` of them, or all, to host memory; return whether any."""

    def needs(self, own_bytes: int) -> None:
        """Note that `own_bytes` are needed beside chunks and storages in flight."""

    def shortage(self) -> str:
        """Return a sentence on why some that might have left did not, or ""."""
