"""Lays out parameters: which chunk, at which offset, and how large chunks should be.

All roles of a chunk (parameter, compute copy, gradient, optimizer states) share one layout, so everything here counts
in elements; bytes enter only as the weight of a group in the waste. Must not know torch, tiers, traces or budgets: it
gets sizes in order of use and returns offsets.

Note [Who shares a chunk]
    Small parameters are packed next to their neighbours in order of use, so one fetch serves uses that are close in
    time. A parameter larger than a chunk spans whole chunk sizes of its own, and nothing else may fill its tail:
    otherwise a layer norm of 16 KB would fetch the embedding of 500 MB it lies behind, hold it on the device as long
    as itself, and delay its update until the last gradient of both is in. The tail is waste the search must see.
    A spanning parameter does not close its group's open chunk: the norms between large matrices share one chunk,
    which is small and soon always resident, instead of taking one chunk per layer.

Note [Finding the chunk size]
    Let units(C) be the number of chunk sizes that the layout for chunk size C takes. It never rises with C: packing
    in order into one open chunk gives the fewest runs, ceil(n / C) falls, and a parameter that stops spanning (2 units
    or more until then) adds at most 2 to the packed ones, its own chunk and one more where it splits a run. So every
    size with lo < C < hi has a capacity of at least (lo + PAGE_ELEMENTS) * units(hi), and a branch and bound over
    intervals of sizes finds the optimum with no guess which sizes matter: some dozens of evaluations, milliseconds, for
    70 G parameters. It ends on left ends of plateaus of units(C): n / k of a large parameter, or the sum of a run
    of consecutive ones (k blocks, half a block).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetmem.base.units import round_down, round_up

PAGE_BYTES = 4096
PAGE_ELEMENTS = 4096
"""Chunk sizes are multiples of this, so that a role of any itemsize is whole 4096-byte pages (O_DIRECT)."""

ALIGNMENT_ELEMENTS = 128
"""Alignment of offsets: 256 bytes of 16-bit elements. Torch passes the alignment of addresses, up to that many bytes,
to cuBLASLt (`gemm_and_bias` in ATen/cuda/CUDABlas.cpp; cuDNN: up to 32), which may choose its algorithm by it: so
weights in chunks get the algorithms of torch's own allocations. 16-byte loads are aligned in every role."""

TARGET_ELEMENTS = 16 << 20
"""Preferred chunk: 64 MiB of fp32 is one 16 MiB block for each of four disk threads, and takes milliseconds on PCIe,
against tens of microseconds to hand a transfer to a thread. Larger moves no faster and leaves eviction less choice."""

# Being a factor of two away from the target is worth this share of the capacity, e.g. 0.5 percentage points of waste.
_COST_OF_A_DOUBLING = 0.005


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter to place: `numel` elements of `itemsize` bytes in the home copy.

    Parameters of different groups (dtype, trainable or frozen, quantised or not) never share a chunk; a group has one
    itemsize. `coded_bytes`: of the home of a quantised one, whose `itemsize` is that of its values; else 0.
    """

    name: str
    numel: int
    group: str
    itemsize: int
    coded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter (an index into the given order) lies: elements [offset, offset + numel) of its chunk."""

    parameter: int
    chunk: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk: `span * chunk_elements` contiguous elements, of which parameters take `used_elements`.

    `span` is above 1 only for a chunk made for one parameter larger than `chunk_elements`. `coded_bytes`: what the home
    of quantised parameters takes, in whole pages; else 0.
    """

    index: int
    group: str
    itemsize: int
    span: int
    parameters: tuple[int, ...]
    used_elements: int
    coded_bytes: int = 0

    @property
    def format(self) -> str:
        """The format of quantised parameters, with which the name of their group begins."""
        return self.group.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunks in the order they are first used, and one placement per parameter, by parameter index."""

    chunk_elements: int
    chunks: tuple[ChunkSpec, ...]
    placements: tuple[Placement, ...]

    def home_bytes(self, chunk: ChunkSpec) -> int:
        """Return the bytes that the home of the parameters of `chunk` takes."""
        return chunk.coded_bytes or chunk.span * self.chunk_elements * chunk.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks' home copies, used or not."""
        return sum(map(self.home_bytes, self.chunks))

    @property
    def used_bytes(self) -> int:
        """Bytes of all parameters' home copies."""
        return sum(chunk.coded_bytes or chunk.used_elements * chunk.itemsize for chunk in self.chunks)

    @property
    def waste(self) -> float:
        """Share of the chunks' bytes that no parameter uses, tails and alignment gaps: 0 (also if empty) to 1."""
        return 1 - self.used_bytes / self.total_bytes if self.chunks else 0.0


@dataclass(slots=True)
class _OpenChunk:
    """A chunk that is being filled."""

    index: int
    group: str
    itemsize: int
    span: int
    free_elements: int
    parameters: list[int] = field(default_factory=list)
    used_elements: int = 0
    coded_bytes: int = 0

    def closed(self) -> ChunkSpec:
        parameters, coded = tuple(sorted(self.parameters)), round_up(self.coded_bytes, PAGE_BYTES)
        return ChunkSpec(self.index, self.group, self.itemsize, self.span, parameters, self.used_elements, coded)


