"""The host AdamW is torch's fused one, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.tested import (
    TILE_ELEMENTS,
    AdamWStep,
    WorkerPool,
    adamw,
    adamw_tasks,
    kernel_name,
    loops,
    norm,
    one_torch_thread,
    square_sum_tasks,
    update,
)
from tests.forked import Forks
from tests.pairs import mostly, some

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    for kernel in (update, norm):
        kernel._verified_loop.cache_clear()
    yield
    for kernel in (update, norm):
        kernel._verified_loop.cache_clear()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Equal bits wherever a number is expected (0.0 is not -0.0), any NaN where a NaN is."""
    assert actual.dtype == expected.dtype
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[actual.itemsize]
    if torch.equal(actual.view(bits), expected.view(bits)):
        return
    same = (actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())
    wrong = (~same).nonzero().flatten().tolist()
    assert not wrong, f"{what}: {len(wrong)} of {actual.numel()} differ, first at {wrong[0]}: " + (
        f"expected {expected[wrong[0]].item()!r}, got {actual[wrong[0]].item()!r}"
    )


def gradients(numel: int, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients over many magnitudes, a tenth of them zero."""
    random = torch.Generator().manual_seed(numel)
    noise = [torch.randn(3, numel, generator=random, dtype=torch.float64) for _ in range(steps)]
    return [(g * (4 * scale).exp() * (rare.abs() > 0.12)).to(dtype) for g, scale, rare in noise]


def check_against_torch(
    pool: WorkerPool,
    param: torch.Tensor,
    grads: list[torch.Tensor],
    hyper: AdamWStep = STEP,
    copy_dtype: torch.dtype | None = None,
) -> None:
    """After every step p, m, v and the copy hold the bits of `torch.optim.AdamW(fused=True)` on scaled gradients."""
    reference = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW(
        [reference], lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps,
        weight_decay=hyper.weight_decay, maximize=hyper.maximize, fused=True,
    )  # fmt: skip
    param, m, v = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
    copy = None if copy_dtype is None else torch.full_like(param, 7.0, dtype=copy_dtype)
    for count, grad in enumerate(grads, start=1):
        given = grad.clone()
        adamw(pool, dataclasses.replace(hyper, step=count), param, given, m, v, copy)
        assert_same_bits(given, grad, "gradient, only read")
        scaled = grad if hyper.grad_scale == 1 else grad.float().mul(hyper.grad_scale)
        reference.grad = scaled.to(param.dtype)
        optimizer.step()
        state = optimizer.state[reference]
        assert_same_bits(param, reference.detach(), f"p of step {count}")
        assert_same_bits(m, state["exp_avg"], f"m of step {count}")
        assert_same_bits(v, state["exp_avg_sq"], f"v of step {count}")
        if copy is not None:
            assert_same_bits(copy, reference.detach().to(copy.dtype), f"copy of step {count}")


def randn(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.each
@pytest.mark.parametrize("copy_dtype", some([torch.bfloat16, None, torch.float16, torch.float32], 2))
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_numba_is_what_runs_here(grad_dtype: torch.dtype, copy_dtype: torch.dtype | None) -> None:
    """A loop that rounds wrongly gives way to torch's kernel, which nobody would notice elsewhere."""
    assert kernel_name() == "numba"
    assert not isinstance(update._verified_loop(torch.float32, grad_dtype, copy_dtype), str)


@pytest.mark.parametrize(("numel", "grad_dtype"), mostly([0, 1, 7, 8, 15, 16, 31, 1000], DTYPES))
def test_twenty_steps_equal_torch_for_every_length_of_the_tail(
    pool: WorkerPool, numel: int, grad_dtype: torch.dtype
) -> None:
    check_against_torch(pool, randn(numel), gradients(numel, 20, grad_dtype), copy_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "hyper",
    [
        dataclasses.replace(STEP, weight_decay=0.0),
        dataclasses.replace(STEP, maximize=True),
        dataclasses.replace(STEP, lr=0.037, beta1=0.95, beta2=0.98, eps=1e-6, weight_decay=0.1),
        dataclasses.replace(STEP, beta1=0.5, beta2=0.5),
        dataclasses.replace(STEP, beta1=0.3),  # lerp from the gradient's end
        dataclasses.replace(STEP, beta1=0.0, beta2=0.0),
        dataclasses.replace(STEP, lr=0.0),
        dataclasses.replace(STEP, eps=1e-30),
        dataclasses.replace(STEP, lr=1e3, weight_decay=5.0, maximize=True),
    ],
    ids=repr,
)
def test_twenty_five_steps_equal_torch_for_every_hyper_parameter(pool: WorkerPool, hyper: AdamWStep) -> None:
    check_against_torch(pool, randn(1003), gradients(1003, 25, torch.float32), hyper)


# Scales as loss scaling and clipping make them; some products are subnormal, some infinite, some are not a number.
@pytest.mark.parametrize(("scale", "dtype"), mostly([1 / 65536, 0.3, 1.0000001, 3e38, 1e-45, -0.7, 0.0], DTYPES))
def test_scaled_gradients_equal_torch_on_gradients_scaled_before(
    pool: WorkerPool, dtype: torch.dtype, scale: float
) -> None:
    hyper = dataclasses.replace(STEP, grad_scale=scale, maximize=scale == 0.3)
    check_against_torch(pool, randn(1003), gradients(1003, 5, dtype), hyper, torch.bfloat16)


def test_a_scale_is_rounded_to_float32_first(pool: WorkerPool) -> None:
    grad = torch.full((64,), 9.0)
    scale = 0.1  # 9 * 0.1 in float64 rounds to another float32 than 9 * float32(0.1)
    assert torch.tensor(9 * scale).item() != grad.mul(scale)[0].item()
    check_against_torch(pool, torch.ones(64), [grad], dataclasses.replace(STEP, grad_scale=scale))


def test_every_float16_gradient_is_widened_exactly(pool: WorkerPool) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    m = torch.zeros(2**16)
    # With beta1 = 0 the first moment is the gradient.
    adamw(pool, AdamWStep(0.0, 0.0, 0.999, 1e-8, 0.0, step=1), m.clone(), every, m, m.clone())
    assert_same_bits(m, torch.where(every.isinf(), torch.nan, every.float()))  # lerp makes inf * 0 of an infinity


def test_tasks_of_several_updates_run_in_any_order_and_hold_their_memory(pool: WorkerPool) -> None:
    tasks, kept = [], []
    for numel in (5, TILE_ELEMENTS + 35, 64):
        mine = [randn(numel), randn(numel) * 3, randn(numel) / 5, randn(numel).square()]
        expected = [tensor.clone() for tensor in mine]
        update.update_by_torch(STEP, *expected)
        made = adamw_tasks(STEP, *mine)
        assert len(made) == {5: 1, TILE_ELEMENTS + 35: 3, 64: 1}[numel]  # tiles, and the elements after the last 16
        tasks += made
        kept.append((mine, expected))
        del mine
    pool.run(tasks[::-1])
    for mine, expected in kept:
        for actual, wanted in zip(mine, expected, strict=True):
            assert_same_bits(actual, wanted)


def test_making_tasks_writes_nothing() -> None:
    mine = [randn(1003) for _ in range(4)]
    before = [tensor.clone() for tensor in mine]
    adamw_tasks(STEP, *mine)
    assert all(map(torch.equal, mine, before))


def test_weight_decay_is_rounded_where_torch_rounds_it(pool: WorkerPool) -> None:
    # 1 - lr * wd rounds to another float32 when the product is first rounded to float64.
    hyper = dataclasses.replace(STEP, lr=0.9222109257625241, weight_decay=3.231616717028657e-08)
    check_against_torch(pool, torch.ones(64), [torch.zeros(64)], hyper)


@pytest.mark.parametrize("step", [1, 2, 10_000, 2**24])
def test_bias_correction_equals_torch_late_in_training(pool: WorkerPool, step: int) -> None:
    hyper = dataclasses.replace(STEP, beta2=1 - 1e-8, step=step)
    mine = [randn(160), randn(160) * 3, randn(160) / 5, randn(160).square()]
    torchs = [tensor.clone() for tensor in mine]
    adamw(pool, hyper, *mine)
    update.update_by_torch(hyper, *torchs)
    for actual, expected in zip(mine, torchs, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_tiles_and_threads_do_not_change_a_bit(threads: int) -> None:
    numel = 600_007  # two tiles and a tail
    pool = WorkerPool(threads)
    check_against_torch(pool, randn(numel), gradients(numel, 2, torch.bfloat16) * 10, copy_dtype=torch.bfloat16)
    pool.close()


def test_extreme_gradients_equal_torch(pool: WorkerPool) -> None:
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    values = [0.0, -0.0, 1e-45, -1e-45, tiny, tiny / 8, 1e-20, 1e19, -huge, huge, torch.inf, -torch.inf, torch.nan, 1.0]
    grad = torch.tensor(values).repeat(12)
    param = torch.tensor(values).repeat_interleave(12)
    check_against_torch(pool, param, [grad, grad.flip(0), torch.zeros_like(grad)] * 7, copy_dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_is_rounded_as_torch_rounds(pool: WorkerPool, dtype: torch.dtype) -> None:
    # All upper halves of a float32 (every exponent, infinities, NaNs) with lower halves on and beside each tie.
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    param = (upper[:, None] | lower).flatten().view(torch.float32)
    before, zeros = param.clone(), torch.zeros_like(param)
    copy = torch.full_like(param, 7.0, dtype=dtype)
    adamw(pool, AdamWStep(0.0, 0.9, 0.999, 1e-8, 0.0, step=1), param, zeros, zeros.clone(), zeros.clone(), copy)
    assert_same_bits(param, before, "p without an update")
    assert_same_bits(copy, before.to(dtype), "copy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_equal_torch_in_that_dtype(pool: WorkerPool, dtype: torch.dtype) -> None:
    check_against_torch(pool, randn(1003, dtype), gradients(1003, 20, dtype), copy_dtype=torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_dtype_without_a_loop_still_equals_torch(pool: WorkerPool, scale: float) -> None:
    hyper = dataclasses.replace(STEP, grad_scale=scale)
    check_against_torch(pool, randn(1003), gradients(1003, 5, torch.float16), hyper, copy_dtype=torch.float64)
    check_against_torch(pool, randn(1003, torch.bfloat16), gradients(1003, 5, torch.bfloat16), hyper)


def test_a_float64_gradient_is_scaled_in_float64(pool: WorkerPool) -> None:
    param, grad = torch.ones(3, dtype=torch.float64), torch.full((3,), 1 + 2.0**-40, dtype=torch.float64)
    m, v = torch.zeros_like(param), torch.zeros_like(param)
    adamw(pool, dataclasses.replace(STEP, beta1=0.0, grad_scale=0.5), param, grad, m, v)
    assert m.eq(grad / 2).all()


def test_without_numba_torch_gives_the_same_bits(pool: WorkerPool, without_numba: None) -> None:
    assert kernel_name().startswith("torch (ModuleNotFoundError")
    numel = TILE_ELEMENTS + 1003
    hyper = dataclasses.replace(STEP, grad_scale=0.3)
    check_against_torch(pool, randn(numel), gradients(numel, 2, torch.bfloat16), hyper, torch.bfloat16)


@pytest.fixture
def two_threads() -> None:
    """Of torch; each test sets them anew."""
    torch.set_num_threads(2)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads that Linux lists")
def test_torchs_kernel_on_a_worker_starts_no_threads_and_changes_no_setting(
    without_numba: None, two_threads: None
) -> None:
    """Every thread that runs torch's operators may start a team of its own: cores times cores threads in all."""
    pool = WorkerPool(1)
    tensors = [randn(TILE_ELEMENTS) for _ in range(4)]
    counts: list[int] = []

    def count() -> None:
        counts.append(len(os.listdir("/proc/self/task")))

    for kernel in (adamw_tasks(STEP, *tensors), square_sum_tasks(tensors[0])[0]):
        ended = threading.Event()
        pool.begin([count, *kernel, count, lambda: counts.append(torch.get_num_threads())], ended.set)
        assert ended.wait(30)  # without a join, so all ran on the worker
    pool.close()
    before, after, threads = counts[:3]
    assert after <= before  # threads of earlier tests may end meanwhile
    assert counts[4] <= counts[3]
    assert threads == counts[5] == torch.get_num_threads()  # restored there, untouched here
    seen: list[int] = []
    late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert seen == [torch.get_num_threads()]  # and in threads that start later


def test_one_torch_thread_means_this_threads_operators(two_threads: None) -> None:
    before, inside = torch.get_num_threads(), []
    with one_torch_thread():
        inside.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: inside.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert inside == [1, before] == [1, 2]
    assert torch.get_num_threads() == before


def test_a_loop_that_disagrees_with_torch_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "adamw_tiles", lambda scalars, tiles, taken, grad, copy: None)
    update._verified_loop.cache_clear()
    assert kernel_name() == "torch (this build of torch rounds differently)"
    update._verified_loop.cache_clear()


def test_a_cpu_without_fma_and_f16c_gives_the_same_bits(forks: Forks) -> None:
    """Its casts of float16 are torch's. A loop compares itself with torch when it is compiled."""
    # With LLVM's own casts from and to float16 this process died: they became calls of functions that nothing links.
    code = """
import numba, torch
numba.config.CPU_NAME = "generic"  # what NUMBA_CPU_NAME sets
from hetmem.cpu import AdamWStep, adamw, adamw_tasks, small_states
from hetmem.errors import ManageError
b, f = torch.bfloat16, torch.float16
assert callable(small_states._kernel((b, b, b, b, b)))
assert callable(adamw._verified_loop(torch.float32, b, b))
assert "no casts of float16" in adamw._verified_loop(torch.float32, f, f)
try:
    small_states._kernel((b, f, b, b, f))
except ManageError as error:
    assert "no casts of float16" in str(error)
else:
    raise AssertionError
param, grad, m = torch.ones(40), torch.ones(40, dtype=f), torch.zeros(40)
copy = torch.zeros(40, dtype=f)
for task in adamw_tasks(AdamWStep(0.5, 0.0, 0.999, 1e-8, 0.0, 1), param, grad, m, m.clone(), copy):
    task()
assert (param < 1).all() and torch.equal(copy, param.half()) and (m == 1).all()
"""
    ended = forks.run(code)
    assert ended.returncode == 0, ended.stderr


def test_elements_outside_the_given_views_are_untouched(pool: WorkerPool) -> None:
    whole = [torch.full((300,), 3.0) for _ in range(4)] + [torch.full((300,), 3.0, dtype=torch.bfloat16)]
    adamw(pool, STEP, *(tensor[100:203] for tensor in whole))
    for tensor in whole:
        assert tensor[:100].eq(3).all()
        assert tensor[203:].eq(3).all()


def test_lengths_that_differ_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="15 elements beside 16"):
        adamw(pool, STEP, torch.zeros(16), torch.zeros(16), torch.zeros(16), torch.zeros(15))
