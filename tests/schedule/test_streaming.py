"""The streamed share, step by step: when it is chosen, when again, and what becomes of its slots."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.optim.machines import SLOW_HOST
from tests.schedule.tested import Facts, Fitting, Rate, StreamedShare, spread

CHUNKS = [Fitting(number, 1000, 16382 + number) for number in range(4)]
SLOT = 20480
"""Of the largest, in whole pages."""


class Slots:
    """Two slots in `free` idle bytes."""

    def __init__(self, free: int) -> None:
        self.free, self.slot_bytes, self.given_back = free, 0, 0

    def idle_bytes(self) -> int:
        return self.free - 2 * self.slot_bytes

    def take_slots(self, nbytes: int) -> bool:
        self.slot_bytes = nbytes
        return True

    def give_slots_back(self) -> None:
        self.given_back += self.slot_bytes > 0
        self.slot_bytes = 0


class Steps:
    """A share, and the steps of a model that sends 16000 bytes of gradients home in each."""

    def __init__(self, slots: Slots) -> None:
        self.slots, self.share, self.asked, self._sent = slots, StreamedShare(SLOW_HOST, slots), 0, 0

    def look(self, fitting: list[Fitting], homes: int = 0) -> frozenset[int]:
        def facts() -> Facts:
            self.asked += 1
            return Facts(fitting, 4000 - 1000 * len(fitting), 4, 0)

        self._sent += 16000
        self.share.look(self._sent, homes + 2 * self.slots.slot_bytes, facts)
        return self.share.chosen


def test_the_first_step_takes_slots_the_second_chooses_and_then_nothing_is_asked() -> None:
    steps = Steps(Slots(2 * SLOT))
    assert (steps.look(CHUNKS), steps.slots.slot_bytes) == (frozenset(), SLOT)
    assert steps.look(CHUNKS) == {0, 1, 2, 3}
    assert steps.asked == 2
    assert steps.look([]) == {0, 1, 2, 3}
    assert (steps.asked, steps.slots.given_back) == (2, 0)


def test_it_is_chosen_anew_when_homes_have_moved_and_when_slots_had_to_go() -> None:
    steps = Steps(Slots(2 * SLOT))
    for _ in range(2):
        steps.look(CHUNKS)
    assert steps.look(CHUNKS[1:], homes=16000) == {1, 2, 3}
    steps.slots.slot_bytes = 0
    assert steps.look(CHUNKS[2:], homes=16000) == {2, 3}
    assert (steps.asked, steps.slots.slot_bytes) == (4, SLOT)


def test_slots_that_nothing_is_streamed_with_are_given_back() -> None:
    steps = Steps(Slots(2 * SLOT))
    steps.look(CHUNKS)
    assert steps.look([]) == frozenset()
    assert (steps.slots.slot_bytes, steps.slots.given_back) == (0, 1)
    steps.look([])
    assert steps.asked == 2


def test_slots_grow_with_the_largest_chunk_into_what_is_idle_and_what_they_have() -> None:
    steps = Steps(Slots(2 * SLOT))
    for fitting in (CHUNKS[:1], CHUNKS[:1], CHUNKS):
        chosen = steps.look(fitting, homes=-16000 * len(fitting))
    assert (chosen, steps.slots.slot_bytes) == ({0, 1, 2, 3}, SLOT)


def test_a_slot_has_room_for_the_states_of_one_chunk_beside_the_gradients_of_any_other() -> None:
    """The smaller one has a copy in 16 bits at home, so that its states take more."""
    mixed = [Fitting(0, 10_000, 160_000), Fitting(1, 9_500, 171_000)]
    steps = Steps(Slots(1 << 20))
    steps.look(mixed)
    assert steps.slots.slot_bytes == -(-(9_500 * 14 + 10_000 * 4) // 4096) * 4096 > 171_000


def test_nothing_is_streamed_without_room_for_two_slots() -> None:
    steps = Steps(Slots(2 * SLOT - 1))
    for _ in range(3):
        assert steps.look(CHUNKS) == frozenset()
    assert steps.slots.slot_bytes == 0


def test_one_chunk_much_larger_than_the_others_takes_no_slots_and_is_the_hosts() -> None:
    for most, chosen in ((8, {0, 1, 2}), (9, {0, 1})):
        large = [Fitting(0, 1000, 16384), Fitting(1, 1000, 16384), Fitting(2, 2000, most * 16384)]
        steps = Steps(Slots(2 * 9 * SLOT))
        for _ in range(2):
            found = steps.look(large)
        assert found == chosen
        assert steps.slots.slot_bytes == (16384 if most == 9 else 8 * 16384)


def test_weights_are_not_large_beside_chunks_of_a_few_biases_between_them() -> None:
    layers = [Fitting(number, 1000, 64 if number % 2 else 16384) for number in range(9)]
    steps = Steps(Slots(2 * SLOT))
    for _ in range(2):
        found = steps.look(layers)
    assert found == set(range(9))
    embeddings = [Fitting(9, 2000, 9 * 16384), Fitting(10, 2000, 9 * 16384)]
    steps = Steps(Slots(2 * 9 * SLOT))
    for _ in range(2):
        found = steps.look([*layers, *embeddings])
    assert found == set(range(9))


def test_what_large_chunks_do_not_take_the_others_do() -> None:
    """7/11 of all: where half of the elements are left, all of those."""
    rate = Rate(8e6)
    host = replace(SLOW_HOST.host, update_bytes_per_second=7e6)
    on = replace(SLOW_HOST, host=host, host_to_device=rate, device_to_host=rate, both_ways_bytes_per_second=1e9)
    chunks = [*(Fitting(number, 1000, 16384) for number in range(11)), Fitting(11, 11000, 10 * 16384)]
    for fitting, chosen in ((chunks[:11], 7), (chunks, 11)):
        share = StreamedShare(on, Slots(1 << 20))
        for step in (1, 2):
            share.look(
                4 * sum(chunk.numel for chunk in fitting) * step, 0, lambda fitting=fitting: Facts(fitting, 0, 4, 0)
            )
        assert len(share.chosen) == chosen


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.floats(0, 1))
def test_what_is_spread_is_the_part_as_nearly_as_half_a_chunk_all_along_the_way(sizes: list[int], part: float) -> None:
    chunks = [Fitting(number, size, 0) for number, size in enumerate(sizes)]
    chosen = spread(chunks, part)
    for end in range(1, len(sizes) + 1):
        wanted = part * sum(sizes[:end])
        assert abs(sum(sizes[at] for at in range(end) if at in chosen) - wanted) <= max(sizes) / 2 + 1e-6


def test_a_part_of_chunks_is_spread_evenly_among_them() -> None:
    chunks = [Fitting(number, 10, 160) for number in range(12)]
    chosen = spread(chunks, 1 / 3)
    assert [number in chosen for number in range(12)] == 4 * [False, True, False]
    assert spread(chunks, 1.0) == set(range(12))
    assert spread(chunks, 0.0) == set()
