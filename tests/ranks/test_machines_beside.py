"""What machines exchange while a backward goes on: how much, gradients that come late, and writes that differ."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.errors import PeerError
from hetmem.testing import around, ranks
from tests.ranks.programs import Program, loss_of

WIDTH = 64
PROGRAM = Program(words=512)
USES = [[(1, 0), (1, 0)], [(1, 0), (2, 0)], [(1, 0), (3, 0)], [(2, 0), (2, 1)], [(0, 0), (1, 1)]]
"""By backward and rank, how often weights are used: that of `often`, and that of `seldom`."""
BACKWARDS_A_STEP = 2


class Integers(nn.Module):
    """Weights whose gradients are sums of few small integers, exact in any order: what is lost, or there twice, shows.
    Each use has a checkpoint of its own, and so gives its weight a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, x: Tensor, often: int, seldom: int) -> Tensor:
        layers = [self.often] * often + [self.seldom] * seldom
        used = [checkpoint(layer, x * (at + 1), use_reentrant=True) for at, layer in enumerate(layers)]
        return sum(used, x).sum()


def integers(number: int, rank: int) -> tuple[Tensor, int, int]:
    made = torch.Generator().manual_seed(2 * number + rank)
    return torch.randint(-4, 5, (3, WIDTH), generator=made).float().requires_grad_(), *USES[number][rank]


def plain_gradients() -> list[dict[str, Tensor]]:
    model, found = Integers(), []
    for number in range(len(USES)):
        if number % BACKWARDS_A_STEP == 0:
            model.zero_grad()
        for rank in range(2):
            (model(*integers(number, rank)) / 2).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def everything(rank: int) -> dict[str, Any]:
    return {
        "beside": beside(),
        "late": late(rank),
        "written": [written(rank, "weight"), written(rank, "state")],
    }


def exchanged(model: nn.Module) -> dict[str, Any]:
    told = hetmem.report(model).to_dict()["ranks"]
    row = told["rows"][0]
    return {name: row[name] for name in ("network_bytes", "network_bytes_beside_backwards")}


def beside() -> list[dict[str, Any]]:
    """The bytes of the first backward and of two, the last layer of the second of which waits for half of them."""
    budget = hetmem.Budget(device="16MiB", host="64MiB", device_chunks="2MiB")
    model = hetmem.manage(PROGRAM.made(), budget, device="sim", chunk_bytes="64KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, PROGRAM.batch(0, 0, 0)).backward()
    found = [exchanged(model)]
    optimizer.step()
    optimizer.zero_grad()

    def wait(*_: object) -> None:
        until = time.monotonic() + 20
        while exchanged(model)["network_bytes_beside_backwards"] < found[0]["network_bytes"] / 2:
            assert time.monotonic() < until, "the exchange waits for the end of the backward"
            time.sleep(1e-3)

    model.blocks[0].register_full_backward_hook(wait)
    loss_of(model, PROGRAM.batch(0, 0, 0)).backward()
    found.append(exchanged(model))
    hetmem.release(model)
    return found


def managed(lr: float) -> tuple[nn.Module, hetmem.AdamW]:
    model = hetmem.manage(Integers(), hetmem.Budget(device="4MiB", host="16MiB"), device="sim", chunk_bytes="16KiB")
    return model, hetmem.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def late(rank: int) -> list[dict[str, Tensor]]:
    model, optimizer = managed(0.0)
    found = []
    for number in range(len(USES)):
        if number % BACKWARDS_A_STEP == 0:
            optimizer.zero_grad()
        x, often, seldom = integers(number, rank)
        if often or seldom:
            model(x, often, seldom).backward()
        if rank == 0:
            optimizer.state_dict()  # as a save does, which the first machine makes alone
        if number % BACKWARDS_A_STEP == 1 or number == len(USES) - 1:
            optimizer.step()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    hetmem.release(model)
    return found


def written(rank: int, what: str) -> str:
    model, optimizer = managed(1e-2)
    weight = model.often.weight
    for step in range(2):
        with torch.no_grad():
            weight[0, 0] = 0.5
            if step and what == "weight":
                weight[5, 3] = rank
            if step and what == "state" and rank:
                optimizer.state[weight]["exp_avg"].mul_(2)
        try:
            model(*integers(0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        except PeerError as error:
            return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return ranks(2, everything, machines=2)


def test_half_of_what_machines_exchange_crosses_while_a_backward_goes_on(found: list[dict[str, Any]]) -> None:
    """From the second backward on: in the first it is not known how many gradients come."""
    for first, both in (each["beside"] for each in found):
        assert first["network_bytes"] > 100_000
        assert first["network_bytes_beside_backwards"] == 0
        assert both["network_bytes"] == 2 * first["network_bytes"]
        assert first["network_bytes"] / 2 <= both["network_bytes_beside_backwards"] < first["network_bytes"]


def test_gradients_that_come_late_are_in_the_sums_once(found: list[dict[str, Any]]) -> None:
    """On one machine or both; of a weight that no backward has used before; beside gradients from before."""
    expected = plain_gradients()
    for each in found:
        for number, (gradients, plain) in enumerate(zip(each["late"], expected, strict=True)):
            if number == len(USES) - 1 or number % BACKWARDS_A_STEP == 1:
                assert gradients.keys() == plain.keys(), number
                for name, gradient in gradients.items():
                    assert torch.equal(gradient, plain[name]), (number, name)


def test_writes_that_differ_between_machines_are_an_error_that_names_the_parameter(found: list[dict[str, Any]]) -> None:
    for each in found:
        for name, told in zip(("", ", its exp_avg"), each["written"], strict=True):
            assert told.startswith(
                f"the program has written other values to often.weight{name} on machine machine 1 than on "
                f"machine machine 0, or on one of them only"
            )


LAYERS, BACKWARD_SECONDS = 24, 1.6


class Naps(nn.Module):
    """Layers of 256 KiB, one to a chunk, whose backwards take time, and no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda gradient: time.sleep(BACKWARD_SECONDS / LAYERS))
        return x.sum()


def naps(rank: int) -> tuple[float, ...]:
    """Seconds of a step without a network, of a network that takes half of that, and of a step with it, medians; and
    the part of bytes that crossed beside backwards."""
    model = hetmem.manage(Naps(), hetmem.Budget(device="16MiB", host="32MiB"), device="sim", chunk_bytes="256KiB")
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-3)
    rates = [float("inf")]

    def crosses(original: Any, machines: Any, mine: Tensor, what: str) -> Tensor:
        found = original(machines, mine, what)
        time.sleep(mine.nbytes / rates[0])
        return found

    def step() -> float:
        began = time.monotonic()
        model(torch.ones(1, 256)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.monotonic() - began

    def median() -> float:
        return statistics.median(step() for _ in range(3))

    with around("exchange with machines", crosses):
        step()
        first = exchanged(model)
        alone = median()
        network = alone / 2
        rates[0] = first["network_bytes"] / network
        before = exchanged(model)
        seconds = median()
        all_bytes, beside = (value - before[name] for name, value in exchanged(model).items())
    hetmem.release(model)
    return alone, network, seconds, beside / all_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("ranks_a_machine", [1, 2])
def test_a_backward_hides_the_network(ranks_a_machine: int) -> None:
    """A simulated network that takes half as long as a step without it."""
    found = ranks(2 * ranks_a_machine, naps, machines=2)
    alone, network, seconds, beside = (max(each[at] for each in found) for at in range(4))
    assert beside >= 0.5
    assert seconds <= 1.10 * max(alone, network), f"{alone:.3f} s alone, network {network:.3f}, step {seconds:.3f}"
