"""AdamW on host memory: one pass over parameter, gradient and moments, bit for bit torch's fused one.

It knows flat tensors and a thread pool; it must not know chunks, parameters or where the memory comes from.

The reference is `torch.optim.AdamW(fused=True)` on the CPU. Its kernel computes, in the parameter's dtype,

    m = fma(1 - b1, g - m, m)        v = fma((1 - b2) * g, g, b2 * v)
    p = p * (1 - lr * wd) + (-lr / bc1 * m) / (sqrt(v) / sqrt(bc2) + eps)        bc = 1 - b ** step

with scalars made in fp64 and rounded once. The loops below say the same in Python; Numba compiles them on first use.
Each compiled loop is compared with torch before it may touch real memory: where it cannot be built, or torch was
built without fma and rounds otherwise, torch's own kernel runs instead, with the same bits and more passes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetmem.units import round_down

if TYPE_CHECKING:
    from hetmem.optim.workers import WorkerPool

TILE_ELEMENTS = 512 * 1024
# torch rounds v differently in the elements after the last full SIMD vector. Vectors have at most 16 float32, and
# every width divides 16, so torch's kernel treats the last `numel % 16` elements alike alone and within the whole.
_WIDEST_VECTOR = 16

_Array = np.ndarray[Any, Any]
_Loop = Callable[..., None]


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The hyper-parameters of one update, as `torch.optim.AdamW` names them; `step` is the one being made, from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False


def adamw(
    pool: WorkerPool,
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place; write `param`, rounded, to `compute_copy` if given.

    All are 1-D, contiguous, on the CPU and of one length. The moments have the dtype of `param`; `grad` and
    `compute_copy` may have any floating dtype. float32 with a float32 or bfloat16 gradient and a bfloat16 or float16
    copy runs in one pass; everything else takes torch's kernel. The results equal `torch.optim.AdamW(fused=True)`
    with `grad.to(param.dtype)`, and `param.to(compute_copy.dtype)`, bit for bit (a NaN is a NaN of any payload).
    Blocks the caller until all is written. May be called from several threads on different memory.
    """
    _check(param, grad, exp_avg, exp_avg_sq, compute_copy)
    copy_dtype = None if compute_copy is None else compute_copy.dtype
    loop = _verified_loop(param.dtype, grad.dtype, copy_dtype)
    if isinstance(loop, str):
        _adamw_torch(step, param, grad, exp_avg, exp_avg_sq, compute_copy)
        return
    tensors = [param, grad, exp_avg, exp_avg_sq] + ([] if compute_copy is None else [compute_copy])
    body = round_down(param.numel(), _WIDEST_VECTOR)
    if body > 0:
        _run_tiles(pool, partial(loop, _scalars(step)), [_as_array(tensor)[:body] for tensor in tensors])
    if body < param.numel():
        _adamw_torch(step, *(tensor[body:] for tensor in tensors))


def adamw_on_device(
    step: AdamWStep,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
) -> None:
    """`adamw` of tensors on a GPU, in a few launches, with the bits of `torch.optim.AdamW(fused=True)` there."""
    steps = [torch.full((), float(step.step), dtype=torch.float32, device=params[0].device)] * len(params)
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        lr=step.lr, beta1=step.beta1, beta2=step.beta2, weight_decay=step.weight_decay, eps=step.eps,
        amsgrad=False, maximize=step.maximize,
    )  # fmt: skip


def kernel_name() -> str:
    """What updates float32 parameters here: "numba", or "torch" and why. Compiles the kernel if that is still due."""
    loop = _verified_loop(torch.float32, torch.float32, None)
    return f"torch ({loop})" if isinstance(loop, str) else "numba"


def _check(param: torch.Tensor, grad: torch.Tensor, *others: torch.Tensor | None) -> None:
    for tensor in (param, grad, *others):
        if tensor is not None:
            assert tensor.device.type == "cpu", f"host memory only, got {tensor.device}"
            assert tensor.stride() == (1,), f"flat memory only, got {tuple(tensor.shape)}, strides {tensor.stride()}"
            assert tensor.numel() == param.numel(), f"{tensor.numel()} elements beside {param.numel()} parameters"


def _run_tiles(pool: WorkerPool, loop: _Loop, arrays: Sequence[_Array]) -> None:
    """Run `loop` over all of `arrays`: one tile in the caller, several on the pool."""
    numel = arrays[0].size
    if numel <= TILE_ELEMENTS:
        loop(*arrays)
        return
    tiles = (slice(start, start + TILE_ELEMENTS) for start in range(0, numel, TILE_ELEMENTS))
    pool.run([partial(loop, *(array[tile] for array in arrays)) for tile in tiles])


