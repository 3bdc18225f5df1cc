"""What would let a moment pass that the device has no room for: changes judged by the bytes of that moment. Pure.

It sees one moment. What comes after it may need more, and then says so in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetmem.plan.layout import PAGE_ELEMENTS
from hetmem.units import MIB, format_size, round_down, round_up

_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """The device at one moment, in bytes.

    `live_bytes` is what is neither copies nor homes of chunks, `lasting_bytes` the part of it that does not depend on
    the batch; `copy_bytes` are all copies that the moment uses at once, of `copies` chunks whose largest parameter has
    `largest_elements`; `home_bytes` are homes on the device. `whole_bytes` is what keeping the model whole there takes,
    0 if it is streamed. An element takes `itemsize` at home and `compute_itemsize` in a copy.
    """

    device_bytes: int
    usable_bytes: int
    chunk_cap_bytes: int
    live_bytes: int
    lasting_bytes: int
    copy_bytes: int
    copies: int
    largest_elements: int
    home_bytes: int
    whole_bytes: int
    slot_bytes: int
    itemsize: int
    compute_itemsize: int

    def lets_pass(self, *, live_bytes: int, copy_bytes: int, home_bytes: int, cap_bytes: int) -> bool:
        """Whether the moment would pass with other figures."""
        return live_bytes + copy_bytes + home_bytes <= self.usable_bytes and copy_bytes + home_bytes <= cap_bytes


def remedies(needs: Needs) -> Iterator[str]:
    """Changes that let the moment pass, the cheapest first; the last one, a larger budget, always does."""
    if needs.whole_bytes:
        yield from _streamed(needs)
    else:
        yield from _smaller_chunks(needs)
    yield from _micro_batches(needs)
    if not needs.whole_bytes and needs.device_bytes > needs.chunk_cap_bytes < needs.copy_bytes:
        yield f"raise Budget(device_chunks=…): this moment needs {format_size(needs.copy_bytes)} of chunks at once"
        return
    lost = needs.device_bytes - needs.usable_bytes
    least = round_up(needs.copy_bytes + needs.live_bytes + needs.home_bytes + lost, MIB)
    yield f"raise Budget(device=…): this moment needs {format_size(least)}"


def _streamed(needs: Needs) -> Iterator[str]:
    """States leave the device; what activations leave there is for chunks, and too little to keep the model whole."""
    cap = round_down(min(needs.usable_bytes - needs.live_bytes, needs.whole_bytes - 1), PAGE_ELEMENTS)
    if cap >= needs.slot_bytes and cap >= needs.largest_elements * needs.compute_itemsize:
        yield f"set Budget(device_chunks={cap}), so that chunks are streamed instead of kept on the device"


def _smaller_chunks(needs: Needs) -> Iterator[str]:
    """Chunks just large enough for the largest parameter in use."""
    elements = round_up(needs.largest_elements, PAGE_ELEMENTS)
    copy_bytes = needs.copies * elements * needs.compute_itemsize
    if copy_bytes < needs.copy_bytes and needs.lets_pass(
        live_bytes=needs.live_bytes,
        copy_bytes=copy_bytes,
        home_bytes=needs.home_bytes,
        cap_bytes=needs.chunk_cap_bytes,
    ):
        size = elements * needs.itemsize
        yield f"set chunk_bytes={size}: then the chunks in use take {format_size(copy_bytes)}"


def _micro_batches(needs: Needs) -> Iterator[str]:
    """The fewest micro-batches, whose gradients add up, with which it passes: live bytes grow with the batch."""
    parts = 2
    while parts <= _MOST_PARTS:
        live = needs.lasting_bytes + (needs.live_bytes - needs.lasting_bytes) // parts
        if needs.lets_pass(
            live_bytes=live,
            copy_bytes=needs.copy_bytes,
            home_bytes=needs.home_bytes,
            cap_bytes=needs.chunk_cap_bytes,
        ):
            yield f"use a smaller batch: with {parts} micro-batches what is live here is about {format_size(live)}"
            return
        parts *= 2
