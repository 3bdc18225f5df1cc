"""Compares 16-bit copies at home with their parameters, on the workers of an optimizer."""

from __future__ import annotations

from collections.abc import Callable

from hetmem.cpu import compare_tasks
from hetmem.cpu.workers import WorkerPool
from hetmem.memory.chunk import Chunk, Role


class WorkersCompare:
    """See `hetmem.engine.sampling.CopyComparer`."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    def compare(self, chunk: Chunk) -> Callable[[], bool]:
        """See there."""
        tasks, found = compare_tasks(chunk.flat(Role.PARAM), chunk.flat(Role.COMPUTE))
        batch = self._workers.begin(tasks)

        def same() -> bool:
            batch.join()
            return not found.any()

        return same
