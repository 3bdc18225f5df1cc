"""Small states: the arithmetic is AdamW's in float32, and chance depends on key, step, element and state alone."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import sys
from collections.abc import Iterator

import pytest
import torch

import hetmem
from benchmarks import nearest_codes
from tests.cpu.tested import (
    GROUP_ELEMENTS,
    TILE_ELEMENTS,
    AdamWStep,
    Codes8Bit,
    WorkerPool,
    adamw_compact_tasks,
    adamw_tasks,
    in_one,
    small_states,
    torch_adamw,
    update,
)
from tests.pairs import mostly, some

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STEP = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
KEY = 12345


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def clear() -> None:
    small_states._kernel.cache_clear()


def randn(numel: int, dtype: torch.dtype = F32, seed: int = 7) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=random) * torch.randn(numel, generator=random).mul(3).exp()).to(dtype)


# ---- What is meant, written in Python's own numbers. ----


def chance_of(key: int, step: int, element: int) -> tuple[int, int, int]:
    """16 bits each for the first moment, the second and the weight."""

    def mix(one: int, other: int) -> int:
        x = (element + one) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ other
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    digest = hashlib.blake2b(f"{key} {step} {element >> 32}".encode(), digest_size=16).digest()
    a, b, c, d = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12))
    return mix(a, b) & 0xFFFF, mix(a, b) >> 16, mix(c, d) & 0xFFFF


def chances(key: int, step: int, first: int, numel: int) -> torch.Tensor:
    return torch.tensor([chance_of(key, step, first + i) for i in range(numel)], dtype=torch.float64).view(-1, 3).T


def by_chance(x: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """`x` as the bfloat16 below it in magnitude, or the next if the share of the way to it plus chance reaches 1."""
    below = (x.view(torch.int32) & -65536).view(F32)
    next_up = ((x.view(torch.int32) & -65536) + 65536).view(F32)
    share = (x.double() - below.double()) / (next_up.double() - below.double())
    up = share + chance / 65536 >= 1
    rounded = torch.where(up, next_up, below)
    return torch.where(x.isfinite(), rounded, x).to(BF16)


def expected_compact(step: AdamWStep, first: int, states: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """p, m and v after one step, each in its dtype."""
    wide = [state.to(F32, copy=True) for state in states]
    torch_adamw(update.scalars_of(step), wide[0], grad.float(), wide[1], wide[2], None)
    of_m, of_v, of_p = chances(KEY, step.step, first, grad.numel())
    return [
        new if state.dtype is F32 else by_chance(new, chance)
        for state, new, chance in zip(states, wide, (of_p, of_m, of_v), strict=True)
    ]


def assert_equal(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert actual.dtype == wanted.dtype
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())
    assert same.all(), f"{what}: {(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0].item()}"


# ---- bfloat16 ----


@pytest.mark.each
@pytest.mark.parametrize("weight", [F32, BF16])
@pytest.mark.parametrize("first_moment", [F32, BF16])
@pytest.mark.parametrize("second_moment", [F32, BF16])
def test_five_steps_are_the_float32_update_rounded_by_chance(
    pool: WorkerPool, weight: torch.dtype, first_moment: torch.dtype, second_moment: torch.dtype
) -> None:
    dtypes = weight, first_moment, second_moment
    numel, first = 333, 2**32 + TILE_ELEMENTS  # a tile beyond the hash's 32 bits, and none lies across their edge
    states = [randn(numel, dtypes[0]), torch.zeros(numel, dtype=dtypes[1]), torch.zeros(numel, dtype=dtypes[2])]
    for count, grad_dtype in enumerate((F32, BF16, F16, F32, BF16), start=1):
        step = dataclasses.replace(STEP, step=count, grad_scale=0.3)
        grad = randn(numel, grad_dtype, seed=count)
        scaled = dataclasses.replace(step, grad_scale=1.0)
        wanted = expected_compact(scaled, first, states, grad.float().mul(0.3))
        copy = torch.full((numel,), 7.0, dtype=grad_dtype)
        p, m, v = states
        in_one(step, KEY, first, p, grad, m, v, copy)
        for actual, wanted_state, what in zip(states, wanted, "pmv", strict=True):
            assert_equal(actual, wanted_state, f"{what} of step {count}")
        assert_equal(copy, p.to(grad_dtype), "copy")


@pytest.mark.parametrize("copy_dtype", some([BF16, None], 2))
@pytest.mark.parametrize(("grad_dtype", "param_dtype"), mostly([F32, BF16, F16], [F32, BF16]))
def test_numba_is_what_runs_here(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, copy_dtype: torch.dtype | None
) -> None:
    assert callable(small_states._kernel((param_dtype, grad_dtype, BF16, BF16, copy_dtype)))
    assert callable(small_states._kernel((param_dtype, grad_dtype, torch.int8, F32, torch.uint8, F32, copy_dtype)))


def test_states_in_float32_are_the_ordinary_update(pool: WorkerPool) -> None:
    mine = [randn(1008, seed=seed) for seed in range(3)] + [randn(1008, seed=9).square()]
    other = [tensor.clone() for tensor in mine]
    pool.run(adamw_compact_tasks(STEP, *mine, key=KEY))
    pool.run(adamw_tasks(STEP, *other))
    assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads: int) -> None:
    pool, numel = WorkerPool(threads), TILE_ELEMENTS + 3000
    whole = [randn(numel, BF16, seed) for seed in range(3)] + [randn(numel, BF16, 9).abs()]
    other = [tensor.clone() for tensor in whole]
    pool.run(adamw_compact_tasks(STEP, *whole, key=KEY))
    in_one(STEP, KEY, 0, *other, None)
    pool.close()
    assert all(map(torch.equal, whole, other))


def test_chance_differs_by_key_step_element_and_state() -> None:
    """Every pair of streams agrees in half of the bits, as coins do; 6 sigma of 16 * 4096 coins are 1.2 %."""
    numel = 4096
    streams = {}
    for key, step, first in ((1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, numel), (1, 1, 2**32)):
        for state, values in enumerate(chances(key, step, first, numel).long()):
            streams[key, step, first, state] = torch.stack([values >> bit & 1 for bit in range(16)])
    for (name, one), (other_name, other) in itertools.combinations(streams.items(), 2):
        assert abs((one == other).double().mean() - 0.5) < 0.012, f"{name} and {other_name}"
    for name, bits in streams.items():
        assert abs(bits.double().mean() - 0.5) < 0.012, name
        assert abs((bits[:, 1:] == bits[:, :-1]).double().mean() - 0.5) < 0.012, f"neighbours of {name}"


def test_the_mean_over_keys_is_the_unrounded_update(pool: WorkerPool) -> None:
    start = [randn(64, BF16), randn(64, BF16, 2), randn(64, BF16, 3).abs()]
    grad, count = randn(64, seed=4), 400
    exact = [state.to(F32, copy=True) for state in start]
    torch_adamw(update.scalars_of(STEP), exact[0], grad, exact[1], exact[2], None)
    sums = [torch.zeros(64, dtype=torch.float64) for _ in start]
    for key in range(count):
        p, m, v = (state.clone() for state in start)
        pool.run(adamw_compact_tasks(STEP, p, grad, m, v, key=key))
        for total, state in zip(sums, (p, m, v), strict=True):
            total += state.double()
    for total, wanted in zip(sums, exact, strict=True):
        ulp = torch.maximum(wanted.abs().double(), torch.tensor(1e-30)) * 2**-7  # at least the distance of neighbours
        assert ((total / count - wanted).abs() < 5 * ulp / 2 / math.sqrt(count)).all()  # 5 sigma


def test_the_second_moment_falls_as_it_should_and_would_not_to_nearest(pool: WorkerPool) -> None:
    """b2 = 0.999 without gradients: 1000 steps leave 1/e. To nearest, nothing would ever change."""
    numel, v = 2048, torch.ones(2048, dtype=BF16)
    assert torch.equal(v.float().mul(0.999).to(BF16), v)
    p, m, grad = torch.zeros(numel), torch.zeros(numel, dtype=BF16), torch.zeros(numel)
    for count in range(1, 1001):
        pool.run(adamw_compact_tasks(dataclasses.replace(STEP, step=count), p, grad, m, v, key=KEY))
    assert v.float().mean().item() == pytest.approx(math.exp(-1), rel=0.01)


def test_extreme_values_stay_what_they_are(pool: WorkerPool) -> None:
    grad = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, torch.finfo(F32).max, 1.0])
    p, m, v = torch.ones(8, dtype=BF16), torch.zeros(8, dtype=BF16), torch.zeros(8, dtype=BF16)
    wanted = expected_compact(STEP, 0, [p, m, v], grad)
    pool.run(adamw_compact_tasks(STEP, p, grad, m, v, key=KEY))
    for actual, wanted_state in zip((p, m, v), wanted, strict=True):
        assert_equal(actual, wanted_state, "state")
    assert v[:3].isinf().tolist() == [True, True, False] and v[2].isnan()


def test_other_dtypes_of_states_are_refused() -> None:
    states = [torch.zeros(4, dtype=dtype) for dtype in (F32, F32, F16, F32)]
    with pytest.raises(AssertionError, match=r"float32 or bfloat16, got torch.float16"):
        adamw_compact_tasks(STEP, *states, key=KEY)


# ---- 8 bits ----


def make_codes(numel: int) -> tuple[Codes8Bit, Codes8Bit]:
    groups = -(-numel // GROUP_ELEMENTS)
    return (
        Codes8Bit(torch.zeros(numel, dtype=torch.int8), torch.zeros(groups)),
        Codes8Bit(torch.zeros(numel, dtype=torch.uint8), torch.zeros(groups)),
    )


def decode(moment: Codes8Bit) -> torch.Tensor:
    wide = torch.empty(moment.codes.numel())
    nearest_codes.dequantise(wide, moment.codes, moment.scales)
    return wide


def check_codes(actual: Codes8Bit, x: torch.Tensor, chance: torch.Tensor) -> None:
    """The scales are those of codes rounded to nearest; a code is x / scale + chance rounded down, within the range."""
    nearest = Codes8Bit(torch.empty_like(actual.codes), torch.empty_like(actual.scales))
    form, largest = ("snorm8", 127) if actual.codes.dtype is torch.int8 else ("unorm8", 255)
    nearest_codes.quantise(form, x, nearest.codes, nearest.scales)
    assert_equal(actual.scales, nearest.scales, "scales")
    scale = actual.scales.repeat_interleave(GROUP_ELEMENTS)[: x.numel()]
    ratio = (x / scale + (chance / 65536).float()).floor().clamp(-largest if largest == 127 else 0, largest)
    wanted = torch.where(scale > 0, ratio, 0.0)
    if largest == 255:
        wanted = torch.where((scale > 0) & (x > 0), wanted.clamp(min=1), wanted)
    assert_equal(actual.codes, wanted.to(actual.codes.dtype), "codes")
    distance = (actual.codes.int() - nearest.codes.int()).abs()
    assert distance.max() <= 1  # the neighbour at most


@pytest.mark.each
@pytest.mark.parametrize("param_dtype", [F32, BF16])
@pytest.mark.parametrize("numel", [1, GROUP_ELEMENTS, 2 * GROUP_ELEMENTS + 77])
def test_five_steps_are_the_float32_update_in_codes_by_chance(
    pool: WorkerPool, numel: int, param_dtype: torch.dtype
) -> None:
    first = 2**32 + TILE_ELEMENTS
    p, (m, root) = randn(numel, param_dtype), make_codes(numel)
    for count, grad_dtype in enumerate((F32, BF16, F16, F32, BF16), start=1):
        step = dataclasses.replace(STEP, step=count)
        grad = randn(numel, grad_dtype, seed=count)
        wide = [p.to(F32, copy=True), decode(m), decode(root).square()]
        torch_adamw(update.scalars_of(step), wide[0], grad.float(), wide[1], wide[2], None)
        copy = torch.full((numel,), 7.0, dtype=grad_dtype)
        tensors = p, grad, m.codes, m.scales, root.codes, root.scales, copy
        in_one(step, KEY, first, *tensors)
        of_m, of_v, of_p = chances(KEY, count, first, numel)
        assert_equal(p, wide[0] if param_dtype is F32 else by_chance(wide[0], of_p), "p")
        assert_equal(copy, p.to(grad_dtype), "copy")
        check_codes(m, wide[1], of_m)
        check_codes(root, wide[2].double().sqrt().float(), of_v)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_code(threads: int) -> None:
    pool, numel = WorkerPool(threads), TILE_ELEMENTS + 3000
    p, grad, (m, root) = randn(numel, BF16), randn(numel, seed=3), make_codes(numel)
    other_p, (other_m, other_root) = p.clone(), make_codes(numel)
    whole = other_p, grad, other_m.codes, other_m.scales, other_root.codes, other_root.scales
    for count in (1, 2):
        step = dataclasses.replace(STEP, step=count)
        pool.run(adamw_compact_tasks(step, p, grad, m, root, key=KEY))
        in_one(step, KEY, 0, *whole, None)
    pool.close()
    assert torch.equal(p, other_p)
    for one, other in ((m, other_m), (root, other_root)):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)


def test_a_group_with_an_infinity_is_nan_from_then_on_and_its_neighbours_are_not(pool: WorkerPool) -> None:
    numel = 3 * GROUP_ELEMENTS
    p, grad, (m, root) = torch.ones(numel), torch.ones(numel), make_codes(numel)
    grad[GROUP_ELEMENTS + 3] = math.inf
    pool.run(adamw_compact_tasks(STEP, p, grad, m, root, key=KEY))
    for moment in (m, root):
        assert decode(moment).isnan().view(3, -1).all(dim=1).tolist() == [False, True, False]
        assert decode(moment).isnan().view(3, -1).any(dim=1).tolist() == [False, True, False]


def test_zero_gradients_leave_zero_moments(pool: WorkerPool) -> None:
    p, (m, root) = torch.ones(300), make_codes(300)
    pool.run(adamw_compact_tasks(dataclasses.replace(STEP, weight_decay=0.0), p, torch.zeros(300), m, root, key=KEY))
    assert p.eq(1).all()
    assert not any(moment.codes.any() or moment.scales.any() for moment in (m, root))


def test_a_second_moment_above_zero_never_becomes_zero(pool: WorkerPool) -> None:
    """A zero under the fraction would make a step of m / eps."""
    numel = GROUP_ELEMENTS
    grad = torch.full((numel,), 1e-6)
    grad[0] = 1.0
    p, (m, root) = torch.zeros(numel), make_codes(numel)
    pool.run(adamw_compact_tasks(STEP, p, grad, m, root, key=KEY))
    assert root.codes.min() == 1


def test_a_first_moment_of_8_bits_falls_to_zero_and_would_not_to_nearest(pool: WorkerPool) -> None:
    """The group's first element keeps the scale; the others decay by 0.9 a step, which nearest stops at code 5."""
    numel = GROUP_ELEMENTS
    m, root = make_codes(numel)
    m.codes.fill_(10)
    m.codes[0], m.scales[:] = 127, 1 / 127
    p, grad = torch.zeros(numel), torch.zeros(numel)
    grad[0] = 1.0
    for count in range(1, 61):
        pool.run(adamw_compact_tasks(dataclasses.replace(STEP, step=count), p, grad, m, root, key=KEY))
    assert m.codes[0] == 127
    assert m.codes[1:].float().mean() < 0.5
    nearest = 10
    for _ in range(60):
        nearest = round(nearest * 0.9)
    assert nearest >= 4


# ---- Where there is no Numba ----


def test_small_states_without_numba_are_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    model = hetmem.manage(torch.nn.Linear(8, 8), hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
    with pytest.raises(hetmem.errors.ManageError, match="moments= and stochastic_rounding= need Numba"):
        hetmem.AdamW(model.parameters(), moments="8bit")
    clear()
