"""The libraries that `benchmarks.peers` compares, each as a function that builds a model and returns a step of its
training. What is not installed is imported only where it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

MIB = 1 << 20
LR = 1e-4


@dataclass(frozen=True)
class Shape:
    """The model and its batch, and where files go."""

    width: int = 512
    depth: int = 8
    vocabulary: int = 4096
    batch: int = 4
    context: int = 128
    precision: str = "float32"
    directory: str = ""

    def model(self) -> Any:
        """The same weights in every process, on the host."""
        from benchmarks.gpu.models import GPT

        torch.manual_seed(0)
        return GPT(self.width, self.depth, self.vocabulary, heads=8, context=self.context, tied=False)

    def tokens(self) -> torch.Tensor:
        """The batch of every step."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, self.vocabulary, (self.batch, self.context), generator=generator).to(device())

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the compute; None where it is that of the weights."""
        return None if self.precision == "float32" else torch.bfloat16


def device() -> str:
    """Where models compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


Step = Callable[[], torch.Tensor]


def plain(shape: Shape, offloaded: bool = False) -> Step:
    """torch.optim.AdamW(fused=True), all on the device; or torchao's optimizer, whose states are on the host."""
    from benchmarks.gpu.models import training_step

    model = shape.model().to(device())
    if offloaded:
        from torchao.optim import CPUOffloadOptimizer

        optimizer: Any = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tokens = shape.tokens()

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device(), shape.dtype, enabled=shape.dtype is not None):
            loss: torch.Tensor = model(tokens)
        return loss

    return training_step(compute, optimizer, tokens)


def hetmem(shape: Shape, placement: str, copies: float = 0.5, **adamw: Any) -> Step:
    """hetmem.AdamW(**adamw). "host": that share of the copies on the device, all homes on the host; "nvme": a quarter
    of the homes' bytes on the host, the others on the disk; "resident": all on the device."""
    import hetmem
    from benchmarks.gpu.models import training_step

    model = shape.model()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    chunks = int(copies * weights / (1 if shape.dtype is None else 2))
    limits: dict[str, Any] = {
        "resident": {"device": 16 * weights, "host": 64 * MIB},
        "host": {"device": 16 * weights, "device_chunks": chunks, "host": 6 * weights},
        "nvme": {"device": 16 * weights, "device_chunks": chunks, "host": weights, "nvme": 6 * weights},
    }[placement]
    if placement == "nvme":
        limits["nvme_dir"] = shape.directory
    managed = hetmem.manage(model, hetmem.Budget(**limits), mixed_precision=shape.dtype)
    return training_step(managed, hetmem.AdamW(managed.parameters(), lr=LR, **adamw), shape.tokens())


def fsdp2(shape: Shape) -> Step:
    """torch's `fully_shard` of each block, with parameters, gradients and optimizer on the host."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from benchmarks.gpu.models import training_step

    if device() == "cuda":
        torch.cuda.set_device(0)
    backends = "cpu:gloo,cuda:nccl" if device() == "cuda" and distributed.is_nccl_available() else "gloo"
    distributed.init_process_group(backends, init_method=f"file://{shape.directory}/fsdp2", rank=0, world_size=1)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device(), (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device() == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=shape.dtype),
    }
    model = shape.model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), shape.tokens())


def deepspeed_config(shape: Shape, place: dict[str, Any]) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer at `place`, as DeepSpeed describes it."""
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, "buffer_size": 1 << 25} if place["device"] == "nvme" else place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "bf16": {"enabled": shape.dtype is not None},
        "zero_force_ds_cpu_optimizer": True,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    }


def deepspeed(shape: Shape, nvme: bool = False) -> Step:
    """ZeRO-3 with parameters and optimizer on the host, or on NVMe."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import deepspeed
    from torch import distributed

    rendezvous = f"file://{shape.directory}/deepspeed-{nvme}"
    distributed.init_process_group(
        "nccl" if device() == "cuda" else "gloo", init_method=rendezvous, rank=0, world_size=1
    )
    place: dict[str, Any] = {"device": "nvme" if nvme else "cpu", "pin_memory": device() == "cuda"}
    if nvme:
        place["nvme_path"] = shape.directory
    config = deepspeed_config(shape, place)
    model = shape.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = shape.tokens()

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


PEERS: dict[str, tuple[str, Callable[[Shape], Step]]] = {
    "plain": ("plain torch, all on the device", plain),
    "hetmem-resident": ("hetmem, all on the device", partial(hetmem, placement="resident")),
    "hetmem-host": ("hetmem, homes on the host, half of the copies on the device", partial(hetmem, placement="host")),
    "hetmem-overlap": (
        'the same with `overlap="backward"`',
        partial(hetmem, placement="host", overlap="backward"),
    ),
    "hetmem-all": (
        "hetmem, homes on the host, room for all copies",
        partial(hetmem, placement="host", copies=1.2),
    ),
    "hetmem-forward": (
        'the same with `overlap="forward"`',
        partial(hetmem, placement="host", copies=1.2, overlap="forward"),
    ),
    "hetmem-nvme": ("hetmem, three quarters of the homes or more on NVMe", partial(hetmem, placement="nvme")),
    "fsdp2": ("FSDP2 with `CPUOffloadPolicy`", fsdp2),
    "deepspeed": ("DeepSpeed ZeRO-3, all on the host", deepspeed),
    "deepspeed-nvme": ("DeepSpeed ZeRO-3, all on NVMe", partial(deepspeed, nvme=True)),
    "torchao": ("plain torch with torchao's `CPUOffloadOptimizer`", partial(plain, offloaded=True)),
}
