"""What would let a step pass that the device has no room for: changes judged by the bytes of its moments. Pure.

A change that only moves the failure to another moment is none. What comes later in the first step of all is not known,
may need more, and then says so in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetmem.base.units import MIB, format_size, round_down, round_up
from hetmem.schedule.layout import PAGE_ELEMENTS

_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """The device at one moment, in bytes.

    `live_bytes` is what is neither copies nor homes of chunks, `lasting_bytes` the part of it that does not depend on
    the batch; `copy_bytes` are all copies that the moment uses at once, of `copies` chunks whose largest parameter has
    `largest_elements` (that of the model: `model_elements`); `home_bytes` are homes on the device. `whole_bytes` is
    what keeping the model whole there takes, 0 if it is streamed. An element takes `itemsize` at home and
    `compute_itemsize` in a copy.
    """

    device_bytes: int
    usable_bytes: int
    chunk_cap_bytes: int
    live_bytes: int
    lasting_bytes: int
    copy_bytes: int
    copies: int
    largest_elements: int
    model_elements: int
    home_bytes: int
    whole_bytes: int
    slot_bytes: int
    itemsize: int
    compute_itemsize: int

    def passes(
        self,
        *,
        live_bytes: int | None = None,
        copy_bytes: int | None = None,
        home_bytes: int | None = None,
        cap_bytes: int | None = None,
    ) -> bool:
        """Whether the moment would pass with these figures in place of its own."""
        live = self.live_bytes if live_bytes is None else live_bytes
        chunks = self.copy_bytes if copy_bytes is None else copy_bytes
        chunks += self.home_bytes if home_bytes is None else home_bytes
        return live + chunks <= self.usable_bytes and chunks <= (
            self.chunk_cap_bytes if cap_bytes is None else cap_bytes
        )


def remedies(needs: Needs, others: Sequence[Needs] = ()) -> Iterator[str]:
    """Changes that let the moment that failed pass, and all `others` that are known, the cheapest first; the last one,
    a larger budget, always does."""
    moments = (needs, *others)
    if needs.whole_bytes:
        yield from _streamed(moments)
    else:
        yield from _smaller_chunks(moments)
    yield from _micro_batches(moments)
    copies = max(moment.copy_bytes for moment in moments)
    if not needs.whole_bytes and needs.device_bytes > needs.chunk_cap_bytes < needs.copy_bytes:
        yield f"raise Budget(device_chunks=…): this moment needs {format_size(copies)} of chunks at once"
        return
    lost = needs.device_bytes - needs.usable_bytes
    least = max(moment.copy_bytes + moment.live_bytes for moment in moments) + needs.home_bytes + lost
    yield f"raise Budget(device=…): this moment needs {format_size(round_up(least, MIB))}"


def _streamed(moments: Sequence[Needs]) -> Iterator[str]:
    """States leave the device; what activations leave there is for chunks, and too little to keep the model whole."""
    needs = moments[0]
    cap = round_down(min(needs.usable_bytes - needs.live_bytes, needs.whole_bytes - 1), PAGE_ELEMENTS)
    largest = max(needs.slot_bytes, needs.model_elements * needs.compute_itemsize)
    if cap >= largest and all(moment.passes(home_bytes=0, cap_bytes=cap) for moment in moments):
        yield f"set Budget(device_chunks={cap}), so that chunks are streamed instead of kept on the device"


def _smaller_chunks(moments: Sequence[Needs]) -> Iterator[str]:
    """Chunks just large enough for the largest parameter in use; a larger one takes several slots."""
    needs = moments[0]
    elements = round_up(needs.largest_elements, PAGE_ELEMENTS)
    sizes = [m.copies * round_up(m.largest_elements, elements) * needs.compute_itemsize for m in moments]
    widest = round_up(needs.model_elements, elements) * needs.compute_itemsize
    if (
        sizes[0] < needs.copy_bytes
        and widest + needs.lasting_bytes + needs.home_bytes <= needs.usable_bytes
        and widest + needs.home_bytes <= needs.chunk_cap_bytes
        and all(moment.passes(copy_bytes=size) for moment, size in zip(moments, sizes, strict=True))
    ):
        size = elements * needs.itemsize
        yield f"set chunk_bytes={size}: then the chunks in use take {format_size(sizes[0])}"


def _micro_batches(moments: Sequence[Needs]) -> Iterator[str]:
    """The fewest micro-batches, whose gradients add up, with which all pass: live bytes grow with the batch."""
    parts = 2
    while parts <= _MOST_PARTS:
        lives = [m.lasting_bytes + (m.live_bytes - m.lasting_bytes) // parts for m in moments]
        if all(moment.passes(live_bytes=live) for moment, live in zip(moments, lives, strict=True)):
            yield f"use a smaller batch: with {parts} micro-batches what is live here is about {format_size(lives[0])}"
            return
        parts *= 2
