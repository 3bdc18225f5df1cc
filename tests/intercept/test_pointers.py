"""A weight's raw pointer is right for the length of the call of the module that owns it, and in a node that unpacked
it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests import made
from tests.cuda.shim import GPP
from tests.engine.harness import (
    WIDTH,
    Recipe,
    adamws,
    assert_same_weights,
    everywhere,
    pair,
    precisions,
    streamed,
    train_both,
    vector_batches,
)


def read(address: int, like: torch.Tensor) -> torch.Tensor:
    """What lies at `address`, as a kernel of somebody's would find it."""
    memory = (ctypes.c_uint8 * (like.numel() * like.itemsize)).from_address(address)
    return torch.frombuffer(bytearray(memory), dtype=like.dtype).view(like.shape).clone()


class ByPointer(torch.autograd.Function):
    """A product that reads its weight through its address, after all else was used that there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, owner: Any) -> torch.Tensor:
        address = weight.data_ptr()
        owner.use_others()
        ctx.save_for_backward(x, weight)
        return x @ read(address, weight).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        address = weight.data_ptr()
        return grads[0] @ read(address, weight), grads[0].t() @ x, None


class Raw(nn.Module):
    def __init__(self, others: list[nn.Linear]) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), others

    def use_others(self) -> None:
        with torch.no_grad():
            for other in self.others:
                other(torch.zeros(1, WIDTH, dtype=other.bias.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ByPointer.apply(x, self.weight, self)
        return y


class Kernels(nn.Module):
    """Layers that are computed by pointers, of which a few have room at once."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.raw = nn.ModuleList(Raw(list(self.others)) for _ in range(4))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.raw:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.each
@everywhere
@precisions
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "known"])
def test_a_function_that_reads_a_weight_through_its_address_finds_it(
    sanitize: bool, mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    modules = pair(Kernels, placement, tmp_path, mixed_precision=mixed, sanitize=sanitize)
    train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed))


EXTENSION = """
#include <torch/library.h>

static const float* remembered = nullptr;

static void remember(const at::Tensor& weight) { remembered = weight.data_ptr<float>(); }

static at::Tensor product(const at::Tensor& x, int64_t columns) {
  at::Tensor y = x.new_zeros({x.size(0), columns});
  for (int64_t row = 0; row < x.size(0); row++)
    for (int64_t column = 0; column < columns; column++)
      for (int64_t at = 0; at < x.size(1); at++)
        y.data_ptr<float>()[row * columns + column] +=
            x.data_ptr<float>()[row * x.size(1) + at] * remembered[column * x.size(1) + at];
  return y;
}

TORCH_LIBRARY(hetmem_pointers, library) {
  library.def("remember(Tensor weight) -> ()", &remember);
  library.def("product(Tensor x, int columns) -> Tensor", &product);
}
"""
"""An operator that takes the address of a weight, and one that computes with what lies there later."""


def extension() -> str:
    home = Path(torch.__file__).parent
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC"]
    links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]

    def build(path: Path) -> None:
        source = path.with_suffix(".cpp")
        source.write_text(EXTENSION)
        made.run([str(GPP), *flags, f"-I{home / 'include'}", str(source), "-o", str(path), *links])

    return str(made.kept("pointers.so", (EXTENSION, torch.__version__, flags, made.version_of(str(GPP))), build))


class ByExtension(torch.autograd.Function):
    """As `ByPointer`, in C++."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, owner: Any) -> torch.Tensor:
        torch.ops.hetmem_pointers.remember(weight)
        owner.use_others()
        ctx.save_for_backward(x, weight)
        y: torch.Tensor = torch.ops.hetmem_pointers.product(x.contiguous(), len(weight))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        turned = weight.t().contiguous()
        torch.ops.hetmem_pointers.remember(turned)
        return torch.ops.hetmem_pointers.product(grads[0].contiguous(), x.shape[1]), grads[0].t() @ x, None


class RawByExtension(Raw):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ByExtension.apply(x, self.weight, self)
        return y


class Extended(Kernels):
    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.ModuleList(RawByExtension(list(self.others)) for _ in range(4))  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.skipif(GPP is None, reason="g++ is not installed")
@streamed
def test_an_extension_in_cpp_that_keeps_the_address_of_a_weight_finds_it_there(placement: str, tmp_path: Path) -> None:
    torch.ops.load_library(extension())
    modules = pair(Extended, placement, tmp_path)
    train_both(*modules, vector_batches(3, 4, WIDTH), Recipe())


class Storages(nn.Module):
    """Reads its own weight, and that of another module, by their storages, after all else was used that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.lender, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.sizes: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weight, self.lender.weight
        storages = [weight.untyped_storage() for weight in weights]
        assert storages[0].data_ptr() == self.weight.data_ptr()
        for other in self.others:
            x = torch.tanh(other(x))
        for weight, storage in zip(weights, storages, strict=True):
            self.sizes.add(storage.nbytes())
            x = x @ read(storage.data_ptr(), torch.empty(weight.shape)).t()
        return x


@streamed
def test_a_storage_is_of_one_weight_alone_and_is_right_until_the_call_is_over(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(Storages, placement, tmp_path)
    with torch.no_grad():
        for batch in vector_batches(3, 4, WIDTH):
            assert torch.equal(plain(*batch), managed(*batch))
    assert managed.sizes == {WIDTH * WIDTH * 4}
    assert not testing.of(managed).holds_views()


class Holds(nn.Module):
    """Asks for the address of a weight of another module: that stays there until its own call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.lender = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.lender.weight
        address = weight.data_ptr()
        for other in self.others:
            x = torch.tanh(other(x))
        return x @ read(address, weight.detach())


@streamed
def test_the_address_of_a_weight_of_another_module_is_right_until_the_call_is_over(
    placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(Holds, placement, tmp_path)
    with torch.no_grad():
        for batch in vector_batches(3, 4, WIDTH):
            assert torch.equal(plain(*batch), managed(*batch))
    assert not testing.of(managed).holds_views()


@streamed
def test_under_autocast_no_cast_of_a_weight_outlives_its_use(placement: str, tmp_path: Path) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))

    plain, managed = pair(layers, placement, tmp_path)
    for batch in vector_batches(3, 2, WIDTH):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(plain(*batch), managed(*batch))
            assert torch.is_autocast_cache_enabled(), "it is the user's again"
    tier = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert tier["peak_bytes"] - tier["chunk_peak_bytes"] < 24 * WIDTH * WIDTH * 2


@streamed
@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "and bfloat16"])
def test_under_autocast_a_graph_holds_no_casts_of_weights(
    mixed: bool, within: bool, placement: str, tmp_path: Path
) -> None:
    """Around the model, or entered in its forward as `accelerate` does it: plain torch keeps a cast of each weight
    from the forward to the backward."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16 if mixed else torch.float32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                return self.layers(x) * self.scale

    plain, managed = pair(Layers, placement, tmp_path)
    optimizers = adamws(plain, managed)
    for batch in vector_batches(3, 2, WIDTH):
        for module, optimizer in zip((plain, managed), optimizers, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=not within):
                loss = module(*batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed)
        assert torch.is_autocast_cache_enabled(), "it is the user's again"
    tier = hetmem.report(managed).to_dict()["tiers"]["device"]
    assert tier["peak_bytes"] - tier["chunk_peak_bytes"] < 24 * WIDTH * WIDTH * 2 // 2
