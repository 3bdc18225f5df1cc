"""The host AdamW is torch's fused one, bit for bit, and its worker pool keeps its promises."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from hetmem.optim import kernels
from hetmem.optim.kernels import AdamWStep, adamw, kernel_name
from hetmem.optim.workers import WorkerPool

ROOT = Path(__file__).parents[2]
STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels._verified_loop.cache_clear()
    yield
    kernels._verified_loop.cache_clear()


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
    """After every step p, m, v and the copy hold the bits of `torch.optim.AdamW(fused=True)`."""
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
        reference.grad = grad.to(param.dtype)
        optimizer.step()
        state = optimizer.state[reference]
        assert_same_bits(param, reference.detach(), f"p of step {count}")
        assert_same_bits(m, state["exp_avg"], f"m of step {count}")
        assert_same_bits(v, state["exp_avg_sq"], f"v of step {count}")
        if copy is not None:
            assert_same_bits(copy, reference.detach().to(copy.dtype), f"copy of step {count}")


def randn(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_numba_is_what_runs_here(grad_dtype: torch.dtype, copy_dtype: torch.dtype | None) -> None:
    """A loop that rounds wrongly gives way to torch's kernel, which nobody would notice elsewhere."""
    assert kernel_name() == "numba"
    assert not isinstance(kernels._verified_loop(torch.float32, grad_dtype, copy_dtype), str)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 15, 16, 31, 1000])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
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
    kernels._adamw_torch(hyper, *torchs)
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


def test_a_dtype_without_a_loop_still_equals_torch(pool: WorkerPool) -> None:
    check_against_torch(pool, randn(1003), gradients(1003, 5, torch.float16), copy_dtype=torch.float64)


def test_without_numba_torch_gives_the_same_bits(pool: WorkerPool, without_numba: None) -> None:
    assert kernel_name().startswith("torch (ModuleNotFoundError")
    numel = kernels.TILE_ELEMENTS + 1003
    check_against_torch(pool, randn(numel), gradients(numel, 2, torch.bfloat16), copy_dtype=torch.bfloat16)


def test_a_loop_that_disagrees_with_torch_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels._LOOPS, None, lambda scalars, param, grad, exp_avg, exp_avg_sq: None)
    kernels._verified_loop.cache_clear()
    assert kernel_name() == "torch (this build of torch rounds differently)"
    kernels._verified_loop.cache_clear()


def test_a_cpu_without_fma_and_f16c_gives_the_same_bits() -> None:
    # With LLVM's own cast to float16 this process died: the cast became a call to a function that nothing links.
    loop = "kernels._verified_loop(torch.float32, torch.bfloat16, torch.float16)"
    code = f"import torch; from hetmem.optim import kernels; assert callable({loop})"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"NUMBA_CPU_NAME": "generic"}, cwd=ROOT)


def test_elements_outside_the_given_views_are_untouched(pool: WorkerPool) -> None:
    whole = [torch.full((300,), 3.0) for _ in range(4)] + [torch.full((300,), 3.0, dtype=torch.bfloat16)]
    adamw(pool, STEP, *(tensor[100:203] for tensor in whole))
    for tensor in whole:
        assert tensor[:100].eq(3).all()
        assert tensor[203:].eq(3).all()


def test_lengths_that_differ_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="15 elements beside 16"):
        adamw(pool, STEP, torch.zeros(16), torch.zeros(16), torch.zeros(16), torch.zeros(15))


def workers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hetmem-worker")]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_task_runs_once(threads: int) -> None:
    pool, ran = WorkerPool(threads), [0] * 100

    def task(index: int) -> None:
        ran[index] += 1

    for _ in range(50):
        pool.run([partial(task, index) for index in range(100)])
    pool.close()
    assert ran == [50] * 100


def test_tasks_run_on_as_many_threads_as_asked() -> None:
    pool, meeting = WorkerPool(3), threading.Barrier(3)
    pool.run([lambda: meeting.wait(30) and None] * 3)  # a third thread missing breaks the barrier
    pool.close()


def test_threads_start_with_the_first_batch_that_needs_them_and_end_with_close() -> None:
    pool = WorkerPool(3)
    pool.run([])
    pool.run([lambda: None])
    assert workers_alive() == []
    pool.run([lambda: None] * 2)
    assert workers_alive() == ["hetmem-worker-1", "hetmem-worker-2"]
    pool.close()
    assert workers_alive() == []
    pool.close()
    pool.run([lambda: None] * 2)
    assert workers_alive() == ["hetmem-worker-1", "hetmem-worker-2"]
    pool.close()
    assert workers_alive() == []


def test_one_thread_means_the_callers() -> None:
    seen: set[int] = set()
    WorkerPool(1).run([lambda: seen.add(threading.get_ident())] * 10)
    assert seen == {threading.get_ident()}
    assert workers_alive() == []


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_is_raised_after_all_tasks_have_run(threads: int) -> None:
    pool, ran = WorkerPool(threads), []

    def task(index: int) -> None:
        ran.append(index)
        if index == 3:
            raise KeyError("three")

    for _ in range(2):
        ran.clear()
        with pytest.raises(KeyError, match="three"):
            pool.run([partial(task, index) for index in range(10)])
        assert sorted(ran) == list(range(10))
    pool.close()


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    pool, meeting = WorkerPool(2), threading.Barrier(2)

    def task() -> None:
        meeting.wait(30)  # one of the two runs in the worker
        if threading.current_thread() is not threading.main_thread():
            raise OSError("in a worker")

    with pytest.raises(OSError, match="in a worker"):
        pool.run([task] * 2)
    pool.run([lambda: None] * 2)
    pool.close()


def test_idle_workers_hold_no_memory_even_after_an_error() -> None:
    pool, meeting = WorkerPool(2), threading.Barrier(2)

    class Memory:
        def touch(self) -> None:
            meeting.wait(30)
            raise ValueError("its traceback holds the task")

    memory = Memory()
    released = weakref.ref(memory)
    with contextlib.suppress(ValueError):
        pool.run([memory.touch] * 2)
    del memory
    deadline = time.monotonic() + 30  # the worker may still be on its way from the task to its queue
    while released() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
        gc.collect()
    assert released() is None
    pool.close()


def test_run_returns_after_the_slowest_task() -> None:
    pool, meeting, ended = WorkerPool(2), threading.Barrier(2), []

    def task() -> None:
        meeting.wait(30)  # one of the two runs in the worker
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        ended.append(True)

    pool.run([task] * 2)
    assert len(ended) == 2
    pool.close()


def test_runs_from_several_threads_and_from_tasks_do_not_mix() -> None:
    pool, sums = WorkerPool(2), [0] * 4

    def add(index: int) -> None:
        sums[index] += 1

    def caller(index: int) -> None:
        for _ in range(100):
            pool.run([lambda: pool.run([partial(add, index)] * 2)])

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(30)
    pool.close()
    assert sum(sums) == 800


def test_a_forgotten_pool_ends_its_threads() -> None:
    pool = WorkerPool(2)
    pool.run([lambda: None] * 2)
    (worker,) = [thread for thread in threading.enumerate() if thread.name == "hetmem-worker-1"]
    del pool
    worker.join(30)
    assert not worker.is_alive()


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, got 0"):
        WorkerPool(0)
