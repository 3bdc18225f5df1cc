"""A managed module is the module it was: class, names, parameters, copies and pickles; released or dropped, it leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Block,
    Recipe,
    Tower,
    all_hetmem_threads_end,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    both,
    comes_to_be,
    everywhere,
    manage,
    mlp,
    pair,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)


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


def open_files(directory: Path) -> list[str]:
    """The files in `directory` that this process has open, also those without a name."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of listdir itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.startswith(str(directory))]


@everywhere
def test_release_gives_an_ordinary_module_that_trains_on_with_the_same_bits(placement: str, tmp_path: Path) -> None:
    assert all_hetmem_threads_end(), "those of dropped models end by themselves, and close their files"
    others = set(threading.enumerate())
    modules = pair(mlp, placement, tmp_path)
    assert bool(open_files(tmp_path)) == (placement == "nvme")
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
    assert open_files(tmp_path) == []


@streamed
def test_a_released_module_can_be_managed_again(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    train_both(*modules, vector_batches(2, 4, WIDTH))
    hetmem.release(modules[1])
    manage(modules[1], placement, tmp_path)
    train_both(*modules, vector_batches(2, 4, WIDTH, seed=2))


@everywhere
def test_dropping_model_and_optimizer_frees_threads_and_files(placement: str, tmp_path: Path) -> None:
    assert all_hetmem_threads_end(), "those of dropped models end by themselves"
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
    assert all_hetmem_threads_end()
    assert open_files(tmp_path) == []
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


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("copied", [False, True], ids=["of the model", "of a copy"])
def test_hooks_that_others_take_along_to_modules_of_theirs_do_nothing_there(
    copied: bool, placement: str, tmp_path: Path
) -> None:
    """As torch's quantization does, and without keyword arguments."""
    plain, managed = pair(mlp, placement, tmp_path)
    train_both(plain, managed, vector_batches(2, 4, 64))
    of = copy.deepcopy(managed)[0] if copied else managed[0]
    theirs = torch.nn.Linear(64, 64)
    x = torch.ones(2, 64)
    expected = theirs(x)
    for hook in of._forward_pre_hooks.values():
        theirs.register_forward_pre_hook(hook)
    for hook in of._forward_hooks.values():
        theirs.register_forward_hook(hook)
    assert_same(expected, theirs(x), "output")
    train_both(plain, managed, vector_batches(2, 4, 64))


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickled_models_come_back_equal(placement: str, how: str, tmp_path: Path) -> None:
    modules = pair(Tower, placement, tmp_path)
    train_both(*modules, token_batches(2))
    if how == "pickle":
        kept = pickle.dumps(modules[1])
        loaded = pickle.loads(kept)
    else:
        file = io.BytesIO()
        torch.save(modules[1], file)
        file.seek(0)
        loaded, kept = torch.load(file, weights_only=False), file.getvalue()
    assert b"hetmem" not in kept  # so that it can be opened without
    loaded.double().float()
    assert loaded.head.weight.dtype is torch.float32
    assert_same_weights(modules[0], loaded)
    loss = loaded(*token_batches(1)[0])
    loss.backward()
    assert_same(modules[0](*token_batches(1)[0]), loss, "loss")


@everywhere
def test_parameters_that_others_are_to_replace_stay(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    state = {name: value * 0.5 for name, value in plain.state_dict().items()}
    for module in (managed, managed[2]):
        with pytest.raises(ManageError, match="assign=True"):
            module.load_state_dict({name.removeprefix("0."): value for name, value in state.items()}, assign=True)
    assert_same_weights(plain, managed)
    train_both(plain, managed, BATCHES)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_state_dict_within_compute_is_refused_where_weights_are_copies(
    register: str, placement: str, tmp_path: Path
) -> None:
    """It had the 16-bit copies, and loading wrote to these; float32 ones had no room beside each other."""
    plain, managed = pair(mlp, placement, tmp_path, mixed_precision=torch.bfloat16)
    saved, asked = copy.deepcopy(managed.state_dict()), list[object]()

    def ask(*_: object) -> None:
        for act in (managed.state_dict, lambda: managed.load_state_dict(saved)):
            with pytest.raises(ManageError, match="within a forward or a backward"):
                act()
            asked.append(act)

    handle = getattr(managed[2], register)(ask)
    managed(*BATCHES[0]).sum().backward()
    handle.remove()
    managed.zero_grad()
    assert len(asked) == 2
    assert_same_weights(plain, managed)
    train_both(plain, managed, vector_batches(3, 4, WIDTH, dtype=torch.bfloat16), Recipe(mixed=torch.bfloat16))


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.half])
def test_another_dtype_is_for_those_that_are_released(
    change: Callable[[nn.Module], nn.Module], placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    with pytest.raises(ManageError, match="release"):
        change(managed)
    assert_same_weights(plain, managed, "after the refusal")
    train_both(plain, managed, BATCHES)
    hetmem.release(managed)
    for module in (plain, managed):
        change(module)
    assert_same_weights(plain, managed, "released")
