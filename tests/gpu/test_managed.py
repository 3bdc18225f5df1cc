"""A managed model on a real GPU: the bits of plain torch and the budget's peak in one test, and races built to be lost.

The reference computes on the GPU too; where homes are in host memory it updates there, as hetmem does. It runs first
and is gone before the managed model runs: a budget is of all that this process has on the GPU. `make gpu` runs this.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product: the same bits each time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.intercept import registry
from hetmem.memory.cuda_device import ComputeStream, CudaDevice, CudaStreams
from hetmem.memory.stream_copies import StreamCopier
from hetmem.memory.transfer import Copier, Finished, Seen
from hetmem.schedule.blocks import Link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.filterwarnings("default"),  # of a CUDA build of torch, which the other tests never see
]
MIB = 1 << 20
ROOM = 128 * MIB  # of the GPU, beside what the process has there already: cuBLAS takes up to 32 MiB for each thread,
# which the reference has made it do, and cuBLASLt as much for the length of a product
CHUNKS = 24 * MIB  # of that, for 67 MiB of weights in float32 and 34 in 16 bits
LONG = 50_000_000  # cycles that a stream sleeps: some 30 ms


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Weights of 67 MiB at width 512. Only operators whose backward gives the same bits each time."""

    def __init__(self, width: int = 512, depth: int = 8, *, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.register_buffer("scale", torch.full((1,), 2))
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return self.last(x).float().square().mean()


class Reference:
    """Plain torch: compute on the GPU in `dtype`, float32 masters and `torch.optim.AdamW(fused=True)` on `where`."""

    def __init__(self, build: Callable[[], nn.Module], dtype: torch.dtype, where: str) -> None:
        torch.manual_seed(0)
        self.masters = build().to(where)
        torch.manual_seed(0)
        self.twin = build().cuda().to(dtype)
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    def step(self, batches: Sequence[torch.Tensor], clip: float | None) -> list[torch.Tensor]:
        losses = []
        self.optimizer.zero_grad()
        for batch in batches:
            with torch.no_grad():
                for master, copied in zip(self.masters.parameters(), self.twin.parameters(), strict=True):
                    copied.copy_(master)
            loss = self.twin(batch.to(self.dtype))
            loss.backward()
            losses.append(loss.detach())
            for master, copied in zip(self.masters.parameters(), self.twin.parameters(), strict=True):
                arrived = copied.grad.float().to(master.device)
                master.grad = arrived if master.grad is None else master.grad + arrived
                copied.grad = None
        if clip is not None:
            nn.utils.clip_grad_norm_(self.masters.parameters(), clip)
        self.optimizer.step()
        return losses

    def move(self, where: str) -> None:
        """From now on the optimizer is there."""
        self.masters.to(where)
        for state in self.optimizer.state.values():
            state.update({name: value.to(where) for name, value in state.items()})


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 64, generator=generator).cuda() for _ in range(count)]


@dataclass(frozen=True)
class Step:
    losses: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


def steps_of(
    build: Callable[[], nn.Module],
    *,
    mixed: torch.dtype | None,
    where: str,
    then: str = "",
    clip: float | None = 0.05,
) -> list[Step]:
    """Three steps of two micro-batches of the reference, which updates `where`, and after the first one where `then`
    says. Nothing of it is left on the GPU but what cuBLAS keeps."""
    reference = Reference(build, mixed or torch.float32, where)
    steps: list[Step] = []
    for _ in range(3):
        if steps and then:
            reference.move(then)
        losses = reference.step(batches(2), clip)
        weights = {name: p.detach().cpu().clone() for name, p in reference.masters.named_parameters()}
        steps.append(Step([loss.cpu() for loss in losses], weights))
    del reference
    gc.collect()
    torch.cuda.empty_cache()
    return steps


def budget(**changes: Any) -> hetmem.Budget:
    """`ROOM` beside what is on the GPU now, and `CHUNKS` of it."""
    sizes = {"device": torch.cuda.memory_allocated() + ROOM, "device_chunks": CHUNKS, "host": "1GiB"}
    return hetmem.Budget(**{**sizes, **changes})


