"""The layers of hetmem: imports point downward, `schedule` only decides, one module reads the environment.

Read from the sources, so an import inside a function or under TYPE_CHECKING counts like any other. Each rule is
proven on a small made-up tree that breaks it; what importing costs at run time is in test_import_cost.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.forked import nothing_collected

REPOSITORY = Path(__file__).parents[1]

ORDER = (
    "errors torch_private",
    "base",
    "schedule",  # decides
    "cuda",  # kernels
    "cpu",
    "quantised",  # encodes and decodes weights
    "memory",  # holds and moves, by kernels too
    "ranks",  # what several processes share, and how they wait for each other
    "engine",  # carries out what is decided
    "placing",  # brings parameters to their homes
    "activations",  # moves what autograd saves
    "intercept",  # tells the engine what torch uses
    "optim losses accumulation",  # trains, what is trained for, and how batches take turns
    "checkpoint report planner distributed",  # saves, tells, plans
    "api parking",  # what users call
    "__init__",
    "tools",  # measures, compares
    "testing integrations",  # looks inside for tests, lets frameworks call
    "cli",
    "__main__",
)
LAYERS = {part: layer for layer, parts in enumerate(ORDER) for part in parts.split()}
TORCH_FREE = {"base", "schedule"}
DECIDES = {"schedule"}
# Modules of other parts that only decide as well: a step on a clock.
DECIDE_TOO = {
    f"hetmem.planner.{name}"
    for name in (
        "decide in_turns inexact reservation workload simulated_engine simulated_gradients simulator step_program"
    ).split()
}
# One writer for each fact, and others that write the same attribute of tensors that are no managed parameter.
WRITERS = {
    "homes": "hetmem.engine.homes",
    "data": "hetmem.engine.param_views",
    "grad": "hetmem.engine.gradient_views",
    "__class__": "hetmem.engine.param_views",
}
WRITES_TOO = {
    "data": {
        "hetmem.api",  # buffers of a model that is released
        "hetmem.parking",  # buffers of one that is parked
        "hetmem.placing.building_memory",  # parameters that are not managed yet
        "hetmem.placing.filling",  # buffers, and parameters that are not managed yet
        "hetmem.engine.gradient_views",  # a parameter that is its gradient's kind for as long as it is shown
        "hetmem.intercept.saved_tensors",  # a view that was saved
        "hetmem.memory.chunk",  # a new view of a home
        "hetmem.optim.states",  # states that the program sees
        "hetmem.planner.meta_trace",  # a model on the meta device
        "hetmem.tools.difference",  # a plain model
    },
    "grad": {
        "hetmem.engine.param_views",  # a gradient from before the parameter was managed
        "hetmem.optim.elementwise",  # the parameter of one tile
        "hetmem.optim.update_pass",  # of an update's arguments
        "hetmem.planner.meta_trace",
        "hetmem.tools.difference",
    },
    "__class__": {
        "hetmem.engine.gradient_watch",  # gradients, for as long as the program may write to them
        "hetmem.intercept.hooks",  # a parameter whose gradient arrives, as `Bindings.send_home` does, without its calls
    },
}

# Circles of modules that are left, each until one of its arrows is cut. None.
CIRCLES: list[list[str]] = []

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
    name: str  # "hetmem.schedule.trace"; a package bears its own name
    package: str  # what its relative imports start from
    tree: ast.Module

    @property
    def part(self) -> str:
        return part_of(self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))


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
    for node in module.nodes:
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
        elif isinstance(node, ast.Call) and node.args:
            match node.func, node.args[0]:
                case (
                    ast.Name("import_module") | ast.Attribute(ast.Name("importlib"), "import_module"),
                    ast.Constant(value=str(target)),
                ):
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
        if above <= below:
            yield f"{module.name}:{taken.line} (layer {above}) imports {taken.target} (layer {below})"


def does_more_than_decide(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    decides = module.part in DECIDES or module.name in DECIDE_TOO
    for taken in imports_of(module, modules):
        top = taken.target.split(".")[0]
        if (module.part in TORCH_FREE and top == "torch") or (decides and top not in MODULES_FOR_DECIDING):
            yield f"{module.name}:{taken.line} must not import {top}"
    if decides:
        for node in module.nodes:
            match node:
                case ast.Call(ast.Name(called)) if called in BUILTINS_WITH_IO:
                    yield f"{module.name}:{node.lineno} must not call {called}()"


def reads_the_environment(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    if module.name == "hetmem.base.config":
        return
    taken = [(found.line, found.name) for found in imports_of(module, modules) if found.target == "os"]
    used = [(node.lineno, node.attr) for node in module.nodes if isinstance(node, ast.Attribute)]
    for line, name in sorted((line, name) for line, name in taken + used if name in ENVIRONMENT):
        yield f"{module.name}:{line} reads os.{name}: only hetmem.base.config may"


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
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            target = aliases.get(ast.unparse(node.value))
            if target and f"{target}.{node.attr}" not in modules:
                yield f"{module.name}:{node.lineno} takes {node.attr} out of {target}"


def writes_another_s_fact(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """One module writes each fact: where homes are, what `.data` of a parameter is, what `.grad` is."""
    for node in module.nodes:
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="homes"), attr="pop" | "setdefault")):
                targets = [ast.Subscript(value=node.func.value)]
            case _:
                continue
        for target in (one for each in targets for one in getattr(each, "elts", [each])):
            match target:
                case ast.Subscript(value=ast.Attribute(attr="homes")):
                    fact = "homes"
                case ast.Attribute(attr=fact):
                    pass
                case _:
                    continue
            if fact in WRITERS and module.name not in (WRITERS[fact], *WRITES_TOO.get(fact, ())):
                yield f"{module.name}:{node.lineno} writes .{fact}, which is for {WRITERS[fact]}"


RULES = (
    has_no_layer,
    points_upward,
    does_more_than_decide,
    reads_the_environment,
    imports_what_is_not_shipped,
    takes_a_private_name,
    writes_another_s_fact,
)


def circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Modules that import each other, directly or through others, for types only or within a function too (R. Tarjan,
    "Depth-first search and linear graph algorithms", SIAM J. Computing 1, 1972)."""
    arrows = {
        name: sorted({taken.target for taken in imports_of(module, modules)} & (modules.keys() - {name}))
        for name, module in modules.items()
    }
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for target in arrows[name]:
            if target not in number:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == number[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in arrows:
        if name not in number:
            visit(name)
    return sorted(circle for circle in found if len(circle) > 1)


def violations(modules: Mapping[str, Module]) -> list[str]:
    found = [one for module in modules.values() for rule in RULES for one in rule(module, modules)]
    return found + [f"{' and '.join(circle)} import each other" for circle in circles(modules) if circle not in CIRCLES]


def test_hetmem_keeps_its_layers() -> None:
    with nothing_collected():  # a million nodes, and no garbage
        modules = read_modules(REPOSITORY)
        assert modules.keys() >= {"hetmem", "hetmem.base.config", "hetmem.schedule", "hetmem.engine"} | DECIDE_TOO
        assert violations(modules) == []


def plant(root: Path, sources: Mapping[str, str]) -> Path:
    there = {"__init__.py": "", "schedule/__init__.py": "", "schedule/trace.py": ""}
    for path, source in {**there, **sources}.items():
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
        {"schedule/layout.py": "from hetmem.memory.host_pool import Pool"},
        "hetmem.schedule.layout:1 (layer 2) imports hetmem.memory.host_pool (layer 6)",
    ),
    "an import of the public names": (
        {"engine/traffic.py": "import hetmem"},
        "hetmem.engine.traffic:1 (layer 8) imports hetmem (layer 15)",
    ),
    "an import of a sibling of the same layer": (
        {"report/text.py": "from hetmem import checkpoint", "checkpoint.py": ""},
        "hetmem.report.text:1 (layer 13) imports hetmem.checkpoint (layer 13)",
    ),
    "a relative import": (
        {"schedule/layout.py": "from ..engine import traffic", "engine/__init__.py": ""},
        "hetmem.schedule.layout:1 (layer 2) imports hetmem.engine (layer 8)",
    ),
    "a relative import in a package's own file": (
        {"memory/__init__.py": "from ..api import manage"},
        "hetmem.memory:1 (layer 6) imports hetmem.api (layer 14)",
    ),
    "an import for types only": (
        {
            "memory/host_pool.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from hetmem.engine.runtime import Runtime"
        },
        "hetmem.memory.host_pool:3 (layer 6) imports hetmem.engine.runtime (layer 8)",
    ),
    "an import inside a function": (
        {"memory/host_pool.py": "def late():\n    import hetmem.api as api"},
        "hetmem.memory.host_pool:2 (layer 6) imports hetmem.api (layer 14)",
    ),
    "an import by name": (
        {"memory/host_pool.py": "import importlib\nimportlib.import_module('hetmem.api')"},
        "hetmem.memory.host_pool:2 (layer 6) imports hetmem.api (layer 14)",
    ),
    "torch in schedule": (
        {"schedule/layout.py": "from torch.nn import Module"},
        "hetmem.schedule.layout:1 must not import torch",
    ),
    "torch below schedule": (
        {"base/units.py": "import torch"},
        "hetmem.base.units:1 must not import torch",
    ),
    **{
        f"{module} in schedule": (
            {"schedule/layout.py": f"import {module}"},
            f"hetmem.schedule.layout:1 must not import {module.split('.')[0]}",
        )
        for module in ("os", "os.path", "io", "pathlib", "threading", "socket", "time", "random", "concurrent.futures")
    },
    "open() in schedule": (
        {"schedule/layout.py": "text = open('x').read()"},
        "hetmem.schedule.layout:1 must not call open()",
    ),
    "a circle": (
        {
            "report/text.py": "from hetmem.report import page",
            "report/page.py": "def late():\n    from hetmem.report.live import Live",
            "report/live.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from hetmem.report.text import table",
        },
        "hetmem.report.live and hetmem.report.page and hetmem.report.text import each other",
    ),
    "a second writer of homes": (
        {"optim/states.py": "def place(chunk, role, home):\n    chunk.homes[role] = home"},
        "hetmem.optim.states:2 writes .homes, which is for hetmem.engine.homes",
    ),
    "a second writer of homes that takes one out": (
        {"optim/states.py": "def place(chunk, role):\n    chunk.homes.pop(role)"},
        "hetmem.optim.states:2 writes .homes, which is for hetmem.engine.homes",
    ),
    "a second writer of p.data": (
        {"engine/traffic.py": "def bind(one, other):\n    one.data, other.home = other.home, None"},
        "hetmem.engine.traffic:2 writes .data, which is for hetmem.engine.param_views",
    ),
    "a second writer of p.grad": (
        {"engine/runtime.py": "def hide(parameter):\n    parameter.grad = None"},
        "hetmem.engine.runtime:2 writes .grad, which is for hetmem.engine.gradient_views",
    ),
    "os.environ": (
        {"memory/nvme_store.py": "import os as system\nhome = system.environ['HOME']"},
        "hetmem.memory.nvme_store:2 reads os.environ: only hetmem.base.config may",
    ),
    "getenv by its own name": (
        {"cli.py": "from os import getenv as ask"},
        "hetmem.cli:1 reads os.getenv: only hetmem.base.config may",
    ),
    "an import of the tests": (
        {"cli.py": "from tests.schedule import shapes"},
        "hetmem.cli:1 imports tests.schedule, which is not installed with hetmem",
    ),
    "an import of a private name": (
        {"schedule/layout.py": "from hetmem.schedule.trace import _nearest"},
        "hetmem.schedule.layout:1 takes _nearest out of hetmem.schedule.trace",
    ),
    "a private name reached through its module": (
        {"schedule/layout.py": "from hetmem.schedule import trace as t\nt._nearest()"},
        "hetmem.schedule.layout:2 takes _nearest out of hetmem.schedule.trace",
    ),
    "a private name reached by the full path": (
        {"schedule/layout.py": "import hetmem.schedule.trace\nhetmem.schedule.trace._nearest()"},
        "hetmem.schedule.layout:2 takes _nearest out of hetmem.schedule.trace",
    ),
    "a private module of another package": (
        {"memory/host_pool.py": "from hetmem.schedule._heap import Heap", "schedule/_heap.py": ""},
        "hetmem.memory.host_pool:1 imports the private module hetmem.schedule._heap",
    ),
}


