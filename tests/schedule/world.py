"""What every slot and every home really contains while the commands of a residency are carried out.

Contents are version numbers: a block's home and its copies each hold the number of the write they come from. A `Write`
in flight leaves the home torn, a `Fetch` in flight its slot, a `Drop` its slot poisoned; the source of a transfer must
not change from the command to its answer, at whatever moment in between bytes may move.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.schedule.tested import Block, Drop, Fetch, Residency, Tier, Write

HOST, NVME = Tier.HOST, Tier.NVME
TORN = -1  # a home while it is written
UNDEFINED = -2  # a copy that its user is about to overwrite

Content = tuple[int, int] | None  # (block, version); None is poison


@dataclass
class InFlight:
    """A command without an answer, and what it reads."""

    command: Fetch | Write
    source_slot: int
    value: Content = None


@dataclass
class World:
    """Slots and homes with their contents."""

    blocks: list[Block]
    memory: dict[Tier, list[Content]]
    newest: list[int] = field(default_factory=list)
    home: list[int] = field(default_factory=list)
    in_flight: list[InFlight] = field(default_factory=list)

    def span(self, block: int, slot: int) -> slice:
        return slice(slot, slot + self.blocks[block].span)

    def read(self, tier: Tier, block: int, slot: int) -> Content:
        """What the slots of `block` contain, if they agree."""
        contents = set(self.memory[tier][self.span(block, slot)])
        assert len(contents) == 1, f"the slots of block {block} differ: {contents}"
        return contents.pop()

    def fill(self, tier: Tier, block: int, slot: int, version: int) -> None:
        self.memory[tier][self.span(block, slot)] = [(block, version)] * self.blocks[block].span

    def source(self, flight: InFlight) -> Content:
        command = flight.command
        if isinstance(command, Write):
            return self.read(HOST, command.block, command.slot)
        if command.source is self.blocks[command.block].home:
            return command.block, self.home[command.block]
        return self.read(HOST, command.block, flight.source_slot)

    def drop(self, command: Drop) -> None:
        content = self.read(command.tier, command.block, command.slot)
        assert content is not None, f"{command} of an empty slot"
        assert content[0] == command.block, f"{command} of a slot that holds {content}"
        self.memory[command.tier][self.span(command.block, command.slot)] = [None] * self.blocks[command.block].span

    def begin(self, command: Fetch | Write, residency: Residency) -> None:
        """From now until `end` the source must not change, and what is written to is torn."""
        target = command.target if isinstance(command, Fetch) else NVME
        for flight in self.in_flight:
            other = flight.command.target if isinstance(flight.command, Fetch) else NVME
            assert (flight.command.block, other) != (command.block, target), f"{command} is in flight already"
        flight = InFlight(command, -1)
        if isinstance(command, Fetch):
            if command.source is HOST and self.blocks[command.block].home is NVME:
                flight.source_slot = residency.slot(command.block, HOST)
            flight.value = self.source(flight)
            before = set(self.memory[target][self.span(command.block, command.slot)])
            assert all(content is None or content[0] == command.block for content in before), f"{command}: slot taken"
            self.fill(target, command.block, command.slot, TORN)
        else:
            flight.value = self.source(flight)
            self.home[command.block] = TORN
        assert flight.value == (command.block, self.newest[command.block]), f"{command} moves old bytes"
        self.in_flight.append(flight)

    def end(self, index: int, fails: bool) -> Fetch | Write:
        """Of what is in flight: bytes are there, or never will be."""
        flight = self.in_flight.pop(index)
        command = flight.command
        if not fails and isinstance(command, Write):
            self.home[command.block] = self.newest[command.block]
        elif not fails and isinstance(command, Fetch):
            assert flight.value is not None
            self.fill(command.target, command.block, command.slot, flight.value[1])
        return command
