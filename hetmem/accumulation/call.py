"""The public function: all micro-batches of a step pass each layer before the next one is fetched."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from hetmem import torch_private
from hetmem.accumulation.baton import Baton, Unwound
from hetmem.accumulation.borders import Borders, parts_of, refuse_borders, repeated_blocks, with_buffers
from hetmem.accumulation.order import BackwardOrder, Graph
from hetmem.accumulation.surroundings import RandomStates, ThreadState
from hetmem.base.warning import warn_user
from hetmem.engine.runtime import is_sharing_a_turn, sharing_the_turn
from hetmem.errors import ManageError
from hetmem.intercept.together import JoinedModels
from hetmem.memory.interrupts import HELD_BACK

Forward = Callable[[Any, Any], torch.Tensor]


def accumulate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    borders: Sequence[nn.Module] | None = None,
    generator: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """Do what `for batch in batches: forward(model, batch).backward()` does, layer by layer; return detached losses.

    All micro-batches pass a layer before the next one, and the backward goes back likewise: so weights of a managed
    model cross the link to the device twice in a call, however many `batches` there are. Gradients have the bits of the
    loop, and are added to each `p.grad` as the loop adds them.

    `forward(model, batch)` returns the scalar that is differentiated. Without it the model is called with a batch as
    `hetmem.plan` calls it (a tuple, a dict of keywords, or one tensor), and the mean of `.loss` of the outputs, of the
    scalars that it returns, or of `loss(output)`, is differentiated.
    `borders`: the modules at whose calls micro-batches take turns; by default the repeated blocks of a `ModuleList` or
    `Sequential`. Without any, with one batch, and where a managed model is whole on the device, this is the loop.

    Random numbers: micro-batch i draws as behind `torch.manual_seed(seeds[i])`, where the seeds are drawn at the call,
    by `torch.randint(2**63 - 1, (len(batches),), generator=generator)`; afterwards the default generators are as behind
    that draw.

    Each forward, and its backward, runs on a thread of its own, one at a time, with the autocast, modes and context
    variables of the caller. If one raises, all end: then no gradient has changed if it was a forward, while after a
    backward that raises, as after one in torch, some have. Raises `ManageError`, with nothing computed, within itself,
    within a backward or without gradients.
    """
    _refuse(model, batches, forward, loss)
    batches = [*batches]
    parts = parts_of(model)
    parameters = [each for part in parts if part._parameters for each in part._parameters.values() if each is not None]
    if borders is not None:
        refuse_borders(model, borders)
    if not batches:
        return []
    states = RandomStates(len(batches), generator)
    compute = forward or partial(_forward, loss, len(batches))
    together = JoinedModels(parameters, len(batches))
    try:
        with together.turns():
            found = _borders(parts, borders, together, len(batches))
            if not found:
                return _loop(model, batches, compute, states)
            return _MicroBatches(model, batches, compute, found, states, together).run()
    finally:
        states.restore()


def _refuse(model: nn.Module, batches: object, forward: Forward | None, loss: object) -> None:
    """Raise `ManageError` for calls that cannot be served."""
    if not isinstance(model, nn.Module):
        raise ManageError(f"hetmem.accumulate expects a torch.nn.Module, got {type(model).__name__}")
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise ManageError(f"hetmem.accumulate expects a list of batches, got {type(batches).__name__}")
    if forward is not None and loss is not None:
        raise ManageError("hetmem.accumulate takes forward=, which returns the loss, or loss=, not both")
    if is_sharing_a_turn():
        raise ManageError("hetmem.accumulate is called within the forward of another one: call it once for the step")
    if torch_private.current_graph_task() != -1:
        raise ManageError("hetmem.accumulate is called within a backward: call it behind it")
    if torch_private.transform_level() is not None:
        raise ManageError("hetmem.accumulate is called within a transform of torch.func: call it outside")
    if not torch.is_grad_enabled():
        raise ManageError("hetmem.accumulate is called under torch.no_grad() or the like: there would be no gradients")


def _borders(
    parts: Sequence[nn.Module], asked: Sequence[nn.Module] | None, together: JoinedModels, count: int
) -> Sequence[nn.Module]:
    """Return the borders at which to take turns in a model of these `parts`; none if the loop does as well."""
    if count == 1 or together.moves_nothing:
        return ()
    found = repeated_blocks(parts[0]) if asked is None else asked
    if not found:
        warn_user(
            f"hetmem.accumulate computes one micro-batch after the other, as {type(parts[0]).__name__} has no "
            f"ModuleList or Sequential with several blocks of one class: pass borders=, modules at which micro-batches "
            f"take turns"
        )
    return with_buffers(parts, found) if found else ()


def _forward(loss: Callable[[Any], torch.Tensor] | None, count: int, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of `batch`, divided by the number of batches."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if loss is not None:
        return _scalar(loss(output)) / count
    return _scalar(output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)) / count


def _scalar(loss: Any) -> torch.Tensor:
    """Return `loss`. Raises `ManageError` if it is no scalar that can be differentiated."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        raise ManageError(
            "the loss of a micro-batch does not depend on any parameter that requires a gradient: are all of them "
            "frozen, or is the loss detached?"
        )
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ManageError(
        f"expected a scalar loss of each micro-batch, or an output with one in `.loss`, got {what}: pass loss=, a "
        f"function of the output, or forward=, a function of the model and the batch"
    )


