"""A model that is whole on the device and computes in 16 bits: its modules have working weights in a forward."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    WIDTH,
    Recipe,
    Tower,
    assert_same,
    assert_same_grads,
    assert_same_weights,
    loss_of,
    manage,
    mlp,
    pair,
    reference,
    token_batches,
    train_both,
    vector_batches,
)
from tests.engine.test_interrupts import ctrl_c
from tests.intercept.test_pointers import Raw


class Awkward(nn.Module):
    """A weight that another module uses too, a part that is checkpointed, a pointer that is read, views that are kept,
    a weight that is saved by itself, and, where `writes`, one that the forward writes to."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.raw = Raw([])
        self.writes, self.kept = writes, [torch.empty(0)]

    def checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers[0], self.layers[1]
        assert isinstance(first, nn.Linear)
        return F.linear(F.gelu(second(x)), first.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.scale.mul_(1.5)
                self.norm.weight.data.add_(0.25)
        x = self.norm(self.layers[0](x)) * self.scale
        x = checkpoint(self.checkpointed, x, use_reentrant=False)
        self.kept[0] = self.layers[3].weight[3:]
        return self.layers[2](self.raw(x)) + x[:, :1] * self.kept[0].sum()


def test_awkward_programs_train_as_torch_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sanitize": False, "mixed_precision": torch.bfloat16}
    plain, managed = pair(lambda: Awkward(writes=False), "resident", tmp_path, **options)
    batches = [(torch.randn(rows, WIDTH).bfloat16(),) for rows in (3, 3, 3, 5)]
    train_both(plain, managed, batches, Recipe(steps=6, accumulation=2, mixed=torch.bfloat16))
    assert "Awkward" in testing.of(managed).operators(), "it never happened at once"


def test_what_a_forward_writes_to_weights_goes_home_as_it_does_where_they_move(tmp_path: Path) -> None:
    models = []
    for placement in ("resident", "host"):
        torch.manual_seed(0)
        model = Awkward(writes=True)
        models.append(manage(model, placement, tmp_path, sanitize=False, mixed_precision=torch.bfloat16))
    x = torch.randn(3, WIDTH).bfloat16()
    optimizers = [hetmem.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        losses = [model(x).float().square().mean() for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*losses, f"step {step}")
        assert_same_weights(*models, f"step {step}")
    assert "Awkward" in testing.of(models[0]).operators()


def one_more_step(managed: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[str]:
    """Its moments."""
    before = len(testing.of(managed).operators())
    managed(*batch).backward()
    return testing.of(managed).operators()[before:]


def test_a_forward_is_one_moment_and_a_backward_none(tmp_path: Path) -> None:
    how: dict[str, Any] = {"mixed_precision": torch.bfloat16, "activations": "keep"}  # else each use is a moment
    managed = manage(Tower(), "resident", tmp_path, sanitize=False, **how)
    seen = [one_more_step(managed, batch) for batch in token_batches(4)]
    assert len(seen[0]) > 10
    assert seen[2:] == [["Tower"]] * 2
    hetmem.release(managed)


def test_copies_stay_where_they_are_until_something_else_is_to_be_there(tmp_path: Path) -> None:
    how: dict[str, Any] = {"mixed_precision": torch.bfloat16, "activations": "keep"}  # else each use is a moment
    managed = manage(Tower(), "resident", tmp_path, sanitize=False, **how)
    (batch,) = token_batches(1)
    for _ in range(3):
        managed(*batch).backward()
    inside, kept = testing.of(managed), managed(*batch)
    assert inside.leased()
    inside.forget_copies()
    assert inside.leased(), "those that a graph has saved stay for as long as that lives"
    kept.backward()
    del kept
    assert inside.leased() == []
    hetmem.release(managed)


class Net(nn.Module):
    """A weight that two modules have, one that is saved by itself, one as large as what it is added to, and one that is
    never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.unused = nn.Parameter(torch.ones(WIDTH)), nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.zeros(2, 5, 16))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        logits = (self.head(x + self.layer(self.norm(x)) * self.scale) + self.shift).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


def late_hook(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    if step == 5:
        model.scale.register_hook(lambda grad: (grad * 2 + model.scale.detach()).to(grad.dtype))
    model(tokens).backward()
    return []


def with_penalties(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    before = penalty(model) if step > 4 else 0.0
    loss = model(tokens) + before
    (loss + penalty(model) if step % 2 else loss).backward()
    penalty(model).backward()
    return [loss]


def several(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    with torch.no_grad():
        evaluated = model(tokens)
    (model(tokens) + model(tokens.flip(0))).backward()
    model(tokens + 1).backward(retain_graph=True)
    return [evaluated, [p.grad for p in model.parameters()]]


def by_parameter(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    wanted = [model.layer.weight, model.scale, model.table.weight]
    found = torch.autograd.grad(model(tokens), wanted)
    model(tokens).backward(inputs=wanted[:2])
    return [found]


def writes(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """Between a forward and its backward: to a weight that is needed, to one that is not, and without a version."""
    loss, refused = model(tokens), False
    if step > 3:
        with torch.no_grad():
            (model.scale if step == 5 else model.layer.bias).mul_(1.5)
        model.layer.weight.data.mul_(1.25)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        refused = True
    return [refused]


def others(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """Other weights for one call, other ones frozen, a gradient of the program's, and a function over a weight."""
    if step in (5, 6):
        given = {"layer.weight": torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)}
        torch.func.functional_call(model, given, (tokens,)).backward()
    model.norm.weight.requires_grad_(step != 4)
    if step > 5:
        model.layer.bias.grad = torch.ones(WIDTH)
    (model(tokens) + F.linear(torch.ones(1, WIDTH), model.layer.weight).sum()).backward()
    return []


def negative_zeros(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """Gradients of -0.0, which a sum that begins as 0.0 would lose."""
    (model(tokens) * 0.0).backward()
    assert model.shift.grad is not None
    negative = model.shift.grad.signbit()
    assert negative.any()
    return [negative]


def frozen_before_backward(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """Torch asks whether a weight is trained as it accumulates its gradient."""
    model(tokens).backward()
    loss, frozen = model(tokens + 1), [model.layer.weight, model.scale][step % 2]
    frozen.requires_grad_(False)
    loss.backward(retain_graph=True)
    frozen.requires_grad_(True)
    before = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    loss.backward()
    return [before]


def frozen_within_forward(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """A part is trained in some forwards, as a hook before its call says."""

    def choose(*_: Any) -> None:
        model.layer.requires_grad_(step % 3 > 0)

    handle = model.layer.register_forward_pre_hook(choose)
    model(tokens).backward()
    handle.remove()
    return []


def hooked_between(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """Hooks that come between a forward and its backward, of which one replaces the gradient, and a graph that is kept
    for a second backward without them."""
    loss, seen = model(tokens), list[Any]()
    weights = [model.layer.weight, model.table.weight]
    handles = [weight.register_hook(lambda grad: grad * 2) for weight in weights]
    handles += [weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone())) for weight in weights]
    handles += [weights[0].register_hook(lambda grad: seen.append((grad.clone(), weights[0].grad is None)))]
    loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    loss.backward()
    return [seen]


def met_by_functions(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """A function within the forward gets a parameter itself, and one behind the backward what a module had."""
    kept, weights = list[Any](), [*model.parameters()]

    def use(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        kept.append(module.weight)
        return output + weights[0].mean() * F.linear(output, weights[3]).mean()

    handle = model.layer.register_forward_hook(use)
    model(tokens).backward()
    handle.remove()
    values = kept[0].detach().clone()
    kept[0].square().sum().backward()
    return [values]


def of_two_kinds(model: Net, tokens: torch.Tensor, step: int) -> list[Any]:
    """One backward of two forwards, of which the second is of a kind that was never there in step 4."""
    loss = model(tokens)
    if step > 3:
        loss = loss + model.eval()(tokens.flip(0))
        model.train()
    loss.backward()
    return []


_PROGRAMS = [
    *(late_hook, with_penalties, several, by_parameter, writes, others, negative_zeros, frozen_before_backward),
    frozen_within_forward,
]


@pytest.mark.parametrize("program", _PROGRAMS)
def test_programs_have_the_bits_that_they_have_where_weights_move(
    program: Callable[[Net, torch.Tensor, int], list[Any]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    first = Net()
    models = [
        manage(copy.deepcopy(first), placement, tmp_path, sanitize=False, mixed_precision=torch.bfloat16)
        for placement in ("resident", "host")
    ]
    optimizers = [hetmem.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step, tokens in enumerate(torch.randint(0, 15, (8, 2, 5))):
        results = [program(model, tokens, step) for model in models]
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert_same(one.grad, other.grad, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(*models, f"step {step}")
    assert "Net" in testing.of(models[0]).operators(), "it was never whole"


# ---- homes in host memory, where all copies that a forward uses fit at once ------------------------------------------


def all_copies(model: nn.Module, tmp_path: Path, **options: Any) -> nn.Module:
    """Manage `model`, whose homes are in host memory, with room for all of its copies."""
    nbytes = sum(-(-p.numel() * p.itemsize // CHUNK) * CHUNK for p in model.parameters())
    limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks=nbytes + CHUNK, home_copies=False)
    managed = manage(model, limits, tmp_path, sanitize=False, activations="keep", **options)
    assert not testing.of(managed).memory().resident
    return managed


def test_a_forward_and_a_backward_whose_copies_fit_are_one_moment_each(tmp_path: Path) -> None:
    managed = all_copies(Tower(), tmp_path)
    seen = [one_more_step(managed, batch) for batch in token_batches(4)]
    assert len(seen[0]) > 10
    assert seen[2:] == [["Tower", "backward"]] * 2
    assert testing.of(managed).leased() == [], "both are over"
    hetmem.release(managed)


@pytest.mark.parametrize(
    "program",
    [late_hook, with_penalties, several, by_parameter, writes, hooked_between, met_by_functions, of_two_kinds],
)
def test_programs_with_all_copies_have_the_bits_of_torch(
    program: Callable[[Net, torch.Tensor, int], list[Any]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Net()
    managed = all_copies(copy.deepcopy(plain), tmp_path)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), hetmem.AdamW(managed.parameters(), lr=1e-2)
    for step, tokens in enumerate(torch.randint(0, 15, (8, 2, 5))):
        results = [program(model, tokens, step) for model in (plain, managed)]
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
        assert_same_grads(plain, managed, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
    assert "Net" in testing.of(managed).operators(), "no forward was one moment"


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [None, False])
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_updates_beside_a_forward_and_a_backward_that_have_all_copies_change_no_bit(
    overlap: str, checkpointing: bool | None, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Also where they trail into a forward that has begun, and where a weight is computed with again."""
    torch.manual_seed(0)
    plain = Tower(depth=4, checkpointing=checkpointing)
    managed = all_copies(copy.deepcopy(plain), tmp_path, mixed_precision=mixed)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap=overlap)
    backward = reference(plain, mixed)
    for step, batch in enumerate(token_batches(8)):
        expected = backward(partial(loss_of, batch=batch))
        loss = loss_of(managed, batch)
        loss.backward()
        for optimizer in (left, right):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(expected, loss, f"loss of step {step}")
    assert_same_weights(plain, managed)
    assert "Tower" in testing.of(managed).operators(), "no forward was one moment"


class Routed(nn.Module):
    """Uses one of its layers, which `route` says, between two that it always uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.route = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (0, self.route, 5):
            x = torch.tanh(self.layers[at](x))
        return x


def test_a_forward_that_uses_other_weights_than_it_did_has_the_bits_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Routed()
    managed = all_copies(copy.deepcopy(plain), tmp_path)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), hetmem.AdamW(managed.parameters(), lr=1e-2)
    for step, route in enumerate((1, 1, 1, 3, 1, 2, 2, 4)):
        x = torch.randn(3, WIDTH)
        for model in (plain, managed):
            model.route = route
            model(x).square().mean().backward()
        assert_same_grads(plain, managed, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(plain, managed, f"step {step}")
    assert testing.of(managed).operators().count("Routed") > 4, "most were one moment, with late copies too"


def test_a_raw_pointer_of_a_weight_is_right_where_all_are_bound_at_once(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw([]))
    managed = all_copies(copy.deepcopy(plain), tmp_path)
    x = torch.randn(3, WIDTH)
    for _ in range(4):
        outputs = [model(x) for model in (plain, managed)]
        assert_same(*outputs, "output")
        for output in outputs:
            output.square().mean().backward()
        assert_same_grads(plain, managed)
    assert "Sequential" in testing.of(managed).operators()


@pytest.mark.parametrize("own", [True, False], ids=["own optimizer", "torch's"])
def test_training_goes_on_after_an_interrupt_of_a_forward_that_had_bound_all(own: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Tower()
    managed = all_copies(copy.deepcopy(plain), tmp_path)
    torchs = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    optimizers = torchs(plain.parameters()), (partial(hetmem.AdamW, lr=1e-2) if own else torchs)(managed.parameters())
    for step, batch in enumerate(token_batches(6)):
        losses = []
        for model, optimizer in zip((plain, managed), optimizers, strict=True):
            loss = model(*batch)
            if step % 2:
                loss.backward()
            if step > 2:
                with model.get_submodule("head").register_forward_hook(ctrl_c), pytest.raises(KeyboardInterrupt):
                    model(*batch)
            if not step % 2:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        assert_same(*losses, f"step {step}")
        for one, other in zip(plain.parameters(), managed.parameters(), strict=True):
            assert_same(one, other, f"what is read right after step {step}")
        assert_same_weights(plain, managed, f"step {step}")
    assert "Tower" in testing.of(managed).operators()


@pytest.mark.parametrize("goes_on", [False, True])
def test_weights_read_after_ctrl_c_in_a_forward_that_had_bound_all_are_those_at_home(
    goes_on: bool, tmp_path: Path
) -> None:
    """`goes_on`: the program has a handler that raises nothing."""
    first = Tower()
    models = [all_copies(copy.deepcopy(first), tmp_path, mixed_precision=torch.bfloat16) for _ in range(2)]
    optimizers = [hetmem.AdamW(model.parameters(), lr=1e-2) for model in models]
    *batches, last = token_batches(5)
    for model, optimizer in zip(models, optimizers, strict=True):
        for batch in batches:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    struck, other = models
    at_home = [parameter.detach().clone() for parameter in struck.parameters()]
    theirs = signal.signal(signal.SIGINT, (lambda *_: None) if goes_on else signal.default_int_handler)
    hook = struck.get_submodule("norm").register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if goes_on:
            struck(*last).backward()
        else:
            with pytest.raises(KeyboardInterrupt):
                struck(*last)
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, theirs)
    for parameter, expected in zip(struck.parameters(), at_home, strict=True):
        assert_same(expected, parameter.detach(), "read right after it")
    if not goes_on:
        struck(*last).backward()
    other(*last).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_weights(other, struck, "after a step")


def test_a_forward_right_after_one_that_has_ended_without_a_word_has_what_was_written_between(tmp_path: Path) -> None:
    mixed = torch.bfloat16
    plain, managed = pair(mlp, "resident", tmp_path, mixed_precision=mixed, sanitize=False)
    batches = vector_batches(2, 4, WIDTH, dtype=mixed)
    train_both(plain, managed, batches, Recipe(steps=2, mixed=mixed))
    weights = [module.get_parameter("0.weight").data for module in (plain, managed)]  # writes count no version
    with managed.register_forward_hook(ctrl_c, prepend=True), pytest.raises(KeyboardInterrupt):
        managed(*batches[0])
    for weight in weights:
        weight.mul_(2)
    assert_same(plain.to(mixed)(*batches[0]), managed(*batches[0]), "an output")
