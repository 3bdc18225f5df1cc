"""Parameters that are added after `hetmem.manage` work as they are, or torch's error is told with their names."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from hetmem.errors import DeviceAccessError
from tests.engine.harness import WIDTH, assert_same, everywhere, manage, mlp


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
    with pytest.raises(RuntimeError) as raised:
        model(torch.rand(2, WIDTH))
    said = str(raised.value)
    assert "must have the same dtype" in said
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
    model = manage(Outer(), "host", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.inner[0])
    with pytest.raises(DeviceAccessError, match=r"not there when .*: inner\.0\.weight_g \(.*, inner\.0\.weight_v \("):
        model(torch.rand(2, WIDTH))


def test_errors_that_are_not_of_this_forward_stay_as_they_are(tmp_path: Path) -> None:
    model = manage(Outer(), "host", tmp_path)
    with pytest.raises(RuntimeError) as raised:
        model(torch.rand(2, 3))  # nothing was added
    assert "hetmem" not in str(raised.value)
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
