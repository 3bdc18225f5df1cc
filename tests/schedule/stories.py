"""How the stories of a residency are told: blocks by number, commands by short names, and uses from begin to end."""

from __future__ import annotations

from tests.schedule.tested import Block, Command, Drop, Fetch, Residency, Tier

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def residency(
    *blocks: Tier | Block, device: int = 0, host: int = 0, lookahead: int = 0, in_flight: int = 2
) -> Residency:
    """With `blocks` numbered from 0, given by their homes where the span is 1."""
    made = Residency({DEVICE: device, HOST: host}, lookahead=lookahead, in_flight=in_flight)
    for number, block in enumerate(blocks):
        made.add(block if isinstance(block, Block) else Block(f"block {number}", block))
    return made


def up(block: int, slot: int) -> Fetch:
    """From host memory to the device."""
    return Fetch(block, HOST, DEVICE, slot)


def read(block: int, slot: int) -> Fetch:
    """From NVMe to staging."""
    return Fetch(block, NVME, HOST, slot)


def use(r: Residency, block: int, tier: Tier) -> list[Command]:
    """The next use in the schedule is of `block`: what acquiring it commands."""
    r.reach((block,), tier)
    return r.acquire(block, tier)


def bring(r: Residency, block: int, tier: Tier) -> None:
    """Acquire `block` and answer everything until it is there."""
    pending = use(r, block, tier)
    while pending:
        command = pending.pop(0)
        if not isinstance(command, Drop):
            pending += r.done(command)
    r.slot(block, tier)


def visit(r: Residency, block: int, tier: Tier, *, dirty: bool = False) -> None:
    """Use `block` once; it stays behind idle."""
    bring(r, block, tier)
    assert r.release(block, tier, dirty=dirty) == []


def fetches(r: Residency) -> tuple[int, int]:
    return r.counts.fetches[DEVICE], r.counts.fetches[HOST]
