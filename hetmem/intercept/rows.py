"""Leases the weights of several module calls at once: a row of calls between which nothing has to move.

In a segment that follows its trace it is known which modules are called next, what of theirs is on the device, and when
something is fetched or evicted next (`Residency.still`). Up to there the weights of these modules are leased together,
and torch calls the modules without hetmem's hooks. The row ends as the next module is called, or the forward ends.
Transfers and evictions are those of single calls: nothing would have moved between them.

What each call uses is learned from forwards by module. A program may leave what was learned. The call of a module that
is not in the row ends it, and is no longer what the trace expects. One of the row that is not called, or whose weights
are saved by hooks of the program, shows in the number of weights that hetmem's hooks have packed: then these weights
keep what they show as long as anything refers to them, and all is learned anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch

from hetmem import torch_private
from hetmem.engine.runtime import Runtime
from hetmem.engine.use_rows import LEAST, MOST, Together, UseRow
from hetmem.intercept.forward_scope import Call
from hetmem.intercept.hooks import PartHooks
from hetmem.intercept.saved_tensors import Pack, SavedTensors
from hetmem.memory.chunk import ManagedParameter
from hetmem.placing.working import WorkingWeights
from hetmem.schedule.trace import SegmentTrace

_top_hooks: Any = torch_private.autograd._top_saved_tensors_default_hooks
_PACKED, _COMPILED = attrgetter("packed"), "_compiled_call_impl"


class Step:
    """The call of a module at the moment before that with the number `at`: `names`, the `__dict__` of the module;
    `used`, its weights; and how many weights hetmem's hooks for saved tensors `packed` in it: -1 until that is known,
    and for a call that cannot be in a row."""

    __slots__ = ("at", "began", "names", "packed", "used")

    def __init__(self, at: int, names: dict[str, Any], used: list[ManagedParameter]) -> None:
        self.at, self.names, self.used, self.packed, self.began = at, names, used, -1, 0


class Row:
    """The `uses` of calls whose weights are leased together, behind the call in which the row begins; `used`: with the
    weights of that one. Meanwhile `hooks` are off, those of the modules with the `__dict__`s `names`. `packed`: how
    many weights hetmem's hooks pack in all of them."""

    __slots__ = ("hooks", "names", "packed", "used", "uses")

    def __init__(
        self, names: list[dict[str, Any]], hooks: PartHooks, uses: UseRow, used: Together, packed: int
    ) -> None:
        self.names, self.hooks, self.uses, self.used, self.packed = names, hooks, uses, used, packed


class _Learned:
    """What was learned of `trace`: the call at each moment that is one, and rows by their first moment and length. Rows
    end at `borders`, moments before which another micro-batch goes on."""

    def __init__(self, trace: SegmentTrace) -> None:
        self.trace = trace
        self.borders: set[int] = set()
        self.steps: list[Step | None] = [None] * len(trace.moments)
        self.rows: dict[tuple[int, int], Row | None] = {}


