"""Tracks which segment of a step runs (a forward, a backward, the optimizer's step), and names it for the trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from itertools import repeat
from typing import Any

import torch

from hetmem import torch_private
from hetmem.base.calls import call_all
from hetmem.engine.runtime import Runtime, Section, Turn, in_backward
from hetmem.engine.shortage import Called
from hetmem.errors import ManageError
from hetmem.intercept.diagnostics import NOT_TRACED
from hetmem.memory.live_bytes import is_unseen, places_alone
from hetmem.schedule.trace import STEP, Turns
from hetmem.torch_private import tree_leaves, tree_map

_FORWARDS = 32
"""Backwards of more forwards than this have one key. A program that omits `no_grad`, and calls no backward, has any
number of forwards."""
_NODES = torch_private.SUPPORTED_NODES.keys()
"""Container classes of inputs, beside named tuples."""
_HOLD_NOTHING = {type(None), bool, int, float, str, torch.dtype, torch.device}
_MEASUREMENTS = 3
"""How many forwards in a row are measured at most for a backward that does not come."""


def tensors_within(value: object, depth: int = 3) -> list[torch.Tensor]:
    """Return the tensors of an input, also those in objects such as a key-value cache. Called for each token that is
    generated."""
    found: list[torch.Tensor] = []
    level: list[Any] = [value]
    for _ in range(depth + 1):
        above, level = level, []
        for each in above:
            kind = type(each)
            if kind is torch.Tensor or (kind not in _HOLD_NOTHING and isinstance(each, torch.Tensor)):
                found += (each,)
            elif kind is list or kind is tuple:
                level += each
            elif kind not in _HOLD_NOTHING and not isinstance(each, (torch.nn.Module, type)):
                level += _held_by(each)
    return found


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    fields: dict[str, Any] = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return fields.values()


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the inputs of a forward, with those in lists, tuples and dictionaries. Called for each token that is
    generated."""
    leaves: list[Any] = [*args, *kwargs.values()]
    nested = not _NODES.isdisjoint(map(type, leaves)) or any(map(isinstance, leaves, repeat(tuple)))
    return tree_leaves(leaves) if nested else leaves


def signature(
    module: torch.nn.Module, leaves: list[Any], names: tuple[str, ...], *, trains: bool, held: bool = False
) -> tuple[tuple[Hashable, ...], int, int]:
    """Return the key of a forward, the bytes of its inputs and its tokens. Forwards with one key (module, mode, kinds
    of inputs, not their shapes) use weights in the same order; tokens are the elements of the largest integer input.
    `leaves` are the inputs, `names` the keyword ones. `trains`: whether it makes a graph. `held`: the bytes include
    tensors within objects."""
    kinds: list[Any] = []
    nbytes = tokens = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kinds.append((leaf.dim(), leaf.dtype))
            count = leaf.numel()
            nbytes += count * leaf.itemsize
            if count > tokens and not leaf.dtype.is_floating_point:
                tokens = count
        else:
            kinds.append(type(leaf))
            if held:
                nbytes += sum([each.numel() * each.itemsize for each in tensors_within(leaf)])
    key = ("forward", id(module), module.training, trains, names, tuple(kinds))
    return key, nbytes, tokens


def has_float32(leaves: list[Any]) -> bool:
    """Return whether any of `leaves` is a tensor that `cast_inputs` casts."""
    return any(leaf.dtype is torch.float32 for leaf in leaves if isinstance(leaf, torch.Tensor))