def assert_trains_alike(
    build: Callable[[], nn.Module], expected: Sequence[Step], limits: hetmem.Budget, **options: Any
) -> nn.Module:
    """Every loss and every weight of the managed model has the bits of the reference."""
    torch.manual_seed(0)
    managed = hetmem.manage(build(), limits, **{"device": "cuda", **options})
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, weight_decay=0.1)
    for step in expected:
        optimizer.zero_grad()
        losses = []
        for batch in batches(2):
            loss = managed(batch)
            loss.backward()
            losses.append(loss.detach().cpu())
        nn.utils.clip_grad_norm_(managed.parameters(), 0.05)
        optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(losses, step.losses, strict=True))
        for name, ours in managed.named_parameters():
            assert torch.equal(ours.detach().cpu(), step.weights[name]), f"{name} differs"
    return managed


@pytest.fixture(autouse=True)
def _same_bits_each_time() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Measured(CudaDevice):
    """Remembers the most that was allocated: hetmem itself starts the count anew where chunks give memory back."""

    most_bytes = 0

    def forget_peak(self) -> None:
        self.most_bytes = max(self.most_bytes, torch.cuda.max_memory_allocated())
        super().forget_peak()


@pytest.mark.parametrize("mixed", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_streaming_has_the_bits_of_torch_within_the_budget(
    placement: str, checkpointing: bool | None, mixed: torch.dtype | None, tmp_path: Any
) -> None:
    """Numerics and peak in one test: `ROOM` of device for 268 MiB of weights, gradients and states, and activations."""
    build = lambda: Model(checkpointing=checkpointing)  # noqa: E731
    expected = steps_of(build, mixed=mixed, where="cpu")
    limits = budget(**({"host": "96MiB", "nvme": "1GiB", "nvme_dir": tmp_path} if placement == "nvme" else {}))
    device = Measured()
    managed = assert_trains_alike(build, expected, limits, mixed_precision=mixed, chunk_bytes="4MiB", device=device)
    report = hetmem.report(managed).to_dict()
    assert report["tiers"]["device"]["chunk_peak_bytes"] <= CHUNKS
    assert report["evictions"] > 0
    assert (report["tiers"]["nvme"]["peak_bytes"] > 0) == (placement == "nvme")
    device.forget_peak()
    device.most_bytes = 0
    managed(batches(1)[0]).backward()
    device.forget_peak()
    assert 0 < device.most_bytes <= limits.device
    hetmem.release(managed)


class Odd(Model):
    """Parameters of all lengths: torch's kernel on the host rounds their last elements in another way."""

    def __init__(self) -> None:
        super().__init__(67, 3)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: hetmem.AdamW(parameters, lr=1e-2, weight_decay=0.1, max_grad_norm=0.05),
    "SGD": lambda parameters: hetmem.optim.offload(
        torch.optim.SGD, parameters, lr=1e-2, momentum=0.9, max_grad_norm=0.05
    ),
}


