"""Runs any elementwise torch optimizer tile by tile: `offload(torch.optim.SGD, …)`.

The arithmetic is torch's own: its `step` runs on flat tiles in place of parameters. So the bits are torch's too, as
long as the new value of an element depends on that element alone; this is tried on small tensors first.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer

from hetmem.base.config import Budget, OverlapName
from hetmem.cpu import Task
from hetmem.cpu.workers import one_torch_thread, tiles_of
from hetmem.errors import ManageError
from hetmem.memory.chunk import Role
from hetmem.optim.optimizer import OffloadedOptimizer
from hetmem.optim.options import LossScale, ParameterUpdate, Rule, refuse_others
from hetmem.optim.unmanaged import UnmanagedOptimizer

_TRIAL = (4, 32)
_STEPS = 3


_AS_IT_IS = (
    "Make it as in plain torch: it works on managed parameters too, slower, and with states beside the budget, so "
    "leave that much host memory free"
)


def offload(
    optimizer: type[Optimizer],
    params: Any,
    *,
    max_grad_norm: float | None = None,
    loss_scale: LossScale | float | Literal["dynamic"] | None = None,
    overlap: OverlapName = "off",
    budget: Budget | None = None,
    **options: Any,
) -> OffloadedOptimizer | UnmanagedOptimizer:
    """Return `optimizer(params, **options)` for the parameters of managed modules, its states on hetmem's tiers; with
    `budget`, for unmanaged parameters (see `UnmanagedOptimizer`).

    `optimizer` is a class like `torch.optim.SGD`, and `options` are its own. The bits are those of `optimizer(…,
    foreach=False)`. Checkpoints interchange with it. The other keywords: see `OffloadedOptimizer`.

    Raises `ManageError` if an element's update depends on other elements, or needs more than gradients (LBFGS, Muon,
    Adafactor), for `fused`, `foreach`, `capturable` and `differentiable`, and what `optimizer` itself raises for its
    options.
    """
    refuse_others("offload", {name: value for name, value in options.items() if name == "gradients"})
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise ManageError(f"expected a class like torch.optim.SGD, got {optimizer!r}")
    if issubclass(optimizer, (OffloadedOptimizer, UnmanagedOptimizer)):
        raise ManageError(f"{optimizer.__name__} is hetmem's own already: call it directly")
    for name in ("capturable", "differentiable", "fused", "foreach"):
        if options.get(name):
            raise ManageError(f"{optimizer.__name__}({name}=True) cannot run tile by tile: leave {name} out")
    rule = TorchRule(optimizer)
    defaults = rule.optimizer_of([torch.zeros(1, device="cpu")], options).defaults
    if budget is not None:
        name = f"hetmem.optim.offload({optimizer.__name__})"
        return UnmanagedOptimizer(
            params,
            defaults,
            rule,
            budget=budget,
            name=name,
            max_grad_norm=max_grad_norm,
            scale=loss_scale,
            overlap=overlap,
        )
    return OffloadedOptimizer(
        params,
        defaults,
        rule,
        overlap=overlap,
        max_grad_norm=max_grad_norm,
        scale=loss_scale,
    )


class TorchRule(Rule):
    """The arithmetic of `optimizer`, one of torch's classes."""

    def __init__(self, optimizer: type[Optimizer]) -> None:
        self._optimizer = optimizer
        self._keywords = frozenset(inspect.signature(optimizer.__init__).parameters) - {"self", "params"}
        self._known: dict[Any, tuple[tuple[Role, ...], tuple[str, ...]]] = {}

    def in_words(self) -> str:
        return self._name()

    def roles(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[Role, ...]:
        """Return the elementwise states of `optimizer` with the options of `group`, found by running it."""
        return self._tried(group, dtype)[0]

    def needs(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
        """Return the states and scalars without which a later step of `optimizer` raises, found by running it."""
        return self._tried(group, dtype)[1]

    def _tried(self, group: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Role, ...], tuple[str, ...]]:
        options = self._options(group)
        key = dtype, tuple(sorted((name, repr(value)) for name, value in options.items() if name != "lr"))
        if key not in self._known:
            names, needs = self._try(options, dtype)
            self._known[key] = tuple(map(Role, names)), needs
        return self._known[key]

    def tasks(self, updates: list[ParameterUpdate]) -> list[Task]:
        """Return one run of torch's `step` for each tile; the first one also counts the step."""
        tasks: list[Task] = []
        for update in updates:
            numbers = {name: value for name, value in update.state.items() if name not in update.states}
            tiles = (tiles_of(update.param.numel()) if update.own is None else update.own) or [slice(0)]
            tasks += [self._tile(update, numbers, tile, at == 0) for at, tile in enumerate(tiles)]
        return tasks

    def on_device(self, updates: list[ParameterUpdate]) -> None:
        """Update as on the host, in one tile."""
        for update in updates:
            numbers = {name: value for name, value in update.state.items() if name not in update.states}
            self._tile(update, numbers, slice(None), True)()

    def optimizer_of(self, tensors: list[torch.Tensor], options: dict[str, Any]) -> Optimizer:
        """Return torch's optimizer over `tensors`. Raises `ManageError` if it refuses their shape."""
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        try:
            return self._optimizer(parameters, **options)
        except ValueError as error:
            if "2D" in str(error) or "dim" in str(error):
                raise ManageError(
                    f"{self._name()} works on whole matrices, not element by element: {error}. {_AS_IT_IS}"
                ) from error
            raise

    def _tile(self, update: ParameterUpdate, numbers: dict[str, Any], tile: slice, first: bool) -> Callable[[], None]:
        param, states = update.param[tile], {name: state[tile] for name, state in update.states.items()}

        def run() -> None:
            mine = {name: _copied(value) for name, value in numbers.items()}
            mine |= {name: state for name, state in states.items() if name not in update.fresh}
            with torch.inference_mode(False), torch.no_grad(), one_torch_thread():
                after = self._step(update.group, param, _scaled(update, tile), mine)
                if update.copy is not None:
                    update.copy[tile].copy_(param)
                for name, state in states.items():
                    value = after.pop(name, None)
                    if value is not None and value.data_ptr() != state.data_ptr():
                        state.copy_(value)
                if first:
                    update.state.update(after)

        return run

    def _step(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Run one step of torch's optimizer on `param`, in place; return its state, whose tensors were updated."""
        optimizer = self.optimizer_of([param.detach()], self._options(group))
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = grad
        if state:
            optimizer.state[parameter] = state
        optimizer.step()
        after: dict[str, Any] = optimizer.state[parameter]
        return dict(after)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options in `group` that the class takes, with `foreach=False`, which has the same bits."""
        options = {name: value for name, value in group.items() if name in self._keywords}
        if "foreach" in self._keywords:
            options["foreach"] = False
        return options

    def _try(self, options: dict[str, Any], dtype: torch.dtype) -> tuple[list[str], tuple[str, ...]]:
        """Return the names of the elementwise states, and of all that a step needs. Raises `ManageError` if the
        optimizer is not elementwise."""
        generator = torch.Generator().manual_seed(0)
        start, *grads = (torch.randn(_TRIAL, generator=generator, device="cpu").to(dtype) for _ in range(1 + _STEPS))
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            whole, state = self._trial(options, start, grads)
            names = self._elementwise(start, state)
            half = _TRIAL[0] // 2
            halves = (slice(half), slice(half, None))
            parts = [self._trial(options, start[rows], [g[rows] for g in grads])[0] for rows in halves]
            flat = self._trial(options, start.flatten(), [g.flatten() for g in grads])[0]
            needs = tuple(name for name in state if not self._steps_without(name, options, start, state))
        if not (torch.equal(whole, torch.cat(parts)) and torch.equal(whole.flatten(), flat)):
            raise ManageError(
                f"{self._name()} is not elementwise: the update of an element depends on others of its tensor, which "
                f"lie in other tiles here. {_AS_IT_IS}"
            )
        return names, needs

    def _steps_without(self, name: str, options: dict[str, Any], start: torch.Tensor, state: dict[str, Any]) -> bool:
        """Return whether the optimizer steps from `state` without `name`, as SGD does without a momentum."""
        rest = {each: _copied(value) for each, value in state.items() if each != name}
        try:
            self._step(options, start.clone(), start.clone(), rest)
        except Exception:  # KeyError; others of classes that are not torch's
            return False
        return True

    def _trial(
        self, options: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter, state = start.clone(), dict[str, Any]()
        try:
            for grad in grads:
                state = self._step(options, parameter, grad.clone(), state)
        except (TypeError, RuntimeError) as error:  # it needs a closure, sparse gradients, …
            raise ManageError(f"{self._name()} cannot step from dense gradients alone: {error}. {_AS_IT_IS}") from error
        return parameter, state

    def _elementwise(self, start: torch.Tensor, state: dict[str, Any]) -> list[str]:
        """Return the names of those in `state` that have an element for each of `start`. Raises `ManageError` for
        tensors of another shape or dtype."""
        names = []
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if value.shape != start.shape or value.dtype != start.dtype:
                raise ManageError(
                    f"{self._name()} is not elementwise: its state {name!r} of a parameter of shape "
                    f"{tuple(start.shape)} and {start.dtype} has shape {tuple(value.shape)} and {value.dtype}. "
                    f"{_AS_IT_IS}"
                )
            names.append(name)
        return names

    def _name(self) -> str:
        return f"{self._optimizer.__module__.split('.')[0]}.{self._optimizer.__name__}"


def _scaled(update: ParameterUpdate, tile: slice) -> torch.Tensor:
    """Return the gradient in the parameter's dtype; scaled in float32, unless it is wider."""
    grad = update.grad[tile]
    if update.grad_scale != 1.0:
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32)).mul(update.grad_scale)
    return grad.to(update.param.dtype)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
