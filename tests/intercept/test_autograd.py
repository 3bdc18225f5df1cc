"""Autograd's own errors stay, and what it saves lives exactly as long as in plain torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import (
    BATCHES,
    CHUNK,
    WIDTH,
    Recipe,
    Tower,
    assert_same,
    assert_same_grads,
    comes_to_be,
    everywhere,
    loss_of,
    mlp,
    offloaded,
    pair,
    precisions,
    streamed,
    token_batches,
    train_both,
    vector_batches,
)
from tests.engine.parts import Scale


@contextmanager
def no_collector() -> Iterator[None]:
    """Whatever dies in here dies because nobody refers to it, not because a collection found a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watch_activations(module: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to the storages of the outputs of all parts of `module`, filled by every forward."""
    seen: list[weakref.ref[torch.Tensor]] = []
    for part in module.modules():
        part.register_forward_hook(lambda m, args, output: seen.append(weakref.ref(output.untyped_storage())))
    return seen


def alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(reference() is not None for reference in references)


@everywhere
def test_a_second_backward_is_the_error_of_torch(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        loss = loss_of(module, BATCHES[0])
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_same_grads(*modules)
    for module in modules:
        loss_of(module, BATCHES[1]).backward()
    assert_same_grads(*modules)


@everywhere
def test_an_in_place_change_of_a_leaf_is_the_error_of_torch(placement: str, tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer.weight.mul_(2)
            return self.other(self.layer(x))

    for module in pair(Writes, placement, tmp_path):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            module(*BATCHES[0])
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            module.layer.weight.mul_(2)


@everywhere
def test_no_graph_without_gradients(placement: str, tmp_path: Path) -> None:
    for module in pair(mlp, placement, tmp_path):
        with torch.no_grad():
            assert module(*BATCHES[0]).grad_fn is None
        module.requires_grad_(False)
        output = module(*BATCHES[0])
        assert not output.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            output.sum().backward()


def backward(module: nn.Module) -> None:
    loss_of(module, BATCHES[0]).backward()


def forward_only(module: nn.Module) -> None:
    loss_of(module, BATCHES[0])


def two_calls(module: nn.Module) -> None:
    (loss_of(module, BATCHES[0]) + loss_of(module, BATCHES[1])).backward()


def retained(module: nn.Module) -> None:
    loss = loss_of(module, BATCHES[0])
    loss.backward(retain_graph=True)
    loss.backward()


def raised_in_backward(module: nn.Module) -> None:
    output = module(*BATCHES[0])
    output.register_hook(_fail)
    try:
        output.sum().backward()
    except KeyError:
        return
    raise AssertionError("did not raise")


def _fail(grad: torch.Tensor) -> None:
    raise KeyError("in backward")


LIVES = (backward, forward_only, two_calls, retained, raised_in_backward)


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("act", LIVES, ids=lambda act: act.__name__)
def test_activations_die_without_the_collector(
    act: Callable[[nn.Module], None], placement: str, tmp_path: Path
) -> None:
    modules = pair(mlp, placement, tmp_path)
    for module in modules:
        optimizer = hetmem.AdamW(module.parameters()) if module is modules[1] else None
        seen = watch_activations(module)
        for _ in range(3):  # the first ones are measured, later ones are planned
            with no_collector():
                seen.clear()
                act(module)
                assert seen
                assert alive(seen) == 0
            if optimizer is not None:
                optimizer.step()


@everywhere
def test_activations_die_while_the_backward_goes_as_in_plain_torch(placement: str, tmp_path: Path) -> None:
    """When the first layer's gradient arrives, what the later layers saved is gone."""
    counts: list[list[int]] = []
    for module in pair(mlp, placement, tmp_path):
        seen = watch_activations(module)
        counts.append([])
        for parameter in module.parameters():
            parameter.register_hook(lambda grad, seen=seen, log=counts[-1]: log.append(alive(seen)))
        for _ in range(2):
            with no_collector():
                seen.clear()
                loss_of(module, BATCHES[0]).backward()
    assert counts[0] == counts[1]


@pytest.mark.each
@offloaded
@pytest.mark.parametrize("checkpointing", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_activations_die_too(placement: str, checkpointing: bool, tmp_path: Path) -> None:
    for module in pair(partial(Tower, WIDTH, checkpointing=checkpointing), placement, tmp_path):
        seen = watch_activations(module)
        for batch in token_batches(3):
            with no_collector():
                seen.clear()
                module(*batch).backward()
                assert alive(seen) == 0


@everywhere
def test_outputs_do_not_keep_device_slots_after_their_graph_is_gone(placement: str, tmp_path: Path) -> None:
    _, module = pair(mlp, placement, tmp_path)
    kept = [module(*BATCHES[0]) for _ in range(3)]
    for output in kept:
        output.sum().backward()
    assert not testing.of(module).holds_views()
    del kept


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("backwards", [True, False], ids=["with backward", "forward only"])
def test_live_tensors_do_not_grow_over_twenty_steps(placement: str, backwards: bool, tmp_path: Path) -> None:
    _, module = pair(mlp, placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters())
    inside = testing.of(module)
    counts: list[tuple[int, int]] = []

    def count() -> tuple[int, int]:
        gc.collect()  # takes long: it looks at everything that was ever imported
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()), inside.live_bytes()

    for step in range(20):
        loss = loss_of(module, BATCHES[0])
        if backwards:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        if step == 4:
            inside.wait_idle()
            counts.append(count())
    inside.wait_idle()
    # a slot that is used for the first time since makes its views, once; a leak would be one a step or more
    assert comes_to_be(lambda: count()[0] < counts[0][0] + 15), f"{count()} tensors and bytes, {counts[0]} before"
    assert inside.live_bytes() == counts[0][1]


@everywhere
def test_hooks_of_parameters_and_modules_do_not_grow(placement: str, tmp_path: Path) -> None:
    _, module = pair(mlp, placement, tmp_path)
    optimizer = hetmem.AdamW(module.parameters())

    def hooks() -> list[int]:
        return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()] + [
            len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()
        ]

    loss_of(module, BATCHES[0]).backward()
    before = hooks()
    for _ in range(5):
        optimizer.step()
        loss_of(module, BATCHES[0]).backward()
    assert hooks() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch compiles its decompositions by `torch.jit.script`
