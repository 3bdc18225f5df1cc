"""Warns of the line of the user's program, however many frames of hetmem and torch lie between."""

from __future__ import annotations

import sys
import warnings

_BETWEEN = ("hetmem.", "torch.", "contextlib.", "functools.")
"""Begins of the names of modules that are not the user's; decorators of torch come through contextlib."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with `message` at the innermost frame that is neither of hetmem nor of torch, or at the outermost one."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)
