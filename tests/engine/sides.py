"""The two sides of a random program: plain torch, which says what is right, and the same managed."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError
from tests.engine import harness
from tests.engine.habits import ctrl_c_at_line
from tests.engine.lazy_device import AllocatingDevice, LazyDevice
from tests.engine.operations import Side
from tests.engine.programs import OPTIMIZERS, Program


class Plain(Side):
    """torch alone. In mixed precision a twin of 16-bit parameters computes, and its gradients are added up here."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.net = self.module
        if program.mixed:
            self.net = copy.deepcopy(self.module)
            for mine, its in zip(self.module.modules(), self.net.modules(), strict=True):
                its._buffers = mine._buffers
            harness.narrow(self.net, program.mixed)
            for master, copied in self._pairs():
                was, _ = copied.requires_grad, copied.requires_grad_(True)
                copied.register_post_accumulate_grad_hook(lambda copied, master=master: _hand_over(copied, master))
                copied.requires_grad_(was)
        self.make_optimizer()

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.module.parameters(), self.net.parameters(), strict=True))

    def refresh(self) -> None:
        for master, copied in self._pairs() if self.program.mixed else ():
            copied.requires_grad_(master.requires_grad)
            if not harness.same_bits(master.to(copied.dtype), copied):
                with torch.no_grad():
                    copied.copy_(master)

    def refresh_unseen(self) -> None:
        for master, copied in self._pairs() if self.program.mixed else ():
            copied.data.copy_(master.data)

    def make_optimizer(self) -> None:
        kind, options = OPTIMIZERS[self.program.optimizer]
        one_by_one: dict[str, Any] = {"foreach": False} if self.program.optimizer.startswith("offload") else {}
        self.optimizer = kind(self.groups(), **options, **one_by_one)

    def manage_again(self, draw: Random) -> None:
        self.make_optimizer()

    def to_file(self, _: Random) -> Any:
        scale = None if self.scale_rule is None else self.scale_rule.state_dict()
        self.filed = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict(), scale))

    def from_file(self, draw: Random) -> Any:
        if self.filed is not None and len(self.filed[1]["param_groups"]) == len(self.optimizer.param_groups):
            self.skip(draw)
            self.module.load_state_dict(self.filed[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.filed[1]))
            if self.scale_rule is not None:
                self.scale_rule.load_state_dict(self.filed[2])
            self.refresh()

    def update(self, within: AbstractContextManager[None]) -> Any:
        limit = self.program.options.get("max_grad_norm")
        if limit is None and self.scale_rule is None:
            return self.optimizer.step()
        groups = self.optimizer.param_groups
        kept = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
        unscale = 1.0 if self.scale_rule is None else 1.0 / self.scale_rule.value
        norm = testing.norm([_in_memory_order(p, grad) for p, grad in kept]) * unscale
        finite = norm - norm == 0
        if self.scale_rule is not None:
            self.scale_rule.update(finite=finite)
        if finite or self.scale_rule is None:
            factor = unscale * (1.0 if limit is None else min(limit / (norm + 1e-6), 1.0))
            if self.program.optimizer == "AdamW":  # takes it as a float32, whatever gradients are
                factor = torch.tensor(factor, dtype=torch.float32).item()
            for parameter, grad in kept:
                parameter.grad = grad * factor
            self.optimizer.step()
            for parameter, grad in kept:
                parameter.grad = grad
        return torch.tensor(norm, dtype=torch.float64)


def _hand_over(copied: torch.Tensor, master: torch.Tensor) -> None:
    if copied.grad is None:  # frozen since the forward
        return
    arrived, copied.grad = copied.grad.detach().to(master.dtype), None
    master.grad = arrived if master.grad is None else master.grad + arrived