@everywhere
def test_derivatives_of_forward_mode_equal_torch(placement: str, tmp_path: Path) -> None:
    modules = pair(mlp, placement, tmp_path)
    tangents = []
    for module in modules:
        with forward_ad.dual_level():
            output = module(forward_ad.make_dual(BATCHES[0][0], BATCHES[1][0]))
            tangents.append(forward_ad.unpack_dual(output).tangent)
            loss_of(module, (forward_ad.make_dual(*BATCHES[2], *BATCHES[3]),)).backward()
    assert_same(*tangents, "tangent")
    assert_same_grads(*modules)


class Checkpointed(nn.Module):
    """Its checkpoints keep what they are called with, as autograd saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@everywhere
def test_transforms_of_a_checkpointed_model_equal_torch(placement: str, tmp_path: Path) -> None:
    """What a checkpoint keeps within a transform has no storage."""
    modules = pair(Checkpointed, placement, tmp_path)
    found = []
    for module in modules:
        (x,), (tangent,) = BATCHES[:2]
        found.append([*torch.func.jvp(module, (x,), (tangent,)), torch.func.jacfwd(module)(x[0])])
        loss_of(module, BATCHES[2]).backward()
    for expected, got in zip(*found, strict=True):
        assert_same(expected, got, "derivatives")
    assert_same_grads(*modules)


class ScaledTwice(nn.Linear):
    """Two gradients of one weight meet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Scale.apply(Scale.apply(x, self.bias), self.bias)
        return nn.functional.linear(x, self.weight)


@pytest.mark.each
@streamed
@precisions
def test_a_function_of_the_users_that_gets_a_weight_twice_adds_its_gradients_up_as_torch_does(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    modules = pair(lambda: ScaledTwice(WIDTH, WIDTH), placement, tmp_path, mixed_precision=mixed)
    train_both(*modules, vector_batches(1, 4, WIDTH, dtype=mixed), Recipe(steps=1, mixed=mixed))


class Turned(nn.Module):
    """A complex weight whose rows do not lie beside each other, as real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64).T)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.view_as_real(self.weight) * self.layer(x).mean()).square().mean()


@everywhere
def test_real_numbers_of_a_complex_weight_in_any_order_are_what_the_forward_had(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(Turned, placement, tmp_path, chunk_bytes=2 * CHUNK)
    for batch in BATCHES[:2]:
        losses = [loss_of(module, batch) for module in (plain, managed)]
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert_same_grads(plain, managed)
