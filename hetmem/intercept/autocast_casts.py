"""Frees the memory of casts that `torch.autocast` caches while their weights are not bound.

Note "shared casts": torch casts a weight once within an autocast. All uses share that node of autograd, which sums
their gradients in 16 bits, so the same bits need the same sharing. The cache would be a second copy of the model. So
the cached tensor stays, with its node, and loses its memory when the weight is unbound; binding the weight casts anew.
Without gradients nothing is shared, and the cache is switched off.
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
"""What `Casts.enter_cache_again` needs: whether the cache was on, and the thread."""


class Casts:
    """Tracks the cached casts of one model's weights. Those that autograd does not save (vectors, and matrices whose
    input needs no gradient) keep their memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._device_type = runtime.memory.device.torch_device.type
        self._seen = False
        self.alive: dict[int, tuple[ManagedParameter, weakref.ref[torch.Tensor], tuple[int, ...]]] = {}
        """By `id` of the weight: the weight, its cast, and `_written` as the cast was made."""
        self._off = 0
        """Number of enclosing calls that have switched the cache off."""

    def are_made(self) -> bool:
        """Return whether a forward that begins may make casts: under autocast, or always after a forward that did."""
        return self._seen or torch.is_autocast_enabled(self._device_type)

    def leave_cache(self, *, compiled: bool = False) -> Left | None:
        """Switch the cache off for code without gradients or `compiled` code, which casts at each use, and on again for
        code with gradients within. Returns the argument of `enter_cache_again`, or None if nothing was switched."""
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
        """End `leave_cache`. On another thread the cache is left alone: leaving `torch.autocast` resets it there."""
        before, thread = left
        self._off -= 1 if before else -1
        if thread == get_ident():
            torch.set_autocast_cache_enabled(before)

    def note(self, managed: ManagedParameter, cast: torch.Tensor) -> None:
        """Track `cast`, a cast of all of `managed`, as autograd saves it or a view of it."""
        found, self._seen = self.alive.get(id(managed)), True
        if (found is None or found[1]() is not cast) and managed.bound and torch.is_autocast_cache_enabled():
            self.alive[id(managed)] = managed, weakref.ref(cast), self._written(managed)

    def renew(self, used: Iterable[ManagedParameter]) -> None:
        """Cast the weights `used`, which are bound, again into their cached tensors."""
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
        """Free the memory of the casts of those of `used` that are not bound any more."""
        for managed in used:
            cast = None if managed.bound else self._of(managed)
            if cast is not None:
                with self._runtime.unwatched():
                    show_cast(cast, None)

    def go_home(self) -> None:
        """Cast again all weights whose homes are on the device, as compute ends, from their homes."""
        for managed, _, _ in list(self.alive.values()):
            cast = self._of(managed)
            if cast is not None and managed.home.device == cast.device:
                with self._runtime.unwatched():
                    show_cast(cast, managed.home if managed.code is None else None)

    def _of(self, managed: ManagedParameter) -> torch.Tensor | None:
        found = self.alive.get(id(managed))
        cast = None if found is None else found[1]()
        if found is not None and cast is None:
            del self.alive[id(managed)]
        return cast

    def _written(self, managed: ManagedParameter) -> tuple[int, ...]:
        return managed.counter._version, managed.replaced, self._runtime.statistics.steps

    def _refuse_if_cached(self, managed: ManagedParameter, cast: torch.Tensor) -> None:
        """Raise `ManageError` if torch's cache still has `cast`, made before a write to `managed`."""
        with self._runtime.unwatched(), torch.enable_grad():
            product = torch.matmul(managed.working, managed.working.new_zeros(managed.shape[-1], 0))
        if cast.grad_fn in nodes_behind(product):
            raise ManageError(
                f"{managed.name} was written to, or stepped, within one torch.autocast, which casts a weight once: "
                f"torch would compute on with what it was before. Leave torch.autocast before optimizer.step(), or "
                f"enter it with cache_enabled=False"
            )
