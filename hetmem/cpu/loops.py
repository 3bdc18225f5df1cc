"""The loops that Numba compiles, and the operations on single elements that they call.

They know flat numpy arrays; they must not know torch, hyper-parameters by name or threads. bfloat16 comes as uint16 and
float16 as int16: the bits.

A loop over elements keeps no state from one to the next, so that LLVM may vectorize it.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

Loop = Callable[..., Any]

GROUP = 256
"""Elements that share a scale in `adamw_8_bit`."""

LANES = 64
ROWS = 4
BLOCK = ROWS * LANES
RUN = 4096
"""`square_sums` sums RUN elements, a BLOCK at a time, in LANES partial sums. LANES and RUN as in
hetmem.cuda.kernels."""

_OPTIONS: Any = {"fastmath": False, "error_model": "numpy"}
"""Options of Numba. error_model: no check for x / 0, which would prevent vectorization."""


# ---- AdamW ----


def element(scalars: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    """Compute one element's update in float32. Scalars: see `hetmem.cpu.adamw.scalars_of`."""
    scale, decay, lerp, beta2, square, bias, eps, negative_step = scalars
    g = scale * g
    m = _fma(lerp, g - m, m if lerp > 0 else g)
    v = _fma(square * g, g, beta2 * v)
    p = p * decay + negative_step * m / (math.sqrt(v) / bias + eps)
    return p, m, v


def adamw(scalars: Any, keys: Any, first: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copy: Any) -> None:
    """Update arrays by `element`; `copy`, if not None, gets the new `param` in its own type.

    States are float32, or bfloat16 with stochastic rounding (see the note in `hetmem.cpu.small_states`), for which
    element 0 is the parameter's element `first`.
    """
    for i in range(param.size):
        state = widen(param[i]), widen(grad[i]), widen(exp_avg[i]), widen(exp_avg_sq[i])
        p, m, v = element(scalars, *state)
        noise = _mix(first + i, keys[0], keys[1])
        exp_avg[i] = _dither(m, exp_avg[i], noise)
        exp_avg_sq[i] = _dither(v, exp_avg_sq[i], _upper(noise))
        stored = _dither(p, param[i], _mix(first + i, keys[2], keys[3]))
        param[i] = stored
        if copy is not None:
            copy[i] = narrow(widen(stored), copy[i])


def adamw_tiles(scalars: Any, tiles: Any, taken: Any, grad: Any, copy: Any) -> None:
    """Update the float32 tiles that no other thread takes, one after the other, by `adamw`.

    A row of `tiles` has a row of `scalars`, a number of elements, and addresses: of the parameter, both moments, the
    gradient and the copy, which are of the types of `grad` and `copy`. `taken[0]` counts the tiles that threads have
    taken.
    """
    keys = (np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0))
    at = _take(taken)
    while at < tiles.shape[0]:
        row = tiles[at]
        s, size = scalars[row[0]], row[1]
        own = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
        param, exp_avg, exp_avg_sq = _memory(row[2], size, s), _memory(row[3], size, s), _memory(row[4], size, s)
        adamw(own, keys, 0, param, _memory(row[5], size, grad), exp_avg, exp_avg_sq, _memory(row[6], size, copy))
        at = _take(taken)


