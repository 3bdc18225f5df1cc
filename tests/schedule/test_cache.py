"""What is given up is found without looking at every copy: over many runs each decision is that of looking at all."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.invariants import check_invariants
from tests.schedule.scanning import compare
from tests.schedule.tested import (
    FIFO,
    LRU,
    STEP,
    Block,
    Command,
    CopyState,
    Drop,
    Fetch,
    Moment,
    NextUse,
    Order,
    Residency,
    Schedule,
    SegmentTrace,
    Tier,
    TraceBook,
    Write,
)

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


class Run:
    """Training steps over a made-up trace, with answers that come late and in any order."""

    def __init__(self, seed: int, policy: Any) -> None:
        self.random = rng = random.Random(seed)
        blocks = rng.randint(3, 24)
        self.planned = isinstance(policy, NextUse)
        spans = [rng.choice([1, 1, 1, 2, 3]) if seed % 2 else 1 for _ in range(blocks)]
        self.homes = [rng.choice([HOST, NVME]) for _ in range(blocks)]
        self.least = 2 * max(spans)
        self.slots = {tier: rng.randint(self.least, max(self.least, sum(spans))) for tier in (DEVICE, HOST)}
        self.residency = compare(
            Residency(self.slots, policy, lookahead=rng.choice([0, 4, 12]), in_flight=rng.choice([1, 2, 4]))
        )
        for number, (home, span) in enumerate(zip(self.homes, spans, strict=True)):
            self.residency.add(Block(f"block {number}", home, span))
        order = rng.sample(range(blocks), blocks)
        forward = [(block,) for block in order for _ in range(rng.randint(1, 3))]
        forward += [tuple(rng.sample(order, 2)) for _ in range(3)]
        self.trace = forward + forward[::-1]
        self.book = self.learned()
        self.pending: deque[Fetch | Write] = deque()

    def learned(self) -> TraceBook:
        """A forward, a backward and a step, as they are traced: the schedules of both tiers have one clock then."""
        book, half = TraceBook(), len(self.trace) // 2
        staged = [block for block, home in enumerate(self.homes) if home is NVME]
        for key, uses in (("forward", self.trace[:half]), ("backward", self.trace[half:]), (STEP, [])):
            host = staged if key == STEP else self.random.sample(staged, len(staged) // 3)
            book.put(SegmentTrace(key, tuple(Moment("operator", use) for use in uses), tuple(host)))
        for key, follower in (("forward", "backward"), ("backward", STEP), (STEP, "forward")):
            book.follows(key, follower)
        return book

    def begin(self, key: Hashable) -> None:
        if self.planned and self.booked:
            self.carry_out(self.residency.expect(self.book.schedules(key)))

    def carry_out(self, commands: list[Command]) -> None:
        self.pending.extend(command for command in commands if not isinstance(command, Drop))

    def answer(self) -> None:
        command = self.pending[self.random.randrange(len(self.pending))]
        self.pending.remove(command)
        fails = self.random.random() < 0.03
        self.carry_out((self.residency.failed if fails else self.residency.done)(command))

    def get(self, block: int, tier: Tier) -> bool:
        """Acquire; False, with nothing held, if it cannot be had."""
        residency = self.residency
        self.carry_out(residency.acquire(block, tier))
        while (state := residency.state(block, tier)) is not CopyState.VALID:
            if state is CopyState.STALE:
                self.carry_out(residency.release(block, tier))
                return False
            if not self.pending:
                residency.withdraw(block, tier)
                return False
            self.answer()
        return True

    def step(self) -> None:
        rng, residency = self.random, self.residency
        self.booked = rng.random() < 0.7
        self.begin("forward")
        if self.planned and not self.booked:
            barrier, segment = rng.choice([None, len(self.trace), 0]), rng.choice([len(self.trace) // 2, 1 << 62])
            schedule = Schedule(self.trace, barrier=barrier, segment=segment)
            self.carry_out(residency.expect({DEVICE: schedule}))
            staged = [block for block, home in enumerate(self.homes) if home is NVME]
            self.carry_out(residency.expect({HOST: Schedule([(block,) for block in staged for _ in range(2)])}))
        for at, use in enumerate(self.trace):
            if at == len(self.trace) // 2:
                self.begin("backward")
            if rng.random() < 0.1:
                use = (rng.randrange(len(self.homes)),)
            if rng.random() < 0.1:
                self.carry_out(residency.limit(DEVICE, rng.randint(self.least, self.slots[DEVICE])))
            while self.pending and rng.random() < 0.4:
                self.answer()
            residency.reach(use, DEVICE)
            for block in [block for block in use if self.get(block, DEVICE)]:
                self.carry_out(residency.release(block, DEVICE))
        self.begin(STEP)
        for block, home in enumerate(self.homes):
            self.update(block, home)
        while self.pending:
            self.answer()
        check_invariants(residency)

    def update(self, block: int, home: Tier) -> None:
        residency = self.residency
        if self.random.random() < 0.5:
            residency.suspend([block])
        if home is NVME:
            residency.reach((block,), HOST)
            if not self.get(block, HOST):
                self.carry_out(residency.resume([block]))
                return
            while residency.writing(block):
                self.answer()
            self.carry_out(residency.release(block, HOST, dirty=True))
        while residency.state(block, DEVICE) is CopyState.LOADING:
            self.answer()
        self.carry_out(residency.invalidate(block, DEVICE))
        self.carry_out(residency.settle(block))
        self.carry_out(residency.resume([block]))
        self.carry_out(residency.prefetch([block], DEVICE))


@pytest.mark.each
@pytest.mark.parametrize("policy", [NextUse, LRU, FIFO])
@pytest.mark.parametrize("seed", [*range(30), 233, 572])
def test_every_decision_is_the_one_that_looking_at_all_copies_makes(seed: int, policy: Any) -> None:
    run = Run(seed, policy())
    for _ in range(3):
        run.step()


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3), st.booleans()), max_size=60))
def test_an_order_is_that_of_the_present_ranks_whatever_they_were_before(
    changes: list[tuple[int, int | None, bool]],
) -> None:
    values: dict[int, int] = {}
    order = Order(values, lambda block: (values[block], -block, block))
    for block, value, asks in changes:
        values.pop(block, None)
        if value is not None:
            values[block] = value
        order.touch(block)
        if asks:
            assert list(order.ranks()) == sorted((value, -block, block) for block, value in values.items())
