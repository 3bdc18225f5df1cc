"""A write that torch itself shows, of one element or of none, is in the next forward, also without a step between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.harness import manage

SIZE = 96
"""A weight of more elements than are sampled."""


def through_a_pointer(weight: nn.Parameter, address: int) -> None:
    """As the documentation asks for: nothing but the version tells of it."""
    ctypes.c_float.from_address(address + 4 * (50 * SIZE + 51)).value = 3.0
    torch.autograd.graph.increment_version(weight)


def turned(weight: nn.Parameter, address: int) -> None:
    """The same memory with other strides."""
    weight.data = weight.data.t()


@pytest.mark.parametrize("write", [through_a_pointer, turned])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_write_that_torch_shows_is_in_the_next_forward(
    write: Callable[[nn.Parameter, int], None], placement: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(SIZE, SIZE), torch.eye(SIZE)  # exact sums: strides may choose another kernel
    managed = manage(nn.Linear(SIZE, SIZE), placement, tmp_path)
    managed.load_state_dict(plain.state_dict())
    weights = [(module.weight, module.weight.data_ptr()) for module in (plain, managed)]
    for writes in (False, False, True, False):
        for weight, address in weights if writes else ():
            write(weight, address)
        with torch.no_grad():
            assert torch.equal(managed(x), plain(x))
