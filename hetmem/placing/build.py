"""Turns a module and a budget into memory: precision, layout, pools, and homes for its parameters.

All refusals come before the first parameter is changed.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from hetmem import torch_private
from hetmem.base.config import Limits
from hetmem.engine.homes import Memory
from hetmem.engine.param_views import storage_references
from hetmem.errors import BudgetError, ManageError
from hetmem.memory.chunk import Chunk, Role
from hetmem.memory.coded import CodedPart
from hetmem.memory.device import Device
from hetmem.memory.host_memory import HostPool
from hetmem.memory.interrupts import HELD_BACK
from hetmem.memory.nvme_store import NvmeStore
from hetmem.placing.building_memory import BuildingMemory, check_directories, host_bytes
from hetmem.placing.frozen import Frozen, choose_codings, refuse_infinite, refuse_on_meta
from hetmem.placing.taken import TakenOver
from hetmem.schedule.formats import Coding
from hetmem.schedule.layout import ALIGNMENT_ELEMENTS, ChunkSpec, Layout, ParameterSpec, used_ends
from hetmem.schedule.placement import Capacities, NoRoom, loaned_bytes, survey
from hetmem.schedule.staging import MOST_ROLES
from hetmem.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from hetmem.ranks.join import JoinedRanks  # imports torch.distributed, which one process does without

Precision = torch.dtype | Literal["bf16", "bfloat16", "fp16", "float16"]
"""What users may give as the dtype that operators compute in."""

_NAMED = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


def precision_of(asked: Any) -> torch.dtype | None:
    """Return the dtype of `asked`, a `Precision` or None. Raises `ManageError` for anything else."""
    found = _NAMED.get(asked) if isinstance(asked, str) else asked
    if found in (torch.bfloat16, torch.float16) or asked is None:
        return found
    raise ManageError(f"mixed_precision must be torch.bfloat16 ('bf16'), torch.float16 ('fp16') or None, got {asked!r}")


def compute_dtypes(
    module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], mixed_precision: torch.dtype | None
) -> list[torch.dtype]:
    """Return the dtype in which operators see each of `parameters`: `mixed_precision`, if given, for float32 ones.

    Parameters of modules with running statistics keep their dtype: the statistics are float32 buffers, which operators
    accept beside 16-bit inputs only if the weights are float32 too. They are few.
    """
    exempt = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, torch_private.NormBase) and part.running_mean is not None
        for parameter in part.parameters(recurse=False)
    }
    narrow = mixed_precision or torch.float32
    return [narrow if p.dtype is torch.float32 and id(p) not in exempt else p.dtype for p in parameters.values()]


def specs(
    parameters: Mapping[str, torch.nn.Parameter], compute: list[torch.dtype], codings: Mapping[str, Coding]
) -> list[ParameterSpec]:
    """Return the specs of `parameters` for a layout: parameters with equal dtypes at home and in compute share chunks,
    trained and frozen ones apart, and those with `codings` by format."""
    found = []
    for (name, p), dtype in zip(parameters.items(), compute, strict=True):
        if (coding := codings.get(name)) is not None:
            spec = ParameterSpec(name, p.numel(), f"{coding.format} {dtype}", dtype.itemsize, coding.nbytes)
        else:
            spec = ParameterSpec(name, p.numel(), f"{p.dtype} {dtype} {p.requires_grad}", p.itemsize)
        found.append(spec)
    return found


_OBJECTS_DEEP = 2
"""How many objects deep a module's attributes (a cache, a configuration) are searched for views, beside containers."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype, torch.device)
_AT_MOST = 100_000


