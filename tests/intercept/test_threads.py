"""A model computes on one thread at a time, whichever: another one waits for its turn, and nothing is lost."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    CHUNK,
    Recipe,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    both,
    budget,
    everywhere,
    loss_of,
    mlp,
    pair,
    streamed,
    train_both,
)
from tests.engine.struck import Struck, some_of
from tests.forked import end_in_a_fork


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


def test_a_backward_that_raises_gives_the_turn_to_other_threads(tmp_path: Path) -> None:
    modules = pair(mlp, "host", tmp_path)

    def raises(gradient: torch.Tensor) -> None:
        raise ValueError("in a hook of the program")

    for module in modules:
        handle = module.get_parameter("0.weight").register_hook(raises)
        loss = loss_of(module, BATCHES[0])
        with pytest.raises(ValueError, match="of the program"):
            loss.backward()
        handle.remove()
        module.zero_grad()
    assert_same(*both(modules, lambda module: beside(lambda: loss_of(module, BATCHES[1]), waits=False)()), "loss")


@pytest.mark.parametrize("raises", [False, True])
def test_a_backward_that_an_interrupt_ends_gives_the_turn_to_other_threads(
    raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_cases: bool
) -> None:
    """One that came while the backward ended was raised before its turn was given back: the next forward of another
    thread waited for good. Ctrl-C comes before each line of what begins and ends a backward, and one that raises."""
    monkeypatch.setenv("HETMEM_TURN_TIMEOUT", "0.5")
    plain, managed = pair(mlp, "host", tmp_path, sanitize=False)
    expected = evaluated(plain)
    hook = managed.get_parameter("0.weight").register_hook(lambda gradient: 1 / 0) if raises else None

    def struck(at: int) -> int:
        loss = loss_of(managed, BATCHES[0])
        within = Struck(lambda code: code.co_filename.endswith("intercept/backward.py"), "line", at)
        with contextlib.suppress(KeyboardInterrupt, ZeroDivisionError), within:
            loss.backward()
        return within.places

    places = struck(-1)
    for at in some_of(places, places if all_cases else 24):
        struck(at)
        assert_same(expected, on_a_thread(lambda: evaluated(managed)), f"line {at} of {places}")
    if hook is not None:
        hook.remove()
    managed.zero_grad()
    train_both(plain, managed, BATCHES)


def beside(act: Callable[[], Any], *, waits: bool = True) -> Callable[[], Any]:
    """Begin `act` on a thread of its own, which has had the time to do it when this returns, unless it `waits`; what is
    returned waits for it and returns as `on_a_thread` does."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(on_a_thread(act)), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() or not waits, "it should have waited"

    def result() -> Any:
        thread.join(20)
        assert not thread.is_alive(), "a thread hangs"
        return found[0]

    return result


def evaluated(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(BATCHES[1][0])


def written(module: nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten() for value in module.state_dict().values()])


