"""Steps of an optimizer over a model that several ranks train: what they compare, where they meet, what they refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch

from hetmem.engine.ranked_gradients import RankedGradients
from hetmem.engine.runtime import Runtime
from hetmem.errors import ManageError, PeerError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk
from hetmem.optim.chunk_update import ChunkUpdate
from hetmem.optim.members import Members
from hetmem.optim.states import SteppingOptimizer
from hetmem.optim.update_queue import numbers
from hetmem.ranks.group import Ranks
from hetmem.ranks.words import fence

_NAMED = 20
"""Of how many gradients that the program has set an error may name one that differs."""


class RankedSteps:
    """The steps of one rank, with an optimizer that is given to each method, over the model of `interception`."""

    def __init__(self, interception: Interception, ranks: Ranks) -> None:
        gradients = interception.gradients.ranked
        assert gradients is not None, "it is made with the ranks"
        self._outgoing, self._chunks = interception.runtime.outgoing, interception.runtime.chunks
        self._gradients, self._ranks, self._engine = gradients, ranks, interception.runtime.traffic.engine
        self._settling: list[ChunkUpdate] = []
        """Updates that this step has begun early, and whose gradients of this rank are not all at home."""
        self._offered: list[ChunkUpdate] = []
        """Those that wait for other ranks."""
        self._early: set[Chunk] = set()
        """Chunks whose updates of this step may have begun on some rank."""

    def place(self) -> AbstractContextManager[None]:
        """Return a context in which the other ranks know that this one is in a step."""
        return self._ranks.waits.at("a step")

    def begin(self, optimizer: SteppingOptimizer) -> None:
        """Wait until all ranks have come to a step, and take part in their backwards meanwhile; then compare options,
        and which parameters have gradients."""
        self._outgoing.wait_for(self._chunks)  # of a save of rank 0: no rank updates before that comes
        name, handed_out = f"a step of {type(optimizer).__name__}", self._ranks.words.handed_out
        handed_out[self._ranks.rank] = optimizer.states.handed_out
        self._ranks.meet(name, serve=_take_part)
        got_states = self._gradients.end_backwards_of_other_machines()
        self._gradients.tell()
        self._note_early(self._offered)
        options = _in_words(optimizer, self._gradients, counts=got_states or handed_out.any(), early=self._early)
        self._early = set()
        self._ranks.meet(f"the options of {name}", options)
        self._gradients.compare_machines(zlib.crc32(options.encode()), f"what {name} does")
        self._gradients.compare()
        self._gradients.writes.bring_home()
        self._ranks.words.steps[self._ranks.rank] += 1
        self._ranks.figures.began_step({link.value: use.bytes for link, use in self._engine.links().items()})

    def begin_update(self) -> None:
        """Note that this rank changes homes from here on. Raises `PeerError` if an error has ended the part of any
        rank, which may be saving them."""
        words, own = self._ranks.words, self._ranks.rank
        if words.updating[own] > words.updated[own]:
            return
        words.updating[own] += 1
        fence()
        try:
            self._ranks.waits.refuse_ended()
        except PeerError:
            words.updating[own] -= 1
            raise

    def end_updates(self, have_all: Callable[[], bool] | None) -> None:
        """Wait until all ranks have changed their part of homes; None: their workers do, and what reads one waits."""
        words, own = self._ranks.words, self._ranks.rank
        words.updated[own] = words.updating[own]
        self._ranks.waits.sign()
        if have_all is not None:
            ended = words.updated
            self._ranks.waits.until(lambda: have_all() and bool((ended >= ended[own]).all()), "the end of a step")

    def await_parts(self, have_all: Callable[[], bool]) -> None:
        """Wait until all ranks have computed their part of the updates that this one has computed."""
        self._ranks.waits.until(have_all, "updates that other ranks compute")

    def meet(self, what: str) -> None:
        """Wait until all ranks have computed their part of `what`."""
        self._ranks.meet(what)

    # ---- updates that begin in a backward ----------------------------------------------------------------------

    def may_offer(self, optimizer: SteppingOptimizer, chunk: Chunk, members: Members) -> bool:
        """Return whether the update of `members` of `chunk` may begin before the step does, once all ranks have offered
        it: not if it needs all gradients, or those of other machines, nor if another optimizer updates a part of the
        chunk."""
        if self._ranks.machines is not None or optimizer.needs_all_gradients:
            return False
        return all(managed in members.managed for managed in chunk.parameters if managed.parameter.requires_grad)

    def offer(self, update: ChunkUpdate) -> None:
        """Have `update` begin once all ranks have offered it: this one offers it as its gradients, of which it makes no
        more, are at home, and a save in the background has written its chunk."""
        self._settling.append(update)
        self._outgoing.ask_for(update.chunks)

    def ready(self, *, all_there: bool = False) -> list[ChunkUpdate]:
        """Return updates that may begin now, each once: those that all ranks have offered, or, as all are in a step,
        all of this rank."""
        home = [update for update in self._settling if self._gradients.are_home(update.chunk)]
        settled = [update for update in home if not self._outgoing.holds(update.chunks)]
        if settled:
            self._settling = [update for update in self._settling if update not in settled]
            self._offered += settled
            self._ranks.updates.offer(numbers(update.chunk for update in settled))
            self._ranks.waits.sign()
        if not self._offered:
            return []
        if all_there:
            ready, self._offered = self._offered, []
            return ready
        by_all = self._ranks.updates.offered_by_all(numbers(update.chunk for update in self._offered))
        ready = [*compress(self._offered, by_all)]
        if ready:
            self._offered = [update for update in self._offered if update not in ready]
            self._early.update(update.chunk for update in ready)
        return ready

    def _note_early(self, offered: Sequence[ChunkUpdate]) -> None:
        """Note those of `offered` that all ranks have offered: the same on all, once they are in the step."""
        if offered:
            by_all = self._ranks.updates.offered_by_all(numbers(update.chunk for update in offered))
            self._early.update(update.chunk for update in compress(offered, by_all))

    def give_up(self) -> tuple[list[ChunkUpdate], list[ChunkUpdate]]:
        """Return, as all ranks give a step up, the updates that all have offered, which may have begun on others, and
        those that have begun nowhere."""
        self._ranks.meet("forget_step()", serve=_take_part)
        begun = self.ready()
        self._ranks.meet("what of a step has begun")
        dropped, self._offered = self._offered, []
        self._ranks.updates.withdraw(numbers(update.chunk for update in dropped))
        return begun, dropped


def refuse_a_later_group(runtime: Runtime) -> None:
    """Raise `ManageError`, before the first step of a model that this process manages alone for want of a process
    group, if there is one by now: each of its ranks would train a model of its own."""
    distributed = torch.distributed
    count = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if count > 1:
        raise ManageError(
            f"the process group of {count} ranks was made after hetmem.manage, so that each would train a model of its "
            f"own: make the group first, or give hetmem.manage group=False"
        )
    runtime.may_join = False


def _take_part() -> None:
    """Take part in the backwards of other ranks over any model of this process, and in the updates that they begin."""
    for interception in registry.interceptions():
        ranked = interception.gradients.ranked
        if ranked is not None and not interception.runtime.in_backward:
            ranked.take_part()
            ranked.go_on()


def _in_words(
    optimizer: SteppingOptimizer, gradients: RankedGradients, *, counts: bool, early: Container[Chunk]
) -> str:
    """Return what a step of `optimizer` depends on beside weights, gradients and states in homes, for ranks to
    compare. `counts`: also the counts of steps, but those of `early` chunks, which may be those of the next one."""
    lines = [optimizer.rule.in_words()]
    lines += [f"max_grad_norm {optimizer.max_grad_norm}, gradients times {optimizer.expected_scale()}"]
    for at, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        numbers = [*map(gradients.number_of, group["params"])]
        lines.append(f"group {at}: {options}, parameters {zlib.crc32(repr(numbers).encode()):x}")
    if counts:  # the program of some rank may have changed them
        shown = optimizer.states.shown  # in the order in which this rank has made them
        in_order = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in shown
        ]
        entries = [shown[parameter] for parameter in in_order if gradients.chunk_of(parameter) not in early]
        found = [float(value) for entry in entries for value in entry.values() if _is_number(value)]
        lines.append(f"counts of steps {zlib.crc32(repr(found).encode()):x}")
    given = [f"{name} with a hash of {_hash_of(grad):x}" for name, grad in gradients.of_the_program()]
    lines.append(f"gradients of the program {zlib.crc32(repr(given).encode()):x}" if given else "")
    return "\n".join(given[:_NAMED] + lines)


def _hash_of(tensor: torch.Tensor) -> int:
    values = tensor.detach().to_dense().cpu().contiguous().view(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.dim())
