"""What a GPU shows: its tests, link rates, every way to move and cast (`hetmem bench transfers`), the managed step
against plain torch with all, half and a tenth of the memory, the largest GPT that trains here, and with --tests what
NVIDIA's compute-sanitizer finds in the kernels.

    python -m benchmarks.gpu [--tests] [--only rates,transfers,resident,streamed,largest] [--seconds 520]
                             [--largest 10.7 --host 100GiB --nvme 40GiB]

Writes gpu-<name>-<date>.json and .md with device, driver, versions and commit. Every part runs in a process of its own,
so one that fails, or hangs, leaves the others' numbers; what one found before its time was up is kept, with "cut off".
What was found on the same day at the same commit stays, but for the parts that are run again.
How large the largest model is depends on the memory, the disk and the time that are left, unless it is said. For that
and the sanitizer some time is kept, whatever hangs before.
Ratios are of medians within one run.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_processes import SANITIZER, TESTS, in_a_process, sanitized, shortened, tested
from benchmarks.gpu_results import begun, environment, write
from benchmarks.gpu_sizes import disk, largest_here

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
SECONDS = {"rates": 40, "transfers": 60, "resident": 60, "streamed": 100, "largest": 260}
"""The most that each part may take; all together no more than --seconds."""
KEPT_SECONDS = {"largest": 150, SANITIZER: 45}
"""What parts before these may not take of --seconds."""

DEVICE: Any = "cuda"
"""What models are managed on; the tests take one that this machine has."""

VOCABULARY = 50304
SMALL_VOCABULARY = 16384
"""Of the model that gets a tenth of its weights' bytes: an embedding must lie on the device whole, beside others."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with tied embeddings; every block is recomputed in backward."""

    def __init__(self, width: int, depth: int, context: int = 1024, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.context = context
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 128)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def parameters_of(width: int, depth: int, vocabulary: int = VOCABULARY) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(width, depth, vocabulary=vocabulary).parameters())


def tokens(batch: int, context: int = 1024, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, context), device=_torch_device())


def _torch_device() -> Any:
    return getattr(DEVICE, "torch_device", DEVICE)


