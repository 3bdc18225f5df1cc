"""Does it train at all, and with the bits of plain torch: small models, three steps, each way in a try of its own.

The reference computes on the GPU and updates where hetmem's homes are. It needs no pytest, unlike tests/gpu, which
asks more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.notes import Notes

MIB = 1 << 20
_SLEEP = 20_000_000  # cycles: ten milliseconds or so


class Small(nn.Module):
    """Only operators whose backward gives the same bits each time. 17 MiB of weights at width 512."""

    def __init__(self, width: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 1)
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = (
                checkpoint(self._block, x, up, down, use_reentrant=False)
                if self.checkpointing
                else self._block(x, up, down)
            )
        return self.last(self.norm(x)).float().square().mean()

    def _block(self, x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
        y: torch.Tensor = x + down(F.gelu(up(x)))
        return y


class _Pointed(nn.Linear):
    """Reads its weight by its address, as a kernel of the user's would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        what = {"data": (weight.data_ptr(), False), "shape": tuple(weight.shape), "typestr": "<f4", "version": 2}
        told = type("Told", (), {"__cuda_array_interface__": what})()
        assert torch.equal(torch.as_tensor(told, device="cuda"), weight.detach()), "another memory than the weight's"
        return super().forward(x)


class Pointed(Small):
    """With a layer that reads its weight by its address."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.last = _Pointed(width, 1)


Build = Callable[[], nn.Module]


def train_plain(
    build: Build, batches: Sequence[torch.Tensor], mixed: torch.dtype | None, where: str, around: Any, parts: int
) -> list[torch.Tensor]:
    """Losses of all steps, then the weights: float32 masters on `where`, computed with on the GPU, and gradients of
    `parts` micro-batches summed where they are."""
    torch.manual_seed(0)
    masters, twin = build().to(where), build().cuda().to(mixed or torch.float32)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, fused=True)
    losses = []
    for batch in batches:
        with torch.no_grad():
            for master, copied in zip(masters.parameters(), twin.parameters(), strict=True):
                copied.copy_(master)
        for part in batch.chunk(parts):
            with around():
                loss = twin(part.to(mixed or part.dtype))
            loss.backward()
            losses.append(loss.detach().cpu())
            for master, copied in zip(masters.parameters(), twin.parameters(), strict=True):
                arrived = copied.grad.float().to(master.device)  # type: ignore[union-attr]
                master.grad, copied.grad = arrived if master.grad is None else master.grad + arrived, None
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach().cpu() for parameter in masters.parameters())]


def train_managed(
    build: Build,
    batches: Sequence[torch.Tensor],
    budget: Any,
    around: Any,
    adamw: dict[str, Any],
    options: dict[str, Any],
    parts: int,
) -> list[torch.Tensor]:
    """The same of a managed model."""
    import hetmem

    torch.manual_seed(0)
    managed: Any = hetmem.manage(build(), budget, **{"device": "cuda", **options})
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, **adamw)
    losses = []
    for batch in batches:
        for part in batch.chunk(parts):
            with around():
                loss = managed(part)
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    weights = [value.cpu().clone() for value in managed.state_dict().values()]
    hetmem.release(managed)
    return [*losses, *weights]


def compared(notes: Notes, build: Build, **asked: Any) -> str:
    """ "the bits of torch", or an error that says what differs first."""
    import hetmem

    host, directory = asked.pop("host", "256MiB"), asked.pop("directory", None)
    around = asked.pop("around", contextlib.nullcontext)
    rows, parts = asked.pop("rows", (8, 8, 8)), asked.pop("parts", 1)
    adamw = {name: asked.pop(name) for name in ("overlap", "max_grad_norm") if name in asked}
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(count, 64, generator=generator).cuda() for count in rows]
    resident = asked.pop("resident", False)
    where = "cuda" if resident else "cpu"
    expected = train_plain(build, batches, asked.get("mixed_precision"), where, around, parts)
    weights = sum(4 * parameter.numel() for parameter in build().parameters())
    used = torch.cuda.memory_allocated()
    limits: dict[str, Any] = {"device": used + 4 * weights + 128 * MIB, "host": host}
    if not resident:
        limits |= {"device_chunks": weights // 2, **({"nvme": "256MiB", "nvme_dir": directory} if directory else {})}
        asked.setdefault("chunk_bytes", _chunk_bytes(weights))
    found = train_managed(build, batches, hetmem.Budget(**limits), around, adamw, asked, parts)
    torch.cuda.synchronize()
    steps = parts * len(batches)
    for at, (one, other) in enumerate(zip(expected, found, strict=True)):
        what = f"loss {at + 1}" if at < steps else f"weight {at - steps}"
        far = (one.double() - other.double()).abs().max().item()
        assert torch.equal(one, other), (
            f"{what} differs by {far:.3g} at most ({one.flatten()[0]}, {other.flatten()[0]})"
        )
    return "the bits of torch"


def _chunk_bytes(weights_bytes: int) -> int:
    """Of a model whose largest weight takes an eighth or so: sixteen chunks, of whole pages."""
    return max(weights_bytes // 16 // 4096 * 4096, 65536)


def smoke(notes: Notes) -> None:
    """Each check is waited for before the next begins."""
    import tempfile

    torch.use_deterministic_algorithms(True)
    width = 64 if notes.small else 512
    build = lambda: Small(width)  # noqa: E731
    bf16 = torch.bfloat16
    autocast = lambda: torch.autocast("cuda", bf16)  # noqa: E731
    with tempfile.TemporaryDirectory() as disk:
        checks: dict[str, Callable[[], str]] = {
            "float32, homes on the host": lambda: compared(notes, build),
            "bfloat16 copies": lambda: compared(notes, build, mixed_precision=bf16),
            "checkpointed": lambda: compared(notes, lambda: Small(width, checkpointing=True), mixed_precision=bf16),
            "all on the device": lambda: compared(notes, build, resident=True),
            "bfloat16, all on the device": lambda: compared(notes, build, mixed_precision=bf16, resident=True),
            "bfloat16, all on the device, checkpointed": lambda: compared(
                notes, lambda: Small(width, checkpointing=True), mixed_precision=bf16, resident=True
            ),
            "bfloat16, all on the device, two micro-batches": lambda: compared(
                notes, build, mixed_precision=bf16, resident=True, parts=2
            ),
            "two micro-batches": lambda: compared(notes, build, mixed_precision=bf16, parts=2),
            "updates in the backward": lambda: compared(notes, build, mixed_precision=bf16, overlap="backward"),
            "updates in the backward, two micro-batches": lambda: compared(
                notes, build, mixed_precision=bf16, overlap="backward", parts=2
            ),
            "updates in the next forward": lambda: compared(notes, build, mixed_precision=bf16, overlap="forward"),
            "homes on NVMe": lambda: compared(
                notes, build, mixed_precision=bf16, host=f"{2 if notes.small else 24}MiB", directory=disk
            ),
            "copies that are late": lambda: compared(notes, build, mixed_precision=bf16, device=_late_copies()),
            "a weight's address in its module's call": lambda: compared(notes, lambda: Pointed(width)),
            "autocast": lambda: compared(notes, build, around=autocast),
            "a new shape each step": lambda: compared(notes, build, mixed_precision=bf16, rows=(8, 3, 16, 8)),
            "activations that move": lambda: compared(notes, build, mixed_precision=bf16, activations="offload"),
            "activations that move, copies that are late": lambda: compared(
                notes, build, mixed_precision=bf16, activations="offload", device=_late_copies()
            ),
            "workers of a DataLoader by fork": lambda: _with_workers(notes, build),
        }
        if notes.small:
            del checks["a weight's address in its module's call"]  # torch asks CUDA whose address it is
        for name, check in checks.items():
            found = notes.attempt(name, _waited_for, check, needs=2)
            if found is not None:
                notes.text(name, found)


def _waited_for(check: Callable[[], str]) -> str:
    found = check()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return found


def _late_copies() -> Any:
    """A device on whose copy streams something sleeps before each copy."""
    from hetmem.memory.cuda_device import ComputeStream, CudaDevice, CudaStreams
    from hetmem.memory.stream_copies import StreamCopier

    class Sleepy(CudaStreams):
        def enqueue(self, link: Any, after: Any, work: Callable[[], None]) -> Any:
            def late() -> None:
                torch.cuda._sleep(_SLEEP)
                work()

            return super().enqueue(link, after, late)

    class Late(CudaDevice):
        def copier(self, seen: Any, finished: Any) -> Any:
            return StreamCopier(Sleepy(self.torch_device, ComputeStream(self.torch_device)), seen, finished)

    return Late()


class _Rows(torch.utils.data.Dataset[list[float]]):
    """Of numbers, not tensors: those cross by a socket, whose path is too long below a deep directory of OUT."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> list[float]:
        return [at / 16] * 64


def _with_workers(notes: Notes, build: Build) -> str:
    """Homes are page-locked while workers are forked; a batch of theirs trains."""
    import hetmem

    weights = sum(4 * parameter.numel() for parameter in build().parameters())
    chunk = _chunk_bytes(weights)
    room = torch.cuda.memory_allocated() + 4 * weights + 128 * MIB
    managed: Any = hetmem.manage(
        build(),
        hetmem.Budget(device=room, device_chunks=weights // 2, host="256MiB"),
        device="cuda",
        chunk_bytes=chunk,
    )
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(
        _Rows(), 8, num_workers=2, multiprocessing_context="fork", timeout=15, collate_fn=list
    )
    losses = []
    for batch in loader:
        loss = managed(torch.tensor(batch).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    hetmem.release(managed)
    assert len(losses) == 2 and all(loss == loss for loss in losses), losses
    return "trained with batches of forked workers"
