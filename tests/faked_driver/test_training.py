"""Training on a device that is no CPU to torch: autograd runs on a thread of its own, and memory of both does not mix.

These run in a process that has `plugin`; `test_in_a_process` starts it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.parts import Scale
from tests.gpu.test_managed import Model, Step, assert_trains_alike, batches, steps_of

pytestmark = [
    pytest.mark.skipif("FAKED_KERNELS" not in os.environ, reason="another process runs these"),
    pytest.mark.filterwarnings("default"),
]
PLACEMENTS = {
    "resident": {"device": "64MiB", "host": "64MiB"},
    "host": {"device_chunks": "256KiB", "host": "64MiB"},
    "nvme": {"device_chunks": "256KiB", "host": "512KiB", "nvme": "64MiB"},
}


def budget(placement: str, directory: Path) -> hetmem.Budget:
    sizes: dict[str, Any] = {"device": torch.cuda.memory_allocated() + (40 << 20), **PLACEMENTS[placement]}
    return hetmem.Budget(**sizes, **({"nvme_dir": directory} if placement == "nvme" else {}))


class Small(Model):
    """Weights of 400 KiB. Notes which threads its backward runs on."""

    def __init__(self, *, checkpointing: bool | None = None) -> None:
        super().__init__(64, 3, checkpointing=checkpointing)
        self.threads: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        if loss.requires_grad:
            loss.register_hook(lambda grad: self.threads.add(threading.get_ident()))
        return loss


def train(expected: Sequence[Step], placement: str, directory: Path, build: Any = Small, **options: Any) -> Any:
    managed: Any = assert_trains_alike(build, expected, budget(placement, directory), chunk_bytes="64KiB", **options)
    assert managed.threads == {threading.get_ident()}, "the graph of a managed model runs on the thread that calls"
    return managed


def small(limits: hetmem.Budget, build: Any = Small, **options: Any) -> Any:
    torch.manual_seed(0)
    return hetmem.manage(build(), limits, device="cuda", chunk_bytes="64KiB", **options)


def go_on(managed: nn.Module, optimizer: torch.optim.Optimizer, expected: Step, *, clip: bool = True) -> None:
    """A step, to the weights of `expected`."""
    optimizer.zero_grad()
    for batch in batches(2):
        managed(batch).backward()
    if clip:
        nn.utils.clip_grad_norm_(managed.parameters(), 0.05)
    optimizer.step()
    for name, ours in managed.named_parameters():
        assert torch.equal(ours.detach().cpu(), expected.weights[name]), f"{name} differs"


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_training_equals_torch(
    placement: str, mixed: torch.dtype | None, checkpointing: bool | None, tmp_path: Path
) -> None:
    build = lambda: Small(checkpointing=checkpointing)  # noqa: E731
    expected = steps_of(build, mixed=mixed, where="cuda" if placement == "resident" else "cpu")
    managed = train(expected, placement, tmp_path, build, mixed_precision=mixed, device="cuda")
    assert (hetmem.report(managed).to_dict()["evictions"] > 0) == (placement != "resident")
    hetmem.release(managed)


class Scaled(Small):
    """A custom function is the first that uses a weight, and no function of torch's: autograd takes it as it is."""

    def __init__(self, *, checkpointing: bool | None = None) -> None:
        super().__init__(checkpointing=checkpointing)
        for block in self.blocks:
            block.norm = Scaling(64)


class Scaling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(x, self.weight)


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_a_custom_function_gets_weights_and_gives_gradients_on_the_device(
    placement: str, mixed: torch.dtype | None, checkpointing: bool | None, tmp_path: Path
) -> None:
    build = lambda: Scaled(checkpointing=checkpointing)  # noqa: E731
    expected = steps_of(build, mixed=mixed, where="cuda" if placement == "resident" else "cpu")
    hetmem.release(train(expected, placement, tmp_path, build, mixed_precision=mixed, device="cuda"))