def adamw_8_bit(
    scalars: Any,
    keys: Any,
    first: Any,
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_scales: Any,
    roots: Any,
    roots_scales: Any,
    copy: Any,
) -> None:
    """Update arrays by `element`; moments are 8-bit codes, GROUP of them to a scale, the second one of its root."""
    means, deviations = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for group in range(exp_avg_scales.size):
        here = slice(group * GROUP, min((group + 1) * GROUP, param.size))
        p, g, m, r = param[here], grad[here], exp_avg[here], roots[here]
        mean_scale, root_scale = (
            exp_avg_scales[group],
            roots_scales[group],
        )  # read outside loops, as codes might alias them
        for i in range(p.size):
            means[i] = np.float32(m[i]) * mean_scale
            deviations[i] = np.float32(r[i]) * root_scale
        most_mean, most_deviation = np.int32(0), np.int32(0)
        for i in range(p.size):
            noise = _mix(first + here.start + i, keys[2], keys[3])
            new, mean, square = element(scalars, widen(p[i]), widen(g[i]), means[i], deviations[i] * deviations[i])
            means[i], deviations[i] = mean, math.sqrt(square)
            most_mean = max(most_mean, _magnitude(means[i]))
            most_deviation = max(most_deviation, _magnitude(deviations[i]))
            p[i] = _dither(new, p[i], noise)
        mean_scale, root_scale = _scale(most_mean, np.float32(127)), _scale(most_deviation, np.float32(255))
        exp_avg_scales[group], roots_scales[group] = mean_scale, root_scale
        for i in range(p.size):
            noise = _mix(first + here.start + i, keys[0], keys[1])
            m[i] = _code(means[i], mean_scale, noise, m[i])
            r[i] = _code(deviations[i], root_scale, _upper(noise), r[i])
        if copy is not None:
            c = copy[here]
            for i in range(p.size):
                c[i] = narrow(widen(p[i]), c[i])


# ---- The norm ----


def square_sums(values: Any, sums: Any) -> None:
    """Sum the squares of each RUN of `values`, widened to float32, in float64, in an order that a GPU can follow.

    Element i goes to lane i % LANES, and the lanes are added by halves: the second to the first, and so on. So the sum
    does not depend on the CPU's vectors. A square is exact: a float32 has 24 bits, a float64 53.
    """
    lanes = np.empty(LANES)
    for run in range(sums.size):
        part = values[run * RUN : min((run + 1) * RUN, values.size)]
        whole = part.size // BLOCK * BLOCK
        blocks = part[:whole].reshape(-1, ROWS, LANES)
        lanes[:] = 0.0
        for index in range(blocks.shape[0]):  # a loop over `blocks` itself is not vectorized
            _add_squares(lanes, blocks[index])
        for i in range(whole, part.size):
            x = np.float64(widen(part[i]))
            lanes[i % LANES] += x * x
        sums[run] = _by_halves(lanes)


def _add_squares(lanes: Any, block: Any) -> None:
    for lane in range(LANES):
        total = lanes[lane]
        for row in range(ROWS):
            x = np.float64(widen(block[row, lane]))
            total = _fma(x, x, total)
        lanes[lane] = total


def _by_halves(numbers: Any) -> Any:
    """Return the sum of `numbers`, which are overwritten."""
    half = numbers.size // 2
    while half > 0:
        for i in range(half):
            numbers[i] += numbers[i + half]
        half //= 2
    return numbers[0]


# ---- Operations on the bits of one element. Each step truncates to 32 bits, as vectors hold them. ----


