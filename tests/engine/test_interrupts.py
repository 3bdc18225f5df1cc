"""Ctrl-C runs none of torch's hooks: what it leaves on a thread holds no model, and does nothing to anything else."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hetmem
from hetmem import testing
from tests.engine.harness import (
    BATCHES,
    PLACEMENTS,
    WIDTH,
    Recipe,
    Tower,
    all_hetmem_threads_end,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    budget,
    everywhere,
    manage,
    mlp,
    pair,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)

BATCH = token_batches(1)[0]


class Drawn(nn.Module):
    """A `Tower` whose loss a generator makes."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.tower = Tower(checkpointing=checkpointing)
        self.before_loss: Callable[[], None] = lambda: None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return next(self._losses(tokens, targets))

    def _losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> Iterator[torch.Tensor]:
        self.before_loss()
        yield self.tower(tokens, targets)


def ctrl_c(*_: object) -> None:
    """On the main thread a signal comes, as from a terminal; others get none, so that theirs is an error of a hook."""
    if threading.current_thread() is not threading.main_thread():
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def ctrl_c_in_backward(*_: object) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise KeyboardInterrupt


@contextlib.contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def in_generator(model: Drawn) -> Iterator[None]:
    before, model.before_loss = model.before_loss, ctrl_c
    try:
        yield
    finally:
        model.before_loss = before


PLACES: dict[str, Callable[[Drawn, torch.optim.Optimizer], contextlib.AbstractContextManager[None]]] = {
    "before all": lambda model, _: hooked(model.register_forward_pre_hook(ctrl_c)),
    "before a layer": lambda model, _: hooked(model.tower.blocks[1].up.register_forward_pre_hook(ctrl_c)),
    "after a layer": lambda model, _: hooked(model.tower.blocks[1].up.register_forward_hook(ctrl_c)),
    "after all": lambda model, _: hooked(model.register_forward_hook(ctrl_c, prepend=True)),
    "generator": lambda model, _: in_generator(model),
    "backward": lambda model, _: hooked(model.tower.blocks[1].up.weight.register_hook(ctrl_c)),
    "recomputation": lambda model, _: hooked(model.tower.blocks[1].up.register_forward_hook(ctrl_c_in_backward)),
    "step": lambda _, optimizer: hooked(optimizer.register_step_pre_hook(ctrl_c)),
}


def interrupt(model: nn.Module, where: str = "after a layer", optimizer: torch.optim.Optimizer | None = None) -> None:
    """A step that an interrupt ends; nobody keeps what was raised."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    interrupted = False
    with PLACES[where](model, optimizer):  # type: ignore[arg-type]
        try:
            model(*BATCH).backward()
            optimizer.step()
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted


def on_torchs_stacks() -> list[Any]:
    """What changes how functions and operators of this thread run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack(), *(() if hooks is None else hooks)]


