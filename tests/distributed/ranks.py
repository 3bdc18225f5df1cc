"""What each rank does in the tests of this folder, in processes that fork from one that has imported torch's parts.

python -m tests.distributed.ranks RANKS STORY FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hetmem
from hetmem import testing
from hetmem.errors import ManageError

STEPS = 20


class Rank:
    """One process of `world`, and the models that it trains."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.mesh: DeviceMesh = init_device_mesh("cpu", (world,))

    @staticmethod
    def build() -> nn.Sequential:
        """Weights of 252 KiB, whose shards are uneven, and for some ranks empty. The states of each of four ranks take
        more than its budget for a third of them."""
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(32, 301), nn.Tanh(), nn.Linear(301, 177), nn.LayerNorm(177), nn.Linear(177, 5), nn.Linear(5, 1)
        )

    def sharded(self, *, offload: bool = False, mixed: bool = False) -> nn.Module:
        model, options = self.build(), dict[str, Any](mesh=self.mesh)
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*model[:3:2], model):
            fully_shard(layer, **options)
        return model

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        steps: range,
        then: Callable[[], object] = lambda: None,
        *,
        alike: bool = False,
    ) -> None:
        """With batches of the rank's own, or `alike` on all ranks; every other one is not clipped."""
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + (0 if alike else self.rank))
            loss = model(torch.randn(8, 32, generator=generator)).square().mean()
            (loss * (1.0, 1e-3)[step % 2]).backward()
            then()
            optimizer.step()
            optimizer.zero_grad()

    def budget(self, *, third: bool) -> hetmem.Budget:
        """Room for all states, or for a third of the shards', and the rest on NVMe."""
        if not third:
            return hetmem.Budget(host="64MiB")
        directory = self.folder / f"nvme{self.rank}"
        directory.mkdir(exist_ok=True)
        return hetmem.Budget(host="160KiB", nvme="8MiB", nvme_dir=directory)


def assert_same(left: nn.Module, one: Any, right: nn.Module, other: Any) -> None:
    """All shards and states have the same bits, placements and kinds."""
    for plain, ours in zip(left.parameters(), right.parameters(), strict=True):
        values = {"weight": (plain.detach(), ours.detach())}
        assert one.state[plain].keys() == other.state[ours].keys()
        values |= {name: (value, other.state[ours][name]) for name, value in one.state[plain].items()}
        for name, (a, b) in values.items():
            assert type(a) is type(b)
            if isinstance(a, DTensor):
                assert (a.placements, a.shape, a.stride()) == (b.placements, b.shape, b.stride())
                a, b = a.to_local(), b.to_local()
            assert torch.equal(a, b), f"{name} of {tuple(plain.shape)} differs"


def bits(at: Rank, *, offload: bool, mixed: bool, overlap: str = "off") -> None:
    """Against torch's fused AdamW, both clipped by torch, or with updates in the backward; half of the states on
    NVMe."""
    plain, ours = (at.sharded(offload=offload, mixed=mixed) for _ in range(2))
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(ours.parameters(), lr=1e-2, overlap=overlap, budget=at.budget(third=True))
    for model, optimizer in ((plain, left), (ours, right)):
        clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], 0.5)
        at.train(model, optimizer, range(STEPS), clip if overlap == "off" else lambda: None)
    assert_same(plain, left, ours, right)
    used = right.memory_bytes()
    assert used["host"] <= 160 << 10 and used["nvme"] > 0, used
    if at.rank == 0:
        plan = hetmem.plan_optimizer(at.build, at.budget(third=True), ranks=at.world, offloaded=True)
        planned = {"host": plan.state_bytes["host"] + plan.slots_bytes, "nvme": plan.state_bytes["nvme"]}
        assert planned == used, f"planned {planned}, used {used}"


def norm(at: Rank) -> None:
    """`max_grad_norm` against gradients that were multiplied by the factor of hetmem's rule, from the norm of all."""
    plain, ours = at.sharded(), at.sharded()
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right: Any = hetmem.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.5, budget=at.budget(third=False))
    norms, factors = list[float](), list[float]()

    def clip() -> None:
        shards = [p.grad.full_tensor().flatten() for p in plain.parameters()]  # type: ignore[union-attr]
        norms.append(testing.norm(shards))
        factors.append(min(1.0, 0.5 / (norms[-1] + 1e-6)))
        for parameter in plain.parameters():
            parameter.grad.to_local().mul_(factors[-1])  # type: ignore[union-attr]

    at.train(plain, left, range(6), clip, alike=True)
    found = list[float]()
    right.register_step_post_hook(lambda *_: found.append(right.grad_norm))
    at.train(ours, right, range(6), alike=True)
    assert_same(plain, left, ours, right)
    assert all(abs(a - b) <= 1e-15 * a for a, b in zip(norms, found, strict=True)), (norms, found)
    assert {factor < 1 for factor in factors} == {True, False}, factors
    (at.folder / f"norms of {at.world} ranks {at.rank}").write_text(repr(found))


def save(at: Rank) -> None:
    ours = at.sharded(offload=True)
    right: Any = hetmem.AdamW(ours.parameters(), lr=3e-2, budget=at.budget(third=True))
    at.train(ours, right, range(3), alike=True)
    weights, states = get_state_dict(ours, right)
    dcp.save({"weights": weights, "states": states}, checkpoint_id=str(at.folder / "saved"))
    whole = _whole(ours, right)
    if at.rank == 0:
        torch.save(whole, at.folder / "whole.pt")


