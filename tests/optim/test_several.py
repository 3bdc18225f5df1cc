"""Several optimizers over one model, or one over several: each leaves what the others do alone."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import (
    STREAMED,
    assert_same,
    assert_same_states,
    assert_same_weights,
    everywhere,
    loss_of,
    mlp,
    pair,
    step_in_backward,
    streamed,
    vector_batches,
)
from tests.optim.stories import Twins, adamw, halves, on_either, on_the_other, one, small, trailing, twins
from tests.pairs import mostly


@on_either
def test_two_optimizers_share_chunks(overlap: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(small, placement, tmp_path)
    left = [adamw(part) for part in halves(plain)]
    right = [hetmem.AdamW(part, lr=1e-2, overlap=overlap) for part in halves(managed)]
    for batch in vector_batches(5, 4, 40):
        one(plain, batch, *left)
        one(managed, batch, *right)
        assert_same_weights(plain, managed)
    for expected, got in zip(left, right, strict=True):
        assert_same_states(expected, got)


@on_the_other
def test_an_optimizer_of_some_parameters_leaves_the_gradients_of_others_alone(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = pair(small, placement, tmp_path)
    left, right = adamw(halves(plain)[0]), hetmem.AdamW(halves(managed)[0], lr=1e-2, overlap=overlap)
    both = Twins(plain, managed, left, right)
    for batch in vector_batches(4, 4, 40):
        both.train([batch])
        assert_same_weights(plain, managed)


@streamed
@trailing
def test_updates_go_on_when_their_optimizer_is_dropped(options: dict[str, Any], placement: str, tmp_path: Path) -> None:
    plain, managed = modules = pair(mlp, placement, tmp_path)
    batches = vector_batches(3, 4, 64)
    twins(modules, **options).train(batches)
    gc.collect()
    assert_same(loss_of(plain, batches[0]), loss_of(managed, batches[0]), "loss")
    assert_same_weights(plain, managed)


@trailing
def test_two_optimizers_get_by_with_staging_for_one(options: dict[str, Any], tmp_path: Path) -> None:
    """What one has read ahead for a step that trails must not keep the other from its own."""
    plain, managed = pair(lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]), "nvme", tmp_path)
    left = [adamw(part) for part in halves(plain)]
    first, second = halves(managed)
    right = [hetmem.AdamW(first, lr=1e-2, **options), hetmem.AdamW(second, lr=1e-2)]
    for batch in vector_batches(8, 4, 64):
        one(plain, batch, *left)
        one(managed, batch, *right)
    assert_same_weights(plain, managed)


@on_either
def test_an_optimizer_for_each_parameter_steps_within_backward(overlap: str, placement: str, tmp_path: Path) -> None:
    """The pattern of torch's tutorial: hooks step as soon as a gradient is there."""
    plain, managed = modules = pair(mlp, placement, tmp_path)
    _, theirs = step_in_backward(plain, adamw)
    optimizers, ours = step_in_backward(managed, partial(hetmem.AdamW, lr=1e-2, overlap=overlap))
    for batch in vector_batches(4, 4, 64):
        losses = [loss_of(module, batch) for module in modules]
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
    for optimizer in optimizers:
        optimizer.synchronize()
    assert_same_weights(plain, managed)
    for handle in theirs + ours:  # the collector does not look into them: each hook and its optimizer hold the other
        handle.remove()


@on_the_other
def test_one_of_two_models_is_released(overlap: str, placement: str, tmp_path: Path) -> None:
    """The optimizer goes on with the other one, as long as the first has no gradients."""
    pairs = [pair(mlp, placement, tmp_path) for _ in range(2)]
    left = adamw([p for plain, _ in pairs for p in plain.parameters()])
    right = hetmem.AdamW(
        [p for _, managed in pairs for p in managed.parameters()], lr=1e-2, overlap=overlap, max_grad_norm=1e9
    )
    batches = vector_batches(6, 4, 64)
    for batch in batches[:3]:
        for which, optimizer in ((0, left), (1, right)):
            sum(loss_of(both[which], batch) for both in pairs).backward()
            optimizer.step()
            optimizer.zero_grad()
    hetmem.release(pairs[0][1])
    Twins(*pairs[1], left, right).train(batches[3:])
    for plain, managed in pairs:
        assert_same_weights(plain, managed)
    assert_same_states(left, right)


