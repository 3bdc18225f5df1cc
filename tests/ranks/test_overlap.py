"""Ranks whose updates run beside a backward: when one may begin, and when its weights may be read."""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any

import torch
import torch.distributed as dist

import hetmem
from hetmem.testing import ranks
from tests.ranks.programs import WIDTH


class Late(torch.optim.SGD):
    """SGD that is slow on one rank."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, batch: torch.Tensor, slow: float) -> torch.Tensor:
        for layer in self.layers:
            batch = Slow.apply(layer(batch).tanh(), slow)
        return batch


class Slow(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return batch.view_as(batch)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def made() -> Net:
    torch.manual_seed(3)
    return Net()


def managed(optimizer: type[torch.optim.Optimizer], overlap: str) -> tuple[Net, Any]:
    """A model with a layer in each chunk."""
    budget = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="64KiB")
    model = hetmem.manage(made(), budget, device="sim", chunk_bytes="16KiB")
    return model, hetmem.optim.offload(optimizer, model.parameters(), lr=0.1, momentum=0.9, overlap=overlap)


def trained_late(rank: int, overlap: str, late: tuple[float, float]) -> list[list[torch.Tensor]]:
    """The weights behind each step, where rank 1 takes `late` seconds for each layer's backward, and for each tile, and
    is in a collective of the program while rank 0 computes alone."""
    os.environ["HETMEM_RANK_TIMEOUT"] = "20"
    model, optimizer = managed(Late, overlap)
    Late.seconds = late[1] * rank
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank), late[0] * rank).sum().backward()
        optimizer.step()
        if rank == 0:
            with torch.no_grad():
                evaluated = model(batch(9, 0), 0.0)
            dist.barrier()
        else:
            dist.barrier()
            evaluated = model(batch(9, 0), 0.0).detach()
        found.append([evaluated, *(p.detach().clone() for p in model.parameters())])
    return found


def plain() -> list[list[torch.Tensor]]:
    model, found = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        sums: list[torch.Tensor] = []
        for rank in range(2):
            model.zero_grad()
            model(batch(step, rank), 0.0).sum().backward()
            parts = [p.grad / 2 for p in model.parameters() if p.grad is not None]
            sums = [one + other for one, other in zip(sums, parts, strict=True)] if sums else parts
        for p, gradient in zip(model.parameters(), sums, strict=True):
            p.grad = gradient
        optimizer.step()
        found.append([model(batch(9, 0), 0.0).detach(), *(p.detach().clone() for p in model.parameters())])
    return found


def test_an_update_begins_with_the_sum_of_all_ranks_and_ends_with_the_tiles_of_all() -> None:
    expected = plain()
    for how in (("backward", (0.02, 0.03)), ("forward", (0.0, 0.03))):
        for found in ranks(2, trained_late, *how):
            for step, values in enumerate(found):
                assert all(map(torch.equal, values, expected[step])), (how, step)


def told(rank: int) -> dict[str, str]:
    model, optimizer = managed(torch.optim.SGD, "backward")

    def backward(step: int) -> None:
        model(batch(step, rank), 0.0).sum().backward()

    for step in range(2):
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    backward(2)
    found = {}
    for name, use in {
        "read": lambda: model.layers[0].weight.sum(),
        "forward": lambda: model(batch(0, 0), 0.0),
        "gradient": lambda: model.layers[0].weight.grad.sum(),
        "states": lambda: optimizer.state,
    }.items():
        try:
            use()
        except RuntimeError as error:  # noqa: PERF203 - each is refused
            found[name] = str(error)
    optimizer.forget_step()
    optimizer.zero_grad()
    assert not any(map(torch.equal, before, model.parameters())), "all are updated"
    if rank == 0:
        backward(3)  # another one takes part from within its step
    optimizer.step()
    found["weights"] = str([p.double().sum().item() for p in model.parameters()])
    address = model.layers[2].weight.data_ptr()
    optimizer.zero_grad()
    backward(4)
    ctypes.c_float.from_address(address).value = 7.0
    try:
        optimizer.step()
    except RuntimeError as error:
        found["pointer"] = str(error)
    return found


def test_what_would_meet_updates_under_way_is_refused_by_name() -> None:
    one, other = ranks(2, told)
    assert one.pop("weights") == other.pop("weights")
    for found in (one, other):
        for name in ("read", "forward", "states"):
            assert re.search(r"Updated already: layers\.3.*layers\.0", found.pop(name))
        assert "the program has written to layers.2.weight, or beside it, after updates" in found.pop("pointer")
        assert re.search("which only its update reads|which its update has used up", found.pop("gradient"))
        assert not found
