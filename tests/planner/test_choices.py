"""Whatever a plan chooses is what `manage(plan=…)` then runs, also after the plan went through its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from tests.planner.tested import KEPT, KIB, MIB, planner
from tests.test_planning import BATCH, GPT, plan_alone


def planned(budget: hetmem.Budget, **options: Any) -> planner.Plan:
    return plan_alone(GPT, BATCH, budget, **options)


STREAMED = hetmem.Budget(device=2 * MIB, host=16 * MIB, device_chunks=MIB)


def run(plan: planner.Plan, directory: Path, steps: int = 0, **options: Any) -> Any:
    """The runtime of a model that is managed by `plan`, read back from its file."""
    plan.save(directory / "plan.json")
    model = hetmem.manage(GPT(), plan=planner.Plan.load(directory / "plan.json"), device="sim", **options)
    if steps:
        optimizer = hetmem.AdamW(model.parameters())
        for _ in range(steps):
            model(BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("chunk_bytes", [None, 64 * KIB])
def test_the_chunk_size(chunk_bytes: int | None, tmp_path: Path) -> None:
    plan = planned(STREAMED, chunk_bytes=chunk_bytes)
    model = run(plan, tmp_path)
    assert testing.of(model).memory().slot_bytes == plan.slot_bytes
    assert hetmem.report(model).to_dict()["chunk_waste"] == plan.chunk_waste


@pytest.mark.parametrize("copies", [None, False, True])
def test_16_bit_copies_at_home_and_the_precision(copies: bool | None, tmp_path: Path) -> None:
    plan = replace(planned(STREAMED, mixed_precision=torch.bfloat16), home_copies=copies)
    plan = replace(plan, budget_bytes=plan.capacity_bytes)  # which has room for either
    chunks = testing.of(run(plan, tmp_path)).chunks()
    assert {chunk.compute_dtype for chunk in chunks} == {torch.bfloat16}
    assert {"compute" in chunk.homes for chunk in chunks} == {copies is not False}


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_of_ways_that_are_as_fast_the_one_that_takes_least_host_memory(overlap: str) -> None:
    budget = hetmem.Budget(device=2 * MIB, host=64 * MIB, device_chunks=MIB)
    options = {"mixed_precision": torch.bfloat16, "overlap": overlap}
    chosen = planned(budget, **options)
    with_copies, without = (planned(replace(budget, home_copies=copies), **options) for copies in (True, False))
    assert without.step_seconds is not None and with_copies.step_seconds is not None
    assert without.step_seconds <= 1.01 * with_copies.step_seconds  # else this shows nothing
    assert without.peak_bytes["host"] < 0.9 * with_copies.peak_bytes["host"]
    assert (chosen.peak_bytes["host"], chosen.home_copies) == (without.peak_bytes["host"], False)


def test_everything_on_the_device(tmp_path: Path) -> None:
    plan = planned(hetmem.Budget(device="6MiB", host="64KiB"))
    assert plan.fits
    assert plan.device_chunks is not None
    assert plan.device_update_share == 1
    model = run(plan, tmp_path, steps=2)
    assert testing.of(model).memory().resident
    tiers = hetmem.report(model).to_dict()["tiers"]
    assert tiers["device"]["homes"] == {
        k: v for k, v in plan.role_bytes["device"].items() if k in tiers["device"]["homes"]
    }


@pytest.mark.parametrize("mixed_precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("host", "nvme"), [(16 * MIB, 0), (2 * MIB, 16 * MIB)], ids=["host", "nvme"])
def test_where_the_optimizer_runs_and_what_is_kept_for_it(
    host: int, nvme: int, mixed_precision: torch.dtype | None, tmp_path: Path
) -> None:
    directory: dict[str, Any] = {"nvme": nvme, "nvme_dir": tmp_path} if nvme else {}
    budget = hetmem.Budget(device=8 * MIB, host=host, device_chunks=3 * MIB, **directory)
    plan = planned(budget, chunk_bytes=128 * KIB, mixed_precision=mixed_precision)
    model = run(plan, tmp_path, steps=3)
    chunks = testing.of(model).chunks()
    there = {name for chunk in chunks if chunk.homes["exp_avg"] == "device" for name in chunk.parameters}
    moved = sum(parameter.numel() for name, parameter in model.named_parameters() if name in there)
    assert 0 < plan.device_update_share < 1
    assert plan.device_update_share == moved / plan.parameters
    tiers = hetmem.report(model).to_dict()["tiers"]
    for tier in ("host", "nvme"):
        homes = dict(tiers[tier]["homes"])
        if "kept" in homes:
            homes[KEPT] = homes.pop("kept")
        assert homes == {role: nbytes for role, nbytes in plan.role_bytes[tier].items() if role != "staging"}
    assert sum(tiers["host"]["homes"].values()) + tiers["host"]["staging_bytes"] == tiers["host"]["used_bytes"]
    assert "kept for homes that are on the device now" in str(hetmem.report(model))


def test_a_plan_that_does_not_fit_is_not_run() -> None:
    refused = planned(hetmem.Budget(device="2MiB", host="1MiB", device_chunks="1MiB"))
    assert not refused.fits
    with pytest.raises(hetmem.errors.ManageError, match="the plan does not fit"):
        hetmem.manage(GPT(), plan=refused, device="sim")


def test_another_precision_than_the_planned_one_is_refused() -> None:
    plan = planned(STREAMED, mixed_precision=torch.bfloat16)
    with pytest.raises(hetmem.errors.ManageError, match=r"for mixed_precision=torch.bfloat16, got torch.float16"):
        hetmem.manage(GPT(), plan=plan, device="sim", mixed_precision=torch.float16)
    hetmem.release(hetmem.manage(GPT(), plan=plan, device="sim", mixed_precision=torch.bfloat16))


def test_a_model_is_planned_with_its_layers_checkpointed(tmp_path: Path) -> None:
    """As one that does it by itself."""
    batch = torch.zeros(4, 32, dtype=torch.int64)
    plan = planner.plan(GPT, batch, STREAMED, checkpointing=True)
    own = planner.plan(lambda: GPT(saves=True), batch, STREAMED)
    for name in ("fits", "peak_bytes", "role_bytes", "flops", "link_bytes", "largest_parameters"):
        assert getattr(plan, name) == getattr(own, name), name
    assert plan.step_seconds == pytest.approx(own.step_seconds, rel=0.01)
    assert plan.activation_bytes == {"with checkpointing": own.activation_bytes["as written"]}
    assert "every layer checkpointed" in " ".join(str(plan).split())
    assert "checkpoint every layer" in plan.code()
    plan.save(tmp_path / "plan.json")
    assert planner.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"checkpointing": "all"}, "checkpointing must be True or False, got 'all'"),
        ({"checkpointing": True, "real": True}, "have the model checkpoint its layers by itself"),
        ({"checkpointing": True, "inference": True}, "forwards alone keep nothing that could be computed again"),
    ],
)
def test_checkpointing_that_nobody_can_plan_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(planner.PlanError, match=expected):
        planned(STREAMED, **options)


def test_a_model_without_layers_cannot_be_planned_with_them_checkpointed() -> None:
    with pytest.raises(planner.PlanError, match="no layers to checkpoint: expected a ModuleList"):
        planner.plan(lambda: torch.nn.Linear(8, 8), torch.zeros(4, 8), STREAMED, checkpointing=True, loss=torch.sum)


def test_a_plan_for_another_machine_runs_with_directories_of_this_one(tmp_path: Path) -> None:
    room = planner.Capacities(2 * MIB, 4 * MIB, 64 * MIB)
    call, machine = planner.TracedCall(GPT, BATCH, None, torch.bfloat16), planner.load_profile("l4")
    plan = planner.plan_within(call, room, machine, compares=False)  # else it is one without a drive
    with pytest.raises(hetmem.errors.BudgetError, match=r"plan\.with_nvme\("):
        hetmem.manage(GPT(), plan=plan, device="sim")
    here = plan.with_nvme(tmp_path)
    inside = testing.of(run(here, tmp_path, steps=1))
    assert "nvme" in inside.homes()
    assert {chunk.compute_dtype for chunk in inside.chunks()} == {torch.bfloat16}
    assert replace(here, nvme_directories=()) == plan


class Drops(torch.nn.Module):
    """Attention with dropout, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, dropout_p=0.1, is_causal=True).square().mean()


def test_dropout_within_attention_keeps_the_scores_on_a_processor_only() -> None:
    """Eight sequences of GPT-2 XL were once planned with 156 GiB of activations, where a GPU keeps 40."""
    tokens, scores = 512, 2 * 512 * 512 * 4
    gpu = planner.load_profile("l4")
    cores = replace(gpu, host_to_device=replace(gpu.host_to_device, by_the_caller=True))
    budget = hetmem.Budget(device="64MiB", host="16MiB")
    needed = [
        planner.plan(Drops, torch.zeros(1, tokens, 16), budget, profile).activation_bytes["as written"]
        for profile in (gpu, cores)
    ]
    assert needed[0] < scores < needed[1]