REPLACED: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward"},
}


@pytest.mark.each
@streamed
@pytest.mark.parametrize("kind", REPLACED)
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_an_optimizer_that_is_replaced_updates_nothing_more(
    kept: bool, kind: str, placement: str, tmp_path: Path
) -> None:
    """Also while somebody still holds it, and in backwards: nobody calls its `step` any more."""
    gc.disable()  # what is dropped must be gone at once, not with the next collection
    try:
        modules = pair(mlp, placement, tmp_path)
        batches = vector_batches(9, 4, 64)
        held = []
        for round in range(3):
            both = twins(modules, **REPLACED[kind])
            held += [both.right] if kept else []
            both.train(batches[3 * round : 3 * round + 3])
            both.assert_same()
            del both
    finally:
        gc.enable()


@pytest.mark.parametrize(("kind", "placement"), mostly(REPLACED, STREAMED[::-1]))
def test_an_optimizer_of_torch_takes_the_place_of_one_that_is_dropped(
    kind: str, placement: str, tmp_path: Path
) -> None:
    plain, managed = modules = pair(mlp, placement, tmp_path)
    batches = vector_batches(6, 4, 64)
    twins(modules, **REPLACED[kind]).train(batches[:3])
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    Twins(plain, managed, *sgds).train(batches[3:])
    assert_same_weights(plain, managed)


@everywhere
def test_of_two_optimizers_over_a_parameter_the_one_made_first_may_not_step(placement: str, tmp_path: Path) -> None:
    """Until it loads a state_dict; whatever states the two keep."""
    plain, managed = modules = pair(mlp, placement, tmp_path)
    batches = vector_batches(8, 4, 64)
    first = twins(modules)
    first.train(batches[:2])
    saved = [copy.deepcopy(side.state_dict()) for side in (first.left, first.right)]
    sgds = [torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)]
    sgds.append(hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1, momentum=0.9))
    second = Twins(plain, managed, *sgds)
    second.train(batches[2:4])
    loss_of(managed, batches[4]).backward()
    before = [parameter.clone() for parameter in managed.parameters()]
    with pytest.raises(RuntimeError, match=r" is another optimizer's, which was made over it"):
        first.right.step()
    assert all(map(torch.equal, before, managed.parameters()))
    managed.zero_grad()
    second.train(batches[4:6])
    for side, state in zip((first.left, first.right), saved, strict=True):
        side.load_state_dict(state)
    first.train(batches[6:])
    first.assert_same()
    loss_of(managed, batches[6]).backward()
    with pytest.raises(RuntimeError, match=r" is another optimizer's"):
        sgds[1].step()


@streamed
@pytest.mark.parametrize("other", [hetmem.AdamW, torch.optim.SGD])
def test_what_an_optimizer_has_updated_in_the_backward_is_refused_to_another_one(
    other: Any, placement: str, tmp_path: Path
) -> None:
    _, managed = pair(mlp, placement, tmp_path)
    first = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward")
    batches = vector_batches(4, 4, 64)
    for batch in batches[:2]:
        one(managed, batch, first)
    loss_of(managed, batches[2]).backward()
    with pytest.raises(
        RuntimeError,
        match=r"was updated during backward by another optimizer|which (only its update reads|its update has used up)",
    ):
        other(managed.parameters(), lr=1e-2).step()
    if other is hetmem.AdamW:  # which has changed nothing
        first.step()


