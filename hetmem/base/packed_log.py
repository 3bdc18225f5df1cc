"""Keeps the last entries of one kind, named tuples, in memory of a fixed size. Appending is safe from any thread.

Note "plain entries": a log takes an entry in by one call of C, as its members, and packs what has come when there is
more than a little. Entries are kept as bytes, one after the other, and become named tuples as they are read; a text, or
a tuple of numbers, is kept once, and in the entry its number. Python's garbage collector has nothing to look at.

Note "memory": the system gives pages as they are first written to. A `bytearray` that grows lies in the heap of
`malloc`, which keeps holes around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import starmap
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from struct import Struct
from threading import Lock, RLock
from typing import Any, Generic, TypeVar, get_type_hints

from hetmem.base.units import KIB, round_up

_NUMBERED_BYTES = 640 * KIB
"""The most memory of all texts, and of all tuples, that entries have numbers of."""
_BYTES_OF_A_NUMBER = 152
"""What a number takes: its object, and its places in a table that has just grown and in a list."""
_FORMATS: dict[Any, str] = {float: "d", int: "q", bool: "?"}
_FORMAT_OF_A_NUMBER = "H"

Entry = TypeVar("Entry")


class Numbers(dict[Any, int]):
    """Numbers of texts, or of other values that many entries share, in the order of their first use. All that come once
    `_NUMBERED_BYTES` are full have number 0, the number of the first of `known`."""

    def __init__(self, *known: Any) -> None:
        super().__init__((value, number) for number, value in enumerate(known))
        self.numbered = [*known]
        self._room, self._adding = _NUMBERED_BYTES, Lock()

    def __missing__(self, value: Any) -> int:
        taken = sys.getsizeof(value) + _BYTES_OF_A_NUMBER
        with self._adding:
            if value not in self and taken <= self._room:
                self._room -= taken
                self.numbered.append(value)
                self[value] = len(self.numbered) - 1
            return self.get(value, 0)


def _numbers_for(kind: Any, texts: Numbers | None) -> Numbers | None:
    """Return the numbers of members of `kind`; None for one that is kept as it is."""
    if kind in _FORMATS:
        return None
    if kind is str:
        return texts or Numbers("")
    return Numbers(*kind) if isinstance(kind, type) and issubclass(kind, Enum) else Numbers(())


class Log(Generic[Entry]):
    """The last entries of `kind`, a named tuple of numbers, texts, tuples of numbers and members of enumerations: at
    most `most`, and three quarters of them at least. `texts` numbers those of its members that are texts."""

    def __init__(self, kind: type[Entry], most: int, texts: Numbers | None = None) -> None:
        self._kind: Callable[..., Entry] = kind
        members = [*get_type_hints(kind).values()]
        layout = Struct("=" + "".join(_FORMATS.get(member, _FORMAT_OF_A_NUMBER) for member in members))
        self._packed, self._unpacked, self._width = layout.pack, layout.iter_unpack, layout.size
        numbers = [_numbers_for(member, texts) for member in members]
        self._numbered = [(at, each) for at, each in enumerate(numbers) if each is not None]
        self._members, self._most, self._lost = len(members), most, False
        self._memory = mmap(-1, most * self._width, MAP_PRIVATE | MAP_ANONYMOUS)
        self._count, self._new, self._packing = 0, list[Any](), RLock()
        self.append: Callable[[Sequence[Any]], None] = self._new.extend
        """Log one entry, given as a tuple of all its members. Refers to its list alone."""

    def pack(self) -> None:
        """Pack what has been logged since, and drop the oldest entries if there are too many."""
        if not self._new:
            return
        with self._packing:
            new = self._new[:]
            del self._new[: len(new)]  # threads append meanwhile
            for at, numbers in self._numbered:
                new[at :: self._members] = map(numbers.__getitem__, new[at :: self._members])
            self._add([*starmap(self._packed, zip(*[iter(new)] * self._members, strict=True))])

    def _add(self, packed: list[bytes]) -> None:
        if self._count + len(packed) > self._most:
            left = self._most * 3 // 4
            packed, self._lost = packed[-left:], True
            kept = left - len(packed)
            self._memory.move(0, (self._count - kept) * self._width, kept * self._width)
            self._count = kept
        end = self._count + len(packed)
        self._memory[self._count * self._width : end * self._width] = b"".join(packed)
        self._count = end

    @property
    def nbytes(self) -> int:
        """The bytes of memory that packed entries have taken, in whole pages."""
        return round_up((self._most if self._lost else self._count) * self._width, PAGESIZE)

    @property
    def lost(self) -> bool:
        """Whether the oldest entries have been dropped."""
        self.pack()
        return self._lost

    def __len__(self) -> int:
        self.pack()
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        return self.last(self._most)

    def last(self, count: int) -> Iterator[Entry]:
        """Return the last `count` entries as they are now, oldest first. One is made at a time."""
        with self._packing:
            end = len(self)
            packed = self._memory[max(0, end - count) * self._width : end * self._width]
        return map(self._made, self._unpacked(packed))

    def __getitem__(self, at: int) -> Entry:
        with self._packing:
            first = range(len(self))[at] * self._width
            return next(map(self._made, self._unpacked(self._memory[first : first + self._width])))

    def _made(self, members: tuple[Any, ...]) -> Entry:
        made = [*members]
        for at, numbers in self._numbered:
            made[at] = numbers.numbered[made[at]]
        return self._kind(*made)
