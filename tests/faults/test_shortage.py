"""An error for want of device memory names changes that help: each is made here, and training then works."""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import DeviceOutOfMemoryError

WIDTH = 64


def tower() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def train(budget: hetmem.Budget, batch: torch.Tensor, parts: int = 1, **options: Any) -> None:
    """Two steps, the batch in `parts`, each memory of its own: a view would keep all of the batch on the device."""
    model = hetmem.manage(tower(), budget, device="sim", **options)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(2):
        for part in batch.chunk(parts):
            model(part.clone()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(*arguments: Any, **options: Any) -> str:
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        train(*arguments, **options)
    return in_one_line(caught.value)


def in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def number(pattern: str, message: str) -> int:
    found = re.search(pattern, message)
    assert found, message
    return int(found[1])


def test_with_the_micro_batches_it_names_training_works() -> None:
    budget, batch = hetmem.Budget(device="512KiB", host="8MiB"), torch.ones(2048, WIDTH)
    parts = number(r": (\d+) micro-batches", told(budget, batch, chunk_bytes="32KiB"))
    train(budget, batch, parts, chunk_bytes="32KiB")
    told(budget, batch, parts // 2, chunk_bytes="32KiB")


class Regression(nn.Module):
    """A model that returns its output, or, given `target`, its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x if target is None else (x - target).square().mean()


@pytest.mark.parametrize("has_loss", [True, False])
def test_one_message_says_what_the_whole_step_needs(has_loss: bool) -> None:
    """From any budget: the next one that a person tries is the right one."""
    x = torch.ones(1024, 256)

    def step(device: int, activations: Any = "keep") -> None:
        budget = hetmem.Budget(device=f"{device}MiB", host="64MiB")
        model = hetmem.manage(Regression(), budget, device="sim", activations=activations)
        for _ in range(3):
            loss = model(x, x) if has_loss else model(x).sum()
            loss.backward()
            model.zero_grad()

    def said(device: int) -> str:
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            step(device)
        assert max(map(len, str(caught.value).splitlines())) <= 80
        return in_one_line(caught.value)

    first = said(3)
    what = "The step needs" if has_loss else "The model's forward and a backward from its outputs need"
    needed = number(rf"{what} (\d+)\.00 MiB of the device", first)
    least = number(r'activations="auto" and Budget\(device="(\d+)MiB"\)', first)
    assert f'raise Budget(device="{needed}MiB")' in first
    second = said(least)
    assert number(rf"{what} (\d+)\.00 MiB of the device", second) == needed
    assert 'activations="auto": it moves' in second
    step(least, "auto")
    step(needed)
    said(needed - 2)


def test_a_model_whose_copy_refers_to_the_original_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal waited for the turn of the thread that waited for it."""
    monkeypatch.setenv("HETMEM_TURN_TIMEOUT", "120")
    model = hetmem.manage(Regression(), hetmem.Budget(device="3MiB", host="64MiB"), device="sim")
    first: Any = model.layers[0]
    first.forward = lambda x: torch.nn.functional.linear(x, first.weight, first.bias)
    began = time.monotonic()
    with pytest.raises(DeviceOutOfMemoryError, match=r"this\smoment\sneeds"):
        model(torch.ones(1024, 256))
    assert time.monotonic() - began < 60


def frames_behind_the_program(error: BaseException) -> int:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [*reversed(files)]
    behind = own[: own.index(__file__)]
    assert error.__cause__ is None and error.__suppress_context__
    return sum(str(Path(hetmem.__file__).parent) in file for file in behind)


def of_an_operator(model: nn.Module) -> None:
    model(torch.ones(4096, WIDTH))


def of_an_unbound_weight(model: nn.Module) -> None:
    model[0].forward = lambda x: torch.nn.functional.linear(x, model[7].weight)  # type: ignore[method-assign, operator, index]
    model(torch.ones(4096, WIDTH))


def of_a_backward(model: nn.Module) -> None:
    model(torch.ones(512, WIDTH)).square().sum().backward()


@pytest.mark.parametrize("run", [of_an_operator, of_an_unbound_weight, of_a_backward])
def test_the_traceback_ends_in_the_program(run: Callable[[nn.Module], None]) -> None:
    model = hetmem.manage(tower(), hetmem.Budget(device="1280KiB", host="8MiB"), device="sim", chunk_bytes="32KiB")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        run(model)
    assert frames_behind_the_program(caught.value) <= 2, "".join(traceback.format_tb(caught.tb))


def test_a_model_kept_whole_on_the_device_is_streamed_with_the_share_it_names() -> None:
    """With room in host memory it would have left by itself."""
    budget, batch = hetmem.Budget(device="2100KiB", host="64KiB"), torch.ones(640, WIDTH)
    message = told(budget, batch, chunk_bytes="16KiB")
    share = number(r"set Budget\(device_chunks=(\d+)\)", message)
    train(hetmem.Budget(device="2100KiB", host="8MiB", device_chunks=share), batch, chunk_bytes="16KiB")


def test_what_does_not_help_is_not_named() -> None:
    """One operator uses all weights, so no batch and no chunk size makes room for them."""
    model = hetmem.manage(nn.LSTM(64, 64, num_layers=4), hetmem.Budget(device="128KiB", host="8MiB"), device="sim")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        model(torch.ones(1, 1, 64))
    message = in_one_line(caught.value)
    assert "micro-batches" not in message
    assert "chunk_bytes" not in message
    assert "needs" in message


def test_a_forward_without_gradients_is_told_what_helps_it() -> None:
    """Not what helps training: micro-batches, checkpointing."""

    rows, said = 4096, list[str]()
    while rows:
        model = hetmem.manage(tower(), hetmem.Budget(device="512KiB", host="8MiB"), device="sim", chunk_bytes="32KiB")
        try:
            with torch.no_grad():
                model(torch.ones(rows, WIDTH))
            break
        except DeviceOutOfMemoryError as error:  # each knows the moments up to its own
            said.append(in_one_line(error))
            rows //= number(r"with 1/(\d+) of either", said[-1])
    assert rows == 512
    assert "of the forward without gradients): activations and other tensors take 1.00 MiB" in said[0]
    assert all("--inference --device-memory 524288" in message for message in said)
    assert not any("micro-batch" in message or "heckpointing" in message for message in said)


@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_a_program_that_goes_on_with_a_smaller_batch_has_the_bits_of_one_that_began_with_it(overlap: str) -> None:
    """What a batch without room has needed counted for the smaller ones too: none of them had room any more."""
    model, plain = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    hetmem.manage(model, hetmem.Budget(device="1MiB", device_chunks="192KiB", host="8MiB"), device="sim")
    optimizer: torch.optim.Optimizer = hetmem.AdamW(model.parameters(), overlap=overlap)
    rows, refused, said = 480, list[int](), list[Any]()
    while rows:
        try:
            for _ in range(3):
                model(torch.ones(rows, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            break
        except torch.OutOfMemoryError as error:
            refused.append(rows)
            said.append(error.args)
        rows -= 3
    assert len(refused) > 60 and rows > 225
    assert all(
        re.match(r"simulated CUDA device out of memory\.\nNo room for \S+ \((moment|outside)", *each) for each in said
    )
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for _ in range(3):
        plain(torch.ones(rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_what_a_batch_without_room_needed_is_not_kept_for_smaller_ones() -> None:
    """The first forward with a batch measures what it needs; the next ones rely on that."""

    def made() -> nn.Module:
        budget = hetmem.Budget(device="1MiB", device_chunks="192KiB", host="8MiB")
        return hetmem.manage(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), budget, device="sim")

    def most(model_for: Callable[[], nn.Module]) -> int:
        for rows in range(480, 0, -3):
            with contextlib.suppress(torch.OutOfMemoryError), torch.no_grad():
                tried = model_for()
                for _ in range(3):
                    tried(torch.ones(rows, 64))
                return rows
        return 0

    model = made()
    assert most(lambda: model) >= most(made) > 300


def test_a_function_that_hetmem_has_no_room_for_is_not_called_again() -> None:
    """It is torch's error, where the allocator raises which hetmem frees idle chunks and calls once more."""
    calls: list[int] = []

    def repeated(x: torch.Tensor) -> Any:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(repeated, (x,), x)
        if not x.is_meta:  # else of a rehearsal
            calls.append(len(x))
        return x.repeat(4096, 1)

    class Repeats(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(repeated(x))

    budget = hetmem.Budget(device="512KiB", device_chunks="64KiB", host="8MiB")
    model = hetmem.manage(Repeats(WIDTH, WIDTH), budget, device="sim")
    with pytest.raises(DeviceOutOfMemoryError):
        model(torch.ones(1, WIDTH))
    assert calls == [1]
