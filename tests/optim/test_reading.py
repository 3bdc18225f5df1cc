"""Parameters that are read, or written, while their updates trail behind the step: as if all had been done in it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from hetmem.errors import StoreError
from tests.engine.harness import STREAMED, WIDTH, adamws, assert_same, loss_of, mlp, pair, streamed, vector_batches
from tests.faults.disk import EIO, FaultyDisk, once
from tests.optim.stories import Twins, one, twins
from tests.pairs import mostly

BATCHES = vector_batches(4, 4, WIDTH)

READS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "an operator": lambda p: p * 1,
    "an operator called by its name": lambda p: torch.ops.aten.mul.Tensor(p, 1),
    "data": lambda p: p.data.clone(),
    "detached": lambda p: p.detach().clone(),
    "numpy": lambda p: torch.from_numpy(np.array(p.detach().numpy())),
    "a list": lambda p: torch._foreach_mul([p], 1)[0],
    "what takes it second": lambda p: torch.zeros(p.shape).copy_(p),
    "within a structure": lambda p: torch.cat([p]),
    "a part": lambda p: p[:1].clone(),
    "elements": lambda p: torch.tensor(p.tolist()),
    "text": lambda p: torch.tensor([ord(letter) for letter in str(p)]),
    "memory": lambda p: torch.tensor(p.untyped_storage().tolist()[:4]),
    "a vector": lambda p: parameters_to_vector([p]),
    "vmap": lambda p: torch.vmap(lambda row: row * 1)(p),
    "a gradient": lambda p: torch.autograd.grad((p * p).sum(), p)[0],
    "copy": lambda p: copy.copy(p).detach(),
    "another class": lambda p: p.as_subclass(torch.Tensor).detach().clone(),
    "deepcopy": lambda p: copy.deepcopy(p).detach(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
}


def trail(both: Twins, batch: Any) -> None:
    """A step of which nothing is updated when it returns."""
    losses = [loss_of(module, batch) for module, _ in both.sides]
    with testing.updates_held():
        for loss, (_, optimizer) in zip(losses, both.sides, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def stepped(placement: str | hetmem.Budget, directory: Path) -> Twins:
    both = twins(pair(mlp, placement, directory), overlap="forward")
    both.train(BATCHES[:2])
    trail(both, BATCHES[2])
    assert testing.of(both.managed).updating()
    return both


@pytest.mark.parametrize(("way", "placement"), mostly(READS, STREAMED))
def test_a_parameter_that_is_read_is_that_of_the_last_step(way: str, placement: str, tmp_path: Path) -> None:
    both = stepped(placement, tmp_path)
    for expected, got in zip(both.plain.parameters(), both.managed.parameters(), strict=True):
        if way == "vmap" and not expected.dim():
            continue
        value = READS[way](got)
        assert type(value) is torch.Tensor
        assert_same(READS[way](expected), value, way)
    both.train(BATCHES[3:])
    both.right.synchronize()
    both.assert_same()


@streamed
def test_averages_and_copies_of_the_model_are_of_the_last_step(placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap="forward")
    averages = [AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for module, _ in both.sides]
    for batch in BATCHES[:3]:
        trail(both, batch)
        for average, (module, _) in zip(averages, both.sides, strict=True):
            average.update_parameters(module)
    saved = io.BytesIO()
    trail(both, BATCHES[3])
    torch.save(both.managed, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    trail(both, BATCHES[0])
    copied = copy.deepcopy(both.managed)
    for got, expected in ((averages[1], averages[0]), (copied, both.plain)):
        for one_of, other in zip(expected.parameters(), got.parameters(), strict=True):
            assert type(other) is nn.Parameter
            assert_same(one_of, other, "average or copy")
    both.left.zero_grad()
    for fresh, batch in ((loaded, BATCHES[0]), (copied, BATCHES[1])):
        one(fresh, batch, torch.optim.AdamW(fresh.parameters(), lr=1e-2))  # both are ordinary models


@streamed
def test_compiled_code_and_transforms_read_what_the_last_step_made(placement: str, tmp_path: Path) -> None:
    both = stepped(placement, tmp_path)
    doubled = torch.compile(lambda parameter: parameter * 2, backend="eager")
    for expected, got in zip(both.plain.parameters(), both.managed.parameters(), strict=True):
        assert_same(expected * 2, doubled(got), "compiled")
        assert_same(expected * 2, doubled(got), "compiled, once more")
    trail(both, BATCHES[3])
    found = []
    for module, _ in both.sides:

        def loss(weights: dict[str, torch.Tensor], module: nn.Module = module) -> torch.Tensor:
            output: torch.Tensor = torch.func.functional_call(module, weights, (torch.ones(2, WIDTH),))
            return output.square().sum()

        found.append(torch.func.grad(loss)(dict(module.named_parameters())))
    for name, gradient in found[0].items():
        assert_same(gradient, found[1][name], f"gradient of {name}")


@streamed
def test_what_is_written_comes_after_the_update(placement: str, tmp_path: Path) -> None:
    both = stepped(placement, tmp_path)
    with torch.no_grad():
        for module, _ in both.sides:
            for number, parameter in enumerate(module.parameters()):
                if number % 3 == 0:
                    parameter.mul_(0.5)
                elif number % 3 == 1:
                    parameter.data = torch.full_like(parameter.data, 0.25)
                else:
                    nn.init.constant_(parameter, 0.125)
    both.train(BATCHES[3:])
    both.right.synchronize()
    both.assert_same()


@streamed
def test_what_tells_nothing_of_values_waits_for_nothing(placement: str, tmp_path: Path) -> None:
    both = stepped(placement, tmp_path)
    before = testing.of(both.managed).updating()
    for parameter in both.managed.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is None
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert (parameter.numel(), parameter.dtype) == (parameter.shape.numel(), torch.float32)
    both.right.zero_grad()
    both.managed.zero_grad()
    assert testing.of(both.managed).updating() == before
    first = next(iter(both.managed.parameters()))
    assert_same(next(iter(both.plain.parameters())), first, "first")
    assert 0 < len(testing.of(both.managed).updating()) < len(before), "reading one waited for all"


@streamed
def test_after_a_forward_of_a_part_the_rest_is_still_waited_for(placement: str, tmp_path: Path) -> None:
    both = stepped(placement, tmp_path)
    x = torch.ones(2, WIDTH)
    for train in (False, True):
        with torch.set_grad_enabled(train):
            assert_same(both.plain[0](x), both.managed[0](x), "output of a part")
    for expected, got in zip(both.plain.parameters(), both.managed.parameters(), strict=True):
        assert_same(expected.detach(), got.detach(), "parameter")


class Late:
    """Has updates that trail begin only as far as what was looked at last, from those of `managed[first]` on."""

    def __init__(self, managed: nn.Module, first: int) -> None:
        chunk_of = testing.of(managed).chunk_of
        self.chunks = {parameter: chunk_of(parameter) for parameter in managed.parameters()}
        self.last = max(self.chunks[parameter] for parameter in managed[first].parameters())

    def may_begin(self, original: Callable[..., bool], updates: Any, job: Any) -> bool:
        return job.chunk.spec.index <= self.last and original(updates, job)

    def look(self, parameter: nn.Parameter, seen: list[torch.Tensor], gradient: torch.Tensor) -> None:
        self.last = max(self.last, self.chunks.get(parameter, 0))
        _look(parameter, seen, gradient)


@streamed
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_hooks_of_a_backward_read_and_write_what_the_last_step_made(
    use_reentrant: bool | None, placement: str, tmp_path: Path
) -> None:
    """Before anything of the model is met there, between its weights, and after a part was computed once more."""
    both, read = stepped(placement, tmp_path), []
    late = Late(both.managed, 0)
    with testing.around("is an update free", late.may_begin):
        for module, _ in both.sides:
            seen: list[torch.Tensor] = []
            x = torch.ones(2, WIDTH, requires_grad=True)
            hidden = module[0](x) if use_reentrant is None else checkpoint(module[0], x, use_reentrant=use_reentrant)
            hidden.register_hook(partial(late.look, module[2].bias, seen))
            module[0].bias.register_hook(partial(late.look, module[2].weight, seen))
            x.register_hook(partial(late.look, module[4].weight, seen))
            hidden.square().sum().backward()
            read.append(seen)
        assert len(read[0]) == 3
        for expected, got in zip(*read, strict=True):
            assert_same(expected, got, "read in a hook")
    assert_same(both.plain[4].weight, both.managed[4].weight, "weight")


def _look(parameter: nn.Parameter, seen: list[torch.Tensor], _: torch.Tensor) -> None:
    seen.append(parameter.detach().clone())
    with torch.no_grad():
        parameter.mul_(0.5)


@streamed
@pytest.mark.parametrize("refused", [False, True])
def test_a_step_of_another_optimizer_ends_no_waiting(refused: bool, placement: str, tmp_path: Path) -> None:
    """Nor does one that raises."""
    plain, managed = pair(mlp, placement, tmp_path)
    both = twins((plain[0], managed[0]), overlap="forward")
    others = Twins(plain, managed, *adamws(plain[2], managed[2]))
    for batch in BATCHES[:2]:
        for module, optimizers in ((plain, (both.left, others.left)), (managed, (both.right, others.right))):
            one(module, batch, *optimizers)
    trail(Twins(plain, managed, both.left, both.right), BATCHES[2])
    if refused:
        managed[2].weight.grad = torch.zeros(WIDTH, WIDTH).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            others.right.step()
    else:
        others.left.step()
        others.right.step()
    assert_same(plain[0].weight, managed[0].weight, "weight")


def test_a_release_while_updates_trail_leaves_ordinary_parameters(tmp_path: Path) -> None:
    both = stepped("nvme", tmp_path)
    hetmem.release(both.managed)
    for expected, got in zip(both.plain.parameters(), both.managed.parameters(), strict=True):
        assert type(got) is nn.Parameter
        assert_same(expected, got, "parameter")


def test_a_parameter_outlives_its_model_and_is_an_ordinary_one(tmp_path: Path) -> None:
    both = stepped("host", tmp_path)
    parameter = next(iter(both.managed.parameters()))
    object.__setattr__(both, "managed", None)
    object.__setattr__(both, "right", None)
    assert parameter.detach().isfinite().all()
    assert type(parameter) is nn.Parameter


def in_thread(act: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_another_thread_that_reads_waits_for_what_trails(tmp_path: Path) -> None:
    both = stepped("host", tmp_path)
    seen: list[torch.Tensor] = []
    assert not in_thread(lambda: seen.append(next(iter(both.managed.parameters())) + 1))
    assert_same(next(iter(both.plain.parameters())) + 1, seen[0], "read on another thread")

    assert not in_thread(lambda: trail(both, BATCHES[3]))
    both.assert_same()


def test_a_hook_of_a_backward_on_another_thread_waits_too(tmp_path: Path) -> None:
    both = stepped("host", tmp_path)
    seen: list[torch.Tensor] = []
    late = Late(both.managed, 0)
    both.managed[0].weight.register_hook(partial(late.look, both.managed[2].weight, seen))

    def backward_and_read() -> None:
        both.managed[0](torch.ones(2, WIDTH)).sum().backward()

    with testing.around("is an update free", late.may_begin):
        assert not in_thread(backward_and_read)
        assert_same(both.plain[2].weight, seen[0], "read in a hook")


def test_an_error_of_the_disk_reaches_who_reads_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    disk.used_by(monkeypatch)
    both = stepped("nvme", tmp_path)
    disk.fault = once(0, EIO)
    with pytest.raises(StoreError, match="Input/output error"):
        parameters_to_vector(both.managed.parameters())
    assert_same(parameters_to_vector(both.plain.parameters()), parameters_to_vector(both.managed.parameters()), "all")
    both.right.synchronize()
    both.assert_same()


@streamed
def test_who_waits_for_one_optimizer_has_not_waited_for_another(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    layers = ((plain[0], managed[0]), (plain[4], managed[4]))
    first, second = (adamws(*both, overlap="forward") for both in layers)
    losses = [loss_of(module, BATCHES[0]) for module in (plain, managed)]
    with testing.updates_held():
        for loss, optimizers in zip(losses, zip(first, second, strict=True), strict=True):
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    first[1].synchronize()
    for expected, got in layers:
        assert_same(expected.weight, got.weight.detach().clone(), "weight")


def test_what_is_updated_and_still_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter on NVMe is a view of the file."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch, threads=1)
    both = twins(pair(mlp, "nvme", tmp_path), overlap="forward")
    both.train(BATCHES[:2])
    both.right.synchronize()
    disk.fault = late
    both.train(BATCHES[2:3])
    for expected, got in reversed([*zip(both.plain.parameters(), both.managed.parameters(), strict=True)]):
        assert_same(expected, got.detach(), "parameter")


def late(verb: str, _: int, nbytes: int) -> int:
    time.sleep(0.1 * (verb == "write"))
    return nbytes


def test_a_release_that_fails_leaves_parameters_that_may_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    disk.used_by(monkeypatch)
    both = stepped("nvme", tmp_path)
    disk.fault = EIO
    with pytest.raises(StoreError):
        hetmem.release(both.managed)
    for parameter in both.managed.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.detach().isfinite().all()
