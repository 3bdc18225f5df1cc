"""Programs that write, look, compute and forget where training depends on it: the bits of plain torch, or one error.

Each has 30 steps, in budgets with all copies, with a third of them and with homes on NVMe, in every overlap mode. What
it gives is the same in each of `NEVER_SILENT_RUNS` runs, three by default. `--all-cases` runs all; else a few, once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.errors import HetmemError
from tests.engine.harness import WIDTH, assert_same, loss_of, narrow, pair, vector_batches
from tests.engine.test_unseen_writes import ROOMS, Writer, five_layers
from tests.pairs import case

STEPS, RUNS = 30, int(os.environ.get("NEVER_SILENT_RUNS", "3"))
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward"},
    "clipped": {"overlap": "backward", "max_grad_norm": 1e9},
}
BF16 = torch.bfloat16


class Side:
    """One of both sides of a program. A plain one in mixed precision computes with a twin of 16-bit copies, made in
    each forward, and made anew before a backward."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, mixed: torch.dtype | None) -> None:
        self.module, self.optimizer = module, optimizer
        self.net, self.mixed = module, mixed
        self.write = Writer(module)
        self.turn = threading.RLock()
        if mixed is not None:
            self.net = module.__class__(*five_layers())
            narrow(self.net, mixed)

    def _copy(self) -> None:
        for master, copied in zip(self.module.parameters(), self.net.parameters(), strict=True):
            if master is not copied:
                copied.data.copy_(master.data)

    def forward(self, batch: Any) -> torch.Tensor:
        self._copy()
        return loss_of(self.net, batch)

    def evaluate(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            return self.forward(batch).clone()

    def backward(self, loss: torch.Tensor) -> None:
        self._copy()
        loss.backward()
        for master, copied in zip(self.module.parameters(), self.net.parameters(), strict=True):
            if master is not copied and copied.grad is not None:
                arrived, copied.grad = copied.grad.to(master.dtype), None
                master.grad = arrived if master.grad is None else master.grad + arrived

    def step(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


Program = Callable[[Side, int, Any], Iterator[torch.Tensor]]


def after_the_step(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    yield (loss := side.forward(batch))
    side.backward(loss)
    side.step()
    side.write(step)
    side.clear()


def before_the_backward(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    yield (loss := side.forward(batch))
    side.write(step)
    side.backward(loss)
    side.step()
    side.clear()


def before_the_step(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    yield (loss := side.forward(batch))
    side.backward(loss)
    side.write(step)
    side.step()
    side.clear()


def between_backwards(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    for again in range(2):
        yield (loss := side.forward(batch))
        side.backward(loss)
        if not again:
            side.write(step)
    side.step()
    side.clear()


def around_an_evaluation(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    yield (loss := side.forward(batch))
    side.backward(loss)
    side.step()
    side.clear()
    kept = [p.data.clone() for p in side.module.parameters()]
    side.write(step)
    yield side.evaluate(batch)
    side.write(step + 1)
    yield side.evaluate(batch)
    for p, value in zip(side.module.parameters(), kept, strict=True):
        p.data.copy_(value)


def read_before_the_step(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    """No write, but what is logged must be what torch would log."""
    yield (loss := side.forward(batch))
    side.backward(loss)
    yield torch.stack([p.detach().norm() for p in side.module.parameters()])
    side.step()
    side.clear()


def never_cleared(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    yield (loss := side.forward(batch))
    side.backward(loss)
    side.step()


def kept_views(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    """Made in one forward, looked at behind the step, and used in a later forward."""
    kept: list[torch.Tensor] = []
    layer: Any = side.net[1]  # type: ignore[index]
    handle = layer.register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach()))
    yield (loss := side.forward(batch))
    handle.remove()
    side.backward(loss)
    side.step()
    side.clear()
    handle = layer.register_forward_hook(lambda _, __, output: output + kept[0][0])
    yield side.evaluate(batch)
    handle.remove()


def locked_steps(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    """Every other whole step on a thread of its own."""
    found: list[torch.Tensor] = []
    act = lambda: found.extend(after_the_step(side, step, batch))  # noqa: E731
    on_a_thread(act) if step % 2 else act()
    yield from found


def locked_calls(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    """Each call on a thread of its own, in this order, with an evaluation between."""
    found: list[torch.Tensor] = []
    loss: list[torch.Tensor] = []
    on_a_thread(lambda: loss.append(side.forward(batch)))
    on_a_thread(lambda: found.append(side.evaluate(batch)))
    on_a_thread(lambda: side.backward(loss[0]))
    on_a_thread(side.step)
    on_a_thread(side.clear)
    yield from (*loss, *found)


def served_beside(side: Side, step: int, batch: Any) -> Iterator[torch.Tensor]:
    """Evaluations that begin with each call, and wait for nothing but hetmem: of the weights before or after it."""
    before = side.evaluate(batch)
    found: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    threads = []
    for act in (lambda: losses.append(side.forward(batch)), lambda: side.backward(losses[0]), side.step):
        threads.append(threading.Thread(target=lambda: found.append(side.evaluate(batch))))
        threads[-1].start()
        if type(side.optimizer) is torch.optim.AdamW:  # plain torch has no turns
            threads[-1].join()
        act()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    side.clear()
    after = side.evaluate(batch)
    assert len(found) == 3
    assert all(torch.equal(each, before) or torch.equal(each, after) for each in found)
    yield from (*losses, after)


def on_a_thread(act: Callable[[], object]) -> None:
    """Do `act` on a thread of its own; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        after_the_step,
        before_the_backward,
        before_the_step,
        between_backwards,
        around_an_evaluation,
        read_before_the_step,
        never_cleared,
        kept_views,
        locked_steps,
        locked_calls,
        served_beside,
    )
}
USED_AGAIN = (
    "is used again, by a recomputation within backward, or by a forward, a read or a write before step(), after its "
    "update had begun"
)
NOT_CLEARED = "and that of the last step was not cleared: torch would add to it, but its update has used it up"
REFUSED = {
    **{("before_the_step", mode): USED_AGAIN for mode in ("backward", "forward")},
    **{("read_before_the_step", mode): USED_AGAIN for mode in ("backward", "forward")},
    **{("never_cleared", mode): NOT_CLEARED for mode in MODES if mode != "off"},
}
"""What is an error and not torch's bits, and a part of its message."""


def result(side: Side, program: Program, steps: int) -> tuple[list[torch.Tensor], str | None]:
    """What the losses were, and the weights, or the error that ended it."""
    found: list[torch.Tensor] = []
    try:
        for step, batch in enumerate(vector_batches(steps, 2, WIDTH, dtype=side.mixed)):
            found.extend(loss.detach().clone() for loss in program(side, step, batch))
    except (RuntimeError, HetmemError) as error:
        return found, f"{type(error).__name__}: {error}"
    found.extend(p.detach().clone() for p in side.module.parameters())
    return found, None


CASES = [
    case(name, mode, place, mixed, nightly=(at + 2 * number + 3 * where) % 17 > 0)
    for at, name in enumerate(PROGRAMS)
    for number, mode in enumerate(MODES)
    for where, (place, mixed) in enumerate((p, m) for p in (*ROOMS, "nvme") for m in (None, BF16))
]


@pytest.mark.parametrize(("name", "mode", "place", "mixed"), CASES)
def test_a_program_gives_the_bits_of_torch_or_one_error_in_each_run(
    name: str, mode: str, place: str, mixed: torch.dtype | None, all_cases: bool, tmp_path: Path
) -> None:
    steps, runs = (STEPS, RUNS) if all_cases else (6, 1)
    errors: list[str | None] = []
    for run in range(runs):
        limits: Any = place
        if place in ROOMS:
            room = ROOMS[place] // (1 if mixed is None else 2)
            limits = hetmem.Budget(device="64MiB", host="64MiB", device_chunks=room)
        plain, managed = pair(five_layers, limits, tmp_path, mixed_precision=mixed)
        if not run:
            left = Side(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), mixed)
            expected, error = result(left, PROGRAMS[name], steps)
            assert error is None
        right = Side(managed, hetmem.AdamW(managed.parameters(), lr=1e-2, **MODES[mode]), None)
        right.mixed = mixed
        found, error = result(right, PROGRAMS[name], steps)
        errors.append(error)
        assert (error is None) == (len(found) == len(expected))
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            assert_same(one, other, f"run {run}, result {number}, before {error}")
        hetmem.release(managed)
    assert len(set(errors)) == 1
    message = REFUSED.get((name, mode))
    assert errors[0] is None if message is None else message in str(errors[0]), errors[0]
