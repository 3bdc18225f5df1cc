"""Finds the first element in which a managed model differs from plain torch: by step, module and parameter.

Both train on the same batches, in turn and from the same random numbers. Within a step the weights that each module
uses are compared before its call and its outputs behind it, then the loss, the gradients in the order of the backward,
and behind the optimizers' steps states, weights and buffers. So the first difference names the place where a wrong bit
arose, not one that it has reached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetmem.errors import ManageError
from hetmem.intercept import registry
from hetmem.optim import AdamW
from hetmem.planner.model import arguments
from hetmem.torch_private import tree_leaves, tree_map


@dataclass(frozen=True)
class Difference:
    """The first element in which a managed model differs from its reference.

    `step`: counted from 1; 0 is before the first. `what`: "weight", "weight in use", "output", "loss", "gradient",
    "buffer" or "state", with `name`, that of the parameter, buffer or module (of a state also the entry's; "" for the
    loss). `index`: the first element that differs, as an index of the tensor, whose values are `expected` in the
    reference and `found`; None where the tensors are of other shapes, dtypes, or one is missing, which these two then
    say. `count` of `numel` elements differ.
    """

    step: int
    what: str
    name: str
    index: tuple[int, ...] | None
    expected: float | str
    found: float | str
    count: int
    numel: int

    def __str__(self) -> str:
        """Return it as one sentence."""
        where = f"step {self.step}: {self.what}{f' {self.name}' if self.name else ''}"
        if self.index is None:
            return f"{where}: expected {self.expected}, found {self.found}"
        first = "" if self.numel == 1 else f"{list(self.index)}, the first of {self.count} of {self.numel} elements,"
        return f"{where}{first} is {self.found!r}, expected {self.expected!r}"


def compare(step: int, what: str, name: str, expected: Any, found: Any) -> Difference | None:
    """Return the first difference in bits of two tensors, or None; None for a tensor is a value of its own."""
    if expected is None or found is None:
        if expected is found:
            return None
        return Difference(step, what, name, None, _kind(expected), _kind(found), 0, 0)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return Difference(step, what, name, None, _kind(expected), _kind(found), 0, 0)
    left, right = (each.detach().cpu().contiguous().reshape(-1) for each in (expected, found))
    bits = [each.view(torch.uint8).view(each.numel(), each.itemsize) for each in (left, right)]
    if torch.equal(*bits):
        return None
    wrong = (bits[0] != bits[1]).any(1).nonzero().flatten()
    first = int(wrong[0])
    index = tuple(int(at) for at in torch.unravel_index(wrong[0], expected.shape))
    return Difference(step, what, name, index, left[first].item(), right[first].item(), len(wrong), left.numel())


def _kind(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def first_difference(
    model: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
) -> Difference | None:
    """Train `model`, which is managed, and `reference`, the same in plain torch, a step on each of `batches`; return
    the first `Difference`, or None if all bits are equal.

    `batches`: what the models are called with, each a tuple, a dict of keywords, or one tensor, where a user puts them.
    `loss`: a function of the output; by default `.loss` of it, or the output itself. `optimizers`: of `model` and of
    `reference`; by default `hetmem.AdamW` and `torch.optim.AdamW(fused=True)` with a learning rate of 1e-3. Gradients
    are not compared with an optimizer whose updates overlap the backward, which uses them up. The weights of
    `reference` lie where the homes of the model are updated (in host memory, unless the model is whole on the device).
    With `mixed_precision` it stays in float32: a copy of it computes. Keeps all outputs of a forward.

    Both models have changed afterwards. Raises `ManageError` if `model` is not managed, `reference` is, or their
    parameters have other names.
    """
    pair = _Pair(model, reference)
    first, second = optimizers or (
        AdamW(model.parameters(), lr=1e-3),
        torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True),
    )
    uses_up = getattr(first, "overlap", "off") != "off"
    if (found := pair.weights(0)) is not None:
        return found
    for step, batch in enumerate(batches, 1):
        found = pair.forward_and_backward(step, batch, loss or _loss)
        found = found or (None if uses_up else pair.gradients(step))
        if found is None:
            first.step()
            second.step()
            found = pair.states(step, first, second) or pair.weights(step)
        if found is not None:
            return found
        first.zero_grad()
        second.zero_grad()
    return None


def _loss(output: Any) -> torch.Tensor:
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ManageError(
            "the model returns no scalar, and nothing with a scalar `.loss`: pass loss=, a function of it"
        )
    return found


class _Pair:
    """A managed model and its reference, which computes as a twin if it has other dtypes or another device."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        runtime = registry.of_module(model).runtime
        if registry.managed_among(reference.parameters()):
            raise ManageError(
                "the reference is managed: pass a plain model, such as a copy.deepcopy from before manage"
            )
        self.model, self.reference = model, reference
        names = [[name for name, _ in each.named_parameters()] for each in (model, reference)]
        if names[0] != names[1]:
            odd = next(iter({*names[0]} ^ {*names[1]}), "their order")
            raise ManageError(f"the model and the reference have other parameters: {odd}")
        self.dtype = runtime.memory.mixed_precision
        self.device = runtime.memory.device.torch_device
        computes = {managed.name: managed.chunk.compute_dtype for managed in runtime.parameters}
        self.twin = reference
        kinds = {name: computes.get(name, each.dtype) for name, each in reference.named_parameters()}
        if any(each.dtype != kinds[name] or each.device != self.device for name, each in reference.named_parameters()):
            self.twin = copy.deepcopy(reference).to(self.device)
            for name, each in self.twin.named_parameters():
                each.data = each.data.to(kinds[name])

    def forward_and_backward(self, step: int, batch: Any, loss: Callable[[Any], torch.Tensor]) -> Difference | None:
        """Compute one batch by both; return the first difference up to the loss."""
        self._renew_twin()
        state, calls = _random_numbers(self.device), list[_Call]()
        with _watched(self.twin, calls.append):
            expected = loss(_called(self.twin, batch, self.dtype))
        expected.backward()
        self._take_gradients()
        _set_random_numbers(self.device, state)
        seen, differences = iter(calls), list[Difference]()

        def compare_call(call: _Call) -> None:
            if not differences and (known := next(seen, None)) is not None:
                differences.extend(call.differences(step, known))

        with _watched(self.model, compare_call):
            found = loss(_called(self.model, batch, None))
        found.backward()
        return differences[0] if differences else compare(step, "loss", "", expected, found)

    def _renew_twin(self) -> None:
        if self.twin is not self.reference:
            with torch.no_grad():
                for master, copied in zip(self.reference.parameters(), self.twin.parameters(), strict=True):
                    copied.copy_(master)

    def _take_gradients(self) -> None:
        """Give the reference the gradients and buffers of its twin."""
        if self.twin is self.reference:
            return
        for master, copied in zip(self.reference.parameters(), self.twin.parameters(), strict=True):
            if copied.grad is not None:
                arrived, copied.grad = copied.grad.to(master.device, master.dtype), None
                master.grad = arrived if master.grad is None else master.grad + arrived
        for kept, buffer in zip(self.reference.buffers(), self.twin.buffers(), strict=True):
            kept.copy_(buffer)

    def gradients(self, step: int) -> Difference | None:
        """Return the first difference of gradients, from the last parameter to the first."""
        pairs = [*zip(self.reference.named_parameters(), self.model.parameters(), strict=True)]
        found = (compare(step, "gradient", name, one.grad, other.grad) for (name, one), other in reversed(pairs))
        return next(filter(None, found), None)

    def weights(self, step: int) -> Difference | None:
        """Return the first difference of weights and buffers."""
        parameters = zip(self.reference.named_parameters(), self.model.parameters(), strict=True)
        buffers = zip(self.reference.named_buffers(), self.model.buffers(), strict=True)
        found = (
            compare(step, what, name, one, other)
            for what, pairs in (("weight", parameters), ("buffer", buffers))
            for (name, one), other in pairs
        )
        return next(filter(None, found), None)

    def states(self, step: int, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> Difference | None:
        """Return the first difference of optimizer states."""
        for (name, one), other in zip(self.reference.named_parameters(), self.model.parameters(), strict=True):
            expected, found = second.state.get(one, {}), first.state.get(other, {})
            for entry, value in expected.items():
                if isinstance(value, torch.Tensor):
                    unlike = compare(step, "state", f"{entry} of {name}", value, found.get(entry))
                    if unlike is not None:
                        return unlike
        return None


@dataclass
class _Call:
    """A call of the module `name`: copies of the weights that it uses, and of its outputs once it has ended."""

    name: str
    weights: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]

    def differences(self, step: int, known: _Call) -> Iterator[Difference]:
        """Yield what differs from `known`, the same call of the reference."""
        if self.name != known.name:
            yield Difference(step, "call", self.name, None, known.name, self.name, 0, 0)
            return
        used = (
            compare(step, "weight in use", name, known.weights[name], found) for name, found in self.weights.items()
        )
        given = (compare(step, "output", self.name, *each) for each in zip(known.outputs, self.outputs, strict=False))
        yield from filter(None, (*used, *given))


