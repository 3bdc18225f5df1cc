"""Operations of the loops in LLVM's own terms: on one element here, on a vector of them after LLVM's vectoriser.

It must not know what they are used for. Importing it needs llvmlite, which comes with Numba.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

from llvmlite import ir

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


@cache
def _need_float16() -> None:
    """Raise NotImplementedError, so that torch does the work, where code is made for CPUs that do not cast to and from
    float16: LLVM's casts become calls of library functions there, which nothing links."""
    from llvmlite.binding import get_host_cpu_features
    from numba import config

    by_hand = config.CPU_NAME is not None or config.CPU_FEATURES is not None  # then it is unknown
    if by_hand or not (platform.machine() == "aarch64" or get_host_cpu_features().get("f16c")):
        raise NotImplementedError("this CPU has no casts of float16")


def widen_bfloat16(build: Any, x: Any) -> Any:
    return build.bitcast(build.shl(build.zext(x, _I32), _I32(16)), _F32)


def widen_float16(build: Any, x: Any) -> Any:
    _need_float16()
    return build.fpext(build.bitcast(x, ir.HalfType()), _F32)


def round_bfloat16(build: Any, x: Any, like: Any) -> Any:
    bits = build.bitcast(x, _I32)
    odd = build.and_(build.lshr(bits, _I32(16)), _I32(1))
    rounded = build.lshr(build.add(bits, build.add(odd, _I32(0x7FFF))), _I32(16))
    return build.trunc(build.select(build.fcmp_unordered("uno", x, x), _I32(0x7FC0), rounded), _I16)


def round_float16(build: Any, x: Any, like: Any) -> Any:
    _need_float16()
    return build.bitcast(build.fptrunc(x, ir.HalfType()), _I16)


def mix(build: Any, index: Any, key: Any, other_key: Any) -> Any:
    """A mixer of 32 bits after Wellons's lowbias32, with a second key between its two multiplications.

    With one key only, the numbers of two keys would be one sequence seen from two places.
    """
    x = build.add(build.trunc(index, _I32), key)
    x = build.mul(build.xor(x, build.lshr(x, _I32(16))), _I32(0x7FEB352D))
    x = build.xor(x, other_key)
    x = build.mul(build.xor(x, build.lshr(x, _I32(15))), _I32(0x846CA68B))
    return build.xor(x, build.lshr(x, _I32(16)))


def upper(build: Any, chance: Any) -> Any:
    return build.lshr(chance, _I32(16))


def dither_bfloat16(build: Any, x: Any, like: Any, chance: Any) -> Any:
    bits = build.add(build.bitcast(x, _I32), build.and_(chance, _I32(0xFFFF)))
    rounded = build.lshr(bits, _I32(16))  # an infinity has no bits below that could carry
    return build.trunc(build.select(build.fcmp_unordered("uno", x, x), _I32(0x7FC0), rounded), _I16)


def magnitude(build: Any, x: Any) -> Any:
    return build.and_(build.bitcast(x, _I32), _I32(0x7FFF_FFFF))


def scale(build: Any, bits: Any, largest: Any) -> Any:
    finite = build.icmp_unsigned("<", bits, _I32(0xFF << 23))
    return build.select(finite, build.fdiv(build.bitcast(bits, _F32), largest), _F32(float("nan")))


def code_int8(build: Any, x: Any, scale: Any, chance: Any, like: Any) -> Any:
    return _code(build, x, scale, chance, _F32(-127.0), _F32(127.0))


def code_uint8(build: Any, x: Any, scale: Any, chance: Any, like: Any) -> Any:
    least = build.select(build.fcmp_ordered(">", x, _F32(0.0)), _F32(1.0), _F32(0.0))
    return _code(build, x, scale, chance, least, _F32(255.0))


def _code(build: Any, x: Any, scale: Any, chance: Any, least: Any, most: Any) -> Any:
    usable = build.fcmp_ordered(">", scale, _F32(0.0))
    fraction = build.fmul(build.uitofp(build.and_(chance, _I32(0xFFFF)), _F32), _F32(2.0**-16))
    shifted = build.fadd(build.fdiv(x, scale), fraction)
    floor = build.module.declare_intrinsic("llvm.floor", [_F32])
    code = build.call(floor, [shifted])
    code = build.select(build.fcmp_ordered("<", code, most), code, most)
    code = build.select(build.fcmp_ordered(">", code, least), code, least)
    return build.trunc(build.fptosi(build.select(usable, code, _F32(0.0)), _I32), _I8)


def prefetch(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
    """For reading, into the nearest cache."""
    array, index = arguments
    data = context.make_array(signature.args[0])(context, build, array).data
    address = build.bitcast(build.gep(data, [index]), _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, _I32, _I32, _I32])
    function = build.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
    build.call(function, [address, _I32(0), _I32(3), _I32(1)])
    return context.get_dummy_value()
