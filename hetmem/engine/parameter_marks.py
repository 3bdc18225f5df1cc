"""Watches the parameters of a model between its calls, so that only copies of weights that the program may have written
to are dropped: see note "writes" of `write_check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hetmem.engine.homes import Memory
from hetmem.engine.outgoing import Outgoing
from hetmem.engine.param_views import Bindings
from hetmem.engine.write_check import WriteCheck
from hetmem.memory.chunk import ManagedParameter


class ParameterMarks:
    """Watches the parameters of one model between its calls. Within a forward or a backward `Bindings` watches those
    that are not bound."""

    def __init__(
        self,
        memory: Memory,
        bindings: Bindings,
        writes: WriteCheck,
        outgoing: Outgoing,
        read_at_home: Callable[[ManagedParameter], None],
    ) -> None:
        self._memory, self._bindings, self._writes, self._outgoing = memory, bindings, writes, outgoing
        self._read_at_home = read_at_home
        self._step_runs: Callable[[], bool | None] | None = None
        """Returns whether the step that has begun is on the stack; it may ask for the type of a parameter."""
        self._watches = self._trails = self._but_trained = False
        self._shared: set[ManagedParameter] = set()
        """Parameters whose memory a tensor of the program shared at the last `_find_shared`."""

    def resume(self) -> None:
        """End compute: watch again, unless a step runs."""
        self._watches |= self._writes.has_copies  # also if homes have left the device meanwhile
        if self._step_runs is not None and self._step_runs():
            self._writes.unwatched = True
        elif self._outgoing.save is not None:  # who writes waits for it
            if self._watches:
                self._find_shared()
            self._bindings.watch()
        elif self._watches:
            self._find_shared()
            self._bindings.watch(but_trained=self._but_trained)
        else:
            self._bindings.unwatch()

    def watch_for_save(self) -> None:
        """Watch all parameters, as a save in the background begins. What the program holds was written before."""
        self._bindings.watch()

    def _find_shared(self) -> None:
        """Add the parameters whose memory a tensor of the program shares (`kept = p.data`) to `touched`, as it may read
        and write them. Functions that hand out memory are seen, or met an exposed parameter; other ways
        (`other.data = p`) are found where there are copies."""
        writes = self._writes
        among = *self._shared, *writes.touched, *writes.shared, *self._bindings.exposed, *writes.copied()
        self._shared = {*self._bindings.shared(among)}
        writes.touched.update(self._shared)

    def pause(self) -> bool:
        """Begin compute, which leaves copies of parameters on the device. Returns whether all were watched until now,
        so that each `.data` that was set is known."""
        seen, has_copies = not self._bindings.exposed, self._writes.has_copies
        if self._watches:
            self._find_shared()
        elif not has_copies:  # watched for a save alone
            self._bindings.unwatch()
        self._watches, self._but_trained = has_copies, False
        return seen

    def begin_step(self, runs: Callable[[], bool | None] | None = None) -> None:
        """Note that a step begins. `runs` returns whether the step is on the stack, also while it computes, and none is
        watched until `end_step`. None: the step is hetmem's, and runs without `__torch_function__`."""
        self.pause()
        if runs is not None or self._memory.resident:
            self._bindings.unwatch()
        self._step_runs, self._trails = runs or _always, False
        self._writes.unwatched = True

    def updates_trail(self) -> None:
        """Note that updates may end after their step, so that reads wait for them. Waits here for parameters whose
        memory a tensor of the program shares, as no torch function shows when that is used."""
        self._trails = True
        for managed in self._bindings.shared([*self._bindings.by_id.values()]):
            self._read_at_home(managed)

    def end_step(self) -> None:
        """End `begin_step`. If the model is whole on the device, and no update ends after the step, only frozen
        parameters are watched until the next forward."""
        if self._step_runs is None:
            return
        self._step_runs = None
        self._but_trained = self._memory.resident and not self._trails
        if not self._but_trained:
            self._writes.unwatched = False
        elif self._writes.has_copies:
            self._writes.trained = self._writes.find_trained()

    def stop(self) -> None:
        """Stop watching, as the model is released."""
        self._bindings.unwatch()
        self._watches = False

    def mark_again(self, used: Iterable[ManagedParameter]) -> None:
        """Watch `used` again, which were not while the program read them."""
        if self._watches or self._outgoing.save is not None:
            self._bindings.watch_again(used)


def _always() -> bool:
    return True
