"""One profile for the plan and the run: the same chunks are streamed, with the same bytes on each link.

The links of the profile have no engine of their own, and those of the simulated device no set speed: then gradients go
home at once in both, and nothing depends on threads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.base.hardware import HardwareProfile, ProfileError
from hetmem.cli import main
from hetmem.errors import ManageError
from tests.optim.machines import GB, SLOW_HOST
from tests.planner.tested import (
    KIB,
    MIB,
    ROLES,
    SENT_STATES,
    Capacities,
    Rate,
    Rehearsal,
    Updating,
    arrange,
    format_seconds,
    planner,
    trace_real,
)
from tests.test_planning import BATCH, GPT, plan_alone

BF16 = torch.bfloat16
LINKS = ("host_to_device", "device_to_host")


def machine(link: float, both: float, update: float, *, copies: bool = True) -> HardwareProfile:
    rate = Rate(link, by_the_caller=copies)
    host = replace(SLOW_HOST.host, update_bytes_per_second=update)
    return replace(SLOW_HOST, host=host, host_to_device=rate, device_to_host=rate, both_ways_bytes_per_second=both)


ALL = machine(100 * GB, 200 * GB, 1e6)
HALF = machine(8e6, 100e6, 7e6)
"""Of what is not at home on the device, 7/11 is streamed, or 7/12 with copies in 16 bits at home."""


def moved_beside_homes(module: nn.Module) -> int:
    """Bytes of idle device memory that are taken by something else than homes that moved there."""
    inside = testing.of(module)
    return inside.memory().moved_bytes - sum(sum(each.home_bytes.values()) for each in inside.chunks() if each.moved)


class Odd(nn.Module):
    """Parameters whose sizes are no multiples of 16, so that the host updates the last elements of each."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.beside = GPT(), nn.ModuleList(nn.Linear(203, 203) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: int64 [rows, tokens]."""
        hidden = torch.ones(2, 203, dtype=self.beside[0].weight.dtype)
        for layer in self.beside:
            hidden = layer(hidden).relu()
        loss: torch.Tensor = self.model(x) + hidden.mean()
        return loss


class Run:
    """A managed model in training: of each step the bytes of each link, and of the updates in each place."""

    def __init__(self, model: nn.Module, micro_batches: int = 1, **options: Any) -> None:
        self.model, self._micro_batches = model, micro_batches
        self._optimizer = hetmem.AdamW(model.parameters(), **options)
        self._before = self._counts()

    def _counts(self) -> dict[str, int]:
        report = hetmem.report(self.model).to_dict()
        return {**{link: report["links"][link]["bytes"] for link in LINKS}, **report["updates"]}

    def step(self) -> dict[str, int]:
        for _ in range(self._micro_batches):
            self.model(BATCH).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._optimizer.synchronize()
        before, self._before = self._before, self._counts()
        return {name: count - before[name] for name, count in self._before.items()}


@pytest.mark.pairs
@pytest.mark.parametrize("overlap", ["off", "backward"])
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("home_copies", [None, False])
@pytest.mark.parametrize(
    ("device_chunks", "on", "micro_batches", "chunk_bytes"),
    [(4 * MIB, ALL, 1, 128 * KIB), (5 * MIB, HALF, 1, 64 * KIB), (4 * MIB, HALF, 2, 128 * KIB)],
    ids=["all", "half", "micro-batches"],
)
def test_a_run_streams_what_was_planned_with_the_planned_bytes_and_peaks(
    device_chunks: int,
    on: HardwareProfile,
    micro_batches: int,
    chunk_bytes: int,
    home_copies: bool | None,
    mixed_precision: torch.dtype | None,
    overlap: str,
) -> None:
    # a real step: on `meta` statistics of norms are as wide as on a GPU, and on this device they are narrower
    workload = trace_real(planner.TracedCall(GPT, BATCH, None, mixed_precision))
    capacities = Capacities(12 * MIB, 16 * MIB, 0, device_chunks, home_copies=home_copies)
    planned = Rehearsal(
        workload,
        arrange(workload, capacities, chunk_bytes),
        capacities,
        on,
        micro_batches=micro_batches,
        updating=Updating(overlapped=overlap == "backward", streamed_states=True),
    )
    budget = hetmem.Budget(device=12 * MIB, host=16 * MIB, device_chunks=device_chunks, home_copies=home_copies)
    model = hetmem.manage(
        GPT(), budget, device="sim", chunk_bytes=chunk_bytes, mixed_precision=mixed_precision, hardware=on
    )
    run, inside = Run(model, micro_batches, overlap=overlap), testing.of(model)
    for _ in range(5):
        expected, got = planned.step(), run.step()
        for role in ROLES:
            homes = {chunk.index: chunk.homes[role] for chunk in inside.chunks() if role in chunk.homes}
            assert homes == {index: tier.name.lower() for index, tier in planned.arrangement.homes[role].items()}
        whole = sum(got[way] for way in ("host", "streamed", "resident"))
        assert expected.streamed_updates == pytest.approx(got["streamed"] / whole, abs=1e-12)
        assert {link: expected.bytes[link] for link in LINKS} == {link: got[link] for link in LINKS}
    assert 0 < expected.streamed_updates < 1
    assert 0 < expected.update_slot_bytes == moved_beside_homes(model)
    device = hetmem.report(model).to_dict()["tiers"]["device"]
    assert expected.device_peak_bytes == device["peak_bytes"]
    assert expected.chunk_peak_bytes == device["chunk_peak_bytes"]
    assert expected.non_model_peak_bytes == device["non_model_peak_bytes"]
    hetmem.release(model)


