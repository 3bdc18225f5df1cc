"""Updates that overlap with backward or forward, clipping and loss scaling: the same bits as without, or an error."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.optim.kernels import square_sum
from hetmem.optim.updates import Updates
from hetmem.optim.workers import WorkerPool
from hetmem.runtime import registry
from tests.faults.disk import FaultyDisk
from tests.runtime.harness import (
    STREAMED,
    Mixed,
    Recipe,
    Tower,
    assert_same,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    manage,
    mlp,
    pair,
    token_batches,
    train_both,
    vector_batches,
)

BF16 = torch.bfloat16
OVERLAPS = ("off", "backward", "speculative", "forward")


def spans(module: nn.Module, what: str) -> list[tuple[float, float]]:
    """When segments called `what` ran."""
    return [(s.start, s.end) for s in registry.of_module(module).runtime.events.segments if s.what == what]


def updates_within(module: nn.Module, what: str) -> int:
    """How many updates of chunks began while a segment `what` ran."""
    began = [span.start for span in registry.of_module(module).runtime.events.updates]
    return sum(start <= at < end for at in began for start, end in spans(module, what))


@pytest.mark.pairs
@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("overlap", OVERLAPS[1:])
def test_overlapped_training_equals_torch(
    overlap: str, accumulation: int, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed)
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap),
    )
    recipe = Recipe(steps=5, accumulation=accumulation, mixed=mixed)
    train_both(plain, managed, token_batches(5 * accumulation), recipe, optimizers=optimizers)
    assert updates_within(managed, "backward") > 0, "nothing overlapped"


def late_writes(verb: str, _: int, nbytes: int) -> int:
    """A disk that takes its time to write."""
    if verb == "write":
        time.sleep(0.02)
    return nbytes


@pytest.mark.parametrize("overlap", ["off", "backward", "speculative"])
def test_parameters_can_be_read_as_soon_as_a_step_is_over(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not through `state_dict`, which waits: as they are in the mapped file, however slow the disk is."""
    disk = FaultyDisk()
    disk.fault = late_writes
    disk.used_by(monkeypatch, threads=2)
    plain, managed = pair(mlp, "nvme", tmp_path)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(8, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
        for (name, expected), got in zip(plain.named_parameters(), managed.parameters(), strict=True):
            assert_same(expected, got, name)


@pytest.mark.parametrize("overlap", OVERLAPS[1:])
@pytest.mark.parametrize("limit", [None, 1e-3, 1e9])
def test_gradients_that_arrive_behind_the_backward_are_waited_for(
    overlap: str, limit: float | None, tmp_path: Path
) -> None:
    """Gradients of over a megabyte are copied by another thread."""
    plain = nn.Sequential(*[nn.Linear(640, 640, bias=False) for _ in range(4)])
    room = hetmem.Budget(device="64MiB", device_chunks="8MiB", host="128MiB")
    seen = []
    for how in ("off", overlap):
        managed = manage(copy.deepcopy(plain), room, tmp_path, chunk_bytes="2MiB")
        optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=how, max_grad_norm=limit)
        for batch in vector_batches(4, 2, 640):
            optimizer.zero_grad()
            loss_of(managed, batch).backward()
            optimizer.step()
        seen.append((managed.state_dict(), optimizer.state_dict()["state"]))
    for name, value in seen[0][0].items():
        assert_same(value, seen[1][0][name], name)
    for index, state in seen[0][1].items():
        for name, value in state.items():
            assert_same(value, seen[1][1][index][name], f"{name} of {index}")


@pytest.mark.parametrize("placement", STREAMED)
def test_gradients_that_are_zeroed_in_place_stay_right(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward"),
    )
    recipe = Recipe(steps=5, set_to_none=False)
    train_both(plain, managed, vector_batches(5, 4, 64), recipe, optimizers=optimizers)