def _as_array(tensor: torch.Tensor) -> _Array:
    """The memory of `tensor` as numpy sees it; 16-bit floats as their bits."""
    tensor = tensor.detach()
    return tensor.numpy() if tensor.itemsize > 2 else tensor.view(torch.int16).numpy().view(np.uint16)


@lru_cache(maxsize=16)  # one step updates many tensors
def _scalars(step: AdamWStep) -> tuple[np.float32, ...]:
    """The loops' scalars, each rounded to float32 where torch rounds it."""
    lerp = np.float32(1 - step.beta1)
    return (
        np.float32(-1 if step.maximize else 1),
        # torch's compiler contracts this to one fma: exact until the one rounding to float64.
        np.float32(float(1 - Fraction(step.lr) * Fraction(step.weight_decay))),
        # lerp interpolates from its nearer end: from m below a weight of 1/2, else back from g (a weight <= 0).
        lerp if lerp < 0.5 else lerp - np.float32(1),
        np.float32(step.beta2),
        np.float32(1 - step.beta2),
        np.float32(math.sqrt(1 - step.beta2**step.step)),
        np.float32(step.eps),
        np.float32(-(step.lr / (1 - step.beta1**step.step))),
    )


# ---- The loops: Python here, machine code after `_compile`. ----


def _element(scalars: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    sign, decay, lerp, beta2, square, bias, eps, negative_step = scalars
    g = sign * g
    m = _fma(lerp, g - m, m if lerp > 0 else g)
    v = _fma(square * g, g, beta2 * v)
    p = p * decay + negative_step * m / (math.sqrt(v) / bias + eps)
    return p, m, v


def _loop_no_copy(scalars: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any) -> None:
    for i in range(param.size):
        param[i], exp_avg[i], exp_avg_sq[i] = _element(scalars, param[i], _widen(grad[i]), exp_avg[i], exp_avg_sq[i])


def _loop_bfloat16(scalars: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copy: Any) -> None:
    for i in range(param.size):
        p, exp_avg[i], exp_avg_sq[i] = _element(scalars, param[i], _widen(grad[i]), exp_avg[i], exp_avg_sq[i])
        param[i] = p
        copy[i] = _round_bfloat16(p)


def _loop_float16(scalars: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copy: Any) -> None:
    for i in range(param.size):
        p, exp_avg[i], exp_avg_sq[i] = _element(scalars, param[i], _widen(grad[i]), exp_avg[i], exp_avg_sq[i])
        param[i] = p
        copy[i] = _round_float16(p)


_LOOPS: dict[torch.dtype | None, _Loop] = {
    None: _loop_no_copy,
    torch.bfloat16: _loop_bfloat16,
    torch.float16: _loop_float16,
}


# Operations that Python lacks. Only compiled code calls them: `_teach_numba` says what they are in LLVM.


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once."""
    raise NotImplementedError


def _widen(x: Any) -> Any:
    """A float32 as it is, or the bits of a bfloat16 as a float32."""
    raise NotImplementedError


def _round_bfloat16(x: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32, ties to even; a NaN stays one."""
    raise NotImplementedError


def _round_float16(x: Any) -> Any:
    """The bits of the float16 nearest to a float32, ties to even; a NaN stays one."""
    raise NotImplementedError


@cache
def _teach_numba() -> None:
    """Give Numba the signature and the LLVM code of the operations above, and leave to inline `_element`."""
    from numba import types
    from numba.extending import lower_builtin, register_jitable, type_callable

    f32, u16 = types.float32, types.uint16
    type_callable(_fma)(lambda context: lambda a, b, c: f32)
    type_callable(_widen)(lambda context: lambda x: f32)
    type_callable(_round_bfloat16)(lambda context: lambda x: u16)
    type_callable(_round_float16)(lambda context: lambda x: u16)
    for operation, operands, emit in (
        (_fma, (f32, f32, f32), lambda build, a, b, c: build.fma(a, b, c)),
        (_widen, (f32,), lambda build, x: x),
        (_widen, (u16,), _widen_bfloat16_llvm),
        (_round_bfloat16, (f32,), _round_bfloat16_llvm),
        (_round_float16, (f32,), _round_float16_llvm),
    ):
        lower_builtin(operation, *operands)(lambda context, build, sig, args, emit=emit: emit(build, *args))
    register_jitable(_element)


# LLVM's own casts between these types call library functions on CPUs without F16C, which nothing links: bits, then.


def _widen_bfloat16_llvm(build: Any, x: Any) -> Any:
    from llvmlite import ir

    i32 = ir.IntType(32)
    return build.bitcast(build.shl(build.zext(x, i32), i32(16)), ir.FloatType())


def _round_bfloat16_llvm(build: Any, x: Any) -> Any:
    from llvmlite import ir

    i16, i32 = ir.IntType(16), ir.IntType(32)
    bits = build.bitcast(x, i32)
    odd = build.and_(build.lshr(bits, i32(16)), i32(1))
    rounded = build.lshr(build.add(bits, build.add(odd, i32(0x7FFF))), i32(16))
    return build.trunc(build.select(build.fcmp_unordered("uno", x, x), i32(0x7FC0), rounded), i16)


def _round_float16_llvm(build: Any, x: Any) -> Any:
    from llvmlite import ir

    i16, i32, f32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
    bits = build.bitcast(x, i32)
    magnitude = build.and_(bits, i32(0x7FFF_FFFF))
    odd = build.and_(build.lshr(magnitude, i32(13)), i32(1))
    rebias = i32(((15 - 127) << 23) + 0xFFF)
    normal = build.lshr(build.add(build.add(magnitude, rebias), odd), i32(13))
    # The least bit of 0.5 weighs 2**-24, as a float16 subnormal's does: the addition rounds to it.
    subnormal = build.sub(build.bitcast(build.fadd(build.bitcast(magnitude, f32), f32(0.5)), i32), i32(126 << 23))
    special = build.select(build.fcmp_unordered("uno", x, x), i32(0x7E00), i32(0x7C00))
    finite = build.select(build.icmp_unsigned("<", magnitude, i32((127 - 14) << 23)), subnormal, normal)
    rounded = build.select(build.icmp_unsigned("<", magnitude, i32((127 + 16) << 23)), finite, special)
    sign = build.and_(build.lshr(bits, i32(16)), i32(0x8000))
    return build.trunc(build.or_(sign, rounded), i16)


def _compile(loop: _Loop) -> _Loop:
    from numba import njit

    _teach_numba()
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}  # error_model: no check for x / 0, so SIMD
    try:
        compiled: _Loop = njit(cache=True, **options)(loop)
    except RuntimeError:  # neither the package's directory nor the user's cache can be written
        compiled = njit(**options)(loop)
    return compiled


