"""Random programs on several ranks, against plain torch that runs the batches of all ranks one after the other.

Ranks use other experts, run other numbers of forwards and backwards, evaluate, read and save alone, and write alike;
each sleeps at random where it tells the others something, and of some programs a rank is stopped for a while. A failure
names its seed: `--programs SEED:SEED+1`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from hetmem.testing import norm, ranks
from tests.ranks.programs import difference, values
from tests.ranks.test_failures import stops

WORDS, WIDTH, EXPERTS = 50, 32, 4


class Experts(nn.Module):
    """Tied embeddings, a frozen layer, and experts of which each forward has some."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.frozen, self.norm = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, path: tuple[int, ...], *, recomputes: bool) -> Tensor:
        hidden = self.words(tokens)
        for number in path:
            expert = self.experts[number]
            hidden = hidden + (checkpoint(expert, hidden, use_reentrant=False) if recomputes else expert(hidden))
        return self.frozen(self.norm(hidden)) @ self.words.weight.T


@dataclass(frozen=True)
class Forward:
    """A forward over a batch of its own, and its loss."""

    batch: int
    path: tuple[int, ...]
    recomputes: bool

    def __call__(self, model: nn.Module) -> Tensor:
        made = torch.Generator().manual_seed(self.batch)
        tokens = torch.randint(WORDS, (1 + self.batch % 3, 7), generator=made)
        logits = model(tokens[:, :-1], self.path, recomputes=self.recomputes)
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Step:
    """What each rank does in a step: for each of its backwards the forwards whose losses are added, and what it does
    after each."""

    clears: str
    write: str
    backwards: list[list[list[Forward]]]
    alone: list[list[str]]
    evaluates: list[Forward | None]


@dataclass(frozen=True)
class Plan:
    """A program of `count` ranks, drawn from `seed`."""

    seed: int
    count: int
    mixed: torch.dtype | None
    max_grad_norm: float | None
    device_chunks: int
    delays: float
    overlap: Literal["off", "backward", "forward"]
    """With overlap nobody sees gradients, and each step has as many backwards as the first: over the same experts, but
    where these are one for a rank."""
    stops_at: int | None = None
    """At which of the calls that `delays` sees the last rank is stopped."""
    steps: list[Step] = field(default_factory=list)

    @staticmethod
    def drawn(seed: int) -> Plan:
        draw = random.Random(seed)
        count = draw.choice((2, 2, 3))
        plan = Plan(
            seed,
            count,
            draw.choice((None, None, torch.bfloat16)),
            draw.choice((None, 0.3)),
            draw.choice((64, 160)) << 10,
            draw.choice((0.0, 0.02, 0.2)),
            draw.choice(("off", "off", "backward", "forward")),
            random.Random(-seed).randint(1, 600) if seed % 3 == 1 else None,
        )
        off = plan.overlap == "off"
        forwards = (1, 1, 2) if plan.mixed is None else (1,)  # 16-bit gradients of several are not one sum
        backwards: list[list[list[Forward]]] = []
        for _ in range(draw.randint(2, 4)):
            even = draw.random() < 0.5
            number = draw.randint(0, 2)
            numbers = [number if even else draw.randint(0, 2) for _ in range(count)]
            if off or not backwards:
                backwards = [
                    [[_forward(draw) for _ in range(draw.choice(forwards))] for _ in range(n)] for n in numbers
                ]
            elif max(map(len, backwards)) == 1:
                backwards = [[[_forward(draw)] for _ in of_rank] for of_rank in backwards]
            numbers = [*map(len, backwards)]
            plan.steps.append(
                Step(
                    draw.choice(("none", "none", "zeros", *(["keep"] if off else []))),
                    draw.choice(
                        ("", "", "weights", "states", "numpy", *(["gradients", "clip"] if even and off else []))
                    ),
                    backwards,
                    [
                        [draw.choice(("", "", "gradients", "state_dict", "save")) * off for _ in range(n)]
                        for n in numbers
                    ],
                    [_forward(draw) if draw.random() < 0.3 else None for _ in range(count)],
                )
            )
        return plan


