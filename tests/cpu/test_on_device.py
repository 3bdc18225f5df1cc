"""AdamW on a device with the bits of the host's, whole parameters with their tails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.cpu.tested import (
    AdamWStep,
    adamw_as_on_host,
    adamw_on_device,
    equals_host,
    kernels,
    update,
    update_by_torch,
)
from tests.engine.harness import same_bits

CPU = torch.device("cpu")
BF16, HALF = torch.bfloat16, torch.float16
KINDS = [(torch.float32, None), (torch.float32, BF16), (torch.float32, HALF), (BF16, None), (HALF, None)]
STEPS = {
    "scaled": AdamWStep(3e-3, 0.9, 0.95, 1e-8, 0.1, 7, maximize=True, grad_scale=0.37),
    "first": AdamWStep(1e-2, 0.3, 0.999, 1e-6, 0.0, 1),
}


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    yield
    update._width.cache_clear()


@pytest.mark.each
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("dtype", "copy"), KINDS)
@pytest.mark.parametrize("numel", [1, 7, 15, 16, 17, 31, 1000, 4099])
def test_a_parameter_of_any_length_has_the_bits_of_torch_on_the_host(
    numel: int, dtype: torch.dtype, copy: torch.dtype | None, step: AdamWStep
) -> None:
    generator = torch.Generator().manual_seed(numel)
    for _ in range(100 if numel < 100 else 1):
        here = [torch.randn(numel, generator=generator).to(dtype) for _ in range(4)]
        here[3].square_()
        here += [] if copy is None else [torch.zeros(numel, dtype=copy)]
        there = [tensor.clone() for tensor in here]
        update_by_torch(step, *here)
        adamw_as_on_host(step, tuple(there))
        assert all(map(same_bits, here, there))


class Across(TorchFunctionMode):
    """Notes functions that meet tensors both in host memory and on the device: the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            self.found.append(str(func))
        return result


def test_step_counts_reach_the_device_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of them from pageable memory waits for all that the device was asked for before."""
    meta = torch.device("meta")
    alike = [[torch.empty(5, device=meta) for _ in range(3)] for _ in range(4)]
    filled: list[float] = []
    seen: list[list[torch.Tensor]] = []

    def full(size: Any, number: float, **options: Any) -> torch.Tensor:
        filled.append(number)
        return torch.empty(size, **options)

    monkeypatch.setattr(torch, "full", full)
    monkeypatch.setattr(update.torch_private, "fused_adamw", lambda *args, **kwargs: seen.append(args[5]))
    counts = [torch.tensor(number) for number in (7.0, 7.0, 2.0)]
    with Across() as across, torch.no_grad():
        adamw_on_device(STEPS["first"], *alike, counts)
    assert not across.found
    assert sorted(filled) == [2.0, 7.0]
    ((first, second, third),) = seen
    assert first is second is not third
    assert first.device == meta


def test_scaled_gradients_without_room_are_told_before_anything_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy of a large one was asked for when others were updated, which the next step updated once more."""
    lists = [[torch.ones(numel) for numel in (8, 8, 64, 8)] for _ in range(4)]
    scaled = update._scaled

    def with_room_for_ten(grad: torch.Tensor, step: AdamWStep) -> torch.Tensor:
        if grad.numel() > 10:
            raise torch.OutOfMemoryError("none")
        return scaled(grad, step)

    monkeypatch.setattr(update, "_scaled", with_room_for_ten)
    monkeypatch.setattr(update, "_SCALED_BYTES", 32)
    with pytest.raises(torch.OutOfMemoryError):
        adamw_on_device(STEPS["scaled"], *lists, [torch.tensor(1.0) for _ in range(4)])
    assert all(tensor.eq(1).all() for tensors in lists for tensor in tensors)


@pytest.mark.each
@pytest.mark.parametrize(("dtype", "copy"), KINDS)
@pytest.mark.parametrize("fault", ["tails", "all"])
def test_a_device_that_rounds_otherwise_is_found_out(
    fault: str, dtype: torch.dtype, copy: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a torch that was built without fused products, or with wider vectors than any that is known."""
    assert equals_host(CPU, dtype, copy)
    update._width.cache_clear()
    original = kernels.adamw

    def adamw(*arguments: object, tail: int = 0) -> None:
        numel = arguments[2].numel()
        original(*arguments, tail=tail if numel == update._SAMPLE else 0 if fault == "tails" else numel)

    monkeypatch.setattr(kernels, "adamw", adamw)
    assert not equals_host(CPU, dtype, copy)


def test_a_device_where_nothing_runs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    update._width.cache_clear()
    monkeypatch.setattr(kernels, "adamw", None)
    assert not equals_host(CPU, torch.float32, None)
    assert not equals_host(CPU, torch.int8, None)
    with pytest.raises(AssertionError, match="cpu does not compute as the host does"):
        adamw_as_on_host(STEPS["first"], tuple(torch.zeros(3) for _ in range(4)))


def test_a_device_that_rounds_otherwise_does_not_equal_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert equals_host(CPU, torch.float32, BF16)
    update._width.cache_clear()
    monkeypatch.setattr(kernels, "_fma", lambda a, b, c: a * b + c)
    assert not equals_host(CPU, torch.float32, BF16)