def refuse_early_views(module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise `ManageError` for a view of one of `parameters` that an attribute of `module` leads to: `self.turned =
    self.weight.T` in an `__init__` would go on showing old values. Other views (a `state_dict`) take no part in the
    module's computation, and keep their values."""
    of_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        of_storage.setdefault(parameter.untyped_storage()._cdata, []).append(name)
    held = {
        key: names
        for key, names in of_storage.items()
        if storage_references(parameters[names[0]]) > len(names) + 1 and parameters[names[0]].data_ptr()
    }
    own = {id(parameter) for parameter in parameters.values()}
    for path, tensor in _tensors_of(module) if held else ():
        if id(tensor) in own or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            continue
        for name in held.get(tensor.untyped_storage()._cdata, ()):
            (start, end), (other_start, other_end) = _span(tensor), _span(parameters[name])
            if start < other_end and other_start < end:
                raise ManageError(
                    f"{path} is a view of {name} that was made before hetmem.manage, and would go on showing what the "
                    f"weight is now: make it in forward, where it is needed, or delete it before hetmem.manage"
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.itemsize


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that an attribute of `module`, or of a module in it, leads to, and the attribute's path."""
    found: deque[tuple[str, Any, int]] = deque()
    for prefix, part in module.named_modules():
        skipped = {getattr(hook, "name", None) for hook in part._forward_pre_hooks.values()}  # torch's spectral_norm
        skipped |= {"_parameters", "_buffers", "_modules"}
        attributes = {**vars(part), **part._buffers, **part._parameters}
        found.extend((f"{prefix}.{name}".lstrip("."), at, 0) for name, at in attributes.items() if name not in skipped)
    seen = {id(part) for part in module.modules()}
    for _ in range(_AT_MOST):
        if not found:
            return
        path, value, deep = found.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        is_object = not isinstance(value, _CONTAINERS)
        if not is_object or deep <= _OBJECTS_DEEP:
            found.extend((path, part, deep + is_object) for part in _referred_to(value))


def _referred_to(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [value.base]
    if isinstance(value, FunctionType):  # without its module's globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__]
    return gc.get_referents(value)


def collect(module: torch.nn.Module, *, quantises: bool, taken: Collection[str] = ()) -> dict[str, torch.nn.Parameter]:
    """Return the distinct parameters of `module` by name, in order of registration; raise if any cannot be managed.
    `quantises`: frozen ones may be on `meta`, as their values are to be loaded, as may those with the names `taken`."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ManageError(
                f"{name or 'the model'} is a {type(part).__name__} of torch.jit, whose operators no hook sees: "
                f"leave torch.jit.script out, or use torch.compile"
            )
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ManageError(f"{type(module).__name__} has no parameters, so there is nothing to manage")
    spans: list[tuple[int, int, str]] = []
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ManageError(f"{name} has no shape yet (a lazy module): run one forward before managing the model")
        if parameter.is_meta and (quantises or name in taken):
            refuse_on_meta(module, name, parameter)
            continue
        if parameter.device.type != "cpu":
            raise ManageError(
                f"{name} is on {parameter.device}, expected host memory: build the model on the CPU (or move it there "
                f"with model.cpu()); hetmem brings its parameters to the accelerator. For a pretrained model, build it "
                f"from its config and fill it with hetmem.load_weights"
            )
        if parameter.is_inference():
            raise ManageError(f"{name} was made under torch.inference_mode(), which counts no writes: build it outside")
        if parameter.layout is not torch.strided:
            raise ManageError(f"{name} has layout {parameter.layout}, expected a dense (strided) tensor")
        if is_traceable_wrapper_subclass(parameter) or not _has_memory(parameter):
            raise ManageError(
                f"{name} is a {type(parameter.data).__name__}, which has no memory of its own: its values lie in other "
                f"tensors, which hetmem does not move. Give the module the dense values (torchao: p.dequantize(), a "
                f"DTensor: p.full_tensor()), or leave the quantization or distribution out"
            )
        start = parameter.data_ptr()
        spans.append((start, start + parameter.numel() * parameter.itemsize, name))
    spans.sort()
    for (_, end, name), (start, other_end, other) in pairwise(spans):
        if start < end and start < other_end:
            raise ManageError(f"{name} and {other} share memory but are two parameters: tie them by using one object")
    refuse_early_views(module, parameters)
    return parameters


def _has_memory(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` has memory of its own, unlike subclasses that answer for other tensors."""
    try:
        return not parameter.numel() or parameter.untyped_storage().data_ptr() != 0
    except RuntimeError:  # of storages without memory
        return False


def build_memory(
    module: torch.nn.Module,
    limits: Limits,
    device: Device,
    mixed_precision: torch.dtype | None,
    chunk_bytes: int | None,
    *,
    moves_activations: bool = False,
    frozen: Frozen | None = None,
    taken: TakenOver | None = None,
    built: BuildingMemory | None = None,
    joined: JoinedRanks | None = None,
) -> Memory:
    """Lay `module` out and open the pools, for `move_home`, with host memory for activations if `moves_activations`.
    `module` is not changed. `frozen`: which weights are quantised; `taken`: those that are already, on `meta`. `built`:
    the memory that it was built in, which the pools take over. `joined`: the ranks that share all homes."""
    if built is not None:
        built.hand_over(module)
    codings = taken.codings() if taken is not None else {}
    parameters = collect(module, quantises=frozen is not None, taken=codings)
    others = {name: parameter for name, parameter in parameters.items() if name not in codings}
    codings |= choose_codings(module, others, frozen)
    refuse_infinite(parameters, codings)
    check_directories(limits)
    capacities = Capacities(
        _device_bytes(limits, device),
        host_bytes(limits) if built is None else built.host_bytes,
        limits.nvme_bytes,
        limits.device_chunk_bytes,
        home_copies=limits.home_copies,
    )
    if joined is not None:
        capacities = _of_all(capacities, joined)
    compute = compute_dtypes(module, parameters, mixed_precision)
    try:
        ground = survey(
            specs(parameters, compute, codings),
            [dtype.itemsize for dtype in compute],
            [index for index, parameter in enumerate(parameters.values()) if parameter.requires_grad],
            capacities,
            copies=mixed_precision is not None,
            chunk_bytes=chunk_bytes,
        )
    except NoRoom as refusal:  # a private class; users get one of `hetmem.errors`
        raise BudgetError(str(refusal)) from None
    HELD_BACK.raise_here()  # after the search, which may take long
    store = None
    if joined is None and (ground.uses_nvme or (moves_activations and limits.nvme_bytes)):
        opened = built.store if built is not None else None
        store = opened or NvmeStore(list(limits.nvme_directories), limits.nvme_bytes)
    pins: list[Callable[[], None]] = []
    try:
        all_host = moves_activations or limits.host_bytes is not None
        most = capacities.host_bytes if all_host else ground.host_bytes
        if joined is None:
            ranks, host_pool = None, HostPool(most, None if built is None else built.mapping)
        else:
            drive = (str(limits.nvme_directories[0]), limits.nvme_bytes) if ground.uses_nvme else None
            ranks = joined.open(most, len(parameters), len(ground.layout.chunks), drive)
            host_pool, store = ranks.pool, ranks.drive
            pins.append(ranks.leave)
        pins.append(host_pool.mapping.share_with_children)
        loaned = loaned_bytes(capacities, ground.staging_bytes)
        loaned *= moves_activations and ground.uses_nvme  # otherwise host memory has room for all homes
        host_pool.for_loans_bytes = loaned + ground.aside_bytes
        host_pool.reserve_staging(ground.staging_slot_bytes, ground.staging_slots)
        slots = ground.device_slots or sum(chunk.span for chunk in ground.layout.chunks)
        memory = Memory(
            ground.layout,
            _chunks(ground.layout, parameters, compute, codings),
            device,
            capacities.device_bytes,
            capacities.chunk_cap_bytes,
            device.pool(ground.slot_bytes, min(slots, capacities.chunk_cap_bytes // ground.slot_bytes)),
            host_pool,
            store,
            limits.nvme_bytes,
            sum(buffer.numel() * buffer.itemsize for buffer in module.buffers()),
            ground.staging_slots,
            mixed_precision,
            pins,
            ground.resident,
            ground.in_codes,
            copied=not ground.is_whole or moves_activations,
            ranks=ranks,
            nvme_directories=list(limits.nvme_directories),
        )
        if built is None:  # else once it is used for homes only
            memory.page_lock()
        memory.staying = {memory.chunks[index]: None for index in sorted(ground.staying)}
        memory.unstaged = {
            memory.chunks[index]: MOST_ROLES if index in ground.trainable else 1 for index in sorted(ground.unstaged)
        }
        memory.reserve(memory.chunks, Role.PARAM)
        memory.reserve_copies(chunk for chunk in memory.chunks if chunk.spec.index in ground.copied)
        host_pool.for_loans_bytes = loaned
    except BaseException:
        for unpin in pins:
            unpin()
        if store is not None:
            store.close()
        raise
    return memory


def _of_all(capacities: Capacities, joined: JoinedRanks) -> Capacities:
    """Return the capacities that all ranks have: the device of the smallest, the host memory that rank 0 sees."""
    found = joined.exchange(capacities)
    return replace(found[0], device_bytes=min(each.device_bytes for each in found), ranks=joined.count)


def _device_bytes(limits: Limits, device: Device) -> int:
    asked = [size for size in (limits.device_bytes, device.memory_bytes) if size is not None]
    return min(asked) if asked else device.available_bytes()


def _chunks(
    layout: Layout,
    parameters: Mapping[str, torch.nn.Parameter],
    compute: list[torch.dtype],
    codings: Mapping[str, Coding],
) -> list[Chunk]:
    ends, names = used_ends(layout), list(parameters)
    chunks = []
    for spec in layout.chunks:
        first = spec.parameters[0]
        chunks.append(
            Chunk(
                spec,
                spec.span * layout.chunk_elements,
                ends[spec.index],
                compute[first] if spec.coded_bytes else parameters[names[first]].dtype,
                compute[first],
                min(len(parameters), spec.span * layout.chunk_elements // ALIGNMENT_ELEMENTS),
                _codes(layout, spec, names, codings) if spec.coded_bytes else (),
            )
        )
    return chunks


def _codes(layout: Layout, spec: ChunkSpec, names: list[str], codings: Mapping[str, Coding]) -> tuple[CodedPart, ...]:
    """Return the quantised weights of a chunk, one behind the other, in the order of their elements."""
    parts, start = [], 0
    for index in sorted(spec.parameters, key=lambda index: layout.placements[index].offset):
        coding = codings[names[index]]
        parts.append(CodedPart(coding, start, layout.placements[index].offset))
        start += coding.nbytes
    return tuple(parts)
