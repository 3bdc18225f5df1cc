"""Decoded values, and codes, are those of the libraries whose formats they are: where these are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu.tested import Coding, decode, encode, parts_of

pytestmark = pytest.mark.nightly

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 64), (7, 9), (129, 257), (33, 992))


def decoded(coding: Coding, coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(coding.numel, dtype=dtype)
    decode(coding, coded, out)
    return out


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], source: torch.dtype, nested: bool) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    for size in (1.0, 1e-3, 1e4):
        weight = torch.randn(shape).mul(size).to(source)
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        coding = Coding.of("nf4-nested" if nested else "nf4", shape)
        theirs = torch.zeros(coding.nbytes, dtype=torch.uint8)
        codes, scales, levels = parts_of(coding, theirs, 0, coding.numel)
        codes.copy_(packed.flatten())
        scales.copy_(state.absmax if nested else state.absmax.view(torch.uint8))
        if nested:
            levels.copy_(torch.cat([state.offset.view(1), state.state2.absmax]).view(torch.uint8))
        else:
            own = torch.empty(coding.nbytes, dtype=torch.uint8)
            encode(coding, weight.flatten(), own)
            whole = coding.numel // 2  # the padding of an odd last byte is its own
            assert torch.equal(own[:whole], theirs[:whole])
            assert torch.equal(own[coding.scales_span.start :], theirs[coding.scales_span.start :])
        for dtype in DTYPES:
            state.dtype = dtype
            assert same(decoded(coding, theirs, dtype), functional.dequantize_4bit(packed, state)), dtype


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_that_of_bitsandbytes(shape: tuple[int, int], source: torch.dtype) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(128, 257).to(source)
    coding = Coding("int8", 1, *weight.shape)
    coded = torch.empty(coding.nbytes, dtype=torch.uint8)
    encode(coding, weight.flatten(), coded)
    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    own, own_scales, _ = parts_of(coding, coded, 0, coding.numel)
    assert same(own, codes)
    assert same(own_scales, scales)
    exact = functional.int8_vectorwise_dequant(codes, scales)
    for dtype in DTYPES:
        assert same(decoded(coding, coded, dtype), exact.to(dtype))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (128, 256), (33, 992)])
def test_mxfp4_is_that_of_torchao(shape: tuple[int, int], source: torch.dtype) -> None:
    formats: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    for size in (1.0, 1e-30, 1e30):
        weight = torch.randn(shape).mul(size).to(source)
        weight[0, :32] = 0
        coding = Coding.of("mxfp4", shape)
        coded = torch.empty(coding.nbytes, dtype=torch.uint8)
        encode(coding, weight.flatten(), coded)
        theirs = formats.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
        codes, scales, _ = parts_of(coding, coded, 0, coding.numel)
        assert same(codes, theirs.qdata.view(torch.uint8))
        assert same(scales, theirs.scale.view(torch.uint8))
        for dtype in (torch.bfloat16, torch.float32):
            assert same(decoded(coding, coded, dtype), theirs.dequantize(dtype))


def test_mxfp4_is_that_of_transformers() -> None:
    integration: Any = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 8, 3, 16), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (2, 8, 3), dtype=torch.uint8)
    coding = Coding.of("mxfp4", (2, 8, 96))
    coded = torch.zeros(coding.nbytes, dtype=torch.uint8)
    codes, scales, _ = parts_of(coding, coded, 0, coding.numel)
    codes.copy_(blocks.flatten())
    scales.copy_(exponents.flatten())
    expected = integration.convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)  # transposed
    assert same(decoded(coding, coded, torch.bfloat16).view(2, 8, 96).transpose(1, 2), expected)


def test_fp8_is_that_of_transformers() -> None:
    """Where rows and columns are multiples of 128: it has no reference for others."""
    integration: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randn(256, 384)
    coding = Coding.of("fp8", weight.shape)
    coded = torch.empty(coding.nbytes, dtype=torch.uint8)
    encode(coding, weight.flatten(), coded)
    codes, scales, _ = parts_of(coding, coded, 0, coding.numel)
    quantised = codes.view(torch.float8_e4m3fn).view(256, 384)
    expected = integration._dequantize_fp8_weight(
        quantised, scales.view(torch.float32).view(2, 3), [128, 128], torch.float32
    )
    assert same(decoded(coding, coded, torch.float32), expected.float())
