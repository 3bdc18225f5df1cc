"""Plans with quantised frozen weights: what a run reserves and moves, and the advice to quantise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from hetmem import testing
from hetmem.cli import main
from tests.planner.tested import MIB, Plan, PlanError, planner

WIDTH, LAYERS, CHUNK = 256, 8, 128 * 1024


class Adapted(nn.Module):
    """A frozen layer of 2 chunks in 16 bits, with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.up = nn.Parameter(torch.zeros(2 * WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.base(x) * self.up).view(-1, 2, WIDTH).sum(1)


def build() -> nn.Module:
    return nn.Sequential(*(Adapted() for _ in range(LAYERS)))


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def planned(frozen: Any, host: int = 8 * MIB, **options: Any) -> Plan:
    room = hetmem.Budget(device="2MiB", device_chunks="1MiB", host=host)
    batch = torch.empty(4, WIDTH, dtype=torch.bfloat16, device="meta")
    return planner.plan(build, batch, room, loss=mean, chunk_bytes=CHUNK, frozen=frozen, **options)


@pytest.mark.parametrize("frozen", ["nf4", "int8", {"*.base.weight": "mxfp4"}])
def test_a_plan_has_the_bytes_of_a_run(frozen: Any, tmp_path: Path) -> None:
    plan = planned(frozen)
    assert plan.fits
    plan.save(tmp_path / "plan.json")
    model = hetmem.manage(build(), device="sim", plan=tmp_path / "plan.json")
    optimizer = hetmem.AdamW([p for p in model.parameters() if p.requires_grad])
    crossed = []
    for _ in range(3):
        loss: Any = mean(model(torch.randn(4, WIDTH, dtype=torch.bfloat16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        crossed.append(hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"])
    assert crossed[2] - crossed[1] == plan.link_bytes["host_to_device"]
    coded = [chunk for chunk in testing.of(model).chunks() if chunk.home_bytes["param"] < 2 * chunk.elements]
    format_ = frozen if isinstance(frozen, str) else "mxfp4"
    held = hetmem.report(model).to_dict()["tiers"]["host"]["homes"][f"{format_} codes"]
    assert plan.role_bytes["host"][f"{format_} codes"] == sum(chunk.home_bytes["param"] for chunk in coded) == held
    assert held < 0.6 * 2 * LAYERS * 2 * WIDTH**2


def test_a_plan_says_what_is_quantised_and_runs_it() -> None:
    plan = planned("nf4")
    assert "frozen weights in nf4" in " ".join(str(plan).split())
    assert 'frozen="nf4"' in plan.code()
    assert "nf4 codes" in str(plan)
    assert "frozen={'*.base.weight': 'mxfp4'}" in planned({"*.base.weight": "mxfp4"}).code()
    with pytest.raises(hetmem.errors.ManageError, match=r"the plan is for frozen='nf4', got 'int8'"):
        hetmem.manage(build(), device="sim", plan=plan, frozen="int8")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_base_that_does_not_fit_is_offered_in_nf4() -> None:
    plan = planned(None, host=2 * MIB)
    assert not plan.fits
    assert [each["advice"] for each in plan.approximations] == ["frozen weights in nf4 (--frozen nf4)"]
    assert planned("nf4", host=2 * MIB).fits


def test_decoding_is_a_term_of_a_plan_that_grows_with_the_values() -> None:
    """On a GPU it goes on beside copies; its rate is that of the device's memory."""
    codes = planned("nf4", hardware="rtx4090")
    copies, coded = 2 * 2 * LAYERS * 2 * WIDTH**2, codes.link_bytes["host_to_device"]  # forward and backward
    rate = planner.load_profile("rtx4090").device.bytes_per_second
    assert 0 < codes.terms["decode"] <= 1.1 * (copies + coded) / rate
    assert "decoding" in str(codes)
    assert "decode" not in planned(None, hardware="rtx4090").terms


@pytest.mark.parametrize("room", ["1MiB", "3MiB", None])
def test_forwards_over_codes_have_the_peaks_of_their_plan(room: str | None) -> None:
    """Streamed; whole on the device with a few slots, in which nothing crosses a link; and with all of them."""
    limits = hetmem.Budget(device="8MiB", device_chunks=room, host=8 * MIB)
    x = torch.randint(0, 1024, (4,))
    plan = planner.plan(Embedded, x.to("meta"), limits, inference=True, chunk_bytes=CHUNK, frozen="nf4")
    assert bool(plan.role_bytes["device"].get("nf4 codes")) is (room != "1MiB")
    assert bool(plan.link_bytes["host_to_device"]) is (room == "1MiB")
    assert (plan.terms["decode"] > 0) is (room is not None)
    model = hetmem.manage(Embedded().requires_grad_(False), device="sim", plan=plan)
    with torch.no_grad():
        for _ in range(4):
            model(x)
    tiers = hetmem.report(model).to_dict()["tiers"]
    assert {tier: facts["peak_bytes"] for tier, facts in tiers.items()} == plan.peak_bytes


def test_forwards_alone_are_offered_codes_too() -> None:
    plan = planned(None, host=2 * MIB, inference=True)
    assert [each["advice"] for each in plan.approximations] == ["frozen weights in nf4 (--frozen nf4)"]


@pytest.mark.parametrize("frozen", ["nf3", {"nothing": "nf4"}])
def test_what_manage_refuses_a_plan_refuses(frozen: Any) -> None:
    with pytest.raises(PlanError, match="frozen"):
        planned(frozen)


def test_the_command_line_plans_adapters_over_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And forwards alone, where all weights are frozen."""
    arguments = ["plan", f"{__name__}:linears", "--input", f"4x{WIDTH}:float32", "--loss", f"{__name__}:mean"]
    arguments += ["--device-memory", "2MiB", "--host-memory", "64MiB"]
    assert main([*arguments, "--lora", "4", "--frozen", "nf4", "-o", str(tmp_path / "plan.json")]) == 0
    assert "peft.get_peft_model" in capsys.readouterr().out
    assert Plan.load(tmp_path / "plan.json").frozen == "nf4"
    assert main([*arguments, "--inference", "--frozen", "mxfp4"]) == 0
    assert 'frozen="mxfp4"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*arguments, "--frozen", "nf3"])


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Embedded(nn.Sequential):
    """A frozen embedding before frozen layers with adapters."""

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding) -> None:
        embedding = kind(1024, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        super().__init__(embedding, *(Adapted() for _ in range(LAYERS)))


def test_a_plan_counts_rows_of_a_frozen_embedding_in_place_of_its_table(tmp_path: Path) -> None:
    room = hetmem.Budget(device="4MiB", device_chunks="1MiB", host="16MiB")
    tokens = torch.empty(32, dtype=torch.int64, device="meta")
    plan = planner.plan(Embedded, tokens, room, loss=mean, chunk_bytes=CHUNK)
    assert plan.fits
    plan.save(tmp_path / "plan.json")
    model = hetmem.manage(Embedded(), device="sim", plan=tmp_path / "plan.json")
    optimizer = hetmem.AdamW([p for p in model.parameters() if p.requires_grad])
    crossed = []
    for _ in range(3):
        loss: Any = mean(model(torch.randint(0, 1024, (32,))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        crossed.append(hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"])
    assert crossed[2] - crossed[1] == plan.link_bytes["host_to_device"]
    own = type("Own", (nn.Embedding,), {})
    whole = planner.plan(lambda: Embedded(own), tokens, room, loss=mean, chunk_bytes=CHUNK)
    fewer = whole.link_bytes["host_to_device"] - plan.link_bytes["host_to_device"]
    assert fewer >= 2 * (1024 - 32) * WIDTH