def timed(step: Callable[[], Any], rounds: int, warm_up: int = 2) -> list[float]:
    """Seconds of each of `rounds` steps, the GPU's work included."""
    seconds = []
    for index in range(warm_up + rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if index >= warm_up:
            seconds.append(time.perf_counter() - start)
    return seconds


# ---- the parts ------------------------------------------------------------------------------------------------------


def rates(nbytes: int = GIB) -> dict[str, Any]:
    """GB/s of a registered mapping to the GPU and back, alone and together, and of copies on the GPU; and the ways
    across the link, which are kept: the parts that follow take the faster ones."""
    from hetmem.memory.cuda_device import CudaDevice
    from hetmem.memory.mapping import Mapping
    from hetmem.tools.bench_device import keep_ways

    host = Mapping(2 * nbytes)
    unpin = CudaDevice().pin(host)
    up = torch.frombuffer(host.buffer(0, nbytes), dtype=torch.uint8)
    down = torch.frombuffer(host.buffer(nbytes, nbytes), dtype=torch.uint8)
    one, other = (torch.empty(nbytes, dtype=torch.uint8, device=_torch_device()) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            one.copy_(up, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            down.copy_(other, non_blocking=True)

    work: dict[str, tuple[Callable[[], Any], int]] = {
        "host to device": (lambda: one.copy_(up, non_blocking=True), nbytes),
        "device to host": (lambda: down.copy_(other, non_blocking=True), nbytes),
        "both at once, sum": (both, 2 * nbytes),
        "device to device, read + write": (lambda: one.copy_(other), 2 * nbytes),
    }
    found = {name: moved / statistics.median(timed(step, 20)) / 1e9 for name, (step, moved) in work.items()}
    unpin()
    return {"GB/s": found, "ways": keep_ways()}


def transfers(elements: int | None = None) -> dict[str, Any]:
    """The matrix of `hetmem bench transfers`."""
    from hetmem.tools import bench

    return asdict(bench.transfers(elements or bench.ELEMENTS))


def resident(width: int = 1024, depth: int = 12) -> dict[str, Any]:
    """Everything on the GPU, float32 with TF32 products: managed against plain, rounds in turn."""
    import hetmem

    torch.backends.cuda.matmul.allow_tf32 = True
    batch = tokens(4)
    steps = []
    for managed in (False, True):
        torch.manual_seed(0)
        model: Any = GPT(width, depth)
        if managed:
            hetmem.manage(model, hetmem.Budget(device="40GiB", host="1GiB"), device=DEVICE)
            optimizer: Any = hetmem.AdamW(model.parameters(), lr=1e-4)
        else:
            model.to(_torch_device())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        steps.append(_training_step(model, optimizer, batch))
    plain, ours = [], []
    for _ in range(5):
        plain += timed(steps[0], 3)
        ours += timed(steps[1], 3)
    return {
        "plain ms": 1e3 * statistics.median(plain),
        "managed ms": 1e3 * statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(plain),
        "step": hetmem.report(model).to_dict()["step"],
    }


def streamed(width: int = 2048, depth: int = 16, host: str = "24GiB") -> dict[str, Any]:
    """A GPT of 0.8 B parameters in bfloat16 with float32 masters in host memory, with less and less device memory."""
    import hetmem

    batch = tokens(8, vocabulary=SMALL_VOCABULARY)
    rows = []
    count = parameters_of(width, depth, SMALL_VOCABULARY)
    compute = _compute_alone(GPT(width, depth, vocabulary=SMALL_VOCABULARY), batch)
    torch.cuda.empty_cache()
    weights = 2 * count
    for name, share in (("all weights", 1.2), ("half", 0.5), ("a tenth", 0.1)):
        torch.manual_seed(0)
        model: Any = GPT(width, depth, vocabulary=SMALL_VOCABULARY)
        budget = hetmem.Budget(device="60GiB", host=host, device_chunks=int(share * weights))
        hetmem.manage(model, budget, device=DEVICE, mixed_precision=torch.bfloat16)
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-4)
        seconds = timed(_training_step(model, optimizer, batch), 5)
        report = hetmem.report(model).to_dict()
        rows.append(
            {
                "weights on the device": name,
                "step ms": 1e3 * statistics.median(seconds),
                "of forward and backward alone": statistics.median(seconds) / compute,
                "links": report["links"],
                "stall_seconds": report["stall_seconds"],
                "faults": report["faults"],
                "step": report.get("step"),
            }
        )
        hetmem.release(model)
        del model, optimizer
        torch.cuda.empty_cache()
        found = {"parameters": count, "forward and backward alone ms": 1e3 * compute, "rows": rows}
        tell(found)
    return found


def _compute_alone(plain: GPT, batch: torch.Tensor) -> float:
    plain.to(_torch_device(), torch.bfloat16)
    return statistics.median(timed(lambda: plain(batch).backward(), 5))


def largest(billions: float, host: str, nvme: str, width: int = 6144) -> dict[str, Any]:
    """The largest GPT that this machine holds, three steps of it."""
    import hetmem

    depth = max(1, round((billions * 1e9 - 51328 * width) / (12 * width * width)))
    count = parameters_of(width, depth)
    with tempfile.TemporaryDirectory(dir=disk()) as directory:
        start = time.perf_counter()
        budget = hetmem.Budget(host=host, nvme=nvme, nvme_dir=directory)

        @hetmem.managed(budget, device=DEVICE, mixed_precision=torch.bfloat16)
        class Large(GPT):
            pass

        with (
            mock.patch.object(nn.Linear, "reset_parameters", _fill),
            mock.patch.object(nn.Embedding, "reset_parameters", _fill),
        ):
            model = Large(width, depth)
        options: dict[str, Any] = {"overlap": "backward", "gradients": "streamed"}
        optimizer = hetmem.AdamW(model.parameters(), lr=1e-5, **options)
        built = time.perf_counter() - start
        tell({"parameters": count, "seconds to build": built})
        batch = tokens(8)
        step = _training_step(model, optimizer, batch)
        seconds, losses = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            losses.append(float(step()))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            tell({"parameters": count, "seconds to build": built, "seconds of each step": seconds, "losses": losses})
        report = hetmem.report(model).to_dict()
        return {
            "parameters": count,
            "seconds to build": built,
            "seconds of each step": seconds,
            "losses": losses,
            "tokens/s": batch.numel() / min(seconds[1:]),
            "tiers": report["tiers"],
            "step": report.get("step"),
        }


def _fill(module: nn.Module) -> None:
    """Normal noise at the speed of memory: torch's own takes a minute for ten billion numbers."""
    noise = torch.randn(1 << 20) * 0.02
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])


