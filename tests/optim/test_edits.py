"""What users change between backward and step, or between steps, counts: states, gradients, weights, options."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from tests.engine.harness import assert_same_weights, everywhere, loss_of, mlp, pair, streamed, vector_batches
from tests.optim.stories import OVERLAPS, Twins, on_either, one, overlaps, twins
from tests.pairs import mostly


@overlaps
def test_states_that_were_loaded_between_steps_count(overlap: str, tmp_path: Path) -> None:
    """Copies of the old ones may lie in staging."""
    both = twins(pair(mlp, "nvme", tmp_path), overlap=overlap)
    batches = vector_batches(6, 4, 64)
    both.train(batches[:2])
    early = copy.deepcopy(both.left.state_dict())
    both.train(batches[2:4])
    for _, optimizer in both.sides:
        optimizer.load_state_dict(copy.deepcopy(early))
    both.train(batches[4:])
    both.assert_same()


@overlaps
def test_states_that_the_user_wrote_between_steps_count(overlap: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, "nvme", tmp_path), overlap=overlap)
    for batch in vector_batches(5, 4, 64):
        both.train([batch])
        for module, optimizer in both.sides:
            for parameter in module.parameters():
                optimizer.state[parameter]["exp_avg"].mul_(0.5)
    both.assert_same()


def assert_counts_or_is_refused(edit: Callable[[Any], None], both: Twins) -> None:
    """What `edit` does to a model between backward and step: the step is torch's, or an error says what is wrong."""
    *before, batch = vector_batches(4, 4, 64)
    both.train(before)
    for module, _ in both.sides:
        loss_of(module, batch).backward()
        if module is both.plain:
            edit(module)
    both.left.step()
    try:
        edit(both.managed)
        both.right.step()
    except RuntimeError as error:
        assert "overlap='off'" in str(error)  # noqa: PT017
        assert both.right.overlap.value != "off", error  # noqa: PT017
        return
    assert_same_weights(both.plain, both.managed)


@pytest.mark.each
@streamed
@overlaps
@pytest.mark.parametrize("which", ["all", "one chunk"])
def test_gradients_dropped_before_the_step_are_not_used(
    which: str, overlap: str, placement: str, tmp_path: Path
) -> None:
    def drop(module: Any) -> None:
        for parameter in module.parameters() if which == "all" else [module[2].weight]:
            parameter.grad = None

    assert_counts_or_is_refused(drop, twins(pair(mlp, placement, tmp_path), overlap=overlap))


PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda gradient: gradient.data[:3].zero_(),
    "numpy": lambda gradient: gradient.numpy().reshape(-1).__setitem__(1, 5.0),
    "data set": lambda gradient: setattr(gradient, "data", gradient.data * 2),
    "signs": lambda gradient: gradient.data.neg_(),
    "unscaled": lambda gradient: torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(1), torch.tensor(0.25)
    ),
}


@streamed
@overlaps
def test_states_written_before_the_step_count(overlap: str, placement: str, tmp_path: Path) -> None:
    """The update that was begun in the backward has read and changed them."""
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap)
    optimizers = {id(module): optimizer for module, optimizer in both.sides}

    def write(module: Any) -> None:
        optimizers[id(module)].state[module[2].weight]["exp_avg"].mul_(0.5)

    assert_counts_or_is_refused(write, both)


@everywhere
def test_states_that_two_parameters_exchange_are_refused(placement: str, tmp_path: Path) -> None:
    """Copied home one after the other, the second would be a copy of the first."""
    both = twins(pair(mlp, placement, tmp_path), overlap="off")
    both.train(vector_batches(2, 4, 64))
    first, second = both.managed[0].weight, both.managed[2].weight
    state = both.right.state
    state[first], state[second] = state[second], state[first]
    loss_of(both.managed, vector_batches(1, 4, 64)[0]).backward()
    with pytest.raises(RuntimeError, match="tensor of another parameter as exp_avg of"):
        both.right.step()


