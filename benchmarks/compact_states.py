"""How well a small GPT trains with small optimizer states: loss curves side by side, same seed, same batches.

    python benchmarks/compact_states.py [--steps 400] [--threads 1] [--learning-rate 0.002] [--only TEXT]

A byte-level GPT of plain torch learns the source of Python's standard library; the host kernels are driven directly.
The model computes in float32, so the variants differ in what is stored between steps and in nothing else. "by chance"
is stochastic rounding, as hetmem does it; "to nearest" is there to show why. beta2 is torch's 0.999.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks import nearest_codes
from hetmem.cpu import GROUP_ELEMENTS, AdamWStep, Task, adamw_tasks, prepare_small
from hetmem.cpu.workers import WorkerPool

SEED, CORPUS_BYTES, HELD_OUT_BYTES = 20, 4_000_000, 200_000
LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 16
WARMUP_STEPS, WEIGHT_DECAY = 20, 0.1
CURVE_POINTS, LAST_STEPS = 8, 25


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbol(symbols) + self.place(torch.arange(CONTEXT))
        return self.head(self.norm(self.blocks(x)))


# ---- What is stored between steps: each makes the tasks that update one parameter. ----

Update = Callable[[AdamWStep, Tensor], list[Task]]
"""Of the step and the gradient; writes the weight that the model computes with."""


def in_float32(computed: Tensor, key: int) -> Update:
    p, m, v = computed.clone(), torch.zeros_like(computed), torch.zeros_like(computed)
    return lambda step, grad: adamw_tasks(step, p, grad, m, v, computed)


def compact(weight: torch.dtype, moments: torch.dtype) -> Callable[[Tensor, int], Update]:
    def make(computed: Tensor, key: int) -> Update:
        p = computed.to(weight, copy=True)
        computed.copy_(p)
        m, v = (torch.zeros_like(p, dtype=moments) for _ in range(2))
        return lambda step, grad: prepare_small(p, grad, [m, v], computed, key=key)(step)

    return make


def zero_codes(numel: int) -> list[Tensor]:
    groups = -(-numel // GROUP_ELEMENTS)
    m, root = (torch.zeros(numel, dtype=dtype) for dtype in (torch.int8, torch.uint8))
    return [m, torch.zeros(groups), root, torch.zeros(groups)]


def eight_bits(weight: torch.dtype) -> Callable[[Tensor, int], Update]:
    def make(computed: Tensor, key: int) -> Update:
        p = computed.to(weight, copy=True)
        computed.copy_(p)
        codes = zero_codes(p.numel())
        return lambda step, grad: prepare_small(p, grad, codes, computed, key=key)(step)

    return make


def to_nearest(weight: torch.dtype, moments: torch.dtype) -> Callable[[Tensor, int], Update]:
    """The float32 update, and then everything rounded to the nearest."""

    def make(computed: Tensor, key: int) -> Update:
        p = computed.to(weight).float()
        computed.copy_(p)
        m, v = torch.zeros_like(p), torch.zeros_like(p)

        def store() -> None:
            for state, dtype in ((p, weight), (m, moments), (v, moments)):
                state.copy_(state.to(dtype))
            computed.copy_(p)

        return lambda step, grad: [lambda: [task() for task in adamw_tasks(step, p, grad, m, v)] and store()]

    return make


def eight_bits_to_nearest(computed: Tensor, key: int) -> Update:
    p, m, v = computed.clone(), *torch.zeros(2, computed.numel())
    m_codes, m_scales, root_codes, root_scales = zero_codes(computed.numel())

    def store() -> None:
        coded = (("snorm8", m, m_codes, m_scales), ("unorm8", v.sqrt_(), root_codes, root_scales))
        for form, state, codes, scales in coded:
            nearest_codes.quantise(form, state, codes, scales)
            nearest_codes.dequantise(state, codes, scales)
        v.square_()

    return lambda step, grad: [lambda: [task() for task in adamw_tasks(step, p, grad, m, v, computed)] and store()]


F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Variant:
    name: str
    bytes_per_parameter: float
    make: Callable[[Tensor, int], Update]


SCALES = 2 * 4 / GROUP_ELEMENTS
VARIANTS = (
    Variant("float32 weights and moments", 12, in_float32),
    Variant("bf16 moments, by chance", 8, compact(F32, BF16)),
    Variant("bf16 moments, to nearest", 8, to_nearest(F32, BF16)),
    Variant("8-bit moments, by chance", 6 + SCALES, eight_bits(F32)),
    Variant("8-bit moments, to nearest", 6 + SCALES, eight_bits_to_nearest),
    Variant("bf16 weights without master, by chance", 10, compact(BF16, F32)),
    Variant("bf16 weights without master, to nearest", 10, to_nearest(BF16, F32)),
    Variant("bf16 weights and moments, by chance", 6, compact(BF16, BF16)),
    Variant("bf16 weights, 8-bit moments, by chance", 4 + SCALES, eight_bits(BF16)),
)


# ---- Training ----


def read_corpus() -> Tensor:
    corpus = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        corpus += path.read_bytes()
    return torch.frombuffer(corpus, dtype=torch.uint8)[:CORPUS_BYTES].long()


def batch_of(corpus: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=generator)
    window = corpus[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(variant: Variant, corpus: Tensor, steps: int, lr: float, pool: WorkerPool) -> tuple[list[float], float]:
    """The loss of every step, and the mean loss on held-out text."""
    torch.manual_seed(SEED)
    model, generator = GPT(), torch.Generator().manual_seed(SEED)
    updates = [variant.make(p.detach().view(-1), SEED << 32 | key) for key, p in enumerate(model.parameters())]
    losses = []
    for count in range(1, steps + 1):
        loss = loss_of(model, batch_of(corpus[:-HELD_OUT_BYTES], generator))
        loss.backward()
        losses.append(loss.item())
        step = AdamWStep(lr * min(1, count / WARMUP_STEPS), 0.9, 0.999, 1e-8, WEIGHT_DECAY, count)
        made = zip(updates, model.parameters(), strict=True)
        pool.run([task for update, p in made for task in update(step, p.grad.view(-1))])
        model.zero_grad()
    generator.manual_seed(SEED + 1)
    with torch.no_grad():
        held_out = [loss_of(model, batch_of(corpus[-HELD_OUT_BYTES:], generator)).item() for _ in range(64)]
    return losses, statistics.mean(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--only", default="", help="variants with this in their names")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pool, corpus = WorkerPool(options.threads), read_corpus()
    numel = sum(parameter.numel() for parameter in GPT().parameters())
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}; {numel} parameters, ")
    print(f"{options.steps} steps of {BATCH} x {CONTEXT} bytes at a learning rate of {options.learning_rate}, ")
    print(f"mean losses of {LAST_STEPS} steps up to each\n")
    points = [options.steps * point // CURVE_POINTS for point in range(1, CURVE_POINTS + 1)]
    print("| stored | bytes a parameter | held out |", *(f" {point} |" for point in points))
    print("|---|" + "---|" * (2 + CURVE_POINTS))
    for variant in (variant for variant in VARIANTS if options.only in variant.name):
        losses, held_out = train(variant, corpus, options.steps, options.learning_rate, pool)
        curve = [statistics.mean(losses[max(0, point - LAST_STEPS) : point]) for point in points]
        cells = [variant.name, f"{variant.bytes_per_parameter:.2f}", f"{held_out:.3f}", *(f"{x:.3f}" for x in curve)]
        print("|", " | ".join(cells), "|", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
