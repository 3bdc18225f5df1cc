"""What torch lets a model be and do, a managed model is and does: identity, shapes, hooks, checkpoints, odd modules.

Each case runs plainly and managed and must agree bit for bit; the predecessors fail many of them.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import hetmem
from hetmem.errors import ManageError
from tests.runtime.harness import (
    PLACEMENTS,
    STREAMED,
    Block,
    Recipe,
    Tower,
    assert_same,
    assert_same_grads,
    assert_same_states,
    assert_same_weights,
    comes_to_be,
    hetmem_threads,
    loss_of,
    manage,
    mlp,
    pair,
    token_batches,
    train_both,
    vector_batches,
)

WIDTH = 64
everywhere = pytest.mark.parametrize("placement", PLACEMENTS)
streamed = pytest.mark.parametrize("placement", STREAMED)


def both(modules: tuple[nn.Module, nn.Module], act: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """`act` on the plain module, then on the managed one, with the same random numbers."""
    state = torch.get_rng_state()
    left = act(modules[0])
    torch.set_rng_state(state)
    return left, act(modules[1])


# ---- what a managed module is ----------------------------------------------------------------------------------


@everywhere
def test_class_keys_identity_order_and_metadata_stay(placement: str, tmp_path: Path) -> None:
    plain = Tower(WIDTH)
    module = copy.deepcopy(plain)
    before = dict(module.named_parameters())
    returned = manage(module, placement, tmp_path)
    assert returned is module
    assert type(module) is Tower
    assert isinstance(module.blocks[0], Block)
    assert module.head.weight is module.embedding.weight
    after = dict(module.named_parameters())
    assert list(after) == list(before) == [name for name, _ in plain.named_parameters()]
    assert all(after[name] is before[name] and type(after[name]) is nn.Parameter for name in before)
    for name, parameter in plain.named_parameters():
        mine = after[name]
        assert (mine.shape, mine.stride(), mine.numel(), mine.dtype) == (
            parameter.shape,
            parameter.stride(),
            parameter.numel(),
            parameter.dtype,
        )
        assert mine.requires_grad
        assert mine.is_leaf
        assert mine.storage_offset() == 0
    assert_same_weights(plain, module)


@everywhere
def test_parameters_keep_shape_and_dtype_inside_forward(placement: str, tmp_path: Path) -> None:
    seen = []

    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.layer.weight
            seen.append((weight.shape, weight.stride(), weight.numel(), weight.dtype, weight.is_leaf, weight.grad))
            return self.other(self.layer(x))

    modules = pair(Curious, placement, tmp_path)
    (batch,) = vector_batches(1, 4, WIDTH)
    both(modules, lambda module: module(*batch))
    assert seen[0] == seen[1]


@everywhere
def test_managing_and_stepping_use_no_random_numbers(placement: str, tmp_path: Path) -> None:
    module = mlp()
    state = torch.get_rng_state()
    manage(module, placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters())
    module(torch.ones(4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    module(torch.ones(4, WIDTH)).sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_managing_twice_or_a_part_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    modules = pair(mlp, "host", tmp_path)
    with pytest.raises(ManageError, match="managed already"):
        manage(modules[1], "host", tmp_path)
    with pytest.raises(ManageError, match="managed already"):
        manage(modules[1][0], "host", tmp_path)
    train_both(*modules, vector_batches(2, 4, WIDTH))


@everywhere
def test_release_gives_an_ordinary_module_that_trains_on_with_the_same_bits(placement: str, tmp_path: Path) -> None:
    others, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    modules = pair(mlp, placement, tmp_path)
    left, right = train_both(*modules, vector_batches(3, 4, WIDTH))
    modules[0](torch.ones(2, WIDTH)).sum().backward()
    modules[1](torch.ones(2, WIDTH)).sum().backward()
    states = copy.deepcopy(right.state_dict())
    hetmem.release(modules[1])
    assert_same_weights(*modules)
    assert_same_grads(*modules)
    with pytest.raises(ManageError, match="released"):
        right.step()
    ordinary = torch.optim.AdamW(modules[1].parameters(), lr=1e-2, fused=True)
    ordinary.load_state_dict(states)
    for group in ordinary.param_groups:
        group["fused"] = True
    for module in modules:
        module.zero_grad()
    train_both(*modules, vector_batches(3, 4, WIDTH, seed=2), optimizers=(left, ordinary))
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in modules[1].modules())
    assert comes_to_be(lambda: all("worker" in thread.name for thread in {*threading.enumerate()} - others))
    del right  # it held states, which are views of the file
    gc.collect()
    assert comes_to_be(lambda: {*threading.enumerate()} <= others)
    assert len(os.listdir("/proc/self/fd")) == files


@streamed
def test_a_released_module_can_be_managed_again(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    train_both(*modules, vector_batches(2, 4, WIDTH))
    hetmem.release(modules[1])
    manage(modules[1], placement, tmp_path)
    train_both(*modules, vector_batches(2, 4, WIDTH, seed=2))


@everywhere
def test_dropping_model_and_optimizer_frees_threads_and_files(placement: str, tmp_path: Path) -> None:
    gc.collect()
    assert comes_to_be(lambda: not hetmem_threads()), "those of dropped models end by themselves"
    files = len(os.listdir("/proc/self/fd"))
    module = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters())
    for _ in range(2):
        module(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    watched = [weakref.ref(module), weakref.ref(optimizer), weakref.ref(module[0].weight)]
    del module, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]
    assert comes_to_be(lambda: not hetmem_threads())
    assert len(os.listdir("/proc/self/fd")) == files
    assert not any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


@everywhere
def test_deepcopy_is_an_ordinary_model_with_the_same_values(placement: str, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path)
    train_both(*modules, token_batches(2))
    copied = copy.deepcopy(modules[1])
    assert type(copied) is Tower
    assert copied.head.weight is copied.embedding.weight
    assert_same_weights(modules[0], copied)
    again = copy.deepcopy(modules[0])
    ordinary = [torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True) for module in (again, copied)]
    train_both(again, copied, token_batches(2), optimizers=(ordinary[0], ordinary[1]))
    train_both(*modules, token_batches(2))


@everywhere
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickled_models_come_back_equal(placement: str, how: str, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path)
    train_both(*modules, token_batches(2))
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(modules[1]))
    else:
        file = io.BytesIO()
        torch.save(modules[1], file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert_same_weights(modules[0], loaded)
    loss = loaded(*token_batches(1)[0])
    loss.backward()
    assert_same(modules[0](*token_batches(1)[0]), loss, "loss")


# ---- parameters of every kind ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters that are transposed, gapped, scalar and empty, and a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(48, WIDTH).t() / 8)
        self.gapped = nn.Parameter(torch.randn(48, 2 * WIDTH)[:, ::2] / 8)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.ballast = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        y = self.ballast(x) @ self.transposed @ self.gapped * self.scalar
        return y.square().mean() + self.conv(image).mean() * self.scalar + self.empty.sum()


@everywhere
def test_parameters_of_every_stride_and_size_train_as_in_torch(placement: str, tmp_path: Path) -> None:
    """The reference steps element by element: torch's own fused AdamW is wrong where strides differ."""
    modules = pair(Odd, placement, tmp_path)
    for name in ("transposed", "scalar", "empty", "conv.weight"):
        left, right = (module.get_parameter(name) for module in modules)
        assert (left.shape, left.stride()) == (right.shape, right.stride())
    reference = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in modules[0].parameters()]
    left = torch.optim.AdamW(reference, lr=1e-2, fused=True)
    right = hetmem.AdamW(modules[1].parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batch = torch.randn(4, WIDTH, generator=generator), torch.randn(2, 3, 8, 8, generator=generator)
        losses = both(modules, lambda module, batch=batch: module(*batch))
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert_same_grads(*modules)
        for mine, parameter in zip(reference, modules[0].parameters(), strict=True):
            mine.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        left.step()
        right.step()
        with torch.no_grad():
            for mine, parameter in zip(reference, modules[0].parameters(), strict=True):
                parameter.copy_(mine)
        assert_same_weights(*modules)
        assert_same_states(left, right)
        for module in modules:
            module.zero_grad()


@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_frozen_parameters_may_be_unfrozen_and_frozen_again(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        module = Tower(WIDTH, 2)
        module.blocks[0].requires_grad_(False)
        module.blocks[1].up.requires_grad_(False)
        return module

    modules = pair(build, placement, tmp_path, mixed_precision=mixed)
    optimizers = train_both(*modules, token_batches(2), Recipe(steps=2, mixed=mixed))
    for module in modules:
        module.blocks[0].requires_grad_(True)
        module.blocks[1].down.requires_grad_(False)
    train_both(*modules, token_batches(4), Recipe(steps=3, mixed=mixed), optimizers=optimizers)


@everywhere
def test_a_parameter_frozen_before_its_backward_keeps_the_gradient_that_it_had(placement: str, tmp_path: Path) -> None:
    """It was taken away for the new one to arrive, and none came."""
    modules = pair(mlp, placement, tmp_path)
    first, second = vector_batches(2, 4, WIDTH)
    for module in modules:
        loss_of(module, first).backward()
        loss = loss_of(module, second)
        module[2].weight.requires_grad_(False)
        loss.backward()
    assert modules[0][2].weight.grad is not None
    assert_same_grads(*modules)


@everywhere
def test_a_gradient_scaled_without_a_version_is_added_to_as_it_is(placement: str, tmp_path: Path) -> None:
    """One of each chunk: the staged copy on NVMe was compared for all parameters but the one that was added to."""
    modules = pair(mlp, placement, tmp_path)
    for batch in vector_batches(3, 4, WIDTH):
        for module in modules:
            loss_of(module, batch).backward()
        assert_same_grads(*modules)
        for module in modules:
            module[4].bias.grad.data.mul_(0.5)
            module[2].weight.grad.data.mul_(0.5)


class PartlyUsed(nn.Module):
    """Uses `second` only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.both else x


@everywhere
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_have_no_gradient_and_do_not_decay(placement: str, set_to_none: bool, tmp_path: Path) -> None:
    modules = pair(PartlyUsed, placement, tmp_path)
    never = modules[1].never.detach().clone()
    optimizers = None
    for use in (False, True, False):
        for module in modules:
            module.both = use
        recipe = Recipe(steps=2, set_to_none=set_to_none)
        optimizers = train_both(*modules, vector_batches(2, 4, WIDTH), recipe, optimizers=optimizers)
    assert modules[1].never.grad is None
    assert_same(never, modules[1].never, "never used")


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
    "weight norm": (weight_normed, lambda n: vector_batches(n, 4, WIDTH)),
    "old weight norm": (old_weight_norm, lambda n: vector_batches(n, 4, WIDTH)),
}


@everywhere
@pytest.mark.parametrize("name", ZOO)
def test_modules_of_torch_and_awkward_ones_train_and_evaluate_as_plain(
    name: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batches = ZOO[name]
    # The encoder layer's inference fast path is off while any function mode is on, so plain torch must not take it.
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    modules = pair(build, placement, tmp_path)
    if name == "bilinear":  # AdamW of hetmem has no complex numbers: SGD of torch steps
        optimizers = tuple(torch.optim.SGD(module.parameters(), lr=0.1) for module in modules)
    else:
        optimizers = None
    optimizers = train_both(*modules, batches(3), Recipe(accumulation=2), optimizers=optimizers)
    for module in modules:
        module.eval()
    with torch.no_grad():
        assert_same(*both(modules, lambda module: module(*batches(1)[0])), "evaluation")
    for module in modules:
        module.train()
    train_both(*modules, batches(3), optimizers=optimizers)


# ---- the shape of a step ---------------------------------------------------------------------------------------


def compare(modules: tuple[nn.Module, nn.Module], act: Callable[[nn.Module], Any]) -> None:
    """Run `act` on both; what it returns and all gradients agree; then one step of AdamW agrees too."""
    results = both(modules, act)
    for left, right in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert_same(left, right, "result")
    assert_same_grads(*modules)
    left_optimizer = torch.optim.AdamW(modules[0].parameters(), lr=1e-2, fused=True)
    right_optimizer = hetmem.AdamW(modules[1].parameters(), lr=1e-2)
    for optimizer in (left_optimizer, right_optimizer):
        optimizer.step()
    assert_same_weights(*modules)


BATCHES = vector_batches(4, 4, WIDTH)


def called_twice(module: nn.Module) -> Any:
    """Two calls, one backward."""
    loss = module(*BATCHES[0]).square().mean() + module(*BATCHES[1]).mean()
    loss.backward()
    return loss


def chained(module: nn.Module) -> Any:
    """The output of one call is the input of the next."""
    loss = module(module(*BATCHES[0])).square().mean()
    loss.backward()
    return loss


def two_backwards(module: nn.Module) -> Any:
    """retain_graph, then again."""
    loss = module(*BATCHES[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def interleaved(module: nn.Module) -> Any:
    """Two forwards, two backwards in the order of the forwards."""
    first, second = module(*BATCHES[0]).square().mean(), module(*BATCHES[1]).square().mean()
    first.backward()
    second.backward()
    return first, second


def partial_backward(module: nn.Module) -> Any:
    """One of two losses goes back, with the other alive until later."""
    output = module(*BATCHES[0])
    output[:2].sum().backward(retain_graph=True)
    output[2:].square().sum().backward()
    return output


def zeroed_between(set_to_none: bool, module: nn.Module) -> Any:
    """zero_grad between forward and backward."""
    module(*BATCHES[1]).sum().backward()
    loss = module(*BATCHES[0]).square().mean()
    module.zero_grad(set_to_none=set_to_none)
    loss.backward()
    return loss


def not_backward(module: nn.Module) -> Any:
    """Forwards whose backward never comes."""
    outputs = [module(*BATCHES[1]) for _ in range(5)]
    loss = module(*BATCHES[0]).square().mean()
    loss.backward()
    return loss, *outputs


def detached(module: nn.Module) -> Any:
    """no_grad and inference_mode passes before the real one."""
    with torch.no_grad():
        a = module(*BATCHES[1])
    with torch.inference_mode():
        b = module(*BATCHES[2]).clone()
    loss = module(*BATCHES[0]).square().mean()
    loss.backward()
    return loss, a, b


def with_inputs(module: nn.Module) -> Any:
    """backward(inputs=…) accumulates into those only."""
    loss = module(*BATCHES[0]).square().mean()
    loss.backward(inputs=[module[0].weight, module[4].bias])
    return loss


def input_gradient(module: nn.Module) -> Any:
    """The gradient of the input too."""
    x = BATCHES[0][0].clone().requires_grad_()
    module(x).square().mean().backward()
    return x.grad


def outside_forward(module: nn.Module) -> Any:
    """A weight used by the loss, outside of any forward of the module."""
    loss = module(*BATCHES[0]).square().mean() + 0.1 * sum(p.square().sum() for p in module.parameters())
    loss.backward()
    return loss


def part_called(module: nn.Module) -> Any:
    """Parts of the module are called by the user."""
    loss = module[2](module[0](*BATCHES[0])).square().mean()
    loss.backward()
    return loss


def functional_gradients(module: nn.Module) -> Any:
    """torch.autograd.grad leaves p.grad alone."""
    loss = module(*BATCHES[0]).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    module(*BATCHES[1]).mean().backward()
    return loss, *grads


def double_backward(module: nn.Module) -> Any:
    """A gradient penalty on the weights."""
    loss = module(*BATCHES[0]).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    penalty = loss + sum(grad.square().sum() for grad in grads)
    penalty.backward()
    return loss, penalty, *grads


def input_penalty(module: nn.Module) -> Any:
    """A gradient penalty on the input, as in WGAN."""
    x = BATCHES[0][0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    penalty = (grad.norm(dim=1) - 1).square().mean()
    penalty.backward()
    return penalty


def functional_call(module: nn.Module) -> Any:
    """functional_call with other values, then the module itself."""
    other = {name: p.detach() * 0.5 for name, p in module.named_parameters()}
    first = torch.func.functional_call(module, other, BATCHES[0])
    own = dict(module.named_parameters())
    loss = torch.func.functional_call(module, own, BATCHES[0]).square().mean()
    loss.backward()
    return first, loss


def func_grad(module: nn.Module) -> Any:
    """torch.func.grad over functional_call."""
    own = {name: p.detach() for name, p in module.named_parameters()}
    grads = torch.func.grad(lambda p: torch.func.functional_call(module, p, BATCHES[0]).square().mean())(own)
    module(*BATCHES[0]).square().mean().backward()
    return tuple(grads.values())


def func_grad_of_input(module: nn.Module) -> Any:
    """torch.func.grad and vmap of the module itself, over its input."""
    (x,) = BATCHES[0]
    grad = torch.func.grad(lambda value: module(value).square().mean())(x)
    rows = torch.func.vmap(module)(x)
    module(x).square().mean().backward()
    return grad, rows


def saved_on_cpu(module: nn.Module) -> Any:
    """Saved-tensor hooks of the user's around the forward."""
    with torch.autograd.graph.save_on_cpu():
        loss = module(*BATCHES[0]).square().mean()
    loss.backward()
    return loss


def autocast(module: nn.Module) -> Any:
    """torch.autocast around the forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(*BATCHES[0]).float().square().mean()
    loss.backward()
    return loss


def other_thread(module: nn.Module) -> Any:
    """Forward and backward on another thread."""
    found = []

    def work() -> None:
        loss = module(*BATCHES[0]).square().mean()
        loss.backward()
        found.append(loss)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return tuple(found)


STEPS: dict[str, Callable[[nn.Module], Any]] = {
    function.__name__: function
    for function in (
        called_twice, chained, two_backwards, interleaved, partial_backward, not_backward, detached, with_inputs,
        input_gradient, outside_forward, part_called, functional_gradients, double_backward, input_penalty,
        functional_call, func_grad, func_grad_of_input, saved_on_cpu, autocast, other_thread,
    )
}  # fmt: skip
STEPS["zeroed between, None"] = partial(zeroed_between, True)
STEPS["zeroed between, zeros"] = partial(zeroed_between, False)


@everywhere
@pytest.mark.parametrize("name", STEPS)
def test_a_step_may_have_any_shape(name: str, placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    for _ in range(3):
        compare(modules, STEPS[name])
        for module in modules:
            module.zero_grad()


@everywhere
def test_lengths_may_change_in_the_middle_of_training(placement: str, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path)
    batches = [
        token_batches(1, length=length, rows=rows)[0] for length, rows in ((8, 2), (8, 2), (24, 2), (5, 1), (8, 4))
    ]
    train_both(*modules, batches, Recipe(steps=7))


@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_eval_pass_in_between_changes_nothing(placement: str, mixed: torch.dtype | None, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path, mixed_precision=mixed)
    optimizers = None
    for _ in range(3):
        optimizers = train_both(*modules, token_batches(2), Recipe(steps=2, mixed=mixed), optimizers=optimizers)
        modules[1].eval()
        with torch.no_grad():
            modules[1](*token_batches(1, length=3)[0])
        modules[1].train()


# ---- gradients in the user's hands -----------------------------------------------------------------------------


def scaled(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.25)


def replaced(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = parameter.grad * 0.25 + 1


def written_by_slice(module: nn.Module) -> None:
    module[0].weight.grad[3:5] = 7.0


def dropped(module: nn.Module) -> None:
    module[2].weight.grad = None


def data_written(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data * 2


def set_without_backward(module: nn.Module) -> None:
    module.zero_grad()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


def swapped(module: nn.Module) -> None:
    module[0].weight.grad, module[2].weight.grad = module[2].weight.grad, module[0].weight.grad


EDITS = (scaled, replaced, written_by_slice, dropped, data_written, set_without_backward, swapped)


@everywhere
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["before step", "between micro-steps"])
def test_the_user_may_edit_gradients(
    edit: Callable[[nn.Module], None], when: str, placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = (
        torch.optim.AdamW(modules[0].parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(modules[1].parameters(), lr=1e-2),
    )

    def step(module: nn.Module) -> None:
        loss_of(module, BATCHES[0]).backward()
        edit(module)
        if when == "between micro-steps":
            loss_of(module, BATCHES[1]).backward()

    for index in range(3):
        both(modules, step)
        assert_same_grads(*modules, f"{index}")
        for optimizer in optimizers:
            optimizer.step()
        assert_same_weights(*modules, f"{index}")
        assert_same_states(*optimizers, f"{index}")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=index == 0)


@everywhere
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_old_gradient_stays_readable_and_full_shaped(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    module = manage(mlp(), placement, tmp_path, mixed_precision=mixed)
    loss_of(module, vector_batches(1, 4, WIDTH, dtype=mixed)[0]).backward()
    for parameter in module.parameters():
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert not parameter.grad.requires_grad


# ---- hooks -----------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("managed_first", [True, False], ids=["hooks after manage", "hooks before manage"])
def test_hooks_of_the_user_fire_in_order_with_the_right_values(
    placement: str, managed_first: bool, tmp_path: Path
) -> None:
    logs: dict[int, list[Any]] = {}

    def hook(module: nn.Module, log: list[Any]) -> None:
        weight, bias = module[2].weight, module[2].bias
        weight.register_hook(lambda grad: log.append(("weight", grad.clone())))
        weight.register_hook(lambda grad: grad * 3)
        weight.register_hook(lambda grad: log.append(("tripled", grad.clone())))
        bias.register_post_accumulate_grad_hook(
            lambda p: log.append(("accumulated", p.grad.clone(), p.detach().clone()))
        )
        module[0].register_forward_pre_hook(lambda m, args: log.append(("pre", args[0].clone())))
        module[0].register_forward_hook(lambda m, args, output: log.append(("post", output.detach().clone())))
        module[2].register_forward_hook(lambda m, args, output: output * 2)
        module[4].register_full_backward_hook(lambda m, gi, go: log.append(("full", gi[0].clone(), go[0].clone())))
        module.register_state_dict_post_hook(lambda *args: log.append(("state_dict",)))

    plain = mlp()
    managed = copy.deepcopy(plain)
    hook(plain, logs.setdefault(0, []))
    if not managed_first:
        hook(managed, logs.setdefault(1, []))
    manage(managed, placement, tmp_path)
    if managed_first:
        hook(managed, logs.setdefault(1, []))
    train_both(plain, managed, BATCHES, Recipe(accumulation=2))
    assert [entry[0] for entry in logs[0]] == [entry[0] for entry in logs[1]]
    for left, right in zip(logs[0], logs[1], strict=True):
        for a, b in zip(left[1:], right[1:], strict=True):
            assert_same(a, b, f"seen by the hook {left[0]}")


@everywhere
def test_gradients_read_inside_hooks_are_the_true_ones(placement: str, tmp_path: Path) -> None:
    """At the end of each accumulation `p.grad` is the sum so far, also in a hook that runs within backward."""
    modules = pair(mlp, placement, tmp_path)
    logs: list[list[torch.Tensor]] = [[], []]
    for module, log in zip(modules, logs, strict=True):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
    for batch in BATCHES[:3]:
        both(modules, lambda module, batch=batch: loss_of(module, batch).backward())
    for left, right in zip(*logs, strict=True):
        assert_same(left, right, "gradient in a hook")


@everywhere
def test_an_optimizer_in_the_backward_steps_as_in_torch(placement: str, tmp_path: Path) -> None:
    """One plain optimizer per parameter, stepped by post-accumulate hooks: torch's own recipe to save memory."""
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in module.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for batch in BATCHES:
        losses = both(modules, lambda module, batch=batch: loss_of(module, batch))
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert_same_weights(*modules)
        assert_same_grads(*modules)


# ---- exceptions ------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.tower = Tower(WIDTH, 2, checkpointing=checkpointing)
        self.fail: str | None = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        fail, self.fail = self.fail, None
        hidden = self.tower.hidden(tokens)
        if fail == "forward":
            raise KeyError("in forward")
        if fail == "interrupt":
            raise KeyboardInterrupt
        if fail == "backward":
            hidden.register_hook(_fail)
        if fail == "hook of a weight":
            handle = self.tower.blocks[0].up.weight.register_hook(lambda grad: (handle.remove(), _fail(grad)))
        logits = self.tower.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _fail(grad: torch.Tensor) -> None:
    raise KeyError("in backward")


@everywhere
@pytest.mark.parametrize("where", ["forward", "interrupt", "backward", "hook of a weight", "wrong shape"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["no checkpoint", "non-reentrant", "reentrant"])
def test_an_exception_leaves_a_model_that_trains_on_with_the_same_bits(
    where: str, placement: str, checkpointing: bool | None, tmp_path: Path
) -> None:
    modules = pair(partial(Failing, checkpointing), placement, tmp_path)
    batches = token_batches(3)
    optimizers = train_both(*modules, batches, Recipe(steps=2))
    for module in modules:
        module.fail = where
        tokens, targets = batches[0]
        with pytest.raises((KeyError, KeyboardInterrupt, ValueError)):
            module(tokens, targets[:, :3] if where == "wrong shape" else targets).backward()
    assert_same_weights(*modules)
    assert_same_grads(*modules, "after the exception")
    for module in modules:
        module.zero_grad()
    train_both(*modules, batches, Recipe(accumulation=2), optimizers=optimizers)


# ---- optimizers and checkpoints --------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused", "Adagrad", "RMSprop", "Adam foreach"])
def test_optimizers_of_torch_train_managed_parameters(name: str, placement: str, tmp_path: Path) -> None:
    """The fused ones do not count versions: a device copy must not survive their step."""
    modules = pair(mlp, placement, tmp_path)
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
        "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    }
    optimizers = tuple(make[name](module.parameters()) for module in modules)
    train_both(*modules, BATCHES, Recipe(steps=4, accumulation=2, clip=1e-4), optimizers=optimizers)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_the_rate_and_the_momenta(name: str, tmp_path: Path) -> None:
    modules = pair(mlp, "nvme", tmp_path)
    optimizers = (
        torch.optim.AdamW(modules[0].parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(modules[1].parameters(), lr=1e-2),
    )
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    for _ in range(4):
        train_both(*modules, BATCHES, Recipe(steps=1), optimizers=optimizers)
        for scheduler in schedulers:
            scheduler.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


@everywhere
def test_a_closure_is_called_with_gradients_enabled(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = (
        torch.optim.AdamW(modules[0].parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(modules[1].parameters(), lr=1e-2),
    )
    for batch in BATCHES:
        losses = []
        for module, optimizer in zip(modules, optimizers, strict=True):

            def closure(module: Any = module, optimizer: Any = optimizer, batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(module, batch)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert_same(*losses, "loss of the closure")
        assert_same_weights(*modules)


@everywhere
def test_hooks_of_the_optimizer_fire(placement: str, tmp_path: Path) -> None:
    module = manage(mlp(), placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters())
    log: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: log.append("pre"))
    optimizer.register_step_post_hook(lambda *args: log.append("post"))
    loss_of(module, BATCHES[0]).backward()
    optimizer.step()
    assert log == ["pre", "post"]


@everywhere
def test_groups_may_be_added_and_their_options_changed_later(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    optimizers = (
        torch.optim.AdamW(modules[0][0].parameters(), lr=1e-2, fused=True),
        hetmem.AdamW(modules[1][0].parameters(), lr=1e-2),
    )
    train_both(*modules, BATCHES, optimizers=optimizers)
    for module, optimizer in zip(modules, optimizers, strict=True):
        optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 3e-2, "weight_decay": 0.5})
        optimizer.param_groups[0]["weight_decay"] = 0.2
        optimizer.param_groups[0]["eps"] = 1e-5
    train_both(*modules, BATCHES, optimizers=optimizers)


@everywhere
@pytest.mark.parametrize("maximize", [True, False])
def test_other_options_of_adamw_equal_torch(placement: str, maximize: bool, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": maximize}
    optimizers = (
        torch.optim.AdamW(modules[0].parameters(), fused=True, **options),
        hetmem.AdamW(modules[1].parameters(), **options),
    )
    train_both(*modules, BATCHES, optimizers=optimizers)


def saved(value: Any) -> Any:
    """`value` through torch.save and torch.load as a checkpoint does it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@everywhere
@pytest.mark.parametrize("into", ["plain", "managed"])
@pytest.mark.parametrize("fresh", [True, False], ids=["into a new optimizer", "into one that has stepped"])
def test_checkpoints_interchange_with_torch_and_resume_bitwise(
    placement: str, into: str, fresh: bool, tmp_path: Path
) -> None:
    """A plain and a managed run; each is resumed from the other's state_dict and goes on with the same bits."""
    modules = pair(Tower, placement, tmp_path)
    optimizers = train_both(*modules, token_batches(3))
    source = 1 if into == "plain" else 0
    weights, states = saved(modules[source].state_dict()), saved(optimizers[source].state_dict())
    torch.manual_seed(7)
    resumed = Tower()
    if into == "plain":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.5, fused=True)
    else:
        manage(resumed, placement, tmp_path)
        optimizer = hetmem.AdamW(resumed.parameters(), lr=0.5)
    if not fresh:
        resumed(*token_batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(states)
    if into == "plain":
        for group in optimizer.param_groups:
            group["fused"] = True
    train_both(modules[0], resumed, token_batches(3, seed=5), optimizers=(optimizers[0], optimizer))


@everywhere
def test_saved_states_are_snapshots_after_deepcopy_and_readable_in_place(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    left, right = train_both(*modules, BATCHES)
    kept = copy.deepcopy(right.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        weight = modules[1][2].weight
        assert_same(left.state[modules[0][2].weight][name], right.state[weight][name], name)
        right.state[weight][name].mul_(0.5)
        left.state[modules[0][2].weight][name].mul_(0.5)
    train_both(*modules, BATCHES, optimizers=(left, right))
    left.load_state_dict(copy.deepcopy(kept) | {"param_groups": left.state_dict()["param_groups"]})
    right.load_state_dict(kept)
    assert_same_states(left, right)
    train_both(*modules, BATCHES, optimizers=(left, right))


@everywhere
def test_the_optimizer_can_be_pickled_as_a_state(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    _, right = train_both(*modules, BATCHES)
    loaded = pickle.loads(pickle.dumps(right.state_dict()))
    assert_same(loaded["state"][0]["exp_avg"], right.state[modules[1][0].weight]["exp_avg"], "exp_avg")


def test_a_parameter_that_is_not_managed_is_refused_by_adamw(tmp_path: Path) -> None:
    managed = manage(mlp(), "host", tmp_path)
    with pytest.raises(ManageError, match="not managed"):
        hetmem.AdamW([*managed.parameters(), nn.Parameter(torch.ones(3))])