@pytest.mark.each
@streamed
@pytest.mark.parametrize("options", [{"overlap": overlap} for overlap in OVERLAPS], ids=str)
@pytest.mark.parametrize("edit", PARTS.values(), ids=PARTS)
def test_parts_of_gradients_written_before_the_step_count(
    edit: Callable[[torch.Tensor], Any], options: dict[str, Any], placement: str, tmp_path: Path
) -> None:
    """Without a version, as a program writes that trains some rows of an embedding alone; the link is slow."""

    def write(module: Any) -> None:
        edit(module[2].weight.grad)

    link = hetmem.SimDevice(device_to_host="20MB")
    assert_counts_or_is_refused(write, twins(pair(mlp, placement, tmp_path, device=link), **options))


@streamed
def test_gradients_may_be_read_before_the_step(placement: str, tmp_path: Path) -> None:
    both = twins(pair(mlp, placement, tmp_path), overlap="off")
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in both.sides:
            loss_of(module, batch).backward()
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                assert gradient.data.norm(2) == gradient.norm(2) and gradient.numpy().any()
                assert type(copy.deepcopy(gradient)) is torch.Tensor
            optimizer.step()
            optimizer.zero_grad()
    both.assert_same()


@pytest.mark.each
@streamed
@pytest.mark.parametrize("options", [{"overlap": overlap} for overlap in OVERLAPS], ids=str)
@pytest.mark.parametrize("way", ["in place", "replaced"])
def test_weights_written_between_a_forward_and_its_backward_count(
    way: str, options: dict[str, Any], placement: str, tmp_path: Path
) -> None:
    """Those that the backward does not need, as torch demands, or where it does not see that."""
    both = twins(pair(mlp, placement, tmp_path), **options)
    both.train(vector_batches(2, 4, 64))
    for batch in vector_batches(3, 4, 64, seed=2):
        for module, optimizer in both.sides:
            loss = loss_of(module, batch)
            for parameter in module.parameters() if way == "replaced" else (module[0].weight, module[2].bias):
                with torch.no_grad():
                    if way == "replaced":
                        parameter.data = parameter.data * 0.5
                    else:
                        parameter.mul_(0.5)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    both.assert_same()


