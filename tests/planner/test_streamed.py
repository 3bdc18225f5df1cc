"""Steps of a run with streamed gradients beside those of its plan; and what `manage` is told of a machine or a plan.

The links of the profile have no engine of their own, and those of the simulated device no set speed: then gradients go
home at once in both, and nothing depends on threads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.base.hardware import ProfileError
from hetmem.errors import ManageError
from tests.planner.tested import KIB, MIB, Capacities, Rate, Rehearsal, Setting, Updating, arrange, planner, trace
from tests.test_planning import BATCH, GPT

LINKS = ("host_to_device", "device_to_host")
L4 = planner.load_profile("l4")
MACHINE = replace(L4, host_to_device=Rate(1e11, by_the_caller=True), device_to_host=Rate(1e11, by_the_caller=True))


@pytest.mark.pairs
@pytest.mark.parametrize("mixed_precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("home_copies", [None, False])
@pytest.mark.parametrize(("device_chunks", "chunk_bytes"), [(4 * MIB, 128 * KIB), (2 * MIB, 64 * KIB)])
def test_each_step_of_a_run_moves_what_was_planned(
    device_chunks: int, chunk_bytes: int, home_copies: bool | None, mixed_precision: torch.dtype | None
) -> None:
    workload = trace(planner.TracedCall(GPT, BATCH, None, mixed_precision), real=True)
    capacities = Capacities(12 * MIB, 16 * MIB, 0, device_chunks, home_copies=home_copies)
    updating = Updating(overlapped=True)
    arrangement = arrange(workload, capacities, chunk_bytes, updating)
    planned = Rehearsal(workload, arrangement, Setting(capacities, None, hardware=MACHINE, updating=updating))
    budget = hetmem.Budget(device=12 * MIB, host=16 * MIB, device_chunks=device_chunks, home_copies=home_copies)
    model = hetmem.manage(GPT(), budget, device="sim", chunk_bytes=chunk_bytes, mixed_precision=mixed_precision)
    optimizer = hetmem.AdamW(model.parameters(), overlap="backward")
    crossed, expected = dict.fromkeys(LINKS, 0), [planned.step() for _ in range(6)]
    for step in range(6):
        loss = model(BATCH)  # at its end: a copy is renewed at the end of a step or in the next, as threads come to it
        before, crossed = crossed, {link: testing.of(model).link_bytes()[link] for link in LINKS}
        if step > 2:
            moved = {link: crossed[link] - before[link] for link in LINKS}
            assert {link: expected[step - 1].bytes[link] for link in LINKS} == moved, step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
    assert hetmem.report(model).to_dict()["tiers"]["device"]["peak_bytes"] <= expected[-1].device_peak_bytes
    hetmem.release(model)


@pytest.mark.in_turn
@pytest.mark.parametrize("mixed_precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_consumed_gradients_have_places_where_weights_fill_host_memory(
    mixed_precision: torch.dtype | None, tmp_path: Path
) -> None:
    budget = hetmem.Budget(device="6MiB", host="2MiB", nvme="32MiB", nvme_dir=tmp_path, device_chunks="512KiB")
    build = partial(GPT, 12)
    plan = planner.plan_within(
        planner.TracedCall(build, BATCH, None, mixed_precision),
        planner.capacities_of(budget.limits(), MACHINE),
        MACHINE,
        nvme_directories=(str(tmp_path),),
        chunk_bytes=32 * KIB,
        overlap="backward",
        compares=False,
    )
    assert plan.role_bytes["nvme"]["param"]
    assert "grad" not in plan.role_bytes["nvme"]
    model = hetmem.manage(build(), plan=plan, device="sim")
    optimizer = hetmem.AdamW(model.parameters(), overlap="backward")
    for _ in range(3):
        model(BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = hetmem.report(model).to_dict()["tiers"]
    hetmem.release(model)
    assert {tier: seen[tier]["peak_bytes"] for tier in ("host", "nvme")} == {
        tier: plan.peak_bytes[tier] for tier in ("host", "nvme")
    }
    assert "grad" not in seen["nvme"]["homes"]


def test_manage_takes_a_profile_by_name_by_path_and_itself(tmp_path: Path) -> None:
    budget, path = hetmem.Budget(device=12 * MIB, host=16 * MIB, device_chunks=4 * MIB), tmp_path / "machine.json"
    path.write_text(MACHINE.to_json())
    for hardware, expected in ((path, MACHINE), (str(path), MACHINE), ("l4", L4), (MACHINE, MACHINE)):
        model = hetmem.manage(GPT(), budget, device="sim", hardware=hardware)
        assert testing.of(model).hardware() == expected
        hetmem.release(model)
    with pytest.raises(ProfileError, match="no hardware profile 'v100'"):
        hetmem.manage(GPT(), budget, device="sim", hardware="v100")


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