@streamed
def test_an_optimizer_that_is_refused_takes_no_parameter_from_the_one_before(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(small, placement, tmp_path)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward")
    both = Twins(plain, managed, left, right)
    both.train(vector_batches(2, 4, 40))
    with pytest.raises(hetmem.errors.ManageError):
        hetmem.AdamW([*managed.parameters(), nn.Parameter(torch.ones(3))])
    batch = vector_batches(1, 4, 40)[0]
    loss_of(managed, batch).backward()
    assert testing.updates_begun(managed), "no update begins in the backward any more"
    right.step()
    right.zero_grad()
    one(plain, batch, left)
    assert_same_weights(plain, managed)


@on_either
def test_a_step_of_two_models_is_over_for_both_though_nothing_can_be_fetched_ahead(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """It raised when the first was done, and the step that was repeated updated that again."""
    pairs = [pair(mlp, placement, tmp_path) for _ in range(2)]
    left = adamw([p for plain, _ in pairs for p in plain.parameters()])
    right = hetmem.AdamW([p for _, managed in pairs for p in managed.parameters()], lr=1e-2, overlap=overlap)
    failed: list[Any] = []

    def expect(original: Any, runtime: Any, key: Any) -> None:
        if key != ("step",):
            failed.append(key)
            raise RuntimeError("no memory for what comes next")

    for batch in vector_batches(4, 4, 64):
        for which, optimizer in ((0, left), (1, right)):
            sum(loss_of(both[which], batch) for both in pairs).backward()
            with testing.around("plan ahead", expect):
                optimizer.step()
            optimizer.zero_grad()
    for plain, managed in pairs:  # a look behind each step would leave nothing to be fetched ahead
        assert_same_weights(plain, managed)
    assert failed


class Interleaved(nn.Module):
    """Parameters are used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in range(4):
            for layer in self.layers[at::4]:
                x = torch.tanh(layer(x))
        return x


@streamed
def test_optimizers_of_two_kinds_update_parts_of_one_model(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(Interleaved, placement, tmp_path)
    sides: list[list[torch.optim.Optimizer]] = []
    for module, adam, rmsprop in (
        (plain, adamw, torch.optim.RMSprop),
        (managed, partial(hetmem.AdamW, lr=1e-2), partial(hetmem.optim.offload, torch.optim.RMSprop)),
    ):
        parameters = list(module.parameters())
        first, second = parameters[:8], parameters[8:]
        sides.append([adam(first), rmsprop(second, lr=1e-3, momentum=0.9)])
    for batch in vector_batches(3, 4, 32):
        for module, optimizers in zip((plain, managed), sides, strict=True):
            one(module, batch, *optimizers)
        assert_same_weights(plain, managed)


@on_the_other
def test_a_loss_of_another_model_that_goes_through_one_is_no_step_of_it(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """A generator and its critic: frozen meanwhile, this one's updates wait for gradients of its own losses."""
    generators, critics = (pair(mlp, placement, tmp_path) for _ in range(2))
    steps = [twins(modules, overlap=overlap) for modules in (generators, critics)]
    for noise, real in zip(vector_batches(4, 4, 64), vector_batches(4, 4, 64, seed=2), strict=True):
        for (generator, first), (critic, second) in zip(*(both.sides for both in steps), strict=True):
            critic.requires_grad_(False)
            loss_of(critic, (generator(*noise),)).backward()
            first.step()
            first.zero_grad()
            critic.requires_grad_(True)
            (loss_of(critic, real) - loss_of(critic, (generator(*noise).detach(),))).backward()
            second.step()
            second.zero_grad()
    for both in steps:
        both.assert_same()
    if overlap != "off":
        loss_of(critics[1], (generators[1](*noise),)).backward()
        with pytest.raises(RuntimeError, match=r"a GAN's generator's does.* requires_grad_\(False\)"):
            loss_of(critics[1], (generators[1](*noise),)).backward()
