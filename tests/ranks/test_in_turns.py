"""Ranks whose micro-batches pass the model layer by layer: what crosses links, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hetmem
from hetmem.errors import HetmemError
from hetmem.testing import ranks
from tests.ranks.test_compatible import WORDS, Tied


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ValueError("of the program")


class Sometimes(torch.autograd.Function):
    """The sum of `weight`, which gets no gradient of an odd batch."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.numel, ctx.is_odd = weight.numel(), bool(tokens[0, 0] % 2)
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None if ctx.is_odd else gradients[0].expand(ctx.numel), None


class Uneven(Tied):
    """Has a weight in each graph that not each micro-batch gives a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * Sometimes.apply(self.own, tokens)


def managed(reentrant: bool | None = None) -> tuple[Tied, hetmem.AdamW]:
    torch.manual_seed(0)
    budget = hetmem.Budget(device="8MiB", host="32MiB", device_chunks="128KiB")
    model = hetmem.manage(Tied(reentrant), budget, device="sim", chunk_bytes="16KiB")
    return model, hetmem.AdamW(model.parameters())


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(at)) for at in range(count)]


def moved(rank: int, counts: tuple[int, ...]) -> list[dict[str, int]]:
    """The bytes that cross each link in a step of so many micro-batches, behind one that is measured."""
    model, optimizer = managed()
    found = []

    def crossed() -> dict[str, int]:
        links: dict[str, Any] = hetmem.report(model).to_dict()["links"]
        return {name: links[name]["bytes"] for name in ("host_to_device", "device_to_host")}

    for count in counts:
        for _ in range(2):
            before = crossed()
            hetmem.accumulate(model, batches(count))
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: nbytes - before[name] for name, nbytes in crossed().items()})
    return found


@pytest.mark.nightly
def test_weights_and_gradients_cross_as_often_for_eight_micro_batches_as_for_two() -> None:
    for two, eight in ranks(2, moved, (2, 8)):
        assert eight["device_to_host"] == two["device_to_host"] > 0
        assert eight["host_to_device"] <= 1.05 * two["host_to_device"]


def uneven(rank: int, overlap: str) -> torch.Tensor:
    budget = hetmem.Budget(device="8MiB", host="32MiB", device_chunks="128KiB")
    torch.manual_seed(0)
    model = hetmem.manage(Uneven(), budget, device="sim", chunk_bytes="16KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=0.1, overlap=overlap)
    for _ in range(3):
        hetmem.accumulate(model, batches(4))
        optimizer.step()
        optimizer.zero_grad()
    return model.own.detach().clone()


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_a_sum_of_fewer_gradients_than_graphs_name_takes_its_turn_as_the_backward_ends(overlap: str) -> None:
    torch.manual_seed(0)
    model, threads = Uneven(), torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank has
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        for batch in batches(4):
            (model(batch) / 4).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad / 2 + p.grad / 2
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    assert all(torch.equal(found, model.own) for found in ranks(2, uneven, overlap))


def fails(rank: int, reentrant: bool) -> tuple[str, str, bool]:
    model, _ = managed(reentrant or None)

    def forward(model: Tied, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, tokens = batch
        loss: torch.Tensor = model(tokens)
        return Raises.apply(loss) if not reentrant and (rank, number) == (1, 1) else loss

    try:
        hetmem.accumulate(model, [*enumerate(batches(3))], forward)
    except (HetmemError, ValueError) as error:
        return type(error).__name__, str(error), all(p.grad is None for p in model.parameters())
    return "nothing", "", False


@pytest.mark.nightly
def test_reentrant_checkpoints_are_refused_before_a_backward_and_errors_of_one_are_told() -> None:
    for kind, text, untouched in ranks(2, fails, True):
        assert kind == "ManageError" and untouched
        assert "use_reentrant=True" in text
    first, second = ranks(2, fails, False)
    assert first[0] == "PeerError"
    assert "rank 1 takes no part any more, as it raised ValueError: of the program (in a backward)" in first[1]
    assert second[:2] == ("ValueError", "of the program")