@pytest.mark.parametrize(("sources", "expected"), FLAGGED.values(), ids=FLAGGED)
def test_a_tree_that_breaks_one_rule_is_flagged_once(tmp_path: Path, sources: Mapping[str, str], expected: str) -> None:
    assert violations(read_modules(plant(tmp_path, sources))) == [expected]


def test_a_tree_that_keeps_the_rules_is_not_flagged(tmp_path: Path) -> None:
    sources = {
        "errors.py": "",
        "base/config.py": "import os\nfrom hetmem.errors import BudgetError\nhome = os.environ.get('HOME')",
        "schedule/_heap.py": "import heapq",
        "schedule/layout.py": "import math\n"
        "from . import _heap, trace\nfrom hetmem.schedule._heap import Heap\ntrace.open()",
        "memory/host_pool.py": "import os\n"
        "import torch\nfrom hetmem.schedule import trace\nself._slots = trace.__name__",
        "optim/adamw.py": "from hetmem.engine import traffic\nfrom .rule import Rule",
        "api.py": "from hetmem.optim import adamw\nfrom hetmem.base.config import Budget",
        "cli.py": "import hetmem\nimport rich",
        "__init__.py": "from hetmem.api import manage",
    }
    assert violations(read_modules(plant(tmp_path, sources))) == []
