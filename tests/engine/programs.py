"""What a seed draws for `test_random_programs`: a model, dtypes, a budget, a device, a disk, an optimizer, operations.

Only choices and modules; what an operation does is `sides`'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.engine.harness import Block
from tests.engine.parts import WRITTEN_IN_FORWARD, own_parts

WIDTH = 32

# ---- models ------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """One of three layers, by what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts[int(x.detach().double().abs().sum() * 64) % 3](x)
        return output


class Convolution(nn.Module):
    """With buffers that a forward writes, one in place and one anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.transpose(1, 2)).transpose(1, 2)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean((0, 1)), 0.1)
            self.calls = self.calls + 1
        return x - self.mean.to(x.dtype)


class Bare(nn.Module):
    """Parameters without a layer: a single number, one of no element, one with strides of its own, views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter((torch.randn(WIDTH + 8, WIDTH) / 8).t())
        self.wide = nn.Parameter((torch.randn(WIDTH, WIDTH) / 8).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.turned[:, :WIDTH].to(x.dtype), self.wide.t()
        return x * self.gain + torch.tanh(x @ left) + (x.to(right.dtype) @ right).to(x.dtype) + self.nothing.sum()


class Wide(nn.Sequential):
    """A parameter that is larger than a small chunk."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(8 * WIDTH, WIDTH))


class Unused(nn.Linear):
    """Has parameters and uses none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class Again(nn.Module):
    """Has a function computed again in its backward, which uses weights without their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = False

    def function(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(torch.sin(x), (WIDTH,), self.norm.weight, self.norm.bias)
        return F.linear(x, self.layer.weight) * self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.function, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class AgainReentrant(Again):
    """The same, by the older way."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant = True


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: Block(WIDTH),
    "branches": Branches,
    "convolution": Convolution,
    "bare": Bare,
    "wide": Wide,
    "unused": lambda: Unused(WIDTH, WIDTH),
    "frozen": frozen,
    "function": Again,
    "reentrant function": AgainReentrant,
    **own_parts(WIDTH),
}


