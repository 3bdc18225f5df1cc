"""A fault in functions of hetmem that are imported already, also where others have imported them by name."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from _pytest.config import get_config
from numba.core.registry import cpu_target

# A function that numba compiles, or has compiled before, makes it read its tables, which takes a third of a second.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

get_config()  # imports the plugins that every run of pytest has

FUNCTIONS: defaultdict[str, list[FunctionType]] = defaultdict(list)
"""Of each file, those that were there when this module was imported."""

for _each in gc.get_objects():
    if type(_each) is FunctionType:
        FUNCTIONS[_each.__code__.co_filename].append(_each)


def install(path: str, before: str, after: str) -> None:
    """Give the functions of the file `path`, whose text is `before`, the code that they have in the text `after`."""
    changed = dict(_changes(compile(before, path, "exec"), compile(after, path, "exec")))
    mutated = 0
    for function in FUNCTIONS[path]:
        if (key := _place(function.__code__)) in changed:
            function.__code__ = changed[key]
            mutated += 1
    assert mutated, f"{path}: no function has changed"


def _changes(before: CodeType, after: CodeType) -> Iterator[tuple[tuple[int, str], CodeType]]:
    """The places of functions that differ, and their code in `after`; one within another counts for both."""
    for left, right in zip(_nested(before), _nested(after), strict=False):
        if _meaning(left) != _meaning(right):
            yield _place(left), right
            yield from _changes(left, right)


def _place(code: CodeType) -> tuple[int, str]:
    return code.co_firstlineno, code.co_name


def _nested(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _meaning(code: CodeType) -> Any:
    """All but line numbers."""
    consts = [_meaning(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts]
    return code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, consts
