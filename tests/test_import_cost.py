"""What `import hetmem` takes in, as sets of modules; benchmarks/import_cost.py measures the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hetmem

REPOSITORY = Path(__file__).parents[1]

# Each costs more than all of hetmem and serves some programs only: imported where it is first needed.
LATE = {"cupy", "llvmlite", "numba", "psutil", "transformers"}

LIST_MODULES = """
import sys
for name in sys.argv[1:]:
    already = set(sys.modules)
    __import__(name)
    print(*sorted(set(sys.modules) - already))
"""


def modules_added_by(*names: str, root: Path = REPOSITORY) -> list[set[str]]:
    """What each of `names`, imported one after the other in a fresh interpreter, adds to sys.modules."""
    command = [sys.executable, "-c", LIST_MODULES, *names]
    said = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [set(line.split()) for line in said.splitlines()]


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def added() -> tuple[set[str], set[str]]:
    """What torch adds, and hetmem after it."""
    by_torch, by_hetmem = modules_added_by("torch", "hetmem")
    return by_torch, by_hetmem


def test_importing_hetmem_leaves_costly_packages_alone(added: tuple[set[str], set[str]]) -> None:
    assert packages(set.union(*added)) & LATE == set()


def test_after_torch_hetmem_adds_itself_and_standard_modules_only(added: tuple[set[str], set[str]]) -> None:
    assert packages(added[1]) - sys.stdlib_module_names == {"hetmem"}


@pytest.mark.parametrize("package", sorted(LATE))
def test_an_early_import_of_a_costly_package_would_be_seen(tmp_path: Path, package: str) -> None:
    (tmp_path / "hetmem.py").write_text(f"import {package}", encoding="utf-8")
    (tmp_path / f"{package}.py").touch()
    assert packages(*modules_added_by("hetmem", root=tmp_path)) & LATE == {package}


def test_what_saves_and_loads_is_imported_when_it_is_needed(added: tuple[set[str], set[str]]) -> None:
    assert "hetmem.api" in added[1]
    assert "hetmem.checkpoint" not in added[1]
    assert callable(hetmem.save) and callable(hetmem.load)
