"""A training process and an inference engine in another one share a device: each has all of it in turn. Their simulated
devices ask one counter, in memory that both share, for each byte."""

from __future__ import annotations

import copy
import os
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from hetmem.errors import DeviceOutOfMemoryError
from tests.engine.harness import assert_same
from tests.forked import nothing_collected

WORDS, WIDTH, ROWS, NEW = 32, 96, 6, 5
CAPACITY = 2 << 20


class Counted(hetmem.SimDevice):
    """Has as many bytes as `counter`, of all processes, says are free."""

    def __init__(self, counter: torch.Tensor) -> None:
        super().__init__(CAPACITY)
        self.counter = counter

    def allocate(self, nbytes: int) -> Any:
        if int(self.counter) + nbytes > CAPACITY:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {nbytes} of {CAPACITY - int(self.counter)} free")
        memory = np.zeros(nbytes, np.uint8)
        self.counter += nbytes
        weakref.finalize(memory, self.counter.sub_, nbytes)
        return memoryview(memory)


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


@torch.no_grad()
def generate(model: nn.Module, number: int) -> torch.Tensor:
    """Rows of drawn words, each from the one before."""
    generator = torch.Generator().manual_seed(number)
    words = [torch.randint(0, WORDS, (ROWS,), generator=generator)]
    for _ in range(NEW):
        chances = model(words[-1]).float().softmax(-1)
        words.append(torch.multinomial(chances, 1, generator=generator).squeeze(1))
    return torch.stack(words, 1)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """GRPO's: the advantage of each row within its group, times the likelihood of its words. The reward is how many
    words are even."""
    rewards = (words % 2 == 0).float().mean(1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logits = model(words[:, :-1]).float()
    told = F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none").mean(1)
    return (advantages * told).mean()


# ---- the other process -----------------------------------------------------------------------------------------------


def serve(asked: Connection, counter: torch.Tensor, weights: torch.Tensor) -> None:
    """Answer: take the device for weights and a cache, load a weight, generate, give the device back."""
    torch.set_num_threads(1)  # a fork has none of the others
    model, device, held = build().to(torch.bfloat16), Counted(counter), list[Any]()
    named = dict(model.named_parameters())
    while (job := asked.recv()) is not None:
        what, *told = job
        answer: Any = None
        if what == "wake":
            try:
                held.append(device.allocate(CAPACITY - 4096))
            except torch.OutOfMemoryError as error:
                answer = str(error)
        elif what == "load":
            name, nbytes = told
            with torch.no_grad():
                named[name].view(-1).copy_(weights[:nbytes].view(torch.bfloat16))
        elif what == "generate":
            answer = generate(model, *told).numpy()
        else:
            held.clear()
        asked.send(answer)


class Engine:
    def __init__(self, connection: Connection, counter: torch.Tensor, weights: torch.Tensor) -> None:
        self._connection, self.counter, self._weights = connection, counter, weights

    def ask(self, *job: Any) -> Any:
        self._connection.send(job)
        return self._connection.recv()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self._weights[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        self.ask("load", name, tensor.nbytes)


@contextmanager
def engine_beside() -> Iterator[Engine]:
    counter = torch.zeros((), dtype=torch.int64).share_memory_()
    weights = torch.zeros(4 * WIDTH * WIDTH, dtype=torch.uint8).share_memory_()
    here, there = Pipe()
    with nothing_collected():
        child = os.fork()
        if child == 0:
            try:
                here.close()
                serve(there, counter, weights)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    there.close()
    try:
        yield Engine(here, counter, weights)
    finally:
        here.close()
        os.waitpid(child, 0)


@pytest.mark.parametrize("limits", [{"device": CAPACITY}, {"device": CAPACITY, "device_chunks": "256KiB"}])
def test_grpo_on_one_device_has_the_bits_of_plain_torch(limits: dict[str, Any]) -> None:
    plain = build()
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), list[torch.Tensor]()
    for number in range(3):
        loss = loss_of(plain, generate(copy.deepcopy(plain).to(torch.bfloat16), number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    with engine_beside() as engine:
        model = hetmem.manage(
            build(), hetmem.Budget(host="16MiB", **limits), device=Counted(engine.counter), chunk_bytes="32KiB"
        )
        ours = hetmem.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            if number:
                assert "out of memory" in engine.ask("wake"), "the model has some of the device"
            with hetmem.parked(model):
                assert int(engine.counter) == 0
                assert engine.ask("wake") is None
                for name, tensor in hetmem.export_weights(model):
                    engine.load(name, tensor)
                words = torch.from_numpy(engine.ask("generate", number))
                if "device_chunks" not in limits and number:
                    with pytest.raises(DeviceOutOfMemoryError, match="stays parked"):
                        hetmem.unpark(model)
                engine.ask("sleep")
            loss = loss_of(model, words)
            loss.backward()
            ours.step()
            ours.zero_grad()
            assert_same(expected[number], loss.detach(), f"the loss of step {number}")
