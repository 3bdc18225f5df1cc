"""Sees what a program writes to homes that ranks share: its pages are private, and writes are refused so far."""

from __future__ import annotations

from collections.abc import Iterable

from hetmem.engine.homes import Memory
from hetmem.engine.param_views import Bindings
from hetmem.memory.chunk import Chunk, ManagedParameter, address_of
from hetmem.ranks.group import not_yet


def refuse_writes(memory: Memory) -> None:
    """Raise `ManageError` if the program has written to a home since the last call; homes are as they were, and what
    was written is dropped."""
    assert memory.ranks is not None
    mapping = memory.ranks.pool.mapping
    if written := mapping.written():
        first = min([mapping.drop_written(offset) for offset in written])
        raise not_yet(f"a write of the program to {_name(memory.chunks, mapping.address, first)}")


def refuse_write(memory: Memory, bindings: Bindings, managed: ManagedParameter) -> None:
    """Raise `ManageError` for a write of the program to `managed`, which is its home again, as it was."""
    managed.version = managed.counter._version
    if bindings.is_elsewhere(managed):
        bindings.show_home(managed)
    refuse_writes(memory)
    raise not_yet(f"a write of the program to {managed.name}")


def _name(chunks: Iterable[Chunk], start: int, offset: int) -> str:
    """Return what lies at `offset`."""
    for chunk in chunks:
        for role, home in chunk.homes.items():
            first = address_of(home.memory) - start
            if first <= offset < first + chunk.home_nbytes(role):
                at = (offset - first) // chunk.dtype_of(role).itemsize
                after = (each for each in chunk.parameters if each.offset + each.numel > at)
                name = next((each.name for each in after), chunk.label(role))
                return (
                    f"{name}{'' if role.name == 'param' else '.grad' if role.name == 'grad' else f', its {role.name}'}"
                )
    return "the memory of the group"