@pytest.mark.each
@streamed
@overlaps
@pytest.mark.parametrize("evaluated", [False, True], ids=["", "evaluated"])
def test_weights_written_before_the_step_count(evaluated: bool, overlap: str, placement: str, tmp_path: Path) -> None:
    """Also if a forward between, which takes note of them, has used them."""

    def halve(module: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
            if evaluated:
                loss_of(module, vector_batches(1, 4, 64)[0])

    assert_counts_or_is_refused(halve, twins(pair(mlp, placement, tmp_path), overlap=overlap))


@on_either
def test_a_weight_of_nobody_may_be_written_where_its_chunk_is_updated(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """Between a backward and its step, without a version; without overlap also between forwards, which see it."""
    modules = pair(lambda: torch.nn.Sequential(mlp(), torch.nn.LayerNorm(64)), placement, tmp_path)
    left, right = ([each for name, each in module.named_parameters() if name != "1.bias"] for module in modules)
    optimizers = (torch.optim.AdamW(left, lr=1e-2, fused=True), hetmem.AdamW(right, lr=1e-2, overlap=overlap))
    for batch in vector_batches(4, 4, 64):
        for module, optimizer in zip(modules, optimizers, strict=True):
            loss_of(module, batch).backward()
            with torch.no_grad():
                if overlap == "off":
                    loss_of(module, batch)
                module[1].bias.data.add_(1.0)
                if overlap == "off":
                    loss_of(module, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(*modules)


@pytest.mark.parametrize(("overlap", "option"), mostly(OVERLAPS, ["lr", "betas in place", "betas"]))
def test_options_that_change_before_the_step_count(option: str, overlap: str, tmp_path: Path) -> None:
    """The norm has been summed up with the old ones."""
    both = twins(pair(mlp, "host", tmp_path), overlap=overlap, max_grad_norm=1e9)
    for _, optimizer in both.sides:
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    *before, batch = vector_batches(4, 4, 64)
    both.train(before)
    for module, optimizer in both.sides:
        loss_of(module, batch).backward()
        (group,) = optimizer.param_groups
        if option == "betas in place":
            group["betas"][0] = 0.5
        else:
            group.update({"lr": {"lr": 3e-3}, "betas": {"betas": (0.5, 0.9)}}[option])
    both.left.step()
    both.right.step()
    both.assert_same()


def test_the_norm_is_of_a_gradient_in_which_one_element_was_written(tmp_path: Path) -> None:
    both = twins(pair(mlp, "host", tmp_path), overlap="off", max_grad_norm=1e9)
    *before, batch = vector_batches(4, 4, 64)
    both.train(before)
    for module, _ in both.sides:
        loss_of(module, batch).backward()
        module[2].weight.grad[1, 2] = 100.0
    for _, optimizer in both.sides:
        optimizer.step()
    assert both.right.grad_norm == pytest.approx(100.0, rel=1e-2)
    both.assert_same()


@overlaps
def test_a_learning_rate_in_a_tensor_of_one_element_changes_in_place(overlap: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    rates = [torch.tensor([1e-2]), torch.tensor([1e-2])]
    left = torch.optim.AdamW(plain.parameters(), lr=rates[0], fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=rates[1], overlap=overlap, max_grad_norm=1e9)
    both = Twins(plain, managed, left, right)
    for batch in vector_batches(4, 4, 64):
        both.train([batch])
        for rate in rates:
            rate.mul_(0.5)
        assert_same_weights(plain, managed)


def test_amsgrad_is_not_ignored(tmp_path: Path) -> None:
    plain, managed = pair(mlp, "host", tmp_path)
    with pytest.raises(ValueError, match="amsgrad"):
        hetmem.AdamW([{"params": list(managed.parameters()), "amsgrad": True}], lr=1e-2)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, amsgrad=True)
    one(plain, vector_batches(1, 4, 64)[0], left)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="amsgrad"):
        right.load_state_dict(left.state_dict())


@streamed
def test_options_that_come_with_a_checkpoint_bring_their_states(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    left = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    right = hetmem.optim.offload(torch.optim.SGD, managed.parameters(), lr=0.1)
    batches = vector_batches(4, 4, 64)
    for batch in batches[:2]:
        one(plain, batch, left)
    managed.load_state_dict(plain.state_dict())
    right.load_state_dict(copy.deepcopy(left.state_dict()))
    both = Twins(plain, managed, left, right)
    both.train(batches[2:])
    both.assert_same()


def test_a_program_that_clips_gradients_itself_is_refused_before_an_update(tmp_path: Path) -> None:
    """In the first step already, which overlaps nothing: the second one would have updated some by then."""
    plain, managed = pair(mlp, "host", tmp_path)
    _optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, overlap="backward")
    loss_of(managed, vector_batches(1, 4, 64)[0]).backward()
    with pytest.raises(RuntimeError, match=r"which only its update reads .* use max_grad_norm= to clip"):
        torch.nn.utils.clip_grad_norm_(managed.parameters(), 1e-3)
    assert_same_weights(plain, managed)


@on_either
def test_a_hook_of_a_module_reads_the_weights_of_the_forward_or_is_refused(
    overlap: str, placement: str, tmp_path: Path
) -> None:
    """As what logs weights layer by layer does, while the backward of other layers still runs."""
    both = twins(pair(mlp, placement, tmp_path), overlap=overlap)
    read: dict[bool, list[Any]] = {}
    for module, _ in both.sides:
        seen = read.setdefault(module is both.managed, [])
        for layer in (module[2], module[4]):
            layer.register_full_backward_hook(lambda layer, *_, seen=seen: seen.append(layer.weight.tolist()))
    both.train(vector_batches(1, 4, 64))
    *_, batch = vector_batches(2, 4, 64)
    loss_of(both.plain, batch).backward()
    refused = pytest.raises(RuntimeError, match=r"weight is used again, .*overlap='off'.* Updated already: ")
    with contextlib.nullcontext() if overlap == "off" else refused:
        loss_of(both.managed, batch).backward()
    assert read[True] if overlap == "off" else len(read[True]) < len(read[False])
    assert read[True] == read[False][: len(read[True])]
