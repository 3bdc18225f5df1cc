"""Plans of several ranks: peaks are those of a run, and the text says what binds and which tool would be better."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetmem
from hetmem.planner import load_profile
from hetmem.planner.plan import PlanError
from hetmem.planner.ranked import RanksPlan
from hetmem.testing import ranks

WIDTH, WORDS = 64, 512
BUDGET = hetmem.Budget(device="2MiB", host="64MiB", device_chunks="1MiB")
CHUNK = 128 << 10


class Model(nn.Module):
    """Tokens [rows, tokens] to a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def batch(rank: int) -> Tensor:
    return torch.randint(WORDS, (2, 32), generator=torch.Generator().manual_seed(rank))


def planned(count: int, budget: hetmem.Budget = BUDGET, **options: Any) -> RanksPlan:
    options |= {"chunk_bytes": CHUNK, "mixed_precision": torch.bfloat16}
    return hetmem.plan_ranks(Model, batch(0), count, budget, **options)


def peaks(rank: int, budget: dict[str, Any], chunk_bytes: int, options: dict[str, Any]) -> dict[str, int]:
    limits = hetmem.Budget(**budget)
    model = hetmem.manage(Model(), limits, device="sim", chunk_bytes=chunk_bytes, mixed_precision=torch.bfloat16)
    optimizer = hetmem.AdamW(model.parameters(), **options)
    for _ in range(3):
        model(batch(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {tier: figures["peak_bytes"] for tier, figures in hetmem.report(model).to_dict()["tiers"].items()}
    hetmem.release(model)
    return found


@pytest.mark.parametrize(
    ("count", "host", "options"),
    [
        (2, "64MiB", {}),
        pytest.param(2, "64MiB", {"overlap": "backward"}, marks=pytest.mark.nightly),
        pytest.param(4, "64MiB", {"overlap": "forward", "max_grad_norm": 1.0}, marks=pytest.mark.nightly),
        *(
            pytest.param(count, "4864KiB", options, marks=pytest.mark.nightly)
            for count in (2, 4)
            for options in ({}, {"overlap": "backward"})
        ),
    ],
)
def test_peaks_are_those_of_a_run(count: int, host: str, options: dict[str, Any], tmp_path: Path) -> None:
    drive = {"nvme": "64MiB", "nvme_dir": str(tmp_path)} if host == "4864KiB" else {}
    plan = planned(count, hetmem.Budget(device="2MiB", host=host, device_chunks="1MiB", **drive), **options)
    assert bool(drive) == bool(plan.peak_bytes["nvme"])
    budget = {**plan.rank.budget_bytes, "device_chunks": plan.rank.device_chunks, "home_copies": plan.rank.home_copies}
    budget |= {"nvme_dir": str(tmp_path)} if drive else {"nvme": None}
    for found in ranks(count, peaks, budget, plan.rank.chunk_bytes, options):
        assert found["host"] == plan.peak_bytes["host"], "one copy of all homes, whatever the number of ranks"
        assert found["nvme"] == plan.peak_bytes["nvme"]
        assert abs(found["device"] - plan.peak_bytes["device"]) <= 0.03 * found["device"]


def test_the_terms_are_those_of_the_design() -> None:
    one, four = planned(1), planned(4)
    moved, out = (one.rank.link_bytes[link] for link in ("host_to_device", "device_to_host"))
    assert four.host_bytes - one.host_bytes == 3 * moved + 6 * out
    assert four.peak_bytes == one.peak_bytes
    share = four.terms["host_memory"] / one.terms["host_memory"]
    assert share == pytest.approx(four.host_bytes / one.host_bytes)
    profile = load_profile("h100")
    rate = profile.host.traffic_bytes_per_second
    measured = replace(
        profile, host=replace(profile.host, ranks_copy_bytes_per_second=rate)
    )  # each is read and written
    assert planned(4, hardware=measured).terms["host_memory"] == four.terms["host_memory"] / 2
    others = max(seconds for name, seconds in four.terms.items() if name != "compute")
    assert four.compute_bound_tokens == math.ceil(four.rank.tokens * others / four.terms["compute"])


def test_machines_exchange_the_sums_of_each_backward() -> None:
    one, micro_batches = planned(2), 2
    options = {"chunk_bytes": CHUNK, "mixed_precision": torch.bfloat16, "micro_batches": micro_batches}
    for machines, copies in ((2, 1), (4, 3), (8, 7 / 4)):
        plan = hetmem.plan_ranks(Model, batch(0), 2, BUDGET, machines=machines, network="1GB/s", **options)
        sums = plan.rank.role_bytes["host"]["grad"]
        assert plan.network_bytes == math.ceil(copies * sums) * micro_batches
        assert plan.terms["network"] == plan.network_bytes / 1e9
        assert plan.peak_bytes == one.peak_bytes
        assert f"2 ranks on each of {machines} machines" in " ".join(str(plan).split())
    alone = hetmem.plan_ranks(Model, batch(0), 2, BUDGET, **options)
    assert alone.step_seconds is not None
    for network, nothing_hides_it in (("1000GB/s", False), ("1MB/s", True)):
        plan = hetmem.plan_ranks(Model, batch(0), 2, BUDGET, machines=2, network=network, **options)
        assert plan.step_seconds is not None
        behind = plan.step_seconds - alone.step_seconds
        assert (behind > 0) == nothing_hides_it
        assert 0 <= plan.terms["network"] - behind <= alone.step_seconds / 2
    little = hetmem.Budget(device="2MiB", host="1MiB")
    assert "have to be divided" in str(hetmem.plan_ranks(Model, batch(0), 2, little, machines=2, network="1GB/s"))
    with pytest.raises(PlanError, match="several machines needs network="):
        hetmem.plan_ranks(Model, batch(0), 2, BUDGET, machines=2)


def test_what_fits_the_gpus_is_sent_elsewhere_and_what_a_group_has_not_is_refused() -> None:
    texts = [str(planned(4, hetmem.Budget(device=device, host="64MiB"))) for device in ("2MiB", "4MiB", "1GiB")]
    assert "better tool" not in texts[0]
    assert "FSDP2 (fully_shard) is the better tool" in " ".join(texts[1].split())
    assert "DistributedDataParallel is the better tool" in " ".join(texts[2].split())
    with pytest.raises(PlanError, match="does not have several NVMe directories yet"):
        planned(2, hetmem.Budget(device="2MiB", host="64MiB", nvme="1GiB", nvme_dir=["/tmp", "/var/tmp"]))
    for drive, at_least in (({}, 5 << 20), ({"nvme": "64MiB", "nvme_dir": "/tmp"}, 5 << 19)):
        short = planned(2, hetmem.Budget(device="2MiB", host="2MiB", **drive))
        missing = short.rank.missing_bytes["host"]
        assert not short.fits and at_least <= (2 << 20) + missing <= at_least + (2 << 20)
        assert planned(2, hetmem.Budget(device="2MiB", host=(2 << 20) + missing, **drive)).fits
    with pytest.raises(PlanError, match="ranks must be a whole number"):
        planned(0)
