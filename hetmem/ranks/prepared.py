"""Imported by the process that the ranks of `hetmem.testing.ranks` are forks of, so that these find the host optimizer
compiled."""

from hetmem.cpu import kernel_name

kernel_name()
