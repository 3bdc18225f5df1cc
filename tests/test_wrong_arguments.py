"""What is passed by mistake is refused at once, with what was expected."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.base.config import refuse_environment
from hetmem.errors import BudgetError, CheckpointError, ManageError, StoreError

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a size as budget": ({"budget": "20GiB"}, r"expected a hetmem\.Budget\(.*\), got '20GiB'"),
    "a policy's name": ({"policy": "lru"}, r"policy must be an instance like hetmem\.LRU\(\), .* got 'lru'"),
    "a number as plan": ({"plan": 3}, "plan must be what hetmem.plan returned, or the path of its file, got 3"),
}


@pytest.mark.parametrize(("options", "match"), MISTAKES.values(), ids=MISTAKES)
def test_an_argument_of_another_kind_is_refused(options: dict[str, Any], match: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ManageError, match=match):
        hetmem.manage(model, device="sim", **options)
    hetmem.manage(model, hetmem.Budget(device="1MiB", host="1MiB"), device="sim")  # nothing has changed


def test_a_decorator_without_its_call_is_refused_where_it_is_written() -> None:
    with pytest.raises(ManageError, match=r"call it: hetmem\.managed\(hetmem\.Budget\(…\)\) decorates Model"):

        @hetmem.managed
        class Model(nn.Module):
            pass


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no chunk": ({"chunk_bytes": 0}, r"chunk_bytes must be at least 16\.00 KiB \(16384 bytes: 4096 .* got 0"),
    "a chunk below the least": ({"chunk_bytes": 7}, r"at least 16\.00 KiB .* got 7"),
    "a class of policy": ({"policy": hetmem.LRU}, r"policy must be an instance like hetmem\.LRU\(\)"),
    "a word for a switch": ({"sanitize": "no"}, "sanitize must be True or False, got 'no'"),
    "a number as hardware": ({"hardware": 3}, "hardware must be the name of a profile, its path or .* got 3"),
    "a precision's name": (
        {"mixed_precision": "fp8"},
        r"mixed_precision must be torch\.bfloat16 \('bf16'\), .* got 'fp8'",
    ),
}


@pytest.mark.parametrize(("options", "match"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_cannot_be_meant_is_refused_and_nothing_has_changed(options: dict[str, Any], match: str) -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=match):
        hetmem.manage(model, hetmem.Budget(device="1MiB", host="1MiB"), device="sim", **options)
    hetmem.manage(model, hetmem.Budget(device="1MiB", host="1MiB"), device="sim")


@pytest.mark.parametrize("whole", [True, False])
def test_what_nobody_can_see_into_is_refused_and_nothing_has_changed(whole: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if whole:
            model = torch.jit.script(model)
        else:
            model[1] = torch.jit.script(model[1])
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ManageError, match=r"(the model|1) is a RecursiveScriptModule of torch.jit.* torch\.compile"):
        hetmem.manage(model, hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_a_size_without_end_is_none() -> None:
    with pytest.raises(BudgetError, match=r"Budget\(device=…\) must be a finite number of bytes, got 400 digits"):
        hetmem.Budget(device="9" * 400 + "GiB")


@pytest.mark.parametrize("least", [{"chunk_bytes": "16KiB"}, {"chunk_bytes": 16385}])
def test_the_least_chunk_is_one_that_can_be_had(least: dict[str, Any]) -> None:
    model = hetmem.manage(nn.Linear(64, 64), hetmem.Budget(device="64KiB", host="1MiB"), device="sim", **least)
    assert hetmem.report(model).to_dict()["chunk_bytes"] == 16384


@pytest.mark.parametrize("nvme", [{"nvme": "1MiB"}, {}], ids=["size", "no size"])
@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_directory_that_is_not_there_is_noticed_while_everything_is_on_the_device(
    nvme: dict[str, str], name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    budget = hetmem.Budget(device="1MiB", host="1MiB", nvme_dir=[tmp_path, tmp_path / name], **nvme)
    with pytest.raises(BudgetError, match=rf"nvme_dir=…\): '.*/{name}' is no directory: name an existing, writable"):
        hetmem.manage(nn.Linear(4, 4), budget, device="sim")


@pytest.mark.parametrize("directory", ["", 3, [3], b"/tmp", ["/tmp", ""]], ids=repr)
def test_what_is_no_path_is_no_nvme_directory(directory: Any) -> None:
    with pytest.raises(BudgetError, match=r"nvme_dir=…\) must be the path of a directory, or a list of such, got"):
        hetmem.Budget(nvme="1MiB", nvme_dir=directory)


@pytest.mark.parametrize("link", ["host_to_device", "device_to_host"])
def test_a_link_on_which_nothing_arrives_is_none(link: str) -> None:
    with pytest.raises(BudgetError, match=rf"SimDevice\({link}=…\) must be above 0 bytes per second"):
        hetmem.SimDevice(**{link: 0})


def test_an_option_that_does_not_exist_is_refused_before_a_model_is_built() -> None:
    with pytest.raises(
        ManageError,
        match="has no option 'chunk_byte': it takes activations, chunk_bytes, device, frozen, group, hardware",
    ):

        @hetmem.managed(hetmem.Budget(), chunk_byte="16MiB")
        class Model(nn.Module):
            pass


ADAM: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": ({"overlap": "x"}, "overlap must be 'off', 'backward' or 'forward', got 'x'"),
    "seed": ({"seed": "x"}, "seed must be an int, got 'x'"),
    "seed for chance": ({"seed": 1.5, "moments": "8bit"}, r"seed must be an int, got 1\.5"),
    "stochastic_rounding": ({"stochastic_rounding": "no"}, "stochastic_rounding must be True or False, got 'no'"),
    "max_grad_norm": ({"max_grad_norm": "x"}, "max_grad_norm must be a positive number or None, got 'x'"),
    "loss_scale": ({"loss_scale": True}, "loss_scale must be 'dynamic', a number or a LossScale, got True"),
    "a list as loss_scale": ({"loss_scale": [1]}, r"loss_scale must be 'dynamic', .* got \[1\]"),
    "lr": ({"lr": "x"}, "lr must be a number, got 'x'"),
    "a vector as lr": ({"lr": torch.ones(3)}, "lr must be a number, got tensor"),
    "eps": ({"eps": None}, "eps must be a number, got None"),
    "weight_decay": ({"weight_decay": (1,)}, r"weight_decay must be a number, got \(1,\)"),
    "one beta": ({"betas": 0.9}, r"betas must be two numbers, got 0\.9"),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, "betas must be two numbers, got"),
}


@pytest.mark.parametrize(("options", "match"), ADAM.values(), ids=ADAM)
def test_an_optimizer_refuses_what_it_cannot_compute_with(options: dict[str, Any], match: str) -> None:
    model = hetmem.manage(nn.Linear(4, 4), hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
    with pytest.raises(ValueError, match=match):
        hetmem.AdamW(model.parameters(), **options)
    if options.keys() <= {"lr", "eps", "weight_decay", "betas"}:
        with pytest.raises(ValueError, match=match):
            hetmem.AdamW([{"params": model.parameters(), **options}])
    if options.keys() <= {"overlap", "max_grad_norm", "loss_scale"}:
        with pytest.raises(ValueError, match=match):
            hetmem.optim.offload(torch.optim.SGD, model.parameters(), **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"value": "x"}, "a loss scale must be positive and finite, got 'x'"),
        ({"growth_factor": float("nan")}, "expected growth_factor >= 1 and .* got nan"),
        ({"growth_interval": 1.5}, r"growth_interval must be an int of steps, at least 1, got 1\.5"),
    ],
)
def test_a_loss_scale_that_would_never_grow_or_shrink_as_meant_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hetmem.optim.LossScale(**options)


PLANNED: dict[str, tuple[dict[str, Any], str]] = {
    "a size as budget": ({"budget": "20GiB"}, r"expected a hetmem\.Budget\(.*\), got '20GiB'"),
    "a number as hardware": ({"hardware": 3}, "hardware must be the name of a profile, its path or .* got 3"),
    "a loss's name": ({"loss": "sum"}, 'loss must be "chunked" or a function from the model.s output to a scalar'),
    "a precision's name": (
        {"mixed_precision": "fp8"},
        r"mixed_precision must be torch\.bfloat16 \('bf16'\), .* got 'fp8'",
    ),
    "half a batch": ({"micro_batches": 1.5}, r"micro_batches must be an int, at least 1, got 1\.5"),
    "no chunk": ({"chunk_bytes": 0}, r"chunk_bytes must be at least 16\.00 KiB"),
}


@pytest.mark.parametrize(("options", "match"), PLANNED.values(), ids=PLANNED)
def test_a_plan_of_what_cannot_be_run_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hetmem.plan(lambda: nn.Linear(64, 1), torch.ones(1, 64), **options)


def test_a_class_in_place_of_a_model_is_told_of_the_decorator() -> None:
    model: Any = nn.Linear
    with pytest.raises(ManageError, match=r"got the class Linear: pass an instance, or decorate .* hetmem\.managed"):
        hetmem.manage(model, hetmem.Budget())


def test_the_name_of_a_model_is_no_path_and_the_way_to_one_is_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(StoreError, match=r"no file or directory '.*some/Model-7B'.*snapshot_download\(name\)"):
        hetmem.load_weights(tmp_path / "some/Model-7B", model)


@pytest.mark.parametrize("swapped", [hetmem.save, hetmem.load_weights])
def test_a_path_in_place_of_a_model_is_told_of_the_order(swapped: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected \(path, model, …\) with a torch\.nn\.Module .* got "):
        swapped(nn.Linear(4, 4), str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("of", [hetmem.report, hetmem.progress, hetmem.release])
def test_what_is_no_module_is_not_asked_about(of: Callable[[Any], object]) -> None:
    with pytest.raises(ManageError, match=r"expected a managed torch\.nn\.Module, got NoneType"):
        of(None)


def test_a_report_names_the_directory_that_is_missing(tmp_path: Path) -> None:
    model = hetmem.manage(nn.Linear(4, 4), hetmem.Budget(device="1MiB", host="1MiB"), device="sim")
    with pytest.raises(FileNotFoundError, match=r"there is no such directory: '.*/missing'"):
        hetmem.report(model).save(tmp_path / "missing" / "run.html")


class Strict(nn.Linear):
    """Takes no attributes that it does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_apply":
            raise AttributeError(f"no {name} here")
        super().__setattr__(name, value)


