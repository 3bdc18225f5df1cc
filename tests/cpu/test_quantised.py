"""Quantised weights: every code has the value of its format, bytes are as many as said, and encoding is repeatable."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.tested import (
    ALL_FORMATS,
    PIECE_ELEMENTS,
    Coding,
    NotFiniteError,
    WorkerPool,
    decode,
    decode_tasks,
    encode,
    parts_of,
    torch_dequantise,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# As published: QLoRA's appendix, OCP MX 1.0 (table 5), OCP FP8 1.0 (table 1).
NORMAL_FLOAT = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def coded_of(coding: Coding, codes: list[int], scales: bytes, levels: tuple[float, ...] = ()) -> torch.Tensor:
    """The bytes of a weight."""
    whole = bytearray(coding.nbytes)
    nested = torch.tensor(levels, dtype=torch.float32).numpy().tobytes()
    for span, part in ((coding.codes_span, bytes(codes)), (coding.scales_span, scales), (coding.nested_span, nested)):
        assert len(part) == span.nbytes
        whole[span.start : span.start + span.nbytes] = part
    return torch.frombuffer(whole, dtype=torch.uint8)


def floats(*numbers: float) -> bytes:
    return torch.tensor(numbers, dtype=torch.float32).numpy().tobytes()


def decoded(coding: Coding, coded: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((coding.numel,), 7.0, dtype=dtype)
    decode(coding, coded, out)
    return out


def encoded(coding: Coding, values: torch.Tensor) -> torch.Tensor:
    coded = torch.full((coding.nbytes,), 0xA5, dtype=torch.uint8)
    encode(coding, values.flatten(), coded)
    return coded


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_has_the_high_nibble_first_and_a_scale_for_64(dtype: torch.dtype) -> None:
    """80 elements: a whole block, and one of 16 with the next scale."""
    coding = Coding.of("nf4", (80,))
    codes = [(2 * n % 16) << 4 | (2 * n + 1) % 16 for n in range(40)]
    found = decoded(coding, coded_of(coding, codes, floats(3.0, 0.7)), dtype)
    table = torch.tensor(NORMAL_FLOAT, dtype=torch.float32)
    expected = torch.cat([(table * torch.tensor(3.0)).repeat(4), table * torch.tensor(0.7)]).to(dtype)
    assert found.tolist() == expected.tolist()


def test_nested_scales_are_products_and_an_offset() -> None:
    """Two groups of 256 scales; D[255] is 1, D[127] is 0."""
    coding = Coding.of("nf4-nested", (257 * 64,))
    scales = bytes([255] * 255 + [127] + [255])
    coded = coded_of(coding, [0xF0] * (257 * 32), scales, (0.25, 2.0, 8.0))
    found = decoded(coding, coded)
    assert (found[:64].tolist(), found[255 * 64 : 255 * 64 + 2].tolist()) == ([2.25, -2.25] * 32, [0.25, -0.25])
    assert found[256 * 64 :].tolist() == [8.25, -8.25] * 32


def test_mxfp4_has_the_low_nibble_first_and_an_exponent_for_32() -> None:
    coding = Coding.of("mxfp4", (3, 32))
    codes = [(2 * n % 16) | (2 * n + 1) % 16 << 4 for n in range(16)] * 3
    found = decoded(coding, coded_of(coding, codes, bytes([127, 130, 0])))
    signed = [*E2M1, *(-value for value in E2M1)]
    expected = [value * scale for scale in (1.0, 8.0, 2.0**-127) for value in signed * 2]
    assert found.tolist() == expected
    assert torch.signbit(found[8])


def test_fp8_has_e4m3_codes_and_a_scale_for_a_tile() -> None:
    """Two matrices of 130 x 200: two by two tiles each, of which only the first is whole in both directions."""
    coding = Coding.of("fp8", (2, 130, 200))
    numbers = [n % 256 if n % 128 != 127 else 0 for n in range(coding.numel)]
    scales = torch.tensor([1.0, 2.0, 0.5, 3.0, 10.0, 20.0, 5.0, 30.0])
    found = decoded(coding, coded_of(coding, numbers, floats(*scales.tolist()))).view(2, 130, 200)

    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        return -size if code & 128 else size

    codes = torch.tensor([value(code) for code in numbers]).view(2, 130, 200)
    tiles = scales.view(2, 2, 2).repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[..., :200]
    assert torch.equal(found, codes * tiles)


def test_int8_has_a_scale_for_a_row_and_a_unit_of_1_127th() -> None:
    coding = Coding.of("int8", (2, 256))
    found = decoded(coding, coded_of(coding, [*range(256)] * 2, floats(2.0, 127.0)))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).float()
    unit = torch.tensor(0.007874015718698502)
    assert torch.equal(found, torch.cat([codes * torch.tensor(scale) * unit for scale in (2.0, 127.0)]))


IN_ORDER = [name for name in ALL_FORMATS if name != "mxfp4-transposed"]
SHAPES = ((1,), (5, 7), (64, 65), (150, 300), (3, 130, 70), (8, 40, 3, 3))


@pytest.mark.parametrize("name", IN_ORDER)
def test_the_hosts_loops_give_the_bits_of_torch_whole_and_in_parts(name: str) -> None:
    for shape in SHAPES:
        coding = Coding.of(name, shape)
        coded = encoded(coding, torch.randn(coding.numel))
        for dtype in DTYPES:
            expected = torch.empty(coding.numel, dtype=dtype)
            torch_dequantise(coding, *parts_of(coding, coded, 0, coding.numel), expected, 0)
            assert torch.equal(decoded(coding, coded, dtype), expected), (shape, dtype)
            rest = torch.empty(coding.numel - PIECE_ELEMENTS, dtype=dtype) if coding.numel > PIECE_ELEMENTS else None
            if rest is not None:
                decode(coding, coded, rest, PIECE_ELEMENTS)
                assert torch.equal(rest, expected[PIECE_ELEMENTS:]), (shape, dtype)


SCALES = (1.0, -2.5, 0.3, 7e-3, 1e-36, 8e-37, 3e-37, 1e-44, 5e35, 7.6e35, 8.2e35, 3e38, 0.0, float("inf"), float("nan"))


@pytest.mark.parametrize("scale", SCALES)
def test_fp8_has_the_bits_of_torch_for_every_code_and_any_scale(scale: float) -> None:
    """Also where products are subnormal or infinite, which no table of sixteen has."""
    coding = Coding.of("fp8", (1, 256))
    coded = coded_of(coding, [*range(256)], floats(scale, scale))
    for dtype in DTYPES:
        expected = torch.empty(256, dtype=dtype)
        torch_dequantise(coding, *parts_of(coding, coded, 0, 256), expected, 0)
        found = decoded(coding, coded, dtype)
        number = ~expected.isnan()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found[number].view(torch.uint8), expected[number].view(torch.uint8)), dtype


# Relative error of standard normal numbers; of nf4 and int8 that of bitsandbytes, of mxfp4 that of torchao.
ERRORS = {"nf4": 0.0920, "nf4-nested": 0.0921, "mxfp4": 0.1141, "fp8": 0.0265, "int8": 0.0079, "int8-torchao": 0.0079}
BYTES = {"nf4": 0.5625, "nf4-nested": 0.516, "mxfp4": 0.53125, "fp8": 1.0003, "int8": 1.004, "int8-torchao": 1.004}


@pytest.mark.parametrize("name", IN_ORDER)
def test_encoding_has_the_error_and_the_bytes_of_its_format(name: str) -> None:
    values = torch.randn(1024, 1024)
    coding = Coding.of(name, values.shape)
    coded = encoded(coding, values)
    found = decoded(coding, coded).view_as(values)
    error = ((found - values).norm() / values.norm()).item()
    assert error == pytest.approx(ERRORS[name], rel=0.01)
    assert coding.nbytes / coding.numel == pytest.approx(BYTES[name], rel=1e-3)
    again = encoded(coding, found)
    if name.startswith("int8"):  # its scales are rounded again, and no code changes for it
        assert torch.equal(again[: coding.numel], coded[: coding.numel])
    elif name != "nf4-nested":  # whose scales are rounded again, to other levels
        assert torch.equal(decoded(coding, again), found.flatten())


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_a_last_short_block_has_a_scale_of_its_own(name: str) -> None:
    values = torch.cat([torch.full((128,), 100.0), torch.linspace(-1, 1, 7)])
    coding = Coding.of(name, values.shape)
    found = decoded(coding, encoded(coding, values))
    assert (found[128:] - values[128:]).abs().max() < 0.25, found[128:]


@pytest.mark.parametrize("name", IN_ORDER)
def test_encoding_on_threads_gives_the_same_bytes(name: str) -> None:
    values = torch.randn(700, 1001)
    coding = Coding.of(name, values.shape)
    expected, coded = encoded(coding, values), torch.empty(coding.nbytes, dtype=torch.uint8)
    pool = WorkerPool(2)
    encode(coding, values.flatten(), coded, lambda tasks: pool.run(tasks[::-1]))
    assert torch.equal(coded, expected)
    out = torch.empty(coding.numel, dtype=torch.bfloat16)
    pool.run(decode_tasks(coding, coded, out)[::-1])
    pool.close()
    assert torch.equal(out, decoded(coding, coded, torch.bfloat16))


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_has_no_code(name: str, bad: float) -> None:
    values = torch.zeros(3, 200)
    assert decoded(Coding.of(name, (3, 200)), encoded(Coding.of(name, (3, 200)), values)).eq(0).all()
    values[2, 190] = bad
    with pytest.raises(NotFiniteError, match="infinite or NaN"):
        encoded(Coding.of(name, (3, 200)), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_codes_are_those_of_the_matrix_with_its_dimensions_exchanged(dtype: torch.dtype) -> None:
    for shape in ((32, 7), (3, 64, 130), (5, 32, 64)):
        values = torch.randn(shape)
        turned, plain = Coding.of("mxfp4-transposed", shape), Coding.of("mxfp4", (*shape[:-2], shape[-1], shape[-2]))
        coded = encoded(turned, values.flatten())
        assert torch.equal(coded, encoded(plain, values.transpose(-1, -2).flatten()))
        expected = decoded(plain, coded, dtype).view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        assert torch.equal(decoded(turned, coded, dtype).view(shape), expected)
        last = torch.empty(turned.unit, dtype=dtype)
        decode(turned, coded, last, turned.numel - turned.unit)
        assert torch.equal(last, expected.reshape(-1)[-turned.unit :])


def test_rows_of_a_short_last_dimension_are_taken_together() -> None:
    assert Coding.of("int8", (320, 16, 3, 3)) == Coding("int8", 1, 320, 144)
    assert Coding.of("fp8", (8, 256, 512)) == Coding("fp8", 8, 256, 512)
    assert Coding.of("int8", (9,)) == Coding("int8", 1, 1, 9)
