"""Chunks that have had every gradient of a backward: which they are, and that a simulated run writes these at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.test_planner import HARDWARE, workload
from tests.planner.tested import (
    MIB,
    Capacities,
    Complete,
    CopyState,
    Event,
    Rate,
    Rehearsal,
    Setting,
    Tier,
    Updating,
    arranged,
)

LAYERS = 30
IN_FLIGHT = 4
"""Gradients of a layer, of a MiB, that are on their way in a sixteenth of the device."""


def two(chunk: str) -> tuple[int, int]:
    return 1, 2


def test_a_chunk_is_complete_with_the_last_of_what_was_awaited() -> None:
    complete = Complete[str]()
    complete.begin()
    assert "a" not in complete
    complete.add("a", 2, two)
    assert "a" not in complete
    complete.add("a", 1, two)
    assert "a" in complete
    assert "b" not in complete


def test_every_backward_begins_anew() -> None:
    complete = Complete[str]()
    for _ in range(2):
        complete.begin()
        assert "a" not in complete
        complete.add("a", 1, two)
        assert "a" not in complete
        complete.add("a", 2, two)
        assert "a" in complete


def test_where_a_backward_had_more_than_was_awaited_nobody_knows_the_last() -> None:
    complete = Complete[str]()
    for backward in range(2):
        complete.begin()
        for parameter in (1, 2):
            complete.add("a", parameter, two)
        assert ("a" in complete) == (backward == 0)
        complete.add("a", 1, two)
        assert "a" not in complete


class Watched(Rehearsal):
    """Layers of a chunk each, with gradients of most on NVMe. Notes what of them is read there before the optimizer,
    and which lie in staging at the end of a backward, neither written nor on their way."""

    def __init__(self, how: Updating, chunk_bytes: int = MIB, micro_batches: int = 1) -> None:
        room = Capacities(64 * MIB, 48 * MIB, 512 * MIB, 8 * MIB)
        drive = replace(HARDWARE, nvme_read=Rate(1e9), nvme_write=Rate(1e9))
        layers = workload(LAYERS, activation=0)
        setting = Setting(room, chunk_bytes, hardware=drive, micro_batches=micro_batches, updating=how)
        super().__init__(layers, arranged(layers, setting), setting)
        self.on_nvme = self._on_nvme("grad")
        self.read_early: list[int] = []
        self.left: list[int] = []

    def _event(self, index: int, event: Event) -> None:
        state = self._traffic.residency.state
        before = {block for block in self.on_nvme if state(block, Tier.HOST) is not None}
        super()._event(index, event)
        now = {block for block in self.on_nvme if state(block, Tier.HOST) is CopyState.LOADING}
        self.read_early += now - before

    def _arrive(self) -> None:
        residency = self._traffic.residency
        self.left += [block for block in self.on_nvme if residency.dirty(block) and not residency.writing(block)]
        super()._arrive()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_on_their_way_to_nvme_when_a_backward_ends(micro_batches: int) -> None:
    """Written where somebody wanted their place, and at the end, they left the drive idle while the device computed.
    Also those to which the next backward adds, as the program finds them at home before."""
    run = Watched(Updating(), micro_batches=micro_batches)
    for _ in range(3):
        run.left.clear()
        run.step()
        assert len(run.left) <= IN_FLIGHT * micro_batches  # those that come last
    assert len(run.on_nvme) > LAYERS // 2


def test_gradients_are_written_once_all_of_their_chunk_have_arrived() -> None:
    """Of two in a chunk the first arrives when the second one is on its way."""
    run = Watched(Updating(), chunk_bytes=2 * MIB)
    for _ in range(3):
        before = run._traffic.nvme_write.load.bytes
        run.step()
        assert run.left == []
    on_nvme = sum(run.arrangement.bytes_by_role(Tier.NVME).values())
    assert run._traffic.nvme_write.load.bytes - before == on_nvme


def test_no_gradient_is_read_from_nvme_to_be_overwritten() -> None:
    """A plan read ahead what the backward overwrites, which a run does not: a tenth of all that it read."""
    run = Watched(Updating())
    for _ in range(4):
        run.step()
    assert run.read_early == []
