"""What tests of `hetmem.memory` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem import torch_private
from hetmem.base.config import cache_directory, kernel_cache_directory
from hetmem.base.hardware import DiskSample
from hetmem.base.units import GIB, MIB
from hetmem.cuda.backend import Backend, TorchBackend, stream_for
from hetmem.engine.homes import Memory
from hetmem.intercept import registry
from hetmem.memory import cuda_device, host_pool, live_bytes, mapping, nvme_file, nvme_requests, stream_copies
from hetmem.memory.cuda_device import ComputeStreams, CudaDevice, CudaStreams
from hetmem.memory.device import DevicePool, SimDevice
from hetmem.memory.host_pool import HostPool
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.mapping import PAGE_BYTES, Mapping, address_of, free_host_bytes, left_by_groups
from hetmem.memory.nvme_requests import DEFAULT, DiskSettings, Requests, settings_for
from hetmem.memory.nvme_store import BLOCK_BYTES, Extent, NvmeStore
from hetmem.memory.stream_copies import StreamCopier
from hetmem.memory.transfer import Finished, Job, Seen, ThreadCopier, TransferEngine
from hetmem.schedule.blocks import Link
from hetmem.schedule.trace import Tier
from hetmem.tools.doctor import examine
from hetmem.tools.probe import _keep

__all__ = [
    "BLOCK_BYTES",
    "DEFAULT",
    "GIB",
    "HELD_BACK",
    "MIB",
    "PAGE_BYTES",
    "Backend",
    "ComputeStreams",
    "CudaDevice",
    "CudaStreams",
    "DevicePool",
    "DiskSample",
    "DiskSettings",
    "Extent",
    "Finished",
    "HostPool",
    "Job",
    "Link",
    "Mapping",
    "Memory",
    "NvmeStore",
    "Requests",
    "Seen",
    "SimDevice",
    "StreamCopier",
    "ThreadCopier",
    "Tier",
    "TorchBackend",
    "TransferEngine",
    "_keep",
    "address_of",
    "cache_directory",
    "cuda_device",
    "examine",
    "free_host_bytes",
    "host_pool",
    "kernel_cache_directory",
    "left_by_groups",
    "live_bytes",
    "mapping",
    "nvme_file",
    "nvme_requests",
    "registry",
    "settings_for",
    "stream_copies",
    "stream_for",
    "torch_private",
]
