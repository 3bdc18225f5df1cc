"""`hetmem.testing`: the points at which tests step in are there, and are left as they were."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

import hetmem
from hetmem import testing
from tests.engine.harness import BATCHES, manage, mlp, streamed


@pytest.mark.parametrize("point", testing.POINTS)
def test_a_point_is_a_function_and_is_itself_again_afterwards(point: str) -> None:
    before = resolve_name(testing.POINTS[point])
    assert callable(before)
    with testing.around(point, lambda original: None):
        assert resolve_name(testing.POINTS[point]) is not before
    assert resolve_name(testing.POINTS[point]) is before


def test_a_fault_comes_at_its_call_and_no_other(tmp_path: Path) -> None:
    managed = manage(mlp(), "host", tmp_path)
    managed(*BATCHES[0])
    with testing.failing("use of a weight", lambda: OSError("struck"), at=2) as raised:
        with pytest.raises(OSError, match="struck"):
            managed(*BATCHES[0])
        assert raised() == 1
        managed(*BATCHES[0])
    assert testing.of(managed).leased() == []


@streamed
def test_facts_are_of_the_model(placement: str, tmp_path: Path) -> None:
    managed = manage(mlp(), placement, tmp_path)
    inside = testing.of(managed)
    names = [name for chunk in inside.chunks() for name in chunk.parameters]
    assert sorted(names) == sorted(name for name, _ in managed.named_parameters())
    assert inside.homes() == {placement}
    assert inside.homes("grad") == set()
    assert all(inside.chunk_of(parameter) == inside.chunk_of(name) for name, parameter in managed.named_parameters())
    assert {inside.place_of(parameter) for parameter in managed.parameters()} == {"home"}
    managed(*BATCHES[0])
    inside.wait_idle()
    assert hetmem.report(managed).to_dict()["tiers"]["device"]["used_bytes"]
    inside.forget_copies()
    assert hetmem.report(managed).to_dict()["tiers"]["device"]["used_bytes"] == 0
