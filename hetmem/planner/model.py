"""Builds a model on `meta` and traces a call of it as a workload; where that fails, the error says what to do.

Models are given as functions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.checkpoint import checkpoint

from hetmem.accumulation.borders import parts_of, repeated_blocks, with_buffers
from hetmem.errors import ManageError
from hetmem.losses import chunked_loss
from hetmem.placing.building_memory import as_written
from hetmem.placing.frozen import Frozen, choose_codings
from hetmem.planner.in_turns import in_turns
from hetmem.planner.meta_results import RefuseRealMemory, Results, rows_of
from hetmem.planner.meta_trace import MetaTracer
from hetmem.planner.plan import PlanError
from hetmem.planner.quantised_models import taken_codings
from hetmem.planner.workload import Workload
from hetmem.schedule.formats import Coding
from hetmem.torch_private import tree_leaves, tree_map

Builder = Callable[[], nn.Module]
MOST_PARAMETERS = 10**13
"""The most elements of all parameters of a model that is planned."""
MOST_MODULES = 500_000
"""The most modules of a model that is planned, each counted where it is a part of another one."""


@dataclass(frozen=True)
class TracedCall:
    """A model to build, and the arguments it is called with."""

    build_model: Builder
    batch: Any
    loss: Callable[[Any], torch.Tensor] | Literal["chunked"] | None = None
    """From the output to a scalar; "chunked": `hetmem.chunked_loss`; None: the loss that the output has or is."""
    mixed_precision: torch.dtype | None = None
    setup: tuple[str, ...] = ()
    """Lines of code that precede `manage` in the program, for the plan to show."""
    frozen: Frozen | None = None
    """The formats of frozen weights, as for `manage`."""
    recomputed: int | None = 0
    """How many of the repeated layers, the first ones, are checkpointed; None: all."""
    micro_batches: int | None = None
    """How many of `batch` pass the model in turns, as `hetmem.accumulate` has them do; None: one passes it alone, and
    no borders are looked for."""

    def __post_init__(self) -> None:
        if isinstance(self.batch, Mapping):  # as tokenizers return it: torch's pytrees know only a dict
            object.__setattr__(self, "batch", dict(self.batch))


def trace(
    call: TracedCall,
    results: Results | None = None,
    *,
    inference: bool = False,
    real: bool = False,
    prepare: Callable[[nn.Module, dict[str, Any]], list[torch.Tensor]] | None = None,
) -> Workload:
    """Trace one forward and backward, or (`inference`) a forward. `results`: the cache of other traces. Raises
    `PlanError`.

    `real`: run on this machine's CPU, for control flow that depends on values. That takes the memory of a forward and
    backward, with parameters in the dtype that operators see; tensors of the batch on `meta` become zeros. `prepare`
    may change the keywords of an inference's call, and returns tensors that are on the device before it.
    """
    device, results = "cpu" if real else "meta", results or Results()
    model, loss = build(call.build_model, device), call.loss
    if call.recomputed != 0:
        checkpoint_layers(model, call.recomputed)
    args, kwargs = tree_map(lambda leaf: _on(leaf, device), arguments(call.batch))
    loss_of = default_loss if loss is None or loss == "chunked" else lambda output: _scalar(loss(output))
    try:
        if inference:
            model.eval().requires_grad_(False)
            kwargs.pop("labels", None)
            tracer = MetaTracer(model, call.mixed_precision, results, codings_of(model, call))
            tracer.count(prepare(model, kwargs) if prepare is not None else (), "cache")
            return tracer.run(args, kwargs, None)
        chunked = call_in_chunks(model, args) if loss == "chunked" else None
        count = call.micro_batches
        borders = _borders(model, count) if count else ()
        tracer = MetaTracer(model.train(), call.mixed_precision, results, codings_of(model, call))
        return in_turns(tracer.run(args, kwargs, loss_of, chunked, borders), count or 1)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{type(error).__name__}: {error}. {_hint(error, results.last, model, args, kwargs)}"
        ) from error


def _borders(model: nn.Module, count: int) -> Sequence[nn.Module]:
    """Return the modules at whose calls `count` micro-batches take turns. Raises `PlanError` if several have none."""
    blocks = repeated_blocks(model)
    if count > 1 and not blocks:
        raise PlanError(
            f"accumulate=True: {type(model).__name__} has no ModuleList or Sequential with several blocks of one "
            f"class, so hetmem.accumulate computes one micro-batch after the other: leave accumulate (--accumulate) out"
        )
    return with_buffers(parts_of(model), blocks) if blocks else ()


def codings_of(model: nn.Module, call: TracedCall) -> dict[str, Coding]:
    """Return the codings of the frozen weights of `model`. Raises `PlanError` where `manage` would refuse them."""
    named = dict(model.named_parameters())
    taken = taken_codings(named)
    try:
        others = {name: each for name, each in named.items() if name not in taken}
        return taken | choose_codings(model, others, call.frozen)
    except ManageError as error:
        raise PlanError(str(error)) from error


def call_in_chunks(model: nn.Module, args: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """Return the chunked loss of `model`. Raises `PlanError` for a model or arguments that it does not take."""
    if args:
        raise PlanError('loss="chunked" takes a batch that is a dict of keywords, with labels')
    try:
        return chunked_loss(model)
    except ManageError as error:
        raise PlanError(str(error)) from error


def traced(call: TracedCall, results: Results | None = None) -> Workload | None:
    """Trace as `trace` does; None if the model refuses the call, or has no layers to checkpoint."""
    with suppress(PlanError):
        return trace(call, results)
    return None


def checkpointed(call: TracedCall, first: int | None = None) -> TracedCall:
    """Return `call` with every repeated layer checkpointed, or the `first` ones."""
    return replace(call, recomputed=first)


def checkpoint_layers(model: nn.Module, first: int | None = None) -> None:
    """Have the `first` repeated layers of `model` (None: all) checkpoint. Raises `PlanError` if it has none."""
    layers = [layer for _, layer in _repeated(model)][:first]
    if not layers:
        raise PlanError("there are no layers to checkpoint: expected a ModuleList of layers of one class")
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint,
            _Recomputed(layer.forward),
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )


def repeated_layers(call: TracedCall) -> tuple[str, int]:
    """Return the repeated layers of `model` as a Python expression, and their number."""
    found = _repeated(build(call.build_model))
    return " + ".join(_expression(path) for path in dict.fromkeys(path for path, _ in found)), len(found)


def _repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of every outermost ModuleList with its path; none if all are of different classes."""
    found: list[tuple[str, nn.Module]] = []
    within: tuple[str, ...] = ()
    for path, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) > 1 and not path.startswith(within or ("\n",)):
            found += [(path, layer) for layer in part]
            within += (f"{path}.",)
    return [] if len({type(layer) for _, layer in found}) == len(found) else found