def trained_and_interrupted(
    where: str, placement: str, directory: Path, checkpointing: bool | None, **options: Any
) -> list[Callable[[], object]]:
    """A model that was trained, interrupted and dropped at once: what tells whether its parts are there."""
    model = Drawn(checkpointing)
    manage(model, placement, directory, **options)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(2):
        model(*BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    interrupt(model, where, optimizer)
    return [weakref.ref(model).__call__, weakref.ref(model.tower.norm.weight).__call__, testing.of(model).runtime()]


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_model_dropped_right_after_an_interrupt_is_collected(
    where: str, placement: str, mixed: torch.dtype | None, thread: str, tmp_path: Path
) -> None:
    checkpointing = False if where == "recomputation" else None
    act = partial(trained_and_interrupted, where, placement, tmp_path, checkpointing, mixed_precision=mixed)
    with ThreadPoolExecutor(1) as lives_on:
        on_thread = (lambda call: call()) if thread == "main" else (lambda call: lives_on.submit(call).result())
        parts = on_thread(act)
        if where == "backward":  # torch keeps the rest of a graph until the thread's next backward
            on_thread(torch.ones((), requires_grad=True).backward)
        assert all_hetmem_threads_end(), "they end by themselves"
        gc.collect()
        assert not any(part() for part in parts)
        assert list(tmp_path.iterdir()) == []


FORWARD = ("before all", "before a layer", "after a layer", "after all", "generator")


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("where", FORWARD)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("read_on", ["this thread", "another"])
def test_weights_read_right_after_an_interrupt_are_those_at_home(
    where: str, placement: str, mixed: torch.dtype | None, read_on: str, tmp_path: Path
) -> None:
    """Parameters are stand-ins between the operators of a forward, and copies of 16 bits within."""
    plain, managed = pair(Drawn, placement, tmp_path, mixed_precision=mixed)
    managed(*BATCH).backward()
    with ThreadPoolExecutor(1) as another:
        if read_on == "another":
            another.submit(interrupt, managed, where).result()
        else:
            interrupt(managed, where)
            weight = managed.tower.norm.weight
            assert (weight.dtype, weight.device) == (torch.float32, torch.device("cpu"))
            assert_same(plain.tower.norm.weight * 3, weight * 3, "used")
        assert_same_weights(plain, managed)


@pytest.mark.each
@pytest.mark.parametrize(("placement", "chunks"), [("resident", None), ("host", "16KiB"), ("host", "128KiB")])
@pytest.mark.parametrize("where", FORWARD)
def test_weights_are_at_home_as_soon_as_an_interrupt_is_raised(
    where: str, placement: str, chunks: str | None, tmp_path: Path
) -> None:
    """Also for what asks nothing of a weight that is bound: by working weights, by module, or for a forward."""
    limits = budget(placement, tmp_path, device_chunks=chunks)
    model = manage(Drawn(), limits, tmp_path, mixed_precision=torch.bfloat16, sanitize=False)
    for _ in range(3):
        model(*BATCH).backward()
        model.zero_grad()
    before = [weight.detach().clone() for weight in model.parameters()]
    with PLACES[where](model, torch.optim.SGD(model.parameters(), lr=0.1)), pytest.raises(KeyboardInterrupt) as raised:
        model(*BATCH)
    up = model.tower.blocks[1].up
    weight = next(up.parameters()) if "all" in where else up.weight  # a hook of the whole may leave another one there
    assert weight.dtype is torch.float32, "whose module ran"
    with torch.no_grad():
        for weight, was in zip(model.parameters(), before, strict=True):
            assert weight.dtype is torch.float32
            assert_same(was * 0.7, weight.mul_(0.7), "written")
    assert raised.tb is not None, "its frames are there"


@everywhere
@pytest.mark.parametrize("where", FORWARD)
def test_what_others_compute_after_an_interrupt_is_none_of_the_models_business(
    where: str, placement: str, tmp_path: Path
) -> None:
    managed = manage(Drawn(), placement, tmp_path)
    plain = [mlp(), mlp()]
    plain[1].load_state_dict(plain[0].state_dict())
    losses = [plain[0](BATCHES[0][0]).square().mean()]
    interrupt(managed, where)
    inside = testing.of(managed)
    counted, since = inside.live_bytes(), time.perf_counter()
    with torch._C.DisableTorchFunction(), torch.no_grad():  # as C++ calls operators
        kept = plain[0][0].weight.sin()
    assert inside.live_bytes() <= counted, f"{kept.shape} counts as an activation of the model"
    losses.append(plain[1](BATCHES[0][0]).square().mean())
    for loss in losses:
        loss.backward()
    assert_same(*losses, "loss")
    assert_same_grads(*plain)
    assert all(start < since for _, start, _ in inside.spans("segments")) and not inside.in_backward()


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("where", FORWARD)
@pytest.mark.parametrize("by", ["module", "custom function"])
def test_a_graph_that_others_make_after_an_interrupt_holds_no_model(
    where: str, by: str, placement: str, tmp_path: Path
) -> None:
    managed, plain, x = manage(Drawn(), placement, tmp_path, sanitize=False), mlp(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        managed(*BATCH).backward()  # from the second time on no operator is looked at
    interrupt(managed, where)
    loss = plain(BATCHES[0][0]).sum() if by == "module" else Tripled.apply(x)
    alive = testing.of(managed).runtime()
    del managed
    gc.collect()
    assert not alive()
    loss.sum().backward()
    assert by == "module" or torch.equal(x.grad, 3 * torch.ones(3))


class Tripled(torch.autograd.Function):
    """Saves a tensor without calling any of torch's functions before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch._C.DisableTorchFunction():
            return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x * 3


class Stubborn(nn.Module):
    """Goes on after an interrupt, or another error, of a call of itself."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tries = 0

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        x = self.layers[depth](x)
        if depth < 2:
            for _ in range(2):
                with contextlib.suppress(self.error):
                    return F.linear(self(x, depth + 1), self.layers[depth].weight)
        self.tries += 1
        if self.tries % 4:
            raise self.error
        return x


@pytest.mark.each
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@everywhere
def test_a_forward_that_goes_on_after_an_interrupt_of_a_part_gives_the_bits_of_torch(
    placement: str, mixed: torch.dtype | None, error: type[BaseException], tmp_path: Path
) -> None:
    modules = pair(partial(Stubborn, error), placement, tmp_path, mixed_precision=mixed)
    train_both(*modules, vector_batches(2, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))
    assert on_torchs_stacks() == []


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("where", FORWARD)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_forward_right_after_an_interrupt_is_no_part_of_the_one_that_ended(
    where: str, placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """No function of torch's has run that could find out that it had ended."""
    plain, managed = pair(Drawn, placement, tmp_path, mixed_precision=mixed)
    interrupt(managed, where)
    loss = managed(*BATCH)
    assert on_torchs_stacks() == []
    assert testing.of(managed).at_rest()
    if mixed is None:
        assert_same(plain(*BATCH), loss, "loss")


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("where", FORWARD)
@pytest.mark.parametrize("other", PLACEMENTS)
def test_another_managed_model_takes_what_an_interrupt_left_off_the_thread(
    where: str, placement: str, other: str, tmp_path: Path
) -> None:
    interrupted = manage(Drawn(), placement, tmp_path)
    interrupt(interrupted, where)
    train_both(*pair(mlp, other, tmp_path), BATCHES)
    assert on_torchs_stacks() == []


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sanitize", [True, False], ids=["watched", "unwatched"])
def test_training_goes_on_after_an_interrupt_with_the_same_bits(
    where: str, placement: str, mixed: torch.dtype | None, sanitize: bool, tmp_path: Path
) -> None:
    checkpointing = False if where == "recomputation" else None
    modules = pair(partial(Drawn, checkpointing), placement, tmp_path, mixed_precision=mixed, sanitize=sanitize)
    recipe = Recipe(steps=2, mixed=mixed)
    optimizers = train_both(*modules, token_batches(2), recipe)
    interrupt(modules[1], where, optimizers[1])
    assert testing.of(modules[1]).at_rest()
    modules[1].zero_grad()
    train_both(*modules, token_batches(2), recipe, optimizers=optimizers)


class Strikes(nn.Module):
    """Ctrl-C comes between two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.strikes, self.ran = 0, list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.strikes):
            signal.raise_signal(signal.SIGINT)
            self.ran.append("goes on")
        x = self.second(x)
        self.ran.append("second")
        return x


@streamed
def test_an_interrupt_of_a_forward_comes_at_its_next_module_and_a_second_one_at_once(
    placement: str, tmp_path: Path
) -> None:
    modules = pair(Strikes, placement, tmp_path)
    optimizers = train_both(*modules, BATCHES)
    managed = modules[1]
    for strikes in (1, 2):
        managed.strikes, managed.ran = strikes, []
        with pytest.raises(KeyboardInterrupt):
            managed(BATCHES[0][0])
        assert managed.ran == ["goes on"]
        assert testing.of(managed).at_rest()
    managed.strikes = 0
    train_both(*modules, BATCHES, optimizers=optimizers)


class Passes(TorchFunctionMode):
    """A function mode of the user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("by", ["release", "save"])
@pytest.mark.parametrize("found_out", [True, False])
def test_releasing_or_saving_an_interrupted_model_clears_torchs_stacks(
    by: str, found_out: bool, placement: str, tmp_path: Path
) -> None:
    """`found_out`: a function of torch's has found that there is nothing to do."""
    managed = manage(Drawn(), placement, tmp_path, sanitize=False)
    interrupt(managed)
    with Passes() as users:
        if found_out:
            torch.ones(3).sin()
        if by == "save":
            hetmem.save(tmp_path / "saved", managed)
        else:
            hetmem.release(managed)
        assert on_torchs_stacks() == [users]
    assert on_torchs_stacks() == []
