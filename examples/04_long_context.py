"""Train on sequences whose activations are many times larger than the device.

    python examples/04_long_context.py             train, then say where the bytes were
    python examples/04_long_context.py --check     beside plain torch: every loss and weight, bit for bit

A small transformer with attention over a window learns to repeat what it saw some tokens ago. What autograd saves of
one sequence is over six times the device budget; `hetmem.manage(activations="auto")` moves what has to move to host
memory, and back for the backward. Without a GPU the device is simulated, and everything but its speed is real; on one
ask for more (`--device-memory 2GiB --host-memory 32GiB --sequence 524288`), as cuBLAS alone takes more than 16 MiB.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import hetmem
from hetmem.base.units import format_size
from hetmem.errors import BudgetError, DeviceOutOfMemoryError

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum up in another order
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEARNING_RATE, VOCABULARY, DISTANCE = 3e-3, 64, 5


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of what it is trained on."""

    layers: int = 8
    width: int = 64
    heads: int = 4
    window: int = 128
    sequence: int = 4096
    device_memory: str = "16MiB"
    host_memory: str = "256MiB"
    weights: str = "1MiB"  # what their copies may take of the device


ON_A_GPU = Sizes(sequence=131072, device_memory="672MiB", host_memory="6GiB")
"""cuBLAS alone takes 32 MiB there for each thread that multiplies."""


class Layer(nn.Module):
    """Attention within windows of the sequence, and an MLP, each added to what comes in: [sequence, width] to the
    same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.window = sizes.heads, sizes.window
        self.before_attention, self.before_mlp = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [sequence, width], of a length that is a multiple of the window."""
        length, width = x.shape
        windows = (length // self.window, self.window, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.before_attention(x)).view(windows).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(length, width))
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    """Tokens [sequence] to logits [sequence, VOCABULARY]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.window = sizes.window
        self.tokens, self.places = nn.Embedding(VOCABULARY, sizes.width), nn.Embedding(sizes.window, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token, at each place."""
        places = torch.arange(len(tokens), device=tokens.device) % self.window
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def batch(sizes: Sizes, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and for each place the token `DISTANCE` before it."""
    tokens = torch.randint(VOCABULARY, (sizes.sequence,), generator=torch.Generator().manual_seed(step))
    return tokens.to(DEVICE), tokens.roll(DISTANCE).to(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes, steps: int) -> list[float]:
    """An ordinary loop; returns the losses."""
    losses = []
    for step in range(steps):
        tokens, targets = batch(sizes, step)
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class MastersOnHost(torch.optim.AdamW):
    """AdamW of plain torch over weights in host memory, with which `model` computes on `DEVICE`.

    A GPU contracts multiplications and additions that a CPU rounds one by one: the bits of an update are those of the
    processor that makes it, and hetmem's homes are in host memory here.
    """

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


def saved_bytes(sizes: Sizes) -> int:
    """What autograd saves of one sequence, without weights: the bytes of each storage once."""
    model, (tokens, targets) = Model(sizes).to(DEVICE), batch(sizes, 0)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        cross_entropy(model(tokens), targets)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(storages.values()) - sum(storages.get(weight.data_ptr(), 0) for weight in model.parameters())


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    """Train, and compare if asked to. The exit code is 0; 1 if a bit differs, 2 if a budget cannot do."""
    parser = argparse.ArgumentParser(description="Activations many times larger than the device.")
    sizes = sizes or (Sizes() if DEVICE == "cpu" else ON_A_GPU)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default %(default)s)")
    parser.add_argument("--sequence", type=int, default=sizes.sequence, help="tokens (default %(default)s)")
    parser.add_argument("--device-memory", default=sizes.device_memory, help="the budget (default %(default)s)")
    parser.add_argument("--host-memory", default=sizes.host_memory, help="the budget (default %(default)s)")
    parser.add_argument("--activations", choices=("keep", "auto", "offload"), default="auto")
    parser.add_argument("--check", action="store_true", help="train in plain torch too, and compare every bit")
    asked = parser.parse_args(arguments)
    if asked.steps < 1 or asked.sequence < sizes.window or asked.sequence % sizes.window:
        parser.error(f"--steps must be at least 1, and --sequence a multiple of {sizes.window}")
    memory = {"device_memory": asked.device_memory, "host_memory": asked.host_memory}
    sizes = replace(sizes, sequence=asked.sequence, **memory)
    torch.use_deterministic_algorithms(asked.check and DEVICE == "cuda")
    torch.manual_seed(0)
    model = Model(sizes)
    twin = copy.deepcopy(model).to(DEVICE) if asked.check else None
    try:
        budget = hetmem.Budget(device=sizes.device_memory, device_chunks=sizes.weights, host=sizes.host_memory)
        hetmem.manage(model, budget, activations=asked.activations)
        optimizer = hetmem.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = train(model, optimizer, sizes, asked.steps)
    except (BudgetError, DeviceOutOfMemoryError) as error:
        print(error, file=sys.stderr)
        return 2
    report, saved = hetmem.report(model).to_dict(), saved_bytes(sizes)
    device = report["tiers"]["device"]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {asked.steps} steps of {sizes.sequence} tokens")
    print(
        f"autograd saves {format_size(saved)} a step, {saved / device['capacity_bytes']:.1f} times the device budget; "
        f"at most {format_size(device['peak_bytes'])} were on the device"
    )
    if twin is None:
        return 0
    plain = train(twin, MastersOnHost(twin), sizes, asked.steps)
    hetmem.release(model)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    same = losses == plain and all(torch.equal(mine, other.cpu()) for mine, other in pairs)
    print(f"{len(plain)} losses and all weights {'equal' if same else 'DIFFER FROM'} those of plain torch")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
