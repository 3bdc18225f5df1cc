"""Train on several ranks that share one copy of the model, and go on from the file when one of them is killed.

    python examples/07_ranks.py            two ranks, one of which is killed; then three ranks go on from their file
    python examples/07_ranks.py --check    the same without a kill, too: both files are equal, byte for byte
    torchrun --nproc-per-node=2 --max-restarts=3 examples/07_ranks.py --folder run --steps 20    the program itself

Weights, gradients and states of the optimizer are in the memory of the machine once, whatever the number of ranks. If a
rank dies, the others raise `PeerError`, torchrun starts all again, and these load the last file, which knows no number
of ranks. So far ranks run on the simulated device.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetmem

WORDS, WIDTH, TOKENS, ROWS = 256, 128, 32, 4
SAVED_EVERY, KILLED_IN, FIRST_STEPS, ALL_STEPS = 2, 3, 6, 8
FILE = "run.safetensors"


class Model(nn.Module):
    """Tokens [rows, tokens] to the mean loss of each next one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scalar loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS - 1)
        hidden = self.words(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    """The tokens [rows, tokens] of one rank: each step and rank has its own, as of a `DistributedSampler`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(WORDS, (ROWS, 1), generator=generator)
    return (start + 7 * torch.arange(TOKENS)) % WORDS


def train(folder: Path, steps: int, kill_in: int | None = None) -> None:
    """Train up to `steps`, from the file in `folder` on if there is one. The last rank is killed in step `kill_in`."""
    torch.manual_seed(0)
    model = hetmem.manage(Model(), hetmem.Budget(device="8MiB", host="64MiB"), device="sim")  # joins the other ranks
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    file = folder / FILE
    done = hetmem.load(file, model, optimizer)["done"] if file.exists() else 0
    if rank == 0:
        print(f"  {ranks} ranks begin with step {done}", flush=True)
    for step in range(done, steps):
        loss = model(batch(step, rank))
        if step == kill_in and rank == ranks - 1:
            print(f"  rank {rank} is killed in step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"  step {step}: loss {loss.item():.4f} on rank 0", flush=True)
        if (step + 1) % SAVED_EVERY == 0:
            hetmem.save(file, model, optimizer, extra={"done": step + 1})
    hetmem.release(model)


def torchrun(ranks: int, folder: str, steps: int, *options: str) -> None:
    """Run this file on `ranks` ranks; all are started once more if one of them dies."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1", __file__, "--folder", folder, f"--steps={steps}", *options]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})


def show(*, kill: bool) -> bytes:
    """Train on two ranks, then on three; return the last file."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(2, folder, FIRST_STEPS, *([f"--kill-in={KILLED_IN}"] if kill else []))
        torchrun(3, folder, ALL_STEPS)
        return Path(folder, FILE).read_bytes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with a run in which no rank is killed")
    parser.add_argument("--folder", type=Path, default=Path(), help="of a rank: where the file is")
    parser.add_argument("--steps", type=int, default=ALL_STEPS, help="of a rank: up to which step")
    parser.add_argument("--kill-in", type=int, help="of a rank: the step in which the last one is killed, at first")
    asked = parser.parse_args(arguments)
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        train(asked.folder, asked.steps, None if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else asked.kill_in)
        dist.destroy_process_group()
        return 0
    begun = time.perf_counter()
    print("two ranks, one of which is killed, then three:")
    found = show(kill=True)
    print(f"{time.perf_counter() - begun:.0f} s")
    if not asked.check:
        return 0
    print("the same, and none is killed:")
    equal = show(kill=False) == found
    print("both files are equal, byte for byte" if equal else "the files differ")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
