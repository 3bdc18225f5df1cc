"""Properties of the chunk layout and of the search for the chunk size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairs import examples
from tests.schedule.shapes import MODELS, PARAMETERS, parameter_specs
from tests.schedule.tested import (
    ALIGNMENT_ELEMENTS,
    PAGE_ELEMENTS,
    TARGET_ELEMENTS,
    ChunkSpec,
    Layout,
    ParameterSpec,
    Placement,
    build_layout,
    round_up,
    search_chunk_elements,
)

ITEMSIZES = {"fp32": 4, "bf16": 2, "bf16 frozen": 2, "int8": 1}
KI, MI = 1 << 10, 1 << 20

sizes = st.one_of(st.integers(0, 100), st.integers(0, 3 * PAGE_ELEMENTS), st.integers(0, 40 * PAGE_ELEMENTS))
specs = st.lists(st.tuples(sizes, st.sampled_from(sorted(ITEMSIZES))), max_size=30).map(
    lambda pairs: [ParameterSpec(f"p{i}", n, group, ITEMSIZES[group]) for i, (n, group) in enumerate(pairs)]
)
chunk_sizes = st.integers(1, 12).map(lambda pages: pages * PAGE_ELEMENTS)


def fp32(*numels: int) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", numel, "fp32", 4) for i, numel in enumerate(numels)]


def places(layout: Layout) -> list[tuple[int, int]]:
    return [(place.chunk, place.offset) for place in layout.placements]


# --- layout ---------------------------------------------------------------------------------------------------------


@given(specs, chunk_sizes)
def test_every_parameter_lies_once_whole_and_aligned_in_a_chunk_of_its_group(
    parameters: list[ParameterSpec], chunk_elements: int
) -> None:
    layout = build_layout(parameters, chunk_elements)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
    listed = sorted((index, chunk.index) for chunk in layout.chunks for index in chunk.parameters)
    assert listed == [(place.parameter, place.chunk) for place in layout.placements]
    assert [index for index, _ in listed] == list(range(len(parameters)))
    for spec, place in zip(parameters, layout.placements, strict=True):
        chunk = layout.chunks[place.chunk]
        assert (chunk.group, chunk.itemsize) == (spec.group, spec.itemsize)
        assert place.numel == spec.numel
        assert place.offset >= 0 and place.offset % ALIGNMENT_ELEMENTS == 0
        assert place.offset + place.numel <= chunk.span * chunk_elements


@given(specs, chunk_sizes)
def test_places_do_not_overlap_and_keep_the_order_of_use(parameters: list[ParameterSpec], chunk_elements: int) -> None:
    layout = build_layout(parameters, chunk_elements)
    for group in ITEMSIZES:
        packed = [
            place
            for place in layout.placements
            if parameters[place.parameter].group == group and 0 < place.numel <= chunk_elements
        ]
        ends = [(place.chunk, place.offset + place.numel) for place in packed]
        assert all(end <= (after.chunk, after.offset) for end, after in zip(ends, packed[1:], strict=False))
    first_uses = [min(i for i in chunk.parameters if parameters[i].numel) for chunk in with_elements(layout)]
    assert first_uses == sorted(first_uses)


def with_elements(layout: Layout) -> list[ChunkSpec]:
    return [chunk for chunk in layout.chunks if chunk.used_elements]


@given(specs, chunk_sizes)
def test_a_parameter_larger_than_a_chunk_spans_the_fewest_chunk_sizes_alone(
    parameters: list[ParameterSpec], chunk_elements: int
) -> None:
    layout = build_layout(parameters, chunk_elements)
    for chunk in layout.chunks:
        members = [parameters[index].numel for index in chunk.parameters if parameters[index].numel]
        if any(numel > chunk_elements for numel in members):
            assert len(members) == 1 and layout.placements[chunk.parameters[0]].offset == 0
            assert (chunk.span - 1) * chunk_elements < members[0] <= chunk.span * chunk_elements
        else:
            assert chunk.span == 1


@given(specs, chunk_sizes)
def test_a_chunk_is_opened_only_when_the_parameter_does_not_fit_behind_the_one_before(
    parameters: list[ParameterSpec], chunk_elements: int
) -> None:
    layout = build_layout(parameters, chunk_elements)
    last_end: dict[str, int] = {}
    for spec, place in zip(parameters, layout.placements, strict=True):
        if not 0 < spec.numel <= chunk_elements:
            continue
        if place.offset == 0 and spec.group in last_end:
            assert round_up(last_end[spec.group], ALIGNMENT_ELEMENTS) + spec.numel > chunk_elements
        last_end[spec.group] = place.offset + spec.numel


@given(specs, chunk_sizes)
def test_waste_is_the_share_of_bytes_that_belongs_to_no_parameter(
    parameters: list[ParameterSpec], chunk_elements: int
) -> None:
    layout = build_layout(parameters, chunk_elements)
    owned = [bytearray(chunk.span * chunk_elements) for chunk in layout.chunks]
    for place in layout.placements:
        owned[place.chunk][place.offset : place.offset + place.numel] = b"\1" * place.numel
    assert [mask.count(1) for mask in owned] == [chunk.used_elements for chunk in layout.chunks]
    total = sum(len(mask) * chunk.itemsize for mask, chunk in zip(owned, layout.chunks, strict=True))
    unused = sum(mask.count(0) * chunk.itemsize for mask, chunk in zip(owned, layout.chunks, strict=True))
    assert (layout.total_bytes, layout.total_bytes - layout.used_bytes) == (total, unused)
    assert layout.waste == pytest.approx(unused / total if total else 0.0, abs=1e-12)


@given(specs, chunk_sizes)
def test_parameters_of_zero_elements_take_no_space(parameters: list[ParameterSpec], chunk_elements: int) -> None:
    layout = build_layout(parameters, chunk_elements)
    without = build_layout([spec for spec in parameters if spec.numel], chunk_elements)
    groups = {spec.group for spec in parameters}
    only_empty = groups - {spec.group for spec in parameters if spec.numel}
    assert [c.used_elements for c in with_elements(layout)] == [c.used_elements for c in without.chunks]
    assert len(layout.chunks) - len(without.chunks) == len(only_empty)


def test_the_layout_of_a_small_example_is_this_one() -> None:
    page = PAGE_ELEMENTS
    frozen = ParameterSpec("frozen", 7, "bf16 frozen", 2)
    parameters = [*fp32(5, 1, 3 * page + 1, page - 256, page), frozen, *fp32(0, 1)]
    layout = build_layout(parameters, page)
    assert places(layout) == [(0, 0), (0, 128), (1, 0), (0, 256), (2, 0), (3, 0), (4, 128), (4, 0)]
    assert [chunk.span for chunk in layout.chunks] == [1, 4, 1, 1, 1]
    assert [chunk.parameters for chunk in layout.chunks] == [(0, 1, 3), (2,), (4,), (5,), (6, 7)]
    assert layout.total_bytes == 7 * page * 4 + page * 2
    assert layout.used_bytes == 4 * (6 + 3 * page + 1 + page - 256 + page + 1) + 2 * 7


def test_a_spanning_parameter_does_not_close_the_open_chunk() -> None:
    layout = build_layout(fp32(10, 2 * PAGE_ELEMENTS, 10, 2 * PAGE_ELEMENTS, 10), PAGE_ELEMENTS)
    assert places(layout) == [(0, 0), (1, 0), (0, 128), (2, 0), (0, 256)]


def test_an_empty_parameter_among_spanning_ones_takes_no_chunk() -> None:
    layout = build_layout(fp32(0, 2 * PAGE_ELEMENTS, 0), PAGE_ELEMENTS)
    assert places(layout) == [(0, 0)] * 3
    assert layout.waste == 0.0


def test_a_group_of_empty_parameters_has_one_chunk_to_be_in() -> None:
    layout = build_layout(fp32(0, 0), PAGE_ELEMENTS)
    assert layout.placements == (Placement(0, 0, 0, 0), Placement(1, 0, 0, 0))
    assert layout.waste == 1.0


def test_no_parameters_make_no_chunks_and_no_waste() -> None:
    layout = build_layout([], PAGE_ELEMENTS)
    assert (layout.chunks, layout.placements, layout.waste) == ((), (), 0.0)


def test_a_parameter_that_fills_a_chunk_exactly_does_not_span() -> None:
    layout = build_layout(fp32(PAGE_ELEMENTS, 2 * PAGE_ELEMENTS), PAGE_ELEMENTS)
    assert [chunk.span for chunk in layout.chunks] == [1, 2]
    assert layout.waste == 0.0


# --- search ---------------------------------------------------------------------------------------------------------


def cost(parameters: Sequence[ParameterSpec], chunk_elements: int, target: int) -> float:
    """What the search promises to minimize: 0.5% of the bytes for each factor of two away from the target."""
    doublings = abs(math.log2(chunk_elements / target))
    return build_layout(parameters, chunk_elements).total_bytes * (1 + 0.005 * doublings)


def assert_none_is_better(
    parameters: Sequence[ParameterSpec], found: int, candidates: Iterable[int], target: int
) -> None:
    least = cost(parameters, found, target) * (1 - 1e-12)
    assert [size for size in candidates if cost(parameters, size, target) < least] == []


@settings(max_examples=examples(150), deadline=None)
@given(specs, st.integers(1, 10), st.integers(0, 40), st.integers(1, 60))
def test_the_search_finds_the_best_of_all_sizes(
    parameters: list[ParameterSpec], low_pages: int, more_pages: int, target_pages: int
) -> None:
    high_pages = low_pages + more_pages
    low, high, target = (pages * PAGE_ELEMENTS for pages in (low_pages, high_pages, target_pages))
    found = search_chunk_elements(parameters, minimum_elements=low, maximum_elements=high, target_elements=target)
    assert low <= found <= high and found % PAGE_ELEMENTS == 0
    sizes = range(low, high + 1, PAGE_ELEMENTS)
    assert_none_is_better(parameters, found, sizes, min(max(target, low), high))


@given(specs)
def test_a_larger_chunk_never_takes_more_chunk_sizes(parameters: list[ParameterSpec]) -> None:
    """What the branch and bound rests on."""
    layouts = [build_layout(parameters, pages * PAGE_ELEMENTS) for pages in range(1, 45)]
    units = [layout.total_bytes // layout.chunk_elements for layout in layouts]
    assert units == sorted(units, reverse=True)


@settings(max_examples=examples(50), deadline=None)
@given(specs)
def test_no_power_of_two_wastes_less_than_the_search_aimed_at_it(parameters: list[ParameterSpec]) -> None:
    for exponent in range(12, 22):
        power = 1 << exponent
        found = search_chunk_elements(parameters, minimum_elements=1, maximum_elements=2 * MI, target_elements=power)
        assert build_layout(parameters, found).total_bytes <= build_layout(parameters, power).total_bytes


@given(specs)
def test_labels_of_groups_and_names_do_not_matter(parameters: list[ParameterSpec]) -> None:
    renamed = [ParameterSpec("", spec.numel, f"{spec.group[::-1]}!", spec.itemsize) for spec in parameters]
    found = [search_chunk_elements(p, minimum_elements=1, maximum_elements=MI) for p in (parameters, renamed)]
    assert found[0] == found[1]
    assert places(build_layout(parameters, found[0])) == places(build_layout(renamed, found[0]))


@pytest.mark.parametrize("model", MODELS)
def test_shapes_have_the_published_number_of_parameters(model: str) -> None:
    assert sum(spec.numel for spec in parameter_specs(model)) == PARAMETERS[model]


@pytest.mark.each
@pytest.mark.parametrize("maximum_elements", [8 * MI, 32 * MI, 64 * MI, 256 * MI])
@pytest.mark.parametrize("model", MODELS)
def test_real_models_waste_at_most_two_percent(model: str, maximum_elements: int) -> None:
    parameters = parameter_specs(model)
    found = search_chunk_elements(parameters, minimum_elements=256 * KI, maximum_elements=maximum_elements)
    assert 256 * KI <= found <= maximum_elements
    assert build_layout(parameters, found).waste <= 0.02


@pytest.mark.parametrize("model", MODELS)
def test_no_natural_size_of_a_real_model_is_better(model: str) -> None:
    """Natural sizes: powers of two, parts of each parameter, sums of a run from the model's start or second block."""
    parameters = parameter_specs(model)
    low, high = 256 * KI, 256 * MI
    found = search_chunk_elements(parameters, minimum_elements=low, maximum_elements=high)
    natural = {1 << exponent for exponent in range(18, 29)}
    natural |= {spec.numel // part for spec in parameters for part in range(1, 9)}
    for start in (0, len(parameters) // 3):
        for stop in range(start + 1, min(start + 40, len(parameters))):
            natural.add(sum(round_up(spec.numel, ALIGNMENT_ELEMENTS) for spec in parameters[start:stop]))
    candidates = {round_up(size, PAGE_ELEMENTS) for size in natural}
    assert_none_is_better(parameters, found, (size for size in candidates if low <= size <= high), TARGET_ELEMENTS)


def test_a_model_smaller_than_a_page_gets_the_smallest_chunk() -> None:
    parameters = fp32(300, 0, 1, 20)
    assert search_chunk_elements(parameters, minimum_elements=1, maximum_elements=256 * MI) == PAGE_ELEMENTS
    assert search_chunk_elements(parameters, minimum_elements=PAGE_ELEMENTS + 1, maximum_elements=MI) == 8192


def test_no_parameters_get_the_smallest_chunk() -> None:
    assert search_chunk_elements([], minimum_elements=1, maximum_elements=MI) == PAGE_ELEMENTS


@pytest.mark.parametrize("numels", [[10], [0, 10], [10, 0]])
def test_one_giant_parameter_gets_a_size_that_nearly_divides_it(numels: list[int]) -> None:
    giant = fp32(*(numel * PAGE_ELEMENTS for numel in numels))
    found = search_chunk_elements(
        giant, minimum_elements=1, maximum_elements=8 * PAGE_ELEMENTS, target_elements=6 * PAGE_ELEMENTS
    )
    assert found == 5 * PAGE_ELEMENTS
    assert build_layout(giant, found).waste == 0.0


def test_the_search_counts_alignment_gaps() -> None:
    scalars = fp32(*[1] * (PAGE_ELEMENTS // ALIGNMENT_ELEMENTS + 1))  # one more than fit a page with their gaps
    found = search_chunk_elements(scalars, minimum_elements=1, maximum_elements=MI, target_elements=2 * PAGE_ELEMENTS)
    assert found == 2 * PAGE_ELEMENTS


def test_a_target_outside_the_bounds_means_the_nearest_bound() -> None:
    parameters = fp32(*[PAGE_ELEMENTS] * 64)
    for target, expected in ((1, 4 * PAGE_ELEMENTS), (MI, 16 * PAGE_ELEMENTS)):
        found = search_chunk_elements(
            parameters,
            minimum_elements=4 * PAGE_ELEMENTS,
            maximum_elements=16 * PAGE_ELEMENTS,
            target_elements=target,
        )
        assert found == expected


def test_the_shapes_of_the_two_percent_are_these() -> None:
    named = {"gpt2-xl", "llama-2-7b", "llama-3-8b", "llama-3-70b", "mixtral-8x7b-fused", "t5-11b"}
    assert named <= set(MODELS)
