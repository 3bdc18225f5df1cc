"""The loops that Numba compiles, and the operations among them that only LLVM can say.

They know flat numpy arrays; they must not know torch, hyper-parameters by name or threads. All in one file: Numba's
cache on disk notices a change of the loop's own file only. bfloat16 comes as uint16 and float16 as int16: the bits.

A loop over elements keeps no state from one to the next, so that LLVM may take as many at once as the CPU can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Loop = Callable[..., Any]

LANES = 64
ROWS = 4
BLOCK = ROWS * LANES
"""`square_sum` adds up in LANES sums, a BLOCK at a time."""


# ---- AdamW ----


def element(scalars: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    """One element's update in float32. Scalars: see `hetmem.optim.kernels.update.scalars_of`."""
    scale, decay, lerp, beta2, square, bias, eps, negative_step = scalars
    g = scale * g
    m = _fma(lerp, g - m, m if lerp > 0 else g)
    v = _fma(square * g, g, beta2 * v)
    p = p * decay + negative_step * m / (math.sqrt(v) / bias + eps)
    return p, m, v


def adamw(scalars: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copy: Any) -> None:
    """`element` over arrays; `copy`, if not None, takes the new `param` in its own type."""
    for i in range(param.size):
        p, m, v = element(scalars, param[i], _widen(grad[i]), exp_avg[i], exp_avg_sq[i])
        param[i], exp_avg[i], exp_avg_sq[i] = p, m, v
        if copy is not None:
            copy[i] = _narrow(p, copy[i])


# ---- The norm ----


def square_sum(values: Any) -> Any:
    """The sum of squares of float32 in float64: element i goes to lane i % LANES, and the lanes are added in order.

    So it is the same sum whatever the CPU's vectors hold. A square is exact: a float32 has 24 bits, a float64 53.
    """
    lanes = np.zeros(LANES)
    whole = values.size // BLOCK * BLOCK
    blocks = values[:whole].reshape(-1, ROWS, LANES)
    for index in range(blocks.shape[0]):
        _add_squares(lanes, blocks[index])
    return _add_lanes(lanes, values[whole:])


def square_sum_16_bits(values: Any) -> Any:
    """`square_sum` of bfloat16 or float16. LLVM widens a block at a time faster than element by element."""
    lanes, wide = np.zeros(LANES), np.empty((ROWS, LANES), np.float32)
    whole = values.size // BLOCK * BLOCK
    blocks = values[:whole].reshape(-1, ROWS, LANES)
    for index in range(blocks.shape[0]):
        for row in range(ROWS):
            for lane in range(LANES):
                wide[row, lane] = _widen(blocks[index, row, lane])
        _add_squares(lanes, wide)
    return _add_lanes(lanes, values[whole:])


def _add_squares(lanes: Any, block: Any) -> None:
    for lane in range(LANES):
        total = lanes[lane]
        for row in range(ROWS):
            x = np.float64(block[row, lane])
            total = _fma(x, x, total)
        lanes[lane] = total


def _add_lanes(lanes: Any, rest: Any) -> Any:
    for i in range(rest.size):
        x = np.float64(_widen(rest[i]))
        lanes[i % LANES] += x * x
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total


