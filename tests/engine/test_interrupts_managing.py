"""Ctrl-C at one line of `manage`, or `release`, after the other: afterwards the model is managed, or as it was."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import ManageError
from tests.engine.harness import (
    WIDTH,
    all_hetmem_threads_end,
    assert_same,
    assert_same_weights,
    manage,
)
from tests.engine.struck import Struck, some_of
from tests.memory.left import open_files

BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
_SAMPLED, _ALL = 8, 200
"""So many lines of a call are struck, one by one in calls of their own; the second with `--all-cases`."""
_HETMEM = str(Path(hetmem.__file__).parent)


def _of_hetmem(code: CodeType) -> bool:
    return code.co_filename.startswith(_HETMEM)


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model.register_buffer("counted", torch.arange(3.0))
    return model


def is_managed(model: nn.Module) -> bool:
    try:
        testing.of(model)
    except ManageError:
        return False
    return True


def hooks_of(model: nn.Module) -> int:
    """How many hooks the modules and parameters of `model` have, of any kind."""
    owners = [*model.modules(), *model.parameters()]
    kept = [value for owner in owners for name, value in vars(owner).items() if name.endswith("hooks") and value]
    ours = [owner for owner in owners if "_apply" in vars(owner)]
    of_autograd = [p for p in model.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return len(kept) + len(ours) + len(of_autograd)


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(BATCH).square().sum().backward()
        optimizer.step()


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    if is_managed(model):
        return hetmem.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def ends_as_it_should(model: nn.Module, plain: nn.Module, what: str) -> None:
    """`model` is managed, or an ordinary one without a trace of that, and trains as `plain` does."""
    if not is_managed(model):
        assert not hooks_of(model), what
    trains(plain, adamw_of(plain))
    trains(model, adamw_of(model))
    assert_same_weights(plain, model, what)
    assert_same(plain.get_buffer("counted"), model.get_buffer("counted"), what)
    if is_managed(model):
        hetmem.release(model)
        assert not hooks_of(model), what
        assert_same_weights(plain, model, what)


def strike(
    begin: Callable[[], nn.Module], call: Callable[[nn.Module], Any], plain: Callable[[], nn.Module], most: int
) -> int:
    """`call` of what `begin` makes, struck at one line after the other; how often that left it as it was not after a
    call that nothing strikes."""
    model = begin()
    with Struck(_of_hetmem, "line") as counted:
        call(model)
    after, others = is_managed(model), 0
    if after:
        hetmem.release(model)
    del model
    gc.collect()
    before: Counter[str] = open_files()
    for at in some_of(counted.places, most):
        model, what = begin(), f"line {at} of {counted.places}"
        try:
            with Struck(_of_hetmem, "line", at):
                call(model)
        except KeyboardInterrupt:
            pass
        others += is_managed(model) != after
        ends_as_it_should(model, plain(), what)
        del model
    assert all_hetmem_threads_end()
    assert open_files() - before == Counter()
    return others


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_what_an_interrupt_leaves_of_manage(placement: str, tmp_path: Path, all_cases: bool) -> None:
    """One that came while the hooks were registered left those before it, of a runtime that was closed: every forward
    raised `StoreError` from then on."""
    most = _ALL if all_cases else _SAMPLED
    undone = strike(build, lambda model: manage(model, placement, tmp_path, sanitize=False), build, most)
    assert undone, "none came before the end"


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_weights_that_an_interrupt_keeps_from_being_quantised_have_the_values_they_had(
    placement: str, tmp_path: Path, all_cases: bool
) -> None:
    """Those that were encoded by then had decoded values, and those on meta NaN."""
    places, undone = 0, 0
    for number in range(-1, _ALL if all_cases else 3 * _SAMPLED):
        torch.manual_seed(0)
        frozen = nn.ModuleList(nn.Linear(64, 96, bias=False) for _ in range(3)).requires_grad_(False)
        model = nn.Sequential(*frozen, nn.Linear(64, 96, bias=False, device="meta").requires_grad_(False), build())
        before = {name: (p.clone(), p.data_ptr()) for name, p in model.named_parameters()}
        at = -1 if number < 0 else 1 + number * places // (_ALL if all_cases else 3 * _SAMPLED)
        with contextlib.suppress(KeyboardInterrupt), Struck(_places_weights, "line", at) as within:
            manage(model, placement, tmp_path, sanitize=False, frozen="nf4")
        places = places or within.places
        if is_managed(model):
            hetmem.release(model)
            continue
        undone += 1
        for name, parameter in model.named_parameters():
            value, address = before[name]
            assert type(parameter) is nn.Parameter
            assert parameter.is_meta == value.is_meta
            assert parameter.is_meta or torch.equal(parameter, value), f"{name}, line {at} of {places}"
            assert not name.startswith("0") or parameter.data_ptr() == address
        assert not hooks_of(model)
    assert undone > _SAMPLED


def _places_weights(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{_HETMEM}/placing") or code.co_filename.endswith("hetmem/api.py")


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_what_an_interrupt_leaves_of_release(placement: str, overlap: Any, tmp_path: Path, all_cases: bool) -> None:
    """With updates of the last step still to come, those too."""

    def begin() -> nn.Module:
        model = manage(build(), placement, tmp_path, sanitize=False)
        trains(model, hetmem.AdamW(model.parameters(), lr=1e-2, overlap=overlap))
        return model

    def plain() -> nn.Module:
        model = build()
        trains(model, adamw_of(model))
        return model

    strike(begin, hetmem.release, plain, _ALL if all_cases else _SAMPLED)


@pytest.mark.parametrize("at", [1, 20, 40, 80])
def test_an_interrupt_of_release_loses_no_update_that_goes_on_after_its_step(at: int, tmp_path: Path) -> None:
    """It ended the wait for them, and those that had not begun by then were forgotten."""
    slowly = partial(time.sleep, 0.05)

    def begin(original: Callable[..., Any], pool: Any, tasks: Any, after: Any) -> Any:
        return original(pool, [slowly, *tasks], after)

    plain, model = build(), manage(build(), "host", tmp_path, sanitize=False)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, overlap="forward")
    trains(plain, adamw_of(plain))
    with testing.around("begin tasks", begin):
        trains(model, optimizer)
        with pytest.raises(KeyboardInterrupt), Struck(_of_hetmem, "line", at):
            hetmem.release(model)
        if is_managed(model):
            hetmem.release(model)
    assert_same_weights(plain, model)