def cast_inputs(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast float32 inputs to `dtype`, which a module computes in, as FSDP2 does it."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value

    args, kwargs = tree_map(cast, (args, kwargs))
    return args, kwargs


def without_memory(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called | None:
    """Return the inputs of a forward on `device` with its tensors on `meta`, for a rehearsal; None with inputs of other
    kinds, as a key-value cache, which a rehearsal would write to, or under autocast, which `meta` does not know."""
    kinds = {torch.Tensor, *_HOLD_NOTHING}
    if torch.is_autocast_enabled(device.type) or not kinds.issuperset(map(type, leaves_of(args, kwargs))):
        return None

    def empty(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)

    args, kwargs = tree_map(empty, (args, kwargs))
    return args, kwargs


class RunningBackward:
    """A backward that runs: the models found to take part in it, whose segments end with it, also if it raises, and
    the sections of their turns, which it owns (`intercept.backward`)."""

    def __init__(self) -> None:
        self._models: list[StepSegments] = []
        self._sections: list[tuple[Turn, Section]] = []

    def take(self, turn: Turn) -> Section:
        """Take `turn` until `give_back`."""
        section = turn.take("a backward")
        self._sections.append((turn, section))
        return section

    def join(self, segments: StepSegments, turn: Turn) -> Section:
        """Have `settle` end the backward of `segments`, which begins; returns the section of `turn` for it."""
        section = self.take(turn)
        self._models.append(segments)
        return section

    def settle(self) -> None:
        """End the backward of each model, also if that of another one raises."""
        models, self._models = self._models, []
        call_all(iter([segments.end_backward for segments in reversed(models)]))

    def give_back(self) -> None:
        """Give all turns back."""
        while self._sections:
            turn, section = self._sections.pop()
            turn.give(section)


class _Backwards(threading.local):
    def __init__(self) -> None:
        self.running: list[RunningBackward] = []

    def end(self, depth: int) -> None:
        """Forget all but the outermost `depth`."""
        del self.running[depth:]


BACKWARDS = _Backwards()
"""The backwards that run on this thread, outermost first."""


class Joined:
    """What the segments of a model know while forwards of `count` micro-batches count as one, and so do the backwards
    behind them; see `intercept.together`."""

    __slots__ = ("began", "count", "in_forwards", "leases", "may_have_rows", "may_lease", "measured", "running")

    def __init__(self, count: int) -> None:
        self.count = count
        self.began = self.measured = False
        """Whether the first forward has begun the segment, and whether that is measured."""
        self.in_forwards = self.may_lease = True
        """Whether the forwards have not all ended; and whether none has begun to use weights, of which the first one
        may lease all copies."""
        self.leases = False
        """Whether it has, for all of them."""
        self.may_have_rows = True
        """Whether none of the forwards so far needs each call of a module."""
        self.running = RunningBackward()
        """All backwards together."""


class StepSegments:
    """The current segment of one runtime. `backward_began` and `backward_ended` are called around each backward,
    `program_waits` as a backward or a step begins, and `program_continues` as a step ends."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pending: tuple[Hashable, ...] = ()
        self.refused: ManageError | None = None
        """What the backward that runs raises if it reaches a node of the model."""
        self.joined: Joined | None = None
        """Set while forwards and backwards of several micro-batches are one."""
        self.unseen = False
        """Whether no mode sees the operators of this backward; see `is_unseen`."""
        self.places = False
        """Whether the one that does is torch's default device; see `places_alone`."""
        self.backward_thread: int | None = None
        """The thread that called the last backward."""
        self._attempts: dict[Hashable, int] = {}
        self._watched = False
        self._size = 0
        """Bytes of the largest inputs among the forwards that the next backward may be of."""
        self.backward_began: Callable[[], None] = lambda: None
        self.backward_ended: Callable[[], None] = lambda: None
        self.program_waits: Callable[[], None] = lambda: None
        self.program_continues: Callable[[], None] = lambda: None

    @property
    def in_backward(self) -> bool:
        """Whether a backward of the model runs."""
        return self._runtime.in_backward

    @property
    def expects_a_backward(self) -> bool:
        """Whether a forward with a graph has run since the last step."""
        return bool(self._pending)

    @property
    def several(self) -> bool:
        """Whether the next backward may be of several forwards."""
        return len(self._pending) > 1

    def look_at(
        self, module: torch.nn.Module, leaves: list[Any], names: tuple[str, ...], *, transformed: bool
    ) -> tuple[tuple[Hashable, ...], int]:
        """Notice writes of the program before a forward of `module`, and return the arguments of `begin_forward` (see
        `signature`). `transformed`: within a transform of torch.func, whose tensors wrap homes. Raises `ManageError` if
        a symbolic trace calls it."""
        if torch.fx.Proxy in map(type, leaves):
            raise ManageError(NOT_TRACED)
        runtime = self._runtime
        trains = torch.is_grad_enabled()  # which `unwatched` changes within `inference_mode`
        goes_on = self.joined is not None and self.joined.began
        seen = goes_on or runtime.marks.pause()
        with runtime.unwatched(), torch_private.NoFunctionsOfSubclasses():
            if transformed:
                runtime.traffic.wait_for_updates()
            if not goes_on:
                runtime.writes.notice_all(seen=seen)
            key, size, tokens = signature(module, leaves, names, trains=trains, held=runtime.memory.device.watched)
            runtime.events.begin_forward(tokens, trains=trains)
            if runtime.memory.ranks is not None:
                runtime.memory.ranks.figures.first_batch(leaf for leaf in leaves if type(leaf) is torch.Tensor)
        return key, size

    def begin_forward(self, key: tuple[Hashable, ...], size: int) -> bool:
        """Begin a forward (no recomputation) with inputs of `size` bytes. Returns whether it has to be measured."""
        joined = self.joined
        if joined is not None:
            if joined.began:
                return joined.measured
            joined.began, key, size = True, (*key, Turns(joined.count)), size * joined.count
        self.settle()
        tracer = self._runtime.tracer
        if tracer.key == self.backward_key():
            self._pending = ()
        trains, measured = torch.is_grad_enabled(), tracer.must_measure(key, size) or self._runtime.sanitize
        if trains and len(self._pending) <= _FORWARDS:
            self._pending = (*self._pending, key)
        if trains or not self._pending:  # else the next backward is not of this forward
            self._size = max(size, self._size) if self.several else size
            backward = self.backward_key()
            if trains and tracer.must_measure(backward, self._size):
                self._attempts[backward] = self._attempts.get(backward, 0) + 1
                measured = measured or self._attempts[backward] <= _MEASUREMENTS
            self._watched = measured
        self._runtime.begin_segment(key, measured=measured, size=size)
        if joined is not None:
            joined.measured = measured
        return measured

    def on_backward(self) -> None:
        """Begin the backward segment, if a backward runs and its first use or gradient of the model has come."""
        if self.in_backward or not in_backward():
            return
        if not BACKWARDS.running:
            raise ManageError(
                "a backward of a managed model runs that torch.autograd was not asked for on this thread: call "
                "loss.backward(), torch.autograd.backward or torch.autograd.grad"
            )
        if self.refused is not None:
            raise self.refused
        self._runtime.turn.refuse_if_parked("a backward")  # one that takes a turn may be another model's
        running = BACKWARDS.running[-1] if self.joined is None else self.joined.running
        self.backward_thread = running.join(self, self._runtime.turn).thread
        self._runtime.in_backward = True
        with self._runtime.unwatched():
            self.program_waits()
        key = self.backward_key()
        self._attempts[key] = 0
        if self._runtime.tracer.key != key:
            self._runtime.begin_segment(key, measured=self._watched, size=self._size)
        else:
            self._runtime.events.begin_segment("backward")  # another one in the same trace
        if not self._runtime.tracer.measured:
            self.unseen = is_unseen()
            self.places = not self.unseen and places_alone()
        with self._runtime.unwatched():
            self.backward_began()

    def end_backward(self) -> None:
        """End a backward that has returned or raised."""
        if self.in_backward:
            self.settle()
            self.rest()

    def settle(self) -> None:
        """End the backward segment if one runs, also if the backward raised or gradients fail to reach their homes."""
        if self.in_backward:
            if self._runtime.uses.rows.open is not None:
                self._runtime.uses.end_row()
            self.unseen = self.places = False
            self._runtime.in_backward = False
            try:
                with self._runtime.unwatched():
                    self.backward_ended()
            finally:
                self._runtime.events.end_segment()  # the program's own work before the step is no compute

    def rest(self) -> None:
        """Watch parameters again, which the user may read until the next segment."""
        if not self._runtime.bindings.away:
            self._runtime.marks.resume()

    def begin_step(self) -> None:
        """Begin the optimizer's step."""
        self.settle()
        self._runtime.marks.begin_step()
        with self._runtime.unwatched():
            self.program_waits()
        self._pending = ()
        self._runtime.begin_segment(STEP, measured=False)

    def end_step(self) -> None:
        """End a step, also one that has raised."""
        self._runtime.marks.end_step()
        self.program_continues()
        self.rest()

    def forget_forwards(self) -> None:
        """Clear the forwards of the next backward, after a backward that was not seen to begin."""
        self._pending = ()

    def backward_key(self) -> Hashable:
        """Return the trace key of a backward of the forwards so far."""
        return ("backward", self._pending if len(self._pending) <= _FORWARDS else _FORWARDS)
