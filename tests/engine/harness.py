"""Shared by the tests of the runtime: small models, placements, and one training loop run plainly and managed.

Everything is compared bit for bit. NaNs with equal bits are equal, and -0.0 is not 0.0.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetmem
from hetmem import testing

PLACEMENTS = ("resident", "host", "nvme")
STREAMED = ("host", "nvme")


def shared(name: str | tuple[str, ...], values: Iterable[Any], **options: Any) -> Callable[[Any], Any]:
    """Parametrize a test as many others are: the tests have the values in turn."""
    return lambda test: pytest.mark.in_turn(pytest.mark.parametrize(name, list(values), **options)(test))


everywhere = shared("placement", PLACEMENTS)
offloaded = shared("placement", [pytest.param("resident", marks=pytest.mark.nightly), *STREAMED])
"""Of what hetmem does no otherwise for a model that is whole on the device, where all of it is simpler."""
streamed = shared("placement", STREAMED)
precisions = shared("mixed", [None, torch.bfloat16], ids=["fp32", "bf16"])

WIDTH = 64
"""Of `mlp` and the models made for one test: a square layer of this width is one chunk of `CHUNK` bytes."""

CHUNK_ELEMENTS = 4096
CHUNK = 4 * CHUNK_ELEMENTS
"""Bytes of a chunk in tests that do not say: the smallest there is for float32, so that small models have several."""


DEVICE: Callable[[], Any] = hetmem.SimDevice
"""Of every model here; `pytest --late-copies` takes the one whose copies are late."""

SANITIZE = True
"""Of every model here; `pytest --unwatched` measures the first steps alone, as users' runs do."""

ACTIVATIONS = "keep"
"""Of every model here; `pytest --offload` moves all activations, however small."""


def budget(placement: str, directory: Path, **changes: Any) -> hetmem.Budget:
    """A budget that puts a small model (under 200 KiB of parameters) wholly on the tier that `placement` names."""
    sizes: dict[str, dict[str, Any]] = {
        "resident": {"device": "64MiB", "host": "64MiB"},
        "host": {"device": "64MiB", "host": "64MiB", "device_chunks": "256KiB"},
        "nvme": {
            "device": "64MiB",
            "host": "128KiB",
            "device_chunks": "256KiB",
            "nvme": "64MiB",
            "nvme_dir": directory,
        },
    }
    return hetmem.Budget(**{**sizes[placement], **changes})


