"""Which changes let a moment pass: exact figures, and none that would not help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetmem.base.units import KIB, MIB
from hetmem.engine.shortage import Needs, remedies

STREAMED = Needs(
    device_bytes=4 * MIB,
    usable_bytes=4 * MIB,
    chunk_cap_bytes=4 * MIB,
    live_bytes=7 * MIB,
    lasting_bytes=MIB,
    copy_bytes=MIB,
    largest_bytes=512 * KIB,
    home_bytes=0,
    whole_bytes=0,
)


def test_the_fewest_micro_batches_that_suffice_are_named_and_what_lasts_is_not_divided() -> None:
    """7 MiB of which 1 lasts: in 2 parts 4 MiB are live, which leaves nothing for the chunks; in 4 parts 2.5."""
    first, last = remedies(STREAMED)
    assert first == "use a smaller batch: with 4 micro-batches what is live here is about 2.50 MiB"
    assert last == "raise Budget(device=…): this moment needs 8.00 MiB"


def test_a_cap_on_chunks_is_what_has_to_be_raised_where_it_binds() -> None:
    needs = replace(STREAMED, live_bytes=MIB, chunk_cap_bytes=256 * KIB)
    assert list(remedies(needs)) == ["raise Budget(device_chunks=…): this moment needs 1.00 MiB of chunks at once"]


@pytest.mark.parametrize(("live_bytes", "whole_bytes", "cap"), [(3 * MIB, 2 * MIB, MIB), (2 * MIB, MIB, MIB - 4 * KIB)])
def test_a_model_on_the_device_gets_what_activations_leave_and_less_than_all(
    live_bytes: int, whole_bytes: int, cap: int
) -> None:
    needs = replace(STREAMED, live_bytes=live_bytes, whole_bytes=whole_bytes, home_bytes=2 * MIB, copy_bytes=0)
    assert next(remedies(needs)) == (
        f"set Budget(device_chunks={cap}), so that chunks are streamed instead of kept on the device"
    )


def test_a_model_on_the_device_is_not_streamed_where_not_even_one_chunk_has_room() -> None:
    needs = replace(STREAMED, live_bytes=4 * MIB - 100 * KIB, lasting_bytes=4 * MIB - 100 * KIB, whole_bytes=2 * MIB)
    assert [way.split()[0] for way in remedies(needs)] == ["raise"]


def test_a_change_that_another_moment_does_not_pass_with_is_none() -> None:
    """Later the step uses more chunks, and has less live."""
    here = replace(STREAMED, live_bytes=3 * MIB + 512 * KIB)
    later = replace(here, live_bytes=2 * MIB, lasting_bytes=512 * KIB, copy_bytes=3 * MIB)
    assert not here.passes()
    assert "with 2 micro-batches" in next(remedies(here))
    ways = list(remedies(here, [later]))
    assert [way.split()[0] for way in ways] == ["use", "raise"]
    assert "with 4 micro-batches" in ways[0]
    heavier = replace(later, lasting_bytes=768 * KIB)
    assert "with 8 micro-batches" in next(remedies(here, [heavier]))


def test_streaming_is_no_way_out_where_another_moment_needs_more_chunks_than_this_one_leaves() -> None:
    whole = replace(STREAMED, live_bytes=3 * MIB, whole_bytes=2 * MIB, home_bytes=2 * MIB, copy_bytes=0)
    other = replace(whole, live_bytes=MIB, copy_bytes=MIB)
    assert next(remedies(whole, [other])) == (
        f"set Budget(device_chunks={MIB}), so that chunks are streamed instead of kept on the device"
    )
    more = replace(other, copy_bytes=MIB + 1)
    assert all("device_chunks" not in way for way in remedies(whole, [more]))
    wide = replace(whole, largest_bytes=MIB + 4)
    assert all("device_chunks" not in way for way in remedies(wide))


def test_the_budget_to_raise_is_that_of_the_moment_that_needs_most() -> None:
    later = replace(STREAMED, live_bytes=8 * MIB, copy_bytes=2 * MIB)
    assert list(remedies(STREAMED, [later]))[-1] == "raise Budget(device=…): this moment needs 10.00 MiB"
