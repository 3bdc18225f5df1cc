"""What is remembered of operators on `meta` is what they would make again; nothing else is remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.planner.tested import Results, TracedCall, checkpointed, divided, trace
from tests.test_planning import BATCH, GPT

aten = torch.ops.aten


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize("mixed_precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_trace_that_remembers_others_is_the_one_that_starts_afresh(mixed_precision: torch.dtype | None) -> None:
    call, results = TracedCall(GPT, BATCH, None, mixed_precision), Results()
    for variant in (call, checkpointed(call), divided(call, 2), call):
        assert trace(variant, results) == trace(variant)


def test_the_second_call_makes_the_same_without_the_operator() -> None:
    results = Results()
    first, cost = results.of(aten.mm.default, (meta(3, 4), meta(4, 5)), {})
    results.last = ""
    second, again = results.of(aten.mm.default, (meta(3, 4), meta(4, 5)), {})
    assert results.last == ""
    assert (second.shape, second.stride(), second.dtype) == (first.shape, first.stride(), first.dtype)
    assert second.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert cost == again
    assert (cost.flops, cost.nbytes, cost.dtype) == (2 * 3 * 4 * 5, 4 * (12 + 20 + 15), "float32")


@pytest.mark.parametrize(
    ("args", "others"),
    [
        ((meta(3, 4), 1), (meta(3, 4), True)),
        ((meta(3, 4), 1), (meta(3, 4), 1.5)),
        ((meta(3, 4), 1), (meta(4, 3).t(), 1)),
        ((meta(3, 4), 1), (meta(3, 4, dtype=torch.int64), 1)),
    ],
    ids=["bool", "float", "strides", "dtype"],
)
def test_other_arguments_are_asked_for_afresh(args: Any, others: Any) -> None:
    results = Results()
    results.of(aten.add.Scalar, args, {})
    results.last = ""
    made, _ = results.of(aten.add.Scalar, others, {})
    expected = aten.add.Scalar(*others)
    assert results.last
    assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (meta(12), [3, 4])),
        (aten.add_.Scalar, (meta(12), 1)),
        (aten._unsafe_view.default, (meta(12), [3, 4])),
    ],
    ids=["view", "in place", "a view that says it is none"],
)
def test_what_shares_memory_is_not_remembered(func: Any, args: Any) -> None:
    results = Results()
    for _ in range(2):
        results.last = ""
        made, _ = results.of(func, args, {})
        assert results.last
        assert made.untyped_storage()._cdata == args[0].untyped_storage()._cdata


def test_tensors_with_values_are_never_remembered() -> None:
    results = Results()
    results.of(aten.add.Scalar, (meta(2), 1), {})
    values = [results.of(aten.add.Scalar, (torch.zeros(2), 1), {})[0] for _ in range(2)]
    assert [value.tolist() for value in values] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("mixed_precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("saves", [False, True], ids=["plain", "checkpointed"])
def test_a_real_step_is_the_one_that_meta_shows(saves: bool, mixed_precision: torch.dtype | None) -> None:
    call = TracedCall(lambda: GPT(2, saves=saves), BATCH, None, mixed_precision)
    real, shown = trace(call, real=True), trace(call)
    assert real.parameters == shown.parameters
    assert [(e.kind, e.parameters, e.held, e.let_go) for e in real.events] == [
        (e.kind, e.parameters, e.held, e.let_go) for e in shown.events
    ]
    assert real.flops == shown.flops
    assert abs(real.peak_live_bytes - shown.peak_live_bytes) <= 0.02 * shown.peak_live_bytes
