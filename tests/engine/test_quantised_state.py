"""What `state_dict()` has of quantised weights: values that are decoded as they are read, and cannot be written to."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.autograd.profiler import profile

import hetmem
from hetmem import testing
from hetmem.errors import ManageError
from tests.engine import harness

WIDTH = 64


def built() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)).bfloat16()


def managed() -> Any:
    """One quantised weight, and one that is trained."""
    torch.manual_seed(0)
    model = built()
    model[0].requires_grad_(False)
    return hetmem.manage(model, hetmem.Budget(device="8MiB", host="8MiB"), device="sim", frozen="nf4")


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda v: v.float().sum(1),
    "a list": lambda v: torch._foreach_mul([v, v], 2.0)[1],
    "an average": lambda v: torch.zeros(WIDTH, WIDTH).lerp_(v.float(), 0.25),
    "a copy into another": lambda v: torch.zeros(WIDTH, WIDTH).copy_(v),
    "a view": lambda v: v.view(-1)[3:9],
    "data": lambda v: v.data,
    "detach": lambda v: v.detach(),
    "numpy": lambda v: torch.from_numpy(v.float().numpy()),
    "numbers": lambda v: torch.tensor(v.tolist()),
    "torch.tensor": lambda v: torch.tensor(v),
    "deepcopy": lambda v: copy.deepcopy(v),
    "torch.save": saved,
    "DLPack": lambda v: torch.utils.dlpack.from_dlpack(v),
    "an address": lambda v: torch.tensor([v.data_ptr() == v.data_ptr() != 0]),
    "a storage": lambda v: torch.empty(0, dtype=v.dtype).set_(v.untyped_storage()),
    "text": lambda v: torch.tensor([*repr(v).encode()]),
    "layout": lambda v: torch.tensor([*v.shape, *v.stride(), v.is_contiguous(), v.nbytes, len(v), v.is_cpu]),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_values_are_decoded_as_they_are_read(read: str) -> None:
    model = managed()
    value, expected = model.state_dict()["0.weight"], testing.of(model).home("0.weight")
    found = READS[read](value)
    harness.assert_same(READS[read](expected), found, read)
    assert type(found) is torch.Tensor


def test_a_state_dict_takes_no_memory_for_them() -> None:
    model = managed()
    with profile(profile_memory=True) as seen:
        state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert sum(max(0, event.cpu_memory_usage) for event in seen.function_events or ()) < WIDTH * WIDTH
    harness.assert_same(testing.of(model).home("0.weight"), state["0.weight"].clone(), "the weight")
    harness.assert_same(model[1].weight, state["1.weight"], "one that is trained")


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda v: v.mul_(2),
    "an element": lambda v: v.__setitem__((0, 0), 1.0),
    "out": lambda v: torch.add(v, 1, out=v),
    "a list": lambda v: torch._foreach_mul_([v], 2.0),
    "an initialisation": lambda v: nn.init.normal_(v),
    "data": lambda v: setattr(v, "data", torch.zeros(WIDTH, WIDTH)),
    "training": lambda v: v.requires_grad_(),
    "training, by name": lambda v: setattr(v, "requires_grad", True),
    "set_": lambda v: v.set_(torch.zeros(2)),
    "an exchange": lambda v: torch.utils.swap_tensors(v, torch.zeros(2)),  # type: ignore[no-untyped-call]
    "sharing": lambda v: v.share_memory_(),
    "a parameter": lambda v: nn.Parameter(v),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused(write: str) -> None:
    model = managed()
    value, expected = model.state_dict()["0.weight"], testing.of(model).home("0.weight")
    with torch.no_grad(), pytest.raises((ManageError, RuntimeError), match=r"nf4|quantised weight|ReadLater"):
        WRITES[write](value)
    harness.assert_same(expected, value.clone(), "the value")
    harness.assert_same(expected, model[0].weight.detach(), "the weight")


def test_files_and_other_models_get_the_values(tmp_path: Path) -> None:
    model, plain = managed(), built()
    state, expected = model.state_dict(), testing.of(model).home("0.weight")
    save_file(state, tmp_path / "model.safetensors")
    harness.assert_same(expected, load_file(tmp_path / "model.safetensors")["0.weight"], "in a file")
    plain.load_state_dict(state)
    harness.assert_same(expected, plain[0].weight.detach(), "of a plain model")
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    harness.assert_same(plain(x), torch.func.functional_call(plain, model.state_dict(), (x,)), "of a call")
    other = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    other.data = model.state_dict()["0.weight"]  # in C++, without a function
    assert other.isnan().all()


def test_values_outlive_release_and_not_their_model() -> None:
    model = managed()
    state, expected = model.state_dict(), testing.of(model).home("0.weight")
    hetmem.release(model)
    harness.assert_same(expected, state["0.weight"].clone(), "released")
    model = managed()
    state = model.state_dict()
    del model
    gc.collect()
    with pytest.raises(ManageError, match="its model, which had its codes, is gone"):
        state["0.weight"].sum()
