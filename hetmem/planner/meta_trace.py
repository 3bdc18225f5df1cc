"""Runs one forward and backward of a model, on `meta` or for real, and records what a managed run would see.

It takes the place of `intercept.interceptor` where no memory is managed: parameters are bound to a new tensor for each
operator, so that views that outlive it are found, and saved weights are unpacked again in backward. It decides nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from hetmem.accumulation.borders import have_common
from hetmem.accumulation.order import Graph
from hetmem.engine.rows import asks_for_nothing, row_bytes, row_tables
from hetmem.memory.live_bytes import operator_of
from hetmem.placing.build import compute_dtypes, specs
from hetmem.planner.meta_results import Cost, Results, attention, rows_and_tokens
from hetmem.planner.workload import Event, Kind, Phase, Workload
from hetmem.schedule.formats import Coding
from hetmem.schedule.placement import ROWS_SHARE
from hetmem.schedule.saved import LOOKED_AT, SavedRound
from hetmem.torch_private import TorchDispatchMode, next_node_number, storage_references, tree_leaves, tree_map

_NAMED_BYTES = 1 << 16
"""Smaller tensors are not listed at the peak."""
_KINDS = 5
_WIDE = 4
"""A weight with so many times more rows than columns is taken for a vocabulary's: an embedding or an output layer."""

_What = tuple[int, str, tuple[int, ...], torch.dtype]
"""Bytes of a tensor, the operator that made it, its shape and its dtype."""

