"""Plans whose activations move: the bytes and peaks of a run, and what each choice comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.base.hardware import HardwareProfile
from hetmem.planner import load_profile
from hetmem.planner.plan import Plan
from tests.activations.test_offload import INPUTS, KIB, ROWS, SAVED, WIDTH, Deep, family
from tests.engine.harness import assert_same_weights
from tests.engine.lazy_device import ClockedDevice, Products
from tests.planner.tested import TracedCall, trace
from tests.test_planning import plan_alone

BATCH = torch.zeros(ROWS, WIDTH)


def by_the_caller() -> HardwareProfile:
    machine = load_profile("l4")
    links = {name: replace(getattr(machine, name), by_the_caller=True) for name in ("host_to_device", "device_to_host")}
    return replace(machine, device=replace(machine.device, allocator_share=0.0), **links)


def planned(device: int, activations: str = "auto", planner: Callable[..., Plan] = hetmem.plan) -> Plan:
    """Of `Deep`, on a device that the caller copies to, as the simulated one without link speeds."""
    budget = hetmem.Budget(device=device, host="16MiB", device_chunks=192 * KIB)
    return planner(Deep, (BATCH,), budget, by_the_caller(), chunk_bytes=16 * KIB, activations=activations)


@pytest.mark.in_turn
@pytest.mark.parametrize(("size", "activations"), [(512, "auto"), (1024, "auto"), (1024, "offload"), (8192, "auto")])
def test_bytes_and_peaks_are_those_of_a_run(size: int, activations: str) -> None:
    plan = planned(size * KIB, activations, plan_alone)
    assert plan.fits
    model = hetmem.manage(Deep(), plan=plan, device="sim")
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(4):
        before = testing.of(model).link_bytes()["device_to_host"]
        model(BATCH).backward()
        moved = testing.of(model).link_bytes()["device_to_host"] - before
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    tiers = hetmem.report(model).to_dict()["tiers"]
    hetmem.release(model)
    assert plan.link_bytes["device_to_host"] == moved
    assert tiers["host"]["peak_bytes"] == plan.peak_bytes["host"]
    assert tiers["device"]["peak_bytes"] == pytest.approx(plan.peak_bytes["device"], rel=0.03)


def test_homes_on_nvme_are_those_of_a_run(tmp_path: Path) -> None:
    states = 4 * sum(p.numel() * 4 for p in Deep().parameters())
    sizes = {"device": 512 * KIB, "host": states * 5 // 4 + 64 * KIB, "device_chunks": 192 * KIB}
    budget = hetmem.Budget(**sizes, nvme="16MiB", nvme_dir=tmp_path)
    plan = plan_alone(Deep, (BATCH,), budget, by_the_caller(), chunk_bytes=16 * KIB, activations="auto")
    assert plan.fits
    model = hetmem.manage(Deep(), budget, device="sim", chunk_bytes=16 * KIB, activations="auto")
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(4):
        before = testing.of(model).link_bytes()
        model(BATCH).backward()
        moved = {link: nbytes - before[link] for link, nbytes in testing.of(model).link_bytes().items()}
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    data = hetmem.report(model).to_dict()
    for link in ("device_to_host", "nvme_write"):
        assert abs(plan.link_bytes[link] - moved[link]) <= 3 * SAVED, link
    assert 0 < plan.link_bytes["nvme_read"] <= plan.link_bytes["nvme_write"], "what is still in host memory is not read"
    assert abs(plan.role_bytes["nvme"]["activations"] - data["activations"]["peak_bytes"]["nvme"]) <= 3 * SAVED
    for tier in ("device", "host"):
        assert data["tiers"][tier]["peak_bytes"] == pytest.approx(plan.peak_bytes[tier], rel=0.03), tier
    choices = hetmem.plan(Deep, (BATCH,), budget, by_the_caller(), chunk_bytes=16 * KIB, activations="auto")
    assert "of it to NVMe" in str(choices)
    assert not plan_alone(Deep, (BATCH,), replace(budget, nvme="256KiB"), by_the_caller(), activations="auto").fits


class DeepConvolutions(nn.Module):
    """Many layers beside what one of them takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise((3, *[16] * 12))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3)).square().mean()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama", "convolutions"])
