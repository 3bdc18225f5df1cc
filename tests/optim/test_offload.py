"""`hetmem.optim.offload`: torch's own optimizers, tile by tile, with torch's bits; the others are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import BudgetError
from tests.engine.harness import (
    CHUNK,
    PLACEMENTS,
    Recipe,
    Tower,
    assert_same_states,
    assert_same_weights,
    budget,
    loss_of,
    manage,
    mlp,
    nvme_bytes,
    pair,
    token_batches,
    train_both,
    vector_batches,
)
from tests.pairs import mostly

BF16 = torch.bfloat16
ELEMENTWISE: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.Rprop, {"lr": 1e-2}),
    (torch.optim.ASGD, {"lr": 1e-2}),
]
KINDS = {"-".join([kind.__name__, *options]): (kind, options) for kind, options in ELEMENTWISE}


@pytest.mark.parametrize(("kind", "placement"), mostly(KINDS, PLACEMENTS))
def test_the_bits_are_those_of_torch(kind: str, placement: str, tmp_path: Path) -> None:
    optimizer, options = KINDS[kind]
    room: Any = placement
    if placement == "nvme":  # five slots of staging: three states beside parameter and gradient
        room = budget("nvme", tmp_path, host="320KiB", device_chunks="64KiB")
    plain, managed = pair(mlp, room, tmp_path)
    optimizers = (
        optimizer(plain.parameters(), **options),
        hetmem.optim.offload(optimizer, managed.parameters(), **options),
    )
    train_both(plain, managed, vector_batches(4, 4, 64), Recipe(steps=4), optimizers=optimizers)


def test_a_third_state_that_host_memory_has_no_room_for_goes_to_nvme(tmp_path: Path) -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))

    of_adamw, staging = 4 * 9 * CHUNK, 5 * CHUNK  # a chunk for each weight
    room = budget("nvme", tmp_path, host=of_adamw + staging, device_chunks="64KiB")
    plain, managed = pair(deep, room, tmp_path)
    optimizers = (
        torch.optim.AdamW(plain.parameters(), amsgrad=True),
        hetmem.optim.offload(torch.optim.AdamW, managed.parameters(), amsgrad=True),
    )
    train_both(plain, managed, vector_batches(3, 4, 64), Recipe(steps=3), optimizers=optimizers)
    assert nvme_bytes(managed) > 0


def test_a_third_state_does_not_go_to_nvme_where_there_is_no_staging(tmp_path: Path) -> None:
    """Activations that move opened the drive. An update of what lay there would wait for staging without end."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))
    room = budget("nvme", tmp_path, host=4 * 9 * CHUNK + 2 * CHUNK, device_chunks="64KiB")
    managed = hetmem.manage(module, room, chunk_bytes=CHUNK, activations="auto")
    with pytest.raises(
        BudgetError, match=r"are missing; hetmem.manage .* set none aside .* raise Budget\(host=…\) to 720"
    ):
        hetmem.optim.offload(torch.optim.AdamW, managed.parameters(), amsgrad=True)


