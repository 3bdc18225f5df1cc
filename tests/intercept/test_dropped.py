"""A managed model that nobody holds any more ends without anybody waiting for it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import (
    PLACEMENTS,
    STREAMED,
    Recipe,
    Tower,
    all_hetmem_threads_end,
    comes_to_be,
    everywhere,
    manage,
    own_threads,
    pair,
    token_batches,
    train_both,
)


def trained_and_dropped(placement: str, directory: Path) -> None:
    links = hetmem.SimDevice(host_to_device="10GB", device_to_host="10GB")  # with a thread each
    plain, managed = pair(Tower, placement, directory, device=links)
    train_both(plain, managed, token_batches(2), Recipe(steps=2))


@everywhere
def test_collecting_a_dropped_model_joins_no_thread(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last reference may go in the middle of anything: in a thread that starts and holds threading's own lock,
    joining one waits for ever. It did, about once in ten thousand tests."""
    gc.collect()
    joined: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda self, timeout=None: joined.append(self.name))
        trained_and_dropped(placement, tmp_path)
        gc.collect()
    assert joined == []
    assert all_hetmem_threads_end(), "they end by themselves"
    assert list(tmp_path.iterdir()) == []


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop here")


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2))
        self.stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(Stops.apply(hidden) if self.stops else hidden)


@everywhere
def test_a_model_dropped_while_updates_are_under_way_is_collected(placement: str, tmp_path: Path) -> None:
    """A backward that an error ends leaves updates and gradients of whose ends nobody takes note."""

    def failed() -> weakref.ref[nn.Parameter]:
        module = Halves()
        managed = manage(module, placement, tmp_path)
        optimizer = hetmem.AdamW(managed.parameters(), overlap="backward")
        for module.stops in (False, False, True):
            loss = managed(torch.ones(2, 64)).sum()
            with pytest.raises(RuntimeError, match="stop here") if module.stops else contextlib.nullcontext():
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return weakref.ref(module.first[0].weight)

    weight = failed()
    gc.collect()
    assert weight() is None
    assert all_hetmem_threads_end(), "they end by themselves"


@pytest.mark.each
@pytest.mark.parametrize("placement", STREAMED)
def test_a_model_dropped_after_a_backward_was_refused_is_collected(placement: str, tmp_path: Path) -> None:
    """Autograd keeps the nodes that it was going to run next, and all behind them, until the thread's next backward.
    Once models were collected here only because the next test began with one."""

    def refused() -> weakref.ref[nn.Parameter]:
        managed = manage(Halves(), placement, tmp_path)
        optimizer = hetmem.AdamW(managed.parameters(), overlap="backward")
        for _ in range(2):
            managed(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        first, second = (managed(torch.ones(2, 64)).sum() for _ in range(2))
        first.backward()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|arrived after its update had begun"):
            second.backward()
        return weakref.ref(managed.first[0].weight)

    weight = refused()
    gc.collect()
    assert weight() is None
    assert all_hetmem_threads_end(), "they end by themselves"


def test_a_model_dropped_after_a_checkpoint_around_it_is_collected(tmp_path: Path) -> None:
    """The hooks of a checkpoint hold what it computes again, and hetmem looks at them in the forward."""

    def checkpointed() -> weakref.ref[nn.Module]:
        managed = manage(Halves(), "host", tmp_path)
        checkpoint(managed, torch.ones(2, 64), use_reentrant=False).sum().backward()
        return weakref.ref(managed)

    module = checkpointed()
    gc.collect()
    assert module() is None


@pytest.fixture
def _nothing_is_collected() -> Iterator[None]:
    """What torch imports with the first optimizer holds that one's frames; after that only reference counts free."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "offload": lambda parameters: hetmem.optim.offload(torch.optim.SGD, parameters, lr=0.01),
    **{overlap: partial(hetmem.AdamW, overlap=overlap) for overlap in ("off", "backward", "forward")},
}


@pytest.mark.each
@pytest.mark.usefixtures("_nothing_is_collected")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_cell_of_a_notebook_that_runs_again_finds_all_that_it_took_given_back(
    placement: str, optimizer: str, tmp_path: Path
) -> None:
    """`del model, optimizer` frees by reference counts alone: nothing that a model owns holds its owner. The updates
    that trail behind the last step are under way, and end."""

    def cell() -> list[weakref.ref[Any]]:
        managed = manage(Halves(), placement, tmp_path, mixed_precision=torch.bfloat16)
        stepping = OPTIMIZERS[optimizer](managed.parameters())
        for _ in range(2):
            managed(torch.ones(2, 64)).sum().backward()
            stepping.step()
            stepping.zero_grad()
        runtime = testing.of(managed).runtime()
        return [weakref.ref(managed), weakref.ref(stepping), runtime]

    def objects() -> int:
        kinds = Counter(map(type, gc.get_objects()))
        return sum(count for kind, count in kinds.items() if str(kind.__module__).startswith("hetmem."))

    most = 0
    for _ in range(2):
        dropped = cell()
        assert comes_to_be(lambda: not any(each() is not None for each in dropped), 5)  # noqa: B023 - called here
        assert comes_to_be(lambda: not own_threads(), 5)
        assert list(tmp_path.iterdir()) == []
        most = most or objects()
        assert comes_to_be(lambda: objects() <= most, 5), "objects of hetmem"  # noqa: B023 - called here


class Marked(torch.autograd.Function):
    """Its node holds what `seen` gets a weak reference to, and raises if it is to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], raises: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.raises, ctx.held = raises, nn.Identity()
        seen.append(weakref.ref(ctx.held))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.raises:
            raise ValueError("a function of the user's")
        return grads[0], None, None


def test_a_backward_that_has_raised_keeps_nothing_of_its_graph(tmp_path: Path) -> None:
    """Autograd has nodes in its queue then that were ready to run, until its next backward."""
    model, seen = manage(nn.Linear(8, 8), "host", tmp_path), list[Any]()
    y = model(torch.ones(2, 8))
    loss = (Marked.apply(y, seen, False) + Marked.apply(y, seen, True)).sum()
    with pytest.raises(ValueError, match="of the user's"):
        loss.backward()
    del y, loss
    gc.collect()
    assert [held() for held in seen] == [None, None]
    hetmem.release(model)


@everywhere
def test_models_that_are_managed_trained_and_released_one_after_the_other_leave_no_object(
    placement: str, tmp_path: Path
) -> None:
    """Each left its threads, ended as they were, with what they had been given."""

    def objects(cycles: int) -> int:
        for _ in range(cycles):
            model = manage(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), placement, tmp_path)
            optimizer = hetmem.AdamW(model.parameters())
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            hetmem.release(model)
        del model, optimizer
        assert comes_to_be(lambda: not own_threads(), 5)
        gc.collect()
        return len(gc.get_objects())

    before = objects(4)
    assert objects(12) < before + 12
