"""Quantised weights of a managed model, as files have them: the bytes of codes and scales, a tensor of uint8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hetmem.cpu.workers import WorkerPool
from hetmem.errors import CheckpointError
from hetmem.intercept import registry
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import ManagedParameter, Role
from hetmem.memory.coded import CodedHome, in_host_memory
from hetmem.memory.interrupts import HELD_BACK
from hetmem.quantised.encode import NotFiniteError, encode
from hetmem.schedule.formats import Coding


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A quantised weight, and `codes`, its bytes at home."""

    managed: ManagedParameter
    coding: Coding
    codes: torch.Tensor
    by: Interception

    def described(self) -> dict[str, Any]:
        """Return the format and the shape, for a file."""
        return {"format": self.coding.format, "shape": list(self.managed.shape)}

    def encode(self, values: torch.Tensor) -> None:
        """Encode `values`, of its shape, to its home. Raises `CheckpointError` for an infinity or NaN."""
        workers = WorkerPool()
        try:
            with in_host_memory(self.codes) as codes:
                encode(self.coding, values.reshape(-1), codes, workers.run)
        except NotFiniteError:
            raise CheckpointError(
                f"{self.managed.name} has an infinity or NaN in the file, for which {self.coding.format} has no code"
            ) from None
        finally:
            workers.close()

    @HELD_BACK
    def written(self) -> None:
        """Drop the copies of the weight, whose home was written to."""
        with self.by.runtime.unwatched():
            self.by.runtime.writes.by_loading(self.managed)


def coded_weight(parameter: Any) -> CodedWeight | None:
    """Return the `CodedWeight` of `parameter`, or None if it is not quantised."""
    found = registry.of_parameter(parameter) if isinstance(parameter, torch.nn.Parameter) else None
    if found is None or found[1].code is None:
        return None
    home = found[1].chunk.source(Role.PARAM)
    assert isinstance(home, CodedHome), found[1].name
    return CodedWeight(found[1], found[1].code.coding, found[1].code.bytes_in(home.codes), found[0])


@contextmanager
def written(weights: Iterable[CodedWeight]) -> Iterator[None]:
    """Drop the copies of `weights` behind the block, which writes to their homes."""
    try:
        yield
    finally:
        for weight in weights:
            weight.written()


def differences(name: str, own: CodedWeight | None, saved: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield why a weight that a checkpoint describes as `saved` (None: it is not quantised there) is not that of the
    model."""
    mine = None if own is None else own.described()
    if mine != saved:
        yield (
            f"{name} is {_shown(saved)} in the checkpoint and {_shown(mine)} in the model"
            + ("" if saved else ": hetmem.load_weights encodes it as it reads it")
            + ("" if mine else f": manage it with frozen={saved['format'] if saved else ''!r}")
        )


def _shown(described: Mapping[str, Any] | None) -> str:
    return f"codes of {described['format']} of shape {described['shape']}" if described else "not quantised"