def _in_memory_order(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    ordered = torch.empty_like(parameter, memory_format=torch.preserve_format).detach().copy_(grad)
    return ordered.as_strided((ordered.numel(),), (1,))


class Managed(Side):
    """The same, managed."""

    def __init__(self, program: Program, directory: Path) -> None:
        super().__init__(program)
        self.net, self._directory = self.module, directory
        self.views = [p.detach() for p in self.module.parameters()] if program.seed % 3 == 0 else []
        """From before it is managed, which the user keeps; they show what the weights were."""
        (directory / "other").mkdir(exist_ok=True)
        self._manage(program.placement, program.room, program.staging)

    has_turns = True

    def _device(self) -> Any:
        match self.program.device:
            case "late":
                return LazyDevice()
            case "unwatched":
                return AllocatingDevice(0)
            case "linked":
                return hetmem.SimDevice(host_to_device="100MB", device_to_host="100MB")
        return harness.DEVICE()

    def _manage(self, placement: str, room: float, staging: float) -> None:
        """Within a little more than the least budget that is accepted."""
        widest = max(p.itemsize for p in self.module.parameters())
        device, host = self._device_bytes(), 4096.0
        options: dict[str, Any] = {
            "mixed_precision": self.program.mixed,
            "chunk_bytes": self.program.chunk_elements * widest,
        }
        moves = harness.ACTIVATIONS if harness.ACTIVATIONS != "keep" else self.program.activations
        options["activations"] = moves
        options["sanitize"] = self.program.sanitize and self.program.device != "unwatched"
        while True:
            sizes: dict[str, Any] = {}
            if placement != "resident":
                whole = self.program.device_budget == "whole"
                sizes |= {"device_chunks": None if whole else int(device * room)}
                sizes |= {"device": int(device * room)} if whole else {}
            if placement in ("nvme", "split"):
                sizes["host"] = int(host * staging * (4 if placement == "split" else 1))
            sizes["home_copies"] = self.program.home_copies
            if "host" in sizes and self.program.directories == 2:
                sizes["nvme_dir"] = [self._directory, self._directory / "other"]
            limits = harness.budget("nvme" if "host" in sizes else placement, self._directory, **sizes)
            managed = False
            try:
                hetmem.manage(self.module, limits, device=self._device(), **options)
                managed = True
                return self.make_optimizer()
            except BudgetError as error:
                if managed:
                    hetmem.release(self.module)
                if "device budget" in str(error):
                    device *= 1.2
                else:
                    host *= 1.2

    def _device_bytes(self) -> float:
        """Where to begin to look for the least budget; see `Program.device_budget`. All of it would be a resident."""
        weights = sum(p.numel() * p.itemsize for p in self.module.parameters())
        copies = 1.3 * weights / (2 if self.program.mixed else 1) + 8 * self.program.chunk_elements
        moved = {"least": 0.0, "some": 0.4, "nearly all": 0.85, "whole": 1.5}[self.program.device_budget]
        return copies + moved * 4 * weights if moved else 4096.0

    def to_file(self, draw: Random) -> Any:
        hetmem.save(self._directory / "saved", self.module, self.optimizer)
        self.filed = len(self.optimizer.param_groups)

    def from_file(self, draw: Random) -> Any:
        if self.filed == len(self.optimizer.param_groups):
            self.skip(draw)
            hetmem.load(self._directory / "saved", self.module, self.optimizer)
            self.refresh()

    def squeeze(self, draw: Random) -> Any:
        inside = testing.of(self.module)
        inside.look_for_idle_memory()  # to be tried again as long as the program runs
        inside.make_room(draw.choice((1 << 12, 1 << 14, 1 << 30)))

    def forget_step(self) -> None:
        if not self.program.optimizer.startswith("torch"):
            self.optimizer.forget_step()

    def make_optimizer(self) -> None:
        kind, options = OPTIMIZERS[self.program.optimizer]
        own = dict(self.program.options)
        if self.scale_rule is not None:
            own["loss_scale"] = self.scale_rule
        if self.program.optimizer == "AdamW":
            self.optimizer = hetmem.AdamW(self.groups(), lr=options["lr"], **own)
        elif self.program.optimizer.startswith("offload"):
            self.optimizer = hetmem.optim.offload(kind, self.groups(), **options, **own)
        else:
            self.optimizer = kind(self.groups(), **options)

    def manage_again(self, draw: Random) -> None:
        hetmem.release(self.module)
        self._manage(draw.choice(("resident", "host", "nvme", "split")), self.program.room, self.program.staging)

    def struck(self, draw: Random) -> AbstractContextManager[None]:
        return ctrl_c_at_line(int(10 ** (4.3 * draw.random())))

    def update(self, within: AbstractContextManager[None]) -> Any:
        ended: list[bool] = []
        own = not self.program.optimizer.startswith("torch")
        with testing.around("step done", lambda done, runtime: ended.append(True) or done(runtime)):
            try:
                with within if own else nullcontext():
                    self.optimizer.step()
            except KeyboardInterrupt:
                if not ended:
                    self.optimizer.step()
        norm = getattr(self.optimizer, "grad_norm", None)
        return None if norm is None else torch.tensor(norm, dtype=torch.float64)
