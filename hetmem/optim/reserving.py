"""Homes for what an optimizer keeps: whether there is room, where there is none what helps, and kernels for them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch

from hetmem.base.units import format_enough, format_size
from hetmem.cpu import compare_tasks, square_sum_tasks
from hetmem.engine.homes import Memory
from hetmem.errors import BudgetError, ManageError
from hetmem.intercept.interceptor import Interception
from hetmem.memory.chunk import Chunk, Role
from hetmem.optim.options import Gradients, Overlap, Rule
from hetmem.optim.states import SteppingOptimizer
from hetmem.schedule.placement import slots_for_staging


def reserve_homes(
    optimizer: SteppingOptimizer, interception: Interception, kept: Mapping[Chunk, tuple[Role, ...]], name: str
) -> None:
    """Have homes for gradients of the chunks in `kept`, and for the states there, and compile what updates them.

    Raises `BudgetError` where they have no room, and `ManageError` where the model's plan is for another optimizer.
    """
    check_planned(interception.runtime.planned_optimizer, optimizer.gradients, optimizer.overlap)
    memory, traffic, sink = interception.runtime.memory, interception.runtime.traffic, interception.gradients
    streamed = optimizer.gradients is Gradients.STREAMED
    lends = memory.uses_copies and streamed and not memory.resident
    if not memory.resident:
        check_room(memory, kept, name, lends=lends)
    if lends:
        new = [chunk for chunk in kept if not (chunk.moved or memory.lends(chunk))]
        if new and not memory.set_aside(new):
            saves_nothing(len(new))
        sink.lends = True
    elif memory.uses_copies:  # on the device gradients stay autograd's own
        traffic.ensure_homes(kept, (Role.GRAD,))
        if streamed:
            saves_nothing(0)
    alike: dict[tuple[Role, ...], list[Chunk]] = {}
    for chunk, roles in kept.items():
        check_staging(memory, chunk, len(roles))
        alike.setdefault(roles, []).append(chunk)
    for roles, chunks in alike.items():
        for chunk in chunks:
            interception.share.before_reserving(chunk, set(roles))
        traffic.ensure_homes(chunks, roles)
    if memory.staying:
        if all(chunk in kept for chunk in memory.chunks if any(m.parameter.requires_grad for m in chunk.parameters)):
            interception.share.bring_home(lends=lends)
        if memory.staying and not optimizer.rule.runs_on_device and memory.device.torch_device.type != "cpu":
            raise stays_on_device(memory, name)
        traffic.ensure_homes(memory.staying, (Role.GRAD,))
    compile_ahead(optimizer.rule, memory, kept, norm=optimizer.needs_all_gradients, lends=lends)


def check_planned(planned: Mapping[str, str], gradients: Gradients, overlap: Overlap) -> None:
    """Raises `ManageError` where visible gradients would take memory that the model's plan has given to other things.
    What is faster or slower than `planned`, in no more memory, is the user's to choose."""
    if planned.get("gradients") == Gradients.STREAMED and gradients is Gradients.VISIBLE:
        said = ", ".join(f"{name}={value!r}" for name, value in planned.items())
        raise ManageError(
            f"the model's plan is for an optimizer with {said}, got overlap={overlap.value!r}, "
            f"gradients={gradients.value!r}, which keeps the gradients of all parameters at home: make it as planned, "
            f"or plan again with gradients='visible'"
        )


def saves_nothing(chunks: int) -> None:
    """Warn that streamed gradients take as much memory as visible ones: those of a model of so few `chunks`, of which
    some have a home at any time, or (0) of one whose states all lie on the device."""
    why = f"the model has {chunks} chunk(s), all with gradients at a time" if chunks else "all is on the device"
    warnings.warn(
        f"gradients='streamed' saves nothing: {why}; leave it out{', or set a smaller chunk_bytes' if chunks else ''}",
        stacklevel=5,
    )


