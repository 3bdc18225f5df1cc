"""The timeline: who was where when, and bytes by role, on logs made by hand."""

from __future__ import annotations

from typing import Any

from tests.report.logs import blocks, came, forward, moment, read, to_device, went, window
from tests.report.tested import BlockFacts, Span, Stall, timeline_section

NOBODY: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


def copies(section: dict[str, Any]) -> list[tuple[int, ...]]:
    """(block, tier, from, valid, until) in microseconds."""
    return list(zip(*section["copies"].values(), strict=True))


def test_a_copy_that_was_there_before_the_window_is_known_from_when_it_went() -> None:
    section = timeline_section(window(copies=[went(102, 0)]), blocks(1), NOBODY)
    assert copies(section) == [(0, 0, 0, 0, 2_000_000)]


def test_a_copy_that_never_moved_is_known_from_being_there_now() -> None:
    section = timeline_section(window(), blocks(2), (frozenset({1}), frozenset()))
    assert copies(section) == [(1, 0, 0, 0, 8_000_000)]


def test_what_came_after_the_window_was_not_in_it() -> None:
    section = timeline_section(window(copies=[came(109, 0)]), blocks(1), (frozenset({0}), frozenset()))
    assert copies(section) == []


def test_what_went_after_the_window_was_in_it_to_its_end() -> None:
    section = timeline_section(window(copies=[came(103, 0), went(109, 0)]), blocks(1), NOBODY)
    assert copies(section) == [(0, 0, 3_000_000, 3_000_000, 8_000_000)]


def test_a_copy_is_valid_from_the_end_of_the_transfer_into_its_own_tier() -> None:
    seen = window(
        copies=[came(101, 0, 1), came(103, 0, 0), went(105, 0, 0), came(106, 0, 0)],
        transfers=[read(101, 102), to_device(103, 104), to_device(106, 107)],
    )
    section = timeline_section(seen, blocks(1), (frozenset({0}), frozenset({0})))
    assert copies(section) == [
        (0, 1, 1_000_000, 2_000_000, 8_000_000),
        (0, 0, 3_000_000, 4_000_000, 5_000_000),
        (0, 0, 6_000_000, 7_000_000, 8_000_000),
    ]


def test_bytes_of_a_tier_are_those_of_the_copies_there_in_whole_slots() -> None:
    seen = window(copies=[came(101, 0), came(102, 1), went(103, 0), came(104, 0, 1)])
    memory = timeline_section(seen, blocks(2), (frozenset({1}), frozenset({0})))["memory"]
    assert memory["device"]["at_us"] == [0, 1_000_000, 2_000_000, 3_000_000, 8_000_000]
    assert memory["device"]["bytes"]["param"] == [0, 16, 32, 16, 0]
    assert memory["host"]["bytes"] == {"param": [0, 32, 0]}


def test_what_is_not_chunks_ends_with_its_segment_and_never_falls_below_what_stays() -> None:
    seen = window(
        segments=[forward(101, 104), Span("step", 105, 107)],
        moments=[moment(101, non_model_bytes=30), moment(102, non_model_bytes=70), moment(103, non_model_bytes=50)],
    )
    device = timeline_section(seen, blocks(1), NOBODY)["memory"]["device"]
    assert device == {
        "at_us": [0, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 7_000_000],
        "bytes": {"non_model": [30, 30, 70, 50, 30, 30]},
    }


def test_a_chunk_is_charged_its_stalls_and_those_within_its_update() -> None:
    facts = [*blocks(2), BlockFacts(1, "exp_avg", "nvme", 10, (16, 32), ("weight",))]
    seen = window(
        updates=[Span("chunk 0", 104, 105), Span("chunk 1", 105, 107)],
        stalls=[Stall(101, 101.5, 0), Stall(102, 102.25, 0), Stall(104.5, 105.25, -1)],
        transfers=[to_device(101, 102, 7), read(101, 102, 9, block=2)],
    )
    charged = timeline_section(seen, facts, NOBODY)["blocks"]
    assert [facts["stall_seconds"] for facts in charged] == [1.25, 0.25, 0]
    assert [facts["fetched_bytes"] for facts in charged] == [7, 0, 9]
