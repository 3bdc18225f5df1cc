"""Eviction: next use is as good as exhaustive search, LRU and FIFO are what their names say, the bound is a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.optimum import fewest_bytes, fewest_fetches
from hetmem.errors import CapacityError
from hetmem.schedule.blocks import CopyFacts, EvictionPolicy
from tests.pairs import examples
from tests.schedule.tested import FIFO, LRU, NEVER, Block, Drop, Fetch, NextUse, Residency, Schedule, Tier

single_uses = st.lists(st.integers(0, 4).map(lambda block: (block,)), max_size=12)
uses_at_once = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True).map(tuple), max_size=12)
slot_counts = st.integers(2, 3)

Uses = list[tuple[int, ...]]


def by_trying_everything(
    uses: Sequence[tuple[int, ...]], sizes: Mapping[int, int], capacities: Sequence[int], resident: frozenset[int]
) -> int:
    """The fewest bytes to fetch whole blocks: every set that may stay after every use is tried."""
    least = {resident: 0}
    for blocks, capacity in zip(uses, capacities, strict=True):
        after: dict[frozenset[int], int] = {}
        for kept, cost in least.items():
            present = kept | set(blocks)
            total = cost + sum(sizes[block] for block in present - kept)
            others = sorted(present - set(blocks))
            for count in range(len(others) + 1):
                for left in combinations(others, count):
                    stays = frozenset(left) | set(blocks)
                    if sum(sizes[block] for block in stays) <= capacity:
                        after[stays] = min(after.get(stays, total), total)
        least = after
    return min(least.values())


def fetched_by(policy: EvictionPolicy, uses: Uses, slots: int, *, schedule: Schedule | None = None) -> list[int]:
    """The blocks that are fetched, in order, without prefetching and with every fetch answered at once."""
    residency = Residency({Tier.DEVICE: slots}, policy, lookahead=0)
    for number in range(5):
        residency.add(Block(f"block {number}", Tier.HOST))
    assert residency.expect({Tier.DEVICE: schedule or Schedule()}) == []
    fetched = []
    for blocks in uses:
        residency.reach(blocks, Tier.DEVICE)
        for block in blocks:
            for command in residency.acquire(block, Tier.DEVICE):
                assert isinstance(command, (Fetch, Drop))
                if isinstance(command, Fetch):
                    fetched.append(command.block)
                    assert residency.done(command) == []
            residency.slot(block, Tier.DEVICE)
        for block in blocks:
            assert residency.release(block, Tier.DEVICE) == []
    assert residency.counts.fetches[Tier.DEVICE] == len(fetched)
    return fetched


@given(single_uses | uses_at_once, slot_counts)
def test_next_use_fetches_as_little_as_exhaustive_search(uses: Uses, slots: int) -> None:
    fetched = fetched_by(NextUse(), uses, slots, schedule=Schedule(uses))
    assert len(fetched) == by_trying_everything(uses, dict.fromkeys(range(5), 1), [slots] * len(uses), frozenset())


@given(single_uses, slot_counts)
def test_lru_gives_up_what_was_used_longest_ago(uses: Uses, slots: int) -> None:
    kept: list[int] = []
    expected = []
    for (block,) in uses:
        if block in kept:
            kept.remove(block)
        else:
            expected.append(block)
            del kept[: len(kept) - slots + 1]
        kept.append(block)
    assert fetched_by(LRU(), uses, slots) == expected
    assert fetched_by(NextUse(), uses, slots) == expected, "without a trace, next use is LRU"


@given(single_uses, slot_counts)
def test_fifo_gives_up_what_was_fetched_first(uses: Uses, slots: int) -> None:
    kept: list[int] = []
    expected = []
    for (block,) in uses:
        if block not in kept:
            expected.append(block)
            del kept[: len(kept) - slots + 1]
            kept.append(block)
    assert fetched_by(FIFO(), uses, slots) == expected


def test_next_use_gives_up_clean_copies_first_and_then_old_ones_among_equals() -> None:
    def facts(next_use: int, last_use: int, dirty: bool) -> CopyFacts:
        return CopyFacts(next_use, last_use, 0, dirty)

    order = [
        facts(NEVER, 3, dirty=False),
        facts(NEVER, 1, dirty=True),
        facts(9, 1, dirty=False),
        facts(9, 2, dirty=False),
        facts(9, 1, dirty=True),
        facts(8, 0, dirty=False),
    ]
    backwards = order[::-1]
    assert sorted(backwards, key=NextUse().rank, reverse=True) == order


# --- the offline bound ----------------------------------------------------------------------------------------------


@given(uses_at_once, slot_counts, st.sets(st.integers(0, 4), max_size=3))
def test_fewest_fetches_is_what_exhaustive_search_finds(uses: Uses, slots: int, resident: set[int]) -> None:
    resident = set(sorted(resident)[:slots])
    expected = by_trying_everything(uses, dict.fromkeys(range(5), 1), [slots] * len(uses), frozenset(resident))
    assert fewest_fetches(uses, slots, resident=resident) == expected


@given(uses_at_once, st.lists(st.integers(2, 5), min_size=12, max_size=12))
def test_fewest_bytes_is_exact_for_blocks_of_one_size_under_capacities_that_change(
    uses: Uses, capacities: list[int]
) -> None:
    capacities = capacities[: len(uses)]
    expected = by_trying_everything(uses, dict.fromkeys(range(5), 7), [7 * c for c in capacities], frozenset())
    assert fewest_bytes(uses, dict.fromkeys(range(5), 7), [7 * c for c in capacities]) == expected


@settings(max_examples=examples(60))
@given(uses_at_once, st.lists(st.integers(1, 3), min_size=5, max_size=5), st.integers(6, 9))
def test_fewest_bytes_is_a_lower_bound_for_blocks_of_different_sizes(
    uses: Uses, sizes: list[int], capacity: int
) -> None:
    table, capacities = dict(enumerate(sizes)), [capacity] * len(uses)
    least = fewest_bytes(uses, table, capacities)
    assert sum(sizes[block] for block in {b for use in uses for b in use}) <= least
    assert least <= by_trying_everything(uses, table, capacities, frozenset())


def test_a_use_that_exceeds_the_capacity_has_no_optimum() -> None:
    with pytest.raises(CapacityError, match="use 1 needs 3 B at once, 2 B are there"):
        fewest_fetches([(0,), (1, 2, 3)], 2)
