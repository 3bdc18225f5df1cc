"""Unmanaged parameters, as an optimizer sees them: this process's part of each, flat, where the program keeps
it. A plain tensor is its own part; of a DTensor it is the local one. It knows neither states nor steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetmem import torch_private
from hetmem.cpu import total
from hetmem.cpu.norm import exact_sum
from hetmem.errors import ManageError
from hetmem.intercept import registry

_DENSE = "its elements must lie without gaps: set p.data = p.data.contiguous() before making the optimizer"


def is_distributed(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor. Who has none need not import them, which takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """Return this process's part of `tensor`, over the same memory."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return part


class Shard:
    """This process's part of one parameter, `number` in its optimizer: `numel` elements of `dtype` on `device`."""

    __slots__ = ("device", "dtype", "label", "number", "numel", "parameter", "shape", "stride")

    def __init__(self, parameter: torch.Tensor, number: int, label: str) -> None:
        """Describe the part as it is now. Raises `ManageError` for memory that cannot be updated in place."""
        part = local(parameter)
        self.parameter, self.number, self.label = parameter, number, label
        self.shape, self.stride, self.numel = part.shape, part.stride(), part.numel()
        self.dtype, self.device = part.dtype, part.device
        if torch_private.is_traceable_wrapper_subclass(part) or part.layout is not torch.strided:
            raise ManageError(f"{label} is a {type(part).__name__} in {part.layout}, not an ordinary dense tensor")
        if part.device.type == "meta":
            raise ManageError(f"{label} is on the meta device: make the optimizer when the weights are there")
        if not torch.ops.aten.is_non_overlapping_and_dense.default(part):
            raise ManageError(f"{label} of shape {tuple(self.shape)} has strides {self.stride}: {_DENSE}")

    def is_as_before(self) -> bool:
        """Return whether the part is still of the same shape, dtype and device."""
        part = local(self.parameter)
        now = part.shape, part.stride(), part.dtype, part.device
        return now == (self.shape, self.stride, self.dtype, self.device)

    def change(self) -> str:
        """Return in words what is not as before."""
        part = local(self.parameter)
        before = f"{tuple(self.shape)} in {self.dtype} on {self.device}"
        return f"was {before} when the optimizer was made, and is {tuple(part.shape)} in {part.dtype} on {part.device}"

    def memory(self) -> torch.Tensor:
        """Return the elements, 1-D, over the program's memory."""
        part = local(self.parameter).detach()
        return torch.as_strided(part, (self.numel,), (1,), part.storage_offset())

    def gradient(self, optimizer: str) -> torch.Tensor | None:
        """Return the gradient's elements in the order of `memory`, on the same device; None without a gradient.

        One of another placement is redistributed, as torch's operators would: all ranks of the mesh take part. Raises
        RuntimeError, in the name of `optimizer`, for a sparse one, and `ManageError` for one of another kind.
        """
        given: Any = self.parameter.grad
        if given is None:
            return None
        if is_distributed(given) != is_distributed(self.parameter):
            raise ManageError(f"{self.label} is {_kind(self.parameter)}, and its gradient {_kind(given)}")
        if is_distributed(given):
            mesh, placements = self.placed()
            if given.device_mesh != mesh:
                raise ManageError(f"{self.label} lies on {mesh}, and its gradient on {given.device_mesh}")
            if tuple(given.placements) != placements:
                given = given.redistribute(mesh, placements)
        part = local(given)
        if part.layout is not torch.strided:
            raise RuntimeError(f"{optimizer} does not support sparse gradients, and {self.label} has one")
        if (part.dtype, part.device) != (self.dtype, self.device):
            raise ManageError(
                f"{self.label} is in {self.dtype} on {self.device}, and its gradient in {part.dtype} on {part.device}"
            )
        if part.stride() != self.stride:
            ordered = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            part = ordered.as_strided(self.shape, self.stride).copy_(part)
        return torch.as_strided(part.detach(), (self.numel,), (1,), part.storage_offset())

    def gradient_is_complete(self) -> bool:
        """Return whether a gradient that a backward has added to the parameter is that of all ranks: of plain tensors
        others may add them up later."""
        if is_distributed(self.parameter):
            return True
        distributed = torch.distributed
        return not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)

    def placed(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the device mesh and the placements of a DTensor."""
        parameter: Any = self.parameter
        return parameter.device_mesh, tuple(parameter.placements)

    def shown(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat`, elements in the order of `memory`, as the program is to see it: of the parameter's shape, and
        a DTensor of its placement if it is one."""
        part = flat.as_strided(self.shape, self.stride) if self.numel else flat.new_empty(self.shape)
        return torch_private.placed_as(self.parameter, part) if is_distributed(self.parameter) else part

    def given(self, name: str, state: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a `state`, called `name`, that the program or a checkpoint gives. Raises
        `ManageError` if it is not placed as the parameter is."""
        self.check_kind(name, state)
        if is_distributed(state):
            placed: Any = state
            mesh, placements = self.placed()
            if (placed.device_mesh, tuple(placed.placements)) != (mesh, placements):
                placed = placed.redistribute(mesh, placements)
            state = placed
        if state.shape != self.parameter.shape:
            raise ManageError(f"{name} of {self.label} is {tuple(state.shape)}, expected {tuple(self.parameter.shape)}")
        return local(state).detach()

    def check_kind(self, name: str, state: torch.Tensor) -> None:
        """Raise `ManageError` if one of parameter and `state`, called `name`, is a DTensor and the other is not."""
        if is_distributed(state) != is_distributed(self.parameter):
            raise ManageError(
                f"{name} of {self.label} is {_kind(state)}, and the parameter {_kind(self.parameter)}: "
                f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict places states as parameters are"
            )


def _kind(tensor: torch.Tensor) -> str:
    return "a DTensor" if is_distributed(tensor) else "a plain tensor"


def shards_of(groups: Sequence[dict[str, Any]], optimizer: str) -> dict[int, Shard]:
    """Return the parts of all trained parameters in `groups`, by `id`. Raises `ManageError`, in the name of
    `optimizer`, for parameters that it cannot update."""
    found: dict[int, Shard] = {}
    number = -1
    for group in groups:
        names = group.get("param_names") or ()
        for at, parameter in enumerate(group["params"]):
            number += 1
            label = str(names[at]) if at < len(names) else f"parameter {number}"
            if parameter.requires_grad or parameter.grad is not None:
                _check(parameter, label, optimizer)
                found[id(parameter)] = Shard(parameter, number, label)
    return found


def _check(parameter: torch.Tensor, label: str, optimizer: str) -> None:
    managed = registry.of_parameter(parameter)
    if managed is not None:
        raise ManageError(
            f"{optimizer} got {managed[1].name}, which is managed, with budget=: the budget of its model has room for "
            f"its states. Leave out budget=, and give parameters that are not managed an optimizer of their own"
        )
    if torch_private.is_flat(parameter):
        raise ManageError(
            f"{optimizer} got {label}, a FlatParameter of FullyShardedDataParallel, which moves and resizes its memory "
            f"in every step: use torch.distributed.fsdp.fully_shard"
        )
    if not parameter.dtype.is_floating_point:
        raise ManageError(f"{optimizer} cannot update {label} of dtype {parameter.dtype}")


def square_total(sums: Iterable[tuple[Shard, torch.Tensor]], option: str) -> float:
    """Return the sum of the squares of all gradients, of which `sums` has those of this process's parts, as
    `hetmem.cpu.square_sum_tasks` leaves them. All ranks get the same number; what a mesh replicates counts once.

    Raises `ManageError`, in the name of `option`, if some parameters are plain tensors and others divided between
    ranks: whether the squares of the former are those of every rank, or are to be added, only the program knows.
    """
    own: dict[Any, list[torch.Tensor]] = {}
    for shard, squares in sums:
        own.setdefault(shard.placed() if is_distributed(shard.parameter) else None, []).append(squares)
    if None in own and any(key is not None and key[0].size() > 1 for key in own):
        raise ManageError(
            f"{option} needs the norm of all gradients, and some parameters are DTensors and others plain tensors: "
            f"apply fully_shard to the whole model, or clip with torch.nn.utils.clip_grad_norm_ and leave out {option}"
        )
    parts = {key: total(squares) for key, squares in own.items()}
    return exact_sum(n for key, part in parts.items() for n in ([part] if key is None else _of_all_ranks(part, *key)))


def _of_all_ranks(number: float, mesh: Any, placements: tuple[Any, ...]) -> list[float]:
    """Return the `number` of each rank of `mesh` among which tensors of `placements` are divided."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Divided

    kinds = [Replicate() if each.is_replicate() else Divided(0) for each in placements]
    own = torch.tensor([number], dtype=torch.float64, device=mesh.device_type)
    found: list[float] = DTensor.from_local(own, mesh, kinds, run_check=False).full_tensor().tolist()
    return found
