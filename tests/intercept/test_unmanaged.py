"""Parameters that are added after `hetmem.manage` work as they are, or torch's error is told with their names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from hetmem.errors import DeviceAccessError, ManageError
from tests.engine.harness import BATCHES, WIDTH, assert_same, both, everywhere, manage, mlp, pair, precisions


class Outer(nn.Module):
    """Calls a managed module, or is one and calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.head: nn.Module = nn.Identity()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(value))
        return result


@everywhere
def test_an_error_of_torch_names_the_parameters_that_were_added(placement: str, tmp_path: Path) -> None:
    model = manage(Outer(), placement, tmp_path, mixed_precision=torch.bfloat16)
    model.inner.append(nn.Linear(WIDTH, WIDTH))
    last = len(model.inner) - 1
    with pytest.raises(RuntimeError, match="must have the same dtype") as raised:
        model(torch.rand(2, WIDTH))
    said = str(raised.value)
    assert said.count("not there when hetmem.manage was called") == 1
    assert f": inner.{last}.weight (torch.float32, cpu), inner.{last}.bias (torch.float32, cpu). They" in said
    hetmem.release(model)
    manage(model, placement, tmp_path, mixed_precision=torch.bfloat16)  # as it says
    model(torch.rand(2, WIDTH)).sum().backward()


def test_of_many_that_were_added_some_are_named(tmp_path: Path) -> None:
    model = manage(Outer(), "host", tmp_path, mixed_precision=torch.bfloat16)
    model.head = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with pytest.raises(RuntimeError, match=r"head\.2\.weight \(torch.float32, cpu\) and 3 more\. They stay"):
        model(torch.rand(2, WIDTH))


def test_parameters_that_were_made_of_managed_ones_are_named(tmp_path: Path) -> None:
    """The old weight norm makes them of the memory that is the home of the weight."""
    model = manage(Outer(), "host", tmp_path, sanitize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.inner[0])
    with pytest.raises(DeviceAccessError, match=r"not there when .*: inner\.0\.weight_g \(.*, inner\.0\.weight_v \("):
        model(torch.rand(2, WIDTH))


def test_errors_that_are_not_of_this_forward_stay_as_they_are(tmp_path: Path) -> None:
    model = manage(Outer(), "host", tmp_path)
    with pytest.raises(RuntimeError, match=rf"^mat1 and mat2 shapes cannot be multiplied \(2x3 and {WIDTH}x\d+\)$"):
        model(torch.rand(2, 3))  # nothing was added
    model.head = nn.Linear(WIDTH, WIDTH)
    before = RuntimeError("before")
    try:
        raise before
    except RuntimeError:
        model(torch.rand(2, WIDTH))
    assert before.args == ("before",)


@everywhere
def test_parameters_that_were_added_train_as_they_are_in_float32(placement: str, tmp_path: Path) -> None:
    plain = Outer()
    model = manage(copy.deepcopy(plain), placement, tmp_path)
    added = nn.Linear(WIDTH, WIDTH)
    plain.head, model.head = added, copy.deepcopy(added)
    value = torch.rand(2, WIDTH)
    for each in (plain, model):
        each(value).square().sum().backward()
    for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_same(expected.grad, got.grad, name)


class Centred(nn.Module):
    """Keeps running statistics in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffers = self.get_buffer("running_mean"), self.get_buffer("running_var")
        return F.batch_norm(x, *buffers, self.weight, self.bias, training=True)


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_an_error_about_dtypes_names_the_buffers_that_keep_theirs(placement: str, tmp_path: Path) -> None:
    """The way out that it names works, and other errors stay as they are."""
    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Centred())  # noqa: E731
    managed = manage(build(), placement, tmp_path, mixed_precision=torch.bfloat16)
    x = torch.ones(4, WIDTH)
    with pytest.raises(RuntimeError, match=r"1\.running_mean \(torch\.float32\), .* to torch\.bfloat16, or") as raised:
        managed(x)
    assert str(raised.value).count("buffers") == 1
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        managed(x[:, :3])
    assert "buffers" not in str(raised.value)
    for buffer in managed[1].buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.bfloat16()
    assert managed(x).isfinite().all()
    autocast = manage(build(), placement, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast(x).isfinite().all()


@pytest.mark.parametrize("placement", ["resident", "host"])
@precisions
def test_functional_code_over_detached_weights_has_the_bits_of_torch_or_is_told_what_to_write(
    mixed: torch.dtype | None, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=mixed, sanitize=True)
    dtype, (x,) = mixed or torch.float32, BATCHES[0]
    narrowed = copy.deepcopy(plain).to(dtype)

    def called(module: nn.Module, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x.to(dtype),))

    expected = called(narrowed, {name: p.detach() for name, p in narrowed.named_parameters()})
    if mixed is None and placement == "resident":
        assert_same(expected, called(managed, {name: p.detach() for name, p in managed.named_parameters()}), "output")
    else:
        with pytest.raises(RuntimeError, match=r"functional_call puts them there.* p\.detach\(\)\.to\(device, torch\."):
            called(managed, {name: p.detach() for name, p in managed.named_parameters()})
    copies = {name: p.detach().to("cpu", dtype, copy=True) for name, p in managed.named_parameters()}
    assert_same(expected, called(managed, copies), "output")


def kernel(module: nn.Module) -> torch.Tensor:
    """The neural tangent kernel, as torch's tutorial computes it."""

    def output(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x.unsqueeze(0),)).squeeze(0)

    weights = {name: p.detach() for name, p in module.named_parameters()}
    jacobians = torch.func.vmap(torch.func.jacrev(output), (None, 0))(weights, BATCHES[0][0])
    products = [torch.einsum("Naf,Mbf->NMab", j.flatten(2), j.flatten(2)) for j in jacobians.values()]
    return torch.stack(products).sum(0)


def gradients_of_samples(module: nn.Module) -> torch.Tensor:
    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x.unsqueeze(0),)).square().mean()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(module.named_parameters()), BATCHES[0][0])
    return torch.cat([each.detach().flatten() for each in found.values()])


def hessian(module: nn.Module) -> torch.Tensor:
    found: torch.Tensor = torch.autograd.functional.hessian(lambda x: module(x).square().sum(), BATCHES[0][0][0])
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.each
@everywhere
@pytest.mark.parametrize("derivative", [kernel, gradients_of_samples, hessian])
def test_derivatives_by_transforms_have_the_bits_of_torch(
    derivative: Callable[[nn.Module], torch.Tensor], placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path)
    for _ in range(2):
        assert_same(*both(modules, derivative), derivative.__name__)


def test_an_optimizer_over_parameters_that_were_added_names_them(tmp_path: Path) -> None:
    model = manage(Outer(), "host", tmp_path)
    model.head = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ManageError, match=r"got head\.weight, which was added to its model after hetmem\.manage"):
        hetmem.AdamW(model.parameters())
    hetmem.release(model)
    hetmem.AdamW(manage(model, "host", tmp_path).parameters())  # as it says
