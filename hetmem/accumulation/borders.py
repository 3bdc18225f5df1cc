"""Finds the modules at which micro-batches take turns, and has them do it in their forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hetmem import torch_private
from hetmem.accumulation.baton import Baton
from hetmem.errors import ManageError

Position = tuple[int, int]
"""How often a micro-batch has come to a border before, and the border's index."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the children with parameters of each outermost `ModuleList` and `Sequential` in which at least two of one
    class have parameters: the layers of a stack, of an encoder and of a decoder."""
    found: dict[nn.Module, None] = {}
    todo = [model]
    while todo:
        module = todo.pop()
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        kinds = [type(child) for child in children]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(set(kinds)) < len(kinds):
            found.update(dict.fromkeys(children))
        else:
            todo += reversed(children)
    return [*found]


def with_buffers(parts: Iterable[nn.Module], borders: Iterable[nn.Module]) -> list[nn.Module]:
    """Return `borders`, and those of the model's `parts` outside of them that have buffers, as running statistics, in
    the order of `parts`: there micro-batches have to come in their order even if one leaves a stack of blocks early."""
    asked = set(borders)
    within = {part for border in asked for part in parts_of(border)}
    return [part for part in parts if part in asked or (part._buffers and part not in within and _buffers(part))]


def have_common(modules: Iterable[nn.Module]) -> bool:
    """Return whether any two of `modules` have a parameter in common."""
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters())
    return any(count > 1 for count in owners.values())


def refuse_borders(model: nn.Module, borders: Sequence[nn.Module]) -> None:
    """Raise `ManageError` for `borders` that are no modules of `model`."""
    parts = set(model.modules())
    for border in borders:
        if border not in parts:
            what = type(border).__name__
            raise ManageError(
                f"borders= takes modules of the model, as list(model.layers), and got a {what} that is none"
            )


class Borders:
    """The borders of one call, and where the forwards of its micro-batches are.

    Modules between two borders run in the order of the micro-batches, also if their forwards differ: one goes on behind
    a border once all before it have come to a later border, or have ended. So running statistics are as in a loop.
    """

    def __init__(self, modules: Sequence[nn.Module], count: int, baton: Baton) -> None:
        self._modules, self._baton = modules, baton
        self._visits: list[dict[int, int]] = [{} for _ in range(count)]
        self.passed: list[list[Position]] = [[] for _ in range(count)]
        """For each micro-batch, the borders that it has come to."""
        self.starts: list[list[int]] = [[] for _ in range(count)]
        """For each, autograd's number of the next node as it went on behind each of these borders."""
        self._unwritten = {index: now for index, module in enumerate(modules) if (now := _versions(module))}
        """By border, its buffers as the call began."""

    @property
    def share_parameters(self) -> bool:
        """Whether a forward has come to a border twice, or two borders have a parameter in common."""
        return any(visit for positions in self.passed for visit, _ in positions) or have_common(self._modules)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have forwards take turns at the borders in the body."""
        undo: list[Callable[[], object]] = []
        try:
            for index, module in enumerate(self._modules):
                compiled = vars(module).get("_compiled_call_impl")
                if compiled is None:
                    handle = module.register_forward_pre_hook(partial(self._come_to, index), prepend=True)
                    undo.append(handle.remove)
                else:  # its hooks are compiled with it
                    module._compiled_call_impl = partial(self._call, index, compiled)
                    undo.append(partial(setattr, module, "_compiled_call_impl", compiled))
            yield
        finally:
            for each in undo:
                each()

    def _call(self, index: int, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._come_to(index)
        return compiled(*args, **kwargs)

    def _come_to(self, index: int, *_: object) -> None:
        """Pass the baton on at the border `index`; a hook that torch calls with a module and its arguments."""
        number = self._baton.mine.number
        if number is None or torch_private.current_graph_task() != -1:
            return  # of another thread; or a backward recomputes
        visits = self._visits[number]
        visits[index] = visit = visits[index] + 1 if index in visits else 0
        if visit and index in self._unwritten and self._unwritten[index] != _versions(self._modules[index]):
            raise ManageError(
                f"a forward calls a {type(self._modules[index]).__name__} again that writes its buffers (running "
                f"statistics): between its calls come those of other micro-batches, so they would have another order "
                f"than in a loop. Use the loop: for batch in batches: forward(model, batch).backward()"
            )
        self.passed[number] += ((visit, index),)
        self._baton.pass_on(number)
        while not self._are_beyond(number):
            self._baton.pass_on(number)
        self.starts[number] += (torch_private.next_node_number(),)

    def _are_beyond(self, number: int) -> bool:
        """Return whether the micro-batches before `number` have all gone on behind the border that it has come to, or
        come to a later one."""
        ours = self.passed[number]
        count, here = len(ours), ours[-1]
        for other in self._baton.running:
            if other == number:
                break
            theirs = self.passed[other]
            if theirs[count:] and theirs[count - 1] == here:
                continue
            # A block that is called again at once comes to the border of a module behind it that has buffers yet.
            if not theirs or theirs[-1] <= here or (here[1] in self._unwritten and theirs[-1][1] <= here[1]):
                return False
        return True


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return what changes with each write to a buffer of `module`, and with each that is exchanged."""
    buffers = [buffer for part in parts_of(module) if part._buffers for buffer in _buffers(part)]
    return [(id(buffer), buffer._version) for buffer in buffers if not buffer.is_inference()]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return `module.modules()`, in its order, without a call for each."""
    found, todo = dict[nn.Module, None](), list[nn.Module | None]((module,))
    while todo:
        part = todo[-1]
        del todo[-1]
        if part is not None and part not in found:
            found[part] = None
            if part._modules:
                todo += [*part._modules.values()][::-1]
    return [*found]


def _buffers(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]
