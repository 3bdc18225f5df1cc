"""What hetmem costs the thread that launches operators, in calls of Python and C: they are the same in each run."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest
import torch

import hetmem
from benchmarks.call_cost import Experts, counted
from hetmem import testing
from tests.forked import Forks

MOST: dict[str, tuple[int, int, int]] = {
    "whole on the device, float32": (1_892, 217, 772),
    "whole on the device, bfloat16": (1_964, 370, 847),
    "homes on the host, all copies": (1_980, 2_450, 2_900),
    "homes on the host, half of the copies": (6_750, 5_960, 1_830),
    "all copies, overlap": (2_690, 9_290, 1_400),
    "half of the copies, overlap": (6_750, 13_590, 1_200),
}
"""Of forward, backward and step, of a model of 147 weights: what was measured, and three in a hundred more, as a
transfer may be over a moment earlier or later."""


_COUNT = """
import json, sys
from benchmarks.call_cost import cell
print(json.dumps([cost.calls for cost in cell(sys.argv[1], steps=1).values()]))
"""


@pytest.mark.parametrize("name", MOST)
def test_a_step_takes_no_more_calls_than_it_did(name: str, forks: Forks) -> None:
    """Counted in a process without other models: a backward asks each managed one that is alive."""
    ended = forks.run(_COUNT, name)
    assert ended.returncode == 0, ended.stderr
    calls = json.loads(ended.stdout.splitlines()[-1])
    assert all(found <= most for found, most in zip(calls, MOST[name], strict=True)), calls


def manage(model: torch.nn.Module, device_chunks: str) -> Any:
    """With homes in host memory; what checks each operator is off, as it counts."""
    limits = hetmem.Budget(device="256MiB", host="256MiB", device_chunks=device_chunks)
    managed = hetmem.manage(model, limits, device=hetmem.SimDevice(), chunk_bytes=16384)
    assert not testing.of(managed).memory().resident
    return managed


@pytest.mark.parametrize("function", [torch.neg_, torch.nn.Tanh()], ids=["function", "module"])
def test_what_has_no_weights_costs_nothing(function: Any) -> None:
    """A module that calls a hundred more of it takes the calls of plain torch more, and so does a call of it alone."""

    class Busy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.function, self.more = torch.nn.Linear(64, 64), function, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, called = self.layer(x), self.function
            for _ in range(self.more):
                called(x)
            return x

    plain, x, calls = type(function)() if isinstance(function, torch.nn.Module) else function, torch.randn(4, 64), []
    managed = manage(Busy(), "48KiB")
    own = counted(lambda: plain(x))[1] - counted(lambda: None)[1]
    called = managed.function
    with torch.no_grad():
        for managed.more in (*[0] * 7, 100):
            calls.append(counted(lambda: managed(x))[1])
        assert counted(lambda: called(x))[1] - counted(lambda: None)[1] == own
    assert calls[-1] == calls[-2] + 100 * own


def test_a_loss_that_is_a_part_costs_its_model_no_working_weights() -> None:
    """It is no second forward, and computes in float32 what it is given in float32."""

    class Judged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
            self.criterion = torch.nn.MSELoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    limits, device = hetmem.Budget(device="64MiB", host="64MiB"), hetmem.SimDevice()
    managed = hetmem.manage(Judged(), limits, device=device, mixed_precision=torch.bfloat16)
    x, target, calls = torch.randn(2, 8), torch.randn(2, 8), []
    for judge in (torch.nn.MSELoss(), managed.criterion):
        for _ in range(6):
            loss = judge(managed(x).float(), target)
            assert loss.dtype is torch.float32
            calls.append(counted(loss.backward)[1])
            managed.zero_grad()
    assert calls[-1] == calls[5]


@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
def test_a_token_of_a_model_that_is_whole_on_the_device_costs_no_call_for_its_parts(mixed: torch.dtype | None) -> None:
    """Beside plain torch's: some for the forward, however many modules there are."""

    def more(layers: int) -> int:
        plain, limits = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers))), "64MiB"
        budget, device = hetmem.Budget(device=limits, host=limits), hetmem.SimDevice()
        managed = hetmem.manage(copy.deepcopy(plain), budget, device=device, mixed_precision=mixed)
        plain, x = plain.to(mixed), torch.randn(1, 8, dtype=mixed)
        with torch.no_grad():
            for _ in range(8):
                assert torch.equal(managed(x), plain(x))
            return min(counted(lambda: managed(x))[1] - counted(lambda: plain(x))[1] for _ in range(3))

    assert more(20) <= more(2) <= 378


def test_a_step_leaves_the_garbage_collector_as_much_as_the_one_before_it() -> None:
    """Of what logs keep; a collection of all goes through all that is left."""
    managed, x = manage(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))), "96KiB"), torch.randn(4, 64)

    def left() -> int:
        for _ in range(4):
            managed(x).sum().backward()
            managed.zero_grad()
        for _ in range(2):  # the second pass leaves out tuples of tuples that the first one leaves out
            gc.collect()
        return len(gc.get_objects())

    left()
    before = left()
    assert left() < before + 4


def test_a_checkpointed_backward_costs_what_is_used_and_not_what_there_is() -> None:
    def calls(experts: int) -> int:
        managed = manage(Experts(experts), "128KiB")
        x = torch.randn(4, 8)
        for _ in range(3):
            loss = managed(x)
            found = counted(loss.backward)[1]
        return found

    few, many = calls(64), calls(256)
    assert many < 1.1 * few + 8 * 4 * (256 - 64), "a few calls for each parameter, once"
