"""Modules of torch and awkward ones, which borrow weights, use them twice or change them: each trains as plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    WIDTH,
    Recipe,
    Tower,
    assert_same,
    both,
    everywhere,
    manage,
    offloaded,
    pair,
    token_batches,
    train_both,
    vector_batches,
)


class Borrower(nn.Module):
    """Reads weights outside the modules they belong to, as views, in lists and through `out=`-free functions."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.owner.weight, self.other.bias)
        x = x @ self.other.weight.t()[:, : WIDTH // 2]
        halves = torch.cat([self.owner.weight[:4], self.other.weight[:4]])
        chunks = self.other.weight.chunk(2)
        stacked = torch.stack(list(self.scale))
        mixed = torch.einsum("ij,kj->ik", halves, chunks[1])
        return x.sum() + mixed.square().mean() + (stacked * self.table["a"]).sum() + sum(self.scale).mean()


class Twice(nn.Module):
    """One layer used twice in a forward, and a layer used in place on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(F.relu_(self.layer(x)))
        return self.other(x).add_(self.other.bias)


class Square(torch.autograd.Function):
    """A custom function that saves a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        product = (grad * (x @ weight)).sum()
        return grad @ weight.t() * weight.sum(), x.t() @ grad * weight.sum() + product


class Custom(nn.Module):
    """A custom function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(self.layer(x), self.weight)


class Recurrent(nn.Module):
    """LSTM and GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(32, 32, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Attention(nn.Module):
    """Multi-head attention and an encoder layer (whose inference fast path reads weights by itself)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.attention(x, x, x)[0])


class Images(nn.Module):
    """Convolution, batch norm (with buffers), group norm, transposed convolution, PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 48, 3, padding=1)
        self.group = nn.GroupNorm(4, 48)
        self.up = nn.ConvTranspose2d(48, 4, 2, stride=2)
        self.act = nn.PReLU()
        self.wide = nn.Conv2d(4, 512, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.up(self.act(self.group(self.deep(self.norm(self.conv(x)))))))


class Renormed(nn.Module):
    """An embedding that changes its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(Tower.VOCABULARY, WIDTH, max_norm=0.7)
        self.bag = nn.EmbeddingBag(Tower.VOCABULARY, WIDTH, padding_idx=0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(tokens).mean(1) + self.bag(more))


class Bilinear(nn.Module):
    """Bilinear, LayerNorm without affine, RMSNorm, and complex arithmetic on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(16, 16, 64)
        self.norm = nn.RMSNorm(64)
        self.phase = nn.Parameter(torch.randn(64, 2))
        self.complex = nn.Parameter(torch.randn(16, 1024, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rotated = torch.view_as_complex(self.phase) * self.norm(self.bilinear(x, x))
        mixed = x.to(torch.complex64) @ self.complex.conj() @ self.complex.mH
        return rotated.abs().square().mean() + mixed.abs().mean() + torch.real(mixed).mean()


class Pair(NamedTuple):
    """Two weights."""

    first: torch.Tensor
    second: torch.Tensor


class Packed(nn.Module):
    """Weights in a tuple with names."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 8 for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch.cat(Pair(*self.pair)))


class Experts(nn.Module):
    """A transform of torch.func within the forward, over a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 8)
        self.layer = nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        y: torch.Tensor = torch.func.vmap(lambda weight: torch.tanh(x @ weight))(self.experts.view_as(self.experts))
        return y.square().mean()


def weight_normed() -> nn.Module:
    """Weight norm (as a parametrization), spectral norm and an orthogonal weight."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    )


def old_weight_norm() -> nn.Module:
    """The deprecated weight norm, which sets a plain attribute in a pre-hook."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "borrowed weights": (Borrower, lambda n: vector_batches(n, 4, WIDTH)),
    "a module used twice": (Twice, lambda n: vector_batches(n, 4, WIDTH)),
    "custom function": (Custom, lambda n: vector_batches(n, 4, WIDTH)),
    "recurrent": (Recurrent, lambda n: vector_batches(n, 3, 5, 32)),
    "attention": (Attention, lambda n: vector_batches(n, 2, 5, 32)),
    "images": (Images, lambda n: vector_batches(n, 2, 3, 8, 8)),
    "max_norm": (Renormed, lambda n: token_batches(n, rows=3)),
    "bilinear": (Bilinear, lambda n: vector_batches(n, 4, 16)),
    "packed": (Packed, lambda n: vector_batches(n, 4, WIDTH)),
    "experts": (Experts, lambda n: vector_batches(n, 4, WIDTH)),
    "weight norm": (weight_normed, lambda n: vector_batches(n, 4, WIDTH)),
    "old weight norm": (old_weight_norm, lambda n: vector_batches(n, 4, WIDTH)),
}


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("name", ZOO)
def test_modules_of_torch_and_awkward_ones_train_and_evaluate_as_plain(
    name: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batches = ZOO[name]
    # The encoder layer's inference fast path is off while any function mode is on, so plain torch must not take it.
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    modules = pair(build, placement, tmp_path, chunk_bytes=2 * CHUNK if name == "bilinear" else CHUNK)
    if name == "bilinear":  # AdamW of hetmem has no complex numbers: SGD of torch steps
        optimizers = tuple(torch.optim.SGD(module.parameters(), lr=0.1) for module in modules)
    else:
        optimizers = None
    optimizers = train_both(*modules, batches(3), Recipe(steps=2, accumulation=2), optimizers=optimizers)
    for module in modules:
        module.eval()
    with torch.no_grad():
        assert_same(*both(modules, lambda module: module(*batches(1)[0])), "evaluation")
    for module in modules:
        module.train()
    train_both(*modules, batches(3), Recipe(steps=2), optimizers=optimizers)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_normalisation_over_batches_computes_in_float32_beside_sixteen_bits(
    dtype: torch.dtype, placement: str, tmp_path: Path
) -> None:
    """As their running statistics are; weights of it share no chunk with others, and train as all do."""
    modules = pair(Images, placement, tmp_path, mixed_precision=dtype)
    batches = vector_batches(3, 2, 3, 8, 8, dtype=dtype)
    optimizers = train_both(*modules, batches, Recipe(accumulation=2, mixed=dtype))
    train_both(*modules, batches, Recipe(mixed=dtype), optimizers=optimizers)
    chunks = testing.of(modules[1]).chunks()
    computes = {name: chunk.compute_dtype for chunk in chunks for name in chunk.parameters}
    assert {name for name, found in computes.items() if found is torch.float32} == {"norm.weight", "norm.bias"}
    assert {found for name, found in computes.items() if not name.startswith("norm.")} == {dtype}
    for name, buffer in modules[0].named_buffers():
        assert_same(buffer, dict(modules[1].named_buffers())[name], name)


def test_norms_compute_in_float32_only_beside_running_statistics(tmp_path: Path) -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
    chunks = testing.of(manage(module, "host", tmp_path, mixed_precision=torch.bfloat16)).chunks()
    assert {chunk.parameters: chunk.compute_dtype for chunk in chunks} == {
        ("0.weight", "0.bias"): torch.float32,
        ("1.weight", "1.bias"): torch.bfloat16,
    }


class Tied(nn.Module):
    """Uses its own weight after a module within it that has the same one has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.weight = self.inner.weight
        self.addresses: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.addresses = [self.weight.data_ptr()]
        x = self.inner(x)
        self.addresses.append(self.weight.data_ptr())
        return F.linear(x, self.weight).sum()


def test_a_weight_stays_bound_until_the_last_module_that_has_it_ends(tmp_path: Path) -> None:
    managed: Any = manage(nn.Sequential(nn.Linear(WIDTH, WIDTH), Tied()), "host", tmp_path, activations="keep")
    for _ in range(4):
        managed(torch.ones(3, WIDTH)).backward()
        first, second = managed[1].addresses
        assert first == second


class Peeks(nn.Module):
    """Asks where the weight of another module is, beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.other.weight.data_ptr()
        return x * self.weight


def test_a_module_that_asks_for_another_ones_weight_binds_its_own_alone_the_next_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Peeks())
    managed: Any = manage(model, "host", tmp_path, activations="keep", sanitize=True)
    inside, x = testing.of(managed), torch.ones(3, WIDTH)
    for _ in range(4):
        before = len(inside.operators())
        managed(x).sum().backward()
        assert inside.operators()[before:][:3] == ["Linear", "Peeks", "data_ptr"]


class Hooking(nn.Module):
    """Registers a hook of a part within a forward, and removes it within another one, as `act` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[str] = []
        self.act, self.handles = "", list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.act == "register":
            self.handles += [
                self.second.register_forward_pre_hook(lambda part, _: self.seen.append(f"{part.weight.dtype}"))
            ]
            self.handles += [self.second.register_forward_hook(lambda *_: self.seen.append("after"))]
        elif self.act == "remove":
            self.handles.pop().remove()
        self.seen.append("forward")
        return self.second(self.first(x))


@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
def test_hooks_that_a_forward_registers_and_removes_are_called_as_in_torch(mixed: torch.dtype | None) -> None:
    plain = Hooking()
    limits = hetmem.Budget(device="16MiB", host="16MiB")
    managed = hetmem.manage(copy.deepcopy(plain), limits, device=hetmem.SimDevice(), mixed_precision=mixed)
    plain, x = plain.to(mixed), torch.randn(2, WIDTH, dtype=mixed)
    for plain.act in ["", "", "", "", "register", "", "remove", "", "remove", "", "register", ""]:
        managed.act = plain.act
        with torch.no_grad():
            assert_same(plain(x), managed(x), plain.act)
            for name in ("first", "second"):
                assert_same(plain.get_submodule(name)(x), managed.get_submodule(name)(x), f"{name} alone")
        assert managed.seen == plain.seen
    hetmem.release(managed)
    assert list(managed.second._forward_pre_hooks) == [handle.id for handle in managed.handles[:1]]