@pytest.mark.pairs
@pytest.mark.parametrize("model", [GPT, Odd], ids=["GPT", "odd sizes"])
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("home_copies", [None, False])
@pytest.mark.parametrize(
    ("device_chunks", "on", "chunk_bytes"), [(4 * MIB, ALL, 128 * KIB), (5 * MIB, HALF, 64 * KIB)], ids=["all", "half"]
)
def test_a_run_with_streamed_gradients_moves_what_was_planned_for_them(
    device_chunks: int,
    on: HardwareProfile,
    chunk_bytes: int,
    home_copies: bool | None,
    mixed_precision: torch.dtype | None,
    model: type[nn.Module],
) -> None:
    """They stay on the device where their update is made there, so that more is updated there, with fewer bytes."""
    workload = trace_real(planner.TracedCall(model, BATCH, None, mixed_precision))
    capacities = Capacities(12 * MIB, 16 * MIB, 0, device_chunks, home_copies=home_copies)
    planned, visible = (
        Rehearsal(
            workload,
            arrange(workload, capacities, chunk_bytes, streamed_gradients=streamed),
            capacities,
            on,
            updating=Updating(overlapped=True, streamed_gradients=streamed, streamed_states=True),
        )
        for streamed in (True, False)
    )
    budget = hetmem.Budget(device=12 * MIB, host=16 * MIB, device_chunks=device_chunks, home_copies=home_copies)
    made = hetmem.manage(
        model(), budget, device="sim", chunk_bytes=chunk_bytes, mixed_precision=mixed_precision, hardware=on
    )
    run = Run(made, overlap="backward", gradients="streamed")
    for step in range(6):
        expected, without, got = planned.step(), visible.step(), run.step()
        whole = sum(got[way] for way in ("host", "streamed", "resident"))
        assert expected.streamed_updates == pytest.approx(got["streamed"] / whole, abs=1e-12), step
        if step > 1:  # before, a copy may be renewed at the end of a step or in the next, as threads come to it
            assert {link: expected.bytes[link] for link in LINKS} == {link: got[link] for link in LINKS}, step
    assert expected.streamed_updates > 0
    assert expected.streamed_updates >= without.streamed_updates
    assert sum(expected.bytes[link] for link in LINKS) < sum(without.bytes[link] for link in LINKS)
    assert moved_beside_homes(made) == expected.update_slot_bytes
    device = hetmem.report(made).to_dict()["tiers"]["device"]
    assert device["peak_bytes"] <= expected.device_peak_bytes
    hetmem.release(made)


BUDGET = hetmem.Budget(device=12 * MIB, host=16 * MIB, device_chunks=4 * MIB)
ENGINES = machine(8e6, 100e6, 7e6, copies=False)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """The file of a profile, as `hetmem probe -o` writes it."""
    path = tmp_path / "machine.json"
    path.write_text(ENGINES.to_json())
    return path


def planned(hardware: Any, **options: Any) -> planner.Plan:
    return plan_alone(GPT, BATCH, BUDGET, hardware, chunk_bytes=128 * KIB, **options)


def managed_by(decorator: str) -> nn.Module:
    """A model of a class with that decorator."""
    names: dict[str, Any] = {"hetmem": hetmem, "torch": torch, "GPT": GPT}
    exec(f"{decorator}\nclass Planned(GPT):\n    pass", names)
    made: nn.Module = names["Planned"]()
    return made


def test_a_plan_says_the_decorator_whose_runs_do_as_planned(profile: Path) -> None:
    plan = planned(profile)
    assert 0 < plan.streamed_update_share < 1
    assert f'hardware="{profile}"' in plan.decorator
    assert_runs_as(plan, managed_by(plan.decorator))