def test_a_module_that_refuses_to_be_looked_after_is_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Strict(4, 4))
    values = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    budget = hetmem.Budget(device="1MiB", host=0, nvme="4MiB", nvme_dir=tmp_path, device_chunks="64KiB")
    with pytest.raises(AttributeError, match="no _apply here"):
        hetmem.manage(model, budget, device="sim")
    assert list(tmp_path.iterdir()) == []
    for module in model.modules():
        assert not (module._forward_pre_hooks or module._forward_hooks or module._state_dict_pre_hooks)
        assert "_apply" not in vars(module)
    for name, (tensor, value) in values.items():
        assert model.state_dict(keep_vars=True)[name] is tensor and torch.equal(tensor, value)
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_a_precision_may_be_named(name: Any, dtype: torch.dtype) -> None:
    model = hetmem.manage(nn.Linear(64, 64), hetmem.Budget(device="1M", host="1M"), device="sim", mixed_precision=name)
    assert model(torch.ones(1, 64)).dtype is dtype
    plan = hetmem.plan(lambda: nn.Linear(64, 64), torch.ones(1, 64), mixed_precision=name, loss=torch.Tensor.sum)
    assert plan.mixed_precision == str(dtype).removeprefix("torch.")


ENVIRONMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "macOS": ({"platform": "darwin"}, "2.13.0", "runs on Linux and this is darwin"),
    "Windows": ({"platform": "win32"}, "2.13.0", "runs on Linux and this is win32"),
    "an old Python": ({"version_info": (3, 9, 7), "version": "3.9.7 (main)"}, "2.13.0", "Python 3.10 .* is 3.9.7$"),
    "an old torch": ({}, "2.9.1+cu128", r"torch 2\.11 or newer, and this is 2\.9\.1\+cu128: pip install"),
}


@pytest.mark.parametrize(("system", "version", "match"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_machine_that_hetmem_does_not_run_on_is_told_so_at_import(
    system: dict[str, Any], version: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_environment(torch.__version__)
    with pytest.warns(UserWarning, match=r"tested with torch 2\.11 to 2\.13, .* this is 3\.0\.0a0\+git1234: run"):
        refuse_environment("3.0.0a0+git1234")
    for name, value in system.items():
        monkeypatch.setattr(sys, name, value)
    with pytest.raises(ImportError, match=match):
        refuse_environment(version)
