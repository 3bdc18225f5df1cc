"""The largest model of a shape: one that is rehearsed and fits, while one with another layer does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetmem.schedule.hardware import HardwareProfile
from tests.planner.test_planner import ELEMENTS, HARDWARE, workload
from tests.planner.tested import (
    MIB,
    Capacities,
    Judged,
    ParameterSpec,
    Setting,
    Workload,
    decide,
    grown,
    judged,
    largest_parameters,
    search,
    stacks,
    what_if,
)


def named(layers: int, *, activation: int = MIB // 4, mixed: bool = False) -> Workload:
    """Layers of one parameter that say by their names that they are alike."""
    made = workload(layers, activation=activation, mixed=mixed)
    return replace(made, parameters=tuple(replace(s, name=f"layers.{i}.w") for i, s in enumerate(made.parameters)))


def specs(*names: str) -> list[ParameterSpec]:
    return [ParameterSpec(name, 7 if name.endswith("bias") else 49, "float32", 4) for name in names]


def test_layers_that_are_alike_are_found_by_their_names() -> None:
    found = stacks(specs("head", "a.0.w", "a.0.bias", "a.1.w", "a.1.bias", "a.2.w", "a.2.bias", "b.0.w", "b.1.w"))
    assert [stack.layers for stack in found] == [((1, 2), (3, 4), (5, 6))]


def test_numbers_within_layers_are_no_layers() -> None:
    found = stacks(specs(*(f"x.blocks.{i}.experts.{j}.w" for i in range(3) for j in range(4))))
    assert [len(stack.layers) for stack in found] == [3]


def test_layers_of_different_sizes_are_no_stack() -> None:
    different = [replace(spec, numel=10 + i) for i, spec in enumerate(specs("a.0.w", "a.1.w", "a.2.w"))]
    assert stacks(different) == []


@pytest.mark.parametrize("more", [1, 5])
def test_a_grown_trace_is_that_of_the_deeper_model(more: int) -> None:
    small, large = named(4), named(4 + more)
    made = grown(small, stacks(small.parameters)[0], more)
    assert made is not None
    # The new layers are numbered behind all others, and lie before the last one.
    order = [0, 1, 2, *range(4, 4 + more), 3]
    number = {old: new for new, old in enumerate(order)}

    def sight(model: Workload, name: dict[int, int]) -> list[object]:
        return [
            (
                e.kind,
                e.live_bytes,
                e.peak_bytes,
                *(tuple(name[p] for p in ps) for ps in (e.parameters, e.held, e.let_go)),
            )
            for e in model.events
        ]

    assert sight(made, number) == sight(large, {i: i for i in range(4 + more)})
    assert (made.numel, made.trainable) == (large.numel, large.trainable)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "room",
    [
        Capacities(24 * MIB, 200 * MIB),
        Capacities(8 * MIB, 1000 * MIB),
        Capacities(24 * MIB, 40 * MIB, 300 * MIB),
        Capacities(256 * MIB, 4 * MIB),
    ],
    ids=["host", "activations", "nvme", "device"],
)
def test_the_largest_model_fits_and_one_layer_more_does_not(room: Capacities, mixed: bool) -> None:
    best, _ = search(named(4, mixed=mixed), Setting(room, MIB), HARDWARE, 1)
    assert best is not None
    found_parameters = largest_parameters(named(4, mixed=mixed), Setting(room, MIB), best, HARDWARE)
    layers = found_parameters // ELEMENTS
    assert layers * ELEMENTS == found_parameters and layers > 8
    whole = Setting(replace(room, device_chunk_bytes=room.device_bytes), MIB)
    for more, fits in ((0, True), (1, False)):
        found = [judged(named(layers + more, mixed=mixed), one, HARDWARE, 1) for one in (Setting(room, MIB), whole)]
        assert any(isinstance(one, Judged) for one in found) == fits


@pytest.mark.parametrize("room", [Capacities(24 * MIB, 200 * MIB), Capacities(8 * MIB, 1000 * MIB)])
def test_many_micro_batches_cost_no_more_and_what_fits_fits_with_them(
    room: Capacities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred once took a hundred times the search."""
    model, asked = named(4), Setting(room, MIB)
    best, _ = search(model, asked, HARDWARE, 5)
    rehearsed, fits = set(), what_if.first_that_fits

    def watched(made: Workload, asked: Setting, hardware: HardwareProfile, count: int, *, steps: int) -> object:
        rehearsed.add(count)
        return fits(made, asked, hardware, count, steps=steps)

    monkeypatch.setattr(what_if, "first_that_fits", watched)
    layers = largest_parameters(model, asked, best, HARDWARE, 5) // ELEMENTS
    assert rehearsed == {2}
    whole = replace(asked, capacities=replace(room, device_chunk_bytes=room.device_bytes))
    for more, expected in ((0, True), (1, False)):
        found = [judged(named(layers + more), one, HARDWARE, 5) for one in (asked, whole)]
        assert any(isinstance(one, Judged) for one in found) == expected


def test_of_layers_that_nobody_can_tell_apart_there_is_an_estimate() -> None:
    room = Capacities(24 * MIB, 200 * MIB)
    best, _ = search(workload(4, activation=MIB // 4), Setting(room, MIB), HARDWARE, 1)
    assert largest_parameters(workload(4, activation=MIB // 4), Setting(room, MIB), best, HARDWARE) > 8 * ELEMENTS


def test_what_fits_is_no_larger_than_what_does_not() -> None:
    """A refusal for one large parameter says nothing of all the others."""
    made = workload(4)
    specs = (replace(made.parameters[0], numel=24 * made.parameters[0].numel), *made.parameters[1:])
    wide = replace(made, parameters=specs)
    decision = decide(wide, Capacities(64 * MIB, 16 * MIB, 512 * MIB, 8 * MIB), HARDWARE)
    assert decision.candidate is None
    assert decision.largest_parameters <= wide.numel
