"""The checks see faults: each of these, put into a kernel's text, makes the check beside it fail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cuda.isolated import PASSED, run
from tests.cuda.kernel_checks import CHECKS
from tests.cuda.mutants import BAD_ACCESSES, WRONG_RESULTS, Mutant
from tests.cuda.shim import GPP, SANITIZERS, build_all, cuda_sources

pytestmark = [pytest.mark.kernels_changed, pytest.mark.skipif(GPP is None, reason="g++ is not installed")]

Outcome = dict[str, str]


def broken(mutants: dict[str, Mutant], flags: tuple[str, ...]) -> dict[str, dict[str, Path]]:
    """For each mutant its library, by source."""
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda mutant: mutant.build(flags), mutants.values()))
    return {name: {mutants[name].source: path} for name, path in zip(mutants, paths, strict=True)}


@pytest.fixture(scope="module")
def wrong_results() -> Outcome:
    libraries = broken(WRONG_RESULTS, ("-O0",))
    return run({name: (libraries[name], mutant.check) for name, mutant in WRONG_RESULTS.items()}, sanitised=False)


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_a_wrong_result_is_seen(wrong_results: Outcome, name: str) -> None:
    assert "AssertionError" in wrong_results[name], wrong_results[name]


@pytest.fixture(scope="module")
def sanitised() -> Outcome:
    flags = ("-O0", *SANITIZERS)
    sound, wrong = build_all(cuda_sources(), flags), broken(BAD_ACCESSES, flags)
    names = {check: (sound, check) for check in CHECKS}
    names |= {name: (wrong[name], mutant.check) for name, mutant in BAD_ACCESSES.items()}
    return run(names, sanitised=True)


@pytest.mark.parametrize("check", CHECKS)
def test_sound_kernels_pass_the_sanitisers(sanitised: Outcome, check: str) -> None:
    assert sanitised[check] == PASSED


@pytest.mark.parametrize("name", BAD_ACCESSES)
def test_a_bad_access_is_seen_by_the_sanitisers(sanitised: Outcome, name: str) -> None:
    assert "AddressSanitizer" in sanitised[name] or "runtime error" in sanitised[name], sanitised[name]
