"""The fewest fetches any policy could have made: the offline bound that policies are measured against.

Pure, and only for judging afterwards: it sees the whole future at once and knows nothing of links, latencies or
`Residency`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from hetmem.base.units import format_size
from hetmem.errors import CapacityError
from hetmem.schedule.trace import NEVER


def fewest_fetches(uses: Sequence[tuple[int, ...]], slots: int, *, resident: Iterable[int] = ()) -> int:
    """The fewest fetches that serve `uses` in order from `slots` slots of one block each; exact.

    The blocks of one use are needed at the same time; those in `resident` are there from the start. This is Belady's
    MIN (L. A. Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966); fetching ahead of time
    can hide latency but not save a fetch. Raises `CapacityError` if a use has more than `slots` blocks.
    """
    return fewest_bytes(uses, defaultdict(lambda: 1), [slots] * len(uses), resident=resident)


def fewest_bytes(
    uses: Sequence[tuple[int, ...]],
    sizes: Mapping[int, int],
    capacities: Sequence[int],
    *,
    resident: Iterable[int] = (),
) -> int:
    """A lower bound of the bytes to fetch for `uses`, with `capacities[i]` bytes from use `i` up to the next one.

    It gives up the bytes used furthest in the future, and a block in part if part of it is enough: exact if all sizes
    are equal and divide the capacities, below what is possible otherwise (whole blocks are a knapsack problem, and a
    block of several slots also needs them in a row). O(blocks used · log). Raises `CapacityError` if a use alone
    exceeds its capacity.
    """
    coming: dict[int, deque[int]] = defaultdict(deque)
    for at, blocks in enumerate(uses):
        for block in set(blocks):
            coming[block].append(at)
    for after in coming.values():
        after.append(NEVER)

    kept = {block: sizes[block] for block in resident}
    furthest = [(-coming[block][0] if block in coming else -NEVER, block) for block in kept]
    heapq.heapify(furthest)
    kept_bytes = sum(kept.values())
    fetched = 0
    for at, (blocks, capacity) in enumerate(zip(uses, capacities, strict=True)):
        in_use = set(blocks)
        needed = sum(sizes[block] for block in in_use)
        if needed > capacity:
            raise CapacityError(f"use {at} needs {format_size(needed)} at once, {format_size(capacity)} are there")
        present = sum(kept.pop(block, 0) for block in in_use)
        kept_bytes -= present
        fetched += needed - present
        while kept_bytes > capacity - needed:
            key, block = furthest[0]
            if block not in kept or (block in coming and coming[block][0] != -key):
                heapq.heappop(furthest)  # it was used since, and has another entry if it is still here
                continue
            given_up = min(kept[block], kept_bytes + needed - capacity)
            kept_bytes -= given_up
            kept[block] -= given_up
            if not kept[block]:
                del kept[block]
        for block in in_use:
            coming[block].popleft()
            kept[block] = sizes[block]
            heapq.heappush(furthest, (-coming[block][0], block))
        kept_bytes += needed
    return fetched
