"""All micro-batches of a step pass each layer before the next one: with the bits of the loop, whatever they compute."""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    CHUNK,
    Block,
    adamws,
    assert_same,
    assert_same_grads,
    assert_same_states,
    assert_same_weights,
    manage,
    pair,
    reference,
)
from tests.engine.programs import Net

BF16 = torch.bfloat16
WIDTH, WORDS = 32, 64


class Stack(nn.Module):
    """An embedding tied to the head, blocks with dropout, and normalisation over the batch behind them."""

    def __init__(self, kind: str = "", depth: int = 3) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.over_batch = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        if kind == "adapters":
            self.requires_grad_(False)
            self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(depth))
            self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(depth))
        if kind == "experts":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for at, block in enumerate(self.blocks):
            if self.kind == "drops" and tokens[0, 0] % 3 == at:
                continue
            if self.kind == "exits" and tokens[0, 0] % 3 < at:
                break
            if self.kind in ("reentrant", "recomputed"):
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            else:
                x = block(x)
            if self.kind == "adapters":
                x = x + self.up[at](self.down[at](x))
            if self.kind == "experts":
                x = x + self.experts[int(tokens[0, at]) % 3](x)
            x = F.dropout(x, 0.2, self.training)
        if self.kind == "again":
            x = self.blocks[0](x)
        x = self.over_batch(x.flatten(0, 1).float()).to(x.dtype)
        return F.cross_entropy(self.head(x).float(), tokens.flatten())


KINDS = ("", "recomputed", "reentrant", "adapters", "experts", "drops", "exits", "again")


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 48, (2, 3 + at % 3), generator=generator) for at in range(count)]


def loop(
    backward: Callable[[Callable[[nn.Module], torch.Tensor]], torch.Tensor], several: Sequence[Any]
) -> list[torch.Tensor]:
    """The loop that the documentation shows."""
    seeds = torch.randint(2**63 - 1, (len(several),)).tolist()
    state, losses = torch.get_rng_state(), []
    for seed, batch in zip(seeds, several, strict=True):
        torch.manual_seed(seed)
        losses.append(backward(lambda module, batch=batch: module(batch) / len(several)).detach())
    torch.set_rng_state(state)
    return losses


def both_ways(
    plain: nn.Module,
    ours: nn.Module,
    several: Sequence[Any],
    mixed: torch.dtype | None = None,
    where: str = "",
    *,
    consumed: bool = False,
    borders: Sequence[nn.Module] | None = None,
) -> None:
    """The loop over `plain` and one call over `ours` give the same losses, gradients, buffers and random numbers.
    `consumed`: updates have begun, and gradients cannot be read."""
    state = torch.get_rng_state()
    expected = loop(reference(plain, mixed), several)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    got = hetmem.accumulate(ours, several, borders=borders)
    assert torch.equal(torch.get_rng_state(), after)
    for one, other in zip(expected, got, strict=True):
        assert_same(one, other, f"{where} loss")
        assert not other.requires_grad
    if not consumed:
        assert_same_grads(plain, ours, where)
        assert_same_weights(plain, ours, where)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_plain_model_gets_the_bits_of_the_loop(kind: str, count: int) -> None:
    """Also what is added to gradients that are there."""
    plain, ours = Stack(kind), Stack(kind)
    ours.load_state_dict(plain.state_dict())
    for step in range(2):
        both_ways(plain, ours, batches(count, seed=step), where=f"call {step}")


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_managed_model_gets_the_bits_of_the_loop(
    kind: str, placement: str, mixed: torch.dtype | None, activations: str, count: int, tmp_path: Path
) -> None:
    placement = "host" if kind == "adapters" else placement  # its weights that are trained are too few for NVMe
    options = {"mixed_precision": mixed, "activations": activations, "sanitize": False}
    plain, managed = pair(lambda: Stack(kind), placement, tmp_path, **options)
    for step in range(2):
        both_ways(plain, managed, batches(count, seed=step), mixed, f"call {step}")


