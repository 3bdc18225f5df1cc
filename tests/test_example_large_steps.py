"""The fifth example: both ways to take a large step have the bits of plain torch, and one sends each weight twice."""

from __future__ import annotations

import re

import pytest

from tests.scripts import load_script

example = load_script("examples/05_large_steps.py")
SMALL = example.Sizes(layers=4, width=64, tokens=16, micro_batches=8, device_memory="1MiB", link="1GB")


def test_both_ways_have_the_bits_of_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--check", "--steps", "1"], SMALL) == 0
    said = capsys.readouterr().out
    assert "3 losses and all weights equal those of the loop and plain torch" in said
    loop, accumulate = (float(number) for number in re.findall(r"moves ([0-9.]+) MiB to the device", said))
    weights = sum(parameter.nbytes for parameter in example.Model(SMALL).parameters()) / (1 << 20)
    assert accumulate <= 2 * weights < loop, "a weight is fetched twice, whatever else the device has to hold"


def test_a_budget_that_cannot_do_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device-memory", "160KiB"], SMALL) == 2
    assert "device" in capsys.readouterr().err


def test_by_default_weights_are_four_times_the_device() -> None:
    sizes = example.Sizes()
    weights = sum(parameter.nbytes for parameter in example.Model(sizes).parameters())
    assert weights > 3.95 * 3.5 * (1 << 20)
    assert sizes.device_memory == "3.5MiB"
