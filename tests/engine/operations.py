"""What users do with a model and an optimizer: every operation that a random program is made of."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn

import hetmem
from tests.engine import habits
from tests.engine.programs import WIDTH, Net, Program, nothing


class Side:
    """A model, its optimizer, and what its user keeps. Every operation takes what draws its details."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.module: Net = program.build()
        self.losses: list[torch.Tensor] = []
        self.parted = False
        """Whether the managed model may have left the device between two of the forwards of `losses`, or a backward of
        another loss was between them and weights are tied; see docs/limits.md."""
        self.arrived = False
        self.saved: Any = None
        self.hooks: list[Any] = []
        self.held: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.shown: list[torch.Tensor] = []
        self.averages: list[torch.Tensor] = []
        self.filed: Any = None
        self.scale_rule = (
            hetmem.optim.LossScale(2.0**14, growth_interval=2) if program.options.get("loss_scale") else None
        )
        if program.options.get("loss_scale") == 2.0**8:
            self.scale_rule = hetmem.optim.LossScale(2.0**8, growth_factor=1.0, backoff_factor=1.0)

    net: Net
    optimizer: Any  # of torch or of hetmem
    has_turns = False
    """Whether threads may use the model at the same time."""

    def make_optimizer(self) -> None: ...

    def update(self, within: AbstractContextManager[None]) -> Any: ...

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scale_rule is None else loss * self.scale_rule.value

    def struck(self, _: Random) -> AbstractContextManager[None]:
        """Ctrl-C comes within, perhaps."""
        return nullcontext()

    average, autocast, module_hook, dropped = habits.average, habits.autocast, habits.module_hook, habits.dropped
    unseen_within, looked, served, uncleared = habits.unseen_within, habits.looked, habits.served, habits.uncleared

    def to_file(self, draw: Random) -> Any: ...

    def from_file(self, draw: Random) -> Any: ...

    def refresh(self) -> None:
        """Weights, or what requires gradients, may have changed."""

    def manage_again(self, draw: Random) -> None: ...

    def groups(self) -> list[dict[str, Any]]:
        parameters = list(self.module.parameters())
        if self.program.groups == 1:
            return [{"params": parameters}]
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02, "weight_decay": 0.01}]
        return groups if self.program.groups == 2 else groups[:1]

    def tokens(self, draw: Random) -> torch.Tensor:
        rows = draw.randint(1, 3) if draw.random() < 0.7 else self.program.rows
        return torch.randint(0, Net.VOCABULARY, (rows, draw.choice((4, 4, 4, 6))))

    def some(self, draw: Random) -> list[nn.Parameter]:
        parameters = list(self.module.parameters())
        return draw.sample(parameters, draw.randint(1, len(parameters)))

    def backward_of(self, loss: torch.Tensor, **options: Any) -> Any:
        self.arrived = True
        self.scaled(loss).backward(**options)
        return loss.detach()

    def forward(self, draw: Random) -> Any:
        self.losses.append(self.net(self.tokens(draw)))
        return self.losses[-1].detach()

    def backward(self, draw: Random) -> Any:
        if not self.losses:
            return None
        self.parted &= len(self.losses) > 1
        if draw.random() < 0.5 and not self.program.mixed and not self.parted:  # there gradients arrive by forwards
            losses, self.losses = self.losses, []
            return self.backward_of(torch.stack(losses).sum())
        loss = self.losses.pop(draw.randrange(len(self.losses)))
        self.parted |= self.program.tied and bool(self.losses)
        return self.backward_of(loss)

    def struck_step(self, draw: Random) -> Any:
        """One that Ctrl-C ends somewhere, and that is called again if it has not done everything."""
        return self.step(draw, self.struck(draw))

    def step(self, _: Random, within: AbstractContextManager[None] | None = None) -> Any:
        norm = self.stepped(within)
        if self.program.uses_up:
            self.optimizer.zero_grad()
        return norm

    def stepped(self, within: AbstractContextManager[None] | None = None) -> Any:
        """Gradients are left as they are."""
        self.losses.clear()
        norm = self.update(within or nullcontext())
        self.arrived = False
        self.refresh()
        return norm

    def zero_grad(self, draw: Random) -> Any:
        draw.choice((self.module, self.optimizer)).zero_grad(set_to_none=draw.random() < 0.6)

    def skip(self, draw: Random) -> Any:
        self.losses.clear()
        self.module.zero_grad()
        self.arrived = False

    def evaluate(self, draw: Random) -> Any:
        training = draw.random() < 0.3
        self.net.train(training)
        try:
            with torch.no_grad() if training else draw.choice((torch.no_grad, torch.inference_mode))():
                return self.net(self.tokens(draw)).clone()
        finally:
            self.net.train()

    def part(self, draw: Random) -> Any:
        """A part of the model, called by itself."""
        x = torch.randn(2, 4, WIDTH).to(self.program.mixed or self.program.dtype)
        output = self.net.parts[draw.randrange(len(self.net.parts))](x)
        if draw.random() < 0.5 and output.requires_grad:
            self.backward_of(output.float().square().mean())
        return output.detach()

    def retained(self, draw: Random) -> Any:
        loss = self.net(self.tokens(draw))
        self.backward_of(loss, retain_graph=True)
        return self.backward_of(loss)

    def outside(self, draw: Random) -> Any:
        """A regularizer on some weights, outside every forward."""
        terms = [p.float().square().sum() for p in self.some(draw) if p.requires_grad]
        return self.backward_of(torch.stack(terms).sum() * 1e-3) if terms else None

    def raises(self, draw: Random) -> Any:
        """A backward that raises half way."""
        self.net.fails_after = draw.randrange(len(self.net.parts))
        try:
            loss = self.net(self.tokens(draw))
        finally:
            self.net.fails_after = -1
        return self.backward_of(loss)

    def forward_raises(self, draw: Random) -> Any:
        tokens = self.tokens(draw)
        handle = self.net.parts[draw.randrange(len(self.net.parts))].register_forward_hook(_refuse)
        try:
            return self.net(tokens).detach()
        finally:
            handle.remove()

    def gradient(self, draw: Random) -> Any:
        """Gradients that are asked for, also those of gradients; `p.grad` is left as it is or gets the latter's."""
        if self.program.mixed:
            return None
        wanted = [p for p in self.some(draw) if p.requires_grad]
        second = draw.random() < 0.3
        loss = self.net(self.tokens(draw))
        found = torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=second) if wanted else ()
        if second and (norms := [g.float().square().sum() for g in found if g is not None and g.requires_grad]):
            self.backward_of(torch.stack(norms).sum())
        return [None if g is None else g.detach() for g in found]

    def squeeze(self, draw: Random) -> Any:
        """Memory of the device is needed for something else."""

    def squeezed(self, draw: Random) -> Any:
        """That happens in the middle of a forward, and again in that of its backward."""
        self.parted |= bool(self.losses)
        self.net.interrupted_after = draw.randrange(len(self.net.parts))
        self.net.interrupt = partial(self.squeeze, draw)
        try:
            return self.forward(draw)
        finally:
            self.net.interrupted_after, self.net.interrupt = -1, nothing

    def clip(self, _: Random) -> Any:
        return nn.utils.clip_grad_norm_(self.module.parameters(), 0.02)

    def edit_gradients(self, draw: Random) -> Any:
        way = draw.randrange(6)
        for parameter in self.some(draw) if not self.program.uses_up else ():  # which are used up
            if parameter.grad is None:
                continue
            if way == 0:
                parameter.grad = None
            elif way == 1:
                parameter.grad = parameter.grad * 0.5
            elif way == 2:
                parameter.grad.mul_(3.0)
            elif way == 3:
                parameter.grad.data.mul_(0.5)
            elif way == 4:  # as a GradScaler does
                torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], torch.zeros(1), torch.tensor(0.25))
            else:
                parameter.grad = torch.ones_like(parameter)

    def write(self, draw: Random) -> Any:
        """Weights are changed: counted by versions, or, where nothing has begun, in other ways too."""
        way = draw.randrange(3 if self.program.early and self.arrived else 7)
        if self.program.mixed or way > 2:
            self.losses.clear()
        if way == 0:
            state = {name: value * 0.75 if value.is_floating_point() else value for name, value in self.state().items()}
            self.module.load_state_dict(state)
        if way == 6:  # each becomes a part of one tensor
            same = [p for p in self.module.parameters() if p.dtype is torch.float32]
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(same).detach() * 0.75, same)
        for parameter in self.some(draw):
            with torch.no_grad():
                if way == 1:
                    parameter.mul_(0.75)
                elif way == 2:
                    parameter.copy_(torch.randn(parameter.shape).mul_(0.1))
                elif way == 3:
                    parameter.data = parameter.detach() * 0.5
                elif way == 4:
                    parameter.data.mul_(0.75)
                elif way == 5 and parameter.dtype is not torch.bfloat16:
                    parameter.detach().numpy()[...] *= 0.75
        self.refresh()

    def unseen(self, draw: Random) -> Any:
        """Weights are changed so that no version counts it, at any moment; also through what is kept until the next."""
        casts = bool(self.program.mixed) or self.program.dtype is not torch.float32
        if self.losses and casts and any(kind == "casts itself" for kind, _ in self.program.parts):
            return  # autograd has saved the cast of what was, and hetmem casts what is written
        for kept in self.kept:
            kept.mul_(0.875)
        self.kept.clear()
        for parameter in self.some(draw):
            way = draw.randrange(7)
            if way == 0:
                parameter.data.clamp_(-0.1, 0.1)
            elif way == 1 and parameter.dtype is not torch.bfloat16:
                parameter.detach().numpy()[...] *= 0.75
            elif way == 2 and parameter.numel():
                parameter.data.view_as(parameter).select(0, draw.randrange(len(parameter))).fill_(0.1) if (
                    parameter.dim()
                ) else parameter.data.fill_(0.1)
            elif way == 3:
                torch._foreach_mul_([parameter.data], 0.75)
            elif way == 4:
                parameter.data.copy_(parameter.data.sign() * 0.125)
            elif way == 5 and parameter.numel() and parameter.dtype is not torch.bfloat16:
                parameter.detach().numpy().flat[draw.randrange(parameter.numel())] = 0.25
            else:
                self.kept.append(parameter.data)
        self.refresh_unseen()

    def refresh_unseen(self) -> None:
        """The same as `refresh`, so that no version counts it."""

    def forgotten(self, draw: Random) -> Any:
        """A step is skipped, as after a loss that is not finite."""
        if self.program.early:
            return
        self.skip(draw)
        loss = self.net(self.tokens(draw))
        self.backward_of(loss)
        self.skip(draw)
        self.forget_step()

    def forget_step(self) -> None: ...

    def write_states(self, draw: Random) -> Any:
        state = self.optimizer.state
        for parameter in self.some(draw):
            found = state.get(parameter, {})
            for value in found.values() if found.get("step", 1) else ():  # Adagrad of torch has some of no step
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(0.5)

    def keep(self, draw: Random) -> Any:
        """The user keeps views of weights, gradients and states where they are at home, and forgets them again."""
        self.held.clear()
        state = self.optimizer.state if draw.random() < 0.3 else {}
        for parameter in self.some(draw) if draw.random() < 0.7 else ():
            values = [parameter, parameter.grad, *state.get(parameter, {}).values()]
            self.held += [value.detach() for value in values if isinstance(value, torch.Tensor)]

    def hyper(self, draw: Random) -> Any:
        draw.choice(self.optimizer.param_groups)["lr"] *= draw.choice((0.5, 2.0))

    def freeze(self, draw: Random) -> Any:
        parameter = draw.choice(list(self.module.parameters()))
        parameter.requires_grad_(not parameter.requires_grad)
        self.refresh()

    def hook(self, draw: Random) -> Any:
        parameter = draw.choice(list(self.module.parameters()))
        if parameter.requires_grad and not self.program.mixed:
            after = draw.random() < 0.5
            register: Any = parameter.register_post_accumulate_grad_hook if after else parameter.register_hook
            self.hooks.append(register(_halve_grad if after else _double))

    def unhook(self, _: Random) -> Any:
        while self.hooks:
            self.hooks.pop().remove()

    def add_group(self, _: Random) -> Any:
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        left = [p for p in self.module.parameters() if id(p) not in known]
        if left:
            self.optimizer.add_param_group({"params": left})

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def read_weights(self, draw: Random) -> Any:
        if draw.random() < 0.5:
            return list(self.state().values())
        return [p.detach().clone() for p in self.module.parameters()]

    def read_gradients(self, _: Random) -> Any:
        if not self.program.uses_up:
            return [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        return None

    def save(self, _: Random) -> Any:
        self.saved = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load(self, draw: Random) -> Any:
        if self.saved is not None:
            self.losses.clear()
            which = draw.randrange(3)
            if which != 1:
                self.module.load_state_dict(self.saved[0])
                self.refresh()
            if which != 0:
                self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def again(self, draw: Random) -> Any:
        """The model is released and managed anew."""
        self.kept.clear()  # memory of a home is where it was only until then
        self.losses.clear()
        self.shown.clear()
        kept = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))
        self.manage_again(draw)
        for _ in kept[1]["param_groups"][len(self.optimizer.param_groups) :]:
            self.add_group(draw)
        self.optimizer.load_state_dict(kept[1])

    def copied(self, draw: Random) -> Any:
        """A copy is an ordinary model."""
        if self.hooks:
            return None
        twin: Net = copy.deepcopy(self.module) if draw.random() < 0.5 else pickle.loads(pickle.dumps(self.module))
        loss = twin(self.tokens(draw))
        loss.backward()
        return [loss.detach(), *(p.grad for p in twin.parameters())]

    def hold(self, draw: Random) -> Any:
        """The user keeps views of weights that an operator has seen; see `looked`."""
        self.shown.clear()
        part = self.net.parts[draw.randrange(len(self.net.parts))]
        handle = part.register_forward_hook(lambda part, *_: self.shown.extend(p.detach() for p in part.parameters()))
        try:
            self.net(self.tokens(draw))
        finally:
            handle.remove()

    def kept_by_hooks(self, draw: Random) -> Any:
        """Hooks of the user keep what autograd saves."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return self.backward_of(self.net(self.tokens(draw)))

    def interrupted(self, draw: Random) -> Any:
        """A forward ends by Ctrl-C, which runs none of torch's hooks."""
        module = draw.choice((self.net, self.net.embedding, *self.net.parts))
        before = draw.random() < 0.5
        register = module.register_forward_pre_hook if before else partial(module.register_forward_hook, prepend=True)
        with register(_interrupt), suppress(KeyboardInterrupt):  # type: ignore[operator]
            self.net(self.tokens(draw))  # a disk may fail before that

    def threaded(self, draw: Random) -> Any:
        """An evaluation, or a forward and its backward, on a thread of its own."""
        act = self.evaluate if draw.random() < 0.5 else self.retained
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(act, draw).result()

    def shared(self, _: Random) -> Any:
        """Storages of weights get memory that other processes may see. See docs/limits.md for what is kept."""
        self.kept.clear()
        self.shown.clear()
        if not (self.program.early and self.arrived):
            for parameter in self.module.parameters():
                parameter.data.share_memory_()

    def collect(self, _: Random) -> Any:
        gc.collect()


def _refuse(*_: Any) -> None:
    raise ArithmeticError("in forward")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _double(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def _halve_grad(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
