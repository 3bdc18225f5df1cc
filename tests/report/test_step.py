"""The terms of a step's time, the bound and the sentence, on logs made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report.logs import TIERS, backward, forward, read, to_device, window
from tests.report.tested import Fault, Link, Span, Stall, Transfer, format_seconds, step_section


def test_compute_is_forward_and_backward_without_the_stalls_in_them() -> None:
    seen = window(
        segments=[forward(100, 102), backward(102, 105), Span("step", 106, 108)],
        stalls=[Stall(101, 101.5, -1), Stall(104.5, 106.5, -1)],
    )
    section = step_section(seen, TIERS)
    assert section["terms"]["compute"] == 4.0
    assert section["stall_seconds"] == 2.5
    assert section["seconds"] == 8.0


def test_the_host_optimizer_is_all_updates_also_where_the_training_thread_waits_for_them() -> None:
    updates = [Span("chunk 0", 105, 106), Span("chunk 1", 105.5, 108)]
    section = step_section(window(updates=updates, stalls=[Stall(106.25, 107, -1)]), TIERS)
    assert section["terms"]["host_optimizer"] == 3
    assert section["terms"]["compute"] == 0


def test_a_link_is_busy_while_any_transfer_is_in_flight_within_the_step() -> None:
    transfers = [read(99, 101), read(100.5, 102), read(103, 104), read(107, 109)]
    section = step_section(window(transfers=transfers), TIERS)
    assert section["terms"]["nvme_read"] == 4.0
    assert section["terms"]["nvme_write"] == 0


def test_bytes_count_where_their_transfer_was_asked_for() -> None:
    transfers = [read(99, 101, 1), read(100, 101, 2), read(107, 109, 4), read(108, 109, 8)]
    assert step_section(window(transfers=transfers), TIERS)["bytes"]["nvme_read"] == 6


def test_the_longest_term_binds_and_its_share_is_the_overlap() -> None:
    seen = window(segments=[forward(100, 103)], transfers=[to_device(100, 106)])
    section = step_section(seen, TIERS)
    assert (section["binding"], section["overlap"]) == ("host_to_device", 0.75)
    assert section["exposed_seconds"]["compute"] == 0


def test_what_the_binding_term_does_not_hide_is_named_and_answered() -> None:
    seen = window(segments=[forward(100, 105)], transfers=[read(104, 107.5)])
    section = step_section(seen, TIERS)
    assert section["exposed_seconds"]["nvme_read"] == 2.5
    assert section["sentence"].startswith(
        "Compute binds: 5.00 s of a step of 8.00 s. The other 3.00 s are not hidden behind it: NVMe read alone takes "
        "2.50 s of them. Budget(host=…) raised by 300 B would leave nothing on NVMe;"
    )


def test_a_step_that_overlaps_well_gets_advice_for_what_binds() -> None:
    section = step_section(window(segments=[forward(100, 107.5)], transfers=[read(100, 103)]), TIERS)
    assert section["sentence"] == (
        "Compute binds: 7.50 s of a step of 8.00 s. Memory is not the limit: a faster device, a smaller dtype or less "
        "recomputation would shorten it."
    )


def test_time_that_is_nobodys_is_not_blamed_on_a_link() -> None:
    section = step_section(window(segments=[forward(100, 102)], transfers=[read(102, 102.5)]), TIERS)
    assert section["sentence"].endswith("The other 6.00 s are neither compute, nor transfers, nor updates.")


def updated_apart(tiers: dict[str, dict[str, Any]], **changes: Any) -> str:
    seen = {"segments": [forward(100, 102), backward(102, 104)], "updates": [Span("chunk 0", 104, 107)], **changes}
    found: str = step_section(window(**seen), tiers)["sentence"]
    return found


def test_updates_that_nothing_hides_are_to_go_on_behind_the_backward_whichever_of_the_two_binds() -> None:
    """The report of a step of 146 ms of updates after 103 ms of compute once advised a faster device."""
    for longer in ({}, {"updates": [Span("chunk 0", 104, 108)], "segments": [forward(101, 104)]}):
        said = updated_apart(TIERS, **longer)
        assert said.startswith("Host optimizer" if longer else "Compute")
        assert 'hetmem.AdamW(overlap="backward") updates while the backward goes on' in said
        assert "Memory is not the limit" not in said
    from_disk = {"updates": [], "transfers": [read(104, 107)]}
    assert 'overlap="backward"' in updated_apart(TIERS, **from_disk)


def test_overlap_is_not_advised_where_there_is_some_or_nothing_to_overlap() -> None:
    whole = {**TIERS, "host": {**TIERS["host"], "used_bytes": 0}}
    assert "overlap=" not in updated_apart(whole), "a model that is kept on the device is updated in step()"
    assert "overlap=" not in updated_apart(TIERS, updates=[Span("chunk 0", 103, 106)])
    assert "overlap=" not in updated_apart(TIERS, updates=[], transfers=[to_device(104, 107)])
    no_compute = {"segments": [], "updates": [Span("chunk 0", 104, 107)], "transfers": [read(100, 104)]}
    assert "overlap=" not in updated_apart(TIERS, **no_compute)


def test_time_in_which_the_training_thread_waited_is_said_where_no_link_was_busy() -> None:
    seen = window(segments=[forward(100, 108)], stalls=[Stall(101, 103, -1)])
    assert step_section(seen, TIERS)["sentence"].endswith("nor updates; for 2.00 s the training thread waited.")


@pytest.mark.parametrize("term", ["host_to_device", "device_to_host", "nvme_read", "nvme_write"])
def test_every_link_can_bind_and_has_advice(term: str) -> None:
    seen = window(transfers=[Transfer(Link(term), -1, 100, 108, 64)], faults=[Fault(101, 0)])
    section = step_section(seen, TIERS)
    assert (section["binding"], section["overlap"], section["faults"]) == (term, 1.0, 1)
    assert section["sentence"].count(". ") >= 1


def test_bytes_written_a_day_follow_from_the_step() -> None:
    seen = window(transfers=[Transfer(Link.NVME_WRITE, 0, 101, 102, 1000)])
    assert step_section(seen, TIERS)["nvme_written_bytes_per_day"] == 1000 * 86400 // 8


def test_a_step_of_no_time_divides_by_nothing() -> None:
    section = step_section(window(end=100.0), TIERS)
    assert (section["overlap"], section["nvme_written_bytes_per_day"]) == (0.0, 0)


def test_seconds_are_shown_in_the_unit_that_people_use() -> None:
    shown = [format_seconds(seconds) for seconds in (0, 8e-5, 0.0125, 1.25, 123.4)]
    assert shown == ["0 µs", "80 µs", "12.5 ms", "1.25 s", "123 s"]
