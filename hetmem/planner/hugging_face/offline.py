"""Keeps what makes a model from reaching beyond its configuration file.

Libraries look up kernels, pretrained backbones and revisions in a network in many places, and ask the user in some.
Python tells its audit hooks of both (PEP 578) before they happen, wherever they are called from.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from hetmem.planner.plan import PlanError

_REFUSED = {
    "builtins.input": "asks a question",
    "socket.connect": "connects to a network",
    "socket.getaddrinfo": "looks up a network address",
    "socket.gethostbyname": "looks up a network address",
    "socket.gethostbyaddr": "looks up a network address",
    "socket.sendto": "sends to a network",
    "socket.sendmsg": "sends to a network",
}
_here = threading.local()
_once = threading.Lock()


class Offline:
    """Refuse network and questions to the code of a `with` block, on its thread: they raise `PlanError`, and so does
    the block if one of them made it fail. A library that goes on without is let go on."""

    _hooked = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = ""
        self._before: Offline | None = None

    def __enter__(self) -> Offline:
        with _once:
            if not Offline._hooked:  # a hook stays for as long as the process
                sys.addaudithook(_hook)
                Offline._hooked = True
        self._before, _here.block = getattr(_here, "block", None), self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _here.block = self._before
        if isinstance(error, Exception) and self._asked and not isinstance(error, PlanError):
            raise self._refusal() from error

    def refuse(self, how: str) -> PlanError:
        """Note what the block does, and return the error for it."""
        self._asked = how
        return self._refusal()

    def _refusal(self) -> PlanError:
        return PlanError(
            f"{self._path}: the model {self._asked} while it is made, and a plan is made of the file alone: expected a "
            f"configuration without code, kernels or weights of others"
        )


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _REFUSED and (block := getattr(_here, "block", None)) is not None:
        raise block.refuse(_REFUSED[event])
