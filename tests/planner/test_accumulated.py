"""Plans of steps whose micro-batches pass the model layer by layer are what `hetmem.accumulate` does then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from hetmem.cli import main
from tests.planner.test_gradients import assert_peaks, named, room
from tests.planner.tested import KIB, MIB, Kind, Rate, ThreadCosts, TracedCall, planner, trace
from tests.test_planning import BATCH, GPT, plan_alone

BF16 = torch.bfloat16
COUNT = 3
ROOMY = hetmem.Budget(device=8 * MIB, device_chunks=768 * KIB, host=32 * MIB)
BATCHES = [torch.full_like(BATCH, token) for token in range(COUNT)]


def saving() -> GPT:
    return GPT(saves=True)


def deep() -> GPT:
    return GPT(10, saves=True)


def tiers_and_steps(
    plan: planner.Plan, options: dict[str, Any], build: Callable[[], GPT] = saving
) -> tuple[dict[str, Any], int, list[dict[str, int]]]:
    """Of a run as planned: its tiers, what is set aside for gradients, and the bytes on each link in each step."""
    model = hetmem.manage(build(), plan=plan, device="sim")
    optimizer = hetmem.AdamW(model.parameters(), **options)
    seen, steps = dict.fromkeys(plan.link_bytes, 0), []
    for _ in range(4):
        hetmem.accumulate(model, BATCHES)
        optimizer.step()
        optimizer.zero_grad()
        links = hetmem.report(model).to_dict()["links"]
        steps.append({link: links[link]["bytes"] - before for link, before in seen.items()})
        seen = {link: links[link]["bytes"] for link in seen}
    optimizer.synchronize()
    tiers, spare = hetmem.report(model).to_dict()["tiers"], testing.of(model).memory().spare_bytes
    hetmem.release(model)
    return tiers, spare, steps


@pytest.mark.each
@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}], ids=named)
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["host", "nvme", "share"])
def test_peaks_and_bytes_of_a_run_are_the_planned_ones(
    where: str, mixed_precision: torch.dtype | None, options: dict[str, Any], tmp_path: Path
) -> None:
    asked = {"mixed_precision": mixed_precision, "micro_batches": COUNT, "accumulate": True, **options}
    plan = plan_alone(saving, BATCH, room(where, tmp_path), chunk_bytes=128 * KIB, **asked)
    assert plan.accumulate
    tiers, spare, steps = tiers_and_steps(plan, options)
    assert_peaks(plan, tiers, spare)
    if not options and where != "nvme":
        assert steps[-1] == plan.link_bytes


@pytest.mark.parametrize(
    ("device", "limit"),
    [(8 * MIB, "device_chunks=…"), pytest.param(MIB, "device=…, device_chunks=…", marks=pytest.mark.nightly)],
)
def test_a_device_without_room_for_the_last_block_and_the_head_says_what_to_raise(device: int, limit: str) -> None:
    """Where copies may have a part of it, that may be what lacks room."""
    little = hetmem.Budget(device=device, device_chunks=256 * KIB, host=32 * MIB)
    plan = plan_alone(saving, BATCH, little, chunk_bytes=128 * KIB, micro_batches=COUNT, accumulate=True)
    assert plan.missing_bytes.keys() == {"device"}
    assert plan.advice[-1].startswith(f"raise Budget({limit}) by ")


def test_what_the_other_micro_batches_keep_is_counted_to_the_byte() -> None:
    plan = plan_alone(saving, BATCH, ROOMY, chunk_bytes=128 * KIB, micro_batches=COUNT, accumulate=True)
    alone = plan_alone(saving, BATCH, ROOMY, chunk_bytes=128 * KIB)
    tiers, _, _ = tiers_and_steps(plan, {})
    beside = plan.role_bytes["device"]["activations"]
    assert 0 <= beside - tiers["device"]["non_model_peak_bytes"] <= 8 * COUNT  # scalars, made outside of the model
    assert beside - alone.role_bytes["device"]["activations"] == plan.at_peak[0]["bytes"]
    assert plan.at_peak[0]["what"] == "kept by 2 other micro-batches"


def test_weights_cross_as_often_as_for_one_micro_batch() -> None:
    one, loop, turns = (
        plan_alone(saving, BATCH, ROOMY, chunk_bytes=128 * KIB, micro_batches=count, accumulate=accumulate)
        for count, accumulate in ((1, False), (8, False), (8, True))
    )
    inward = [plan.link_bytes["host_to_device"] for plan in (one, loop, turns)]
    assert inward[2] <= 1.05 * inward[0]
    assert inward[1] >= 5 * inward[0]
    assert turns.flops == loop.flops == 8 * one.flops
    assert turns.recomputed_flops == loop.recomputed_flops > 0


class Hidden(GPT):
    """Checkpoints hide the weights from the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


