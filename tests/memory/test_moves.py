"""Copies across the link give torch's bits, however late each stream is, and take no memory once they are warm."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.shim import GPP, build_all
from tests.cuda.vectors import assert_same, numbers, ordinary
from tests.engine.harness import Recipe, Tower, pair, token_batches, train_both
from tests.memory.fake_cuda import CpuCuda, FakeCuda, LateKernels, Stream, cuda
from tests.memory.tested import (
    FORMATS,
    PIECE_ELEMENTS,
    CodedHome,
    CodedPart,
    CodedTable,
    Coding,
    Mapping,
    stream_copies,
)

__all__ = ["cuda"]  # a fixture

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PIECE = 4096  # bytes of a staging buffer here


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    if GPP is None:
        pytest.skip("g++ is not installed")
    return build_all(["cast.cu", "dequantise.cu"])


@pytest.fixture(params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest) -> LateKernels | None:
    return LateKernels(request.getfixturevalue("libraries")) if request.param == "kernels" else None


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_copies, "PIECE_BYTES", PIECE)


class Machine:
    """A device, page-locked host memory, and a stream to ask for moves on."""

    def __init__(self, kernels: LateKernels | None) -> None:
        self.device = CpuCuda(kernels=kernels)
        self.mapping = Mapping(1 << 20)
        self.unpin = self.device.pin(self.mapping)
        self.stream = Stream()
        self._used = 0

    def host(self, data: torch.Tensor) -> torch.Tensor:
        """`data` in page-locked memory, with its strides."""
        base = torch.frombuffer(self.mapping.buffer(self._used, max(64, data.nbytes)), dtype=data.dtype)
        self._used += -(-data.nbytes // 64) * 64
        tensor = base.as_strided(data.shape, data.stride())
        tensor.copy_(data)
        return tensor

    def settle(self, first: str) -> None:
        """Both streams come to an end; `first` says which is as far ahead of the other as events let it be."""
        streams = [self.stream, self.device.moves._casting]
        for stream in streams if first == "copies" else reversed(streams):
            stream.synchronize()


@pytest.mark.pairs
@pytest.mark.parametrize("first", ["copies", "casts"])
def test_weights_arrive_with_torch_s_bits_whichever_stream_is_ahead(
    cuda: FakeCuda, kernels: LateKernels | None, first: str
) -> None:
    machine = Machine(kernels)
    for source_dtype, dtype in itertools.product(DTYPES, DTYPES):
        for numel in (0, 1, 7, 1024, 5000):
            data = ordinary(numel, torch.float32).to(source_dtype)
            source, target = machine.host(data), torch.full((numel,), 7.0, dtype=dtype)
            with torch.cuda.stream(machine.stream):
                machine.device.copy_in(target, source)
            machine.settle(first)
            assert_same(target, data.to(dtype), f"{source_dtype} to {dtype}, {numel}")
        machine._used = 0


@pytest.mark.pairs
@pytest.mark.parametrize("first", ["copies", "casts"])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("there", [False, True], ids=["from the host", "from the device"])
def test_quantised_weights_arrive_decoded_whichever_stream_is_ahead(
    cuda: FakeCuda, kernels: LateKernels | None, first: str, format_: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several in one home, in pieces that are larger, smaller and equal to a buffer."""
    monkeypatch.setattr(stream_copies, "CODED_PIECE_ELEMENTS", PIECE_ELEMENTS)
    machine, parts, start, offset = Machine(kernels), list[CodedPart](), 0, 0
    for shape in ((3, 2000), (5, 7001), (128, 128)):
        parts.append(CodedPart(Coding.of(format_, shape), start, offset))
        start, offset = start + parts[-1].coding.nbytes, offset + 128 * -(-parts[-1].coding.numel // 128)
    zeros = torch.zeros(start, dtype=torch.uint8)
    home = CodedHome(zeros if there else machine.host(zeros), tuple(parts))
    slot, expected = (torch.zeros(offset, dtype=torch.bfloat16) for _ in range(2))
    for part in parts:
        part.encode(ordinary(part.coding.numel, seed=2), home.codes)
    home.decode_into(expected)
    with torch.cuda.stream(machine.stream):
        machine.device.copy_in(slot, home)
    crossed = machine.device.moves.staging_bytes
    assert (crossed == 0) is there
    machine.settle(first)
    assert expected.any()
    assert_same(slot, expected, format_)


@pytest.mark.parametrize("format_", ["nf4", "int8"])
def test_rows_of_a_quantised_table_arrive_decoded(cuda: FakeCuda, kernels: LateKernels | None, format_: str) -> None:
    machine, coding = Machine(kernels), Coding.of(format_, (70, 192))
    part = CodedPart(coding, 64, 0)
    home = machine.host(torch.zeros(64 + coding.nbytes, dtype=torch.uint8))
    part.encode(ordinary(coding.numel, seed=2), home)
    whole = torch.zeros(coding.numel, dtype=torch.bfloat16)
    part.decode(home, whole)
    indices, rows = torch.tensor([69, 0, 3, 3]), torch.zeros(4, 192, dtype=torch.bfloat16)
    machine.device.rows_in(rows, CodedTable(coding, part.bytes_in(home)), indices)
    assert_same(rows.flatten(), whole.view(70, 192)[indices].flatten(), format_)


@pytest.mark.each
@pytest.mark.parametrize("add", [False, True], ids=["overwrite", "add"])
def test_gradients_leave_with_torch_s_bits(cuda: FakeCuda, kernels: LateKernels | None, add: bool) -> None:
    machine = Machine(kernels)
    shapes = [(0,), (), (5000,), (70, 50), (1, 9)]
    for shape, dtype, home_dtype in itertools.product(shapes, DTYPES, DTYPES):
        arrived = ordinary(5000, seed=1)[: torch.Size(shape).numel()].to(dtype).reshape(shape)
        old = ordinary(5000)[: arrived.numel()].to(home_dtype).reshape(shape)
        expected = old.clone()
        if add and not torch.can_cast(dtype, home_dtype):
            continue
        expected.add_(arrived) if add else expected.copy_(arrived)
        home = machine.host(old)
        with torch.cuda.stream(machine.stream):
            machine.device.gradient_out(home, arrived, add=add)
        machine.stream.synchronize()
        assert_same(home.flatten(), expected.flatten(), f"{shape}, {dtype} to {home_dtype}")
        machine._used = 0


@pytest.mark.parametrize("add", [False, True], ids=["overwrite", "add"])
def test_a_gradient_s_elements_go_to_their_own_places_whatever_its_strides(
    cuda: FakeCuda, kernels: LateKernels | None, add: bool
) -> None:
    machine = Machine(kernels)
    values = ordinary(240).bfloat16()
    layouts = {
        "transposed like home": (values.view(12, 20).t(), values.view(12, 20).float().t()),
        "transposed": (values.view(12, 20).t(), values.view(20, 12).float()),
        "with gaps": (values.view(12, 20)[:, ::2], values[:120].view(12, 10).float()),
        "expanded": (values[:12, None].expand(12, 4), values[:48].view(12, 4).float()),
        "one column": (torch.as_strided(values, (9, 1), (1, 3)), values[:9].view(9, 1).float()),
    }
    for name, (arrived, old) in layouts.items():
        home = machine.host(old)
        expected = old + arrived if add else arrived.to(old.dtype)
        with torch.cuda.stream(machine.stream):
            machine.device.gradient_out(home, arrived, add=add)
        machine.stream.synchronize()
        assert torch.equal(home, expected), name


@pytest.mark.each
def test_a_nan_stays_one_and_infinities_keep_their_signs(cuda: FakeCuda, kernels: LateKernels | None) -> None:
    machine = Machine(kernels)
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.float32, torch.float16)):
        weights, gradients = numbers(dtype, thorough=False).contiguous(), numbers(other)
        target, home = torch.zeros(weights.numel(), dtype=other), machine.host(torch.zeros(gradients.numel()))
        source = machine.host(weights)
        with torch.cuda.stream(machine.stream):
            machine.device.copy_in(target, source)
            machine.device.gradient_out(home, gradients, add=False)
        machine.settle("copies")
        assert_same(target, weights.to(other))
        assert_same(home, gradients.float())
        machine._used = 0