# ---- The choice between the two, and torch's kernel. ----

_compile_lock = threading.Lock()


@cache
def _verified_loop(param: torch.dtype, grad: torch.dtype, compute_copy: torch.dtype | None) -> _Loop | str:
    """The compiled loop for these dtypes once it has given torch's bits, or why torch's kernel must run."""
    if param != torch.float32 or grad not in (torch.float32, torch.bfloat16) or compute_copy not in _LOOPS:
        return f"no loop for {param}, {grad}, {compute_copy}"
    try:
        with _compile_lock:
            loop = _compile(_LOOPS[compute_copy])
            return loop if _equals_torch(loop, grad, compute_copy) else "this build of torch rounds differently"
    except Exception as error:  # whatever Numba raises, the other kernel gives the same bits
        return f"{type(error).__name__}: {error}"


def _equals_torch(loop: _Loop, grad_dtype: torch.dtype, copy_dtype: torch.dtype | None) -> bool:
    """Whether `loop` and torch's kernel agree in every bit on a thousand elements."""
    step = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
    angles = torch.linspace(0, 700, 1024, dtype=torch.float64, device="cpu")
    param, grad, exp_avg, exp_avg_sq = (angles.add(shift).sin().float() for shift in range(4))
    tensors = [param, grad.to(grad_dtype), exp_avg, exp_avg_sq.square()]
    if copy_dtype is not None:
        tensors.append(torch.empty_like(param, dtype=copy_dtype))
    expected = [tensor.clone() for tensor in tensors]
    _adamw_torch(step, *expected)
    loop(_scalars(step), *(_as_array(tensor) for tensor in tensors))
    return all(map(torch.equal, tensors, expected))


def _adamw_torch(
    step: AdamWStep,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute_copy: torch.Tensor | None = None,
) -> None:
    """`adamw` by torch's fused kernel, on torch's own threads; in tiles, so that the casts stay in the cache."""
    steps = [torch.tensor(float(step.step), dtype=torch.float32, device="cpu")]
    for start in range(0, param.numel(), TILE_ELEMENTS):
        tile = slice(start, start + TILE_ELEMENTS)
        p, m, v = (tensor.detach()[tile] for tensor in (param, exp_avg, exp_avg_sq))
        g = grad.detach()[tile].to(p.dtype)
        torch._fused_adamw_(
            [p], [g], [m], [v], [], steps,
            lr=step.lr, beta1=step.beta1, beta2=step.beta2, weight_decay=step.weight_decay, eps=step.eps,
            amsgrad=False, maximize=step.maximize,
        )  # fmt: skip
        if compute_copy is not None:
            compute_copy.detach()[tile].copy_(p)