def manage(
    module: nn.Module,
    placement: str | hetmem.Budget,
    directory: Path,
    *,
    chunk_bytes: Any = CHUNK,
    home_copies: bool | None = None,
    **options: Any,
) -> nn.Module:
    """`hetmem.manage` as all tests here use it: simulated device, every access checked.

    `placement` "nvme" leaves no more host memory than staging needs; "host" and "nvme" allow the device only as much
    as the largest parameter needs and half a model more.
    """
    if isinstance(placement, hetmem.Budget):
        limits = placement
    else:
        widest = max(p.itemsize for p in module.parameters())  # chunks have as many elements, whatever their dtype
        sizes = [-(-p.numel() // CHUNK_ELEMENTS) * CHUNK_ELEMENTS * widest for p in module.parameters()]
        changes: dict[str, Any] = {"home_copies": home_copies}
        if placement != "resident":
            changes["device_chunks"] = 3 * max(sizes) + sum(sizes) // 2
        if placement == "nvme":
            changes["host"] = 4 * max(sizes)
        limits = budget(placement, directory, **changes)
    options = {"device": DEVICE(), "sanitize": SANITIZE, "activations": ACTIVATIONS, **options}
    managed = hetmem.manage(module, limits, chunk_bytes=chunk_bytes, **options)
    if placement == "nvme":
        assert nvme_bytes(managed) > 0, "the model is too small to get to NVMe"
    return managed


def hetmem_threads() -> set[threading.Thread]:
    """Those that run now, of whatever model."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("hetmem-")}


_earlier: set[threading.Thread] = set()
"""Threads of hetmem that were there when the test began: of models that earlier tests have left in cycles."""


def begin_test() -> None:
    """Let threads of earlier tests be no matter of this one."""
    _earlier.clear()
    _earlier.update(hetmem_threads())


def own_threads() -> set[threading.Thread]:
    """Those that run now, and did not when the test began."""
    return hetmem_threads() - _earlier


def all_hetmem_threads_end() -> bool:
    """Whether those of every model that the test has dropped end by themselves.

    A model whose backward or step has raised may take three collections: what torch's objects hold is not seen by
    the collector before they are gone themselves.
    """

    def none_is_left() -> bool:
        gc.collect()
        return not own_threads()

    return comes_to_be(none_is_left)


def comes_to_be(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether `condition` holds soon: other threads may hold something for a moment longer than they are waited for."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def nvme_bytes(module: nn.Module) -> int:
    """Bytes that the homes of `module` have taken on NVMe."""
    found: int = hetmem.report(module).to_dict()["tiers"]["nvme"]["peak_bytes"]
    return found


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Equal shape, dtype and bits; None equals None."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (side.detach().cpu().contiguous().reshape(-1) for side in (left, right))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def assert_same(left: torch.Tensor | None, right: torch.Tensor | None, what: str) -> None:
    """`left` (plain) and `right` (managed) have the same bits."""
    if not same_bits(left, right):
        raise AssertionError(f"{what}: {testing.compare(0, 'bits', '', left, right)}")


def assert_same_weights(plain: nn.Module, managed: nn.Module, what: str = "") -> None:
    """All parameters and buffers have the same names and bits."""
    left, right = plain.state_dict(), managed.state_dict()
    assert list(left) == list(right)
    for name in left:
        assert_same(left[name], right[name], f"{what} weight {name}")


def assert_same_grads(plain: nn.Module, managed: nn.Module, what: str = "") -> None:
    """All gradients that can be read have the same bits, and are None for the same parameters."""
    for (name, left), (_, right) in zip(plain.named_parameters(), managed.named_parameters(), strict=True):
        if testing.is_hidden(right.grad):
            assert left.grad is not None, f"{what} grad of {name}"
        else:
            assert_same(left.grad, right.grad, f"{what} grad of {name}")


def assert_same_states(plain: torch.optim.Optimizer, managed: torch.optim.Optimizer, what: str = "") -> None:
    """All optimizer states have the same bits and belong to the same parameters."""
    left, right = plain.state_dict()["state"], managed.state_dict()["state"]
    assert left.keys() == right.keys(), f"{what} states of {sorted(left)} and {sorted(right)}"
    for index in left:
        assert left[index].keys() == right[index].keys()
        for name, value in left[index].items():
            assert_same(value, right[index][name], f"{what} state {name} of {index}")


def narrow(module: nn.Module, dtype: torch.dtype) -> None:
    """Float32 parameters of `module` compute in `dtype`, but for those beside running statistics."""
    for part in module.modules():
        if not isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for parameter in part.parameters(recurse=False):
                if parameter.dtype is torch.float32:
                    parameter.data = parameter.data.to(dtype)


class Mixed:
    """The reference for mixed precision: float32 masters, and a twin whose parameters are 16-bit copies of them."""

    def __init__(self, masters: nn.Module, dtype: torch.dtype) -> None:
        self.masters = masters
        self.twin = copy.deepcopy(masters)
        narrow(self.twin, dtype)
        self._buffers = list(zip(masters.buffers(), self.twin.buffers(), strict=True))

    def pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Masters beside the parameters that compute."""
        return zip(self.masters.parameters(), self.twin.parameters(), strict=True)

    def backward(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        """One forward and backward; gradients are added to those of the masters, in float32."""
        with torch.no_grad():
            for master, copied in self.pairs():
                copied.copy_(master)
        loss = loss_of(self.twin)
        loss.backward()
        for master, copied in self.pairs():
            if copied.grad is not None:
                arrived = copied.grad.to(master.dtype)
                master.grad = arrived if master.grad is None else master.grad + arrived
                copied.grad = None
        for master, copied in self._buffers:
            master.copy_(copied)
        return loss


def reference(
    plain: nn.Module, mixed: torch.dtype | None
) -> Callable[[Callable[[nn.Module], torch.Tensor]], torch.Tensor]:
    """One forward and backward of what is right, given the loss of a module: `Mixed.backward`, or `plain`'s own."""

    def backward(loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        loss = loss_of(plain)
        loss.backward()
        return loss

    return backward if mixed is None else Mixed(plain, mixed).backward


def adamws(plain: nn.Module, managed: nn.Module, **options: Any) -> tuple[torch.optim.AdamW, hetmem.AdamW]:
    """The optimizers of a `pair`; the managed one's with `options`."""
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    return left, hetmem.AdamW(managed.parameters(), lr=1e-2, **options)


@dataclass(frozen=True)
class Recipe:
    """How `train_both` trains."""

    steps: int = 3
    accumulation: int = 1
    clip: float | None = None
    mixed: torch.dtype | None = None
    groups: Callable[[nn.Module], Any] = lambda module: module.parameters()
    set_to_none: bool = True
    lr: float = 1e-2


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of `module`, which returns it or something to average."""
    output = module(*batch)
    return output if output.dim() == 0 else output.float().square().mean()


def train_both(
    plain: nn.Module,
    managed: nn.Module,
    batches: Sequence[Any],
    recipe: Recipe | None = None,
    *,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train both alike and compare losses, gradients (before and after clipping), weights and states at every step."""
    recipe = recipe or Recipe()
    left, right = optimizers or (
        torch.optim.AdamW(recipe.groups(plain), lr=recipe.lr, fused=True),
        hetmem.AdamW(recipe.groups(managed), lr=recipe.lr),
    )
    backward = reference(plain, recipe.mixed)
    feed = iter([batches[i % len(batches)] for i in range(recipe.steps * recipe.accumulation)])
    for step in range(recipe.steps):
        for micro in range(recipe.accumulation):
            batch, where = next(feed), f"step {step}.{micro}"
            state = torch.get_rng_state()
            expected = backward(lambda module, batch=batch: loss(module, batch))
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            got = loss(managed, batch)
            got.backward()
            assert torch.equal(torch.get_rng_state(), after), f"{where}: the random numbers used differ"
            assert_same(expected, got, f"{where} loss")
            assert_same_grads(plain, managed, where)
        if recipe.clip is not None:
            norms = [nn.utils.clip_grad_norm_(module.parameters(), recipe.clip) for module in (plain, managed)]
            assert_same(*norms, f"step {step} norm")
            assert norms[0] > recipe.clip, "the test clips nothing"
            assert_same_grads(plain, managed, f"step {step} clipped")
        for optimizer in (left, right):
            optimizer.step()
        assert_same_weights(plain, managed, f"step {step}")
        assert_same_states(left, right, f"step {step}")
        for optimizer in (left, right):
            optimizer.zero_grad(set_to_none=recipe.set_to_none)
        assert_same_grads(plain, managed, f"step {step} zeroed")
    return left, right


def step_in_backward(module: nn.Module, make: Callable[[list[nn.Parameter]], Any]) -> tuple[list[Any], list[Any]]:
    """An optimizer for each parameter, which steps as soon as its gradient is there; the hooks that do it."""
    optimizers = {parameter: make([parameter]) for parameter in module.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in optimizers]
    return list(optimizers.values()), hooks


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mlp() -> nn.Sequential:
    """Three layers, each of one chunk and a bias, with activations between."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])


class Tower(nn.Module):
    """A small language model: embedding (tied to the head unless `tied=False`), blocks, cross entropy.

    `checkpointing`: None, or the `use_reentrant` of activation checkpointing around every block.
    """

    VOCABULARY = 64

    def __init__(
        self, width: int = 32, depth: int = 2, *, tied: bool = True, checkpointing: bool | None = None
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head sees."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(tokens)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_batches(count: int, *, length: int = 8, rows: int = 2, seed: int = 1) -> list[tuple[torch.Tensor, ...]]:
    """Random tokens and targets for `Tower`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows, length)
    return [tuple(torch.randint(0, Tower.VOCABULARY, shape, generator=generator)) for _ in range(count)]


def vector_batches(
    count: int, *shape: int, seed: int = 1, dtype: torch.dtype | None = None
) -> list[tuple[torch.Tensor, ...]]:
    """Random normal inputs."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator).to(dtype or torch.float32),) for _ in range(count)]


def pair(
    build: Callable[[], nn.Module], placement: str | hetmem.Budget, directory: Path, **options: Any
) -> tuple[Any, Any]:
    """The same model twice: plain, and managed. Built twice, as not every model can be copied; of no type, as tests
    reach into their parts."""
    modules: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(build())
    return modules[0], manage(modules[1], placement, directory, **options)


def assert_trains_alike(
    build: Callable[[], nn.Module],
    placement: str,
    directory: Path,
    mixed: torch.dtype | None = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
) -> None:
    """`train_both` with a model of vectors of `WIDTH`, in the precision `mixed`."""
    modules = pair(build, placement, directory, mixed_precision=mixed)
    train_both(*modules, vector_batches(3, 4, WIDTH, dtype=mixed), Recipe(mixed=mixed), loss=loss)


BATCHES = vector_batches(4, 4, WIDTH)
"""For `mlp`."""


def both(modules: tuple[nn.Module, nn.Module], act: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """`act` on the plain module, then on the managed one, with the same random numbers."""
    state = torch.get_rng_state()
    left = act(modules[0])
    torch.set_rng_state(state)
    return left, act(modules[1])
