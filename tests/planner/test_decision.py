"""What a plan chooses and advises, on workloads made up by hand: only what the simulator says is better."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.planner.test_planner import HARDWARE, workload
from tests.planner.tested import (
    MIB,
    Capacities,
    Decision,
    Rate,
    Setting,
    Updating,
    Variant,
    Workload,
    arrange,
    combined,
    decide,
    format_enough,
    format_seconds,
    judge,
    larger_by,
    parse_size,
)

ROOM = Capacities(12 * MIB, 64 * MIB)


def seconds(decision: Decision) -> float:
    assert decision.candidate is not None
    return decision.candidate.result.seconds


@pytest.mark.parametrize(("activation", "traced"), [(MIB // 4, True), (2 * MIB, False)])
def test_what_would_not_fit_even_if_it_took_less_is_not_traced(activation: int, traced: bool) -> None:
    asked: list[int] = []

    def made() -> Workload:
        asked.append(activation)
        return workload(activation=activation)

    lighter = Variant("divide", "divide it", made, about=lambda: workload(activation=activation))
    decision = decide(
        workload(activation=2 * MIB), Capacities(6 * MIB, 64 * MIB), HARDWARE, chunk_bytes=MIB, variants=[lighter]
    )
    assert bool(asked) == traced
    assert any("divide it" in advice for advice in decision.advice) == traced


def test_of_what_does_not_fit_each_way_out_mends_every_tier() -> None:
    room = Capacities(6 * MIB, 20 * MIB)
    lighter = Variant("checkpoint", "checkpoint it", lambda: workload(activation=MIB // 4))
    decision = decide(workload(activation=2 * MIB), room, HARDWARE, chunk_bytes=MIB, variants=[lighter])
    assert set(decision.missing_bytes) == {"device", "host"}
    assert len(decision.advice) == 3
    for advice in decision.advice:
        assert "Budget(host" in advice or "Budget(nvme" in advice
        assert "checkpoint it" in advice or "Budget(device" in advice
    assert decision.advice[0].startswith("add an NVMe directory")
    assert "checkpoint it: then it fits" in decision.advice[0]


def test_seconds_are_those_of_the_way_out_that_they_stand_beside() -> None:
    """With states on a slow drive a step takes longer than with more host memory; once both had its time."""
    room, disk = Capacities(6 * MIB, 20 * MIB), Rate(1e8)
    lighter = Variant("checkpoint", "checkpoint it", lambda: workload(activation=MIB // 4))
    slow = replace(HARDWARE, nvme_read=disk, nvme_write=disk)
    decision = decide(workload(activation=2 * MIB), room, slow, chunk_bytes=MIB, variants=[lighter])
    missing = decision.missing_bytes["host"]
    for where, capacities, overlapped in (
        ("add an NVMe", replace(room, nvme_bytes=256 * MIB), True),
        ("raise Budget(host", replace(room, host_bytes=20 * MIB + missing), False),
    ):
        (advice,) = [said for said in decision.advice if said.startswith(where) and "checkpoint it" in said]
        how = Setting(capacities, MIB, updating=Updating(overlapped))
        took = judge(workload(activation=MIB // 4), how, slow, 1).result.seconds
        assert f"at {format_seconds(took)} a step" in advice


def test_host_memory_and_nvme_that_are_both_too_small_are_raised_together() -> None:
    """Either alone is no way out."""
    room = Capacities(64 * MIB, 2 * MIB, MIB, 8 * MIB)
    decision = decide(workload(), room, HARDWARE, chunk_bytes=MIB)
    assert set(decision.missing_bytes) == {"host", "nvme"}
    (advice,) = decision.advice
    assert "Budget(host=…) by " in advice
    assert "Budget(nvme=…) by " in advice
    more = {f"{tier}_bytes": getattr(room, f"{tier}_bytes") + extra for tier, extra in decision.missing_bytes.items()}
    assert decide(workload(), replace(room, **more), HARDWARE, chunk_bytes=MIB).candidate is not None


def test_a_drive_is_no_way_out_where_host_memory_cannot_stage_it() -> None:
    decision = decide(workload(), Capacities(6 * MIB, 2 * MIB), HARDWARE, chunk_bytes=MIB)
    assert decision.candidate is None
    assert not any("NVMe" in advice for advice in decision.advice)


def test_what_is_missing_on_the_drive_counts_the_host_memory_that_no_chunk_fills() -> None:
    """20.5 MiB of host memory hold what 20 do; the difference once was found missing a byte at a time."""
    room = Capacities(64 * MIB, 20 * MIB + MIB // 2, 4 * MIB, 8 * MIB)
    missing = decide(workload(), room, HARDWARE, chunk_bytes=MIB).missing_bytes
    whole = decide(workload(), replace(room, host_bytes=20 * MIB), HARDWARE, chunk_bytes=MIB).missing_bytes
    assert missing == whole
    larger = replace(room, nvme_bytes=room.nvme_bytes + missing["nvme"])
    assert decide(workload(), larger, HARDWARE, chunk_bytes=MIB).candidate is not None
    less = replace(larger, nvme_bytes=larger.nvme_bytes - 1)
    assert decide(workload(), less, HARDWARE, chunk_bytes=MIB).candidate is None


def test_what_is_missing_on_the_device_counts_what_its_allocator_leaves_unused() -> None:
    """A tenth here, of a larger budget too."""
    room = Capacities(6 * MIB, 64 * MIB, device_fragment_bytes=6 * MIB // 10)
    missing = decide(workload(activation=2 * MIB), room, HARDWARE, chunk_bytes=MIB).missing_bytes["device"]
    nbytes = room.device_bytes + missing
    larger = replace(room, device_bytes=nbytes, device_fragment_bytes=nbytes // 10)
    assert decide(workload(activation=2 * MIB), larger, HARDWARE, chunk_bytes=MIB).candidate is not None


@pytest.mark.parametrize("activation", [0, 2 * MIB, 40 * MIB])
@pytest.mark.parametrize("room", [Capacities(MIB, 64 * MIB), Capacities(64 * MIB, MIB), Capacities(MIB, 4 * MIB, MIB)])
def test_what_is_missing_is_enough_and_not_much_more_than_that(room: Capacities, activation: int) -> None:
    """Also where the model would be whole on a larger device, or on NVMe in part."""
    made = workload(8, activation=activation)
    missing = decide(made, room, HARDWARE).missing_bytes

    def fits(share: float) -> bool:
        more = {f"{tier}_bytes": getattr(room, f"{tier}_bytes") + int(share * n) for tier, n in missing.items()}
        return decide(made, replace(room, **more), HARDWARE).candidate is not None

    assert fits(1.0)
    assert not missing or not fits(0.93)


def test_what_is_missing_on_the_device_raises_the_part_for_chunks_too() -> None:
    room = Capacities(64 * MIB, 64 * MIB, 0, MIB // 2)
    missing = decide(workload(), room, HARDWARE, chunk_bytes=MIB).missing_bytes["device"]
    assert missing < 8 * MIB
    larger = replace(room, device_bytes=room.device_bytes + missing, device_chunk_bytes=MIB // 2 + missing)
    assert decide(workload(), larger, HARDWARE, chunk_bytes=MIB).candidate is not None


@pytest.mark.parametrize(("moments", "saved"), [("bfloat16", 1.0), ("8bit", 1.49)])
def test_smaller_moments_need_so_much_less_of_the_host_which_alone_updates_them(moments: str, saved: float) -> None:
    how = Updating(moments=moments)
    missing = [
        decide(workload(), Capacities(12 * MIB, 16 * MIB), HARDWARE, chunk_bytes=MIB, updating=updating).missing_bytes
        for updating in (Updating(), how)
    ]
    assert missing[0]["host"] - missing[1]["host"] == pytest.approx(saved * 8 * MIB, rel=0.02)
    room = Capacities(64 * MIB, 26 * MIB, device_chunk_bytes=24 * MIB)
    staying = [arrange(workload(), room, MIB, Updating(moments=kind)).ground.staying for kind in ("float32", moments)]
    assert staying[0] and not staying[1]
    candidate = decide(workload(), Capacities(128 * MIB, 64 * MIB), HARDWARE, updating=how).candidate
    assert candidate is not None
    assert not (candidate.arrangement.ground.resident or candidate.arrangement.ground.staying)
    assert candidate.result.device_updates == 0


def test_what_somebody_is_told_to_add_is_never_too_little() -> None:
    for nbytes in (1, 1023, 12 * MIB, 12 * MIB + 1, 5_000_000_001, (1 << 40) + 1):
        assert parse_size(format_enough(nbytes)) >= nbytes
        assert parse_size(format_enough(nbytes)) <= 1.02 * nbytes + 1
    assert format_enough(12 * MIB) == "12.00 MiB"


def test_what_fits_with_one_change_is_not_offered_with_two() -> None:
    asked = []

    def both() -> Workload:
        asked.append("both")
        return workload(activation=MIB // 8)

    variants = [
        Variant("checkpoint", "once", lambda: workload(activation=MIB // 4)),
        Variant("divide and checkpoint", "twice", both),
    ]
    decision = decide(workload(activation=2 * MIB), Capacities(6 * MIB, 64 * MIB), HARDWARE, variants=variants)
    assert any("once: then it fits" in advice for advice in decision.advice)
    assert not asked


def test_what_is_faster_together_is_found_and_what_gains_nothing_is_left_as_it_is() -> None:
    """A backward of 0.8 s hides updates of 0.6 s; one of no time hides nothing. Layers that are checkpointed leave the
    device to homes."""
    host = replace(HARDWARE.host, update_bytes_per_second=1e8)
    slow = replace(HARDWARE, host=host, device=replace(HARDWARE.device, matrix_flops={"float32": 1e10}))
    decision = decide(workload(), ROOM, slow, chunk_bytes=MIB)
    better = combined(decision, [])
    assert better is not None
    assert better.asked.updating == Updating(overlapped=True)
    assert seconds(better) < 0.97 * seconds(decision)
    assert combined(decide(workload(), ROOM, replace(HARDWARE, host=host), chunk_bytes=MIB), []) is None
    light = workload(activation=0)
    lighter = combined(decide(workload(activation=8 * MIB), Capacities(64 * MIB, 64 * MIB), slow), [(light, None)])
    assert lighter is not None
    assert lighter.workload is light


def test_consumed_gradients_are_found_where_host_memory_is_worth_more_to_what_lies_on_nvme() -> None:
    made = workload(24, activation=MIB // 8)
    on_disk, disk = Capacities(12 * MIB, 64 * MIB, 512 * MIB), Rate(1e9)
    hardware = replace(HARDWARE, nvme_read=disk, nvme_write=disk)
    decision = decide(made, on_disk, hardware, chunk_bytes=MIB)
    better = combined(decision, [])
    assert better is not None
    assert better.asked.updating.overlapped
    assert seconds(better) < 0.8 * seconds(decision)


def test_the_share_that_is_updated_on_the_device_is_that_of_the_homes_there() -> None:
    room = Capacities(32 * MIB, 64 * MIB)
    result = judge(workload(activation=MIB // 8), Setting(replace(room, device_chunk_bytes=24 * MIB), MIB), HARDWARE, 1)
    moved = result.result.moved_bytes["host"]
    assert result.result.device_updates == moved["param"] / (8 * MIB)
    assert 0 < result.result.device_updates < 1
    assert moved["param"] == moved["grad"] == moved["exp_avg"] == moved["exp_avg_sq"]


@pytest.mark.each
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "room",
    [
        Capacities(24 * MIB, 200 * MIB),
        Capacities(8 * MIB, 1000 * MIB),
        Capacities(24 * MIB, 40 * MIB, 300 * MIB),
        Capacities(256 * MIB, 4 * MIB),
        Capacities(126 * MIB, 100 * MIB),
    ],
    ids=["host", "activations", "nvme", "device", "device and host"],
)
def test_a_model_of_the_largest_size_fits_and_one_much_larger_does_not(room: Capacities, mixed: bool) -> None:
    largest = decide(workload(mixed=mixed, activation=MIB // 4), room, HARDWARE).largest_parameters
    layers = largest / (256 * 1024)
    assert layers > 8
    for factor, fits in ((1.0, True), (1.1, False)):
        larger = workload(int(factor * layers), mixed=mixed, activation=MIB // 4)
        assert (decide(larger, room, HARDWARE).candidate is not None) == fits


def test_the_largest_model_is_no_larger_than_one_that_does_not_fit() -> None:
    """A refusal for one large parameter says nothing of all the others."""
    made = workload(4)
    specs = (replace(made.parameters[0], numel=24 * made.parameters[0].numel), *made.parameters[1:])
    decision = decide(replace(made, parameters=specs), Capacities(64 * MIB, 16 * MIB, 512 * MIB, 8 * MIB), HARDWARE)
    assert decision.candidate is None
    assert decision.largest_parameters <= decision.workload.numel


def test_a_larger_model_without_repeated_layers_has_more_of_all_and_not_thousands_of_biases() -> None:
    """A plan of one layer and two biases took two seconds, nearly all for them."""
    made = workload(4)
    specs = (made.parameters[0], *(replace(spec, numel=64) for spec in made.parameters[1:]))
    larger = larger_by(replace(made, parameters=specs), 8)
    assert 8 * 4 - 4 <= len(larger.parameters) <= 8 * 4


def test_the_drive_that_is_advised_is_no_larger_than_one_with_updates_that_overlap_needs() -> None:
    """Llama 70 B was told of 548 GiB on a drive, where 295 are enough with the same bits."""
    room = Capacities(12 * MIB, 16 * MIB)
    decision = decide(workload(), room, HARDWARE, chunk_bytes=MIB)
    assert decision.candidate is None
    advised = re.match(r"add an NVMe directory with (\S+) MiB: (.*)", decision.advice[0])
    assert advised and advised[2].endswith('and hetmem.AdamW(overlap="backward")')
    drive = replace(room, nvme_bytes=int(float(advised[1]) * MIB))
    assert decide(workload(), drive, HARDWARE, chunk_bytes=MIB).candidate is None
    overlapping = decide(workload(), drive, HARDWARE, chunk_bytes=MIB, updating=Updating(overlapped=True))
    assert overlapping.candidate is not None
