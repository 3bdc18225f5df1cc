"""Ctrl-C at one instruction after the other while a class that `hetmem.managed` decorates is built: nothing of it is
left, and the next one is managed."""

from __future__ import annotations

import gc
import inspect
import signal
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as torch_module

import hetmem
from hetmem import api
from hetmem.memory import interrupts
from hetmem.placing.building_memory import Building, BuildingMemory, as_written, build_within
from tests.engine.harness import WIDTH, all_hetmem_threads_end, budget
from tests.engine.struck import Struck, some_of
from tests.engine.test_interrupts_managing import is_managed
from tests.memory.left import open_files

_HOOKS: Any = vars(torch_module)["_global_parameter_registration_hooks"]
_SAMPLED = 150
"""So many instructions are struck, or with `--all-cases` each of them."""


_BUILDS = {
    inspect.unwrap(each).__code__
    for each in (as_written, build_within, Building.__init__, Building.active, Building.begin, Building.end)
}


def _around(code: CodeType) -> bool:
    """Whether `code` begins and ends what is built."""
    if code.co_filename == interrupts.__file__ or code in _BUILDS:
        return True
    return code.co_filename == api.__file__ and code.co_name == "wrapper"


def strike(build: Callable[[], Any], ended: Callable[[str], None], all_cases: bool) -> None:
    """`build` struck at one instruction after the other, with `ended` after each."""
    with Struck(_around, "opcode") as counted:
        build()
    for at in some_of(counted.places, counted.places if all_cases else _SAMPLED):
        try:
            with Struck(_around, "opcode", at):
                build()
        except KeyboardInterrupt:
            pass
        what = f"instruction {at} of {counted.places}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, what
        ended(what)


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def test_an_interrupt_leaves_nothing_of_what_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_cases: bool
) -> None:
    """One within a few instructions left the thread building for good: no model was managed any more, silently."""
    on_disk = budget("nvme", tmp_path, host="4KiB")
    managed = hetmem.managed(on_disk, device="sim")(type("Layers", (Layers,), {}))
    gc.collect()
    before = open_files()
    managed_then: list[nn.Module] = []

    def manage(module: nn.Module, *_: Any, built: BuildingMemory, **__: Any) -> None:
        assert built.store is not None
        built.close()
        managed_then.append(module)

    monkeypatch.setattr(api, "_manage", manage)

    def ended(what: str) -> None:
        assert not Building.active(), what
        assert not _HOOKS, what
        managed_then.clear()
        managed()
        assert len(managed_then) == 1, what
        managed_then.clear()

    strike(managed, ended, all_cases)
    assert all_hetmem_threads_end()
    assert open_files() == before
    monkeypatch.undo()
    assert is_managed(
        hetmem.managed(budget("nvme", tmp_path, host="1MiB"), device="sim")(type("Layers", (Layers,), {}))()
    )


def test_an_interrupt_of_a_plan_leaves_no_class_as_it_was_written(all_cases: bool) -> None:
    def ended(what: str) -> None:
        assert not Building.active(), what

    strike(lambda: as_written(Layers), ended, all_cases)
