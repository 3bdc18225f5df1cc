"""Weights are exported by name and one by one, in another dtype, with the bits of a cast of the whole model."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import CheckpointError
from tests.checkpoint.models import start
from tests.engine import harness
from tests.forked import nothing_collected

HALF = torch.bfloat16


def exported(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hetmem.export_weights(model, **options)}


@pytest.mark.each
@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
@pytest.mark.parametrize("mixed", [None, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "parked"])
def test_they_are_a_cast_of_the_state_dict(placement: str, mixed: Any, overlap: Any, tmp_path: Path) -> None:
    run = start(
        tmp_path,
        "host" if placement == "parked" else placement,
        lambda module: hetmem.AdamW(module.parameters(), lr=1e-2, overlap=overlap),
        mixed_precision=mixed,
        home_copies=True if placement != "resident" and mixed else None,
    )
    run.steps(0, 2)
    if placement == "parked":
        hetmem.park(run.module)
    found = exported(run.module)
    state = run.module.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    assert [*found] == [*dict.fromkeys(first[id(tensor)] for tensor in state.values())], "tied ones once, in order"
    for name, tensor in found.items():
        is_weight = isinstance(state[name], nn.Parameter)
        harness.assert_same(tensor, state[name].detach().to(HALF) if is_weight else state[name], name)


def test_copies_at_home_are_given_themselves_unless_the_program_wrote_to_weights(tmp_path: Path) -> None:
    model = harness.mlp()
    limits = harness.budget("host", tmp_path, home_copies=True)
    harness.manage(model, limits, tmp_path, mixed_precision=HALF)
    names = [name for name, _ in model.named_parameters()]
    model(torch.randn(2, harness.WIDTH))
    addresses = [{name: each.data_ptr() for name, each in hetmem.export_weights(model)} for _ in range(2)]
    assert addresses[0] == addresses[1], "nothing is copied"
    kept = model[4].weight.data
    exported(model)
    kept.mul_(3)
    with torch.no_grad():
        model[0].weight.data.mul_(2)  # counts no version
        next(iter(model[2].parameters())).add_(1)
    found = exported(model)
    for name in names:
        harness.assert_same(found[name], model.get_parameter(name).detach().to(HALF), name)


def _engine(connection: Connection, memory: torch.Tensor, model: nn.Module) -> None:
    """What an engine in another process does: it loads each weight from the memory that both share."""
    weights = dict(model.named_parameters())
    while (told := connection.recv()) is not None:
        name, dtype, shape, nbytes = told
        with torch.no_grad():
            weights[name].copy_(memory[:nbytes].view(dtype).view(shape))
        connection.send(name)
    connection.send({name: weight.detach().float().numpy() for name, weight in weights.items()})


def test_a_second_process_loads_them_by_shared_memory(tmp_path: Path) -> None:
    model = harness.mlp()
    harness.manage(model, harness.budget("host", tmp_path, home_copies=True), tmp_path, mixed_precision=HALF)
    model(torch.randn(2, harness.WIDTH)).sum().backward()
    hetmem.AdamW(model.parameters(), lr=1e-2).step()
    engine = harness.mlp().to(HALF)
    memory = torch.empty(max(p.numel() for p in engine.parameters()) * 2, dtype=torch.uint8).share_memory_()
    here, there = Pipe()
    with nothing_collected():
        child = os.fork()
        if child == 0:
            try:
                _engine(there, memory, engine)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    there.close()  # so that nothing waits for an engine that has failed
    for name, tensor in hetmem.export_weights(model):
        memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        here.send((name, tensor.dtype, tuple(tensor.shape), tensor.nbytes))
        assert here.recv() == name
    here.send(None)
    loaded = here.recv()
    os.waitpid(child, 0)
    for name, weight in model.named_parameters():
        harness.assert_same(torch.from_numpy(loaded[name]), weight.detach().to(HALF).float(), name)


def test_quantised_weights_are_decoded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
    model[0].requires_grad_(False)
    harness.manage(model, "host", tmp_path, frozen="nf4")
    for name, tensor in hetmem.export_weights(model):
        harness.assert_same(tensor, model.get_parameter(name).detach().to(HALF), name)
    assert testing.of(model).codes(model[0].weight) is not None


def refusals() -> Iterator[tuple[str, Any]]:
    yield "dtype must be", {"dtype": torch.int8}
    yield "adapters must be 'merged' or 'only'", {"adapters": "all"}


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    model = harness.mlp()
    harness.manage(model, "host", tmp_path)
    optimizer = hetmem.AdamW(model.parameters(), lr=1e-2)
    for message, options in refusals():
        with pytest.raises(CheckpointError, match=message):
            hetmem.export_weights(model, **options)
    with pytest.raises(CheckpointError, match=r"needs a model of peft"):
        exported(model, adapters="only")
    model(torch.randn(2, harness.WIDTH)).sum().backward()
    weights = hetmem.export_weights(model)
    next(weights)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"has stepped while its weights were exported"):
        next(weights)
