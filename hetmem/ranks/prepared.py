"""Imported by the process that ranks of `hetmem.testing.ranks` are forks of, so that these need not import what torch
imports late, nor compile the host optimizer."""

import gc

import torch._dynamo
import torch.distributed.tensor  # noqa: F401

from hetmem.cpu import kernel_name

kernel_name()
gc.freeze()  # a collection in a rank would look through all of it, and copy its pages
