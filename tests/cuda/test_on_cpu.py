"""The kernels do what torch does, bit for bit: their sources compiled by g++ through a shim, and run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.kernel_checks import CHECKS
from tests.cuda.shim import GPP, ShimBackend, build_all, cuda_sources
from tests.cuda.vectors import Place

pytestmark = pytest.mark.skipif(GPP is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    return build_all(cuda_sources())


@pytest.mark.parametrize("downwards", [False, True], ids=["threads upwards", "threads downwards"])
@pytest.mark.parametrize("check", CHECKS)
def test_equals_torch(libraries: dict[str, Path], check: str, downwards: bool) -> None:
    CHECKS[check](Place(ShimBackend(libraries, downwards)))
