"""What needs a GPU runs on a device that acts like one, in a process of its own: torch asks once, at its start, what
devices there are, and autograd starts their threads with the first backward."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.cuda.shim import GPP, ROOT
from tests.faked_driver.building import environment

pytestmark = [
    pytest.mark.skipif(GPP is None, reason="g++ is not installed"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own"),
]
ITS_OWN = tuple(f"tests/faked_driver/test_{name}.py" for name in ("training", "report", "quantised"))
MANAGED = "tests/gpu/test_managed.py::"
ALSO = ("tests/gpu/test_moves.py::test_memory_refused_in_a_backward_is_explained_and_training_goes_on",)
"""Of tests for a GPU, which take every case there; here those that another thread's backward can break."""
WITH_ALL_CASES = (
    "tests/faked_driver/test_ranks.py",
    MANAGED + "test_homes_that_move_to_the_gpu_leave_every_bit_as_it_was",
    "tests/test_overheads.py::test_on_a_gpu_they_are_measured_there",
)


def test_all_that_a_gpu_runs_is_right_on_a_device_with_a_thread_of_its_own(
    all_cases: bool, request: pytest.FixtureRequest
) -> None:
    third = request.config.getoption("--third")
    options = ["-p", "tests.faked_driver.plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "-W", "default"]
    options += ["--all-cases"] if all_cases else ["--third", third] if third else []
    also = (*ALSO, *WITH_ALL_CASES) if all_cases else ALSO
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *ITS_OWN, *also],
        env={**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    last = ended.stdout.strip().splitlines()[-1]
    assert "passed" in last and "skipped" not in last, last  # "xfailed" is said, and allowed