def test_a_warm_move_takes_no_memory(cuda: FakeCuda, kernels: LateKernels | None) -> None:
    machine = Machine(kernels)
    source, target = machine.host(ordinary(5000)), torch.zeros(5000, dtype=torch.bfloat16)
    home, arrived = machine.host(ordinary(5000)), ordinary(5000).bfloat16()

    def move() -> list[str]:
        cuda.made.clear()
        with torch.cuda.stream(machine.stream):
            machine.device.copy_in(target, source)
            machine.device.gradient_out(home, arrived, add=False)
            machine.device.gradient_out(home, arrived, add=True)
        machine.settle("copies")
        return list(cuda.made)

    assert move() != []
    assert move() == []
    assert machine.device.moves.staging_bytes <= 4 * PIECE


def test_the_copy_engine_does_not_wait_for_casts_while_a_buffer_is_free(cuda: FakeCuda) -> None:
    machine = Machine(None)
    source = machine.host(ordinary(2 * PIECE // 4))
    with torch.cuda.stream(machine.stream):
        machine.device.copy_in(torch.zeros(2 * PIECE // 4, dtype=torch.bfloat16), source)
    asked = len(machine.device.moves._casting.asked)
    while len(machine.stream.asked) > 1:  # the last is to wait for the last cast
        machine.stream.run_one()
    assert len(machine.device.moves._casting.asked) == asked == 2 * 3


@pytest.mark.parametrize("inwards", [True, False], ids=["weights", "gradients"])
def test_two_models_on_one_device_take_turns_at_its_buffers(cuda: FakeCuda, inwards: bool) -> None:
    """Each has streams of its own; the one that asked last may run first."""
    machine = Machine(None)
    streams = [Stream(), Stream()]
    here = [ordinary(2000, seed=seed) for seed in range(2)]
    sources = [machine.host(data) if inwards else data.bfloat16() for data in here]
    targets = [torch.zeros(2000).bfloat16() if inwards else machine.host(torch.zeros(2000)) for _ in range(2)]
    for stream, source, target in zip(streams, sources, targets, strict=True):
        with torch.cuda.stream(stream):
            if inwards:
                machine.device.copy_in(target, source)
            else:
                machine.device.gradient_out(target, source, add=False)
    while streams[0].asked or streams[1].asked:
        for stream in reversed(streams):
            if stream.asked:
                stream.run_one()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_the_memory_of_a_buffer_may_have_been_in_use_on_the_stream_that_made_it(cuda: FakeCuda) -> None:
    """torch's allocator hands memory out again on its stream before that is done with it, and on no other."""
    staging, first, other, ran = stream_copies.Staging(torch.device("cpu")), Stream(), Stream(), list[str]()
    first.ask(lambda: ran.append("what had the memory before"))
    with torch.cuda.stream(first):
        one = staging.take(first, 4096)
    with torch.cuda.stream(other):
        assert staging.take(other, 4096) is not one
    other.synchronize()
    assert ran == ["what had the memory before"]


def test_a_larger_piece_takes_the_place_of_a_smaller_one_when_that_is_done_with(cuda: FakeCuda) -> None:
    staging, stream, ran = stream_copies.Staging(torch.device("cpu")), Stream(), list[str]()
    with torch.cuda.stream(stream):
        small = staging.take(stream, 4096)
        stream.ask(lambda: ran.append("a cast out of it"))
        small.free.record(stream)
        assert staging.take(stream, 8192).memory.numel() == 8192
    assert ran == ["a cast out of it"]
    assert staging.nbytes == 2 * 8192


@pytest.mark.each
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_training_by_kernels_equals_torch(
    cuda: FakeCuda, libraries: dict[str, Path], placement: str, tmp_path: Path
) -> None:
    kernels = LateKernels(libraries)
    device = CpuCuda(kernels=kernels)
    build_model = partial(Tower, checkpointing=False)
    options: dict[str, Any] = {"device": device, "mixed_precision": torch.bfloat16, "home_copies": False}
    plain, managed = pair(build_model, placement, tmp_path, **options)
    train_both(plain, managed, token_batches(6), Recipe(accumulation=2, clip=0.05, mixed=torch.bfloat16))
    assert set(kernels.launched) == {"cast_f32_bf16"}