@pytest.mark.parametrize("kind", [(None, None), (None, torch.bfloat16), (torch.bfloat16, None)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_homes_that_move_to_the_gpu_leave_every_bit_as_it_was(
    optimizer: str, kind: tuple[torch.dtype | None, torch.dtype | None]
) -> None:
    """With `device_chunks` at its least the host updates all; with more, a part is on the GPU from step two on."""
    dtype, mixed = kind
    found = []
    for room in ("160KiB", "512KiB" if dtype else "1MiB"):
        torch.manual_seed(0)
        model = Odd().to(dtype or torch.float32)
        managed = hetmem.manage(
            model, budget(device_chunks=room), device="cuda", mixed_precision=mixed, chunk_bytes="16KiB"
        )
        made = OPTIMIZERS[optimizer](managed.parameters())
        norms = []
        for batch in batches(4):
            managed(batch.to(dtype or torch.float32)).backward()
            made.step()
            made.zero_grad()
            norms.append(made.grad_norm)
        states = [value.cpu() for state in made.state.values() for value in state.values() if torch.is_tensor(value)]
        memory = registry.of_module(managed).runtime.memory
        assert not memory.resident
        moved = memory.moved_bytes
        found.append((norms, [*(p.detach().cpu() for p in managed.parameters()), *states], moved))
        hetmem.release(managed)
    (norms, tensors, moved), (norms_there, tensors_there, moved_there) = found
    assert norms == norms_there
    assert len(tensors) == len(tensors_there)
    assert all(map(torch.equal, tensors, tensors_there))
    assert moved == 0
    if optimizer == "AdamW":  # torch's operators may round otherwise on a GPU; then homes stay in host memory
        assert moved_there > 0


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_fits_stays_on_the_gpu_and_has_the_bits_of_torch(mixed: torch.dtype | None) -> None:
    expected = steps_of(Model, mixed=mixed, where="cuda")
    limits = hetmem.Budget(device="2GiB", host="64MiB")
    managed = assert_trains_alike(Model, expected, limits, mixed_precision=mixed)
    assert all(parameter.is_cuda for parameter in managed.parameters())
    assert hetmem.report(managed).to_dict()["links"]["host_to_device"]["bytes"] == 0
    hetmem.release(managed)
    assert not any(tensor.is_cuda for tensor in (*managed.parameters(), *managed.buffers()))


class SleepyStreams(CudaStreams):
    """Every copy is late by as long as the whole step computes."""

    def enqueue(self, link: Link, after: Sequence[Any], work: Callable[[], None]) -> Any:
        def late() -> None:
            torch.cuda._sleep(LONG)
            work()

        return super().enqueue(link, after, late)


class LateCopies(CudaDevice):
    def copier(self, seen: Seen, finished: Callable[[Finished], None]) -> Copier:
        return StreamCopier(SleepyStreams(self.torch_device, ComputeStream(self.torch_device)), seen, finished)


class SlowModel(Model):
    """Compute is late instead: it sleeps before every forward, so copies run far ahead of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(4 * LONG)
        return super().forward(x)


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_copies_that_are_late_are_waited_for(mixed: torch.dtype | None) -> None:
    expected = steps_of(Model, mixed=mixed, where="cpu")
    options = {"mixed_precision": mixed, "chunk_bytes": "4MiB", "sanitize": True}
    hetmem.release(assert_trains_alike(Model, expected, budget(), device=LateCopies(), **options))


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_copies_never_overtake_compute_that_is_late(mixed: torch.dtype | None) -> None:
    expected = steps_of(Model, mixed=mixed, where="cpu")
    options = {"mixed_precision": mixed, "chunk_bytes": "4MiB", "sanitize": True}
    hetmem.release(assert_trains_alike(SlowModel, expected, budget(), **options))


def test_weights_say_they_are_on_the_gpu_while_the_model_runs_and_at_home_else() -> None:
    seen = []

    class Asks(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.first.weight.device.type, self.first.weight.is_cuda, next(self.parameters()).device.type))
            return super().forward(x)

    managed = hetmem.manage(Asks(), budget(), device="cuda", chunk_bytes="4MiB")
    managed(batches(1)[0])
    assert seen == [("cuda", True, "cuda")]
    assert managed.first.weight.device.type == "cpu"


def test_a_user_may_write_to_weights_between_steps() -> None:
    managed = hetmem.manage(Model(), budget(), device="cuda", chunk_bytes="4MiB")
    x = batches(1)[0]
    before = managed(x).item()
    with torch.no_grad():
        managed.last.weight.mul_(2)
        managed.last.bias.mul_(2)
    assert managed(x).item() == pytest.approx(4 * before, rel=1e-5)
    managed.last.weight.data.mul_(0)
    managed.last.bias.data.mul_(0)
    assert managed(x).item() == 0