class Shared(Hidden):
    """Two layers have one, so each backward runs as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].up = self.layers[0].up


@pytest.mark.parametrize("build", [pytest.param(Hidden, marks=pytest.mark.nightly), Shared])
def test_backwards_within_checkpoints_are_planned_as_they_run(build: Callable[[], GPT]) -> None:
    asked: dict[str, Any] = {"chunk_bytes": 128 * KIB, "micro_batches": COUNT, "accumulate": True}
    plan = plan_alone(build, BATCH, ROOMY, **asked)
    tiers, spare, steps = tiers_and_steps(plan, {}, build)
    assert_peaks(plan, tiers, spare)
    assert steps[-1]["device_to_host"] == plan.link_bytes["device_to_host"]
    assert steps[-1]["host_to_device"] == pytest.approx(plan.link_bytes["host_to_device"], rel=0.1)


def test_weights_of_the_next_block_come_while_all_micro_batches_compute_one() -> None:
    """Those of a pass take three times as long as one micro-batch computes it."""
    machine = planner.load_profile("h100")
    slow = Rate(machine.host_to_device.bytes_per_second / 120)
    hardware = replace(machine, host_to_device=slow, thread=ThreadCosts())
    budget = hetmem.Budget(device=16 * MIB, device_chunks=4 * 224 * KIB, host=64 * MIB)
    one, turns, loop = (
        plan_alone(deep, BATCH, budget, hardware, chunk_bytes=224 * KIB, micro_batches=count, accumulate=accumulate)
        for count, accumulate in ((1, False), (8, True), (8, False))
    )
    assert one.terms["host_to_device"] == pytest.approx(3 * one.terms["compute"], rel=0.05)
    assert turns.step_seconds <= 1.10 * max(turns.terms.values())
    assert loop.step_seconds >= 2.5 * max(turns.terms.values())


def test_a_model_that_is_whole_on_the_device_is_planned_as_the_loop_that_is_run() -> None:
    large = hetmem.Budget(device="64MiB", host="16MiB")
    asked = {"micro_batches": COUNT, "chunk_bytes": 128 * KIB}
    turns, loop = (plan_alone(GPT, BATCH, large, accumulate=each, **asked) for each in (True, False))
    assert turns.accumulate
    assert (turns.peak_bytes, turns.step_seconds) == (loop.peak_bytes, loop.step_seconds)
    assert turns.role_bytes["device"]["exp_avg"]


def test_moved_activations_of_all_micro_batches_leave_room_for_each_other() -> None:
    """Of the memory for three times the activations there is half."""
    tight = hetmem.Budget(device=2 * MIB + 512 * KIB, device_chunks=512 * KIB, host=16 * MIB)
    options: dict[str, Any] = {"chunk_bytes": 128 * KIB, "micro_batches": COUNT, "accumulate": True}
    assert not plan_alone(GPT, BATCH, tight, **options).fits
    plan = plan_alone(GPT, BATCH, tight, activations="auto", **options)
    assert plan.fits
    model = hetmem.manage(GPT(), plan=plan, device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(3):
        hetmem.accumulate(model, BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    tiers = hetmem.report(model).to_dict()["tiers"]
    hetmem.release(model)
    assert tiers["device"]["peak_bytes"] <= plan.budget_bytes["device"]
    assert tiers["host"]["peak_bytes"] <= plan.budget_bytes["host"]


def test_the_other_order_and_the_number_from_which_compute_binds_are_told() -> None:
    """On a link on which a weight takes longer to come than a micro-batch computes."""
    slow = Rate(planner.load_profile("h100").host_to_device.bytes_per_second / 3e3)
    hardware = replace(planner.load_profile("h100"), host_to_device=slow)
    options: dict[str, Any] = {"budget": ROOMY, "hardware": hardware, "chunk_bytes": 128 * KIB, "micro_batches": 8}
    turns = planner.plan(saving, BATCH, accumulate=True, **options)
    loop = planner.plan(saving, BATCH, **options)
    assert turns.other_order is not None
    assert loop.other_order is not None
    assert turns.other_order["step_seconds"] == pytest.approx(loop.step_seconds)
    assert loop.other_order["step_seconds"] == pytest.approx(turns.step_seconds)
    assert loop.other_order["link_bytes"] == turns.link_bytes
    text = " ".join(str(loop).split())
    assert "8 micro-batches of 64 tokens a step, H100" in text
    assert "hetmem.accumulate (--accumulate): " in text
    bound = turns.compute_bound_micro_batches
    assert bound is not None
    for count, binds in ((bound - 1, False), (bound, True)):
        options["micro_batches"] = count
        assert (plan_alone(saving, BATCH, accumulate=True, **options).binding == "compute") == binds
    assert f"compute binds from m = {bound} micro-batches on (now 8)" in str(turns)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"accumulate": True}, "accumulate=True takes several micro-batches: micro_batches=, at least 2, or tokens="),
        ({"micro_batches": 1, "accumulate": True}, "accumulate=True takes several micro-batches"),
        ({"micro_batches": 2, "tokens": 128}, "tokens= finds the number of micro-batches: leave micro_batches= out"),
        ({"tokens": 0}, "tokens must be an int, at least 1, got 0"),
        ({"tokens": 100}, "a step has whole rows of 32 tokens: tokens=100 is no multiple of that"),
        ({"micro_batches": 2, "accumulate": True, "inference": True}, "forwards alone have none"),
        ({"tokens": 64, "inference": True}, "tokens= are those of a training step"),
    ],
)
def test_steps_that_are_none_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(planner.PlanError, match=expected):
        planner.plan(GPT, BATCH, ROOMY, **options)


def test_a_model_without_repeated_blocks_is_refused_as_its_micro_batches_take_no_turns() -> None:
    with pytest.raises(planner.PlanError, match="Linear has no ModuleList or Sequential with several blocks"):
        planner.plan(lambda: torch.nn.Linear(8, 8), torch.zeros(2, 8), loss=torch.sum, micro_batches=2, accumulate=True)


def test_tokens_are_had_by_as_few_micro_batches_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the program that is written takes as many."""
    command = ["plan", "tests.planner.test_accumulated:saving", "--chunk-bytes", "128KiB", "--host-memory", "16MiB"]
    command += ["--input", "4x32", "--tokens", "256", "--accumulate"]
    found = {}
    saved, script = tmp_path / "plan.json", tmp_path / "train.py"
    for device in ("1536KiB", "2MiB"):
        assert main([*command, "--device-memory", device, "-o", str(saved), "--write", str(script)]) == 0
        plan = planner.Plan.load(saved)
        found[device] = (plan.rows, plan.micro_batches)
    assert found == {"1536KiB": (2, 4), "2MiB": (4, 2)}
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_borders_are_where_micro_batches_pass_on() -> None:
    """Before each block of the forward, and behind each block of the backward."""
    events = trace(TracedCall(saving, BATCH, micro_batches=1)).events
    forward = [event.kind for event in events].index(Kind.BACKWARD)
    borders = [at for at, event in enumerate(events) if event.kind is Kind.BORDER]
    assert len([at for at in borders if at < forward]) == len(saving().layers)
    assert len(borders) == 2 * len(saving().layers)