def _loop(model: nn.Module, batches: Sequence[Any], forward: Forward, states: RandomStates) -> list[torch.Tensor]:
    """Compute one micro-batch after the other on the calling thread."""
    losses = []
    for number, batch in enumerate(batches):
        states.enter(number)
        loss = _scalar(forward(model, batch))
        loss.backward()
        losses.append(loss.detach())
        del loss
    return losses


class _MicroBatches:
    """One call: a thread for each micro-batch computes its forward, waits for all others, and computes its backward."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        borders: Sequence[nn.Module],
        states: RandomStates,
        together: JoinedModels,
    ) -> None:
        self._model, self._batches, self._forward, self._together = model, batches, forward, together
        self._baton = Baton(len(batches), _Exchanged(states, together))
        self._borders = Borders(borders, len(batches), self._baton)
        self._state = ThreadState()
        self._kept: dict[int, torch.Tensor] = {}
        """Losses with their graphs, between forward and backward."""
        self._graphs: dict[int, Graph] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._left: dict[int, int] = {}
        """How many parts, forward and backward, each thread has not ended."""
        self._errors: list[BaseException] = []

    def run(self) -> list[torch.Tensor]:
        """Compute all; return the detached losses."""
        threads: list[threading.Thread] = []
        try:
            for number in range(len(self._batches)):
                run = partial(self._state.run, partial(self._compute, number))
                thread = threading.Thread(target=run, name=f"hetmem-micro-batch-{number}", daemon=True)
                with HELD_BACK:
                    thread.start()
                    threads.append(thread)
                    self._left[number] = 2
            with sharing_the_turn([thread.ident or 0 for thread in threads]):
                try:
                    self._run_forwards_and_backwards()
                finally:
                    self._end()
        finally:
            self._end()
            for thread in threads:
                thread.join()
        return [self._losses[number] for number in range(len(self._batches))]

    def _run_forwards_and_backwards(self) -> None:
        gradients = _Gradients(self._model) if not self._together else None
        with self._together.joined():
            with self._borders.watched():
                self._run()
            self._state.forget_casts()
            if gradients is not None:
                gradients.refuse_changes()
            graphs = [self._graphs.pop(number) for number in range(len(self._batches))]
            BackwardOrder(graphs, self._borders, self._baton)
            self._together.expect(
                Counter(chain.from_iterable(graph.last for graph in graphs)), sum(bool(graph.hides) for graph in graphs)
            )
            graphs.clear()
            with self._together.backwards():
                self._run()

    def _run(self) -> None:
        """Have all threads compute their forwards, or their backwards. Raises the first error of any."""
        self._baton.run(range(len(self._batches)))
        if self._errors:
            try:
                raise self._errors[0]
            finally:
                self._errors.clear()  # else the error would refer to itself

    def _end(self) -> None:
        """Have all threads end; those that wait compute nothing more."""
        self._baton.break_off()
        interrupt: BaseException | None = None
        while waiting := [number for number, left in self._left.items() if left]:
            try:
                self._baton.run(waiting)
            except BaseException as error:  # noqa: PERF203 - each interrupt is raised here
                interrupt = interrupt or error
        self._kept.clear()
        if interrupt is not None:
            raise interrupt

    def _compute(self, number: int) -> None:
        """Compute the micro-batch `number`, on its thread."""
        for part in (self._compute_loss, self._differentiate):
            try:
                self._baton.begin(number)
                part(number)
            except BaseException as error:  # noqa: PERF203 - two parts
                if not isinstance(error, Unwound):
                    self._errors.append(error)
                self._baton.break_off()
            finally:
                self._left[number] -= 1
                self._baton.end(number)

    def _compute_loss(self, number: int) -> None:
        loss = self._kept[number] = _scalar(self._forward(self._model, self._batches[number]))
        self._graphs[number] = Graph.of(loss, self._borders.starts[number])
        self._losses[number] = loss.detach()

    def _differentiate(self, number: int) -> None:
        self._kept.pop(number).backward()


class _Exchanged:
    """What goes with the baton: random states, and what models keep for the micro-batch that computes."""

    def __init__(self, states: RandomStates, together: JoinedModels) -> None:
        self._states, self._together = states, together

    def enter(self, number: int) -> None:
        """Prepare for the micro-batch `number`."""
        self._states.enter(number)
        self._together.enter()

    def leave(self, number: int) -> None:
        """End what the micro-batch `number` alone has."""
        self._together.leave()
        self._states.leave(number)


class _Gradients:
    """The gradients of a plain model as its forwards begin, which must not change them."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [*model.parameters()]
        self._before = [*map(_version_of, self._parameters)]

    def refuse_changes(self) -> None:
        """Raise `ManageError` if any has changed."""
        if [*map(_version_of, self._parameters)] != self._before:
            raise ManageError(
                "a forward of hetmem.accumulate has changed gradients, which come in another order than in a loop "
                "then: return the sum of all losses, and differentiate nothing in the forward. Gradients have changed: "
                "call zero_grad()"
            )


def _version_of(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
