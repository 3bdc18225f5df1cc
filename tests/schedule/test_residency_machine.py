"""Residency under random events, against a model of what every slot and every home really contains.

The model is that of `tests.schedule.world`. Answers come in any order and may be failures. The rules keep to what the
runtime promises (it waits for a copy in flight before it overwrites what that is read from), so whatever breaks is the
residency's fault. Every choice of what to give up is compared with that of `tests.schedule.scanning`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetmem.errors import CapacityError, StateError
from hetmem.schedule.blocks import EvictionPolicy
from tests.pairs import examples
from tests.schedule.invariants import check_invariants
from tests.schedule.scanning import compare
from tests.schedule.tested import (
    FIFO,
    LRU,
    Block,
    Command,
    CopyState,
    Drop,
    Fetch,
    NextUse,
    Residency,
    Schedule,
    Tier,
    Write,
)
from tests.schedule.world import UNDEFINED, World

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
LOADING = (CopyState.WAITING, CopyState.LOADING)
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"NextUse": NextUse, "LRU": LRU, "FIFO": FIFO}
spans = st.sampled_from([1, 1, 1, 2, 3])
MANY = 300  # answers; a residency that asks for more without any new event never settles


@dataclass(eq=False)
class Use:
    """What somebody outside asked for: `slot` once it was there."""

    block: int
    tier: Tier
    load: bool
    slot: int = -1


class ResidencyMachine(RuleBasedStateMachine):
    # ---- set up and bookkeeping --------------------------------------------------------------------------------

    @initialize(
        params=st.lists(st.tuples(st.sampled_from([HOST, NVME, NVME]), spans), min_size=2, max_size=4),
        states=st.lists(spans, max_size=2),
        device=st.integers(1, 6),
        host=st.integers(1, 6),
        policy=st.sampled_from(sorted(POLICIES)),
        lookahead=st.integers(0, 4),
        in_flight=st.integers(1, 3),
    )
    def begin(
        self,
        params: list[tuple[Tier, int]],
        states: list[int],
        device: int,
        host: int,
        policy: str,
        lookahead: int,
        in_flight: int,
    ) -> None:
        blocks = [Block(f"param{i}", home, span) for i, (home, span) in enumerate(params)]
        blocks += [Block(f"state{i}", NVME, span) for i, span in enumerate(states)]
        self.params = len(params)
        self.slots = {DEVICE: device, HOST: host}
        self.limit = dict(self.slots)
        self.make: Callable[[], Residency] = lambda: compare(
            Residency(dict(self.slots), POLICIES[policy](), lookahead=lookahead, in_flight=in_flight)
        )
        self.residency = self.make()
        for block in blocks:
            self.residency.add(block)
        numbers = {DEVICE: device * 4, HOST: host}  # each span has places of its own on the device
        self.world = World(blocks, {tier: [None] * count for tier, count in numbers.items()})
        self.world.newest = [0] * len(blocks)
        self.world.home = [0] * len(blocks)
        self.asked: list[Use] = []
        self.enforced: set[Tier] = set()  # where the last event had to give up what is beyond the limit
        self.used_before = dict.fromkeys(self.slots, 0)
        self.log: list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any], Any]] = []

    def event(self, name: str, *arguments: Any, **options: Any) -> None:
        """Tell the residency, and carry out what it answers."""
        self.event_with(name, lambda: arguments, **options)

    def event_with(self, name: str, arguments: Callable[[], tuple[Any, ...]], **options: Any) -> None:
        commands = getattr(self.residency, name)(*arguments(), **options) or []
        at = {"limit": 0, "release": 1}.get(name)
        self.enforced = set(self.slots) if name == "done" else set() if at is None else {arguments()[at]}
        self.log.append((name, arguments, options, commands))
        for command in commands:
            self.begin_command(command)
        self.note_arrivals()

    def begin_command(self, command: Command) -> None:
        if isinstance(command, Drop):
            held = [use for use in self.asked if (use.block, use.tier) == (command.block, command.tier)]
            assert not [use for use in held if use.slot >= 0], f"{command} of a copy in use"
            self.world.drop(command)
        else:
            self.world.begin(command, self.residency)

    def note_arrivals(self) -> None:
        for use in self.asked:
            if use.slot < 0 and self.residency.state(use.block, use.tier) is CopyState.VALID:
                use.slot = self.residency.slot(use.block, use.tier)
                slots = self.world.memory[use.tier][self.world.span(use.block, use.slot)]
                if not use.load and set(slots) == {None}:
                    self.world.fill(use.tier, use.block, use.slot, UNDEFINED)

    def span(self, block: int) -> int:
        return self.world.blocks[block].span

    def loading(self, block: int, *tiers: Tier) -> bool:
        return any(self.residency.state(block, tier) in LOADING for tier in tiers)

    def fingerprint(self) -> tuple[Any, ...]:
        """All there is to know from outside."""
        r, blocks = self.residency, range(len(self.world.blocks))
        copies = [(r.state(b, t), r.uses(b, t), r.dirty(b), r.writing(b)) for b in blocks for t in self.slots]
        return copies, r.in_flight(), [(r.resident(t), r.free_slots(t)) for t in self.slots]

    # ---- rules -------------------------------------------------------------------------------------------------

    @rule(
        number=st.integers(0, 5), on_host=st.booleans(), load=st.booleans(), waits=st.booleans(), at_once=st.booleans()
    )
    def acquire(self, number: int, on_host: bool, load: bool, waits: bool, at_once: bool) -> None:
        block = number % len(self.world.blocks)
        state_block = block >= self.params
        tier = HOST if state_block or (on_host and self.world.blocks[block].home is NVME) else DEVICE
        rivals = [use for use in self.asked if (use.block, use.tier) == (block, tier)]
        if any(not rival.load for rival in rivals):
            return  # nobody else looks at what is about to be overwritten
        overwrite = state_block and not load and not rivals and self.residency.state(block, tier) is None
        use = Use(block, tier, load=not overwrite)
        self.asked.append(use)
        if at_once:  # the same as a `reach`, which takes its place when all is told again
            self.log.append(("reach", lambda: ((block,), tier), {}, []))
        else:
            self.event("reach", (block,), tier)
        used = self.residency.use({block: 1}, tier, reached=(block,) if at_once else ())
        if used is None:
            self.event("acquire", block, tier, load=use.load)
        else:  # the same as an `acquire`: one takes its place when all is told again
            self.log.append(("acquire", lambda: (block, tier), {"load": use.load}, used))
            for command in used:
                self.begin_command(command)
            self.note_arrivals()
        if waits:
            self.answer_until(lambda: use.slot >= 0)
        if waits and use.slot < 0:
            self.asked.remove(use)
            self.abandon(use)

    @rule(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=6), which=st.integers(0, 3))
    def operate(self, numbers: list[int], which: int) -> None:
        """Operators one after the other, as the runtime runs them."""
        for number in numbers:
            before = len(self.asked)
            self.acquire(number % self.params, on_host=False, load=True, waits=True, at_once=number % 2 > 0)
            if len(self.asked) > before:
                self.release(-1)
            self.holds()
            if which == 0 and self.world.in_flight:
                self.answer(which, fails=False)

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4), load=st.booleans(), settles=st.booleans())
    def update(self, numbers: list[int], load: bool, settles: bool) -> None:
        """An optimizer's step over some blocks."""
        for number in numbers:
            before = len(self.asked)
            self.acquire(number, on_host=True, load=load, waits=True, at_once=load)
            if len(self.asked) > before and self.asked[-1] in self.changeable():
                self.change(-1, settles)
            self.holds()

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        use = self.asked.pop(which % len(self.asked))
        if use.slot < 0:
            self.abandon(use)
        else:
            self.event("release", use.block, use.tier)

    @precondition(lambda self: self.changeable())
    @rule(which=st.integers(0, 9), settles=st.booleans())
    def change(self, which: int, settles: bool) -> None:
        """A use that wrote to staging ends; copies on the device are superseded."""
        changeable = self.changeable()
        use = changeable[which % len(changeable)]
        self.asked.remove(use)
        self.world.newest[use.block] += 1
        self.world.fill(HOST, use.block, use.slot, self.world.newest[use.block])
        self.event("release", use.block, HOST, dirty=True)
        self.answer_until(lambda: not self.loading(use.block, DEVICE))
        self.event("invalidate", use.block, DEVICE)
        if settles:
            self.event("settle", use.block)

    def changeable(self) -> list[Use]:
        r = self.residency
        return [
            use
            for use in self.asked
            if use.tier is HOST and use.slot >= 0 and r.state(use.block, HOST) is CopyState.VALID
            if not r.writing(use.block) and not self.loading(use.block, DEVICE)
        ]

    def abandon(self, use: Use) -> None:
        """Give up on a use that is not there yet, as the runtime does when an error interrupts its wait."""
        if self.residency.state(use.block, use.tier) is CopyState.WAITING:
            error = self.residency.withdraw(use.block, use.tier)
            self.log.append(("withdraw", lambda: (use.block, use.tier), {}, error))
            assert isinstance(error, CapacityError)
            assert self.world.blocks[use.block].label in str(error)
        else:
            self.event("release", use.block, use.tier)

    def answer_until(self, enough: Callable[[], bool]) -> None:
        for _ in range(MANY):
            if enough() or not self.world.in_flight:
                return
            self.answer(0, fails=False)
        raise AssertionError("the residency asks for more and more, though nobody else does")

    @precondition(lambda self: self.world.in_flight)
    @rule(which=st.integers(0, 7), fails=st.sampled_from([False, False, False, True]))
    def answer(self, which: int, fails: bool) -> None:
        command = self.world.end(which % len(self.world.in_flight), fails)
        self.event("failed" if fails else "done", command)
        if not fails:
            return
        if isinstance(command, Write):
            assert self.residency.state(command.block, HOST) is CopyState.VALID
            assert self.residency.dirty(command.block)
        else:
            assert self.residency.state(command.block, command.target) is not CopyState.VALID
            for use in [u for u in self.asked if (u.block, u.tier, u.slot) == (command.block, command.target, -1)]:
                self.asked.remove(use)
                self.abandon(use)

    @precondition(lambda self: any(self.residency.dirty(b) for b in range(len(self.world.blocks))))
    @rule(number=st.integers(0, 5))
    def settle(self, number: int) -> None:
        self.event("settle", number % len(self.world.blocks))

    @rule(number=st.integers(0, 5))
    def write_home(self, number: int) -> None:
        """Somebody writes to the home itself: every copy is superseded."""
        block = number % len(self.world.blocks)
        if self.loading(block, DEVICE, HOST) or self.residency.dirty(block):
            return
        if any(not use.load for use in self.asked if use.block == block):
            return
        self.world.newest[block] += 1
        self.world.home[block] = self.world.newest[block]
        self.event("invalidate", block, DEVICE)
        self.answer_until(lambda: not self.loading(block, HOST))
        self.event("invalidate", block, HOST)

    @rule(tier=st.sampled_from([DEVICE, HOST]), slots=st.sampled_from([0, 1, 2, 3, 6, 6, 6]))
    def set_limit(self, tier: Tier, slots: int) -> None:
        self.limit[tier] = min(slots, self.slots[tier])
        self.event("limit", tier, slots)

    @rule(
        tier=st.sampled_from([DEVICE, HOST]),
        numbers=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), max_size=8),
        barrier=st.none() | st.integers(0, 8),
    )
    def expect(self, tier: Tier, numbers: list[list[int]], barrier: int | None) -> None:
        wanted = range(self.params) if tier is DEVICE else range(len(self.world.blocks))
        known = [b for b in wanted if self.world.blocks[b].home > tier]
        if known:
            blocks = [tuple(dict.fromkeys(known[n % len(known)] for n in use)) for use in numbers]
            self.event_with("expect", lambda: ({tier: Schedule(blocks, barrier=barrier)},))

    @rule(number=st.integers(0, 5), tier=st.sampled_from([DEVICE, HOST]))
    def prefetch(self, number: int, tier: Tier) -> None:
        block = number % self.params
        if any(not use.load for use in self.asked if use.block == block):
            return
        self.event("prefetch", [block], tier)

    @rule()
    def drain(self) -> None:
        """Once everything is answered, whoever still waits can only be told that there is no room."""
        self.answer_until(lambda: False)
        for use in [use for use in self.asked if use.slot < 0]:
            assert self.residency.state(use.block, use.tier) is CopyState.WAITING
            self.asked.remove(use)
            self.abandon(use)

    @rule(number=st.integers(0, 5), tier=st.sampled_from([DEVICE, HOST]), kind=st.integers(0, 5))
    def illegal(self, number: int, tier: Tier, kind: int) -> None:
        """What must not happen is refused with the block's history, and nothing has changed."""
        block, r = number % len(self.world.blocks), self.residency
        state, uses = r.state(block, tier), r.uses(block, tier)
        fetch, write = Fetch(block, HOST if tier is DEVICE else NVME, tier, 0), Write(block, 0)
        refused: dict[int, tuple[bool, Callable[[], Any]]] = {
            0: (uses == 0, lambda: r.release(block, tier)),
            1: (tier is DEVICE or r.writing(block), lambda: r.release(block, tier, dirty=True)),
            2: (state is not CopyState.WAITING, lambda: r.withdraw(block, tier)),
            3: (state is not CopyState.LOADING, lambda: r.done(fetch)),
            4: (not r.writing(block), lambda: (r.done if number % 2 else r.failed)(write)),
            5: (state in LOADING or (tier is HOST and r.dirty(block)), lambda: r.invalidate(block, tier)),
        }
        applies, act = refused[kind]
        if applies:
            before = self.fingerprint()
            with pytest.raises(StateError, match=re.escape(self.world.blocks[block].label) + ".*copies are "):
                act()
            assert self.fingerprint() == before

    # ---- invariants --------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        check_invariants(self.residency)
        self.a_valid_copy_is_the_newest_and_the_newest_is_never_lost()
        self.what_a_transfer_reads_stays_as_it_was()
        self.copies_in_use_stay_where_they_are()
        self.every_use_is_counted()
        self.capacity_and_limits_hold()
        self.every_command_is_answered_once()

    def a_valid_copy_is_the_newest_and_the_newest_is_never_lost(self) -> None:
        for block in range(len(self.world.blocks)):
            newest = self.world.newest[block]
            for tier in self.slots:
                if self.residency.state(block, tier) is CopyState.VALID:
                    content = self.world.read(tier, block, self.residency.slot(block, tier))
                    overwriting = any(not use.load for use in self.asked if use.block == block)
                    assert content == (block, UNDEFINED if overwriting else newest)
            if not self.residency.dirty(block):
                assert self.world.home[block] == newest
            else:
                assert self.residency.state(block, HOST) is CopyState.VALID

    def what_a_transfer_reads_stays_as_it_was(self) -> None:
        for flight in self.world.in_flight:
            assert self.world.source(flight) == flight.value

    def copies_in_use_stay_where_they_are(self) -> None:
        for use in self.asked:
            if use.slot >= 0:
                content = self.world.read(use.tier, use.block, use.slot)
                assert content is not None
                assert content[0] == use.block
                if self.residency.state(use.block, use.tier) is CopyState.VALID:
                    assert self.residency.slot(use.block, use.tier) == use.slot

    def every_use_is_counted(self) -> None:
        for block in range(len(self.world.blocks)):
            for tier in self.slots:
                asked = sum(1 for use in self.asked if (use.block, use.tier) == (block, tier))
                feeding = sum(
                    1 for f in self.world.in_flight if tier is HOST and f.command.block == block and f.source_slot >= 0
                )
                assert self.residency.uses(block, tier) == asked + feeding

    def capacity_and_limits_hold(self) -> None:
        for tier, count in self.slots.items():
            used = self.residency.taken[tier].used
            taken = sum(1 for content in self.world.memory[tier] if content is not None)
            assert used == taken <= count
            assert used <= max(self.limit[tier], self.used_before[tier]), "it took a slot beyond the limit"
            self.used_before[tier] = used
            if used > self.limit[tier] and tier in self.enforced:
                assert used - self.idle_slots(tier, writing=True) <= self.limit[tier] or not self.idle_slots(tier)

    def idle_slots(self, tier: Tier, *, writing: bool = False) -> int:
        """Slots of copies that nobody uses: those being written, or the clean ones."""
        r, total = self.residency, 0
        for block in r.resident(tier):
            at_rest = r.state(block, tier) in (CopyState.VALID, CopyState.STALE) and not r.uses(block, tier)
            being_written, dirty = tier is HOST and r.writing(block), tier is HOST and r.dirty(block)
            if at_rest and (being_written if writing else not dirty):
                total += self.span(block)
        return total

    def every_command_is_answered_once(self) -> None:
        assert self.residency.in_flight() == len(self.world.in_flight)

    def teardown(self) -> None:
        """The same events give the same commands, with every use counted by `acquire`."""
        if not hasattr(self, "residency"):
            return
        again = self.make()
        for block in self.world.blocks:
            again.add(block)
        for name, arguments, options, answer in self.log:
            result = getattr(again, name)(*arguments(), **options) or []
            assert str(result) == str(answer) if isinstance(answer, Exception) else result == answer
        assert again.counts == self.residency.counts


ResidencyMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40)
TestResidency = ResidencyMachine.TestCase
