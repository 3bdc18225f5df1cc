"""Every error hetmem raises on purpose, in one tree.

A message says what happened, expected and got in bytes and GiB, which parameter or path, and what to do.
Errors about what the user passed are also `ValueError`; errors about I/O are also `OSError`. What is printed with names
in it that a file may say, errors among it, goes through `printable`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line feed and tab, marks that turn the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """Return `text` with a visible character of the same width in place of each one that a terminal would act on, such
    as the first of an escape sequence (␛), or that it cannot encode (�)."""
    return _UNPRINTABLE.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"


class HetmemError(Exception):
    """Root of all errors of hetmem."""

    def __str__(self) -> str:
        """Return the message, safe for a terminal, as it may have names that a file says."""
        return printable(super().__str__())


class BudgetError(HetmemError, ValueError):
    """A budget is malformed, or smaller than the least that the model needs. Nothing was changed."""


class ManageError(HetmemError, ValueError):
    """A module or an optimizer cannot be managed, or used, as asked. Nothing was changed."""


class CapacityError(HetmemError, MemoryError):
    """A pool has no room and nothing in it may be evicted. No pool exceeds its capacity."""


class DeviceOutOfMemoryError(HetmemError, torch.OutOfMemoryError):
    """An operator needs more device memory than is left after all idle chunks were evicted.

    It is torch's error for a device without memory, and begins with the words that frameworks look for to try again
    with a smaller batch: `auto_find_batch_size` of transformers, `find_executable_batch_size` of accelerate, the batch
    size finder of Lightning.
    """

    more: Callable[[], str] | None = None
    """Returns a longer message, which may take seconds; None: there is none."""

    def __reduce__(self) -> Any:
        """Return what makes an equal error in another process."""
        return type(self), self.args

    def told(self) -> DeviceOutOfMemoryError:
        """Return this error as the program gets it: with its longer message, without the frames of hetmem so far."""
        if self.more is not None:
            more, self.more = self.more, None
            self.args = (more(),)
        self.__cause__, self.__suppress_context__ = None, True
        return self.with_traceback(None)


class DeviceAccessError(HetmemError, RuntimeError):
    """A compute operator met memory that is not on the device (a GPU would have failed there)."""


class StateError(HetmemError, RuntimeError):
    """An illegal transition of a block; the message describes its copies. Always a bug of hetmem."""


class PeerError(HetmemError, RuntimeError):
    """Another rank of the group will not come, or has other options, parameters or gradients than this one. The message
    says which, and where each rank is. Homes are as they were, or named; the group trains no further."""


class StoreError(HetmemError, OSError):
    """Reading or writing the NVMe store or a checkpoint failed; the message names path, offset and bytes."""


class CheckpointError(HetmemError, ValueError):
    """A checkpoint cannot be saved or loaded as asked, is damaged, or does not match. Nothing was changed, unless
    the message says so."""
