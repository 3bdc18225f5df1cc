"""Ranks with a device each that is no CPU to torch: copies come late, and only from page-locked memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetmem.testing import ranks
from tests.ranks.programs import PROGRAMS, Program, difference
from tests.ranks.test_drive import trained as trained_on_a_drive

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


ON_A_DRIVE = [{"device": "cuda", "overlap": "backward", "mixed_precision": torch.bfloat16}]


def on_a_drive(rank: int, folder: str) -> list[list[Tensor]]:
    from tests.faked_driver import plugin

    plugin.install_device(rank)
    return trained_on_a_drive(rank, 2, folder, ON_A_DRIVE)


def test_states_on_nvme_are_those_of_one_process(tmp_path: Path) -> None:
    found = ranks(2, on_a_drive, str(tmp_path))
    torch.set_num_threads(1)
    alone = trained_on_a_drive(-1, 2, str(tmp_path), [{**run, "overlap": "off"} for run in ON_A_DRIVE])
    for expected, *of_ranks in zip(alone, *found, strict=True):
        for values in of_ranks:
            assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(values, expected, strict=True))