@pytest.mark.parametrize("placement", STREAMED)
def test_the_next_forward_runs_while_updates_do(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but forwards, backwards and steps, so that nothing waits for a step's end. Each update takes a while."""
    begin = WorkerPool.begin
    late = partial(time.sleep, 0.005)
    monkeypatch.setattr(WorkerPool, "begin", lambda pool, tasks, after=None: begin(pool, [*tasks, late], after))
    plain, managed = pair(Tower, placement, tmp_path)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    batches = token_batches(6)
    losses: list[list[torch.Tensor]] = [[], []]
    for module, optimizer, seen in ((plain, left, losses[0]), (managed, right, losses[1])):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(module, batch)
            loss.backward()
            seen.append(loss.detach())
            optimizer.step()
    for expected, got in zip(*losses, strict=True):
        assert_same(expected, got, "loss")
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    assert updates_within(managed, "forward") > 0, "nothing overlapped"


@pytest.mark.pairs
@pytest.mark.parametrize("placement", ["resident", *STREAMED])
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_clipping_equals_a_clip_of_plain_gradients(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """The norm of some steps is below the limit and of others above it, so that trials are kept and undone. A weight
    decay of nothing and SGD's sensitivity are not there, so the moments are compared: they see the factor."""
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    probe = copy.deepcopy(plain)
    norms = []
    for batch in token_batches(6):
        probe.zero_grad()
        loss_of(probe, batch).backward()
        norms.append(square_sum(WorkerPool(1), [p.grad.flatten() for p in probe.parameters() if p.grad is not None]))
    limit = sorted(norms)[2] ** 0.5
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=limit)
    clipped = []

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = square_sum(WorkerPool(2), [gradient.flatten() for gradient in gradients]) ** 0.5
        assert norm == pytest.approx(float(nn.utils.get_total_norm(gradients)), rel=1e-5)
        factor = limit / (norm + 1e-6)
        clipped.append(factor < 1)
        for gradient in gradients:
            gradient.mul_(min(1.0, factor))

    left.register_step_pre_hook(clip)
    feed = token_batches(6)
    for step in range(6):
        recipe = Recipe(steps=1, mixed=mixed, set_to_none=True)
        train_both(plain, managed, [feed[step]], recipe, optimizers=(left, right))
    assert True in clipped, "nothing was clipped"
    assert False in clipped, "everything was clipped"


@pytest.mark.parametrize("placement", STREAMED)
def test_the_norm_does_not_depend_on_overlap(placement: str, tmp_path: Path) -> None:
    seen = []
    for overlap in OVERLAPS:
        torch.manual_seed(0)
        module = manage(Tower(), placement, tmp_path)
        optimizer = hetmem.AdamW(module.parameters(), overlap=overlap, max_grad_norm=1.0)
        norms = []
        for batch in token_batches(4):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
        seen.append(norms)
    assert seen[0] == seen[1] == seen[2] == seen[3]


def poison(module: nn.Module) -> None:
    """One gradient is infinite, as an overflow leaves it."""
    parameter = next(iter(module.parameters()))
    assert parameter.grad is not None
    parameter.grad.view(-1)[0] = float("inf")


@pytest.mark.parametrize("placement", ["resident", *STREAMED])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_overflow_skips_one_step_and_changes_nothing_else(overlap: str, placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = manage(Tower(), placement, tmp_path, mixed_precision=torch.float16)
    scale = hetmem.optim.LossScale(2.0**10, growth_interval=2)
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-2, overlap=overlap, loss_scale=scale)
    batches = token_batches(6)

    def step(batch: Any, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        (optimizer.scale(loss_of(module, batch)) * factor).backward()
        optimizer.step()

    for batch in batches[:3]:
        step(batch)
    assert (scale.value, scale.skipped) == (2.0**11, 0)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    step(batches[3], factor=float("inf"))
    after = (module.state_dict(), optimizer.state_dict())
    assert (scale.value, scale.skipped) == (2.0**10, 1)
    for name in before[0]:
        assert_same(before[0][name], after[0][name], name)
    for index, state in before[1]["state"].items():
        for name, value in state.items():
            assert_same(value, after[1]["state"][index][name], f"{name} of {index}")
    step(batches[4])
    assert scale.skipped == 1
    assert any(not torch.equal(before[0][name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("placement", ["resident", *STREAMED])
@pytest.mark.parametrize("overlap", ["off", "speculative"])
def test_unscaling_gives_the_bits_of_unscaled_gradients(overlap: str, placement: str, tmp_path: Path) -> None:
    """A power of two: nothing is rounded by it, unless a gradient leaves float32's range."""
    plain, managed = pair(Tower, placement, tmp_path)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, loss_scale=2.0**12)
    for batch in token_batches(4):
        for module, optimizer in ((plain, left), (managed, right)):
            optimizer.zero_grad()
            loss = loss_of(module, batch)
            (loss if module is plain else right.scale(loss)).backward()
            optimizer.step()
        assert_same_weights(plain, managed)
        assert_same_states(left, right)


@pytest.mark.parametrize("placement", ["resident", *STREAMED])
def test_the_gradient_scaler_of_torch_works(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(Tower, placement, tmp_path)
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2),
    )
    skipped = 0
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in optimizers]
    for index, batch in enumerate(token_batches(6)):
        for module, optimizer, scaler in zip((plain, managed), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            if index == 3:
                poison(module)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < scale
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_weights(plain, managed)
        assert_same_states(*optimizers)
    assert skipped == 2


def train_apart(
    plain: nn.Module, managed: nn.Module, optimizers: Any, batches: list[Any], mixed: torch.dtype | None = None
) -> None:
    """As `train_both`, which looks at gradients; here they are gone after backward."""
    masters = Mixed(plain, mixed) if mixed else None
    for step, batch in enumerate(batches):
        if masters is not None:
            expected = masters.backward(lambda module, batch=batch: loss_of(module, batch))
        else:
            expected = loss_of(plain, batch)
            expected.backward()
        got = loss_of(managed, batch)
        got.backward()
        assert_same(expected, got, f"step {step} loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
        assert_same_states(*optimizers, f"step {step}")


@pytest.mark.pairs
@pytest.mark.parametrize("placement", ["resident", *STREAMED])
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_streamed_gradients_give_the_bits_of_visible_ones(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    room: Any = placement
    if placement == "nvme":
        room = budget("nvme", tmp_path, host="256KiB", device_chunks="256KiB")
    plain, managed = pair(Tower, room, tmp_path, mixed_precision=mixed)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, gradients="streamed")
    train_apart(plain, managed, (left, right), token_batches(5), mixed)


def test_streamed_gradients_take_the_memory_of_a_few_chunks(tmp_path: Path) -> None:
    plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])
    managed = manage(copy.deepcopy(plain), "host", tmp_path)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward", gradients="streamed")
    train_apart(plain, managed, (left, right), vector_batches(4, 4, 64))
    chunks = len(registry.of_module(managed).runtime.chunks)
    visible = 16 * 4096 * chunks / sum(p.numel() for p in plain.parameters())
    streamed = hetmem.report(managed).to_dict()["bytes_per_parameter"]
    assert streamed == pytest.approx(visible * (12 + 4 * 6 / chunks) / 16)
    assert all(parameter.grad is None for parameter in managed.parameters())


class Halves(nn.Module):
    """Two halves that run in turns, in whatever order: a batch says which."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]) for _ in range(2))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.halves[i](x) for i in which.tolist()]).sum(0)


@pytest.mark.parametrize("placement", STREAMED)
def test_streamed_gradients_of_chunks_that_never_complete_have_homes_too(placement: str, tmp_path: Path) -> None:
    room: Any = placement
    if placement == "nvme":
        room = budget("nvme", tmp_path, host="512KiB", device_chunks="256KiB")
    plain, managed = pair(Halves, room, tmp_path, chunk_bytes="64KiB")
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward", gradients="streamed")
    inputs = [batch[0] for batch in vector_batches(6, 4, 64)]
    turns = [torch.tensor(which) for which in ([0], [1], [0, 1], [1], [0], [1, 0])]
    train_apart(plain, managed, (left, right), list(zip(inputs, turns, strict=True)))


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_one_more_backward_than_ever_before_is_an_error(overlap: str, placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters(), overlap=overlap)
    first, second = vector_batches(2, 4, 64)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(module, first).backward()
        optimizer.step()
    loss_of(module, first).backward()
    with pytest.raises(RuntimeError, match=r"arrived after its update had begun .*overlap='off'"):
        loss_of(module, second).backward()


@pytest.mark.parametrize("placement", STREAMED)
def test_gradients_changed_after_their_update_are_an_error(placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters(), overlap="backward")
    batch = vector_batches(1, 4, 64)[0]
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(module, batch).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="max_grad_norm="):
        optimizer.step()


@pytest.mark.parametrize("placement", STREAMED)
def test_a_step_with_more_backwards_teaches_the_next_ones(placement: str, tmp_path: Path) -> None:
    """The first step has two backwards: later updates wait for the second, and a step of one is flushed in `step`."""
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward"),
    )
    for accumulation in (2, 2, 1, 2):
        recipe = Recipe(steps=1, accumulation=accumulation)
        train_both(plain, managed, vector_batches(2, 4, 64), recipe, optimizers=optimizers)


@pytest.mark.parametrize("late", [True, False])
def test_memory_to_undo_with_comes_back_from_chunks_that_were_prepared_for_nothing(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another backward came before their update had begun; `late`: while memory was being saved."""
    plain, module = pair(mlp, "host", tmp_path)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = hetmem.AdamW(module.parameters(), lr=1e-2, overlap="speculative", max_grad_norm=1e9)
    runtime = registry.of_module(module).runtime
    first, second = vector_batches(2, 4, 64)

    before = runtime.memory.host_pool.reserved_bytes
    train_both(plain, module, [first], Recipe(steps=2), optimizers=(plain_optimizer, optimizer))
    opened, begin, pump = threading.Event(), WorkerPool.begin, Updates.pump
    undo = next(iter(optimizer._steppers.values()))._undo
    if late:
        monkeypatch.setattr(WorkerPool, "begin", lambda pool, tasks, after: begin(pool, [opened.wait, *tasks], after))
    else:
        monkeypatch.setattr(Updates, "pump", lambda updates: pump(updates) if opened.is_set() else None)
    for which, rule in ((module, optimizer), (plain, plain_optimizer)):
        loss_of(which, first).backward()
        loss_of(which, second).backward()
        opened.set()
        rule.step()
    assert_same_weights(plain, module)
    free = sum(buffer.nbytes for buffers in undo._free.values() for buffer in buffers)
    assert free == runtime.memory.host_pool.reserved_bytes - before > 0


@pytest.mark.parametrize("placement", STREAMED)
def test_a_hook_that_changes_gradients_is_honoured(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for module in (plain, managed):
        module[2].weight.register_post_accumulate_grad_hook(halve)
    optimizers = (
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward"),
    )
    train_both(plain, managed, vector_batches(4, 4, 64), Recipe(steps=4), optimizers=optimizers)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overlap": "sideways"}, "sideways"),
        ({"gradients": "invisible"}, "invisible"),
        ({"gradients": "streamed"}, "overlap='backward'"),
        ({"gradients": "streamed", "overlap": "speculative"}, "overlap='backward'"),
        ({"gradients": "streamed", "overlap": "backward", "max_grad_norm": 1.0}, "max_grad_norm"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"loss_scale": "static"}, "loss_scale"),
        ({"loss_scale": 0.0}, "loss scale"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    module = manage(mlp(), "host", tmp_path)
    with pytest.raises(ValueError, match=match):
        hetmem.AdamW(module.parameters(), **options)