class Rows:
    """The rows of one model's forwards, of which one is open at a time."""

    def __init__(self, runtime: Runtime, saved: SavedTensors, working: WorkingWeights) -> None:
        self._runtime, self._saved, self._working = runtime, saved, working
        self._parts: set[int] = set()
        self._numbers: tuple[int, ...] = ()
        """The parts of the model, by `id` of their `__dict__`, and the numbers of the two hooks that each has."""
        self.elsewhere: set[ManagedParameter] = set()
        """Weights that functions have used outside of calls of their modules: each such use is a moment."""
        self._packed = 0
        self._all: dict[Hashable, _Learned] = {}
        self.learned: _Learned | None = None
        """Of the trace that the forward that runs follows; None: each call leases its own weights."""

    def hook(self, parts: Iterable[torch.nn.Module], numbers: Iterable[int]) -> None:
        """Let rows have calls of `parts`, whose two hooks have `numbers`."""
        self._parts, self._numbers = {*map(id, map(vars, parts))}, (*numbers,)

    def begin(self) -> None:
        """Begin a forward in which nothing but module calls is known to use weights."""
        tracer = self._runtime.tracer
        trace = tracer.followed
        self.learned = None
        if trace is not None:
            learned = self._all.get(tracer.key)
            if learned is None or learned.trace is not trace:
                learned = self._all[tracer.key] = _Learned(trace)
            self.learned = learned

    def pass_border(self) -> None:
        """Have no row go on from here, where another micro-batch does."""
        learned, at = self.learned, self._runtime.tracer.position
        if learned is not None and at not in learned.borders:
            learned.borders.add(at)
            learned.rows.clear()

    def forget(self) -> None:
        """Forget what was learned."""
        self._all.clear()
        self.learned = None

    def follow(self, call: Call, module: torch.nn.Module, used: list[ManagedParameter]) -> Row | None:
        """Learn that `call` of `module` uses `used`. Returns the row that begins with it, if one is known."""
        learned, tracer = self.learned, self._runtime.tracer
        if learned is None or tracer.followed is not learned.trace:
            return None
        at, names = tracer.position, module.__dict__
        step = learned.steps[at - 1]
        if step is None or step.names is not names or step.used is not used:
            step = learned.steps[at - 1] = Step(at, names, used)
            learned.rows.clear()
        call.step, step.began = step, self._saved.weights_packed
        if step.packed < 0 or (length := self._runtime.traffic.residency.still(at, MOST)) < LEAST:
            return None
        key = at, length
        if key not in learned.rows:
            learned.rows[key] = self._find(learned, *key)
        return learned.rows[key]

    def note_end(self, step: Step) -> None:
        """Note the end of the call that `follow` has learned as `step`."""
        alone = self._runtime.tracer.position == step.at and self._is_plain(step.names)
        step.packed = self._saved.weights_packed - step.began if alone else -1

    def _is_plain(self, names: dict[str, Any]) -> bool:
        """Return whether the module with the `__dict__` `names` is a part of the model with the `forward` of its class,
        and without other modules and hooks of the program."""
        plain = not (names["_modules"] or "forward" in names or _COMPILED in names) and id(names) in self._parts
        return plain and len(names["_forward_hooks"]) == len(names["_forward_pre_hooks"]) == 1

    def _find(self, learned: _Learned, at: int, most: int) -> Row | None:
        """Return the row of up to `most` calls from the moment number `at` on; None if there is none."""
        steps, seen = list[Step](), {*self.elsewhere}
        for number, step in enumerate(learned.steps[at - 1 : at + most], at - 1):
            if step is None or step.packed < 0 or not seen.isdisjoint(step.used):
                break
            if steps and number in learned.borders:
                break
            steps += (step,)
            seen.update(step.used)
        if len(steps) <= LEAST:
            return None
        used, names = [step.used for step in steps], [step.names for step in steps[1:]]
        uses = UseRow(chain.from_iterable(used[1:]), learned.trace.moments[at : at + len(names)])
        hooks = PartHooks(names, self._numbers * len(names))
        return Row(names, hooks, uses, Together(chain.from_iterable(used)), sum(map(_PACKED, steps)))

    def come_behind(self, operator: str, used: list[ManagedParameter]) -> bool:
        """Return whether the trace has a use of `used` by `operator` next."""
        together = Together(used)
        together.counted()
        return self._runtime.tracer.comes_next(operator, together.blocks)

    def begin_row(self, row: Row) -> bool:
        """Begin the uses of `row`, until `end_row`. Returns False, with nothing begun, if they cannot begin at once."""
        top = _top_hooks(True)
        if type(top[0]) is not Pack if top is not None else torch.is_grad_enabled():
            return False  # what hooks of others keep is seen at each call
        if True in map(contains, row.names, repeat(_COMPILED)):  # since it was learned: compiled parts are regions
            self.forget()
            return False
        if not self._runtime.uses.use_in_a_row(row.uses):
            return False
        self._packed = self._saved.weights_packed
        if not row.hooks.take_off():  # the program has registered hooks since: their call will end the row
            self.forget()
        return True

    def end_row(self, row: Row) -> None:
        """End `begin_row`, before the weights are unbound."""
        row.hooks.put_back()
        if self._saved.weights_packed - self._packed != row.packed:
            self.forget()
            self._working.replace(row.uses.used)
