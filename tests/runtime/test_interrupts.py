"""Ctrl-C runs none of torch's hooks: what it leaves on a thread holds no model, and does nothing to anything else."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hetmem
from hetmem.runtime import registry
from tests.runtime.harness import (
    BATCHES,
    PLACEMENTS,
    WIDTH,
    Recipe,
    Tower,
    all_hetmem_threads_end,
    assert_same,
    assert_same_weights,
    everywhere,
    manage,
    mlp,
    pair,
    token_batches,
    train_both,
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
    raise KeyboardInterrupt


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
) -> list[weakref.ref[Any]]:
    """A model that was trained, interrupted and dropped at once: what it consisted of."""
    model = Drawn(checkpointing)
    manage(model, placement, directory, **options)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(2):
        model(*BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    interrupt(model, where, optimizer)
    found = registry.of_module(model)
    return [weakref.ref(each) for each in (model, model.tower.norm.weight, found, found.runtime)]


@pytest.mark.pairs
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
        assert [part() for part in parts] == [None] * 4
        assert list(tmp_path.iterdir()) == []
