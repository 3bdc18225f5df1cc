"""Inputs and interleavings that updates behind backward and forward once got wrong: each test tells one story."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetmem
from tests.faults.disk import FaultyDisk
from tests.runtime.harness import (
    STREAMED,
    Mixed,
    Tower,
    assert_same,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    mlp,
    pair,
    token_batches,
    vector_batches,
)

OVERLAPS = ("off", "backward", "speculative", "forward")


def small() -> nn.Sequential:
    """Many parameters in each chunk."""
    return nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(40, 40), nn.Tanh())])


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every other parameter: neighbours in one chunk."""
    parameters = list(module.parameters())
    return parameters[::2], parameters[1::2]


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, **options)


def one(module: nn.Module, batch: Any, *optimizers: Any) -> None:
    loss_of(module, batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_two_optimizers_share_chunks(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(small, placement, tmp_path)
    left = [adamw(part) for part in halves(plain)]
    right = [hetmem.AdamW(part, lr=1e-2, overlap=overlap) for part in halves(managed)]
    for batch in vector_batches(5, 4, 40):
        one(plain, batch, *left)
        one(managed, batch, *right)
        assert_same_weights(plain, managed)
    for expected, got in zip(left, right, strict=True):
        assert_same_states(expected, got)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_of_some_parameters_leaves_the_gradients_of_others_alone(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(small, placement, tmp_path)
    left, right = adamw(halves(plain)[0]), hetmem.AdamW(halves(managed)[0], lr=1e-2, overlap=overlap)
    for batch in vector_batches(4, 4, 40):
        one(plain, batch, left)
        one(managed, batch, right)
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
def test_undoing_a_trial_keeps_what_another_optimizer_did_to_the_chunk(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(small, placement, tmp_path)
    trial = hetmem.AdamW(halves(managed)[0], lr=1e-2, overlap="speculative", max_grad_norm=1e-3)
    other = hetmem.AdamW(halves(managed)[1], lr=1e-2)
    left = [adamw(part) for part in halves(plain)]
    for batch in vector_batches(4, 4, 40):
        loss_of(plain, batch).backward()
        loss_of(managed, batch).backward()
        other.step()
        trial.step()
        factor = 1e-3 / (trial.grad_norm + 1e-6)
        for parameter in halves(plain)[0]:
            parameter.grad.mul_(factor)
        for optimizer in (*left, other, trial):
            optimizer.step() if optimizer in left else None
            optimizer.zero_grad()
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_states_that_were_loaded_between_steps_count(overlap: str, tmp_path: Path) -> None:
    """Copies of the old ones may lie in staging."""
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    early = None
    for index, batch in enumerate(vector_batches(6, 4, 64)):
        one(plain, batch, left)
        one(managed, batch, right)
        if index == 1:
            early = copy.deepcopy(left.state_dict())
        if index == 3:
            left.load_state_dict(copy.deepcopy(early))
            right.load_state_dict(copy.deepcopy(early))
    assert_same_states(left, right)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_states_that_the_user_wrote_between_steps_count(overlap: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "nvme", tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        for module, optimizer in ((plain, left), (managed, right)):
            for parameter in module.parameters():
                optimizer.state[parameter]["exp_avg"].mul_(0.5)
    assert_same_states(left, right)
    assert_same_weights(plain, managed)


@pytest.mark.pairs
@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("which", ["all", "one chunk"])
def test_gradients_dropped_before_the_step_are_not_used(
    which: str, overlap: str, placement: str, tmp_path: Path
) -> None:
    """Either nothing is updated, as in torch, or an error says what is wrong."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    batches = vector_batches(5, 4, 64)
    for batch in batches[:3]:
        one(plain, batch, left)
        one(managed, batch, right)
    for module in (plain, managed):
        loss_of(module, batches[3]).backward()
        for parameter in module.parameters() if which == "all" else [module[2].weight]:
            parameter.grad = None
    left.step()
    try:
        right.step()
    except RuntimeError as error:
        assert "overlap='off'" in str(error)  # noqa: PT017
        return
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_weights_written_before_the_step_count(overlap: str, placement: str, tmp_path: Path) -> None:
    """Either the update is made of what was written, as in torch, or an error says what is wrong."""
    plain, managed = pair(mlp, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    batches = vector_batches(5, 4, 64)
    for batch in batches[:3]:
        one(plain, batch, left)
        one(managed, batch, right)
    for module in (plain, managed):
        loss_of(module, batches[3]).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
    left.step()
    try:
        right.step()
    except RuntimeError as error:
        assert "overlap='off'" in str(error)  # noqa: PT017
        return
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_gradients_are_as_large_as_they_are(overlap: str, placement: str, tmp_path: Path) -> None:
    """Gradients of more than a megabyte go home on another thread."""
    build = lambda: nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600))  # noqa: E731
    room = budget(placement, tmp_path, device_chunks="16MiB", host="64MiB" if placement == "host" else "16MiB")
    plain, managed = pair(build, room, tmp_path, chunk_bytes=None)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(4, 2, 600):
        one(plain, batch, left)
        one(managed, batch, right)
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
def test_gradients_zeroed_by_the_model_while_updates_trail_do_no_harm(placement: str, tmp_path: Path) -> None:
    """Either torch's bits, or an error that says what to do."""
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            try:
                loss_of(module, batch).backward()
            except RuntimeError as error:
                assert "synchronize" in str(error)  # noqa: PT017
                return
            optimizer.step()
            module.zero_grad(set_to_none=False)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
def test_updates_go_on_when_their_optimizer_is_dropped(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    batches = vector_batches(3, 4, 64)
    for batch in batches:
        one(plain, batch, left)
        one(managed, batch, right)
    del right
    gc.collect()
    assert_same(loss_of(plain, batches[0]), loss_of(managed, batches[0]), "loss")
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_that_trail_into_inference_mode(kind: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    if kind == "adamw":
        left: Any = adamw(plain.parameters())
        right: Any = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    else:
        left = torch.optim.NAdam(plain.parameters(), lr=1e-2)
        right = hetmem.optim.offload(
            torch.optim.NAdam, managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9
        )
    for batch in vector_batches(3, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            one(module, batch, optimizer)
            with torch.inference_mode():
                module(*batch)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_gradient_scaler_of_torch_works_or_is_refused(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers: Any = (
        torch.optim.SGD(plain.parameters(), lr=0.1),
        hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, overlap=overlap),
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in optimizers]
    for batch in vector_batches(4, 4, 64):
        for module, optimizer, scaler in zip((plain, managed), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            try:
                scaler.step(optimizer)
            except RuntimeError as error:
                assert module is managed
                assert "overlap='off'" in str(error)  # noqa: PT017
                return
            scaler.update()
        assert_same_weights(plain, managed)


def test_a_scaler_writes_gradients_while_those_before_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unscale_` counts no version, so that only what has been read can be compared with what lies at home."""
    disk = FaultyDisk()
    disk.used_by(monkeypatch)
    plain, managed = pair(mlp, "nvme", tmp_path)
    optimizers = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in optimizers]
    for batch in vector_batches(4, 4, 64):
        for module, optimizer, scaler in zip((plain, managed), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(module, batch))
            disk.tells_late_seconds = 0.02
            loss.backward()
            scaler.step(optimizer)
            disk.tells_late_seconds = 0.0
            scaler.update()
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
def test_loading_weights_while_updates_trail(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    first = copy.deepcopy(plain.state_dict())
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in ((plain, left), (managed, right)):
            one(module, batch, optimizer)
            module.load_state_dict(first)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("placement", STREAMED)
def test_the_state_dict_of_a_part_waits_for_updates_too(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        assert_same_weights(plain[2], managed[2])


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_copy_of_the_model_has_the_weights_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        right.synchronize()
        assert_same_weights(plain, copy.deepcopy(managed))


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_parameters_read_directly_are_those_of_the_last_step(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
        right.synchronize()
        for expected, got in zip(plain.parameters(), managed.parameters(), strict=True):
            assert_same(expected, got, "parameter")


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_parameter_unfrozen_while_gradients_accumulate(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for module in (plain, managed):
        module[2].weight.requires_grad_(False)
    batches = vector_batches(6, 4, 64)
    for step in range(6):
        if step == 3:
            for module in (plain, managed):
                module[2].weight.requires_grad_(True)
        for module, optimizer in ((plain, left), (managed, right)):
            for batch in batches[step : step + 2]:
                loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_weight_whose_value_is_needed_after_its_gradient(overlap: str, tmp_path: Path) -> None:
    """Either torch's bits or an error; never the new weights."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = torch.tanh(x @ self.weight.detach())
            return x @ self.weight

    plain, managed = pair(Late, "host", tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        try:
            one(managed, batch, right)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            return
        one(plain, batch, left)
        assert_same_weights(plain, managed)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_learning_rate_in_a_tensor_of_one_element_changes_in_place(overlap: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    rates = [torch.tensor([1e-2]), torch.tensor([1e-2])]
    left = torch.optim.AdamW(plain.parameters(), lr=rates[0], fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=rates[1], overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(4, 4, 64):
        for module, optimizer, rate in ((plain, left, rates[0]), (managed, right, rates[1])):
            one(module, batch, optimizer)
            rate.mul_(0.5)
        assert_same_weights(plain, managed)


def test_amsgrad_is_not_ignored(tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    with pytest.raises(ValueError, match="amsgrad"):
        hetmem.AdamW([{"params": list(managed.parameters()), "amsgrad": True}], lr=1e-2)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, amsgrad=True)
    one(plain, vector_batches(1, 4, 64)[0], left)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="amsgrad"):
        right.load_state_dict(left.state_dict())


def test_two_optimizers_get_by_with_staging_for_one(tmp_path: Path) -> None:
    """What one has read ahead for a step that trails must not keep the other from its own."""
    plain, managed = pair(lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]), "nvme", tmp_path)
    (a, b), (c, d) = halves(plain), halves(managed)
    left = [adamw(a), adamw(b)]
    right = [
        hetmem.AdamW(c, lr=1e-2, overlap="forward", max_grad_norm=1e9),
        hetmem.AdamW(d, lr=1e-2),
    ]
    for batch in vector_batches(8, 4, 64):
        one(plain, batch, *left)
        one(managed, batch, *right)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_model_released_while_updates_trail(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, right)
    hetmem.release(managed)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)
    later = adamw(managed.parameters())
    later.load_state_dict(right.state_dict())
    for group in later.param_groups:  # torch takes options from the checkpoint, which does not have this one
        group["fused"] = True
    for batch in vector_batches(3, 4, 64):
        one(plain, batch, left)
        one(managed, batch, later)
    assert_same_weights(plain, managed)


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_forward_on_homes_sees_no_update_that_trails(mixed: torch.dtype | None, tmp_path: Path) -> None:
    """All on the device: operators see homes, or what is cast of them."""
    plain, managed = pair(Tower, "resident", tmp_path, mixed_precision=mixed)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="forward", max_grad_norm=1e9)
    masters = Mixed(plain, mixed) if mixed is not None else None
    for batch in token_batches(4):
        if masters is not None:
            expected = masters.backward(lambda module, batch=batch: loss_of(module, batch))
        else:
            expected = loss_of(plain, batch)
            expected.backward()
        got = loss_of(managed, batch)
        got.backward()
        assert_same(expected, got, "loss")
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("placement", STREAMED)
def test_options_that_come_with_a_checkpoint_bring_their_states(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left: Any = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    right: Any = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1)
    batches = vector_batches(4, 4, 64)
    for batch in batches[:2]:
        one(plain, batch, left)
    managed.load_state_dict(plain.state_dict())
    right.load_state_dict(copy.deepcopy(left.state_dict()))
    for batch in batches[2:]:
        one(plain, batch, left)
        one(managed, batch, right)
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_for_each_parameter_steps_within_backward(overlap: str, placement: str, tmp_path: Path) -> None:
    """The pattern of torch's tutorial: hooks step as soon as a gradient is there."""
    plain, managed = pair(mlp, placement, tmp_path)
    handles = []
    for module, make in ((plain, adamw), (managed, lambda p: hetmem.AdamW(p, lr=1e-2, overlap=overlap))):
        optimizers = {parameter: make([parameter]) for parameter in module.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles += [parameter.register_post_accumulate_grad_hook(step) for parameter in module.parameters()]
    for batch in vector_batches(4, 4, 64):
        losses = [loss_of(module, batch) for module in (plain, managed)]
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
    for optimizer in managed[0].weight._post_accumulate_grad_hooks.values():
        for each in (getattr(optimizer, "__defaults__", None) or [{}])[0].values():
            each.synchronize()
    assert_same_weights(plain, managed)
    for handle in handles:  # the collector does not look into them: parameter, hook and optimizer hold each other
        handle.remove()


@pytest.mark.pairs
@pytest.mark.parametrize("placement", ["resident", *STREAMED])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
def test_clipping_gradients_that_are_not_finite_does_what_torch_does(
    value: float, overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left: Any = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    right = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, max_grad_norm=1e6, overlap=overlap)
    for step, batch in enumerate(vector_batches(4, 4, 64)):
        for module, optimizer in ((plain, left), (managed, right)):
            loss = loss_of(module, batch)
            if step == 3:
                loss = loss + module[2].weight[0, 0] * value
            loss.backward()
            if module is plain:
                nn.utils.clip_grad_norm_(module.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), got in zip(plain.named_parameters(), managed.state_dict().values(), strict=True):
        assert torch.equal(expected.isnan(), got.isnan()), name
        assert torch.equal(expected.nan_to_num(), got.nan_to_num()), name


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_one_of_two_models_is_released(overlap: str, placement: str, tmp_path: Path) -> None:
    """The optimizer goes on with the other one, as long as the first has no gradients."""
    pairs = [pair(mlp, placement, tmp_path) for _ in range(2)]
    left = adamw([p for plain, _ in pairs for p in plain.parameters()])
    right = hetmem.AdamW(
        [p for _, managed in pairs for p in managed.parameters()], lr=1e-2, overlap=overlap, max_grad_norm=1e9
    )
    batches = vector_batches(6, 4, 64)
    for batch in batches[:3]:
        for which, optimizer in ((0, left), (1, right)):
            sum(loss_of(both[which], batch) for both in pairs).backward()
            optimizer.step()
            optimizer.zero_grad()
    hetmem.release(pairs[0][1])
    for batch in batches[3:]:
        one(pairs[1][0], batch, left)
        one(pairs[1][1], batch, right)
    for plain, managed in pairs:
        assert_same_weights(plain, managed)
    assert_same_states(left, right)


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_graph_of_the_gradients_does_not_disturb_updates(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e9)
    for step, batch in enumerate(vector_batches(5, 4, 64)):
        for module, optimizer in ((plain, left), (managed, right)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of the cycle that this makes
                loss_of(module, batch).backward(create_graph=step == 3)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(plain, managed)
    assert_same_states(left, right)


class Frozen(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.detach())


class Recomputed(nn.Module):
    """A block that is computed once more within backward uses a weight whose gradient is complete by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.block = Frozen(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=False) @ self.weight


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_weight_that_is_used_again_within_backward(overlap: str, tmp_path: Path) -> None:
    """Either torch's bits or an error; never the new weights."""
    plain, managed = pair(Recomputed, "host", tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        try:
            one(managed, batch, right)
        except RuntimeError as error:
            assert "overlap" in str(error)  # noqa: PT017
            return
        one(plain, batch, left)
        assert_same_weights(plain, managed)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


@pytest.mark.parametrize("placement", STREAMED)
def test_states_of_a_single_number_are_undone_and_made_again(placement: str, tmp_path: Path) -> None:
    """They look like a step count."""
    plain, managed = pair(Scaled, placement, tmp_path)
    left = adamw(plain.parameters())
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="speculative", max_grad_norm=1e-2)
    for batch in vector_batches(5, 4, 64):
        loss_of(managed, batch).backward()
        right.step()
        right.zero_grad()
        loss_of(plain, batch).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1e-2 / (right.grad_norm + 1e-6))
        left.step()
        left.zero_grad()
        assert_same_states(left, right)
    assert_same_weights(plain, managed)


class Backwards(nn.Module):
    """Uses its layers in the opposite order, and keeps a view of each weight while `keeps` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.keeps = True
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
            self.kept += [layer.weight.detach()] if self.keeps else []
        return x


@pytest.mark.parametrize("placement", STREAMED)
def test_weights_stay_where_they_are_while_views_of_their_copies_are_held(placement: str, tmp_path: Path) -> None:
    """They traded places in the first step, and what the views had held was released as somebody else's."""
    plain, managed = pair(Backwards, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2)
    for batch in vector_batches(4, 4, 32):
        one(plain, batch, left)
        one(managed, batch, right)
        assert_same_weights(plain, managed)
        for module in (plain, managed):
            module.keeps = False
            module.kept.clear()


@pytest.mark.parametrize("placement", STREAMED)
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_the_norm_is_of_gradients_that_were_scaled_after_it_was_summed_up(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """By something that counts no version; nothing had been updated yet, but the sums of the backward were taken."""
    plain, managed = pair(mlp, placement, tmp_path)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e-2)
    for batch in vector_batches(4, 4, 64):
        plain.load_state_dict(managed.state_dict())
        for module in (plain, managed):
            module.zero_grad()
            loss_of(module, batch).backward()
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.data.mul_(0.5)
        norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        right.step()
        assert right.grad_norm == pytest.approx(norm, rel=1e-5)