def load(at: Rank) -> None:
    """With as many ranks as there are now; a single one trains a model that nobody has sharded."""
    ours = at.build() if at.world == 1 else at.sharded()
    right: Any = hetmem.AdamW(ours.parameters(), budget=at.budget(third=at.world > 1))
    weights, states = get_state_dict(ours, right)
    dcp.load({"weights": weights, "states": states}, checkpoint_id=str(at.folder / "saved"))
    set_state_dict(ours, right, model_state_dict=weights, optim_state_dict=states)
    assert right.param_groups[0]["lr"] == 3e-2
    expected, found = torch.load(at.folder / "whole.pt"), _whole(ours, right)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), f"{name} differs"
    at.train(ours, right, range(3, 5), alike=True)


def _whole(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = dict[str, Any]()
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name} {state}": value for state, value in optimizer.state[parameter].items()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in found.items()}


def odd(at: Rank) -> None:
    """What is right though rare, and what is refused by name."""
    room = at.budget(third=False)
    halves = init_device_mesh("cpu", (at.world // 2, 2), mesh_dim_names=("replica", "shard"))
    made = {
        "replicated": distribute_tensor(torch.ones(6, 4), at.mesh, [Replicate()]),
        "sharded by columns": distribute_tensor(torch.ones(6, 5), at.mesh, [Shard(1)]),
        "on another mesh": distribute_tensor(torch.ones(8, 4), halves, [Replicate(), Shard(0)]),
    }
    parameters = [nn.Parameter(each) for each in made.values()]
    twins = [nn.Parameter(each.full_tensor()) for each in made.values()]
    plain = torch.optim.AdamW(twins, lr=0.1, fused=True)
    right: Any = hetmem.AdamW(parameters, lr=0.1, max_grad_norm=1e9, budget=room)
    for step in range(3):
        for twin, parameter in zip(twins, parameters, strict=True):
            twin.grad = torch.full_like(twin, step + 1.0)
            mesh = parameter.device_mesh
            whole = [Replicate() for _ in range(mesh.ndim)]  # a gradient of another placement
            parameter.grad = DTensor.from_local(twin.grad.clone(), mesh, whole, run_check=False)
        plain.step()
        right.step()
        assert right.grad_norm == testing.norm([twin.grad.flatten() for twin in twins])  # type: ignore[union-attr]
        for twin, parameter in zip(twins, parameters, strict=True):
            assert torch.equal(twin, parameter.full_tensor())
    mixed: Any = hetmem.AdamW([*parameters, extra := nn.Parameter(torch.ones(3))], max_grad_norm=1.0, budget=room)
    extra.grad = torch.ones(3)
    _refused(mixed.step, r"max_grad_norm= needs the norm of all gradients, and some parameters are DTensors")
    parameters[0].grad = None
    extra.grad = None
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    _refused(lambda: hetmem.AdamW(flat.parameters(), budget=room), "a FlatParameter of FullyShardedDataParallel")
    replicated = DistributedDataParallel(nn.Linear(4, 4))
    early: Any = hetmem.AdamW(replicated.parameters(), overlap="backward", budget=room)
    _refused(lambda: replicated(torch.ones(2, 4)).sum().backward(), "before DistributedDataParallel has added up its")
    early.step()
    model = at.sharded()
    ours: Any = hetmem.AdamW(model.parameters(), budget=room)
    at.train(model, ours, range(1))
    saved = ours.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to_local()
    _refused(
        lambda: ours.load_state_dict(saved), "exp_avg of parameter 0 is a plain tensor, and the parameter a DTensor"
    )


def killed(at: Rank) -> None:
    """A rank dies without a word: the others get torch's error, and what they have is whole."""
    model = at.sharded()
    right: Any = hetmem.AdamW(model.parameters(), budget=at.budget(third=True))
    at.train(model, right, range(2))
    if at.rank == at.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"Connection (reset|closed) by peer"):
        at.train(model, right, range(2, 4))


def _refused(act: Callable[[], object], says: str) -> None:
    with pytest.raises(ManageError) as refused:
        act()
    assert says in str(refused.value)


STORIES: dict[str, Callable[[Rank], None]] = {
    "float32": lambda at: bits(at, offload=False, mixed=False),
    "float32 offloaded": lambda at: bits(at, offload=True, mixed=False),
    "mixed": lambda at: bits(at, offload=False, mixed=True),
    "mixed offloaded": lambda at: bits(at, offload=True, mixed=True),
    "norm": norm,
    "save": save,
    "overlap": lambda at: bits(at, offload=False, mixed=True, overlap="backward"),
    "overlap offloaded": lambda at: bits(at, offload=True, mixed=False, overlap="backward"),
    "load": load,
    "odd": odd,
    "killed": killed,
}


def _one(rank: int, world: int, stories: list[str], folder: Path) -> int:
    torch.set_num_threads(1)
    try:
        store = folder / f"rendezvous of {world} {stories[0]}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        at = Rank(rank, world, folder)
        for story in stories:
            STORIES[story](at)
        if "killed" not in stories:
            dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank} of {world}:", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


def main(world: int, folder: str, *stories: str) -> None:
    """Fork as many ranks as there are to be, and end as they end."""
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            status = _one(rank, world, [*stories], Path(folder))
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    expected = [-signal.SIGKILL if "killed" in stories and rank == world - 1 else 0 for rank in range(world)]
    assert ends == expected, f"ranks ended with {ends}"
