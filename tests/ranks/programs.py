"""What ranks run in tests: programs that train, and plain torch that runs the batches of all ranks in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.testing import norm
from tests.pairs import every_two_meet

WIDTH = 64


class Block(nn.Module):
    """What a block of a GPT has beside attention, which takes a rank twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm2(hidden + self.linear2(gelu(self.linear1(self.norm1(hidden)))))


class GPT(nn.Module):
    """Tied embeddings, a frozen layer, a weight that no forward uses, and a layer that only odd batches use."""

    def __init__(self, words: int, *, recomputes: bool, adapts: bool = False) -> None:
        """`adapts`: adapters behind blocks, all of whose matrices are frozen."""
        super().__init__()
        self.recomputes = recomputes
        self.words = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].linear1.requires_grad_(False)
        self.unused, self.odd = nn.Linear(7, 3), nn.Linear(WIDTH, WIDTH)
        made = (nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH)) for _ in self.blocks)
        self.adapters = nn.ModuleList(made if adapts else ())
        for p in self.blocks.parameters() if adapts else ():
            p.requires_grad_(p.dim() < 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block, adapter in zip_longest(self.blocks, self.adapters):
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
            hidden = hidden if adapter is None else hidden + adapter(hidden)
        if tokens[0, 0] % 2:
            hidden = self.odd(hidden)
        return hidden @ self.words.weight.T


_ADAMW = partial(torch.optim.AdamW, fused=True)


@dataclass(frozen=True)
class Writes:
    """A `place` in a program, which writes to `model` and `optimizer` there."""

    place: str
    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Program:
    """A way to train, in `steps` of `micro` backwards each, or of fewer on some ranks in each step (`uneven`), which
    evaluate meanwhile. `in_turns`: the backwards of a step are of micro-batches in turns."""

    words: int = 1030
    recomputes: bool = False
    adapts: bool = False
    chunk_bytes: str = "256KiB"
    device_chunks: str = "2MiB"
    steps: int = 3
    micro: int = 1
    uneven: bool = False
    in_turns: bool = False
    mixed: torch.dtype | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = _ADAMW
    ours: Callable[..., torch.optim.Optimizer] = hetmem.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    managed: dict[str, Any] = field(default_factory=dict)
    device: str = "sim"
    in_one_process: bool = False
    """Compared with hetmem in one process, not with plain torch."""
    overlap: str = "off"
    """Other modes show no gradients."""
    max_grad_norm: float | None = None
    loss_scale: float = 1.0
    writes: Callable[[Writes], None] | None = None
    """Called with what the program may write to, at several places."""

    def made(self) -> GPT:
        torch.manual_seed(5)
        return GPT(self.words, recomputes=self.recomputes, adapts=self.adapts)

    def batch(self, step: int, rank: int, micro: int) -> Tensor:
        made = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
        tokens = torch.randint(self.words, (2, 12), generator=made)
        return tokens if self.device == "sim" else tokens.to(self.device)

    def backwards(self, step: int, rank: int) -> int:
        return (rank + step) % (self.micro + 1) if self.uneven else self.micro

    def trained(self, rank: int) -> dict[str, Tensor]:
        """What one rank of a group finds: losses, norms, and in the end all weights, gradients and states."""
        torch.manual_seed(rank)
        model = self.made()
        with torch.no_grad():
            for p in model.parameters():
                p += rank  # the values of rank 0 count
        return self._trained(model, [rank])[0]

    def expected(self, ranks: int) -> list[dict[str, Tensor]]:
        return self.alone(ranks) if self.in_one_process else self.plain(ranks)

    def alone(self, ranks: int) -> list[dict[str, Tensor]]:
        """By rank, what `trained` finds: of one process that runs the batches of two or four ranks in turn."""
        model = self.made()
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(lambda gradient: gradient / ranks)
        return self._trained(model, [*range(ranks)])

    def _trained(self, model: GPT, runs: list[int]) -> list[dict[str, Tensor]]:
        """What each of `runs`, ranks that this process runs, finds."""
        room = "16MiB" if self.device == "sim" else torch.cuda.memory_allocated() + (40 << 20)
        budget = hetmem.Budget(device=room, host="64MiB", device_chunks=self.device_chunks)
        hetmem.manage(
            model, budget, device=self.device, chunk_bytes=self.chunk_bytes, mixed_precision=self.mixed, **self.managed
        )
        clip: dict[str, Any] = {} if self.max_grad_norm is None else {"max_grad_norm": self.max_grad_norm}
        scale = {} if self.loss_scale == 1 else {"loss_scale": self.loss_scale}
        overlap = {} if self.ours is _ADAMW else {"overlap": self.overlap}
        optimizer: Any = self.ours(model.parameters(), lr=1e-2, **self.options, **clip, **scale, **overlap)
        found: dict[str, Tensor] = {}
        of_ranks: list[dict[str, Tensor]] = [{} for _ in runs]
        for step in range(self.steps):
            optimizer.zero_grad(set_to_none=self.writes is None)
            rank, losses = runs[0], []
            self.write("a forward follows", step, model, optimizer)
            if self.in_turns:
                batches = [self.batch(step, rank, micro) for micro in range(self.backwards(step, rank))]
                losses = [loss.item() for loss in hetmem.accumulate(model, batches, loss_of)]
                self.write("a backward has ended", step, model, optimizer)
            for micro in range(0 if self.in_turns else self.backwards(step, rank)):
                loss = loss_of(model, self.batch(step, rank, micro))
                (optimizer.scale(loss) if scale else loss).backward()
                losses.append(loss.item())
                for each, of_rank in zip(runs[1:], of_ranks[1:], strict=True):
                    loss = loss_of(model, self.batch(step, each, micro))
                    (optimizer.scale(loss) if scale else loss).backward()
                    so_far = of_rank.get(f"losses {step}", torch.empty(0))
                    of_rank[f"losses {step}"] = torch.cat([so_far, torch.tensor([loss.item()])])
                self.write("a backward has ended", step, model, optimizer)
            if self.uneven and rank % 2:
                with torch.no_grad():
                    loss_of(model, self.batch(step, rank, self.micro))
            self.write("a step follows", step, model, optimizer)
            optimizer.step()
            found[f"losses {step}"] = torch.tensor(losses)
            if clip:
                found[f"norm {step}"] = torch.tensor(optimizer.grad_norm)
        if self.overlap != "off":
            optimizer.zero_grad()
        found |= values(model, optimizer)
        for name in found:
            if name.endswith(".grad"):
                found[name] /= self.loss_scale
        hetmem.release(model)
        return [found | of_rank for of_rank in of_ranks]

    def write(self, place: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.writes is not None:
            self.writes(Writes(place, step, model, optimizer))

    def plain(self, ranks: int, machines: int = 1) -> list[dict[str, Tensor]]:
        """By rank, what `trained` finds: of plain torch, in which the batches of all ranks come one after the other,
        and the gradients of each machine are added before those of all are."""
        model = self.made()
        computes = model if self.mixed is None else copy.deepcopy(model).to(self.mixed)
        pairs = [*zip(model.parameters(), computes.parameters(), strict=True)]
        optimizer = self.optimizer(model.parameters(), lr=1e-2, **self.options)
        found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        for step in range(self.steps):
            optimizer.zero_grad(set_to_none=self.writes is None)
            self.write("a forward follows", step, model, optimizer)
            given = {p: p.grad for p in model.parameters() if p.grad is not None}
            losses: list[list[float]] = [[] for _ in range(ranks)]
            sums: dict[Tensor, Tensor] = given
            for backward in [range(self.micro)] if self.in_turns else [range(at, at + 1) for at in range(self.micro)]:
                others: list[dict[Tensor, Tensor]] = [{} for _ in range(machines)]
                for rank in range(ranks):
                    of_rank: dict[Tensor, Tensor] = {}
                    for micro in (micro for micro in backward if micro < self.backwards(step, rank)):
                        for p, used in pairs:
                            used.data.copy_(p.data)
                            used.grad = None
                        loss = loss_of(computes, self.batch(step, rank, micro))
                        loss.backward()
                        losses[rank].append(loss.item())
                        for p, used in pairs:
                            if used.grad is not None:
                                part = used.grad.float()
                                of_rank[p] = of_rank[p] + part if p in of_rank else part
                    of_machine = sums if rank * machines < ranks else others[rank * machines // ranks]
                    for p, part in of_rank.items():
                        of_machine[p] = of_machine[p] + part / ranks if p in of_machine else part / ranks
                for p, part in ((p, part) for each in others for p, part in each.items()):
                    sums[p] = sums[p] + part if p in sums else part
                for p, _ in pairs:
                    p.grad = sums.get(p)
                self.write("a backward has ended", step, model, optimizer)
            self.write("a step follows", step, model, optimizer)
            sums = {p: p.grad for p, _ in pairs if p.grad is not None}
            scale = 1.0
            if self.max_grad_norm is not None:
                scale = self._clip([*sums.values()], found, step)
            shown = {p: gradient.clone() for p, gradient in sums.items()}
            for gradient in sums.values():
                gradient *= torch.tensor(scale, dtype=torch.float32)
            optimizer.step()
            for p in model.parameters():
                p.grad = shown.get(p)
            for rank in range(ranks):
                found[rank][f"losses {step}"] = torch.tensor(losses[rank])
        if self.overlap != "off":
            optimizer.zero_grad()
        return [each | values(model, optimizer) for each in found]

    def _clip(self, gradients: list[Tensor], found: list[dict[str, Tensor]], step: int) -> float:
        """The factor of `max_grad_norm`, as one process computes it; its bits are those of `hetmem.testing.norm`."""
        of_all = norm([gradient.flatten() for gradient in gradients])
        for each in found:
            each[f"norm {step}"] = torch.tensor(of_all)
        assert self.max_grad_norm is not None
        return min(1.0, self.max_grad_norm / (of_all + 1e-6))


@torch.no_grad()
def writes_everywhere(at: Writes) -> None:
    """Write to weights, gradients and states in the ways that programs do."""
    model, optimizer = at.model, at.optimizer
    weight = model.blocks[0].linear2.weight
    if (at.step, at.place) == (0, "a backward has ended"):
        model.words.weight.grad *= 0.5
    elif at.place == "a step follows":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif (at.step, at.place) == (1, "a forward follows"):
        for p in model.parameters():
            p.mul_(0.99)
        weight.detach().numpy()[3] = 0.25
        model.blocks[2].linear1.weight.data = torch.full_like(weight.T, 0.01).contiguous()
        model.blocks[2].load_state_dict({n: v + 0.001 for n, v in model.blocks[2].state_dict().items()})
    elif (at.step, at.place) == (2, "a forward follows"):
        states = copy.deepcopy(optimizer.state_dict())
        for entry in states["state"].values():
            entry["exp_avg"] *= 0.5
        optimizer.load_state_dict(states)
    if (at.step, at.place) == (2, "a step follows"):
        optimizer.state[weight]["exp_avg_sq"].mul_(2)
        model.blocks[0].norm1.weight.grad = torch.full((WIDTH,), 0.125)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all weights, gradients and states."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        if p.grad is not None:
            found[f"{name}.grad"] = p.grad.clone()
        for state, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{state}"] = value.clone()
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of what differs."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


PROGRAMS = {
    "float32": Program(),
    "clipped, in two micro-batches": Program(micro=2, max_grad_norm=0.5, steps=2),
    "other numbers of backwards": Program(micro=2, uneven=True, max_grad_norm=0.5),
    "writes": Program(micro=2, writes=writes_everywhere),
    "writes beside 16-bit copies": Program(micro=2, writes=writes_everywhere, mixed=torch.bfloat16),
    "an optimizer of torch": Program(ours=_ADAMW),
    "codes, 8 bits, activations leave": Program(
        managed={"frozen": "nf4", "activations": "offload"},
        mixed=torch.bfloat16,
        options={"moments": "8bit"},
        words=9000,
        chunk_bytes="4MiB",
        device_chunks="12MiB",
        in_one_process=True,
    ),
    "16-bit moments": Program(options={"moments": torch.bfloat16}, mixed=torch.bfloat16, in_one_process=True),
    "activations leave": Program(managed={"activations": "offload"}, mixed=torch.bfloat16),
    "copies are evicted": Program(chunk_bytes="64KiB", device_chunks="384KiB", steps=2),
    "bfloat16": Program(mixed=torch.bfloat16),
    "overlap": Program(overlap="backward", steps=4, chunk_bytes="64KiB"),
    "trailing": Program(overlap="forward", steps=4, chunk_bytes="64KiB", max_grad_norm=0.5, micro=2),
    "trailing, bfloat16": Program(overlap="forward", steps=4, chunk_bytes="64KiB", mixed=torch.bfloat16),
    "overlap, bfloat16": Program(overlap="backward", steps=4, mixed=torch.bfloat16),
    "checkpointed, chunks of several tiles": Program(
        words=9000, chunk_bytes="4MiB", device_chunks="12MiB", recomputes=True, steps=2, max_grad_norm=0.5
    ),
    "in turns": Program(in_turns=True, micro=3, device_chunks="384KiB", chunk_bytes="64KiB", steps=2, uneven=True),
    "in turns, bfloat16": Program(in_turns=True, micro=2, steps=4, mixed=torch.bfloat16, overlap="backward"),
    "in turns, trailing": Program(in_turns=True, micro=3, recomputes=True, overlap="forward", max_grad_norm=0.5),
    "in turns, writes": Program(in_turns=True, micro=2, writes=writes_everywhere),
    "SGD": Program(
        ours=partial(hetmem.optim.offload, torch.optim.SGD),
        optimizer=torch.optim.SGD,
        options={"momentum": 0.9},
        loss_scale=1024.0,
    ),
}


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "moments": [{}, {"options": {"moments": torch.bfloat16}}, {"options": {"moments": "8bit"}}],
    "base": [{}, {"adapts": True, "frozen": "nf4"}],
    "activations": [{}, {"activations": "auto"}],
    "backwards": [{}, {"micro": 2}],
    "clip": [{}, {"max_grad_norm": 0.5}],
    "scale": [{}, {"loss_scale": 1024.0}],
    "overlap": [{}, {"overlap": "backward"}, {"overlap": "forward"}],
}


def with_every_two() -> dict[str, Program]:
    """Programs in which every two options meet."""
    cases = [*product(*(range(len(values)) for values in OPTIONS.values()))]
    found = {}
    for number in every_two_meet(cases):
        given: dict[str, Any] = {}
        for values, at in zip(OPTIONS.values(), cases[number], strict=True):
            given |= values[at]
        managed = {name: given.pop(name) for name in ("frozen", "activations") if name in given}
        found[f"options {cases[number]}"] = Program(
            managed=managed, mixed=torch.bfloat16, in_one_process=True, steps=2, **given
        )
    return found


def trained(rank: int, names: list[str]) -> dict[str, dict[str, Tensor]]:
    return {name: {**PROGRAMS, **with_every_two()}[name].trained(rank) for name in names}