class ByInterface(torch.autograd.Function):
    """A product with a weight that CuPy, or Numba, would find by the interface that they share, after all else was used
    that there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, use_others: Any) -> torch.Tensor:
        found = weight.detach().__cuda_array_interface__
        use_others()
        ctx.save_for_backward(x, weight)
        memory = (ctypes.c_uint8 * (weight.numel() * weight.itemsize)).from_address(found["data"][0])
        values = torch.frombuffer(bytearray(memory), dtype=weight.dtype).view(found["shape"])
        return x * values.to(x.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0), None


class Interfaced(Small):
    """Its first layer's output is scaled so, by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(ByInterface.apply(x, self.factors, self.use_others))

    def use_others(self) -> None:
        with torch.no_grad():
            for block in self.blocks:
                block(torch.zeros(1, 64, device="cuda", dtype=block.up.bias.dtype))


@pytest.mark.in_turn
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_array_interface_of_a_weight_is_right_for_the_call_of_its_module(placement: str, tmp_path: Path) -> None:
    expected = steps_of(Interfaced, mixed=None, where="cuda" if placement == "resident" else "cpu")
    hetmem.release(train(expected, placement, tmp_path, Interfaced, device="cuda"))


@pytest.mark.in_turn
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_after_a_backward_that_raised_on_its_thread_training_goes_on(placement: str, tmp_path: Path) -> None:
    fails = [True]

    class Failing(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fails and torch.is_grad_enabled():
                self.blocks[1].norm.register_full_backward_hook(_fail_once)
            return super().forward(x)

    def _fail_once(*_: object) -> None:
        if fails:
            fails.clear()
            raise ValueError("a hook of the user's")

    expected = steps_of(Small, mixed=None, where="cpu")
    managed = small(budget(placement, tmp_path), Failing)
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, weight_decay=0.1)
    with pytest.raises(ValueError, match="a hook of the user's"):
        managed(batches(1)[0]).backward()
    for step in expected:
        go_on(managed, optimizer, step)