def _widen_bfloat16(x: Any) -> Any:
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def _round_bfloat16(x: Any, like: Any) -> Any:
    """Round to nearest, ties to even; a NaN stays one."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(np.uint32(bits + odd) + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


def _mix(index: Any, key: Any, other_key: Any) -> Any:
    """Return 32 random bits that depend only on an index and two keys: a mixer after Wellons's lowbias32, with a second
    key between its two multiplications. With one key, the numbers of two keys would be one sequence at two offsets."""
    x = np.uint32(np.uint32(index) + key)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ other_key)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


def _upper(noise: Any) -> Any:
    """Return the upper 16 bits of a uint32 as the lower ones."""
    return np.uint32(noise >> np.uint32(16))


def _dither_bfloat16(x: Any, like: Any, noise: Any) -> Any:
    """Round stochastically, to the farther neighbour with the probability of its nearness: 16 random bits are added
    below the last bit kept. An infinity has none there that could carry."""
    bits = np.uint32(np.float32(x).view(np.uint32) + np.uint32(noise & np.uint32(0xFFFF)))
    return np.uint16(bits >> np.uint32(16)) if x == x else np.uint16(0x7FC0)


def _magnitude(x: Any) -> Any:
    """Return |x| of a float32 as int32 bits, which have the order of the numbers; infinities and NaNs are above all."""
    return np.int32(np.float32(x).view(np.int32) & np.int32(0x7FFF_FFFF))


def _scale(magnitude: Any, largest: Any) -> Any:
    """Return the float32 of these bits / `largest`; NaN if it is not finite."""
    finite = magnitude < np.int32(0xFF << 23)
    return np.int32(magnitude).view(np.float32) / largest if finite else np.float32(np.nan)


def _code_int8(x: Any, scale: Any, noise: Any, like: Any) -> Any:
    return np.int8(_coded(x, scale, noise, np.float32(-127), np.float32(127)))


def _code_uint8(x: Any, scale: Any, noise: Any, like: Any) -> Any:
    """Return the code of x, which is not 0 if x is above 0."""
    return np.uint8(_coded(x, scale, noise, np.float32(1) if x > 0 else np.float32(0), np.float32(255)))


def _coded(x: Any, scale: Any, noise: Any, least: Any, most: Any) -> Any:
    """Return x / scale + 16 random bits as a fraction, rounded down and clamped; 0 if the scale is 0 or NaN."""
    fraction = np.float32(np.int32(noise & np.uint32(0xFFFF))) * np.float32(2.0**-16)
    code = np.floor(x / scale + fraction)
    code = code if code < most else most
    code = code if code > least else least
    return np.int32(code if scale > 0 else np.float32(0))


# ---- Operations by the types of their arguments, in compiled code only: `_teach_numba` defines them. ----


def _fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in float32 or float64, rounded once."""
    raise NotImplementedError


def widen(x: Any) -> Any:
    """Return a float32 as it is, or the bits of a bfloat16 (uint16) or float16 (int16) as a float32."""
    raise NotImplementedError


def narrow(x: Any, like: Any) -> Any:
    """Round a float32 to the type of `like`, whose value is not used: to nearest, ties to even; a NaN stays one."""
    raise NotImplementedError


def _dither(x: Any, like: Any, noise: Any) -> Any:
    """Round a float32 stochastically to bfloat16, or return it as it is, by the type of `like`."""
    raise NotImplementedError


def _code(x: Any, scale: Any, noise: Any, like: Any) -> Any:
    """Return `_coded` in the type of `like`, int8 or uint8."""
    raise NotImplementedError


def _take(taken: Any) -> Any:
    """Add 1 to `taken[0]`, an int64, in one step for all threads; return the number before."""
    raise NotImplementedError


def _memory(address: Any, size: Any, like: Any) -> Any:
    """Return `size` elements at `address` as an array of the type of elements of `like`; None if that is None."""
    raise NotImplementedError


