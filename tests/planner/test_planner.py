"""The planner, on workloads made up by hand: what it decides, what it refuses, and what it says is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.tested import (
    MIB,
    Capacities,
    Event,
    Judged,
    Kind,
    NoRoom,
    ParameterSpec,
    Phase,
    Rate,
    Rehearsal,
    Setting,
    ThreadCosts,
    Tier,
    Updating,
    Variant,
    Work,
    Workload,
    arrange,
    arranged,
    decide,
    judge,
    judged,
    rehearse,
    state_bytes,
)
from tests.schedule.test_hardware import profile

ELEMENTS = 256 * 1024  # one MiB of float32


def event(
    kind: Kind, parameters: tuple[int, ...], live: int, *, held: bool = False, gone: tuple[int, ...] = ()
) -> Event:
    work = Phase(Work(((10**9, MIB),)), live)
    kept = parameters if held else ()
    return Event(kind, f"{kind.name} {parameters}", parameters, kept, gone, live, work, Phase(Work(), live))


def workload(layers: int = 8, *, activation: int = MIB, mixed: bool = False) -> Workload:
    """`layers` parameters of a MiB, used one by one and again in reverse; each forward leaves `activation` bytes."""
    specs = tuple(ParameterSpec(f"layer {i}", ELEMENTS, "float32", 4) for i in range(layers))
    events = [event(Kind.FORWARD, (), 0)]
    events += [event(Kind.USE, (i,), (i + 1) * activation) for i in range(layers)]
    events.append(event(Kind.BACKWARD, (), layers * activation))
    for i in reversed(range(layers)):
        gone = (i + 1,) if i + 1 < layers else ()
        events.append(event(Kind.SAVED, (i,), (i + 1) * activation, held=True, gone=gone))
        events.append(event(Kind.GRADIENT, (i,), i * activation))
    events.append(event(Kind.END, (), 0, gone=(0,)))
    itemsizes = (2 if mixed else 4,) * layers
    everything = frozenset(range(layers))
    return Workload("made up", specs, everything, itemsizes, mixed, 0, tuple(events), 4, 64, "float32")


HARDWARE = replace(profile(), host_to_device=Rate(1e9), device_to_host=Rate(1e9))


def test_homes_are_in_host_memory_until_that_is_full_and_then_on_nvme() -> None:
    made = arrange(workload(), Capacities(64 * MIB, 20 * MIB, 64 * MIB, 8 * MIB), MIB)
    assert made.bytes_by_role(Tier.HOST) == {"param": 8 * MIB, "staging": 5 * MIB, "grad": 7 * MIB}
    assert made.bytes_by_role(Tier.NVME) == {"grad": MIB, "exp_avg": 8 * MIB, "exp_avg_sq": 8 * MIB}


def test_a_small_model_stays_on_the_device_and_moves_nothing() -> None:
    decision = decide(workload(), Capacities(128 * MIB, 64 * MIB), HARDWARE)
    assert decision.candidate is not None
    assert decision.candidate.arrangement.ground.resident
    assert decision.candidate.result.bytes["host_to_device"] == 0
    # parameters and two states; gradients are autograd's own, beside the activations
    assert decision.candidate.result.device_peak_bytes == 24 * MIB + 8 * MIB


def test_more_than_half_the_device_is_used_if_that_saves_the_transfers() -> None:
    room = Capacities(48 * MIB, 64 * MIB)
    decision = decide(workload(), room, HARDWARE)
    assert decision.candidate is not None
    assert decision.candidate.setting.capacities.device_chunk_bytes == state_bytes(workload()) == 32 * MIB
    assert decision.candidate.result.bytes["host_to_device"] == 0


def test_the_step_is_never_shorter_than_its_longest_term() -> None:
    result = judge(workload(), Setting(Capacities(12 * MIB, 64 * MIB), MIB), HARDWARE, 1).result
    assert result.seconds >= max(result.terms.values())
    assert result.seconds <= sum(result.terms.values()) + result.stall_seconds


def test_gradients_cross_the_link_once_for_each_micro_batch() -> None:
    room = Capacities(12 * MIB, 64 * MIB)
    arrangement = arrange(workload(), room, MIB)
    for micro_batches in (1, 3):
        result = rehearse(workload(), arrangement, Setting(room, None, hardware=HARDWARE, micro_batches=micro_batches))
        assert result.bytes["device_to_host"] == micro_batches * 8 * MIB


def test_the_device_peak_stays_within_the_budget() -> None:
    room = Capacities(11 * MIB, 64 * MIB)
    result = judge(workload(), Setting(room, MIB), HARDWARE, 1).result
    assert 8 * MIB < result.device_peak_bytes <= room.device_bytes


@pytest.mark.parametrize("activation", [MIB, 0])
def test_the_device_peak_leaves_what_its_allocator_cannot_hand_out(activation: int) -> None:
    """A tenth here: of copies, of activations in a first step, and of homes that come to idle memory."""
    refused = []
    for quarters in range(8, 100, 2):
        room = Capacities(quarters * MIB // 4, 64 * MIB, device_fragment_bytes=quarters * MIB // 40)
        found = judged(workload(activation=activation), Setting(room, MIB), HARDWARE, 1)
        if isinstance(found, Judged):
            assert found.result.device_peak_bytes <= room.usable_bytes
        refused.append(isinstance(found, NoRoom))
    assert refused == sorted(refused, reverse=True)


@pytest.mark.parametrize(
    "room",
    [
        Capacities(12 * MIB, 64 * MIB),
        Capacities(40 * MIB, 100 * MIB),
        Capacities(64 * MIB, 20 * MIB, 64 * MIB, 8 * MIB),
        Capacities(30 * MIB, 22 * MIB, 64 * MIB),
    ],
)
def test_steps_are_rehearsed_until_they_are_alike(room: Capacities) -> None:
    """And not as often as was asked for: what follows would be the same."""
    setting = Setting(room, MIB)
    few, many = (judge(workload(), setting, HARDWARE, 1, steps=steps).result for steps in (4, 12))
    assert few.seconds == pytest.approx(many.seconds, rel=1e-3)
    assert few.moved_bytes == many.moved_bytes
    run = Rehearsal(workload(), arranged(workload(), setting), replace(setting, hardware=HARDWARE))
    last = [run.step() for _ in range(8)][-1]
    assert many.seconds == pytest.approx(max(last.seconds, *last.terms.values()), rel=1e-3)
    assert (many.moved_bytes, many.device_updates) == (last.moved_bytes, last.device_updates)


def test_every_state_on_nvme_is_read_and_written_once_a_step() -> None:
    room = Capacities(64 * MIB, 20 * MIB, 64 * MIB, 8 * MIB)
    result = judge(workload(), Setting(room, MIB), HARDWARE, 1).result
    # seven gradients have room in host memory; one and the states of all eight are on disk
    assert result.bytes["nvme_write"] == 17 * MIB
    assert 16 * MIB - 5 * MIB <= result.bytes["nvme_read"] <= 17 * MIB


@pytest.mark.parametrize("steps", range(3, 7))
def test_a_step_is_never_shorter_than_a_drive_takes_for_it(steps: int) -> None:
    """What it leaves to be written, the next one waits for: one of several is short, and a plan once took that."""
    slow = replace(HARDWARE, nvme_read=Rate(2e9), nvme_write=Rate(5e8))
    how = Updating(overlapped=True)
    room = Capacities(12 * MIB, 40 * MIB, 1024 * MIB, 8 * MIB)
    result = judge(workload(12, activation=0), Setting(room, MIB, updating=how), slow, 1, steps=steps).result
    assert result.terms["nvme_write"] > 0
    assert result.seconds >= max(result.terms.values())


@pytest.mark.parametrize(
    ("room", "tier"),
    [
        (Capacities(64 * MIB, 20 * MIB, 0, 8 * MIB), "host"),
        (Capacities(64 * MIB, 20 * MIB, 4 * MIB, 8 * MIB), "nvme"),
        (Capacities(6 * MIB, 64 * MIB), "device"),
    ],
)
def test_what_is_missing_makes_it_fit_when_it_is_added(room: Capacities, tier: str) -> None:
    decision = decide(workload(), room, HARDWARE, chunk_bytes=MIB)
    assert decision.candidate is None
    assert set(decision.missing_bytes) == {tier}
    missing = decision.missing_bytes[tier]
    field = f"{tier}_bytes"
    larger = replace(room, **{field: getattr(room, field) + missing})
    assert decide(workload(), larger, HARDWARE, chunk_bytes=MIB).candidate is not None


def test_the_host_misses_exactly_what_the_states_take() -> None:
    decision = decide(workload(), Capacities(64 * MIB, 20 * MIB, 0, 8 * MIB), HARDWARE, chunk_bytes=MIB)
    assert decision.missing_bytes == {"host": 12 * MIB}
    assert decision.advice[0].startswith("add an NVMe directory with")
    assert decision.advice[-1] == "raise Budget(host=…) by 12.00 MiB"


def test_on_a_device_without_room_frozen_parameters_take_no_more_of_the_host() -> None:
    """They were taken to stay on such a device with a size below zero, and 252 MiB were missing for 5 MiB of states."""
    whole = workload(activation=32 * MIB)
    events = tuple(each for each in whole.events if each.kind is not Kind.GRADIENT or each.parameters < (4,))
    half = replace(whole, trainable=frozenset(range(4)), events=events)
    decision = decide(half, Capacities(6 * MIB, 12 * MIB), HARDWARE, chunk_bytes=MIB)
    assert decision.missing_bytes["host"] == (4 * 4 + 4 - 12) * MIB


def test_the_first_variant_that_fits_is_the_first_advice() -> None:
    asked = []

    def lighter(activation: int) -> Workload:
        asked.append(activation)
        return workload(activation=activation)

    variants = [
        Variant("divide", "half of it", lambda: lighter(MIB)),
        Variant("divide", "a quarter of it", lambda: lighter(MIB // 4)),
        Variant("divide", "an eighth of it", lambda: lighter(MIB // 8)),
    ]
    room = Capacities(6 * MIB, 64 * MIB)
    decision = decide(workload(activation=2 * MIB), room, HARDWARE, chunk_bytes=MIB, variants=variants)
    assert decision.advice[0].startswith("a quarter of it: then it fits")
    assert asked == [MIB, MIB // 4]


def test_a_chunk_larger_than_the_device_is_refused_with_the_bytes() -> None:
    with pytest.raises(NoRoom) as caught:
        arrange(workload(), Capacities(64 * MIB, 64 * MIB, 0, MIB // 2), MIB)
    assert (caught.value.tier, caught.value.missing_bytes) == (Tier.DEVICE, MIB // 2)


def test_with_mixed_precision_a_device_slot_is_half_a_home() -> None:
    made = arrange(workload(mixed=True), Capacities(64 * MIB, 64 * MIB), MIB)
    assert (made.ground.slot_bytes, made.ground.staging_slot_bytes, made.ground.resident) == (MIB // 2, MIB, False)


@pytest.mark.parametrize(("host", "copied"), [(44 * MIB, True), (43 * MIB, False)])
def test_copies_come_by_themselves_where_three_states_have_room_beside_them(host: int, copied: bool) -> None:
    made = arrange(workload(mixed=True), Capacities(64 * MIB, host, 0, 2 * MIB), MIB)
    assert made.bytes_by_role(Tier.HOST).get("compute", 0) == 4 * MIB * copied


def test_copies_at_home_halve_what_goes_to_the_device() -> None:
    room = Capacities(12 * MIB, 64 * MIB)
    moved = []
    for wanted in (False, True):
        asked = replace(room, home_copies=wanted)
        made = arrange(workload(mixed=True), asked, MIB)
        moved.append(rehearse(workload(mixed=True), made, Setting(asked, None, hardware=HARDWARE)).bytes)
    assert moved[0]["host_to_device"] == 2 * moved[1]["host_to_device"] > 0
    assert moved[0]["device_to_host"] == moved[1]["device_to_host"]


def test_copies_lie_beside_parameters_in_host_memory_alone() -> None:
    """Beside parameters on NVMe each step would have to read those to compare them."""
    asked = Capacities(64 * MIB, 5 * MIB, 64 * MIB, 4 * MIB, home_copies=True)
    made = arrange(workload(mixed=True), asked, MIB)
    assert made.bytes_by_role(Tier.NVME)["param"] > 0
    assert not made.homes["compute"]


def test_the_same_question_has_the_same_answer() -> None:
    room = Capacities(11 * MIB, 20 * MIB, 64 * MIB)
    assert decide(workload(), room, HARDWARE) == decide(workload(), room, HARDWARE)


@pytest.mark.parametrize(("rate", "expected"), [(1e15, 11 * MIB // 4), (1e3, 5 * MIB)], ids=["fast link", "slow link"])
def test_gradients_that_wait_for_the_link_take_device_memory(rate: float, expected: int) -> None:
    light = workload(activation=MIB // 4)
    result = judge(
        light, Setting(Capacities(64 * MIB, 64 * MIB, 0, 8 * MIB), MIB), replace(HARDWARE, device_to_host=Rate(rate)), 1
    ).result
    assert result.non_model_peak_bytes == expected


def test_what_hetmem_takes_of_the_thread_is_added_for_each_use_transfer_and_update() -> None:
    """Links are so fast that nothing waits: what is left of the difference are the counts."""
    fast = Rate(1e18)
    machine = replace(HARDWARE, host_to_device=fast, device_to_host=fast, nvme_read=fast, nvme_write=fast)
    machine = replace(machine, host=replace(machine.host, update_bytes_per_second=1e18))
    room = Capacities(12 * MIB, 64 * MIB)
    plain = workload()
    called = replace(plain.events[1], after=replace(plain.events[1].after, calls=3))
    work = replace(plain, events=(plain.events[0], called, *plain.events[2:]))
    free = judge(work, Setting(room, MIB), machine, 1).result
    assert free == judge(plain, Setting(room, MIB), machine, 1).result
    for costs, expected in (
        (ThreadCosts(use_seconds=0.5), 8 * 0.5),
        (ThreadCosts(gradient_seconds=0.5), (8 + 8) * 0.5),  # asked for in backward, gradients
        (ThreadCosts(call_seconds=0.5), 3 * 0.5),
        (ThreadCosts(queue_seconds=0.5), 8 * 0.5),
        (ThreadCosts(update_seconds=0.5), 8 * 0.5),
        (ThreadCosts(chunk_seconds=0.5), 8 * 0.5),
        (ThreadCosts(transfer_seconds=0.5), (free.bytes["host_to_device"] / MIB + 8) * 0.5),  # gradients too
    ):
        result = judge(work, Setting(room, MIB), replace(machine, thread=costs), 1).result
        assert result.seconds - free.seconds == pytest.approx(expected)
        assert result.device_peak_bytes == free.device_peak_bytes
    pairs = Setting(room, 2 * MIB)
    halved = replace(machine, thread=ThreadCosts(update_seconds=0.25, chunk_seconds=0.5))
    more = judge(workload(), pairs, halved, 1).result.seconds - judge(workload(), pairs, machine, 1).result.seconds
    assert more == pytest.approx(8 * 0.25 + 4 * 0.5)
    resident = judge(work, Setting(Capacities(128 * MIB, 64 * MIB), MIB), machine, 1).result
    costs = ThreadCosts(use_seconds=0.5, transfer_seconds=0.5, call_seconds=0.5, gradient_seconds=0.5)
    assert (
        judge(work, Setting(Capacities(128 * MIB, 64 * MIB), MIB), replace(machine, thread=costs), 1).result == resident
    )


def test_casts_of_homes_on_the_device_are_computed_there() -> None:
    """Of a model that is whole on the device nothing else takes time: its terms explain the step."""
    how = Updating(overlapped=True)
    result = judge(workload(mixed=True), Setting(Capacities(256 * MIB, 0), MIB, updating=how), HARDWARE, 1).result
    assert result.device_updates == 1
    assert result.seconds <= 1.001 * (result.terms["compute"] + result.terms["update"])


def test_compute_has_what_the_thread_does_in_forward_and_backward_and_the_update_nothing_of_it() -> None:
    """As a report measures both: the rest of the thread's time is in no term."""
    setting = Setting(Capacities(12 * MIB, 64 * MIB), MIB)
    costs = ThreadCosts(gradient_seconds=0.25, update_seconds=0.5, chunk_seconds=0.5, queue_seconds=0.5)
    plain, slow = (
        judge(workload(), setting, replace(HARDWARE, thread=thread), 1).result for thread in (ThreadCosts(), costs)
    )
    assert plain.terms["compute"] == pytest.approx(workload().compute_seconds(HARDWARE.device))
    assert slow.terms["compute"] == pytest.approx(plain.terms["compute"] + 16 * 0.25)
    assert slow.terms["update"] == pytest.approx(plain.terms["update"], rel=0.05)
    assert slow.seconds > plain.seconds + 16 * 0.25 + 8 * 1.4
