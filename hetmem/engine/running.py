"""Which backwards run in this process, and which thread has called each."""

from __future__ import annotations

import itertools
import threading

from hetmem import torch_private


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch_private.current_graph_task() != -1)


class Running:
    """Backwards that run now, each by the thread that has called it; those within a node of another are left out.

    Note "backwards that raise": autograd tells nobody, and drops what it was to call at the end. A device has a thread
    of its own for the backward, which may drop that last, some time after the caller has got the error. Until then the
    next backward would look like a part of the one that has raised, and nobody would wait for its gradients. So a
    backward is over, too, once none of those that it may be is running; on a thread of autograd's that is any.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._by_thread: dict[int, int] = {}

    def begin(self) -> None:
        """This thread calls a backward."""
        self._by_thread[threading.get_ident()] = next(self._numbers)

    def end(self) -> None:
        """It has returned or raised."""
        self._by_thread.pop(threading.get_ident(), None)

    def here(self) -> frozenset[int]:
        """The backwards that the node which runs on this thread may be of."""
        own = self._by_thread.get(threading.get_ident())
        return frozenset(self.all() if own is None else (own,))

    def callers(self) -> tuple[int, ...]:
        """The threads that have called them."""
        return tuple(self._by_thread)

    def all(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(self._by_thread.values())


RUNNING = Running()
"""Of the process."""