@cache
def _teach_numba() -> None:
    """Register with Numba the operations above, in Python or LLVM's terms, and let it inline what loops call."""
    from llvmlite import ir
    from numba import types
    from numba.extending import lower_builtin, register_jitable, type_callable
    from numba.np.arrayobj import make_array, populate_array

    f64, f32, bf16, f16 = types.float64, types.float32, types.uint16, types.int16
    half = ir.HalfType()

    def python(function: Loop) -> Any:
        return lambda context, build, sig, args: context.compile_internal(build, function, sig, args)

    def fma(context: Any, build: Any, sig: Any, args: Any) -> Any:
        return build.fma(*args)

    def as_it_is(context: Any, build: Any, sig: Any, args: Any) -> Any:
        return args[0]

    def widen_float16(context: Any, build: Any, sig: Any, args: Any) -> Any:
        _need_float16()
        return build.fpext(build.bitcast(args[0], half), ir.FloatType())

    def round_float16(context: Any, build: Any, sig: Any, args: Any) -> Any:
        _need_float16()
        return build.bitcast(build.fptrunc(args[0], half), ir.IntType(16))

    def take(context: Any, build: Any, sig: Any, args: Any) -> Any:
        counter = make_array(sig.args[0])(context, build, args[0]).data
        return build.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    def memory(context: Any, build: Any, sig: Any, args: Any) -> Any:
        address, size, _ = args
        of, element = sig.return_type, context.get_data_type(sig.return_type.dtype)
        array, itemsize = make_array(of)(context, build), ir.Constant(ir.IntType(64), context.get_abi_sizeof(element))
        pointer = build.inttoptr(address, element.as_pointer())
        populate_array(array, data=pointer, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None)
        return array._getvalue()

    def no_memory(context: Any, build: Any, sig: Any, args: Any) -> Any:
        return context.get_dummy_value()

    def type_of_memory(context: Any) -> Any:
        return lambda address, size, like: like if like is types.none else types.Array(like.dtype, 1, "C")

    type_callable(_take)(lambda context: lambda taken: types.int64)
    type_callable(_memory)(type_of_memory)
    type_callable(_fma)(lambda context: lambda a, b, c: c)
    type_callable(widen)(lambda context: lambda x: f32)
    type_callable(narrow)(lambda context: lambda x, like: like)
    type_callable(_dither)(lambda context: lambda x, like, noise: like)
    type_callable(_code)(lambda context: lambda x, scale, noise, like: like)
    for operation, operands, lower in (
        (_fma, (f32, f32, f32), fma),
        (_fma, (f64, f64, f64), fma),
        (widen, (f32,), as_it_is),
        (widen, (bf16,), python(_widen_bfloat16)),
        (widen, (f16,), widen_float16),
        (narrow, (f32, f32), as_it_is),
        (narrow, (f32, bf16), python(_round_bfloat16)),
        (narrow, (f32, f16), round_float16),
        (_dither, (f32, f32, types.uint32), as_it_is),
        (_dither, (f32, bf16, types.uint32), python(_dither_bfloat16)),
        (_code, (f32, f32, types.uint32, types.int8), python(_code_int8)),
        (_code, (f32, f32, types.uint32, types.uint8), python(_code_uint8)),
        (_take, (types.Array,), take),
        (_memory, (types.Integer, types.Integer, types.Array), memory),
        (_memory, (types.Integer, types.Integer, types.NoneType), no_memory),
    ):
        lower_builtin(operation, *operands)(lower)
    for function in (element, adamw, _add_squares, _by_halves, _mix, _upper, _magnitude, _scale, _coded):
        register_jitable(**_OPTIONS)(function)


@cache
def _need_float16() -> None:
    """Raise NotImplementedError, so that torch does the work, for CPUs without casts to and from float16: there LLVM's
    casts become calls of library functions, which are not linked."""
    from llvmlite.binding import get_host_cpu_features
    from numba import config

    configured = config.CPU_NAME is not None or config.CPU_FEATURES is not None  # for unknown features
    if configured or not (platform.machine() == "aarch64" or get_host_cpu_features().get("f16c")):
        raise NotImplementedError("this CPU has no casts of float16")


_lock = threading.Lock()


@contextmanager
def compiling() -> Iterator[None]:
    """Let one thread compile at a time. Prints a line to stderr if that takes over a second, as may Numba's import and
    reading its cache."""
    with _lock:
        line = ["hetmem: preparing the host optimizer (it is compiled the first time, and kept) …"]
        timer = threading.Timer(1.0, print, line, {"file": sys.stderr, "flush": True})
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def compile_loop(loop: Loop) -> Loop:
    """Return `loop` as machine code, compiled for each combination of types when first called with it, and cached on
    disk.

    Raises whatever Numba raises; ImportError without it.
    """
    from numba import njit

    _teach_numba()
    try:
        compiled: Loop = njit(cache=True, nogil=True, **_OPTIONS)(loop)
    except RuntimeError:  # neither the package's directory nor the user's cache can be written
        compiled = njit(nogil=True, **_OPTIONS)(loop)
    return compiled


def verified(loop: Loop, gives_torchs_bits: Callable[[Loop], bool]) -> Loop | str:
    """Return `loop` compiled, if it `gives_torchs_bits`, else the reason why torch must do its work, with the same
    bits."""
    try:
        with compiling():
            compiled = compile_loop(loop)
            return compiled if gives_torchs_bits(compiled) else "this build of torch rounds differently"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