@contextmanager
def _watched(module: nn.Module, ended: Callable[[_Call], object]) -> Iterator[None]:
    """Call `ended` with each call of a module that has weights of its own or no modules within, as it ends."""
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            own = [each for each, _ in part.named_parameters(name, recurse=False)]
            if own or not [*part.children()]:
                running: list[_Call] = []

                def begin(part: nn.Module, inputs: Any, name: str = name, running: list[_Call] = running) -> None:
                    weights = {each: one.detach().clone() for each, one in part.named_parameters(name, recurse=False)}
                    running.append(_Call(name, weights, []))

                def end(part: nn.Module, inputs: Any, output: Any, running: list[_Call] = running) -> None:
                    call = running.pop()
                    call.outputs += [each.detach().clone() for each in tree_leaves(output) if torch.is_tensor(each)]
                    ended(call)

                hooks.callback(part.register_forward_pre_hook(begin).remove)
                hooks.callback(part.register_forward_hook(end).remove)
        yield


def _called(module: nn.Module, batch: Any, cast: torch.dtype | None) -> Any:
    """Call `module` with `batch`, float32 inputs in `cast` if it is given."""

    def converted(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(cast) if floats and cast is not None else value

    args, kwargs = tree_map(converted, arguments(batch))
    return module(*args, **kwargs)


def _random_numbers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_numbers(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
