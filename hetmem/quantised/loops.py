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
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from hetmem.cpu.loops import Loop, compile_loop, narrow
from hetmem.schedule.formats import FP8_TILE, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK

_UNIT = np.float32(1 / 127)
_GROUP = 16


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
    """Decode fp8, a part of a row in one tile at a time; a division for each would take as long as the part."""
    down, across = (rows + FP8_TILE - 1) // FP8_TILE, (columns + FP8_TILE - 1) // FP8_TILE
    sixteen, made = np.empty(_GROUP, np.uint8), np.empty(_GROUP, out.dtype)
    for i in range(_GROUP):
        sixteen[i] = i
    bits = made.view(np.uint16)
    at, row, column = 0, first // columns, first % columns
    while at < out.size:
        tile = (row // rows * down + row % rows // FP8_TILE) * across + column // FP8_TILE
        last = min(at + columns - column, out.size)
        while at < last:
            scale = scales[tile]
            end = min(at + FP8_TILE - column % FP8_TILE, last)
            column = 0
            if _has_table_of_fp8(out) and end - at >= 2 * _GROUP:
                _fp8_group(scale, sixteen, made, 0)
                least, most = (bits[8] >> 7) & 0xFF, (bits[15] >> 7) & 0xFF
                if least > 0 and most + 14 < 0xFF:  # no product is subnormal or infinite
                    while at + _GROUP <= end:
                        _fp8_by_table(made, codes, out, at)
                        at += _GROUP
            while at + _GROUP <= end:
                _fp8_group(scale, codes, out, at)
                at += _GROUP
            for i in range(at, end):
                out[i] = narrow(_fp8_value(codes[i]) * scale, out[i])
            at = end
            tile += 1
        row += 1


def _fp8_value(number: Any) -> Any:
    """Return the value of the E4M3 code `number`, as `_fp8_group` computes sixteen."""
    code = np.uint32(number)
    magnitude = np.uint32(code & np.uint32(0x7F))
    bits = np.uint32(np.uint32(magnitude << np.uint32(20)) + np.uint32(120 << 23))
    small = np.float32(np.int32(magnitude)) * np.float32(2.0**-9)
    bits = bits if magnitude >= np.uint32(8) else np.float32(small).view(np.uint32)
    bits = bits if magnitude != np.uint32(0x7F) else np.uint32(0x7FC00000)
    bits = np.uint32(bits | np.uint32(np.uint32(code & np.uint32(0x80)) << np.uint32(24)))
    return np.uint32(bits).view(np.float32)


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


def _has_table_of_fp8(out: Any) -> Any:
    """Return whether `_fp8_by_table` writes elements of the type of `out` here."""
    raise NotImplementedError


def _nf4_block(table: Any, scale: Any, codes: Any, out: Any, block: Any) -> None:
    """Decode the block with the number `block`, which is whole, by the 16 values of `table` * `scale`."""
    raise NotImplementedError


def _fp8_group(scale: Any, codes: Any, out: Any, at: Any) -> None:
    """Decode sixteen codes of fp8 with one `scale`, from the element `at` on."""
    raise NotImplementedError


def _fp8_by_table(made: Any, codes: Any, out: Any, at: Any) -> None:
    """Decode sixteen codes of fp8 to bfloat16 by the values `made` of the codes 0 to 15 with their scale: a greater
    exponent of the code is added to that of the value, as both round alike."""
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

    def has_table(out: Any) -> bool:
        return available and out.dtype is types.uint16

    def constant(has: Callable[[Any], bool]) -> Any:
        return lambda context, build, sig, args: ir.Constant(ir.IntType(1), int(has(sig.args[0])))

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

    def spread(build: Any, scale: Any) -> Any:
        alone = build.insert_element(ir.Constant(floats, ir.Undefined), scale, ir.Constant(ir.IntType(32), 0))
        return build.shuffle_vector(alone, alone, ir.Constant(wide, [0] * 16))

    def products(build: Any, table: Any, scale: Any) -> Any:
        return build.fmul(loaded(build, table, floats), spread(build, scale))

    def all_of(number: int) -> Any:
        return ir.Constant(wide, [number] * 16)

    def rounded(build: Any, numbers: Any, out: Any) -> Any:
        """Return the bits of float32 `numbers` as float16 or, rounded as by `narrow`, bfloat16."""
        if out.dtype is types.int16:
            return build.bitcast(build.fptrunc(numbers, ir.VectorType(ir.HalfType(), 16)), words)
        exact = build.bitcast(numbers, wide)
        odd = build.and_(build.lshr(exact, all_of(16)), all_of(1))
        nearest = build.lshr(build.add(build.add(exact, odd), all_of(0x7FFF)), all_of(16))
        return build.trunc(build.select(build.fcmp_unordered("uno", numbers, numbers), all_of(0x7FC0), nearest), words)

    def fp8_group(context: Any, build: Any, sig: Any, args: Any) -> Any:
        codes, out = (make_array(sig.args[n])(context, build, args[n]).data for n in (1, 2))
        code = build.zext(loaded(build, build.gep(codes, [args[3]]), bytes_16), wide)
        magnitude = build.and_(code, all_of(0x7F))
        small = build.fmul(build.sitofp(magnitude, floats), ir.Constant(floats, [2.0**-9] * 16))
        normal = build.add(build.shl(magnitude, all_of(20)), all_of(120 << 23))
        bits = build.select(build.icmp_unsigned(">=", magnitude, all_of(8)), normal, build.bitcast(small, wide))
        bits = build.select(build.icmp_unsigned("==", magnitude, all_of(0x7F)), all_of(0x7FC00000), bits)
        bits = build.or_(bits, build.shl(build.and_(code, all_of(0x80)), all_of(24)))
        found = build.fmul(build.bitcast(bits, floats), spread(build, args[0]))
        found = found if sig.args[2].dtype is types.float32 else rounded(build, found, sig.args[2])
        build.store(found, build.bitcast(build.gep(out, [args[3]]), found.type.as_pointer())).align = 1
        return context.get_dummy_value()

    def fp8_by_table(context: Any, build: Any, sig: Any, args: Any) -> Any:
        if not has_table(sig.args[2]):
            return context.get_dummy_value()
        made, codes, out = (make_array(sig.args[n])(context, build, args[n]).data for n in range(3))
        normal = ir.Constant(words, [0] * 8 + [1 << 7] * 8)  # an exponent of 1 is in these already
        halves = halved(build, build.sub(loaded(build, made, words), normal))
        code = loaded(build, build.gep(codes, [args[3]]), bytes_16)
        eight, mask, most, none = (ir.Constant(bytes_16, [number] * 16) for number in (8, 7, 0x7F, 0))
        magnitude = build.and_(code, most)
        which = build.select(build.icmp_signed(">=", magnitude, eight), eight, none)
        low, high = (shuffled(build, half, build.or_(build.and_(code, mask), which)) for half in halves)
        bits = build.bitcast(interleaved(build, low, high, 1), words)
        wider = build.zext(code, words)
        exponent, sign = (build.and_(wider, ir.Constant(words, [number] * 16)) for number in (0x78, 0x80))
        bits = build.add(bits, build.shl(exponent, ir.Constant(words, [4] * 16)))
        bits = build.xor(bits, build.shl(sign, ir.Constant(words, [8] * 16)))
        bits = build.select(build.icmp_signed("==", magnitude, most), ir.Constant(words, [0x7FC0] * 16), bits)
        build.store(bits, build.bitcast(build.gep(out, [args[3]]), words.as_pointer())).align = 1
        return context.get_dummy_value()

    def halved(build: Any, bits: Any) -> Any:
        """Return the low and the high bytes of `bits`."""
        return build.trunc(bits, bytes_16), build.trunc(build.lshr(bits, ir.Constant(words, [8] * 16)), bytes_16)

    def shuffled(build: Any, table: Any, index: Any) -> Any:
        function = ir.FunctionType(bytes_16, [bytes_16, bytes_16])
        return build.call(build.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), function), (table, index))

    def tables(build: Any, numbers: Any, out: Any) -> Any:
        """Return the low and the high bytes of `numbers`, rounded."""
        return halved(build, rounded(build, numbers, out))

    def looked_up(build: Any, halves: Any, codes: Any, high_first: bool) -> Any:
        four, mask = (ir.Constant(bytes_16, [number] * 16) for number in (4, 15))
        nibbles = build.and_(codes, mask), build.lshr(codes, four)
        pairs = [[shuffled(build, half, nibble) for half in halves] for nibble in nibbles]
        low, high = (interleaved(build, one, other, 1) for one, other in pairs)
        return interleaved(build, high, low, 2) if high_first else interleaved(build, low, high, 2)

    def interleaved(build: Any, one: Any, other: Any, width: int) -> Any:
        """Return a vector of `width` bytes of `one`, `width` of `other`, and so on."""
        size = one.type.count
        order = [n + size * which + part for n in range(0, size, width) for which in (0, 1) for part in range(width)]
        return build.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), 2 * size), order))

    for helper in (_fp8_value, _scaled_int8, _scaled):
        register_jitable(fastmath=False, error_model="numpy")(helper)
    for predicate, has in ((_has_shuffles, shuffles), (_has_table_of_fp8, has_table)):
        type_callable(predicate)(lambda context: lambda out: types.boolean)
        lower_builtin(predicate, types.Array)(constant(has))
    for block, elements, high_first in ((_nf4_block, NF4_BLOCK, True), (_mxfp4_block, MX_BLOCK, False)):
        type_callable(block)(lambda context: lambda table, scale, codes, out, block: types.none)
        operands = types.Array, types.float32, types.Array, types.Array, types.Integer
        lower_builtin(block, *operands)(block_of(elements, high_first))
    type_callable(_fp8_by_table)(lambda context: lambda made, codes, out, at: types.none)
    lower_builtin(_fp8_by_table, types.Array, types.Array, types.Array, types.Integer)(fp8_by_table)
    type_callable(_fp8_group)(lambda context: lambda scale, codes, out, at: types.none)
    lower_builtin(_fp8_group, types.float32, types.Array, types.Array, types.Integer)(fp8_group)
