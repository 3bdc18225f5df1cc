"""Train with large steps: the weights cross the link twice a step, however many micro-batches it has.

    python examples/05_large_steps.py             a loop over the micro-batches, then hetmem.accumulate, side by side
    python examples/05_large_steps.py --check     beside plain torch too: every loss and weight, bit for bit

A small transformer whose weights are four times the device budget takes steps of 8 micro-batches. The loop fetches
every weight for each of them; `hetmem.accumulate` has all of them pass a layer before the next one is fetched. Without
a GPU the device is simulated, with a link that is as slow beside this processor as PCIe is beside a GPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.base.units import format_size
from hetmem.errors import BudgetError, DeviceOutOfMemoryError

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum up in another order
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEARNING_RATE, VOCABULARY, DISTANCE = 1e-3, 256, 3


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of what it is trained on."""

    layers: int = 8
    width: int = 192
    heads: int = 4
    tokens: int = 32
    micro_batches: int = 8
    device_memory: str = "3.5MiB"
    host_memory: str = "256MiB"
    link: str = "200MB"
    """Bytes per second of the simulated link, each way."""


ON_A_GPU = Sizes(layers=48, width=2048, heads=16, tokens=4096, device_memory="2600MiB", host_memory="48GiB")


class Layer(nn.Module):
    """Causal attention and an MLP, each added to what comes in: [tokens, width] to the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [tokens, width]."""
        query, key, value = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """Tokens [tokens] to the mean loss of the token `DISTANCE` before each."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, sizes.width), nn.Embedding(sizes.tokens, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scalar loss; of each layer only the input is kept for the backward."""
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return cross_entropy(self.head(x), tokens.roll(DISTANCE))


Step = Callable[[nn.Module, Sequence[Tensor]], list[Tensor]]


def loop(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """One micro-batch after the other, as in any program. Returns the detached losses, of the mean each its part."""
    losses = []
    for batch in batches:
        loss = model(batch) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return losses


def in_turns(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """All micro-batches layer by layer: the same bits."""
    return hetmem.accumulate(model, batches, lambda model, batch: model(batch) / len(batches))


def train(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes, steps: range) -> list[float]:
    """Ordinary steps; returns the losses."""
    losses = []
    for at in steps:
        generator = torch.Generator().manual_seed(at)
        shape = (sizes.micro_batches, sizes.tokens)
        batches = list(torch.randint(VOCABULARY, shape, generator=generator).to(DEVICE))
        losses.append(sum(loss.item() for loss in step(model, batches)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


class MastersOnHost(torch.optim.AdamW):
    """AdamW of plain torch over weights in host memory, with which `model` computes on `DEVICE`: the bits of an update
    are those of the processor that makes it."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = [(copied, nn.Parameter(copied.detach().cpu())) for copied in model.parameters()]
        super().__init__([master for _, master in self.pairs], lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update, and copy what is new to the device."""
        for copied, master in self.pairs:
            master.grad, copied.grad = copied.grad.to("cpu"), None
        super().step(closure)
        for copied, master in self.pairs:
            copied.copy_(master)


def measure(name: str, step: Step, model: nn.Module, sizes: Sizes, steps: int) -> list[float]:
    """Train `model` within the budget, print bytes and tokens/s, and return the losses."""
    budget = hetmem.Budget(device=sizes.device_memory, host=sizes.host_memory)
    device = None if DEVICE == "cuda" else hetmem.SimDevice(host_to_device=sizes.link, device_to_host=sizes.link)
    hetmem.manage(model, budget, device=device, activations="auto")
    optimizer = hetmem.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = train(step, model, optimizer, sizes, range(2))  # the first steps also measure what each layer needs
    before, start = moved(model), time.perf_counter()
    losses += train(step, model, optimizer, sizes, range(2, 2 + steps))
    seconds, bytes_moved = (
        (time.perf_counter() - start) / steps,
        [b - a for a, b in zip(before, moved(model), strict=True)],
    )
    hetmem.release(model)
    to_device, from_device = (format_size(total // steps) for total in bytes_moved)
    tokens = sizes.micro_batches * sizes.tokens
    print(f"{name}: a step moves {to_device} to the device and {from_device} from it; {tokens / seconds:,.0f} tokens/s")
    return losses


def moved(model: nn.Module) -> list[int]:
    """Bytes to the device and from it so far."""
    links = hetmem.report(model).to_dict()["links"]
    return [links["host_to_device"]["bytes"], links["device_to_host"]["bytes"]]


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    """Train both ways, and compare. The exit code is 0; 1 if a bit differs, 2 if a budget cannot do."""
    parser = argparse.ArgumentParser(description="Steps of many micro-batches, layer by layer.")
    sizes = sizes or (Sizes() if DEVICE == "cpu" else ON_A_GPU)
    parser.add_argument("--steps", type=int, default=2, help="measured optimizer steps (default %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=sizes.micro_batches, help="(default %(default)s)")
    parser.add_argument("--device-memory", default=sizes.device_memory, help="the budget (default %(default)s)")
    parser.add_argument("--host-memory", default=sizes.host_memory, help="the budget (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="train in plain torch too, and compare every bit")
    asked = parser.parse_args(arguments)
    if asked.steps < 1 or asked.micro_batches < 1:
        parser.error("--steps and --micro-batches must be at least 1")
    memory = {"device_memory": asked.device_memory, "host_memory": asked.host_memory}
    sizes = replace(sizes, micro_batches=asked.micro_batches, **memory)
    torch.use_deterministic_algorithms(asked.check and DEVICE == "cuda")
    torch.manual_seed(0)
    one = Model(sizes)
    other, twin = copy.deepcopy(one), copy.deepcopy(one).to(DEVICE)
    weights = format_size(sum(parameter.nbytes for parameter in one.parameters()))
    print(f"{weights} of weights, {sizes.device_memory} of device, {sizes.micro_batches} micro-batches a step")
    try:
        losses = measure("loop", loop, one, sizes, asked.steps)
        in_turn = measure("accumulate", in_turns, other, sizes, asked.steps)
    except (BudgetError, DeviceOutOfMemoryError) as error:
        print(error, file=sys.stderr)
        return 2
    compared = [("the loop", losses, one)]
    if asked.check:
        plain = train(loop, twin, MastersOnHost(twin), sizes, range(2 + asked.steps))
        compared.append(("plain torch", plain, twin))
    for name, expected, model in compared:
        pairs = zip(other.parameters(), model.parameters(), strict=True)
        if in_turn != expected or not all(torch.equal(mine, its.cpu()) for mine, its in pairs):
            print(f"losses or weights DIFFER FROM those of {name}")
            return 1
    print(f"{len(in_turn)} losses and all weights equal those of {' and '.join(name for name, *_ in compared)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
