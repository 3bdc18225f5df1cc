"""Daemon threads that are over before the interpreter is: told to end, and waited for, in an `atexit` handler.

Python ends a daemon thread that comes back from native code into an interpreter which is ending. In the middle of C++
(torch's, say) that ends the process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

_running: weakref.WeakKeyDictionary[threading.Thread, tuple[Callable[[], object], float | None]]
_running = weakref.WeakKeyDictionary()
_over = False


def start_thread(
    target: Callable[..., object], args: tuple[Any, ...], name: str, stop: Callable[[], object], patience: float | None
) -> threading.Thread:
    """Start a daemon thread that runs `target(*args)` and ends soon after `stop()`, which the interpreter's end calls.

    `patience`: the seconds that this waits for the thread, None = for as long as it takes. Raises RuntimeError if no
    thread can be started, as at the interpreter's end.
    """
    if _over:
        raise RuntimeError("no thread is started at the end of the interpreter")
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    _running[thread] = stop, patience
    return thread


def process_ends() -> bool:
    """Whether the main thread is over. It takes no lock, so finalizers may ask."""
    return not threading.main_thread().is_alive()


@atexit.register
def _end_all() -> None:
    global _over
    _over = True
    running = list(_running.items())
    for _, (stop, _) in running:
        stop()
    for thread, (_, patience) in running:
        thread.join(patience)