class Fails(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise ArithmeticError("in backward")


class Net(nn.Module):
    """`parts` between an embedding and a head, each behind a checkpoint or not; "again" calls the part before."""

    VOCABULARY = 48

    def __init__(self, parts: tuple[tuple[str, bool | None], ...], *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, WIDTH)
        self.parts = nn.ModuleList()
        for kind, _ in parts:
            self.parts.append(self.parts[-1] if kind == "again" else PARTS[kind]())
        self.checkpoints = [reentrant for _, reentrant in parts]
        self.head = nn.Linear(WIDTH, self.VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight
        self.fails_after = -1
        self.interrupted_after, self.interrupt = -1, nothing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, (part, reentrant) in enumerate(zip(self.parts, self.checkpoints, strict=True)):
            x = part(x) if reentrant is None else checkpoint(part, x, use_reentrant=reentrant)
            x = Fails.apply(x) if number == self.fails_after else x
            x = self._interrupted(x) if number == self.interrupted_after else x
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())

    def _interrupted(self, x: torch.Tensor) -> torch.Tensor:
        """Something happens here, and again when backward comes by."""
        interrupt = self.interrupt
        interrupt()
        if x.requires_grad:
            x.register_hook(lambda _: interrupt())
        return x


def nothing() -> None:
    """Happens."""


# ---- programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What a seed draws. `room` and `staging`: times the least budget of device and host that is accepted.
    `compared`: how often everything is compared after an operation (reading waits for what is under way)."""

    seed: int
    parts: tuple[tuple[str, bool | None], ...]
    tied: bool
    dtype: torch.dtype
    mixed: torch.dtype | None
    placement: str
    chunk_elements: int
    room: float
    staging: float
    device: str
    sanitize: bool
    disk: str
    optimizer: str
    options: dict[str, Any]
    groups: int
    compared: float
    device_budget: str
    """"least", or enough for a copy of everything and, of all homes, "some" or "nearly all"; "whole": for activations
    too, which may then need what homes have taken."""
    home_copies: bool | None
    directories: int
    rows: int
    """Of the largest batches."""
    activations: str
    """What becomes of them, as `manage` has it; where they move, also small ones do."""
    operations: tuple[tuple[str, int], ...]

    @property
    def early(self) -> bool:
        """Whether updates begin before `step`, so that weights are not to be looked at between backward and step."""
        return self.options.get("overlap", "off") != "off"

    @property
    def uses_up(self) -> bool:
        """Whether updates consume gradients, so that nobody else reads them."""
        return self.early

    def build(self) -> Net:
        torch.manual_seed(self.seed)
        net = Net(self.parts, tied=self.tied)
        for parameter in net.parameters():
            if parameter.dtype is torch.float32:
                parameter.data = parameter.data.to(self.dtype)
        for part in net.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.to(self.dtype)  # its statistics too
        return net


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "offload SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "offload SGD plain": (torch.optim.SGD, {"lr": 0.05}),
    "offload Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "offload RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "offload Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "torch SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "torch AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "torch Adam": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
}


EXTRAS = (
    "zero_grad skip evaluate part retained outside raises forward_raises gradient clip edit_gradients write hyper "
    "freeze hook unhook add_group read_weights read_gradients save load load again copied hold keep write_states "
    "squeeze squeezed squeezed collect forward backward step kept_by_hooks interrupted threaded shared average "
    "autocast module_hook dropped dropped struck_step to_file from_file from_file unseen unseen unseen forgotten "
    "unseen_within hold looked looked served served uncleared"
).split()
WITHIN = {
    *"unseen uncleared forward backward step clip edit_gradients write hyper hook read_gradients forward_raises "
    "collect squeeze".split(),
}
"""What may be done between backward and step where weights may be new already; some of it is an error of the step."""


def drawn(seed: int) -> Program:
    """The program of `seed`."""
    draw = Random(seed)
    kinds = [draw.choice(("block", "block", *PARTS)) for _ in range(draw.randint(1, 5))]
    kinds += ["again"] * (draw.random() < 0.2)
    checkpointed = draw.random() < 0.3
    parts = tuple((kind, draw.choice((None, True, False)) if checkpointed else None) for kind in kinds)
    mixed = draw.choice((None, None, torch.bfloat16, torch.float16))
    placement = draw.choice(("resident", "host", "host", "nvme", "nvme", "split"))
    optimizer = draw.choice(("AdamW",) * 8 + tuple(OPTIMIZERS))
    options: dict[str, Any] = {}
    if not optimizer.startswith("torch"):
        options["overlap"] = draw.choice(("off", "backward", "forward"))
        if draw.random() < 0.3:
            options["max_grad_norm"] = draw.choice((0.05, 0.5, 1e6))
    if mixed is torch.float16 and options and draw.random() < 0.7:
        options["loss_scale"] = draw.choice((2.0**8, "dynamic"))
    device_budget = draw.choice(("least", "least", "some", "nearly all", "whole"))
    program = Program(
        seed=seed,
        parts=parts,
        tied=draw.random() < 0.4,
        dtype=draw.choice((torch.float32,) * 6 + (torch.bfloat16, torch.float64)),
        mixed=mixed,
        placement=placement,
        chunk_elements=draw.choice((4096, 4096, 8192)),
        room=draw.choice((1.0, 1.5, 2.0, 3.0) if device_budget == "least" else (1.0, 1.1)),
        staging=draw.choice((1.0, 1.0, 1.3, 2.0, 3.0)),
        device=draw.choice(("default", "default", "linked", "late", "unwatched")),
        sanitize=draw.random() < 0.5,
        disk=draw.choice(("fast", "fast", "slow", "failing")),
        optimizer=optimizer,
        options=options,
        groups=draw.choice((1, 1, 2, 3)),
        compared=draw.choice((0.0, 0.3, 1.0)),
        device_budget=device_budget,
        home_copies=draw.choice((None, True, False)),
        directories=draw.choice((1, 2)),
        rows=draw.choice((3, 32, 96)) if device_budget == "whole" else 3,
        activations=Random(-1 - seed).choice(("keep", "keep", "offload", "auto")),
        operations=tuple((name, draw.randrange(1 << 30)) for name in _operations(draw, options)),
    )
    if program.disk == "failing":
        again = tuple(("block" if kind in WRITTEN_IN_FORWARD else kind, way) for kind, way in program.parts)
        return replace(program, parts=again)
    return program


def _operations(draw: Random, options: dict[str, Any]) -> list[str]:
    """Steps of one to three backwards, and anything else in between."""
    early = options.get("overlap", "off") != "off"
    most = draw.randint(1, 3)
    names: list[str] = []
    for _ in range(draw.randint(3, 6)):
        step: list[str] = []
        for _ in range(most if early else draw.randint(1, most)):
            step += ["forward"] * draw.choice((1, 1, 1, 2)) + ["backward"]
        names += [*step, "step", "zero_grad"]
    for _ in range(draw.choice((0, 2, 5, 10))):
        names.insert(draw.randint(0, len(names)), draw.choice(EXTRAS))
    return names
