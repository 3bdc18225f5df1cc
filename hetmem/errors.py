"""Every error hetmem raises on purpose, in one tree.

A message says what happened, expected and got in bytes and GiB, which parameter or path, and what to do.
Errors about what the user passed are also `ValueError`; errors about I/O are also `OSError`.
"""

from __future__ import annotations


class HetmemError(Exception):
    """Root of all errors of hetmem."""


class BudgetError(HetmemError, ValueError):
    """A budget is malformed, or smaller than the least that the model needs. Nothing was changed."""


class ManageError(HetmemError, ValueError):
    """A module or an optimizer cannot be managed, or used, as asked. Nothing was changed."""


class CapacityError(HetmemError, MemoryError):
    """A pool has no room and nothing in it may be evicted. No pool exceeds its capacity."""


class DeviceOutOfMemoryError(HetmemError, RuntimeError):
    """An operator needs more device memory than is left after all idle chunks were evicted."""


class DeviceAccessError(HetmemError, RuntimeError):
    """A compute operator met memory that is not on the device (a GPU would have failed there)."""


class StateError(HetmemError, RuntimeError):
    """An illegal transition of a block; the message describes its copies. Always a bug of hetmem."""


class StoreError(HetmemError, OSError):
    """Reading or writing the NVMe store or a checkpoint failed; the message names path, offset and bytes."""


class CheckpointError(HetmemError, ValueError):
    """A checkpoint cannot be saved or loaded as asked, is damaged, or does not match. Nothing was changed, unless
    the message says so."""
