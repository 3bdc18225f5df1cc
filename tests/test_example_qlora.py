"""The sixth example: adapters over a base in codes have the bits of plain torch over the decoded base."""

from __future__ import annotations

import re

import pytest

from tests.scripts import load_script

pytest.importorskip("peft")

example = load_script("examples/06_qlora.py")
SMALL = example.Sizes(layers=3, width=128, tokens=8, device_memory="2MiB")
pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # of what PEFT still calls in transformers


def test_adapters_have_the_bits_of_plain_torch_and_the_base_takes_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--check", "--steps", "2", "--frozen", "nf4-nested"], SMALL) == 0
    said = capsys.readouterr().out
    assert said.count("2 losses and all weights equal those of plain torch over the decoded base") == 2
    sizes = re.findall(r"([0-9.]+) ([KM])iB to the device", said)
    whole, coded = (float(number) * {"K": 1, "M": 1024}[unit] for number, unit in sizes)
    assert coded < whole


def test_a_format_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--frozen", "nf3", "--steps", "1"], SMALL) == 2
    assert "frozen must be one of" in capsys.readouterr().err