@pytest.mark.each
@pytest.mark.parametrize("another", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_backward_after_one_that_raised_gives_its_gradients(placement: str, another: bool, tmp_path: Path) -> None:
    """Autograd may let go of the one that raised when the next has begun. `another`: one of another thread's runs when
    it raises, and on the device's thread nobody can say whose a node is."""
    managed = small(budget(placement, tmp_path))
    batch, other = batches(2)
    managed(other).backward()
    managed.zero_grad()
    managed(batch).backward()
    expected = [parameter.grad.clone() for parameter in managed.parameters() if parameter.grad is not None]

    began, may_end = threading.Event(), threading.Event()
    waits = torch.zeros((), requires_grad=True) * 2
    waits.register_hook(lambda _: (began.set(), may_end.wait(60), None)[2])
    thread = threading.Thread(target=waits.backward)
    for _ in range(4):
        managed.zero_grad()
        managed(other).backward()  # what lies at home is not what is expected
        managed.zero_grad()
        loss = managed(batch)
        hook = managed.blocks[1].norm.register_full_backward_hook(_raise)
        failing = managed(other)
        hook.remove()
        if another and not began.is_set():
            thread.start()
            assert began.wait(60)
        with pytest.raises(ValueError, match="a hook of the user's"):
            failing.backward()
        if thread.is_alive():
            may_end.set()
            thread.join()
        managed.zero_grad()
        loss.backward()
        found = [parameter.grad for parameter in managed.parameters() if parameter.grad is not None]
        assert len(found) == len(expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _raise(*_: object) -> None:
    raise ValueError("a hook of the user's")


@pytest.mark.in_turn
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_model_that_is_moved_to_the_gpu_takes_no_more_of_it(placement: str, tmp_path: Path) -> None:
    """As scripts do it, and trainers: its parameters stay where the budget has them."""
    expected = steps_of(Small, mixed=None, where="cuda" if placement == "resident" else "cpu")
    managed = small(budget(placement, tmp_path))
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, weight_decay=0.1)
    for step in expected:
        before = torch.cuda.memory_allocated(), [parameter.device for parameter in managed.parameters()]
        managed.cuda()
        managed.to("cuda:0")
        assert (torch.cuda.memory_allocated(), [parameter.device for parameter in managed.parameters()]) == before
        go_on(managed, optimizer, step)


@pytest.mark.each
@pytest.mark.parametrize("by", ["the user", "a fused optimizer"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_step_counts_that_were_sent_to_the_gpu_come_back_to_the_host(placement: str, by: str, tmp_path: Path) -> None:
    """Else each parameter's would be waited for in each step."""
    expected = steps_of(Small, mixed=None, where="cuda" if placement == "resident" else "cpu")
    managed = small(budget(placement, tmp_path))
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, weight_decay=0.1)
    for step in expected:
        go_on(managed, optimizer, step)
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
        if by == "the user":
            for state in optimizer.state.values():
                state.update({name: value.cuda() for name, value in state.items()})
        else:
            saved = optimizer.state_dict()
            optimizer.load_state_dict({**saved, "param_groups": [{**g, "fused": True} for g in saved["param_groups"]]})
            assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_are_asked_for_are_those_that_arrive(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """After a forward weights are on another device than their gradients are made on; `backward` is compared above."""
    managed = small(budget(placement, tmp_path), mixed_precision=mixed)
    parameters = list(managed.parameters())
    for batch in batches(2):
        loss = managed(batch)
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        loss.backward()
        for parameter, gradient in zip(parameters, found, strict=True):
            assert gradient.device == parameter.device
            assert torch.equal(gradient, parameter.grad)
        managed.zero_grad()


@pytest.mark.parametrize("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_are_kept_and_tensors_that_are_put_there_are_the_user_s(
    mixed: torch.dtype | None, tmp_path: Path
) -> None:
    managed = small(budget("host", tmp_path), mixed_precision=mixed)
    first, second = batches(2)
    managed(first).backward()
    kept = [parameter.grad for parameter in managed.parameters()]
    copies = [gradient.clone() for gradient in kept]
    managed.zero_grad()
    managed(second).backward()
    arrived = [parameter.grad.clone() for parameter in managed.parameters()]
    assert all(map(torch.equal, kept, copies))
    for parameter, gradient in zip(managed.parameters(), kept, strict=True):
        parameter.grad = gradient
    managed(second).backward()
    for parameter, mine, before, other in zip(managed.parameters(), kept, copies, arrived, strict=True):
        assert parameter.grad is mine
        assert torch.equal(mine, before + other)


@pytest.mark.parametrize("whole", [False, True], ids=["moved", "whole"])
def test_homes_leave_a_device_that_has_not_a_byte_left(whole: bool, tmp_path: Path) -> None:
    """What stands in for weights between operators was made as they left: then there was no memory even for that, and
    operators and optimizers went on with homes that were nobody's. Updates have the bits of the host, but those of a
    model that is whole on the device. torch's clipping adds norms device by device: another order, other bits."""
    expected = steps_of(Small, mixed=None, where="cuda" if whole else "cpu", then="cpu", clip=None)
    sizes: dict[str, Any] = {"device": torch.cuda.memory_allocated() + (16 << 20), "host": "64MiB"}
    sizes |= {} if whole else {"device_chunks": "1400KiB"}
    managed = small(hetmem.Budget(**sizes))
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, weight_decay=0.1)
    library, batch = ctypes.CDLL(None), batches(1)[0]
    go_on(managed, optimizer, expected[0], clip=False)
    assert testing.of(managed).memory().resident == whole
    there = sum(parameter.is_cuda for parameter in managed.parameters())
    library.faked_limit(ctypes.c_int64(torch.cuda.memory_allocated()))
    try:
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            managed(batch)
    finally:
        library.faked_limit(ctypes.c_int64(torch.cuda.mem_get_info()[0]))
    assert sum(parameter.is_cuda for parameter in managed.parameters()) < there
    for step in expected[1:]:
        go_on(managed, optimizer, step, clip=False)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parked_model_has_no_byte_of_the_device(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes all of it meanwhile; if it keeps it, the model stays parked. Host memory that its homes go
    to is page-locked once, and no more than these take."""
    expected = steps_of(Small, mixed=None, where="cuda" if placement == "resident" else "cpu", clip=None)
    before, library = torch.cuda.memory_allocated(), ctypes.CDLL(None)
    managed = small(budget(placement, tmp_path))
    managed.register_buffer("table", torch.arange(1000, device="cuda"))
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, weight_decay=0.1)
    locked, register = list[int](), torch.cuda.cudart().cudaHostRegister
    monkeypatch.setattr(
        torch.cuda.cudart,
        "cudaHostRegister",
        staticmethod(lambda address, nbytes, flags: locked.append(nbytes) or register(address, nbytes, flags)),
    )
    for number, step in enumerate(expected):
        go_on(managed, optimizer, step, clip=False)
        optimizer.zero_grad()
        on_device = testing.of(managed).memory().device_home_bytes
        if number == 1:
            hetmem.park(managed, prepare=True)
        hetmem.park(managed)
        assert torch.cuda.memory_allocated() == before
        assert len(locked) == (placement == "resident"), "by the first one alone"
        assert sum(locked) <= on_device + 4096 * 3 * len(testing.of(managed).chunks())
        assert torch.equal(managed.table, torch.arange(1000))
        if placement == "resident":
            library.faked_limit(ctypes.c_int64(torch.cuda.memory_allocated()))
            with pytest.raises(hetmem.errors.DeviceOutOfMemoryError, match=r"Small stays parked.* are free, this") as _:
                hetmem.unpark(managed)
            assert torch.cuda.memory_allocated() == before, "also as long as the program has the error"
            library.faked_limit(ctypes.c_int64(torch.cuda.mem_get_info()[0]))
        hetmem.unpark(managed)
        assert managed.table.is_cuda
    told = hetmem.report(managed).to_dict()["between_steps"]
    assert (told["prepare_seconds"] > 1e-4) == (placement == "resident"), "the report names it"


def test_one_backward_through_several_forwards_sums_as_torch_does(tmp_path: Path) -> None:
    """Each has accumulators of its own where weights compute elsewhere than at home."""
    gradients = []
    for placement in ("resident", "host"):
        managed = small(budget(placement, tmp_path))
        torch.stack([managed(batch) for batch in batches(3)]).sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in managed.parameters()])
    assert all(map(torch.equal, *gradients))


def test_weights_at_home_do_not_mix_with_what_is_on_the_device(tmp_path: Path) -> None:
    """So whatever above did not go through hetmem would have raised."""
    managed = small(budget("host", tmp_path))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        managed.last.weight + torch.ones(64, device="cuda")


@pytest.mark.each
@pytest.mark.parametrize("limits", [{"device_chunks": "256KiB"}, {"device_chunks": "1400KiB"}], ids=["host", "moved"])
@pytest.mark.parametrize("options", [{"max_grad_norm": 1e6}, {"overlap": "backward"}], ids=str)
def test_gradients_that_are_scaled_without_a_version_are_seen_wherever_they_lie(
    options: dict[str, Any], limits: dict[str, Any], tmp_path: Path
) -> None:
    """`GradScaler.unscale_` counts none: a norm is of what is there, and gradients that only updates read refuse it."""
    sizes: dict[str, Any] = {"device": torch.cuda.memory_allocated() + (4 << 20), "host": "64MiB", **limits}
    managed = small(hetmem.Budget(**sizes))
    optimizer = hetmem.AdamW(managed.parameters(), lr=1e-2, **options)
    for batch in batches(3):
        managed(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    managed(batches(1)[0]).backward()
    there = {p for p in managed.parameters() if p.grad.is_cuda}
    assert bool(there) == (limits["device_chunks"] != "256KiB") and len(there) < len(list(managed.parameters()))
    for parameter in there or managed.parameters():
        if "overlap" not in options:
            parameter.grad.data.mul_(4.0)
            continue
        with pytest.raises(RuntimeError, match="cannot be read or changed"):
            parameter.grad.data.mul_(4.0)
    if "overlap" not in options:
        norm = sum(float(p.grad.double().square().sum()) for p in managed.parameters()) ** 0.5
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-9)


def test_graphs_of_gradients_find_weights_on_the_device(tmp_path: Path) -> None:
    """What nodes save in a backward, on its thread, is fetched again in the next one."""
    managed = Small()
    plain = copy.deepcopy(managed).to("cuda")
    hetmem.manage(managed, budget("host", tmp_path), device="cuda", chunk_bytes="64KiB")
    for batch in batches(3):
        for module in (plain, managed):
            x = batch.clone().requires_grad_()
            (slope,) = torch.autograd.grad(module(x), x, create_graph=True)
            (slope.norm(dim=-1) - 1).square().mean().backward()
        assert_same_gradients(plain, managed)


def assert_same_gradients(plain: nn.Module, managed: nn.Module) -> None:
    found = [[None if p.grad is None else p.grad.cpu().clone() for p in each.parameters()] for each in (plain, managed)]
    for expected, got in zip(*found, strict=True):
        assert (expected is None and got is None) or torch.equal(expected, got), (expected - got).abs().max()
    plain.zero_grad(), managed.zero_grad()


def weight_decay(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Weights are used at home too, and each gets gradients from the host and from the device."""
    loss: torch.Tensor = module(x)
    decay = [parameter.square().sum().to(loss.device) for parameter in module.parameters()]
    return torch.stack([loss, *decay]).sum()


def norms_of_gradients(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of weights are at home, and so are the nodes of their norms."""
    with torch.autograd.set_multithreading_enabled(False):  # else by what each thread did before
        found = torch.autograd.grad(module(x), list(module.parameters()), create_graph=True)
    return torch.stack([gradient.norm() for gradient in found]).sum()


@pytest.mark.each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("loss_of", [weight_decay, norms_of_gradients], ids=lambda loss_of: loss_of.__name__)
def test_a_graph_on_the_host_and_on_the_device_has_one_order(loss_of: Any, placement: str, tmp_path: Path) -> None:
    """Two threads, one of each, would deadlock, or sum in the order in which they happen to come."""
    managed = Small()
    plain = copy.deepcopy(managed).to("cuda")
    hetmem.manage(managed, budget(placement, tmp_path), device="cuda", chunk_bytes="64KiB")
    for batch in batches(6):
        for module in (plain, managed):
            loss_of(module, batch).backward()
        assert_same_gradients(plain, managed)


class Ordered(nn.Module):
    """Notes the order in which micro-batches come to each block, and their gradients back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.forwards: list[tuple[int, int]] = []
        self.gradients: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            x = block(x)
            self.forwards.append((at, number))
            x.register_hook(partial(self._came, at, number))
            x = torch.tanh(x)
        return x.square().mean()

    def _came(self, at: int, number: int, _: torch.Tensor) -> None:
        self.gradients.append((at, number))


@pytest.mark.parametrize(
    "chunks",
    [pytest.param("32KiB", marks=pytest.mark.nightly, id="some of the copies"), pytest.param("64KiB", id="all copies")],
)
def test_micro_batches_take_turns_at_each_block_in_their_order(chunks: str) -> None:
    """Nodes of a GPU have a queue and a thread of their own."""
    managed = Ordered()
    plain = copy.deepcopy(managed).to("cuda")
    limits = hetmem.Budget(device=torch.cuda.memory_allocated() + (40 << 20), device_chunks=chunks, host="64MiB")
    hetmem.manage(managed, limits, device="cuda", chunk_bytes="16KiB")
    turns = [(at, number) for at in range(3) for number in range(4)]
    for step in range(5):
        several = [*enumerate(batch.cuda() for batch in batches(4))]
        for number, batch in several:
            plain(batch, number).backward()
        managed.forwards.clear(), managed.gradients.clear()
        hetmem.accumulate(managed, several, lambda model, each: model(each[1], each[0]))
        assert managed.forwards == turns, step
        assert managed.gradients == [(2 - at, number) for at, number in turns], step
        assert_same_gradients(plain, managed)


class Reader(nn.Module):
    """A frozen embedding and layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64).requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(self.embed(tokens))
        return found.square().mean()


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_frozen_embedding_are_read_where_its_table_lies(
    placement: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """By a kernel from page-locked memory, by the host from a file."""
    torch.manual_seed(0)
    plain = Reader().to(dtype)
    managed = hetmem.manage(copy.deepcopy(plain), budget(placement, tmp_path), device="cuda", chunk_bytes="16KiB")
    tokens = torch.randint(0, 512, (2, 12))
    with torch.no_grad():
        managed(tokens.cuda())
    crossed = hetmem.report(managed).to_dict()["links"]["host_to_device"]["bytes"]
    assert crossed < (512 * 64 + 4 * 65 * 64) * dtype.itemsize, "not the table"
    losses = plain(tokens), managed(tokens.cuda())
    assert torch.equal(losses[0].detach(), losses[1].detach().cpu())
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(managed.layers.parameters(), plain.layers.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad.cpu(), theirs.grad)
