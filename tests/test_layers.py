"""The layers of hetmem: imports point downward, `plan` only decides, one module reads the environment.

Read from the sources, so an import inside a function or under TYPE_CHECKING counts like any other. Each rule is
proven on a small made-up tree that breaks it; what importing costs at run time is in test_import_cost.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

LAYERS = {
    **dict.fromkeys(("errors", "units", "config", "whole_files"), 0),
    **dict.fromkeys(("plan",), 1),  # decides
    **dict.fromkeys(("cuda",), 2),  # kernels
    **dict.fromkeys(("memory",), 3),  # holds and moves, by kernels too
    **dict.fromkeys(("runtime",), 4),  # runs
    **dict.fromkeys(("optim", "checkpoint", "report", "distributed"), 5),  # trains, saves, tells
    **dict.fromkeys(
        ("planning", "overheads", "probe", "measuring", "bench", "bench_device", "doctor"), 6
    ),  # plans, measures
    **dict.fromkeys(("api", "cli", "__main__", "__init__"), 6),  # what users call
    **dict.fromkeys(("testing",), 6),  # what hetmem's own tests ask
}
OPEN_LAYERS = {0, 6}  # plain modules that may know each other; the parts of any other layer may not
TORCH_FREE_LAYERS = {0, 1}

# Neither the machine, nor the clock, nor chance: the same events give the same commands.
MODULES_FOR_DECIDING = frozenset(
    "__future__ abc bisect collections contextlib copy dataclasses enum fractions functools hashlib hetmem heapq "
    "itertools json math numbers numpy operator re statistics string textwrap types typing".split()
)
BUILTINS_WITH_IO = {"__import__", "breakpoint", "input", "open", "print"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
OUTSIDE = {"tests", "benchmarks", "examples"}


@dataclass(frozen=True)
class Module:
    name: str  # "hetmem.plan.trace"; a package bears its own name
    package: str  # what its relative imports start from
    tree: ast.Module

    @property
    def part(self) -> str:
        return part_of(self.name)


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # the module that is run
    name: str | None  # what is taken out of it; None for the module itself
    bound_as: str  # how the importer spells it afterwards


def part_of(name: str) -> str:
    """The entry of LAYERS that a module of hetmem belongs to."""
    return name.split(".")[1] if "." in name else "__init__"


def read_modules(root: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((root / "hetmem").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = name if is_package else name.rpartition(".")[0]
        modules[name] = Module(name, package, ast.parse(path.read_text(encoding="utf-8")))
    return modules


def imports_of(module: Module, modules: Mapping[str, Module]) -> Iterator[Import]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None, alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, module)
            for alias in node.names:
                bound_as = alias.asname or alias.name
                if f"{base}.{alias.name}" in modules:
                    yield Import(node.lineno, f"{base}.{alias.name}", None, bound_as)
                else:
                    yield Import(node.lineno, base, alias.name, bound_as)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "import_module"}:
            match node.args:
                case [ast.Constant(value=str(target)), *_]:
                    yield Import(node.lineno, target, None, "")


def absolute_base(node: ast.ImportFrom, module: Module) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "hetmem"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def has_no_layer(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    if module.part not in LAYERS:
        yield f"{module.name} belongs to no layer: give {module.part!r} one in LAYERS"


def points_upward(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    for taken in imports_of(module, modules):
        target = part_of(taken.target)
        if not is_ours(taken.target) or target == module.part or {module.part, target} - LAYERS.keys():
            continue
        above, below = LAYERS[module.part], LAYERS[target]
        if above < below or (above == below and above not in OPEN_LAYERS):
            yield f"{module.name}:{taken.line} (layer {above}) imports {taken.target} (layer {below})"


def does_more_than_decide(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    layer = LAYERS.get(module.part)
    for taken in imports_of(module, modules):
        top = taken.target.split(".")[0]
        if (layer in TORCH_FREE_LAYERS and top == "torch") or (layer == 1 and top not in MODULES_FOR_DECIDING):
            yield f"{module.name}:{taken.line} (layer {layer}) must not import {top}"
    if layer == 1:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in BUILTINS_WITH_IO:
                yield f"{module.name}:{node.lineno} (layer 1) must not call {ast.unparse(node.func)}()"


def reads_the_environment(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    if module.part == "config":
        return
    taken = [(found.line, found.name) for found in imports_of(module, modules) if found.target == "os"]
    used = [(node.lineno, node.attr) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    for line, name in sorted((line, name) for line, name in taken + used if name in ENVIRONMENT):
        yield f"{module.name}:{line} reads os.{name}: only hetmem.config may"


def imports_what_is_not_shipped(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    for taken in imports_of(module, modules):
        if taken.target.split(".")[0] in OUTSIDE:
            yield f"{module.name}:{taken.line} imports {taken.target}, which is not installed with hetmem"


def takes_a_private_name(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """A private module serves the package it lies in; a private name serves its own module."""
    aliases = {}
    for taken in imports_of(module, modules):
        if not is_ours(taken.target):
            continue
        if taken.name is None:
            aliases[taken.bound_as] = taken.target
        elif is_private(taken.name):
            yield f"{module.name}:{taken.line} takes {taken.name} out of {taken.target}"
        parts = taken.target.split(".")
        owners = [".".join(parts[:depth]) for depth, part in enumerate(parts) if is_private(part)]
        if any(not f"{module.name}.".startswith(f"{owner}.") for owner in owners):
            yield f"{module.name}:{taken.line} imports the private module {taken.target}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            target = aliases.get(ast.unparse(node.value))
            if target and f"{target}.{node.attr}" not in modules:
                yield f"{module.name}:{node.lineno} takes {node.attr} out of {target}"


RULES = (
    has_no_layer,
    points_upward,
    does_more_than_decide,
    reads_the_environment,
    imports_what_is_not_shipped,
    takes_a_private_name,
)


def violations(root: Path) -> list[str]:
    modules = read_modules(root)
    return [found for module in modules.values() for rule in RULES for found in rule(module, modules)]


def test_hetmem_keeps_its_layers() -> None:
    assert read_modules(REPOSITORY).keys() >= {"hetmem", "hetmem.config", "hetmem.plan", "hetmem.runtime"}
    assert violations(REPOSITORY) == []


def plant(root: Path, sources: Mapping[str, str]) -> Path:
    for path, source in {"__init__.py": "", "plan/__init__.py": "", "plan/trace.py": "", **sources}.items():
        file = root / "hetmem" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return root


FLAGGED = {
    "a module without a layer": (
        {"utils.py": ""},
        "hetmem.utils belongs to no layer: give 'utils' one in LAYERS",
    ),
    "an import of a higher layer": (
        {"plan/layout.py": "from hetmem.memory.pools import Pool"},
        "hetmem.plan.layout:1 (layer 1) imports hetmem.memory.pools (layer 3)",
    ),
    "an import of the public names": (
        {"runtime/hooks.py": "import hetmem"},
        "hetmem.runtime.hooks:1 (layer 4) imports hetmem (layer 6)",
    ),
    "an import of a sibling of the same layer": (
        {"optim/adamw.py": "from hetmem import checkpoint", "checkpoint.py": ""},
        "hetmem.optim.adamw:1 (layer 5) imports hetmem.checkpoint (layer 5)",
    ),
    "a relative import": (
        {"plan/layout.py": "from ..runtime import hooks", "runtime/__init__.py": ""},
        "hetmem.plan.layout:1 (layer 1) imports hetmem.runtime (layer 4)",
    ),
    "a relative import in a package's own file": (
        {"memory/__init__.py": "from ..api import manage"},
        "hetmem.memory:1 (layer 3) imports hetmem.api (layer 6)",
    ),
    "an import for types only": (
        {
            "memory/pools.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from hetmem.runtime.runtime import Runtime"
        },
        "hetmem.memory.pools:3 (layer 3) imports hetmem.runtime.runtime (layer 4)",
    ),
    "an import inside a function": (
        {"memory/pools.py": "def late():\n    import hetmem.api as api"},
        "hetmem.memory.pools:2 (layer 3) imports hetmem.api (layer 6)",
    ),
    "an import by name": (
        {"memory/pools.py": "import importlib\nimportlib.import_module('hetmem.api')"},
        "hetmem.memory.pools:2 (layer 3) imports hetmem.api (layer 6)",
    ),
    "torch in plan": (
        {"plan/layout.py": "from torch.nn import Module"},
        "hetmem.plan.layout:1 (layer 1) must not import torch",
    ),
    "torch below plan": (
        {"units.py": "import torch"},
        "hetmem.units:1 (layer 0) must not import torch",
    ),
    **{
        f"{module} in plan": (
            {"plan/layout.py": f"import {module}"},
            f"hetmem.plan.layout:1 (layer 1) must not import {module.split('.')[0]}",
        )
        for module in ("os", "os.path", "io", "pathlib", "threading", "socket", "time", "random", "concurrent.futures")
    },
    "open() in plan": (
        {"plan/layout.py": "text = open('x').read()"},
        "hetmem.plan.layout:1 (layer 1) must not call open()",
    ),
    "os.environ": (
        {"memory/nvme.py": "import os as system\nhome = system.environ['HOME']"},
        "hetmem.memory.nvme:2 reads os.environ: only hetmem.config may",
    ),
    "getenv by its own name": (
        {"cli.py": "from os import getenv as ask"},
        "hetmem.cli:1 reads os.getenv: only hetmem.config may",
    ),
    "an import of the tests": (
        {"cli.py": "from tests.plan import shapes"},
        "hetmem.cli:1 imports tests.plan, which is not installed with hetmem",
    ),
    "an import of a private name": (
        {"plan/layout.py": "from hetmem.plan.trace import _nearest"},
        "hetmem.plan.layout:1 takes _nearest out of hetmem.plan.trace",
    ),
    "a private name reached through its module": (
        {"plan/layout.py": "from hetmem.plan import trace as t\nt._nearest()"},
        "hetmem.plan.layout:2 takes _nearest out of hetmem.plan.trace",
    ),
    "a private name reached by the full path": (
        {"plan/layout.py": "import hetmem.plan.trace\nhetmem.plan.trace._nearest()"},
        "hetmem.plan.layout:2 takes _nearest out of hetmem.plan.trace",
    ),
    "a private module of another package": (
        {"memory/pools.py": "from hetmem.plan._heap import Heap", "plan/_heap.py": ""},
        "hetmem.memory.pools:1 imports the private module hetmem.plan._heap",
    ),
}


@pytest.mark.parametrize(("sources", "expected"), FLAGGED.values(), ids=FLAGGED)
def test_a_tree_that_breaks_one_rule_is_flagged_once(tmp_path: Path, sources: Mapping[str, str], expected: str) -> None:
    assert violations(plant(tmp_path, sources)) == [expected]


def test_a_tree_that_keeps_the_rules_is_not_flagged(tmp_path: Path) -> None:
    sources = {
        "errors.py": "",
        "config.py": "import os\nfrom hetmem.errors import BudgetError\nhome = os.environ.get('HOME')",
        "plan/_heap.py": "import heapq",
        "plan/layout.py": "import math\nfrom . import _heap, trace\nfrom hetmem.plan._heap import Heap\ntrace.open()",
        "memory/pools.py": "import os\nimport torch\nfrom hetmem.plan import trace\nself._slots = trace.__name__",
        "optim/adamw.py": "from hetmem.runtime import hooks\nfrom .workers import WorkerPool",
        "api.py": "from hetmem import optim, __version__\nfrom hetmem.config import Budget",
        "cli.py": "import hetmem\nimport rich",
        "__init__.py": "from hetmem.api import manage",
    }
    assert violations(plant(tmp_path, sources)) == []