def _training_step(model: Any, optimizer: Any, batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ---- running and writing --------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECONDS), help="parts, separated by commas")
    parser.add_argument("--part", help="run this part here and print its result (for the parts' processes)")
    parser.add_argument("--largest", type=float, help="billions of parameters; with it --host and --nvme count")
    parser.add_argument("--host", default="104GiB")
    parser.add_argument("--nvme", default="52GiB")
    parser.add_argument("--tests", action="store_true", help="run the tests that need a GPU first")
    parser.add_argument("--seconds", type=float, default=sum(SECONDS.values()), help="for all parts together")
    parser.add_argument("--directory", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was measured", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the process of a part is not to outlive us
    if options.part:
        run = {"rates": rates, "transfers": transfers, "resident": resident, "streamed": streamed}
        arguments = () if options.part in run else (options.largest, options.host, options.nvme)
        tell(run.get(options.part, largest)(*arguments))
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Every part in a process of its own; what was found so far is written after each."""
    until = time.monotonic() + options.seconds
    found = begun(environment(), options.directory)
    write(found, options.directory)
    parts = [*(TESTS if options.tests else ()), *(options.only.split(",") if options.only else ())]
    parts += [SANITIZER] if options.tests else []
    for at, part in enumerate(parts):
        left = until - time.monotonic() - sum(KEPT_SECONDS.get(later, 0) for later in parts[at + 1 :])
        if left <= 0:
            found[part] = {"failed": "no time was left"}
        elif part in TESTS:
            found[part] = tested(part, min(TESTS[part], left))
        elif part == SANITIZER:
            found[part] = sanitized(left)
        else:
            found[part] = {}
            keep = partial(_keep_so_far, found, part, options.directory)
            found[part] = _measured(part, options, min(SECONDS[part], left), keep)
        print(f"{part}: {json.dumps(found[part])[:600]}", flush=True)
        write(found, options.directory)
    return 0 if not any({"failed", "cut off"} & found[part].keys() for part in parts) else 1


def tell(result: dict[str, Any]) -> None:
    """What a part's process has found so far; the last one counts."""
    print("RESULT " + json.dumps(result), flush=True)


def _keep_so_far(found: dict[str, Any], part: str, directory: Path, out: str) -> None:
    """Write what `part` has found, which is under way: somebody may end us too."""
    told = _told(out)
    if told and told != found[part]:
        found[part] = told
        write({**found, part: {**told, "cut off": "nobody knows when: it was under way"}}, directory)


def _measured(part: str, options: argparse.Namespace, seconds: float, keep: Callable[[str], None]) -> dict[str, Any]:
    command = ["-m", "benchmarks.gpu", "--part", part, *_size(options, seconds)]
    code, out, errors = in_a_process(command, seconds, keep)
    result = _told(out)
    if code is None:
        result["cut off"] = f"longer than {seconds:.0f} s"
        result["said"] = shortened(errors)
    elif code or not result:
        result["failed"] = shortened(errors) or f"exit status {code}"
    return result


def _told(out: str) -> dict[str, Any]:
    """The last result in the output of a part's process that is there as a whole."""
    results = [line for line in out.splitlines(keepends=True) if line.startswith("RESULT ") and line.endswith("\n")]
    result: dict[str, Any] = json.loads(results[-1][7:]) if results else {}
    return result


def _size(options: argparse.Namespace, seconds: float) -> list[str]:
    """The largest model and its budget: as it was asked for, or as the machine and the time allow."""
    billions, host, nvme = options.largest, options.host, options.nvme
    if billions is None:
        size = largest_here(seconds)
        billions, host, nvme = size.parameters / 1e9, str(size.host_bytes), str(size.nvme_bytes)
    return ["--largest", f"{billions:.3f}", "--host", host, "--nvme", nvme]


if __name__ == "__main__":
    sys.exit(main())