def test_what_keywords_cannot_say_is_in_the_plans_own_file(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(ENGINES)
    assert plan.needs_its_file
    assert not planned(profile).needs_its_file
    monkeypatch.chdir(tmp_path)
    plan.save("plan.json")
    assert_runs_as(plan, managed_by('@hetmem.managed(plan="plan.json")'))


def assert_runs_as(plan: planner.Plan, model: nn.Module) -> None:
    run = Run(model)
    for _ in range(3):
        run.step()
    got = run.step()
    whole = sum(got[way] for way in ("host", "streamed", "resident"))
    assert got["streamed"] / whole == pytest.approx(plan.streamed_update_share, abs=1e-12)
    assert {link: got[link] for link in LINKS} == {link: plan.link_bytes[link] for link in LINKS}
    hetmem.release(model)


def test_a_plan_compares_both_ways_and_has_the_slots_beside_the_homes(profile: Path) -> None:
    plan = planned(profile)
    assert plan.streaming is not None
    assert plan.streaming["share"] == plan.streamed_update_share
    assert plan.streaming["step_seconds"] < 0.97 * plan.streaming["host_step_seconds"]
    text = " ".join(str(plan).split())
    assert format_seconds(plan.streaming["host_step_seconds"]) in text
    assert f"{plan.streamed_update_share:.0%} there with their states sent for it" in text
    assert plan.role_bytes["device"][SENT_STATES] > 0
    assert planner.Plan.from_dict(plan.to_dict()) == plan
    assert HardwareProfile.from_dict(plan.profile) == ENGINES


def test_a_plan_that_streams_nothing_needs_no_profile() -> None:
    fast = replace(ENGINES, host=replace(ENGINES.host, update_bytes_per_second=1000 * GB))
    plan = planned(fast)
    assert (plan.streamed_update_share, plan.streaming, plan.profile, plan.profile_name) == (0.0, None, None, None)
    assert "hardware" not in plan.decorator
    assert SENT_STATES not in plan.role_bytes["device"]
    model = hetmem.manage(GPT(), plan=plan, device="sim")
    assert testing.of(model).hardware() is None
    hetmem.release(model)


def test_the_command_line_names_the_profile_unless_figures_of_it_were_changed(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "tests.test_planning:GPT", "--input", "2x32", "--hardware", str(profile), "--chunk-bytes"]
    command += ["128KiB", "--device-memory", "5MiB", "--host-memory", "16MiB", "-o", str(tmp_path / "plan.json")]
    assert main(command) == 0
    first = planner.Plan.load(tmp_path / "plan.json")
    assert first.streamed_update_share > 0
    assert first.profile_name == str(profile)
    assert "@hetmem.managed(" in capsys.readouterr().out
    assert main([*command, "--set", "host.cores=3"]) == 0
    changed = planner.Plan.load(tmp_path / "plan.json")
    assert changed.profile_name is None
    assert changed.profile is not None
    assert changed.profile["host"]["cores"] == 3


def test_manage_takes_a_profile_by_name_by_path_and_itself(profile: Path) -> None:
    for hardware, expected in ((profile, ENGINES), (str(profile), ENGINES), ("l4", planner.load_profile("l4"))):
        model = hetmem.manage(GPT(), BUDGET, device="sim", hardware=hardware)
        assert testing.of(model).hardware() == expected
        hetmem.release(model)
    with pytest.raises(ProfileError, match="no hardware profile 'v100'"):
        hetmem.manage(GPT(), BUDGET, device="sim", hardware="v100")


def test_a_profile_beside_a_plan_goes_before_the_plans_own(profile: Path) -> None:
    plan = planned(profile)
    model = hetmem.manage(GPT(), plan=plan, device="sim")
    assert testing.of(model).hardware() == ENGINES
    hetmem.release(model)
    model = hetmem.manage(GPT(), plan=plan, device="sim", hardware="l4")
    assert testing.of(model).hardware() == planner.load_profile("l4")
    hetmem.release(model)


def test_a_class_is_not_built_by_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    refused = planner.plan(GPT, BATCH, hetmem.Budget(device="2MiB", host="1MiB", device_chunks="1MiB"))
    refused.save(tmp_path / "plan.json")
    made: list[int] = []

    class Counting(GPT):
        def __init__(self) -> None:
            made.append(1)
            super().__init__()

    with pytest.raises(ManageError, match="the plan does not fit"):
        hetmem.managed(plan=tmp_path / "plan.json")(Counting)()
    assert not made
