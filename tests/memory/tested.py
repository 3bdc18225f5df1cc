"""What tests of `hetmem.memory` use of it: the one file that follows when it moves. For this folder only."""

from __future__ import annotations

from hetmem import torch_private
from hetmem.base.units import GIB, MIB
from hetmem.cuda.backend import Backend, TorchBackend, stream_for
from hetmem.engine.homes import Memory
from hetmem.intercept import registry
from hetmem.memory import cuda_device, host_memory, live_bytes, nvme_io, stream_copies
from hetmem.memory.coded import CodedHome, CodedPart, CodedTable
from hetmem.memory.cuda_device import ComputeStream, CudaDevice, CudaStreams
from hetmem.memory.device import DevicePool, SimDevice
from hetmem.memory.heap import untouched
from hetmem.memory.hidden_gradient import HiddenGradient
from hetmem.memory.host_memory import PAGE_BYTES, HostPool, Mapping, address_of, free_host_bytes, left_by_groups
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import BLOCK_BYTES, Extent, NvmeStore
from hetmem.memory.stream_copies import StreamCopier
from hetmem.memory.transfer import Finished, Job, Seen, ThreadCopier, TransferEngine
from hetmem.ranks.memory import SharedMapping, make_file
from hetmem.schedule.blocks import Link
from hetmem.schedule.formats import FORMATS, PIECE_ELEMENTS, Coding
from hetmem.schedule.trace import Tier
from hetmem.tools.doctor import examine

__all__ = [
    "BLOCK_BYTES",
    "FORMATS",
    "GIB",
    "HELD_BACK",
    "MIB",
    "PAGE_BYTES",
    "PIECE_ELEMENTS",
    "Backend",
    "CodedHome",
    "CodedPart",
    "CodedTable",
    "Coding",
    "ComputeStream",
    "CudaDevice",
    "CudaStreams",
    "DevicePool",
    "Extent",
    "Finished",
    "HiddenGradient",
    "HostPool",
    "Job",
    "Link",
    "Mapping",
    "Memory",
    "NvmeStore",
    "Seen",
    "SharedMapping",
    "SimDevice",
    "StreamCopier",
    "ThreadCopier",
    "Tier",
    "TorchBackend",
    "TransferEngine",
    "address_of",
    "cuda_device",
    "examine",
    "free_host_bytes",
    "host_memory",
    "left_by_groups",
    "live_bytes",
    "make_file",
    "nvme_io",
    "registry",
    "stream_copies",
    "stream_for",
    "torch_private",
    "untouched",
]
