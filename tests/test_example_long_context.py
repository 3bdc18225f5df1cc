"""The fourth example: activations of more than six times the device, the bits of plain torch, and its exit codes."""

from __future__ import annotations

import pytest

from tests.scripts import load_script

example = load_script("examples/04_long_context.py")
SMALL = example.Sizes(layers=8, width=32, heads=2, window=64, sequence=512, device_memory="1MiB", host_memory="24MiB")


def test_it_trains_with_the_bits_of_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.saved_bytes(SMALL) > 6 << 20
    assert example.main(["--check", "--steps", "3"], SMALL) == 0
    assert "all weights equal those of plain torch" in capsys.readouterr().out


def test_without_activations_that_move_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--activations", "keep"], SMALL) == 2
    assert "out of memory.\nNo room for" in capsys.readouterr().err


def test_by_default_activations_are_six_times_the_device() -> None:
    assert example.saved_bytes(example.Sizes()) > 6 * (16 << 20)


def test_a_sequence_that_is_no_multiple_of_the_window_is_refused() -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--sequence", "100"], SMALL)
    assert stopped.value.code == 2
