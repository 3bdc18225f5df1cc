"""Plans of runs with `overlap=`: peaks, by tier and role, are those of a run with these options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.base.units import GIB
from hetmem.cli import main
from tests.engine.harness import WIDTH, adamws, vector_batches
from tests.optim.test_consumed_gradients import train_apart
from tests.planner.tested import KEPT, KIB, LOANED, MIB, format_seconds, planner
from tests.test_planning import BATCH, GPT, plan_alone

BF16 = torch.bfloat16
DRIVE = 16 * MIB
STREAMED = {"overlap": "backward"}
NORM = {"overlap": "backward", "max_grad_norm": 1.0}
OPTIONS: list[dict[str, Any]] = [{}, STREAMED, {"overlap": "forward"}, NORM, {"overlap": "forward", "loss_scale": 8.0}]


def named(options: dict[str, Any]) -> str:
    return " ".join(map(str, options.values())) or "default"


def room(where: str, directory: Path) -> hetmem.Budget:
    """`tight`: for 12 bytes of a parameter and the gradients of six chunks, and not for more."""
    nvme: dict[str, Any] = {"nvme": DRIVE, "nvme_dir": directory}
    little, much = {"device": 2 * MIB, "device_chunks": 512 * KIB}, {"device": 8 * MIB, "device_chunks": 3 * MIB}
    return {
        "host": hetmem.Budget(host=16 * MIB, **little),
        "tight": hetmem.Budget(host=4992 * KIB, home_copies=False, **little),
        "nvme": hetmem.Budget(host=2 * MIB, **nvme, **little),
        "nvme, three set aside": hetmem.Budget(host=2304 * KIB, home_copies=False, **nvme, **little),
        "share": hetmem.Budget(host=16 * MIB, **much),
        "share of nvme": hetmem.Budget(host=3 * MIB, **nvme, **much),
    }[where]


ROOMY = room("host", Path())


def planned(budget: hetmem.Budget, make: Any = plan_alone, **options: Any) -> planner.Plan:
    return make(lambda: GPT(backwards=True), BATCH, budget, chunk_bytes=128 * KIB, **options)


def run(plan: planner.Plan, options: dict[str, Any], micro_batches: int = 1) -> tuple[dict[str, Any], int]:
    """The tiers of the report after some steps as planned, and what is set aside for gradients."""
    model = hetmem.manage(GPT(backwards=True), plan=plan, device="sim")
    optimizer = hetmem.AdamW(model.parameters(), **options)
    for _ in range(4):
        for _ in range(micro_batches):
            model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    tiers, spare = hetmem.report(model).to_dict()["tiers"], testing.of(model).memory().spare_bytes
    hetmem.release(model)
    return tiers, spare


def assert_peaks(plan: planner.Plan, tiers: dict[str, Any], spare: int) -> None:
    """All by role; what is on its way on the device depends on threads."""
    for tier, figures in tiers.items():
        homes = {KEPT if role == "kept" else role: nbytes for role, nbytes in figures["homes"].items()}
        if tier == "host":
            homes |= {"staging": figures["staging_bytes"], "grad": homes.get("grad", 0) + spare}
        expected = dict(plan.role_bytes[tier])
        expected.pop(LOANED, None)  # is given back by now
        on_the_way = expected.pop("copies", 0) + expected.pop("activations", 0)
        assert {role: nbytes for role, nbytes in homes.items() if nbytes} == {r: n for r, n in expected.items() if n}
        assert (on_the_way > 0) == (tier == "device")
        assert abs(figures["peak_bytes"] - plan.peak_bytes[tier]) <= 0.03 * figures["peak_bytes"] * (tier == "device")


@pytest.mark.each
@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["host", "tight", "nvme", "nvme, three set aside", "share", "share of nvme"])
def test_the_peaks_of_a_run_with_these_options_are_the_planned_ones(
    where: str, mixed_precision: torch.dtype | None, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned(room(where, tmp_path), mixed_precision=mixed_precision, **options)
    stays = len(options) > 1 and mixed_precision is None
    assert plan.fits == (where != "tight" or ("overlap" in options and not stays))
    if plan.fits:
        assert plan.optimizer == options
        assert_peaks(plan, *run(plan, options))


@pytest.mark.each
@pytest.mark.parametrize("options", OPTIONS[1:3], ids=named)
@pytest.mark.parametrize("where", ["host", "share"])
def test_so_are_they_with_several_backwards_in_a_step(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(room(where, tmp_path), micro_batches=3, **options)
    assert_peaks(plan, *run(plan, options, micro_batches=3))


@pytest.mark.in_turn
@pytest.mark.parametrize(("layers", "options"), [(164, {}), (212, STREAMED)], ids=["off", "overlap"])
def test_a_model_of_nine_tenths_of_device_and_host_is_planned_and_trains(layers: int, options: dict[str, Any]) -> None:
    """80 GiB of device and 104 GiB of host memory in small: at 16 bytes a parameter 11 B of them, at 12 with overlap 14
    B. Gradients of chunks on the device borrow a few buffers there."""
    scale = 16 * 1024
    budget = hetmem.Budget(device=80 * GIB // scale, host=104 * GIB // scale)
    batches = vector_batches(2, 4, WIDTH, dtype=BF16)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    plan = plan_alone(build, batches[0], budget, mixed_precision=BF16, loss=lambda y: y.float().mean(), **options)
    plain, managed = build(), hetmem.manage(build(), plan=plan, device="sim")
    assert 16 * scale * sum(p.numel() for p in managed.parameters()) >= 16 * 11e9 * 0.99
    optimizers = adamws(plain, managed, **options)
    train_apart(plain, managed, optimizers, batches, BF16)
    homes = {tier: figures["homes"] for tier, figures in hetmem.report(managed).to_dict()["tiers"].items()}
    assert homes["device"]["exp_avg"] > 0
    if options:
        assert 0 < homes["device"]["grad"] == plan.role_bytes["device"]["grad"] < homes["device"]["exp_avg"] // 4
    if not options:  # others move to what an allocator of a GPU would leave unused
        expected = plan.role_bytes["device"]
        assert homes["host"] == plan.role_bytes["host"]
        assert homes["device"] == {role: expected[role] for role in homes["device"]}


def test_a_step_of_several_backwards_needs_room_for_their_sums_planned_or_run() -> None:
    """A run says so in the second one, as the first step begins updates where it cannot keep gradients."""
    tight = room("tight", Path())
    plan = planned(tight, micro_batches=2, **STREAMED)
    assert not plan.fits
    assert "gradients of several backwards" in plan.reasons[0]
    model = hetmem.manage(GPT(backwards=True), tight, device="sim", chunk_bytes=128 * KIB)
    optimizer = hetmem.AdamW(model.parameters(), overlap="backward")
    model(BATCH).backward()
    with pytest.raises(RuntimeError, match="has more backwards than host memory has room to keep gradients of"):
        model(BATCH).backward()
    optimizer.forget_step()
    hetmem.release(model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"overlap": "sometimes"}, "overlap must be 'off', 'backward' or 'forward', got 'sometimes'"),
    ],
)
def test_options_that_no_run_takes_or_no_plan_knows_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(planner.PlanError, match=expected):
        planned(ROOMY, **options)


def test_the_command_line_has_the_options_and_prints_the_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "tests.test_planning:GPT", "--input", "2x32", "--device-memory", "2MiB"]
    command += ["--host-memory", "16MiB", "--chunk-bytes", "128KiB", "-o", str(tmp_path / "plan.json")]
    assert main([*command, "--overlap", "forward"]) == 0
    line = 'optimizer = hetmem.AdamW(model.parameters(), overlap="forward")'
    assert 'overlap="forward"' in capsys.readouterr().out
    plan = planner.Plan.load(tmp_path / "plan.json")
    assert plan.constructor == line
    assert planner.Plan.from_dict(plan.to_dict()) == plan
    assert main([*command, "--gradients", "streamed"]) == 2
    assert "--gradients is no option any more, got streamed: with --overlap backward" in capsys.readouterr().err


def test_an_optimizer_for_which_the_planned_budget_has_no_room_is_refused() -> None:
    plan = planned(room("tight", Path()), **STREAMED)
    model = hetmem.manage(GPT(backwards=True), plan=plan, device="sim")
    with pytest.raises(hetmem.errors.BudgetError, match=r"AdamW has no room: .* are missing; raise Budget"):
        hetmem.AdamW(model.parameters())
    hetmem.AdamW(model.parameters(), overlap="forward")  # other seconds, no other bytes
    hetmem.release(model)


def test_consumed_gradients_are_advised_where_they_are_all_it_takes() -> None:
    """And not where the simulator says that they are not enough, nor with several backwards."""
    refused = planned(room("tight", Path()))
    assert not refused.fits
    assert 'make hetmem.AdamW(overlap="backward")' in refused.advice[0]
    assert f"cheapest: {refused.advice[0]}" in " ".join(str(refused).split())
    fits = planned(room("tight", Path()), **STREAMED)
    assert fits.fits
    assert f"then it fits, at {format_seconds(fits.step_seconds)} a step" in refused.advice[0]
    for less in (
        planned(replace(room("tight", Path()), host=4988 * KIB)),
        planned(room("tight", Path()), micro_batches=2),
        planned(replace(room("tight", Path()), host=4988 * KIB), **STREAMED),
    ):
        assert not less.fits
        assert not any('make hetmem.AdamW(overlap="backward")' in advice for advice in less.advice)


def test_gradients_that_wait_for_their_norm_take_the_bits_in_which_they_arrive() -> None:
    """14 bytes a parameter in 16 bits, 16 in float32, as their sums and those of a program that reads them."""
    plans = {
        (mixed, parts): planned(ROOMY, mixed_precision=mixed, micro_batches=parts, **NORM)
        for mixed, parts in ((None, 1), (BF16, 1), (BF16, 2))
    }
    found = {key: plan.role_bytes["host"]["grad"] / plan.role_bytes["host"]["param"] for key, plan in plans.items()}
    assert found == {(None, 1): 1.0, (BF16, 1): 0.5, (BF16, 2): 1.0}


def test_what_is_missing_for_streamed_gradients_is_what_makes_them_fit() -> None:
    small = replace(room("tight", Path()), host=4 * MIB)
    assert planned(small, **STREAMED).missing_bytes == {"host": 4992 * KIB - 4 * MIB}


def test_the_option_that_went_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"plan\(\) has no gradients= any more, got 'streamed': with overlap="):
        planner.plan(GPT, BATCH, ROOMY, gradients="streamed")
