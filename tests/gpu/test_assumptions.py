"""What hetmem takes for granted of a GPU, of its driver and of torch there, one by one: each says what to do if it is
not so. `make gpu` runs this first."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from hetmem.memory.chunk import elements
from hetmem.memory.cuda_device import CudaDevice
from hetmem.memory.host_memory import Mapping
from hetmem.schedule.layout import ALIGNMENT_ELEMENTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.filterwarnings("default"),
]
MIB = 1 << 20
CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


@pytest.fixture
def registered() -> Iterator[torch.Tensor]:
    """A MiB of the middle of a mapping that the driver has locked."""
    host = Mapping(4 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # page-locking was refused: copies wait for the host, and kernels cannot read
        unpin = CudaDevice().pin(host)
    yield torch.frombuffer(host.buffer(MIB, MIB), dtype=torch.uint8)
    torch.cuda.synchronize()
    unpin()


def test_torch_takes_registered_memory_for_pinned(registered: torch.Tensor) -> None:
    """Else copies to and from homes wait for the host."""
    assert registered.is_pinned() and registered[4096:].is_pinned()


def test_a_view_with_a_storage_of_its_own_is_of_the_same_memory_and_waits_for_nothing() -> None:
    """Else `memory.chunk.elements` must make tensors in another way than by DLPack."""
    memory = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        alone = elements(memory, torch.bfloat16, 1000, 512)
        assert not stream.query(), "the host waited"
    assert alone.device == memory.device and alone.data_ptr() == memory.data_ptr() + 512
    assert alone.untyped_storage().data_ptr() == alone.data_ptr() and alone.numel() == 1000
    torch.cuda.synchronize()


def test_a_backward_runs_on_a_thread_of_its_own_on_the_stream_of_the_forward() -> None:
    """Gradients leave behind a mark on the stream that is current in a hook: it must be the one that computes them."""
    seen = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(8, device="cuda", requires_grad=True)
        leaf = torch.nn.Parameter(torch.ones(8, device="cuda"))
        leaf.register_post_accumulate_grad_hook(lambda _: seen.append((threading.get_ident(), _current())))
        y = (x * leaf).sum()
        y.register_hook(lambda _: seen.append((threading.get_ident(), _current())))
    y.backward()
    assert len(seen) == 2 and all(found == stream for _, found in seen)
    assert all(thread != threading.get_ident() for thread, _ in seen), "what follows is not tested then"


def _current() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [8, 4096])
def test_a_product_has_the_same_bits_wherever_its_weight_lies(dtype: torch.dtype, rows: int) -> None:
    """torch tells cuBLASLt how addresses are aligned, up to 256 bytes, and that may choose another algorithm by it.
    Weights in chunks lie at multiples of `ALIGNMENT_ELEMENTS`, which are 256 bytes or more."""
    torch.manual_seed(0)
    x = torch.randn(rows, 512, device="cuda").to(dtype).requires_grad_()
    weight, bias = torch.randn(2048, 512, device="cuda").to(dtype), torch.randn(2048, device="cuda").to(dtype)
    found = []
    for shift in (0, ALIGNMENT_ELEMENTS):
        lying = [_shifted(tensor, shift).requires_grad_() for tensor in (weight, bias)]
        out = F.linear(x, *lying)
        found.append((out.detach(), *torch.autograd.grad(out.square().mean(), (x, *lying))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), f"other bits {ALIGNMENT_ELEMENTS * dtype.itemsize} bytes further on"


def _shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    room = torch.zeros(elements + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return room[elements:].copy_(tensor.flatten()).view(tensor.shape).detach()


def test_the_peak_of_the_allocator_starts_anew() -> None:
    """Else nothing that hetmem knows of activations on a GPU is right."""
    device = CudaDevice()
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert device.peak_bytes() >= 64 * MIB
    device.forget_peak()
    assert device.peak_bytes() <= device.allocated_bytes() + 2 * MIB
