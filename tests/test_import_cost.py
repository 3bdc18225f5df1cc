"""What `import hetmem` takes in, as sets of modules; benchmarks/import_cost.py measures the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# Each costs more than all of hetmem and serves some programs only: imported where it is first needed.
LATE = {"cupy", "llvmlite", "numba", "psutil", "rich", "transformers"}

LIST_MODULES = """
import sys
{before}
already = set(sys.modules)
import hetmem
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - already}}))
"""


def packages_added_by_hetmem(before: str = "", root: Path = REPOSITORY) -> set[str]:
    """Top-level names in a fresh interpreter's sys.modules after `import hetmem`, less those there after `before`."""
    script = LIST_MODULES.format(before=before)
    command = [sys.executable, "-c", script]
    return set(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split())


def test_importing_hetmem_leaves_costly_packages_alone() -> None:
    assert packages_added_by_hetmem() & LATE == set()


def test_after_torch_hetmem_adds_itself_and_standard_modules_only() -> None:
    added = packages_added_by_hetmem(before="import torch")
    assert added - sys.stdlib_module_names == {"hetmem"}


@pytest.mark.parametrize("package", sorted(LATE))
def test_an_early_import_of_a_costly_package_would_be_seen(tmp_path: Path, package: str) -> None:
    (tmp_path / "hetmem.py").write_text(f"import {package}", encoding="utf-8")
    (tmp_path / f"{package}.py").touch()
    assert packages_added_by_hetmem(root=tmp_path) & LATE == {package}


def test_what_saves_and_loads_is_imported_when_it_is_needed() -> None:
    code = "import sys, hetmem; assert 'hetmem.checkpoint' not in sys.modules; hetmem.save, hetmem.load"
    subprocess.run([sys.executable, "-c", code], check=True)