@pytest.mark.nightly
@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", ["host", "nvme", "resident"])
@pytest.mark.parametrize("mixed", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("options", ["off", "clip", "backward", "offload"])
def test_training_by_it_gets_the_bits_of_the_loop(
    kind: str, placement: str, mixed: torch.dtype | None, count: int, options: str, tmp_path: Path
) -> None:
    placement = "host" if kind == "adapters" and placement == "nvme" else placement
    chosen = {"activations": "offload"} if options == "offload" else {}
    plain, managed = pair(lambda: Stack(kind), placement, tmp_path, mixed_precision=mixed, **chosen)
    optimizers = adamws(plain, managed, **({"overlap": "backward"} if options == "backward" else {}))
    for step in range(3):
        consumed = options == "backward" and step > 0
        both_ways(plain, managed, batches(count, seed=step), mixed, f"step {step}", consumed=consumed)
        if options == "clip":
            assert_same(*(nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (plain, managed)), "norm")
        for optimizer in optimizers:
            optimizer.step()
        assert_same_weights(plain, managed, f"step {step}")
        assert_same_states(*optimizers, f"step {step}")
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_a_function_that_is_computed_again_finds_its_weights_for_each_micro_batch(tmp_path: Path) -> None:
    """It found float32 ones from the second micro-batch on, as the gradients of the first had arrived."""
    plain, managed = pair(lambda: Net((("function", None),) * 3, tied=False), "host", tmp_path, mixed_precision=BF16)
    both_ways(plain, managed, batches(3), BF16)


def test_a_module_that_writes_buffers_and_is_called_twice_is_refused() -> None:
    """Between its calls came those of other micro-batches, so running statistics had another order."""
    model = nn.ModuleDict({"twice": nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])})
    layers: Any = model["twice"]

    def forward(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = layers[0](layers[1](layers[0](x))).square().sum()
        return loss

    several = [torch.randn(3, 4) for _ in range(2)]
    with pytest.raises(ManageError, match="calls a BatchNorm1d again that writes its buffers"):
        hetmem.accumulate(model, several, forward)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert len(hetmem.accumulate(model, several, forward)) == 2


@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "managed"])
def test_autocast_of_the_caller_or_of_each_forward_changes_no_bit(within: bool, placed: bool, tmp_path: Path) -> None:
    class Cast(Stack):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", BF16, enabled=True):
                return super().forward(tokens)

    plain, ours = pair(lambda: (Cast if within else Stack)("again"), "host", tmp_path)
    if not placed:
        ours = hetmem.release(ours) or ours
    for step in range(2):
        with torch.autocast("cpu", BF16, enabled=not within):
            both_ways(plain, ours, batches(3, seed=step), where=f"call {step}")


# ---- what it saves ---------------------------------------------------------------------------------------------------


def bytes_of(module: nn.Module) -> dict[str, int]:
    return {name: link["bytes"] for name, link in hetmem.report(module).to_dict()["links"].items()}


def test_weights_cross_the_link_as_often_for_eight_micro_batches_as_for_one(tmp_path: Path) -> None:
    def moved(count: int, step: Callable[[nn.Module, list[Any]], object]) -> int:
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        managed = manage(module, hetmem.Budget(device="8MiB", host="8MiB", device_chunks=3 * CHUNK), tmp_path)
        several = [(torch.randn(2, 64),) for _ in range(count)]
        step(managed, several)
        before = bytes_of(managed)["host_to_device"]
        step(managed, several)
        return bytes_of(managed)["host_to_device"] - before

    def at_once(module: nn.Module, several: list[Any]) -> None:
        hetmem.accumulate(module, several, loss=lambda output: output.square().mean())

    def one_by_one(module: nn.Module, several: list[Any]) -> None:
        for batch in several:
            module(*batch).square().mean().backward()

    one = moved(1, one_by_one)
    assert moved(8, at_once) <= 1.05 * one
    assert moved(8, one_by_one) >= 7 * one


