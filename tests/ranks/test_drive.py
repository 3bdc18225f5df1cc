"""Ranks whose states are on NVMe, in one file: bits, files, writes of the program, and disks that fail."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem.errors import HetmemError
from hetmem.testing import ranks

WIDTH, LAYERS, STEPS = 64, 20, 3


class Net(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = batch + layer(batch).tanh()
        return batch.float().square().mean()


class Job:
    """A model of some layers, each in a chunk, whose states have no room in host memory."""

    def __init__(
        self, folder: str, width: int = WIDTH, layers: int = LAYERS, device: str = "sim", **options: Any
    ) -> None:
        torch.manual_seed(3)
        self.width, self.device = width, device
        chunk = 4 * width * width
        room = 1 << 20 if device == "sim" else 64 << 20
        budget = hetmem.Budget(
            device=2 * layers * chunk + room,
            device_chunks=12 * chunk,
            host=chunk * (2 * layers + 36),
            nvme=8 * chunk * layers,
            nvme_dir=folder,
        )
        self.mixed = options.pop("mixed_precision", None)
        self.model = hetmem.manage(
            Net(width, layers), budget, device=device, chunk_bytes=chunk, mixed_precision=self.mixed
        )
        self.optimizer = hetmem.AdamW(self.model.parameters(), lr=1e-2, **options)

    def batch(self, step: int, rank: int) -> torch.Tensor:
        made = torch.randn(8, self.width, generator=torch.Generator().manual_seed(10 * step + rank))
        made = made if self.mixed is None else made.to(self.mixed)
        return made if self.device == "sim" else made.to(self.device)

    def step(self, number: int, batches: list[int]) -> None:
        self.optimizer.zero_grad()
        for rank in batches:
            self.model(self.batch(number, rank)).backward()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        shown = (self.optimizer.state[p] for p in self.model.parameters())
        states = [entry[name].clone() for entry in shown for name in ("exp_avg", "exp_avg_sq")]
        return [*(p.detach().clone() for p in self.model.parameters()), *states]

    def on_nvme(self) -> int:
        return int(hetmem.report(self.model).to_dict()["tiers"]["nvme"]["homes"].get("exp_avg", 0))


def trained(rank: int, count: int, folder: str, runs: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """What a rank of a group finds in each run, or all in one process, if `rank` is -1."""
    found = []
    for options in runs:
        job = Job(folder, **options)
        for p in job.model.parameters() if rank < 0 else ():
            p.register_hook(lambda gradient: gradient / count)
        for step in range(STEPS):
            job.step(step, [*range(count)] if rank < 0 else [rank])
            if step == 1 and rank >= 0:
                path = os.path.join(folder, "file")
                hetmem.save(path, job.model, job.optimizer)
                job.step(9, [rank])
                hetmem.load(path, job.model, job.optimizer)
            if step == 1:
                for p in job.model.parameters():
                    job.optimizer.state[p]["exp_avg"].mul_(0.5)
        assert job.on_nvme() or rank < 0
        found.append(job.values())
        hetmem.release(job.model)
    return found


RUNS = [{}, {"overlap": "backward", "mixed_precision": torch.bfloat16}, {"overlap": "forward", "max_grad_norm": 0.5}]


@pytest.mark.parametrize(
    ("count", "machines", "runs"),
    [
        (2, 1, RUNS[1:2]),
        pytest.param(2, 1, [RUNS[0], RUNS[2]], marks=pytest.mark.nightly),
        pytest.param(2, 2, RUNS, marks=pytest.mark.nightly),
        pytest.param(2, 1, [{"width": 1024, "layers": 24}], marks=pytest.mark.nightly),
        pytest.param(4, 1, [RUNS[1]], marks=pytest.mark.nightly),
    ],
)
def test_states_on_nvme_have_the_bits_of_one_process(
    count: int, machines: int, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With states and weights loaded again, and states written by the program of all ranks; of one tile a chunk, and of
    several."""
    expected = trained(-1, count, str(tmp_path), [{**run, "overlap": "off"} for run in runs])
    for found in ranks(count, trained, count, str(tmp_path), runs, machines=machines):
        for run, one, other in zip(runs, found, expected, strict=True):
            assert all(map(torch.equal, one, other)), run
    assert not [name for name in os.listdir(tmp_path) if name != "file"]


def told(rank: int, folder: str) -> list[str]:
    """What each rank is told where the disk of rank 1 fails in its third step, and where there is none."""
    write, fails = os.pwritev, [False]

    def failing(*arguments: Any) -> int:
        if fails[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)

    os.pwritev = failing  # type: ignore[assignment]
    found, job = [], Job(folder)
    for what in (
        lambda: [job.step(step, [rank]) for step in range(2)],
        lambda: [fails.insert(0, rank == 1), job.step(2, [rank])],
        lambda: Job(folder, moments="8bit"),
        lambda: Job(os.path.join(folder, "none")),
    ):
        try:
            what()
        except HetmemError as error:  # noqa: PERF203 - each is told
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_disk_that_fails_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    first, second = ranks(2, told, str(tmp_path))
    assert second[0].startswith("StoreError") and "cannot write" in second[0]
    assert re.match("PeerError: rank 1 takes no part any more, as it raised StoreError: .*cannot write", first[0])
    for found in (first, second):
        assert re.match("ManageError: moments='8bit' on NVMe is not possible", found[1])
        assert re.match("BudgetError: .*none", found[2])
