"""Activations for which host memory has no room: on to NVMe and back, with the bits of plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetmem
from hetmem import testing
from hetmem.errors import DeviceOutOfMemoryError, StoreError
from tests.activations.test_offload import (
    BATCHES,
    DEVICES,
    INPUTS,
    KIB,
    SAVED,
    Deep,
    budget,
    deep,
    dropped,
    peak,
    several_backwards,
    several_forwards,
    slow,
)
from tests.engine import harness
from tests.engine.harness import assert_same, assert_same_grads, train_both
from tests.faults.disk import EIO, Fault, FaultyDisk, once

STATES = 4 * sum(p.numel() * 4 for p in Deep().parameters())


def limits(directory: Path, **changes: Any) -> hetmem.Budget:
    """Host memory for the states, and some of what is saved."""
    return budget(**{"host": STATES + 450 * KIB, "nvme": "16MiB", "nvme_dir": directory, **changes})


def facts(module: Any) -> testing.MemoryFacts:
    return testing.of(module).memory()


@pytest.mark.each
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "traced"])
@pytest.mark.parametrize("how", ["offload", "auto"])
def test_what_host_memory_has_no_room_for_goes_to_nvme_with_the_bits_of_torch(
    how: str, name: str, sanitize: bool, tmp_path: Path
) -> None:
    options = {"device": DEVICES[name](), "sanitize": sanitize, "activations": how}
    plain, managed = deep(tmp_path, limits=limits(tmp_path), **options)
    train_both(plain, managed, INPUTS)
    links = testing.of(managed).link_bytes()
    assert links["nvme_write"] > SAVED
    assert 1.1 * links["nvme_write"] > links["nvme_read"] > SAVED, "few come twice, as others took their host memory"
    assert peak(managed) <= 512 * KIB
    assert facts(managed).activation_bytes == facts(managed).activation_nvme_bytes == 0


def test_homes_on_nvme_leave_host_memory_for_activations_to_cross(tmp_path: Path) -> None:
    """Weights take host memory before anything moves, and would take all of it."""
    plain, managed = deep(tmp_path, limits=limits(tmp_path, host=STATES // 2))
    train_both(plain, managed, INPUTS)
    assert facts(managed).host_free_bytes < 16 * KIB, "homes have all that they may have"


@pytest.mark.parametrize("act", [several_backwards, several_forwards, dropped], ids=lambda act: act.__name__)
def test_gradients_of_any_use_of_a_graph_equal_torch(act: Callable[[Any], None], tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, device=slow(), limits=limits(tmp_path, device="4MiB", host=STATES))
    for _ in range(2):
        act(plain)
        act(managed)
        assert_same_grads(plain, managed)
    testing.of(managed).wait_idle()
    assert facts(managed).activation_nvme_bytes == 0


def test_where_nvme_ends_too_the_error_says_what_would_help(tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, limits=limits(tmp_path, nvme=4 * SAVED))
    optimizers = harness.adamws(plain, managed)
    with pytest.raises(DeviceOutOfMemoryError) as failed:
        managed(*BATCHES[0])
    for part in (r"moment\s\d+\sof\sthe\sforward", r"raise\sBudget\(nvme=…\)\sby", "checkpointing", "micro-batch"):
        failed.match(part)
    del failed
    train_both(plain, managed, [(x[:16],) for (x,) in BATCHES], optimizers=optimizers)  # nothing is lost


class Scribbling(FaultyDisk):
    """Leaves garbage in memory that it has not read."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int, /) -> int:
        buffers[0][:] = b"\xff" * len(buffers[0])
        return super().preadv(fd, buffers, offset)


def only(verb: str, fault: Fault) -> Fault:
    return lambda which, offset, nbytes: fault(which, offset, nbytes) if which == verb else nbytes


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_disk_that_fails_once_ends_in_an_error_or_in_the_right_bits(
    verb: str, all_cases: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = deep(tmp_path, activations="keep", limits=budget(device="8MiB"))
    plain(*BATCHES[0]).backward()
    failures = 0
    for at in range(40) if all_cases else (0, 9):
        disk = Scribbling()
        disk.used_by(monkeypatch)
        _, managed = deep(tmp_path, device=slow(), limits=limits(tmp_path, device="1MiB", host=STATES - 400 * KIB))
        disk.fault = only(verb, once(at, EIO))
        loss = None
        for _ in range(3):  # of what did not cross, nothing is lost: the same graph has the right bits
            try:
                loss = managed(*BATCHES[0]) if loss is None else loss
                loss.backward(retain_graph=True)
                testing.of(managed).wait_idle()
                break
            except StoreError:
                failures += 1
                managed.zero_grad()
        assert_same_grads(plain, managed, f"{verb} {at}")
    assert failures > 0


def test_a_graph_outlives_its_model(tmp_path: Path) -> None:
    for end in (hetmem.release, lambda module: None):
        plain, managed = deep(tmp_path, limits=limits(tmp_path, device="4MiB", host=STATES - 400 * KIB))
        inputs, losses = [], []
        for module in (plain, managed):
            inputs.append(BATCHES[0][0].detach().clone().requires_grad_())
            losses.append(module(inputs[-1]))
        assert facts(managed).activation_nvme_bytes > 0
        end(managed)
        del managed, module
        for loss in losses:
            loss.backward()
        assert_same(inputs[0].grad, inputs[1].grad, "gradient of the input")


def test_a_step_like_the_last_one_allocates_nothing_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, managed = deep(tmp_path, limits=limits(tmp_path))
    optimizers = harness.adamws(plain, managed)
    train_both(plain, managed, INPUTS, harness.Recipe(steps=2), optimizers=optimizers)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("blocks are allocated"))
    written = testing.of(managed).link_bytes()["nvme_write"]
    train_both(plain, managed, INPUTS, harness.Recipe(steps=1), optimizers=optimizers)
    assert testing.of(managed).link_bytes()["nvme_write"] > written


def test_the_report_has_activations_on_each_tier_and_link(tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, limits=limits(tmp_path, host=STATES // 2), device=slow())
    train_both(plain, managed, INPUTS)
    data = hetmem.report(managed).to_dict()
    moved, peaks, step = data["activations"]["bytes"], data["activations"]["peak_bytes"], data["step"]
    assert moved["device_to_host"] == step["bytes"]["device_to_host"] - sum(p.numel() * 4 for p in plain.parameters())
    assert 0 < moved["nvme_read"] <= moved["nvme_write"] <= moved["device_to_host"] <= moved["host_to_device"]
    for tier in ("device", "host", "nvme"):
        seen = data["timeline"]["memory"][tier]["bytes"]["activations"]
        assert max(seen) == peaks[tier] > 0 == seen[-1]
        assert data["tiers"][tier]["peak_bytes"] <= data["tiers"][tier]["capacity_bytes"]
    assert data["activations"]["away_peak_bytes"] <= moved["device_to_host"]
    assert "Without moving them a step needs" in str(hetmem.report(managed))
    _, kept = deep(tmp_path, limits=budget(device="8MiB"), activations="keep")
    kept(*BATCHES[0])
    assert hetmem.report(kept).to_dict()["activations"] is None