def test_layers_are_passed_by_all_micro_batches_in_order_forth_and_back() -> None:
    seen: list[tuple[str, int, int]] = []

    class Told(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, at, number = super().forward(x), self.at, int(x.detach()[0, 0].item())
            seen.append(("forth", at, number))
            y.register_hook(lambda _: seen.append(("back", at, number)))
            return torch.cat([x[:, :1], y[:, 1:]], dim=1)

    model = nn.Sequential(*(Told(4, 4) for _ in range(3)))
    for at, layer in enumerate(model):
        layer.at = at
    hetmem.accumulate(model, [torch.full((1, 4), float(number)) for number in range(3)], loss=torch.sum)
    forth = [("forth", at, number) for at in range(3) for number in range(3)]
    back = [("back", at, number) for at in (2, 1, 0) for number in range(3)]
    assert seen == forth + back


# ---- errors ----------------------------------------------------------------------------------------------------------


class FaultError(Exception):
    pass


@pytest.mark.each
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "managed"])
@pytest.mark.parametrize("kind", ["", "recomputed", "reentrant", "drops"])
@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_an_error_of_one_ends_all_is_raised_once_and_the_next_call_is_right(
    placed: bool, kind: str, error: type[BaseException], number: int, where: str, tmp_path: Path
) -> None:
    plain, ours = pair(lambda: Stack(kind), "host", tmp_path)
    if not placed:
        hetmem.release(ours)
    several = batches(3)
    both_ways(plain, ours, several)
    numbers = {tuple(batch.flatten().tolist()): at for at, batch in enumerate(several)}

    def raise_it(*_: Any) -> None:
        raise error(f"of micro-batch {number}")

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        at = numbers[tuple(batch.flatten().tolist())]
        hook = None
        if at == number and where == "forward":
            hook = module.over_batch.register_forward_pre_hook(raise_it)
        try:
            loss = module(batch)
        finally:
            if hook is not None:
                hook.remove()
        if at == number and where == "loss":
            raise_it()
        if at == number and where == "backward":
            loss.register_hook(raise_it)
        return loss

    threads, before = {*threading.enumerate()}, [None if p.grad is None else p.grad.clone() for p in ours.parameters()]
    with pytest.raises(error, match=f"of micro-batch {number}") as raised:
        hetmem.accumulate(ours, several, forward)
    assert any(entry.name == "raise_it" for entry in raised.traceback)
    assert {*threading.enumerate()} <= threads
    if where != "backward":
        for parameter, gradient in zip(ours.parameters(), before, strict=True):
            assert_same(gradient, parameter.grad, "a gradient after a forward that failed")
    for module in (plain, ours):
        module.zero_grad()
    ours.load_state_dict(plain.state_dict())  # running statistics
    both_ways(plain, ours, several)


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "managed"])
def test_an_interrupt_from_outside_ends_all(placed: bool, tmp_path: Path) -> None:
    plain, ours = pair(Stack, "host", tmp_path)
    if not placed:
        hetmem.release(ours)

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return module(batch)

    with pytest.raises(KeyboardInterrupt):
        hetmem.accumulate(ours, batches(3), forward)
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours.load_state_dict(plain.state_dict())
    both_ways(plain, ours, batches(3))


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    plain, ours = pair(Stack, "host", tmp_path)
    several = batches(2)
    with pytest.raises(ManageError, match="forward of another one"):
        hetmem.accumulate(ours, several, lambda model, batch: hetmem.accumulate(model, several)[0])
    with pytest.raises(ManageError, match="scalar loss"):
        hetmem.accumulate(ours, several, lambda model, batch: model.embedding(batch))
    with pytest.raises(ManageError, match="no_grad"), torch.no_grad():
        hetmem.accumulate(ours, several)
    with pytest.raises(ManageError, match="not both"):
        hetmem.accumulate(ours, several, lambda model, batch: model(batch), loss=torch.sum)
    for wrong in ({"tokens": several[0]}, None):
        with pytest.raises(ManageError, match="a list of batches"):
            hetmem.accumulate(ours, wrong)
    with pytest.raises(ManageError, match="modules of the model"):
        hetmem.accumulate(ours, several, borders=[nn.Linear(2, 2)])
    for module in (plain, ours):
        with pytest.raises(ManageError, match=r"differentiate nothing|again that writes its buffers"):
            hetmem.accumulate(module, several, lambda model, batch: model(batch).backward() or model(batch))
        module.zero_grad()
    ours.load_state_dict(plain.state_dict())
    assert hetmem.accumulate(ours, []) == []
    both_ways(plain, ours, [several[0]])
    both_ways(plain, ours, [several[0], several[0]])


# ---- surroundings ----------------------------------------------------------------------------------------------------


def test_forwards_find_what_the_thread_of_the_caller_has(tmp_path: Path) -> None:
    context = contextvars.ContextVar[str]("context", default="")
    seen: list[Any] = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.cross_entropy:
                seen.append(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        state = context.get(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        assert state == ("mine", True, torch.float16), state
        assert torch.get_default_device().type == "meta"
        with torch.device("cpu"):
            return module(batch)

    model = Stack()
    several = batches(2)
    context.set("mine")
    with Sees(), torch.device("meta"), torch.autocast("cpu", torch.float16):
        hetmem.accumulate(model, several, forward)
    assert seen == ["hetmem-micro-batch-0", "hetmem-micro-batch-1"]


def test_without_borders_and_whole_on_the_device_it_is_the_loop(tmp_path: Path) -> None:
    _, ours = pair(Stack, "resident", tmp_path)
    names: list[str] = []

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        names.append(threading.current_thread().name)
        return module(batch)

    hetmem.accumulate(ours, batches(2), forward)
    lstm = nn.LSTM(4, 4)
    with pytest.warns(UserWarning, match="LSTM has no ModuleList"):
        hetmem.accumulate(lstm, [torch.randn(2, 1, 4)] * 2, lambda m, b: names.append("here") or m(b)[0].sum())
    assert names == [threading.current_thread().name] * 2 + ["here"] * 2


class HidesInSome(nn.Module):
    """Blocks that a reentrant checkpoint calls for batches of two rows, and the model itself for others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if x.shape[0] == 2 else block(x).sin()
        return x.square().mean()


def test_what_one_micro_batch_hides_in_a_checkpoint_and_another_does_not_is_added_in_order() -> None:
    torch.manual_seed(0)
    model = HidesInSome()
    batches = [torch.randn(2 + number % 2, 8) for number in range(5)]
    for batch in batches:
        (model(batch) / len(batches)).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    hetmem.accumulate(model, batches, lambda model, batch: model(batch) / len(batches))
    for (name, p), grad in zip(model.named_parameters(), expected, strict=True):
        assert p.grad is not None and grad is not None
        assert torch.equal(p.grad, grad), name