def read(module: nn.Module) -> torch.Tensor:
    """Of a weight that no call has bound meanwhile."""
    return module.get_parameter("0.weight").detach().clone()


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ask", [evaluated, written, read])
def test_what_comes_within_a_forward_or_a_backward_of_another_thread_is_as_after_it(
    ask: Callable[[nn.Module], torch.Tensor], placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    _, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed)
    expected, asked = ask(managed), list[Callable[[], Any]]()
    waits = (ask, placement, mixed) != (read, "resident", None)  # operators see that very weight

    def meanwhile(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            asked.append(beside(lambda: ask(managed), waits=waits))

    handle = managed[2].register_forward_pre_hook(meanwhile)
    output = managed(BATCHES[0][0])
    handle.remove()
    output.register_hook(meanwhile)
    output.square().sum().backward()
    assert len(asked) == 2
    for found in asked:
        assert_same(expected, found(), ask.__name__)


@everywhere
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_evaluations_on_other_threads_disturb_no_training(overlap: str, placement: str, tmp_path: Path) -> None:
    """Each of them is of the weights before or after some step, and training has the bits that it has alone."""
    modules = pair(mlp, placement, tmp_path, sanitize=False)
    optimizers = adamws(*modules, overlap=overlap)
    found: list[torch.Tensor] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            found.append(evaluated(modules[1]))

    expected = [evaluated(modules[0])]
    threads = [beside(serve) for _ in range(2)]
    try:
        for batch in BATCHES:
            losses = [loss_of(module, batch) for module in modules]
            assert_same(*losses, "loss")
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            expected.append(evaluated(modules[0]))
    finally:
        over.set()
    assert [thread() for thread in threads] == [None, None]
    assert_same_weights(*modules)
    assert all(any(torch.equal(each, one) for one in expected) for each in found)


@pytest.mark.parametrize("hetmems", [True, False], ids=["AdamW", "torch"])
@everywhere
def test_a_lock_around_single_calls_is_as_good_as_one_thread(hetmems: bool, placement: str, tmp_path: Path) -> None:
    """Trainers that take turns between any two calls, and an evaluation after each."""
    modules = pair(mlp, placement, tmp_path)
    left, right = adamws(*modules)
    if not hetmems:
        right = torch.optim.AdamW(modules[1].parameters(), lr=1e-2, fused=True)
    for one, other in [BATCHES[:2], BATCHES[2:]]:
        for module, optimizer, run in ((modules[0], left, lambda act: act()), (modules[1], right, on_a_thread)):
            first, second = loss_of(module, one), run(lambda module=module, other=other: loss_of(module, other))
            run(lambda module=module: evaluated(module))
            first.backward()
            run(second.backward)
            run(lambda module=module: evaluated(module))
            optimizer.step()
            run(optimizer.zero_grad)
        assert_same(*[on_a_thread(lambda module=module: evaluated(module)) for module in modules], "output")
    assert_same_weights(*modules)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@streamed
def test_between_a_backward_that_updates_and_its_step_nothing_computes_with_these_weights(
    overlap: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same thread an error comes at once, on another one when it has waited, and training is as it was."""
    modules = pair(mlp, placement, tmp_path)
    optimizers = adamws(*modules, overlap=overlap)
    train_both(*modules, BATCHES, optimizers=optimizers)
    for batch in BATCHES[:2]:
        for module in modules:
            loss_of(module, batch).backward()
        with pytest.raises(RuntimeError, match=r"0.weight is used again.*before step\(\), after its update had begun"):
            evaluated(modules[1])
        waiting = beside(lambda: evaluated(modules[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(evaluated(modules[0]), waiting(), "output")
    monkeypatch.setenv("HETMEM_TURN_TIMEOUT", "0.2")
    loss_of(modules[1], BATCHES[0]).backward()
    refusal = on_a_thread(lambda: evaluated(modules[1]))
    assert isinstance(refusal, ManageError)
    assert "a backward on thread 'MainThread' has begun to update weights" in str(refusal)


@streamed
def test_a_thread_that_ends_before_the_step_of_its_backward_is_not_waited_for(placement: str, tmp_path: Path) -> None:
    """It was, for half an hour."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = adamws(plain, managed, overlap="backward")
    train_both(plain, managed, BATCHES, Recipe(steps=1), optimizers=optimizers)
    began, waits = threading.Event(), threading.Event()

    def backward() -> None:
        loss_of(managed, BATCHES[1]).backward()
        began.set()
        assert waits.wait(30)
        time.sleep(0.2)

    loss_of(plain, BATCHES[1]).backward()
    thread = threading.Thread(target=backward)
    thread.start()
    assert began.wait(30)
    waits.set()
    with pytest.raises(RuntimeError, match=r"is used again.*after its update had begun.*call step\(\) before"):
        managed(*BATCHES[0])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("raises", [False, True], ids=["over", "raised"])
@everywhere
def test_a_step_of_an_optimizer_of_torch_is_whole(raises: bool, placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True) for module in modules]
    asked: list[Callable[[], Any]] = []

    def meanwhile(*_: Any) -> None:
        asked.append(beside(lambda: evaluated(modules[1])))
        if raises:
            raise KeyError

    optimizers[1].register_step_post_hook(meanwhile)
    for module, optimizer in zip(modules, optimizers, strict=True):
        loss_of(module, BATCHES[0]).backward()
        with pytest.raises(KeyError) if raises and module is modules[1] else contextlib.nullcontext():
            optimizer.step()
    assert_same(evaluated(modules[0]), asked[0](), "output")


@everywhere
def test_two_models_train_on_two_threads(placement: str, tmp_path: Path) -> None:
    pairs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        pairs.append(pair(mlp, placement, tmp_path / name))
    trained = [beside(lambda modules=modules: train_both(*modules, BATCHES), waits=False) for modules in pairs]
    assert not any(isinstance(each(), Exception) for each in trained)


def test_threads_that_wait_for_each_other_get_an_error_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a join, which nobody sees, or by their turns."""
    room = budget("host", tmp_path, device_chunks=4 * CHUNK)  # with all copies a part may be called beside the whole
    (_, one), (_, other) = pair(mlp, room, tmp_path), pair(mlp, room, tmp_path)
    expected, refusals = evaluated(one), list[Any]()
    handle = one[2].register_forward_pre_hook(lambda *_: refusals.append(on_a_thread(lambda: evaluated(other))))
    nested = other[2].register_forward_pre_hook(lambda *_: refusals.append(on_a_thread(lambda: one(BATCHES[0][0]))))
    monkeypatch.setenv("HETMEM_TURN_TIMEOUT", "0.3")
    assert_same(expected, evaluated(one), "output")
    nested.remove()
    assert isinstance(refusals[0], ManageError)
    assert "it waits for a forward on thread 'MainThread': does that wait for this thread" in str(refusals[0])
    handle.remove()

    both_begun = threading.Barrier(2)

    def call_the_other(theirs: nn.Module) -> None:
        both_begun.wait(10)
        theirs(BATCHES[0][0])

    for mine, theirs in ((one, other), (other, one)):
        mine[2].register_forward_pre_hook(lambda *_, theirs=theirs: call_the_other(theirs[0]))
    found = [call() for call in [beside(lambda model=model: evaluated(model), waits=False) for model in (one, other)]]
    assert {type(each) for each in found} <= {ManageError, torch.Tensor} and ManageError in map(type, found)


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


@pytest.mark.each
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

    def act() -> None:
        torch.set_num_threads(1)
        if what == "its weights":
            for read in (managed.state_dict, lambda: managed[0].weight + 1, lambda: managed[0].weight.data):
                with pytest.raises(ManageError, match=r"made by fork\(\), has none of it"):
                    read()
        elif what == "a copy":
            assert_same(before(*BATCHES[0]), copied(*BATCHES[0]), "output")
        else:
            acts = {"a forward": lambda: managed(*BATCHES[0]), "a step": optimizer.step}
            with pytest.raises(ManageError, match=r"in a forked process|made by fork\(\), has none of it"):
                acts.get(what, optimizer.state_dict)()

    assert end_in_a_fork(act) == 0
    train_both(plain, managed, BATCHES, Recipe(steps=2))