@pytest.mark.parametrize("frozen_first", [True, False], ids=["frozen, then managed", "managed, then frozen"])
def test_a_weight_that_trains_later_has_a_place_where_manage_saw_it_train(frozen_first: bool, tmp_path: Path) -> None:
    """Gradual unfreezing, with room in host memory for the states of the half that trains first."""

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    room = budget("nvme", tmp_path, host=(4 * 4 + 4 + 1) * CHUNK, device_chunks="64KiB")
    plain, module = deep(), deep()
    module.load_state_dict(plain.state_dict())
    module[:4].requires_grad_(not frozen_first)
    managed = hetmem.manage(module, room, chunk_bytes=CHUNK)
    for model in (plain, managed):
        model[:4].requires_grad_(False)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(managed.parameters())

    def step() -> None:
        for model, optimizer in zip((plain, managed), optimizers, strict=True):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    for model in (plain, managed):
        model[:4].requires_grad_(True)
    if frozen_first:
        with pytest.raises(BudgetError, match="call it before weights are frozen that train later"):
            step()
    else:
        step()
        assert_same_weights(plain, managed)


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
def test_momentum_in_groups_of_different_options_equals_torch(
    overlap: str, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    """One group has no state at all, so that chunks have parameters with and without one."""
    plain, managed = pair(Tower, placement, tmp_path, mixed_precision=mixed)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        parameters = list(module.parameters())
        return [
            {"params": parameters[::2], "momentum": 0.9, "weight_decay": 0.1},
            {"params": parameters[1::2], "lr": 0.05},
        ]

    optimizers = (
        torch.optim.SGD(groups(plain), lr=0.1),
        hetmem.optim.offload(torch.optim.SGD, groups(managed), lr=0.1, overlap=overlap),
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    for batch in token_batches(4):
        train_both(plain, managed, [batch], Recipe(steps=1, mixed=mixed), optimizers=optimizers)
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tensors_of_many_tiles_equal_torch(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetmem.cpu.workers.TILE_ELEMENTS", 1024)
    plain, managed = pair(mlp, placement, tmp_path)
    optimizers = (
        torch.optim.NAdam(plain.parameters(), lr=1e-2),
        hetmem.optim.offload(torch.optim.NAdam, managed.parameters(), lr=1e-2),
    )
    train_both(plain, managed, vector_batches(3, 4, 64), Recipe(steps=3), optimizers=optimizers)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_checkpoints_interchange_with_torch(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    options = {"lr": 0.1, "momentum": 0.9}
    left = torch.optim.SGD(plain.parameters(), **options)
    right = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), **options)
    right.load_state_dict(left.state_dict())  # momentum_buffer is not there yet
    train_both(plain, managed, vector_batches(2, 4, 64), Recipe(steps=2), optimizers=(left, right))
    saved = copy.deepcopy((left.state_dict(), right.state_dict()))  # torch takes tensors over as they are
    left.load_state_dict(saved[1])
    right.load_state_dict(saved[0])
    train_both(plain, managed, vector_batches(2, 4, 64), Recipe(steps=2), optimizers=(left, right))
    assert_same_states(left, right)
    assert_same_weights(plain, managed)


class Normalised(torch.optim.SGD):
    """Divides each gradient by its norm: not elementwise, though its states look as if it were."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / parameter.grad.norm()
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.Muon, "matrices"),
        (torch.optim.Adafactor, "not elementwise: its state 'row_var'"),
        (torch.optim.SparseAdam, "dense gradients"),
        (Normalised, "not elementwise: the update of an element depends on others"),
    ],
)
def test_what_is_not_elementwise_is_refused_with_the_reason(
    optimizer: type[torch.optim.Optimizer], reason: str, tmp_path: Path
) -> None:
    module = manage(nn.Sequential(nn.Linear(64, 64, bias=False)), "host", tmp_path)
    with pytest.raises(hetmem.errors.ManageError, match=reason):
        hetmem.optim.offload(optimizer, module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "options", "error", "match"),
    [
        (torch.optim.SGD, {"lr": -1.0}, ValueError, "Invalid learning rate"),
        (torch.optim.SGD, {"learning_rate": 1.0}, TypeError, "learning_rate"),
        (torch.optim.Adam, {"fused": True}, ValueError, "tile by tile"),
        (torch.nn.Linear, {}, ValueError, r"torch\.optim\.SGD"),
        (hetmem.AdamW, {}, ValueError, "call it directly"),
    ],
)
def test_bad_options_are_refused(
    optimizer: Any, options: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    module = manage(mlp(), "host", tmp_path)
    with pytest.raises(error, match=match):
        hetmem.optim.offload(optimizer, module.parameters(), **options)


def test_parameters_that_are_not_managed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hetmem.errors.ManageError, match="not managed"):
        hetmem.optim.offload(torch.optim.SGD, mlp().parameters(), lr=0.1)


@pytest.mark.parametrize("placement", ["host", "resident"])
def test_clipping_does_not_round_wide_gradients(placement: str, tmp_path: Path) -> None:
    """Gradients in float64 were rounded to float32 where a factor was applied."""
    plain, managed = pair(lambda: mlp().double(), placement, tmp_path, chunk_bytes=2 * CHUNK)
    left = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    right = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, max_grad_norm=1e-3)
    batch = vector_batches(1, 4, 64, dtype=torch.float64)[0]
    for module in (plain, managed):
        loss_of(module, batch).backward()
    right.step()
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(min(1e-3 / ((right.grad_norm or 0.0) + 1e-6), 1.0))
    left.step()
    assert_same_weights(plain, managed)