def build_layout(parameters: Sequence[ParameterSpec], chunk_elements: int) -> Layout:
    """Pack `parameters`, which are in order of use, into chunks of `chunk_elements`, a multiple of `PAGE_ELEMENTS`; see
    Note [Who shares a chunk].

    Guarantees: each parameter lies in one chunk of its group, whole, at a multiple of `ALIGNMENT_ELEMENTS`; the
    parameters of a group that do not span keep their order; a spanning chunk holds one of at least one element. A
    parameter of zero elements is put into a chunk that its group has anyway (it is never fetched), and gets a chunk of
    its own only if the group has none. The same input gives the same layout.
    """
    assert chunk_elements > 0 and chunk_elements % PAGE_ELEMENTS == 0, f"{chunk_elements} elements are no whole pages"
    chunks: list[_OpenChunk] = []
    open_chunks: dict[str, _OpenChunk] = {}
    placements: dict[int, Placement] = {}
    # Empty parameters come last, when every chunk they could be put into exists.
    for index in sorted(range(len(parameters)), key=lambda i: parameters[i].numel == 0):
        spec = parameters[index]
        padded = round_up(spec.numel, ALIGNMENT_ELEMENTS)
        chunk = open_chunks.get(spec.group)
        if chunk is None or padded > chunk.free_elements:
            span = max(1, -(-spec.numel // chunk_elements))
            chunk = _OpenChunk(len(chunks), spec.group, spec.itemsize, span, chunk_elements if span == 1 else padded)
            chunks.append(chunk)
            # A spanning chunk has no room left, so it stands here only until the group's first small parameter.
            if span == 1 or spec.group not in open_chunks:
                open_chunks[spec.group] = chunk
        offset = 0 if chunk.span > 1 else chunk_elements - chunk.free_elements
        placements[index] = Placement(index, chunk.index, offset, spec.numel)
        chunk.parameters.append(index)
        chunk.used_elements += spec.numel
        chunk.coded_bytes += spec.coded_bytes
        chunk.free_elements -= padded
    in_order = tuple(placements[index] for index in range(len(parameters)))
    return Layout(chunk_elements, tuple(chunk.closed() for chunk in chunks), in_order)


def search_chunk_elements(
    parameters: Sequence[ParameterSpec],
    *,
    minimum_elements: int,
    maximum_elements: int,
    target_elements: int | None = None,
) -> int:
    """Return the multiple of `PAGE_ELEMENTS` within the bounds that is the best chunk size for `build_layout`.

    Best is the least capacity (so the least waste), where 0.5% of capacity counts as much as a factor of two nearer to
    `target_elements` (default `TARGET_ELEMENTS`; clamped to the bounds). Without that preference a hundredth of a
    percent would decide between a model in one chunk and a matrix cut into a hundred. The result is the optimum over
    all sizes, and the same for the same input; see Note [Finding the chunk size].
    """
    low, high = round_up(max(minimum_elements, 1), PAGE_ELEMENTS), round_down(maximum_elements, PAGE_ELEMENTS)
    assert low <= high, f"no multiple of {PAGE_ELEMENTS} lies from {minimum_elements} to {maximum_elements}"
    wanted = TARGET_ELEMENTS if target_elements is None else target_elements
    target = min(max(round_down(wanted, PAGE_ELEMENTS), low), high)
    sizes = [(round_up(spec.numel, ALIGNMENT_ELEMENTS), spec.group, spec.itemsize) for spec in parameters]
    sizes.sort(key=lambda size: size[0] == 0)  # empty ones last, as in `build_layout`
    least = sum(padded * itemsize for padded, _, itemsize in sizes)
    units: dict[int, int] = {}
    intervals: list[tuple[float, int, int]] = []
    best_cost, best = math.inf, target

    def preference(size: int) -> float:
        return 1 + _COST_OF_A_DOUBLING * abs(math.log2(size / target))

    def evaluate(size: int) -> None:
        nonlocal best_cost, best
        units[size] = _units(sizes, size)
        best_cost, best = min((best_cost, best), (size * units[size] * preference(size), size))

    def push(lo: int, hi: int) -> None:
        """Consider the sizes between `lo` and `hi`, which lie on one side of the target."""
        if hi - lo > PAGE_ELEMENTS:
            capacity = max(least, (lo + PAGE_ELEMENTS) * units[hi])
            heapq.heappush(intervals, (capacity * min(preference(lo), preference(hi)), lo, hi))

    for size in (target, low, high):
        evaluate(size)
    push(low, target)
    push(target, high)
    while intervals and intervals[0][0] < best_cost:  # best first
        _, lo, hi = heapq.heappop(intervals)
        middle = round_down((lo + hi) // 2, PAGE_ELEMENTS)
        evaluate(middle)
        push(lo, middle)
        push(middle, hi)
    return best


def _units(sizes: Sequence[tuple[int, str, int]], chunk_elements: int) -> int:
    """Return units(C) of `sizes` (elements, group, itemsize), each weighted by its itemsize: C times this is
    `Layout.total_bytes`."""
    total, free = 0, dict[str, int]()
    for padded, group, itemsize in sizes:
        if padded > chunk_elements:
            total += -(-padded // chunk_elements) * itemsize
            free.setdefault(group, 0)
        elif padded > free.get(group, -1):
            total += itemsize
            free[group] = chunk_elements - padded
        else:
            free[group] -= padded
    return total


def used_ends(layout: Layout) -> tuple[int, ...]:
    """Return, by chunk, the elements up to its last parameter's end, rounded up to whole pages of any itemsize."""
    ends = [1] * len(layout.chunks)
    for placement in layout.placements:
        ends[placement.chunk] = max(ends[placement.chunk], placement.offset + placement.numel)
    return tuple(round_up(end, PAGE_ELEMENTS) for end in ends)
