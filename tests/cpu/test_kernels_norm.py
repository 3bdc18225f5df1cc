"""The sum of squares has the same bits however it is made, and tells whether all gradients are finite."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from tests.cpu.tested import (
    BLOCK,
    RUN,
    TILE_ELEMENTS,
    WorkerPool,
    loops,
    norm,
    square_sum,
    square_sum_tasks,
    torch_square_sums,
    total,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    norm._verified_loop.cache_clear()
    yield
    norm._verified_loop.cache_clear()


def randn(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Over many magnitudes, so that every order of additions rounds differently."""
    random = torch.Generator().manual_seed(7)
    return (torch.randn(numel, generator=random) * torch.randn(numel, generator=random).exp()).to(dtype)


def in_order(values: torch.Tensor) -> float:
    """The sum of one tile, element by element, as the note in `loops.square_sums` says."""
    runs = [[0.0] * loops.LANES for _ in range(TILE_ELEMENTS // RUN)]
    for i, value in enumerate(values.double().tolist()):
        runs[i // loops.RUN][i % loops.LANES] += value * value
    return by_halves([by_halves(lanes) for lanes in runs])


def by_halves(numbers: list[float]) -> float:
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [one + other for one, other in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numba_is_what_runs_here(dtype: torch.dtype) -> None:
    assert not isinstance(norm._verified_loop(dtype), str)


def test_loops_of_16_bits_are_vectorized() -> None:
    """Without vectors float16 takes 16 times as long as with them, and no bit changes."""

    def fastest(dtype: torch.dtype) -> float:
        tasks, seconds = square_sum_tasks(randn(1 << 20, dtype))[0], []
        for _ in range(8):
            start = time.thread_time()
            for task in tasks:
                task()
            seconds.append(time.thread_time() - start)
        return min(seconds)

    assert fastest(torch.float16) < 3 * fastest(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, BLOCK - 1, BLOCK + 1, RUN - 1, RUN, 3 * RUN + BLOCK + 77])
def test_a_tile_is_summed_in_the_order_that_the_note_says(pool: WorkerPool, numel: int, dtype: torch.dtype) -> None:
    values = randn(numel, dtype)
    assert square_sum(pool, [values]) == in_order(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_numba_torch_gives_the_same_bits(
    pool: WorkerPool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = [randn(TILE_ELEMENTS + 1003, dtype), randn(5, dtype), randn(0, dtype)]
    compiled = [square_sum_tasks(grad) for grad in grads]
    monkeypatch.setitem(sys.modules, "numba", None)
    norm._verified_loop.cache_clear()
    assert isinstance(norm._verified_loop(dtype), str)
    plain = [square_sum_tasks(grad) for grad in grads]
    norm._verified_loop.cache_clear()
    for (tasks, partials), (plain_tasks, plain_partials), grad in zip(compiled, plain, grads, strict=True):
        pool.run(tasks + plain_tasks)
        assert partials.tolist() == plain_partials.tolist()
        assert torch_square_sums(grad).tolist() == partials.tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_threads_nor_the_order_of_gradients_change_a_bit(threads: int) -> None:
    pool = WorkerPool(threads)
    grads = [randn(2 * TILE_ELEMENTS + 1003), randn(700_000, torch.bfloat16), randn(9)]
    expected = math.fsum(in_order(tile) for grad in grads for tile in grad.split(TILE_ELEMENTS))
    assert square_sum(pool, grads) == expected
    assert square_sum(pool, grads[::-1]) == expected
    pool.close()


def test_the_sum_is_right(pool: WorkerPool) -> None:
    values = randn(3000)
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    assert abs(Fraction(square_sum(pool, [values])) - exact) <= exact * Fraction(1, 2**50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, BLOCK + 3, TILE_ELEMENTS - 1, TILE_ELEMENTS + BLOCK + 2])
def test_one_element_that_is_not_finite_shows_in_the_sum(
    pool: WorkerPool, dtype: torch.dtype, bad: float, place: int
) -> None:
    grad = torch.zeros(TILE_ELEMENTS + BLOCK + 3, dtype=dtype)
    grad[place] = bad
    result = square_sum(pool, [torch.ones(3), grad])
    assert math.isnan(result) if math.isnan(bad) else result == math.inf


def test_infinity_beside_nan_is_nan(pool: WorkerPool) -> None:
    assert math.isnan(square_sum(pool, [torch.tensor([math.inf]), torch.tensor([math.nan]), torch.ones(2)]))


def test_the_greatest_finite_gradients_do_not_overflow(pool: WorkerPool) -> None:
    greatest = torch.finfo(torch.float32).max
    assert square_sum(pool, [torch.full((100_000,), -greatest)]) == pytest.approx(1e5 * greatest**2, rel=1e-12)


def test_the_least_gradients_do_not_vanish(pool: WorkerPool) -> None:
    assert square_sum(pool, [torch.tensor([1e-45])]) == 2.0**-298
    assert square_sum(pool, [torch.tensor([2.0**-24], dtype=torch.float16)]) == 2.0**-48


def test_float64_gradients_are_summed_too(pool: WorkerPool) -> None:
    values = randn(1003).double() / 3
    assert square_sum(pool, [values]) == in_order(values)


def test_gradients_are_only_read(pool: WorkerPool) -> None:
    grad = randn(5000)
    before = grad.clone()
    square_sum(pool, [grad, grad.double()])
    assert torch.equal(grad, before)


def test_no_gradients_have_norm_zero(pool: WorkerPool) -> None:
    assert square_sum(pool, []) == 0.0
    assert total([]) == 0.0


def test_a_loop_that_sums_in_another_order_never_runs(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "square_sums", lambda values, sums: sums.fill(1.0))
    norm._verified_loop.cache_clear()
    assert norm._verified_loop(torch.float32) == "this build of torch rounds differently"
    norm._verified_loop.cache_clear()
