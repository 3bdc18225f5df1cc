"""The loops, compiled by Numba, that decode quantised weights in host memory: each decodes one run of elements.

They know flat arrays and no torch. Each gets the codes and scales of its elements (see `Coding.scales_of`), the number
`first` of the first one in the weight, and writes float32, bfloat16 (as uint16) or float16 (as int16).

Note "byte shuffles": sixteen values of 16 bits are two registers, of their low and of their high bytes, and SSSE3's
byte shuffle looks up sixteen codes in a register at once: three times as fast as loads from a table. No function
with array arguments is called for such a block, as that would count references. (One that is called for a row or tile
makes its loop one that LLVM vectorizes.)
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import numpy as np

from hetmem.cpu.loops import Loop, compile_loop, narrow
from hetmem.schedule.formats import FP8_TILE, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK

_UNIT = np.float32(1 / 127)


def nf4(table: Any, codes: Any, scales: Any, out: Any) -> None:
    """Decode nf4: `table` has its 16 values."""
    whole = out.size // NF4_BLOCK if _has_shuffles(out) else 0
    for block in range(whole):
        _nf4_block(table, scales[block], codes, out, block)
    for i in range(whole * NF4_BLOCK, out.size):
        out[i] = narrow(table[codes[i // 2] >> (4 - i % 2 * 4) & 15] * scales[i // NF4_BLOCK], out[i])


def nested(first: Any, table: Any, dynamic: Any, codes: Any, scales: Any, levels: Any, out: Any) -> None:
    """Decode nf4-nested: `dynamic` has the 256 values of scales, `levels` the offset and their scales."""
    before, whole = first // NF4_BLOCK, out.size // NF4_BLOCK if _has_shuffles(out) else 0
    for block in range(whole):
        scale = dynamic[scales[block]] * levels[1 + (before + block) // NESTED_BLOCK] + levels[0]
        _nf4_block(table, scale, codes, out, block)
    for i in range(whole * NF4_BLOCK, out.size):
        block = i // NF4_BLOCK
        scale = dynamic[scales[block]] * levels[1 + (before + block) // NESTED_BLOCK] + levels[0]
        out[i] = narrow(table[codes[i // 2] >> (4 - i % 2 * 4) & 15] * scale, out[i])


def mxfp4(table: Any, codes: Any, scales: Any, out: Any) -> None:
    """Decode mxfp4: `table` has the 16 values of E2M1. As a float32, 2 ** -127 has no exponent."""
    whole = out.size // MX_BLOCK if _has_shuffles(out) else 0
    for block in range(whole):
        bits = max(np.uint32(np.uint32(scales[block]) << np.uint32(23)), np.uint32(1 << 22))
        _mxfp4_block(table, np.uint32(bits).view(np.float32), codes, out, block)
    for i in range(whole * MX_BLOCK, out.size):
        bits = max(np.uint32(np.uint32(scales[i // MX_BLOCK]) << np.uint32(23)), np.uint32(1 << 22))
        out[i] = narrow(table[codes[i // 2] >> (i % 2 * 4) & 15] * np.uint32(bits).view(np.float32), out[i])


def fp8(first: Any, rows: Any, columns: Any, codes: Any, scales: Any, out: Any) -> None:
    """Decode fp8, a part of a row in one tile at a time."""
    down, across = (rows + FP8_TILE - 1) // FP8_TILE, (columns + FP8_TILE - 1) // FP8_TILE
    at = 0
    while at < out.size:
        row, column = (first + at) // columns, (first + at) % columns
        scale = scales[(row // rows * down + row % rows // FP8_TILE) * across + column // FP8_TILE]
        count = min(FP8_TILE - column % FP8_TILE, columns - column, out.size - at)
        _scaled_fp8(codes[at : at + count], scale, out[at : at + count])
        at += count


def _scaled_fp8(codes: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        code = np.uint32(codes[i])
        magnitude = np.uint32(code & np.uint32(0x7F))
        bits = np.uint32(np.uint32(magnitude << np.uint32(20)) + np.uint32(120 << 23))
        small = np.float32(np.int32(magnitude)) * np.float32(2.0**-9)
        bits = bits if magnitude >= np.uint32(8) else np.float32(small).view(np.uint32)
        bits = bits if magnitude != np.uint32(0x7F) else np.uint32(0x7FC00000)
        bits = np.uint32(bits | np.uint32(np.uint32(code & np.uint32(0x80)) << np.uint32(24)))
        out[i] = narrow(np.uint32(bits).view(np.float32) * scale, out[i])


def rows(first: Any, columns: Any, codes: Any, scales: Any, out: Any) -> None:
    """Decode int8-torchao, a part of a row at a time."""
    at = 0
    while at < out.size:
        count = min(columns - (first + at) % columns, out.size - at)
        _scaled(codes[at : at + count], scales[(first + at) // columns], out[at : at + count])
        at += count


def _scaled(codes: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = narrow(np.float32(codes[i]) * scale, out[i])


def int8(first: Any, columns: Any, codes: Any, scales: Any, out: Any) -> None:
    """Decode int8, a part of a row at a time."""
    at = 0
    while at < out.size:
        count = min(columns - (first + at) % columns, out.size - at)
        _scaled_int8(codes[at : at + count], scales[(first + at) // columns], out[at : at + count])
        at += count


def _scaled_int8(codes: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = narrow(np.float32(codes[i]) * scale * _UNIT, out[i])


# ---- Operations in LLVM's terms. ----


def _has_shuffles(out: Any) -> Any:
    """Return whether blocks of elements of the type of `out` are decoded by byte shuffles here."""
    raise NotImplementedError


def _nf4_block(table: Any, scale: Any, codes: Any, out: Any, block: Any) -> None:
    """Decode the block with the number `block`, which is whole, by the 16 values of `table` * `scale`."""
    raise NotImplementedError


def _mxfp4_block(table: Any, scale: Any, codes: Any, out: Any, block: Any) -> None:
    """Decode a block of mxfp4 as `_nf4_block` does one of nf4."""
    raise NotImplementedError


@cache
def compiled(loop: Loop) -> Loop:
    """Return `loop` as machine code (see `hetmem.cpu.loops.compile_loop`)."""
    _teach_numba()
    return compile_loop(loop)


@cache
def _teach_numba() -> None:
    from llvmlite import ir
    from llvmlite.binding import get_host_cpu_features
    from numba import config, types
    from numba.extending import lower_builtin, register_jitable, type_callable
    from numba.np.arrayobj import make_array

    configured = config.CPU_NAME is not None or config.CPU_FEATURES is not None  # for unknown features
    x86 = platform.machine() in ("x86_64", "AMD64")
    available = x86 and not configured and bool(get_host_cpu_features().get("ssse3"))
    bytes_16, words, floats = (ir.VectorType(kind, 16) for kind in (ir.IntType(8), ir.IntType(16), ir.FloatType()))
    wide = ir.VectorType(ir.IntType(32), 16)

    def shuffles(out: Any) -> bool:
        return available and out.dtype.bitwidth == 16

    def has_shuffles(context: Any, build: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(shuffles(sig.args[0])))

    def block_of(elements: int, high_first: bool) -> Any:
        def decode(context: Any, build: Any, sig: Any, args: Any) -> Any:
            if not shuffles(sig.args[3]):
                return context.get_dummy_value()
            table, codes, out = (make_array(sig.args[n])(context, build, args[n]).data for n in (0, 2, 3))
            halves = tables(build, products(build, table, args[1]), sig.args[3])
            for part in range(0, elements, 32):
                code = build.add(build.mul(args[4], index(elements // 2)), index(part // 2))
                to = build.add(build.mul(args[4], index(elements)), index(part))
                whole = looked_up(build, halves, loaded(build, build.gep(codes, [code]), bytes_16), high_first)
                build.store(whole, build.bitcast(build.gep(out, [to]), whole.type.as_pointer())).align = 1
            return context.get_dummy_value()

        return decode

    def index(number: int) -> Any:
        return ir.Constant(ir.IntType(64), number)

    def loaded(build: Any, pointer: Any, kind: Any) -> Any:
        found = build.load(build.bitcast(pointer, kind.as_pointer()))
        found.align = 1
        return found

    def products(build: Any, table: Any, scale: Any) -> Any:
        alone = build.insert_element(ir.Constant(floats, ir.Undefined), scale, ir.Constant(ir.IntType(32), 0))
        return build.fmul(loaded(build, table, floats), build.shuffle_vector(alone, alone, ir.Constant(wide, [0] * 16)))

    def tables(build: Any, numbers: Any, out: Any) -> Any:
        """Return the low and the high bytes of float32 `numbers` as float16 or, rounded as by `narrow`, bfloat16."""
        if out.dtype is types.int16:
            bits = build.bitcast(build.fptrunc(numbers, ir.VectorType(ir.HalfType(), 16)), words)
        else:
            shift, one, most, nan = (ir.Constant(wide, [number] * 16) for number in (16, 1, 0x7FFF, 0x7FC0))
            exact = build.bitcast(numbers, wide)
            odd = build.and_(build.lshr(exact, shift), one)
            nearest = build.lshr(build.add(build.add(exact, odd), most), shift)
            bits = build.trunc(build.select(build.fcmp_unordered("uno", numbers, numbers), nan, nearest), words)
        return build.trunc(bits, bytes_16), build.trunc(build.lshr(bits, ir.Constant(words, [8] * 16)), bytes_16)

    def looked_up(build: Any, halves: Any, codes: Any, high_first: bool) -> Any:
        function = ir.FunctionType(bytes_16, [bytes_16, bytes_16])
        shuffle = build.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), function)
        four, mask = (ir.Constant(bytes_16, [number] * 16) for number in (4, 15))
        nibbles = build.and_(codes, mask), build.lshr(codes, four)
        pairs = [[build.call(shuffle, (half, nibble)) for half in halves] for nibble in nibbles]
        low, high = (interleaved(build, one, other, 1) for one, other in pairs)
        return interleaved(build, high, low, 2) if high_first else interleaved(build, low, high, 2)

    def interleaved(build: Any, one: Any, other: Any, width: int) -> Any:
        """Return a vector of `width` bytes of `one`, `width` of `other`, and so on."""
        size = one.type.count
        order = [n + size * which + part for n in range(0, size, width) for which in (0, 1) for part in range(width)]
        return build.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), 2 * size), order))

    for helper in (_scaled_fp8, _scaled_int8, _scaled):
        register_jitable(fastmath=False, error_model="numpy")(helper)
    type_callable(_has_shuffles)(lambda context: lambda out: types.boolean)
    lower_builtin(_has_shuffles, types.Array)(has_shuffles)
    for block, elements, high_first in ((_nf4_block, NF4_BLOCK, True), (_mxfp4_block, MX_BLOCK, False)):
        type_callable(block)(lambda context: lambda table, scale, codes, out, block: types.none)
        operands = types.Array, types.float32, types.Array, types.Array, types.Integer
        lower_builtin(block, *operands)(block_of(elements, high_first))
