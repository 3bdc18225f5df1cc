"""The home of a chunk of quantised weights: bytes, which are decoded into a slot of the device.

A type of its own, so that no reader of a home takes codes for values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetmem.cpu.workers import Task
from hetmem.quantised.decode import decode_tasks
from hetmem.quantised.encode import encode, in_turn
from hetmem.schedule.formats import Coding

Run = Callable[[Sequence[Task]], None]
"""Runs tasks, in any order and on any threads."""


@contextmanager
def in_host_memory(codes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `codes` to be written to, or where they are on a GPU host memory that is copied there behind the block."""
    there = codes if codes.is_cpu else torch.empty_like(codes, device="cpu")
    yield there
    if there is not codes:
        codes.copy_(there)


@dataclass(frozen=True, slots=True)
class CodedPart:
    """One quantised weight of a chunk: its bytes begin at `start` of the home, its elements at `offset` of a copy."""

    coding: Coding
    start: int
    offset: int

    def bytes_in(self, home: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the weight in `home`, the bytes of its chunk."""
        return home[self.start : self.start + self.coding.nbytes]

    def decode(self, home: torch.Tensor, target: torch.Tensor, run: Run = in_turn) -> None:
        """Decode the weight from `home` to the flat `target`, in host memory."""
        run(decode_tasks(self.coding, self.bytes_in(home).cpu(), target))

    def encode(self, values: torch.Tensor, home: torch.Tensor, run: Run = in_turn) -> None:
        """Encode the flat `values`, in host memory, to `home`. Raises `NotFiniteError`."""
        with in_host_memory(self.bytes_in(home)) as codes:
            encode(self.coding, values, codes, run)


@dataclass(frozen=True, slots=True)
class CodedTable:
    """A quantised weight each row of which can be read alone (see `Coding.row_bytes`), and its bytes `codes`."""

    coding: Coding
    codes: torch.Tensor

    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales as words of 4 bytes, which only copies read: (rows, width)."""
        spans = self.coding.codes_span, self.coding.scales_span
        codes, scales = (self.codes[start : start + nbytes].view(torch.float32) for start, nbytes in spans)
        rows = self.coding.matrices * self.coding.rows
        return codes.view(rows, -1), scales.view(rows, -1)


@dataclass(frozen=True, slots=True)
class CodedHome:
    """The bytes `codes` of a chunk, in host memory or on the device, and its weights there."""

    codes: torch.Tensor
    parts: tuple[CodedPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that a copy to the device reads."""
        return self.codes.nbytes

    def decode_into(self, slot: torch.Tensor) -> None:
        """Decode all weights to the flat `slot`, in host memory, on this thread."""
        for part, target in self.targets(slot):
            part.decode(self.codes, target)

    def targets(self, slot: torch.Tensor) -> Iterator[tuple[CodedPart, torch.Tensor]]:
        """Yield each weight and its elements in the flat `slot`."""
        for part in self.parts:
            yield part, slot[part.offset : part.offset + part.coding.numel]
