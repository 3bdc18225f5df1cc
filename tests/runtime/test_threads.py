"""A model computes on one thread at a time, whichever: two at once are refused, and nothing is lost."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem.engine.live_bytes import DeviceMonitor
from hetmem.errors import ManageError
from tests.runtime.harness import (
    BATCHES,
    Recipe,
    assert_same,
    assert_same_grads,
    both,
    everywhere,
    loss_of,
    mlp,
    pair,
    train_both,
)


def on_a_thread(act: Callable[[], Any]) -> Any:
    """What `act` returns, or raises, on a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@everywhere
def test_training_may_go_from_thread_to_thread(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = train_both(*modules, BATCHES)
    for _ in range(2):
        assert not isinstance(on_a_thread(lambda: train_both(*modules, BATCHES, optimizers=optimizers)), Exception)
    train_both(*modules, BATCHES, optimizers=optimizers)


@everywhere
def test_a_backward_may_be_on_another_thread_than_its_forward(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    losses = both(modules, lambda module: on_a_thread(lambda: loss_of(module, BATCHES[0])))
    assert_same(*losses, "loss")
    for loss in losses:
        loss.backward()
    assert_same_grads(*modules)
    train_both(*modules, BATCHES)


@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_second_forward_at_the_same_time_is_refused_and_disturbs_nothing(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    _, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    expected = managed(BATCHES[0][0])
    refusals: list[Any] = []

    def meanwhile(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            refusals.append(on_a_thread(lambda: managed(BATCHES[1][0])))
            refusals.append(on_a_thread(lambda: managed[2](BATCHES[1][0])))

    handle = managed[2].register_forward_pre_hook(meanwhile)
    assert_same(expected, managed(BATCHES[0][0]), "output")
    handle.remove()
    assert [type(refusal) for refusal in refusals] == [ManageError, ManageError]
    assert not isinstance(on_a_thread(lambda: managed(BATCHES[1][0])), Exception)


@everywhere
def test_a_forward_that_was_interrupted_on_another_thread_stands_in_nobody_s_way(
    placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = managed[2].register_forward_pre_hook(interrupt)
    assert isinstance(on_a_thread(lambda: managed(BATCHES[0][0])), KeyboardInterrupt)
    handle.remove()
    train_both(plain, managed, BATCHES)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("what", ["a forward", "a step", "reading optimizer states", "its weights", "a copy"])
@everywhere
def test_in_a_forked_child_the_model_is_refused_and_a_copy_made_before_works(
    placement: str, what: str, tmp_path: Path
) -> None:
    """Threads do not come along, and neither does host memory: each child would cost a copy of it."""
    plain, managed = pair(mlp, placement, tmp_path)
    before, copied = copy.deepcopy(plain), copy.deepcopy(managed)
    optimizer = hetmem.AdamW(managed.parameters())
    train_both(plain, managed, BATCHES, Recipe(steps=2))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(20)
            torch.set_num_threads(1)
            if what == "its weights":
                for read in (managed.state_dict, lambda: managed[0].weight + 1, lambda: managed[0].weight.data):
                    with pytest.raises(ManageError, match=r"made by fork\(\), has none of it"):
                        read()
            elif what == "a copy":
                assert_same(before(*BATCHES[0]), copied(*BATCHES[0]), "output")
            else:
                acts = {"a forward": lambda: managed(*BATCHES[0]), "a step": optimizer.step}
                with pytest.raises(ManageError, match=f"{what} in a forked process"):
                    acts.get(what, optimizer.state_dict)()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    train_both(plain, managed, BATCHES, Recipe(steps=2))


def test_what_dies_while_something_is_counted_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread of a copy, or by the garbage collector: a sum that has begun must not put its bytes back."""
    monitor = DeviceMonitor(lambda _: False, lambda _: False, lambda *_: None, strict=False)
    with monitor:
        dying = [torch.ones(100) for _ in range(3)]
    size = torch.UntypedStorage.nbytes

    def dies_meanwhile(storage: torch.UntypedStorage) -> int:
        dying.pop()
        return size(storage)

    monkeypatch.setattr(torch.UntypedStorage, "nbytes", dies_meanwhile)
    with monitor:
        kept = torch.ones(50)
    dying.clear()
    assert monitor.live_bytes == 4 * kept.numel()
    del kept
    assert monitor.live_bytes == 0