_READS: tuple[Any, ...] = (torch.Tensor.device.__get__, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
"""Accessors that a managed run counts as a use, although no operator runs."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A parameter that autograd saved, as `_pack` returns it: its index, and the view that was saved."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype


class MetaTracer:
    """One trace: the events so far, the storages of parameters, and all other storages that are alive."""

    def __init__(
        self,
        model: torch.nn.Module,
        mixed_precision: torch.dtype | None,
        results: Results,
        codings: Mapping[str, Coding] | None = None,
    ) -> None:
        """Prepare to trace `model`. With `mixed_precision` its float32 parameters are converted, and stay so.
        `codings`: those of quantised weights, by name."""
        self.results = results
        named = dict(model.named_parameters())
        self._model = model
        self._parameters = list(named.values())
        compute = compute_dtypes(model, named, mixed_precision)
        self._specs = tuple(specs(named, compute, codings or {}))
        self._mixed = mixed_precision
        coded = {id(named[name]): coding for name, coding in (codings or {}).items()}
        tables = row_tables(model, coded)
        self._row_bytes = {
            index: row_bytes(parameter, coded.get(id(parameter)))
            for index, parameter in enumerate(self._parameters)
            if id(parameter) in tables
        }
        """Bytes at home of a row of each parameter whose rows may be read in place of the whole."""
        for parameter, dtype in zip(self._parameters, compute, strict=True):
            parameter.data = parameter.data.to(dtype, copy=True)
        self.by_id = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._homes = [parameter.data for parameter in self._parameters]
        self._owners = {self._key(home): index for index, home in enumerate(self._homes)}
        self._views: Counter[int] = Counter()
        self._held: set[int] = set()
        self._let_go: list[int] = []
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, object] = {}
        """Weak references to counted storages and views; each takes a third of the time of a `weakref.finalize`."""
        self._named: dict[int, _What] = {}
        """The large tensors that are alive, by their storage."""
        self._peak: tuple[int, list[_What]] = 0, []
        """The most that was alive at one time, and the large tensors of it."""
        self.live_bytes = 0
        self.paused = False
        self._events: list[Event] = []
        self._phase = Phase()
        self._dtypes: Counter[str] = Counter()
        self._uses = _Uses(self)
        self._depth = 0
        self._in_backward = False
        self._passed: list[torch.nn.Module] = []
        """The borders that the forward has come to."""
        self._starts: list[int] = []
        """Autograd's number of the next node behind each border."""
        self._recomputed_flops = 0
        self._round = SavedRound()
        """The tensors that autograd saves, recorded as in a run."""
        self._event_at = [0]
        """The event of each tick of the clock of `_round`."""
        self._saved: dict[int, int] = {}
        """The numbers of saved tensors that backward has not used yet, by storage."""
        self._staying: dict[int, None] = {}
        """The saved storages that something beside the graph held at the last look."""
        self._held_by_graph: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_of: Callable[[Any], torch.Tensor] | None,
        call: Callable[..., Any] | None = None,
        borders: Sequence[torch.nn.Module] = (),
    ) -> Workload:
        """Trace `loss_of(model(*args, **kwargs)).backward()`, or without `loss_of` a forward alone. `call`: what is
        called in place of the model, and calls it. `borders`: modules at whose calls micro-batches take turns. The
        model and the tensors are on one device: `meta`, or one where control flow sees values. Errors of the model
        propagate; `results.last` is then the operator that was called last."""
        handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._gradient) for p in self._parameters if p.requires_grad
        ]
        handles.append(register_module_forward_pre_hook(self._enter))
        handles.append(register_module_forward_hook(self._leave, always_call=True))
        handles += [border.register_forward_pre_hook(self._come_to, prepend=True) for border in borders]
        buffers = sum(buffer.numel() * buffer.itemsize for buffer in self._model.buffers())
        kept = list[_What]()
        if self._mixed is not None:
            args, kwargs = tree_map(lambda value: _cast(value, self._mixed), (args, kwargs))
        try:
            with _OperatorResults(self):
                self._boundary(Kind.FORWARD, "forward")
                self.count(tree_leaves((args, kwargs)))
                self.count(self._model.buffers())
                if loss_of is None:
                    self._model(*args, **kwargs)
                else:
                    with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                        loss = loss_of((call or self._model)(*args, **kwargs))
                    if borders:
                        self._note_borders(Graph.of(loss, self._starts))
                    self._boundary(Kind.BACKWARD, "backward")
                    kept = [*self._named.values()]
                    self._in_backward = True
                    loss.backward()
                    self._boundary(Kind.END, "end of backward")
        finally:
            for handle in handles:
                handle.remove()
        return Workload(
            type(self._model).__name__,
            self._specs,
            frozenset(i for i, p in enumerate(self._parameters) if p.requires_grad),
            tuple(home.itemsize for home in self._homes),
            self._mixed is not None,
            buffers,
            tuple(self._events),
            *rows_and_tokens((args, kwargs)),
            self._dtypes.most_common(1)[0][0] if self._dtypes else "float32",
            *self._at_peak(),
            recomputed_flops=self._recomputed_flops,
            saved=tuple(self._round.intervals.values()),
            ticks=tuple(zip(self._event_at, self._round.needed_bytes, strict=True)),
            kept_logits_bytes=self._logits_of(kept),
        )

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        """Count the call of a module; the outermost one turns `_Uses` on, also where a checkpoint recomputes it."""
        self._depth += 1
        self.called()
        if self._depth == 1:
            self._uses.__enter__()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._uses.__exit__(None, None, None)

    # ---- borders -----------------------------------------------------------------------------------------------

    def _come_to(self, module: torch.nn.Module, args: Any) -> None:
        if not self._in_backward:  # else it is computed again
            self._boundary(Kind.BORDER, "border")
            self._starts.append(next_node_number())
            self._passed.append(module)

    def _note_borders(self, graph: Graph) -> None:
        """Have the backward behind `graph` come to the same borders, unless a run does each backward as a whole: see
        `accumulation.order`."""
        again = len({*self._passed}) < len(self._passed)
        if graph.hides and (again or have_common(self._passed)):
            return
        for stretch in sorted(graph.first, reverse=True)[1:]:
            graph.first[stretch][1].register_prehook(lambda _: self._boundary(Kind.BORDER, "border"))

    # ---- uses --------------------------------------------------------------------------------------------------

    def _boundary(self, kind: Kind, operator: str, parameters: tuple[int, ...] = ()) -> None:
        let_go, self._let_go = tuple(self._let_go), []
        event = Event(kind, operator, parameters, [], let_go, self.live_bytes, Phase(), Phase())
        event.during.peak_bytes, self._phase = self.live_bytes, event.during
        self._events.append(event)
        if kind is not Kind.USE:
            self._is_over()

    def _is_over(self) -> None:
        """End the operator of the last event: what follows until the next boundary counts as `after`."""
        event = self._events[-1]
        if self._phase is event.during:
            event.after.peak_bytes, self._phase = self.live_bytes, event.after

    def use(self, operator: str, used: list[int]) -> None:
        """Record that `operator` begins to use the parameters `used`."""
        self._boundary(Kind.USE, operator, tuple(used))

    def reads_rows(self, index: int, indices: Any) -> bool:
        """Return whether an embedding reads the rows `indices` of parameter `index` alone, which are counted then."""
        table = self._parameters[index]
        few = index in self._row_bytes and indices.numel() <= len(table) * ROWS_SHARE
        if not (few and asks_for_nothing(table)):
            return False
        self._phase.rows_bytes += indices.numel() * self._row_bytes[index]
        return True

    def bind(self, used: list[int]) -> None:
        """Bind each of `used` to new memory for one operator."""
        for index in used:
            self._parameters[index].data = self._view(index)

    def rest(self, used: list[int]) -> None:
        """Bind `used` to their homes again after the operator; parameters that a view is left of stay in use."""
        for index in used:
            self._parameters[index].data = self._homes[index]
            self._note_held(index)
        self._is_over()

    def _note_held(self, index: int) -> None:
        if self._views[index] and index not in self._held:
            self._held.add(index)
            if self._events[-1].parameters:
                self._events[-1].held.append(index)

    def _view(self, index: int) -> torch.Tensor:
        paused, self.paused = self.paused, True
        home = self._homes[index]
        view = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=home.device)
        if not home.is_meta:
            view.copy_(home)
        self.paused = paused
        key = self._key(view)
        self._owners[key] = index
        self._views[index] += 1
        self._alive[key] = weakref.ref(view.untyped_storage(), functools.partial(self._died, key, index))
        return view

    def _died(self, key: int, index: int, reference: object) -> None:
        del self._owners[key], self._alive[key]
        self._views[index] -= 1
        if not self._views[index] and index in self._held:
            self._held.remove(index)
            self._let_go.append(index)

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = self._owners.get(self._key(tensor)) if tensor.layout is torch.strided else None
        if index is None:
            saved = tensor.detach()  # the program may hold `tensor`, an input, itself
            self._save(saved)
            return saved
        return _Saved(index, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Saved):
            number = self._saved.pop(self._key(packed), None) if packed.layout is torch.strided else None
            if number is not None:
                self._round.use(number, self.live_bytes)
                self._event_at.append(self._next_to_work())
            return packed  # type: ignore[no-any-return]
        self._boundary(Kind.SAVED, f"backward of {self._specs[packed.index].name}", (packed.index,))
        view = self._view(packed.index)
        self._note_held(packed.index)
        paused, self.paused = self.paused, True
        base = view if packed.dtype == view.dtype else view.view(packed.dtype)
        tensor = torch.as_strided(base, packed.size, packed.stride, packed.offset)
        self.paused = paused
        return tensor

    def _save(self, saved: torch.Tensor) -> None:
        """Record a tensor that autograd saves in the forward, and since when only the graph holds it, as a run does."""
        if self._in_backward or saved.layout is not torch.strided:
            return
        key = self._key(saved)
        if key in self._sizes:
            if key not in self._saved:
                self._saved[key] = number = len(self._round.intervals)
                self._round.save(number, (None, number), self._sizes[key], self.live_bytes)
                self._event_at.append(self._next_to_work())
                self._staying[key] = None
            self._held_by_graph.setdefault(key, []).append(weakref.ref(saved))
        for other in list(islice(reversed(self._staying), LOOKED_AT)):
            held = sum(reference() is not None for reference in self._held_by_graph.get(other, ()))
            if other not in self._saved:  # used already, within the forward
                del self._staying[other]
            elif storage_references(other) <= held + 1:  # one is of Python's own object
                self._round.free(self._saved[other])
                del self._staying[other]

    def _next_to_work(self) -> int:
        """Return the event that starts with the next operator: the current one if it has had none, else the next."""
        event, at = self._events[-1], len(self._events) - 1
        return at + any(phase.work.matrix or phase.work.moved_bytes for phase in (event.during, event.after))

    def _gradient(self, parameter: torch.Tensor) -> None:
        index = self.by_id[id(parameter)]
        parameter.grad = None
        self._boundary(Kind.GRADIENT, f"gradient of {self._specs[index].name}", (index,))

    # ---- memory and work ---------------------------------------------------------------------------------------

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]

    def count(self, tensors: Iterable[Any], operator: str = "input") -> None:
        """Count the storages of `tensors` that are not counted yet, until they are freed."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes or key in self._owners:
                continue
            self._sizes[key] = nbytes = storage.nbytes()
            self.live_bytes += nbytes
            if nbytes >= _NAMED_BYTES:
                self._named[key] = nbytes, operator, tensor.shape, tensor.dtype
            self._alive[key] = weakref.ref(storage, functools.partial(self._forget, key))
        if self.live_bytes > self._phase.peak_bytes:
            self._phase.peak_bytes = self.live_bytes
        if self.live_bytes > self._peak[0]:
            self._peak = self.live_bytes, list(self._named.values())
        self._round.need(self.live_bytes)

    def _forget(self, key: int, reference: object) -> None:
        nbytes = self._sizes.pop(key, 0)
        del self._alive[key]
        self.live_bytes -= nbytes
        self._named.pop(key, None)

    def _at_peak(self) -> tuple[tuple[tuple[str, int], ...], int]:
        """Return the largest kinds of tensors alive at the peak, and the bytes of those as wide as the vocabulary (the
        first dimension of the largest weight)."""
        kinds: Counter[str] = Counter()
        for nbytes, operator, shape, dtype in self._peak[1]:
            kinds[f"{operator} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"] += nbytes
        return tuple(kinds.most_common(_KINDS)), self._logits_of(self._peak[1])

    def _logits_of(self, tensors: Iterable[_What]) -> int:
        """Return the bytes of those of `tensors` that are as wide as the vocabulary."""
        largest = max(
            (home.shape for home in self._homes if home.dim() == 2), key=lambda shape: shape.numel(), default=()
        )
        vocabulary = largest[0] if largest and largest[0] > _WIDE * largest[1] else -1
        return sum(nbytes for nbytes, _, shape, _ in tensors if shape and shape[-1] == vocabulary)

    def called(self) -> None:
        """Count a call of a module, or of a function of torch within one, which costs time in a managed run."""
        self._phase.calls += 1

    def worked(self, cost: Cost) -> None:
        """Add the cost of an operator to the current event."""
        work = self._phase.work
        work.operators += 1
        if cost.flops:
            work.matrix.append((cost.flops, cost.nbytes))
            if self._in_backward and torch.is_grad_enabled():  # a backward itself has no gradients
                self._recomputed_flops += cost.flops
            self._dtypes[cost.dtype] += cost.flops
        else:
            work.moved_bytes += cost.nbytes


class _Uses(TorchFunctionMode):
    """Reports to the tracer which operators use which parameters."""

    def __init__(self, tracer: MetaTracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._answers: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _metadata_only(func):
            self._tracer.called()
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(self._tracer.results, func, *args, **kwargs)
        if func is torch.Tensor.__bool__ and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        used: list[int] = []
        self._find((*args, *kwargs.values()), used)
        if not used or _metadata_only(func):
            result = func(*args, **kwargs)
            if getattr(func, "__name__", "") in _ASSUMED and isinstance(result, torch.Tensor) and result.is_meta:
                self._answers[id(result)] = (result, _ASSUMED[func.__name__])
            return result
        if func is torch.nn.functional.embedding and self._tracer.reads_rows(used[0], args[0]):
            return func(*args, **kwargs)
        self._tracer.use(getattr(func, "__name__", str(func)), used)
        self._tracer.bind(used)
        try:
            return func(*args, **kwargs)
        finally:
            self._tracer.rest(used)

    def _find(self, values: Iterable[Any], used: list[int]) -> None:
        for value in values:
            index = self._tracer.by_id.get(id(value))
            if index is not None:
                if index not in used:
                    used.append(index)
            elif type(value) in (list, tuple):
                self._find(value, used)


_ASSUMED = {"all": True, "any": False}
"""The truth values assumed for tests of data, which has no values here: every element is as usual."""


def _metadata_only(func: Any) -> bool:
    """Return whether `func` reads or sets metadata of a tensor, and no element."""
    if func in _READS:
        return False
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__") or name in _QUESTIONS


_QUESTIONS = frozenset(
    "size dim stride numel nelement ndimension is_contiguous storage_offset get_device register_hook __hash__ __len__ "
    "register_post_accumulate_grad_hook requires_grad_ is_same_size retain_grad is_floating_point is_complex".split()
)


class _OperatorResults(TorchDispatchMode):
    """Reports to the tracer the results and the cost of every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch's wrapper around each call takes a quarter of a trace."""
        return False

    def __init__(self, tracer: MetaTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._tracer.paused:
            return func(*args, **(kwargs or {}))
        results, operator = self._tracer.results, operator_of(func)
        if operator.only_views:  # two of five operators: no new memory and no cost
            results.last = func
            return func(*args, **(kwargs or {}))
        result, cost = results.of(func, args, kwargs or {})
        made = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        self._tracer.count(made, operator.name)
        self._tracer.worked(cost)
        return result


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value
