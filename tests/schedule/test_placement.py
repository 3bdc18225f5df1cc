"""Homes: no byte more than there is on any tier, and refusals that say what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmem.errors import BudgetError
from tests.schedule.tested import (
    GIB,
    MIB,
    STAGED_ROLES,
    Room,
    Tier,
    fits_device,
    largest_chunk_elements,
    never_staged,
    place,
    place_copies,
    staging_slots,
)

sizes = st.lists(st.integers(0, 20), max_size=20)
room = st.integers(0, 100)


@given(sizes, st.integers(0, 100), st.integers(0, 200))
def test_no_tier_gets_more_than_it_has_room_for_and_host_is_filled_first(
    sizes: list[int], host: int, nvme: int
) -> None:
    left = host
    expected = []
    for size in sizes:
        expected.append(Tier.HOST if size <= left else Tier.NVME)
        left -= size if size <= left else 0
    on_nvme = sum(size for size, tier in zip(sizes, expected, strict=True) if tier is Tier.NVME)
    if on_nvme > nvme:
        with pytest.raises(BudgetError):
            place(sizes, Room(host, nvme), "parameters")
    else:
        assert place(sizes, Room(host, nvme), "parameters") == expected


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from(Tier)), max_size=20), room, room)
def test_a_copy_lies_in_host_memory_or_beside_its_parameters_or_nowhere(
    copies: list[tuple[int, Tier]], host: int, nvme: int
) -> None:
    sizes, beside = [size for size, _ in copies], [tier for _, tier in copies]
    tiers = place_copies(sizes, beside, Room(host, nvme))
    left = host
    for size, params, tier in zip(sizes, beside, tiers, strict=True):
        fits = params is Tier.HOST and size <= left
        assert tier == (Tier.HOST if fits else None)
        left -= size if fits else 0


def test_a_refusal_names_what_is_missing_to_the_byte() -> None:
    with pytest.raises(BudgetError, match=r"no place for gradients: 3.00 GiB needed, 1.00 GiB of host memory and "):
        place([GIB, GIB, GIB], Room(GIB, GIB), "gradients")
    with pytest.raises(BudgetError, match=r"so 1.00 GiB are missing; raise Budget\(host=…\), or Budget\(nvme=…"):
        place([GIB, GIB, GIB], Room(GIB, GIB), "gradients")
    assert place([GIB, GIB], Room(GIB, GIB), "gradients") == [Tier.HOST, Tier.NVME]


def test_states_stay_on_the_device_up_to_half_of_it_or_up_to_what_the_user_says() -> None:
    assert fits_device(500, 1000, None)
    assert not fits_device(501, 1000, None)
    assert fits_device(900, 1000, 900)
    assert not fits_device(901, 1000, 900)
    assert not fits_device(1, 1000, 0)
    assert fits_device(0, 0, 0)


@given(st.lists(st.integers(1, 6), max_size=10), st.integers(0, 500))
def test_staging_holds_one_update_at_least_and_three_at_most(spans: list[int], host_slots: int) -> None:
    one_update = STAGED_ROLES * max(spans, default=1)
    slots = staging_slots(spans, host_slots)
    assert one_update <= slots <= 3 * one_update
    assert slots <= max(one_update, host_slots // 4)
    assert slots == one_update or slots in (3 * one_update, host_slots // 4)


def test_staging_is_no_more_than_links_can_use_and_two_of_the_largest() -> None:
    slot = 1 << 26  # bytes of float32, of which 4 GiB are 64
    assert staging_slots([1], 10_000, slot) == 12
    assert staging_slots([7], 10_000, slot) == 64
    assert staging_slots([56], 10_000, slot) == 2 * 4 * 56


def test_a_chunk_far_larger_than_others_stays_in_host_memory_where_staging_it_would_take_as_much() -> None:
    """An embedding of 56 slots beside matrices of 4: 9 GiB of staging were 1.8."""
    spans, slot = {0: 56, **dict.fromkeys(range(1, 40), 4)}, 1 << 26
    assert never_staged(spans, spans, 1900, slot) == (frozenset({0}), 48)
    assert never_staged(spans, set(), 700, slot) == (frozenset({0}), 48)
    assert never_staged(spans, spans, 500, slot) == (frozenset(), 4 * 56), "homes of others need the room"
    assert never_staged(dict.fromkeys(spans, 56), spans, 1900, slot)[0] == frozenset()
    assert never_staged({0: 6, **dict.fromkeys(range(1, 40), 4)}, spans, 1900, slot)[0] == frozenset()


def test_a_chunk_takes_little_of_the_device_and_of_the_staging_ring() -> None:
    assert largest_chunk_elements(64 * MIB, 0, 2, 4, nvme=False) == MIB // 2
    assert largest_chunk_elements(64 * MIB, 48 * MIB, 2, 4, nvme=True) == MIB // 4
    assert largest_chunk_elements(64 * MIB, 960 * MIB, 2, 4, nvme=True) == MIB // 2
