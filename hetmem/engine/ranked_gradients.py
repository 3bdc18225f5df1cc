"""Adds the gradients of one rank to homes that several ranks share, in the order of ranks: see `schedule.turns`.

Each gradient is divided by the number of ranks, in the dtype of its home, before it is added. One whose turn has not
come waits on the device; if too many bytes wait, the thread does. Those of micro-batches in turns are added up there
first: their sum is divided, and has a turn, as one gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from operator import attrgetter

import torch

from hetmem import torch_private
from hetmem.base.weak import weakly
from hetmem.engine.gradient_views import is_held, is_home, leave_gradient_to_holders, show_gradient
from hetmem.engine.machine_sums import MachineSums
from hetmem.engine.ranked_writes import RankedWrites
from hetmem.engine.sink import Sink
from hetmem.engine.working_gradients import has_hooks_of_the_user
from hetmem.memory.chunk import Chunk, ManagedParameter, Role, without_graph
from hetmem.memory.hidden_gradient import HiddenGradient
from hetmem.ranks.group import Ranks, not_yet
from hetmem.schedule.turns import RankTurns

_GRADIENT = attrgetter("parameter.grad")


def _is_there(gradient: torch.Tensor | None) -> bool:
    """Return whether `gradient` is one to add to: not None, nor the stand-in for one that the program has zeroed."""
    return gradient is not None and not (type(gradient) is HiddenGradient and gradient.zeroed)


class RankedGradients:
    """The gradients of one rank's backwards over one model."""

    def __init__(self, sink: Sink, ranks: Ranks) -> None:
        self._sink_there = weakref.ref(sink)
        runtime = sink.runtime
        self._ranks, self._parameters = ranks, runtime.parameters
        self._copies, self._device = weakref.ref(runtime.traffic.gradients), runtime.memory.device
        self._most_bytes = runtime.traffic.gradients.sends.most_bytes
        self._numbers = {managed: number for number, managed in enumerate(self._parameters)}
        self._numbers_of: dict[Chunk, list[int]] = {}
        for managed, number in self._numbers.items():
            self._numbers_of.setdefault(managed.chunk, []).append(number)
        self.writes = RankedWrites(ranks, runtime.chunks, runtime.traffic)
        runtime.writes.refused = self.writes.refuse_in_compute
        runtime.writes.announced = self.writes.refuse_without_room
        machines = ranks.machines
        self._turns = RankTurns(
            ranks.rank, ranks.count, len(self._parameters), ranks.words, leaves_late=machines is not None
        )
        self._waiting: dict[int, list[torch.Tensor]] = {}
        """Gradients, divided, whose turn has not come, by the number of the parameter."""
        self._bytes = 0
        """Bytes of those."""
        self._flying: dict[int, int] = {}
        """How many are on their way home, by the number of the parameter."""
        self._expected: dict[int, int] = {}
        """How many more gradients micro-batches in turns make, by the number of the parameter."""
        self._added_up: dict[int, torch.Tensor] = {}
        """What they have made so far, on the device, by the number of the parameter."""
        self._sums = None if machines is None else MachineSums(ranks, machines, self._parameters, self.writes)
        self._keeps = machines is None or machines.index == 0
        """Whether what was at home before a backward stays in the sum of this machine."""
        runtime.traffic.gradients.await_turns = weakly(self._await_turns)
        self._advances = False
        """Whether gradients are being sent."""
        self._place = ExitStack()
        self._compared = False
        self.failed: BaseException | None = None
        """The error that has ended the backward that runs."""

    def tell(self) -> None:
        """Tell the other ranks which parameters have a gradient, and what the program has written."""
        self.writes.tell()
        if self.writes.pages:
            begun = {managed.chunk for listener in self._sink.listeners for managed in listener.begun()}
            if begun:
                self.writes.refuse_in(begun)
            self._sink.runtime.outgoing.wait_for(self._sink.runtime.chunks)  # as all bring a part of them home then
        has = [*map(_is_there, map(_GRADIENT, self._parameters))]
        self._ranks.words.has_gradient[self._ranks.rank] = has

    def number_of(self, parameter: torch.Tensor) -> int:
        """Return the number of `parameter`, the same on all ranks; -1 if it is of another model."""
        managed = self._sink.runtime.bindings.by_id.get(id(parameter))
        return -1 if managed is None else self._numbers[managed]

    def chunk_of(self, parameter: torch.Tensor) -> Chunk | None:
        """Return the chunk of `parameter`; None if it is of another model."""
        managed = self._sink.runtime.bindings.by_id.get(id(parameter))
        return None if managed is None else managed.chunk

    def of_the_program(self) -> list[tuple[str, torch.Tensor]]:
        """Return the gradients that the program has set to tensors of its own, with the names of their parameters."""
        set_here = ((managed, managed.parameter.grad) for managed in self._parameters)
        return [
            (f"{managed.name}.grad", grad)
            for managed, grad in set_here
            if grad is not None and not is_home(grad, managed)
        ]

    def compare(self) -> None:
        """Raise `PeerError` if other ranks have gradients of other parameters, or their programs have written something
        else."""
        self._ranks.compare_gradients([managed.name for managed in self._parameters])
        self.writes.compare()

    def begin(self, *, is_of_late: bool = False) -> None:
        """Enter a backward, or one of gradients that came late; nothing of it is added before all ranks have."""
        with ExitStack() as place:
            place.enter_context(self._ranks.waits.at("a backward"))
            self.failed, self._compared = None, False
            for managed in self._parameters:
                if managed.parameter.grad is None and managed.grad_home is not None and is_held(managed):
                    leave_gradient_to_holders(managed, [])
            if is_of_late:  # those show `p.grad` on the ranks that have made them, and are not at home yet
                self.writes.tell()
                self._ranks.words.has_gradient[self._ranks.rank] |= self._turns.filled()
            else:
                self.tell()
            self._ranks.waits.sign()
            self._turns.begin(is_of_late=is_of_late)
            if self._sums is not None:
                self._sums.begin(self._turns.backward, passes_unused=self._turns.passes_unused)
            if self.writes.pages:
                self._compare_here()
                self.writes.bring_home()
            self._place = place.pop_all()

    def take_part(self) -> None:
        """Take part, with no gradient, in the backwards that other ranks have entered and this one has not."""
        while self._turns.is_called():
            with torch_private.NoFunctionsOfSubclasses():
                self.begin()
                self.end()

    @staticmethod
    def refuse(managed: ManagedParameter, arrived: torch.Tensor, previous: torch.Tensor | None) -> None:
        """Raise `ManageError` for `arrived` if it cannot be added to homes that ranks share."""
        if arrived.requires_grad:
            raise not_yet("create_graph=True")
        if arrived.layout is not torch.strided:
            raise not_yet(f"a sparse gradient ({managed.name})")
        if previous is not None and not is_home(previous, managed):
            raise not_yet(f"{managed.name}.grad that the program has set")
        if has_hooks_of_the_user(managed.parameter):
            raise not_yet(f"a post-accumulate hook ({managed.name})")

    def expect(self, arrivals: Mapping[ManagedParameter, int], hiding: int = 0) -> None:
        """Expect so many gradients of each parameter in the backward of micro-batches in turns that begins next.
        `hiding`: how many micro-batches make more of them within checkpoints. Raises `ManageError` if any does: sums of
        which it is not known when they are complete would all wait on the device."""
        if hiding:
            raise not_yet("hetmem.accumulate with checkpoints of use_reentrant=True (not with False)")
        self._expected = {self._numbers[managed]: count for managed, count in arrivals.items() if count > 1}

    def send(self, managed: ManagedParameter, arrived: torch.Tensor) -> bool:
        """Take `arrived`, a gradient of `managed`, and add it at home in its turn; of micro-batches in turns their
        sum."""
        number = self._numbers[managed]
        with without_graph():
            whole = self._add_up(number, arrived) if number in self._expected else arrived
            if whole is None:
                return True
            self._made(number, whole)
        self._advance()
        if self._is_full():
            self._wait(lambda: self._advance() or not self._is_full(), "a turn to add gradients")
        return True

    def end(self) -> None:
        """End a backward: return once it has ended on all ranks, and each `p.grad` shows the mean."""
        with self._place:
            fewer, self._added_up, self._expected = self._added_up, {}, {}
            if self.failed is not None:
                self._ranks.waits.end_part(self.failed)
                if self._sums is not None:
                    self._sums.abandon()
                self._waiting.clear()
                self._flying.clear()
                self._count(-self._bytes)
                return
            self._ranks.figures.ended_backward(self._turns.backward)
            if not self._compared:
                self._compare_here()
            for number, whole in fewer.items():
                self._made(number, whole)
            late = {number: self._waiting.pop(number) for number in self._end_turns()}
            self.go_on()
            self.writes.refuse()
            of_any = self._sums is not None and self._sums.end(self._sink.loans.give_own)
            self._show(self._turns.filled().nonzero()[0])
        if of_any:
            self._add_late(late)

    def are_home(self, chunk: Chunk) -> bool:
        """Return whether all gradients of `chunk` that this rank has made are at home."""
        numbers = self._numbers_of[chunk]
        return all(each.keys().isdisjoint(numbers) for each in (self._added_up, self._waiting, self._flying))

    def go_on(self) -> None:
        """Have optimizers begin what other ranks let begin by now, and advance what is under way."""
        self._sink.runtime.traffic.executor.poll()
        for listener in self._sink.listeners:
            listener.go_on()

    def end_backwards_of_other_machines(self) -> bool:
        """Take part, with no gradient, in backwards that other machines enter, until all have come to a step. Return
        whether the program of any ever got the states of the optimizer that steps."""
        if self._sums is None:
            return False
        self.tell()
        while not self._sums.all_step():
            with torch_private.NoFunctionsOfSubclasses():
                self.begin()
                self.end()
            self.tell()
        return self._sums.any_got_states

    def compare_machines(self, number: int, what: str) -> None:
        """Raise `PeerError` that names `what`, if another machine has another `number`."""
        if self._sums is not None:
            self._sums.compare(number, what)

    @property
    def _sink(self) -> Sink:
        sink = self._sink_there()
        assert sink is not None, "it has made this, and calls it"
        return sink

    # ---- inside ------------------------------------------------------------------------------------------------

    def _compare_here(self) -> None:
        self._wait(self._turns.all_entered, "the begin of the backward on all ranks")
        self._compared = True
        self.compare()

    def _end_turns(self) -> list[int]:
        """Add all gradients of this backward, on all ranks; return the parameters that have late ones left."""
        if self._sums is not None:
            self._sums.computed(self._turns.late())
        self._turns.end()
        self._ranks.waits.sign()
        self._wait(lambda: self._advance() or self._turns.is_over(), "the end of the backward on all ranks")
        return self._turns.late()

    def _add_late(self, late: dict[int, list[torch.Tensor]]) -> None:
        """Add gradients that came late, on this rank or another one, in a backward of their own."""
        self.begin(is_of_late=True)
        for number, gradients in late.items():
            for gradient in gradients:
                self._count(-gradient.nbytes)
                self._hold(number, gradient)
        self.end()

    def _add_up(self, number: int, arrived: torch.Tensor) -> torch.Tensor | None:
        """Add `arrived` to what micro-batches have made of a parameter; return the sum once it is complete."""
        before, dtype = self._added_up.pop(number, None), self._parameters[number].chunk.dtype
        total = arrived if before is None else before.to(dtype) + arrived  # not in place: autograd may read the first
        self._expected[number] -= 1
        if self._expected[number]:
            self._added_up[number] = total
            self._sink.runtime.room.count("a sum of gradients", total)
            return None
        del self._expected[number]  # another one would come late
        return total

    def _made(self, number: int, whole: torch.Tensor) -> None:
        """Have `whole`, what this backward makes of a gradient, wait for its turn."""
        managed = self._parameters[number]
        if self._sums is not None:
            self._sums.made(managed.chunk)
        self._hold(number, whole.to(managed.chunk.dtype) / self._ranks.of_all)

    def _hold(self, number: int, divided: torch.Tensor) -> None:
        """Have `divided`, a gradient of a parameter, wait for its turn."""
        self._waiting.setdefault(number, []).append(divided)
        self._count(divided.nbytes)
        self._turns.made(number)

    def _show(self, numbers: Iterable[int]) -> None:
        """Show the gradients of parameters that other ranks have made."""
        with torch_private.NoFunctionsOfSubclasses():
            for managed in (self._parameters[number] for number in numbers):
                if not _is_there(managed.parameter.grad):
                    if Role.GRAD not in managed.chunk.homes:
                        self._sink.loans.give_own(managed.chunk)
                    managed.open_grad_home()
                    hidden = managed.grad_view
                    show_gradient(managed.parameter, managed.grad_home if hidden is None else hidden)

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        copies = self._copies()
        assert copies is not None
        self._ranks.waits.until(reached, what, self.go_on, busy=lambda: copies.under_way)

    def _is_full(self) -> bool:
        """Return whether so many bytes wait that this thread does, unless all wait for the end of the backward."""
        return self._bytes > self._most_bytes and self._turns.waits

    def _await_turns(self) -> bool:
        """Wait until a gradient that waits here is sent, as the device lacks room; return whether there was one."""
        before = self._bytes
        if self._advances or not self._turns.waits:
            return False
        self._wait(lambda: self._advance() or self._bytes < before, "a turn to add gradients")
        return True

    def _count(self, nbytes: int) -> None:
        copies = self._copies()
        assert copies is not None
        self._bytes += nbytes
        copies.gathered_bytes += nbytes

    def _advance(self) -> bool:
        """Note what has arrived, and add what is due; False."""
        turns, copies = self._turns, self._copies()
        assert copies is not None
        went_on = False
        for number in [*self._flying]:
            if not copies.arriving(self._parameters[number].chunk):
                for _ in range(self._flying.pop(number)):
                    turns.arrived(number)
                went_on = True
        if went_on:
            self.go_on()  # before the others see that this backward has ended here
        self._advances = True
        try:
            for number in turns.due():
                if not self._compared:
                    self._compared = True
                    self.compare()
                self._add(number)
                went_on = True
        finally:
            self._advances = False
        if went_on:
            self._ranks.waits.sign()
        return False

    def _add(self, number: int) -> None:
        """Send the gradients of a parameter that wait to its home."""
        managed, turns, copies = self._parameters[number], self._turns, self._copies()
        assert copies is not None
        there = self._keeps and bool(self._ranks.words.has_gradient[self._ranks.rank, number])
        adds = there or turns.is_filled(number)
        count, waiting = turns.add(number), self._waiting.pop(number)
        gradients = waiting[:count]
        if waiting[count:]:
            self._waiting[number] = waiting[count:]
        target = managed.at_home(Role.GRAD)
        for gradient in gradients:
            work = partial(self._device.gradient_out, target, gradient, add=adds)
            self._flying[number] = self._flying.get(number, 0) + 1
            self._count(-gradient.nbytes)
            copies.send(managed.chunk, work, target.nbytes, (gradient,))
            adds = True