def _expression(path: str) -> str:
    dotted = all(part.isidentifier() for part in path.split("."))
    return f"list(model.{path})" if dotted else f'list(model.get_submodule("{path}"))'


class _Recomputed(nn.Module):
    """A layer's forward as a module, so that a trace also sees the call that recomputes it in backward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward."""
        return self._forward(*args, **kwargs)


def divided(call: TracedCall, parts: int) -> TracedCall:
    """Return `call` with one `parts`-th of the rows of its batch."""
    rows = rows_of(call.batch, 0)

    def part(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return leaf[: rows // parts] if whole else leaf

    return replace(call, batch=tree_map(part, call.batch))


def build(build_model: Builder, device: str = "meta") -> nn.Module:
    """Build the model on `device`, by default without memory. Raises `PlanError` if that is not possible."""
    if isinstance(build_model, nn.Module) or not callable(build_model):
        raise PlanError(
            f"expected a function that builds the model, got {type(build_model).__name__}: pass `lambda: Model(…)`, so "
            f"that it can be built without memory"
        )
    try:
        with torch.device(device), RefuseRealMemory() if device == "meta" else nullcontext(), _of_possible_size():
            model = as_written(build_model)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"the model cannot be built on the {device} device: {type(error).__name__}: {error}. There, tensors have "
            f"shapes and no values: build it without reading files or looking at values (initialise under `if not "
            f"tensor.is_meta`, load weights afterwards)"
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"the builder must return a torch.nn.Module, got {type(model).__name__}")
    if not any(True for _ in model.parameters()):
        raise PlanError(f"{type(model).__name__} has no parameters, so there is nothing to plan")
    return model.to(device)


@contextmanager
def _of_possible_size() -> Iterator[None]:
    """Raise `PlanError` in a block that builds a model, as soon as it has more parameters or modules than any has."""
    thread, elements, modules = threading.get_ident(), 0, 0

    def parameter(module: nn.Module, name: str, value: nn.Parameter) -> None:
        nonlocal elements
        if threading.get_ident() == thread and not nn.parameter.is_lazy(value):
            elements += value.numel()
            if elements > MOST_PARAMETERS:
                raise PlanError(
                    f"the model has more than {MOST_PARAMETERS:.0e} parameters, the most that is planned, with {name} "
                    f"of {type(module).__name__}, of shape {list(value.shape)}"
                )

    def submodule(module: nn.Module, name: str, value: nn.Module | None) -> None:
        nonlocal modules
        modules += threading.get_ident() == thread
        if modules > MOST_MODULES:
            raise PlanError(f"the model has more than {MOST_MODULES:,} modules, the most that is planned")

    hooks = [
        register_module_parameter_registration_hook(parameter),
        register_module_module_registration_hook(submodule),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on(value: Any, device: str) -> Any:
    """Return a tensor as a new one on `device`, zeros if it was on `meta`; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    moved = torch.zeros_like(value, device=device) if value.is_meta and device != "meta" else value.detach().to(device)
    return moved.detach().requires_grad_(value.requires_grad)


def _hint(error: Exception, operator: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if "meta" in str(error).lower():
        return (
            f"{type(model).__name__} looks at values while it runs ({operator}, called in {_place(error)}), and "
            f"planning has none: trace one real step with real=True (--real), which takes the memory of a forward and "
            f"backward on this machine; or plan a variant whose control flow depends on shapes only (for experts: a "
            f"fixed capacity, or a batched implementation)"
        )
    shapes = [list(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return (
        f"{type(model).__name__} refused a batch of {len(args)} arguments, keywords {sorted(kwargs)} and shapes "
        f"{shapes}: pass what the model is called with, a tuple, a dict of keywords or one tensor"
    )


def _place(error: Exception) -> str:
    """Return the last line of user code in the traceback of `error`."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "torch"


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `batch` as positional and keyword arguments."""
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def default_loss(output: Any) -> torch.Tensor:
    """Return `.loss` of the output, or the output if it is a scalar. Raises `PlanError` for anything else."""
    return _scalar(output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output))


def _scalar(loss: Any) -> torch.Tensor:
    """Return `loss` if it is a scalar that requires a gradient. Raises `PlanError` otherwise."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        raise PlanError(
            "the loss does not depend on any parameter that requires a gradient, so there is nothing to train: are all "
            "of them frozen (requires_grad_(False)), or is the loss detached?"
        )
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise PlanError(
        f"expected a scalar loss, or an output with one in `.loss`, got {what}: pass loss=, a function from the output "
        f"to the scalar that is differentiated (--loss MODULE:FUNCTION)"
    )


def in_bfloat16(call: TracedCall) -> TracedCall:
    """Return `call` with weights in bfloat16 at home, and inputs in bfloat16."""

    def build() -> nn.Module:
        return call.build_model().to(torch.bfloat16)

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if floats else value

    batch = tree_map(cast, call.batch)
    setup = ("model = model.bfloat16()",)
    return replace(call, build_model=build, batch=batch, mixed_precision=None, setup=setup)


def with_adapters(call: TracedCall, rank: int) -> TracedCall:
    """Return `call` with frozen weights in bfloat16 and LoRA adapters of `rank` beside every linear layer but the last
    one, as `peft` adds them. Raises `PlanError` for a rank below 1."""
    if rank < 1:
        raise PlanError(f"the rank of adapters is at least 1, got {rank}")

    def build() -> nn.Module:
        model = call.build_model().to(torch.bfloat16).requires_grad_(False)
        linears = [(name, part) for name, part in model.named_modules() if name and type(part) is nn.Linear]
        for name, part in linears[:-1] or linears:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, _Adapted(part, rank))
        return model

    setup = (
        "model = peft.get_peft_model(  # of a model in bfloat16",
        f'    model, peft.LoraConfig(r={rank}, target_modules="all-linear")',
        ")",
    )
    return replace(call, build_model=build, mixed_precision=torch.bfloat16, setup=setup)


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter in float32 beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, device = base, base.weight.device
        self.down = _Unfilled(base.in_features, rank, bias=False, device=device)
        self.up = _Unfilled(rank, base.out_features, bias=False, device=device)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Add the adapter's output to the frozen layer's."""
        adapted: torch.Tensor = self.base(value) + self.up(self.down(value))
        return adapted


class _Unfilled(nn.Linear):
    """A linear layer that skips initialization on `meta`, which is half the time of building a model."""

    def reset_parameters(self) -> None:
        """Initialize the weights, unless they are on `meta`."""
        if not self.weight.is_meta:
            super().reset_parameters()
