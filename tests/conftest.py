"""What every test relies on: a fixed seed, a fixed number of threads, the same examples in every run."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

# Idle OpenMP threads spin by default; on two cores that takes the time of threads that work. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from tests import pairs
from tests.cuda.verified import is_verified
from tests.forked import Forks
from tests.pairs import THINNED, few_of

try:
    from hypothesis import settings
except ImportError:  # the tests on a GPU need none
    settings = None  # type: ignore[assignment, misc]


_FRESH_PROGRAMS = 200


@pytest.fixture(autouse=True)
def _same_numbers_in_every_run(all_cases: bool) -> None:
    """Sums are split by thread, so their bits depend on the number of threads as well as on the seed. Two threads cost
    operators as small as here a tenth more than one, most of it for waking each other."""
    import torch  # not by the process that only hands tests out

    torch.set_num_threads(2 if all_cases else 1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _seeds_of_the_cpu_alone() -> None:
    """Without a GPU: each seed that torch keeps for when there is one comes with the text of a whole stack, three times
    over. A test that seeds eight times spent a tenth of its time on them."""
    import torch

    if not torch.cuda.is_available():
        torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


@pytest.fixture(autouse=True, scope="session")
def _plans_are_made_anew() -> Iterator[None]:
    """Where a test plans a configuration, nothing is taken from what was planned before."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hetmem.base.config.plan_cache_directory", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _threads_of_its_own() -> None:
    """A test that counts hetmem's threads counts those that have begun in it."""
    if (harness := sys.modules.get("tests.engine.harness")) is not None:
        harness.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """While all is imported there is little to free, and a fifth of the time went to looking for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported stays: the many collections that tests ask for need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_raise() -> None:
    """Also where they are ignored, as in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--late-copies`: run the tests of the runtime on a device whose copies are as late as they may be. `--offload`:
    run them with activations that move, however small. `--unwatched`: run them without `sanitize`, as users do.
    `--programs`: the seeds of the random programs. `--third`: of each test of three cases or more every third one, from
    the first, the second or the third on, and of two cases one; "commit": as the commit decides, so that the next ones
    run the others.
    `--all-cases`: the whole product of parameters, also of tests marked `pairs`, all that is marked otherwise, and
    every place where others are struck at some."""
    parser.addoption("--late-copies", action="store_true", help="copies of the simulated device are late")
    parser.addoption("--unwatched", action="store_true", help="the tests' models measure their first steps alone")
    parser.addoption("--offload", action="store_true", help="activations of the tests' models leave the device")
    parser.addoption("--all-cases", action="store_true", help="leave out nothing and thin out nothing")
    parser.addoption("--third", choices=("0", "1", "2", "commit"), help="every third case of tests with three or more")
    parser.addoption("--programs", default="0:8", help="first:last seed of the random programs, or `fresh`: new ones")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose fresh programs and a third of the cases, once for all processes: they get the environment of the first."""
    pairs.ALL_CASES = config.option.all_cases
    if settings is not None:
        # Timing is never a verdict here (deadline), and a red run must be red again (derandomize).
        # To look for new counterexamples: make test ARGS="--hypothesis-profile=explore".
        settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=pairs.examples(100))
        settings.register_profile("explore", deadline=None, max_examples=2000)
        settings.load_profile("repeatable")
    if config.option.third == "commit":
        config.option.third = os.environ.setdefault("TESTED_THIRD", _third_of_the_commit())
    if config.option.programs == "fresh":
        first = secrets.randbelow(10**9)
        config.option.programs = os.environ.setdefault("TESTED_PROGRAMS", f"{first}:{first + _FRESH_PROGRAMS}")


def _third_of_the_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:  # no git, as in an unpacked archive
        commit = ""
    return str(int(commit[:8] or "0", 16) % 3)


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to run the same programs and cases again."""
    third = f", every third case: --third {config.option.third}" if config.option.third else ""
    return f"random programs: --programs {config.option.programs}{third}"


@pytest.fixture(scope="session")
def all_cases(request: pytest.FixtureRequest) -> bool:
    """Whether a test that samples shall take all there is."""
    return bool(request.config.getoption("--all-cases"))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Clean processes that have torch already."""
    with Forks.begun() as made:
        yield made


@pytest.fixture(autouse=True, scope="session")
def _offload(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--offload"):
        from hetmem.testing import move_all_activations
        from tests.engine import harness

        harness.ACTIVATIONS = "offload"
        move_all_activations()


@pytest.fixture(autouse=True, scope="session")
def _unwatched(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--unwatched"):
        from tests.engine import harness

        harness.SANITIZE = False


@pytest.fixture(autouse=True, scope="session")
def _late_copies(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--late-copies"):
        from tests.engine import harness
        from tests.engine.lazy_device import LazyDevice

        harness.DEVICE = LazyDevice


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop cases marked `nightly`, or `kernels_changed` where the kernels are those that they have seen, and those of
    each test marked `pairs`, `each` or `in_turn` that it can do without; none of a test that is asked for by name."""
    if config.getoption("--all-cases"):
        return
    tests: dict[str, list[pytest.Function]] = {}
    left_out = ("nightly", "kernels_changed") if is_verified() else ("nightly",)
    named = _named(config)
    asked = {item for item in items if any((item.path, name) in named for name in _names(item))}
    dropped: set[pytest.Item] = {item for item in items if any(map(item.get_closest_marker, left_out))} - asked
    for item in items:
        if isinstance(item, pytest.Function) and item not in dropped and any(map(item.get_closest_marker, THINNED)):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = few_of(cases)
        dropped.update(case for index, case in enumerate(cases) if index not in kept and case not in asked)
    if config.option.third:
        dropped |= _other_thirds([item for item in items if item not in dropped], int(config.option.third)) - asked
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def _other_thirds(items: Sequence[pytest.Item], third: int) -> set[pytest.Item]:
    """All but every third case of each test that has three or more among `items`, and one of each that has two."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    every = {name: min(len(cases), 3) for name, cases in tests.items()}
    return {case for name, cases in tests.items() for at, case in enumerate(cases) if (at - third) % every[name]}


def _named(config: pytest.Config) -> set[tuple[Path, str]]:
    """The files and names of the tests that arguments name: `tests/test_package.py::test_wheel[case]`."""
    parts = (argument.partition("::") for argument in config.args)
    return {((config.invocation_params.dir / file).resolve(), name) for file, _, name in parts if name}


def _names(item: pytest.Item) -> tuple[str, str]:
    """What may name `item` behind its file: itself, or the test whose case it is."""
    name = item.nodeid.partition("::")[2]
    return name, name.partition("[")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Say why nothing ran."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line(
            "--all-cases also runs what `make test` leaves out; so does the full name of a test."
        )