# ---- Operations that Python lacks. Only compiled code calls them: `_teach_numba` says what they are in LLVM. ----


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 or float64, rounded once."""
    raise NotImplementedError


def _widen(x: Any) -> Any:
    """A float32 as it is, or the bits of a bfloat16 (uint16) or float16 (int16) as a float32."""
    raise NotImplementedError


def _narrow(x: Any, like: Any) -> Any:
    """A float32 rounded to the type of `like`, of which no more is used: to nearest, ties to even; a NaN stays one."""
    raise NotImplementedError


@cache
def _teach_numba() -> None:
    """Give Numba the signature and the LLVM code of the operations above, and leave to inline what loops call."""
    from numba import types
    from numba.extending import lower_builtin, register_jitable, type_callable

    f64, f32, bf16, f16 = types.float64, types.float32, types.uint16, types.int16
    type_callable(_fma)(lambda context: lambda a, b, c: c)
    type_callable(_widen)(lambda context: lambda x: f32)
    type_callable(_narrow)(lambda context: lambda x, like: like)
    for operation, operands, emit in (
        (_fma, (f32, f32, f32), lambda build, a, b, c: build.fma(a, b, c)),
        (_fma, (f64, f64, f64), lambda build, a, b, c: build.fma(a, b, c)),
        (_widen, (f32,), lambda build, x: x),
        (_widen, (bf16,), _widen_bfloat16_llvm),
        (_widen, (f16,), _widen_float16_llvm),
        (_narrow, (f32, f32), lambda build, x, like: x),
        (_narrow, (f32, bf16), _round_bfloat16_llvm),
        (_narrow, (f32, f16), _round_float16_llvm),
    ):
        lower_builtin(operation, *operands)(lambda context, build, sig, args, emit=emit: emit(build, *args))
    for function in (element, _add_squares, _add_lanes):
        register_jitable(function)


@cache
def _has_f16c() -> bool:
    """Whether code is made for CPUs with F16C. Without it LLVM's casts to and from float16 are calls of library
    functions that nothing links; with a target set by hand nobody can tell."""
    from llvmlite.binding import get_host_cpu_features
    from numba import config

    by_hand = config.CPU_NAME is not None or config.CPU_FEATURES is not None
    return not by_hand and bool(get_host_cpu_features().get("f16c"))


def _widen_bfloat16_llvm(build: Any, x: Any) -> Any:
    from llvmlite import ir

    i32 = ir.IntType(32)
    return build.bitcast(build.shl(build.zext(x, i32), i32(16)), ir.FloatType())


def _widen_float16_llvm(build: Any, x: Any) -> Any:
    from llvmlite import ir

    i32, f32 = ir.IntType(32), ir.FloatType()
    if _has_f16c():
        return build.fpext(build.bitcast(x, ir.HalfType()), f32)
    bits = build.zext(x, i32)
    magnitude = build.shl(build.and_(bits, i32(0x7FFF)), i32(13))
    normal = build.add(magnitude, i32((127 - 15) << 23))
    # A subnormal is a fraction of 2**-14 without the leading 1: put one there, and take it away again.
    one = build.bitcast(build.add(magnitude, i32(113 << 23)), f32)
    subnormal = build.bitcast(build.fsub(one, build.bitcast(i32(113 << 23), f32)), i32)
    special = build.or_(magnitude, i32(0xFF << 23))
    finite = build.select(build.icmp_unsigned("<", magnitude, i32(1 << 23)), subnormal, normal)
    wide = build.select(build.icmp_unsigned("<", magnitude, i32(31 << 23)), finite, special)
    return build.bitcast(build.or_(wide, build.shl(build.and_(bits, i32(0x8000)), i32(16))), f32)


def _round_bfloat16_llvm(build: Any, x: Any, like: Any) -> Any:
    from llvmlite import ir

    i16, i32 = ir.IntType(16), ir.IntType(32)
    bits = build.bitcast(x, i32)
    odd = build.and_(build.lshr(bits, i32(16)), i32(1))
    rounded = build.lshr(build.add(bits, build.add(odd, i32(0x7FFF))), i32(16))
    return build.trunc(build.select(build.fcmp_unordered("uno", x, x), i32(0x7FC0), rounded), i16)


def _round_float16_llvm(build: Any, x: Any, like: Any) -> Any:
    from llvmlite import ir

    i16, i32, f32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
    if _has_f16c():
        return build.bitcast(build.fptrunc(x, ir.HalfType()), i16)
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


def compile_loop(loop: Loop) -> Loop:
    """`loop` as machine code, compiled for each kind of arguments when first called with it, and kept on disk.

    Raises whatever Numba raises; ImportError without it.
    """
    from numba import njit

    _teach_numba()
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}  # error_model: no check for x / 0, so SIMD
    try:
        compiled: Loop = njit(cache=True, **options)(loop)
    except RuntimeError:  # neither the package's directory nor the user's cache can be written
        compiled = njit(**options)(loop)
    return compiled
