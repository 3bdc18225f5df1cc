"""Ranks with a device each that is no CPU to torch: copies come late, and only from page-locked memory."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, Program, difference

pytestmark = pytest.mark.skipif("FAKED_KERNELS" not in os.environ, reason="another process runs these")

NAMES = ["copies are evicted", "codes, 8 bits, activations leave", "writes"]


def program(name: str) -> Program:
    """With one micro-batch: a process that runs the batches of all ranks keeps the last loss of others only."""
    return replace(PROGRAMS[name], device="cuda", micro=1)


def trained(rank: int, names: list[str]) -> dict[str, dict[str, Tensor]]:
    from tests.faked_driver import plugin  # whose import hides what a machine with a GPU may lack

    plugin.install_device(rank)
    return {name: {key: value.cpu() for key, value in program(name).trained(rank).items()} for name in names}


def test_weights_gradients_and_states_are_those_of_one_process_with_all_batches() -> None:
    found = ranks(2, trained, NAMES)
    torch.set_num_threads(1)
    for name in NAMES:
        for rank, expected in enumerate(program(name).alone(2)):
            on_host = {key: value.cpu() for key, value in expected.items()}
            assert difference(found[rank][name], on_host) == [], (name, rank)
