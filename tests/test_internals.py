"""Test files that import what no user is told of are few, so that a move within hetmem touches few of them.

Tests use `hetmem`, its errors, what docs/api.md names, and `hetmem.testing`. A folder that tests a unit of its own
takes the rest from its `tested.py`, which no other folder imports; what remains is counted here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PUBLIC = {"hetmem", "hetmem.errors", "hetmem.optim", "hetmem.integrations", "hetmem.cli", "hetmem.testing"}
DOCUMENTED = set(re.findall(r"^### (hetmem[\w.]+)", (REPOSITORY / "docs" / "api.md").read_text("utf-8"), re.MULTILINE))
MOST = 55
"""Less is better: lower it with each file that needs no more of hetmem than its users."""


@cache
def imported_by(file: Path) -> list[tuple[str, str]]:
    return list(imported(file.read_text("utf-8")))


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import; the name is empty where a module is imported as a whole."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def statements(of: ast.AST) -> Iterator[ast.AST]:
    """Those within `of`; expressions, which are most of a source, have none."""
    for node in ast.iter_child_nodes(of):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


def is_module(name: str) -> bool:
    path = REPOSITORY.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def is_internal(module: str, name: str) -> bool:
    """Whether no user is told of what is imported."""
    if module.partition(".")[0] != "hetmem":
        return False
    whole = f"{module}.{name}" if name else module
    return whole not in PUBLIC | DOCUMENTED and (module not in PUBLIC or is_module(whole))


def test_few_test_files_import_internals() -> None:
    files = sorted((REPOSITORY / "tests").rglob("*.py"))
    found = [
        str(file.relative_to(REPOSITORY)) for file in files if any(is_internal(*names) for names in imported_by(file))
    ]
    assert len(files) > 200
    assert len(found) <= MOST, found


def test_what_a_folder_tests_is_taken_from_there_by_no_other_folder() -> None:
    strangers = [
        (str(file), module)
        for file in sorted((REPOSITORY / "tests").rglob("*.py"))
        for module, name in imported_by(file)
        if "tested" in (module.rpartition(".")[2], name)
        and REPOSITORY.joinpath(*module.removesuffix(".tested").split(".")) != file.parent
    ]
    assert strangers == []


@pytest.mark.parametrize(
    ("source", "internal"),
    [
        ("import hetmem", False),
        ("from hetmem import Budget, report, testing", False),
        ("from hetmem.errors import BudgetError", False),
        ("from hetmem.planner import load_profile", False),
        ("from hetmem.planner.plan import Plan", False),
        ("import torch.nn", False),
        ("from hetmem import engine", True),
        ("from hetmem.planner import TracedCall", True),
        ("import hetmem.engine.runtime", True),
        ("def late():\n    from hetmem.schedule.trace import Tier", True),
    ],
)
def test_what_counts_as_internal(source: str, internal: bool) -> None:
    assert any(is_internal(*names) for names in imported(source)) is internal