def _forward(draw: random.Random) -> Forward:
    path = tuple(draw.sample(range(EXPERTS), draw.randint(0, 3)))
    return Forward(draw.randrange(10**6), path, draw.random() < 0.3)


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Experts()


@torch.no_grad()
def write(kind: str, place: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write to what `kind` says, at its `place` of a step, as all ranks do alike."""
    weight = model.experts[1][0].weight
    if place == "before" and kind == "weights":
        for p in model.parameters():
            p.mul_(0.97)
    elif place == "before" and kind == "numpy":
        weight.detach().numpy()[2] = 0.125
    elif place == "before" and kind == "states" and weight in optimizer.state and optimizer.state[weight]:
        optimizer.state[weight]["exp_avg"].mul_(0.5)
    elif place == "after" and kind == "gradients":
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 0.5
    elif place == "after" and kind == "clip":
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.2)


@torch.no_grad()
def evaluated(step: Step, rank: int, model: nn.Module) -> dict[str, Tensor]:
    evaluates = step.evaluates[rank]
    return {} if evaluates is None else {"evaluation": evaluates(model)}


def clear(step: Step, optimizer: torch.optim.Optimizer) -> None:
    if step.clears != "keep":
        optimizer.zero_grad(set_to_none=step.clears == "none")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---- ranks -----------------------------------------------------------------------------------------------------


@contextmanager
def delays(seed: int, share: float, stops_at: int | None) -> Iterator[None]:
    """Sleep for up to 3 ms at so large a share of what is told to other ranks, of transfers and of tasks; at the call
    `stops_at` the whole process is stopped for longer than ranks wait until a circle of waits is an error."""
    draw, calls = random.Random(seed), count(1)

    def instead(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if next(calls) == stops_at:
            stops()
        if draw.random() < share:
            time.sleep(draw.uniform(0.0, 0.003))
        return original(*args, **named)

    with ExitStack() as stack:
        for point in (
            "tell other ranks",
            "come to a meeting",
            "pass a turn",
            "offer an update",
            "count an update",
            "send a gradient",
            "gradient is home",
            "tasks that sum",
            "tasks that update",
            "take an end",
        ):
            stack.enter_context(testing.around(point, instead))
        yield


def trained(rank: int, seeds: list[int], folder: str) -> dict[int, list[dict[str, Tensor]]]:
    return {seed: _trained(rank, Plan.drawn(seed), folder) for seed in seeds}


def _trained(rank: int, plan: Plan, folder: str) -> list[dict[str, Tensor]]:
    model = made(plan.seed + rank)  # the values of rank 0 count
    budget = hetmem.Budget(device="4MiB", host="16MiB", device_chunks=plan.device_chunks)
    hetmem.manage(model, budget, device="sim", chunk_bytes="16KiB", mixed_precision=plan.mixed)
    options: dict[str, Any] = {} if plan.max_grad_norm is None else {"max_grad_norm": plan.max_grad_norm}
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2, overlap=plan.overlap, **options)
    found: list[dict[str, Tensor]] = []
    with delays(plan.seed + rank, plan.delays, plan.stops_at if rank == plan.count - 1 else None):
        for step in plan.steps:
            clear(step, optimizer)
            write(step.write, "before", model, optimizer)
            seen: dict[str, Tensor] = {}
            for number, forwards in enumerate(step.backwards[rank]):
                losses = [forward(model) for forward in forwards]
                torch.stack(losses).sum().backward()
                seen[f"loss {number}"] = torch.stack(losses).detach()
                alone = step.alone[rank][number]
                if alone == "gradients":
                    seen |= {f"{name} {number}": value for name, value in gradients(model).items()}
                elif alone == "state_dict":
                    seen |= {f"{name} {number}": value.clone() for name, value in model.state_dict().items()}
                elif alone == "save" and rank == 0:
                    hetmem.save(f"{folder}/{plan.seed}", model)
            if plan.overlap == "off":
                seen |= evaluated(step, rank, model)
            write(step.write, "after", model, optimizer)
            optimizer.step()
            if plan.overlap != "off":
                seen |= evaluated(step, rank, model)
                optimizer.zero_grad()
            found.append(seen | values(model, optimizer))
    hetmem.release(model)
    return found


# ---- plain torch -----------------------------------------------------------------------------------------------


def expected(plan: Plan) -> list[list[dict[str, Tensor]]]:
    """By rank, what `_trained` finds."""
    model, computes = made(plan.seed), made(plan.seed)
    if plan.mixed is not None:
        computes.to(plan.mixed)
    pairs = [*zip(model.parameters(), computes.parameters(), strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found: list[list[dict[str, Tensor]]] = [[] for _ in range(plan.count)]
    for step in plan.steps:
        clear(step, optimizer)
        write(step.write, "before", model, optimizer)
        for p, used in pairs:
            used.data.copy_(p.data)
        seen: list[dict[str, Tensor]] = [{} for _ in range(plan.count)]
        for number in range(max(map(len, step.backwards))):
            of_ranks = [rank for rank in range(plan.count) if number < len(step.backwards[rank])]
            for rank in of_ranks:
                _backward(step.backwards[rank][number], pairs, computes, plan.count, seen[rank], number)
            for rank in of_ranks:
                if step.alone[rank][number] == "gradients":
                    seen[rank] |= {f"{name} {number}": value for name, value in gradients(model).items()}
                elif step.alone[rank][number] == "state_dict":
                    seen[rank] |= {f"{name} {number}": value.clone() for name, value in model.state_dict().items()}
        if plan.overlap == "off":
            seen = [each | evaluated(step, rank, computes) for rank, each in enumerate(seen)]
        write(step.write, "after", model, optimizer)
        _step(plan, model, optimizer)
        if plan.overlap != "off":
            for p, used in pairs:
                used.data.copy_(p.data)
            seen = [each | evaluated(step, rank, computes) for rank, each in enumerate(seen)]
            optimizer.zero_grad()
        for rank in range(plan.count):
            found[rank].append(seen[rank] | values(model, optimizer))
    return found


def _backward(
    forwards: list[Forward],
    pairs: list[tuple[nn.Parameter, nn.Parameter]],
    computes: nn.Module,
    count: int,
    seen: dict[str, Tensor],
    number: int,
) -> None:
    for _, used in pairs:
        used.grad = None
    losses = [forward(computes) for forward in forwards]
    torch.stack(losses).sum().backward()
    seen[f"loss {number}"] = torch.stack(losses).detach()
    for p, used in pairs:
        if used.grad is not None:
            part = used.grad.float() / count
            p.grad = part if p.grad is None else p.grad + part


def _step(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients that are clipped as `hetmem.AdamW` does, and left as they are."""
    shown = {p: p.grad for p in model.parameters() if p.grad is not None}
    scale = 1.0
    if plan.max_grad_norm is not None and shown:
        of_all = norm([gradient.flatten() for gradient in shown.values()])
        scale = min(1.0, plan.max_grad_norm / (of_all + 1e-6))
    for p, gradient in shown.items():
        p.grad = gradient * torch.tensor(scale)
    optimizer.step()
    for p, gradient in shown.items():
        p.grad = gradient


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, _, last = metafunc.config.getoption("--programs").partition(":")
    every = 1 if metafunc.config.getoption("--all-cases") else 3
    metafunc.parametrize("seeds", [range(int(first), int(last), every)], ids=[f"{first}:{last}"])


def test_ranks_have_the_bits_of_plain_torch(seeds: range, tmp_path: Path) -> None:
    plans = [Plan.drawn(seed) for seed in seeds]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for count in sorted({plan.count for plan in plans}):
            chosen = [plan for plan in plans if plan.count == count]
            of_them = [plan.seed for plan in chosen]
            found = ranks(count, trained, of_them, str(tmp_path), seconds=60.0 + 10.0 * len(chosen))
            for plan in chosen:
                check(plan, [of_rank[plan.seed] for of_rank in found])
    finally:
        torch.set_num_threads(threads)


def check(plan: Plan, found: list[list[dict[str, Tensor]]]) -> None:
    for rank, wanted in enumerate(expected(plan)):
        for number, (one, other) in enumerate(zip(found[rank], wanted, strict=True)):
            assert difference(one, other) == [], (f"seed {plan.seed}, rank {rank}, step {number}", plan)