def test_peaks_of_models_are_those_of_a_run(name: str) -> None:
    if name == "convolutions":
        build, batch = DeepConvolutions, (torch.zeros(4, 3, 16, 16),)
    else:
        tokens = torch.zeros(4, 64, dtype=torch.long)
        build, batch = family(name)[0], {"input_ids": tokens, "labels": tokens}
    chunks = max(sum(p.numel() * 4 for p in build().parameters()) // 2, 200 * KIB)

    def planned(device_bytes: int, activations: str) -> Plan:
        budget = hetmem.Budget(device=device_bytes, host="64MiB", device_chunks=chunks)
        return hetmem.plan(build, batch, budget, by_the_caller(), chunk_bytes=16 * KIB, activations=activations)

    kept = planned(64 << 20, "keep")
    size = kept.peak_bytes["device"] - kept.role_bytes["device"]["activations"] // 4
    plan = planned(size, "auto")
    budget = hetmem.Budget(device=size, host="64MiB", device_chunks=chunks)
    model = hetmem.manage(build(), budget, device="sim", chunk_bytes=16 * KIB, activations="auto")
    for _ in range(4):
        found = model(**batch).loss if isinstance(batch, dict) else model(*batch)
        found.backward()
        model.zero_grad()
    peak = hetmem.report(model).to_dict()["tiers"]["device"]["peak_bytes"]
    assert plan.peak_bytes["device"] == pytest.approx(peak, rel=0.03)
    assert plan.role_bytes["host"]["activations"] > 0


def test_each_choice_says_whether_it_fits_and_how_large_a_batch_may_be() -> None:
    choices = {each["choice"]: each for each in planned(1024 * KIB).activation_choices}
    assert choices["keep"]["step_seconds"] is None
    assert choices["keep"]["times"] < 1 < choices["auto"]["times"] <= choices["offload"]["times"]
    assert 0 == choices["keep"]["moved_bytes"] < choices["auto"]["moved_bytes"] < choices["offload"]["moved_bytes"]
    assert choices["auto"]["step_seconds"] <= choices["offload"]["step_seconds"]
    rows = choices["auto"]["rows"]
    assert rows == int(ROWS * choices["auto"]["times"])
    budget = hetmem.Budget(device=1024 * KIB, host="64MiB", device_chunks=192 * KIB)
    model = hetmem.manage(Deep(), budget, device="sim", chunk_bytes=16 * KIB, activations="auto")
    model(torch.zeros(rows * 9 // 10, WIDTH)).backward()
    with pytest.raises(hetmem.errors.DeviceOutOfMemoryError):
        model(torch.zeros(rows * 3 // 2, WIDTH)).backward()


def beside(link: float) -> HardwareProfile:
    """Computes `Deep` in 76 ms, updates it on the host in 280, and has links of so many bytes a second."""
    machine = load_profile("l4")
    links = {
        name: replace(getattr(machine, name), bytes_per_second=link) for name in ("host_to_device", "device_to_host")
    }
    device = replace(machine.device, allocator_share=0.0, matrix_flops={"float32": 1e9}, bytes_per_second=1e12)
    host = replace(machine.host, update_bytes_per_second=1e7)
    return replace(
        machine, device=device, host=host, thread=type(machine.thread)(), both_ways_bytes_per_second=2 * link, **links
    )


def mixed(link: float) -> Plan:
    budget = hetmem.Budget(device=2457 * KIB, host="32MiB")
    return hetmem.plan(Deep, (BATCH,), budget, beside(link), chunk_bytes=16 * KIB, activations="auto")


@pytest.mark.parametrize(("link", "moves"), [(1e7, True), (5e6, False)])
def test_of_each_layer_activations_move_or_are_computed_again_as_is_faster(link: float, moves: bool) -> None:
    """States that do not fit beside all activations would take the host some 180 ms to update."""
    plan = mixed(link)
    best = plan.best
    assert best.layers is not None
    assert best.layers["recomputed"] > 0
    assert (best.layers["moved_bytes"] > 0) == moves
    kept = next(each["step_seconds"] for each in plan.activation_choices if each["choice"] == "keep")
    assert best.step_seconds is not None
    assert best.step_seconds < 0.75 * kept
    assert best.device_update_share == 1
    assert f"checkpoint the first {best.layers['recomputed']} of the 6 layers" in " ".join(str(plan).split())


@pytest.mark.parametrize(
    ("size", "activations", "share"),
    [
        (1024, "offload", 0.5),
        (1024, "auto", 1.5),
        pytest.param(512, "auto", 1.5, marks=pytest.mark.nightly),
        pytest.param(700, "auto", 0.5, marks=pytest.mark.nightly),
        pytest.param(
            2457,
            "offload",
            1.5,
            marks=[pytest.mark.nightly, pytest.mark.xfail(reason="whole on the device: limits.md")],
        ),
        pytest.param(512, "offload", 1.5, marks=pytest.mark.nightly),
        pytest.param(512, "auto", 0.5, marks=pytest.mark.nightly),
        pytest.param(1024, "offload", 1.5, marks=pytest.mark.nightly),
    ],
)
def test_times_and_peaks_are_those_of_a_run_on_a_clock(size: int, activations: Any, share: float) -> None:
    """Forwards of 6 seconds, backwards of 12, and a link that takes `share` of the forward to move all activations."""
    device = ClockedDevice(36 * SAVED / (6 * share), behind=False)
    chunks = {} if size > 2000 else {"device_chunks": 192 * KIB}
    budget, batch = hetmem.Budget(device=size * KIB, host="32MiB", **chunks), INPUTS[0]
    link = beside(device.clock.rate)
    link = replace(link, host=replace(link.host, update_bytes_per_second=1e12))
    link = replace(link, device=replace(link.device, operator_seconds=0.0, bytes_per_second=1e15))
    seconds = trace(TracedCall(Deep, batch)).compute_seconds(link.device)
    link = replace(link, device=replace(link.device, matrix_flops={"float32": 1e9 * seconds / 18}))
    plan = plan_alone(Deep, batch, budget, link, chunk_bytes=16 * KIB, activations=activations)

    model = hetmem.manage(Deep(), budget, device=device, chunk_bytes=16 * KIB, activations=activations)
    optimizer, began, before = hetmem.AdamW(model.parameters()), 0.0, 0
    for _ in range(5):
        began, before = device.clock.now(), testing.of(model).link_bytes()["device_to_host"]
        with Products(device, 0.5):
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    took, data = device.clock.now() - began, hetmem.report(model).to_dict()
    sent = testing.of(model).link_bytes()["device_to_host"] - before
    hetmem.release(model)
    assert plan.step_seconds == pytest.approx(took, rel=0.1)
    assert plan.peak_bytes["device"] == pytest.approx(data["tiers"]["device"]["peak_bytes"], rel=0.03)
    crossed = data["activations"]["bytes"]
    assert crossed["host_to_device"] <= crossed["device_to_host"], "what was used is not fetched again"
    assert sent == plan.link_bytes["device_to_host"]


def test_the_pasted_block_computes_the_first_layers_again() -> None:
    plan = mixed(1e7).best
    assert plan.layers is not None
    written: dict[str, Any] = {"hetmem": hetmem, "torch": torch, "Deep": Deep}
    exec(plan.code().replace("Deep(...)", "Deep()"), written)
    model, plain = written["model"], Deep()
    with torch.no_grad():
        for managed, parameter in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.copy_(managed)
    calls: list[int] = []
    for at, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda module, args, output, at=at: calls.append(at))
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    batch = torch.randn(ROWS, WIDTH)
    for _ in range(3):
        for module, update in ((model, written["optimizer"]), (plain, optimizer)):
            module(batch).backward()
            update.step()
            update.zero_grad()
    assert_same_weights(plain, model)
    first = plan.layers["recomputed"]
    assert [calls.count(at) for at in range(6)] == [6] * first + [3] * (6 - first)
    assert hetmem.report(model).to_dict()["tiers"]["device"]["peak_bytes"] <= plan.budget_bytes["device"]
    hetmem.release(model)


def test_what_fits_with_fewer_activations_fits_and_says_so() -> None:
    plan = planned(1024 * KIB, "keep")
    assert plan.fits
    assert plan.changes == ("every layer checkpointed",)
    assert "on device" in plan.as_asked
    assert 'activations="auto"' in planned(1024 * KIB).code()


def test_host_memory_for_activations_is_a_part_of_what_is_missing() -> None:
    machine = load_profile("l4")
    budget = hetmem.Budget(device=1024 * KIB, host="1MiB", device_chunks=192 * KIB)
    with pytest.raises(hetmem.errors.ManageError, match="activations must be"):
        hetmem.plan(Deep, (BATCH,), budget, machine, activations="some")  # type: ignore[arg-type]
    plan = hetmem.plan(Deep, (BATCH,), budget, machine, activations="auto")
    assert not plan.fits
    assert plan.missing_bytes["host"] > 0


def build() -> nn.Module:
    return Deep()


def test_the_command_line_says_each_choice(capsys: pytest.CaptureFixture[str]) -> None:
    from hetmem.cli import main

    sizes = ["--device-memory", "1MiB", "--host-memory", "16MiB", "--hardware", "l4"]
    arguments = ["plan", f"{__name__}:build", "--input", f"{ROWS}x{WIDTH}:float32", *sizes, "--activations", "auto"]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("activations=keep: does not fit", "activations=auto:", "times as large fit", 'activations="auto"'):
        assert part in said
