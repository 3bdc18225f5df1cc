"""The casts of weights that `torch.autocast` keeps until it is left: all uses of a weight share one node of autograd,
which adds their gradients in 16 bits, and so they must here.

Their memory, a second copy of the model, is given back whenever the weight is not bound, and made anew where it is: the
tensor in torch's cache, and its node, stay the same. Without gradients there is nothing to share, and torch keeps none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from threading import get_ident

import torch

from hetmem.engine.param_views import show_cast
from hetmem.engine.runtime import Runtime
from hetmem.errors import ManageError
from hetmem.memory.chunk import ManagedParameter
from hetmem.memory.live_bytes import nodes_behind

Left = tuple[bool, int]
"""Whether the cache was on, and the thread, for `Casts.enter_cache_again`."""


class Casts:
    """The casts of the weights of one model that are alive. Those of which autograd saves nothing (vectors, and what
    meets an input without a gradient) are left to torch's cache, as they are."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._device_type = runtime.memory.device.torch_device.type
        self._seen = False
        self.alive: dict[int, tuple[ManagedParameter, weakref.ref[torch.Tensor], tuple[int, ...]]] = {}
        """By the number of the weight: it, its cast, and what tells whether it was written to since."""
        self._off = 0
        """Calls around that have the cache switched off."""

    def are_made(self) -> bool:
        """Whether a forward that begins may make some, as one did that entered `torch.autocast` within."""
        return self._seen or torch.is_autocast_enabled(self._device_type)

    def leave_cache(self, *, compiled: bool = False) -> Left | None:
        """Switch the cache off for code without gradients, and for what would be `compiled`, which casts at each use,
        and on for what has gradients within. Returns what `enter_cache_again` is called with; None: it stays as it is.
        """
        if not torch.is_autocast_enabled(self._device_type):
            return None
        self._seen = True
        before, wanted = torch.is_autocast_cache_enabled(), torch.is_grad_enabled() and not compiled
        if before is wanted or not (before or self._off):
            return None
        torch.set_autocast_cache_enabled(wanted)
        self._off += 1 if before else -1
        return before, get_ident()

    def enter_cache_again(self, left: Left) -> None:
        """End `leave_cache`; `torch.autocast` does so by itself on a thread that was interrupted."""
        before, thread = left
        self._off -= 1 if before else -1
        if thread == get_ident():
            torch.set_autocast_cache_enabled(before)

    def note(self, managed: ManagedParameter, cast: torch.Tensor) -> None:
        """Autograd saves `cast`, or a view of it, which is all of `managed` in 16 bits."""
        found = self.alive.get(id(managed))
        if (found is None or found[1]() is not cast) and managed.bound and torch.is_autocast_cache_enabled():
            self.alive[id(managed)] = managed, weakref.ref(cast), self._written(managed)

    def renew(self, used: Iterable[ManagedParameter]) -> None:
        """Give the casts of `used`, which are bound, their values again."""
        for managed in used:
            cast = self._of(managed)
            if cast is None:
                continue
            if self.alive[id(managed)][2] != self._written(managed):
                self._refuse_if_cached(managed, cast)
                del self.alive[id(managed)]
                continue
            assert managed.device is not None
            with self._runtime.unwatched():
                show_cast(cast, managed.device)
            if self._runtime.tracer.measured and self._runtime.memory.device.watched:
                self._runtime.monitor.count("a cast of autocast", [cast])

    def drop(self, used: Iterable[ManagedParameter]) -> None:
        """Give the memory of the casts of `used`, of which some are bound no more, back."""
        for managed in used:
            cast = None if managed.bound else self._of(managed)
            if cast is not None:
                with self._runtime.unwatched():
                    show_cast(cast, None)

    def go_home(self) -> None:
        """Give casts their values where operators find weights at home, as nothing computes any more."""
        for managed, _, _ in list(self.alive.values()):
            cast = self._of(managed)
            if cast is not None and managed.home.device == cast.device:
                with self._runtime.unwatched():
                    show_cast(cast, managed.home)

    def _of(self, managed: ManagedParameter) -> torch.Tensor | None:
        found = self.alive.get(id(managed))
        cast = None if found is None else found[1]()
        if found is not None and cast is None:
            del self.alive[id(managed)]
        return cast

    def _written(self, managed: ManagedParameter) -> tuple[int, ...]:
        return managed.version_now, managed.data_sets, self._runtime.statistics.steps

    def _refuse_if_cached(self, managed: ManagedParameter, cast: torch.Tensor) -> None:
        """Raise `ManageError` if torch would compute with `cast`, which is what `managed` was before a write."""
        with self._runtime.unwatched(), torch.enable_grad():
            there = torch.matmul(managed.parameter, managed.parameter.new_zeros(managed.shape[-1], 0))
        if cast.grad_fn in nodes_behind(there):
            raise ManageError(
                f"{managed.name} was written to, or stepped, within one torch.autocast, which casts a weight once: "
                f"torch would compute on with what it was before. Leave torch.autocast before optimizer.step(), or "
                f"enter it with cache_enabled=False"
            )