def check_room(memory: Memory, kept: Mapping[Chunk, Collection[Role]], name: str, *, lends: bool) -> None:
    """Raise `BudgetError` where host memory and NVMe lack room for what the optimizer called `name` keeps of chunks.
    `lends`: gradients have homes for a while only."""
    wanted: Counter[str] = Counter()
    for chunk, roles in kept.items():
        for role in (*roles, *(() if lends else (Role.GRAD,))):
            if role not in chunk.homes and not chunk.moved:
                wanted["gradients" if role is Role.GRAD else "states"] += chunk.home_nbytes(role)
    room, total = memory.room(), sum(wanted.values())
    missing = total - room.host_bytes - room.nvme_bytes
    if missing <= 0:
        return
    here = total + memory.host_pool.reserved_bytes + (memory.store.reserved_bytes if memory.store else 0)
    device = f", the device holds {format_size(memory.device_home_bytes)}" if memory.device_home_bytes else ""
    tiers = f"Budget(host=…) is {format_size(memory.host_pool.capacity_bytes)}"
    tiers += f" and Budget(nvme=…) {format_size(memory.nvme_bytes)}" if memory.store else ""
    kinds = ", ".join(f"{what} {format_size(nbytes)}" for what, nbytes in wanted.items())
    raise BudgetError(
        f"{name} has no room: weights, gradients and states take {format_size(here)} in all beside the device ({kinds} "
        f"still to come), and {tiers}{device}, so {format_enough(missing)} are missing; raise Budget(host=…) to "
        f"{format_enough(memory.host_pool.capacity_bytes + missing)}, or give Budget(nvme=…, nvme_dir=…); "
        f"`hetmem plan` says what else would do"
    )


def stays_on_device(memory: Memory, name: str) -> BudgetError:
    """The error of an optimizer that updates in host memory alone, which has no room for all that it keeps."""
    missing = format_enough(memory.device_home_bytes)
    return BudgetError(
        f"{name} with these options updates in host memory, and {missing} of weights and states have no room there: "
        f"raise Budget(host=…) by {missing}, or give Budget(nvme=…, nvme_dir=…)"
    )


def check_staging(memory: Memory, chunk: Chunk, states: int) -> None:
    """Raise `BudgetError` if an update of `chunk`, with so many `states`, has no room in staging."""
    slots = memory.staging_slots
    needed = (2 + states) * chunk.spec.span
    if 0 < slots < needed:
        raise BudgetError(
            f"staging between NVMe and the device has {slots} slots, an update of {chunk.label(Role.PARAM)} with "
            f"{states} states needs {needed} at once: raise Budget(host=…) to "
            f"{format_size(slots_for_staging(needed) * memory.host_pool.slot_bytes)}, or set a smaller chunk_bytes"
        )


def compile_ahead(rule: Rule, memory: Memory, chunks: Collection[Chunk], *, norm: bool, lends: bool = False) -> None:
    """Compile what updates of `chunks`, whose homes are there, run on the host, and with `norm` what sums squares up.
    `lends`: gradients keep the dtype in which they arrive.

    Kernels kept on disk are read. An update that needs another kernel after all compiles it then.
    """
    if not memory.uses_copies and memory.device.torch_device.type != "cpu":
        return  # the device has kernels of its own
    for dtype in {chunk.dtype for chunk in chunks}:
        alike = [chunk for chunk in chunks if chunk.dtype is dtype]
        kinds = {(chunk.compute_dtype if lends else dtype, copy) for chunk in alike for copy in _copies(memory, chunk)}
        for gradient_dtype, copy_dtype in kinds:
            rule.prepare(dtype, gradient_dtype, copy_dtype)
            if copy_dtype is not None:  # copies at home are compared with weights that may be written to
                compare_tasks(*(torch.zeros(1, dtype=each, device="cpu") for each in (dtype, copy_dtype)))
        if norm:
            square_sum_tasks(torch.zeros(1, dtype=dtype, device="cpu"))


def _copies(memory: Memory, chunk: Chunk) -> Iterator[torch.dtype | None]:
    """Dtypes of the 16-bit copies that updates of `chunk` write on the host; None: they may write none."""
    if Role.COMPUTE not in chunk.homes:
        yield None
    if Role.COMPUTE in chunk.homes or (
        chunk.compute_dtype is not chunk.dtype and memory.device.torch_device.type == "cpu"
    ):
        yield chunk.compute_dtype
