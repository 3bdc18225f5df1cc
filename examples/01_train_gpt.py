"""Train a GPT whose states are many times larger than the device that trains it.

A GPT learns the source of Python's own standard library. Its weights, gradients and the two moments of AdamW
take 16 bytes a parameter: far more than the device budget, and more than device and host together, so the rest lives
on NVMe. Without a GPU the device is simulated, and everything but its speed is real.

    python examples/01_train_gpt.py                    train, then print the memory report and a sample
    python examples/01_train_gpt.py --check            train beside plain torch, compare every bit
    python examples/01_train_gpt.py --mixed            compute in bfloat16, keep fp32 master weights

What hetmem needs of you is in `main`: `Budget`, `manage`, `AdamW`. The model and `train` are ordinary PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.base.units import format_size
from hetmem.errors import BudgetError, CapacityError, DeviceOutOfMemoryError, ManageError, StoreError

SEED = 20
CORPUS_BYTES = 1_000_000
BATCH_SIZE = 4
NVME_MEMORY = "256MiB"
CHUNK_BYTES = "48KiB"  # of which the matrices are multiples: 1.4 % unused, where the size found by default has 3.5 %
STEPS, CHECK_STEPS, WARMUP_STEPS, STEPS_PER_REPORT = 300, 20, 10, 10
ADAMW: dict[str, Any] = {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
STATE_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient, first and second moment
PROMPT, SAMPLE_TOKENS = "\n\ndef", 120
RARE = " x"  # what stands in the text for every name that is not in the vocabulary

Batch = tuple[Tensor, Tensor]


# ---- The model: nothing here knows of hetmem ------------------------------------------------------------------------
@dataclass(frozen=True)
class GPTConfig:
    """10 equal blocks of 1 M parameters; names, signs and indents of Python are the vocabulary."""

    layers: int = 10
    heads: int = 6
    width: int = 288
    context: int = 64
    vocabulary: int = 768


class Block(nn.Module):
    """Pre-norm causal attention and a GELU MLP, each added to the residual stream [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        mlp: Tensor = self.mlp_out(gelu(self.mlp_up(self.mlp_norm(x))))
        return x + mlp


class GPT(nn.Module):
    """Tokens in; logits of the next one, or their mean cross-entropy, out. The head is tied to the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                branches = 2 * config.layers if "_out." in name else 1  # that add up in the residual stream
                nn.init.normal_(parameter, std=(config.width * branches) ** -0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """`x` and `y` are int64 [batch, time]: logits [batch, time, vocabulary], or with `y` the scalar loss."""
        hidden = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            # Keep only the input of a block for backward and recompute the rest: the device is small.
            hidden = checkpoint(block, hidden, use_reentrant=False) if torch.is_grad_enabled() else block(hidden)
        logits: Tensor = self.head(self.norm(hidden)).float()
        return logits if y is None else cross_entropy(logits.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, device: str = "cpu", temperature: float = 0.7) -> list[int]:
        """`prompt` and `count` sampled tokens after it, never token 0; the same tokens each time."""
        generator = torch.Generator().manual_seed(SEED)
        tokens = list(prompt)
        for _ in range(count):
            logits = self(torch.tensor([tokens[-self.context :]], device=device))[0, -1]
            probabilities = (logits.cpu() / temperature).softmax(-1)
            probabilities[0] = 0
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return tokens


# ---- Data and training, as in any PyTorch program -------------------------------------------------------------------
def read_corpus(vocabulary: int, limit: int = CORPUS_BYTES) -> tuple[Tensor, Vocabulary]:
    """The first `limit` characters of Python's standard library as int64 tokens below `vocabulary`."""
    text = read_source(limit)
    known = Vocabulary(text, vocabulary)
    return torch.tensor(known.encode(text)), known


def read_source(limit: int) -> str:
    """The code of the standard library's top-level modules in order of name, without comments and docstrings."""
    source = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        module = ast.parse(path.read_bytes())
        for node in ast.walk(module):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
        source += "\n\n" + ast.unparse(module)
        if len(source) >= limit:
            break
    return source[:limit]


def _is_text(statement: ast.stmt) -> bool:
    """Whether `statement` is a string and nothing else, as a docstring is."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class Vocabulary:
    """The most frequent names, signs, digits and indents of a text; token 0 stands for every other name."""

    _PIECE = re.compile(r"\n *| ?[A-Za-z_]\w*| ?[^\w\s]+|.", re.DOTALL)

    def __init__(self, text: str, size: int) -> None:
        pieces = Counter(self._PIECE.findall(text))
        self.pieces = [RARE, *(piece for piece, _ in pieces.most_common(size) if piece != RARE)][:size]
        self._tokens = {piece: token for token, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`."""
        return [self._tokens.get(piece, 0) for piece in self._PIECE.findall(text)]

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`."""
        return "".join(self.pieces[token] for token in tokens)


def random_batches(corpus: Tensor, context: int, device: str) -> Iterator[Batch]:
    """Endless (x, y), both int64 [BATCH_SIZE, context]; y is x one token later. The same batches each time."""
    generator = torch.Generator().manual_seed(SEED)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(corpus) - context, (BATCH_SIZE, 1), generator=generator)
        tokens = corpus[starts + window].to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def warmup_then_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Rises to the full rate over WARMUP_STEPS, then falls to a tenth of it at `steps`."""
    return LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / max(1, steps))),
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    steps: int,
    after_step: Callable[[Batch, Tensor], None],
) -> None:
    """The usual loop; `after_step(batch, loss)` is called after every update."""
    scheduler = warmup_then_cosine(optimizer, steps)
    for x, y in islice(batches, steps):
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        after_step((x, y), loss.detach())


# ---- --check: plain torch, step by step beside the managed model ----------------------------------------------------
class MismatchError(Exception):
    """The managed model and plain torch differ in at least one bit."""


class PlainTorch:
    """The same training without hetmem: fp32 masters on the CPU and, where they differ, a copy that computes."""

    def __init__(self, model: GPT, device: str, dtype: torch.dtype, steps: int) -> None:
        self.masters = model
        computes_itself = device == "cpu" and dtype == torch.float32
        self.compute = model if computes_itself else copy.deepcopy(model).to(device, dtype)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        self.scheduler = warmup_then_cosine(self.optimizer, steps)

    def expect_loss(self, batch: Batch, loss: Tensor) -> None:
        """Take the same step; raises `MismatchError` unless the losses have the same bits."""
        if self.compute is not self.masters:
            self.compute.load_state_dict(self.masters.state_dict())
        expected = self.compute(*batch)
        expected.backward()
        if self.compute is not self.masters:
            for master, copied in zip(self.masters.parameters(), self.compute.parameters(), strict=True):
                assert copied.grad is not None, "every parameter of GPT is used in every step"
                master.grad, copied.grad = copied.grad.to(master), None
        nn.utils.clip_grad_norm_(self.masters.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if count_different(loss, expected):
            step = self.scheduler.last_epoch
            raise MismatchError(f"the loss of step {step} is {loss.item()!r}, plain torch has {expected.item()!r}")

    def expect_weights(self, model: nn.Module) -> None:
        """Raises `MismatchError`, which names the first parameter to differ, unless all weights have the same bits."""
        expected = dict(self.masters.named_parameters())
        for name, parameter in model.named_parameters():
            if count := count_different(parameter, expected[name]):
                raise MismatchError(f"{count:,} of {parameter.numel():,} elements of {name} differ from plain torch")


def count_different(left: Tensor, right: Tensor) -> int:
    """How many elements of two fp32 tensors differ in any bit: 0.0 is not -0.0, a NaN is itself."""
    return int((left.detach().cpu().view(torch.int32) != right.detach().cpu().view(torch.int32)).sum())


# ---- Progress: a bar on a terminal, else a line now and then --------------------------------------------------------
class Display:
    """Loss, speed, bytes on each tier and stalls. `read_report` is asked once in STEPS_PER_REPORT steps."""

    def __init__(self, steps: int, tokens_per_step: int, read_report: Callable[[], dict[str, Any]]) -> None:
        self.steps, self.tokens_per_step, self.read_report = steps, tokens_per_step, read_report
        columns = (BarColumn(12), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, disable=not sys.stdout.isatty())
        self.task = self.bar.add_task("", total=steps)
        self.losses: list[float] = []
        self.group_start_seconds = self.start_seconds = time.perf_counter()

    def after_step(self, loss: Tensor) -> None:
        """Count one step and, at the end of a group of them, show what they did."""
        self.losses.append(loss.item())
        self.bar.advance(self.task)
        if len(self.losses) % STEPS_PER_REPORT == 0 or len(self.losses) == self.steps:
            lines = self._status()
            self.bar.update(self.task, description="\n".join(lines))
            if self.bar.disable:
                print(f"step {len(self.losses):4}/{self.steps}  {'  '.join(lines)}", flush=True)

    def _status(self) -> tuple[str, str]:
        """The last group of steps in two lines, so that a narrow terminal shows all of it beside the bar."""
        report = self.read_report()
        now_seconds = time.perf_counter()
        group = self.losses[(len(self.losses) - 1) // STEPS_PER_REPORT * STEPS_PER_REPORT :]
        tokens_per_second = len(group) * self.tokens_per_step / (now_seconds - self.group_start_seconds)
        stalled = report["stall_seconds"] / (now_seconds - self.start_seconds)
        tiers = "  ".join(f"{name} {format_size(tier['used_bytes'])}" for name, tier in report["tiers"].items())
        self.group_start_seconds = now_seconds
        loss = sum(group) / len(group)
        return f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  stalls {stalled:.0%}", tiers


# ---- What hetmem needs of you ---------------------------------------------------------------------------------------
def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; its errors exit with code 2."""
    parser = argparse.ArgumentParser(description="Train a GPT whose states are larger than device and host memory.")
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default {STEPS}, with --check {CHECK_STEPS})")
    parser.add_argument("--device-memory", default="18MiB", help="the device budget (default %(default)s)")
    parser.add_argument("--host-memory", default="96MiB", help="the host budget (default %(default)s)")
    parser.add_argument("--nvme-dir", type=Path, help="where the rest lives (default: a temporary directory)")
    parser.add_argument("--mixed", action="store_true", help="compute in bfloat16, with fp32 master weights")
    parser.add_argument("--check", action="store_true", help="train plain torch beside it and compare every bit")
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = CHECK_STEPS if options.check else STEPS
    if options.steps < 0:
        parser.error(f"--steps must not be negative, got {options.steps}")
    return options


def budget_of(options: argparse.Namespace, device: str, nvme_dir: str) -> hetmem.Budget:
    """On a GPU only the model's part of it is limited: cuBLAS alone takes 32 MiB for each thread that multiplies."""
    limited = "device" if device == "cpu" else "device_chunks"
    sizes = {limited: options.device_memory, "host": options.host_memory, "nvme": NVME_MEMORY}
    return hetmem.Budget(**sizes, nvme_dir=nvme_dir)


def run(config: GPTConfig, options: argparse.Namespace, nvme_dir: str) -> None:
    """Train, report, sample; raises `MismatchError` when --check finds a difference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if options.mixed else torch.float32
    torch.manual_seed(SEED)
    model = GPT(config)
    reference = PlainTorch(copy.deepcopy(model), device, dtype, options.steps) if options.check else None

    model = hetmem.manage(
        model,
        budget_of(options, device, nvme_dir),
        device="sim" if device == "cpu" else device,
        mixed_precision=dtype if options.mixed else None,
        chunk_bytes=CHUNK_BYTES,
    )
    optimizer = hetmem.AdamW(model.parameters(), **ADAMW)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    states = format_size(parameters * STATE_BYTES_PER_PARAMETER)
    minutes = options.steps * (0.5 + 0.3 * options.check) / 60
    print(
        f"{parameters:,} parameters, {states} of states, train on a {'simulated ' * (device == 'cpu')}device of "
        f"{options.device_memory}, {options.host_memory} of host memory and a file: {options.steps} steps"
        f"{' beside plain torch' * options.check}, about {minutes:.0f} minutes on two cores; then report and sample."
    )
    corpus, vocabulary = read_corpus(config.vocabulary)
    batches = random_batches(corpus, config.context, device)
    display = Display(options.steps, BATCH_SIZE * config.context, lambda: hetmem.report(model).to_dict())

    def after_step(batch: Batch, loss: Tensor) -> None:
        if reference is not None:
            reference.expect_loss(batch, loss)
        display.after_step(loss)

    with display.bar:
        train(model, optimizer, batches, options.steps, after_step)

    print(hetmem.report(model))
    if reference is not None:
        reference.expect_weights(model)
        print(f"Same bits as plain torch: {options.steps} losses and {parameters:,} weights.")
    print("What it writes now:", vocabulary.decode(model.generate(vocabulary.encode(PROMPT), SAMPLE_TOKENS, device)))
    hetmem.release(model)


def main(arguments: Sequence[str] | None = None, config: GPTConfig | None = None) -> int:
    """The exit code: 0, 1 when --check finds a difference, 2 when a size or a directory cannot do."""
    options = parse_options(arguments)
    directory: AbstractContextManager[str] = (
        nullcontext(str(options.nvme_dir)) if options.nvme_dir else tempfile.TemporaryDirectory(prefix="hetmem-")
    )
    try:
        with directory as nvme_dir:
            run(config or GPTConfig(), options, nvme_dir)
    except MismatchError as difference:
        print(f"NOT the same bits: {difference}", file=sys.stderr)
        return 1
    except (BudgetError, ManageError, CapacityError, DeviceOutOfMemoryError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
