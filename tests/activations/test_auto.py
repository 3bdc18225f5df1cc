"""`activations="auto"`: nothing moves where all fits, else what must, and the budget holds in each step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import testing
from hetmem.errors import DeviceOutOfMemoryError
from tests.activations.test_offload import BATCHES, DEVICES, INPUTS, KIB, SAVED, budget, deep, family, peak
from tests.engine import harness
from tests.engine.harness import pair, train_both
from tests.engine.lazy_device import UnwatchedDevice


def trained(tmp_path: Path, device_bytes: int, *, steps: int = 4, **options: Any) -> tuple[Any, list[int]]:
    """Steps of `Deep` beside plain torch; the model, and the bytes of activations that each step moved home."""
    plain, managed = deep(tmp_path, limits=budget(device=device_bytes), **{"activations": "auto", **options})
    optimizers, moved = harness.adamws(plain, managed), []
    gradients = sum(p.numel() * 4 for p in plain.parameters())
    for batch in INPUTS[:1] * steps:
        before = testing.of(managed).link_bytes()["device_to_host"]
        train_both(plain, managed, [batch], harness.Recipe(steps=1), optimizers=optimizers)
        moved.append(testing.of(managed).link_bytes()["device_to_host"] - before - gradients)
    return managed, moved


def test_where_all_fits_nothing_moves(tmp_path: Path) -> None:
    _, moved = trained(tmp_path, 8 << 20, steps=2)
    assert moved == [0, 0]


@pytest.mark.each
@pytest.mark.parametrize("sanitize", [True, False], ids=["checked", "traced"])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("size", [512, 1024])
def test_what_must_leave_does_and_the_budget_holds(size: int, name: str, sanitize: bool, tmp_path: Path) -> None:
    managed, moved = trained(tmp_path, size * KIB, device=DEVICES[name](), sanitize=sanitize)
    assert peak(managed) <= size * KIB
    assert moved[-1] == moved[-2] > 0


def test_a_larger_device_moves_less_and_no_more_than_is_missing(tmp_path: Path) -> None:
    """Each saved storage is of one or two `SAVED` bytes: what is moved beyond what is missing is one of each place of
    the step that lacks room, and as much as was held by a forward when the device was full."""
    needed = peak(trained(tmp_path, 8 << 20, steps=1)[0])
    for size in (needed - 2 * SAVED, needed // 2):
        _, moved = trained(tmp_path, size, sanitize=False)
        missing = needed - size
        assert missing - 2 * SAVED <= moved[-1] <= missing + 192 * KIB + 2 * SAVED, (size, missing, moved)


def test_a_larger_batch_is_measured_anew(tmp_path: Path) -> None:
    plain, managed = deep(tmp_path, limits=budget(device=1 << 20), activations="auto", sanitize=False)
    (x,) = BATCHES[0]
    train_both(plain, managed, [(x[:rows],) for rows in (16, 16, 128, 64, 128, 128)])
    assert peak(managed) <= 1 << 20


def test_of_a_model_that_is_whole_on_the_device_weights_stay_and_of_activations_what_has_room(tmp_path: Path) -> None:
    """Beside what just fits nothing moves, in the first step neither."""
    needed = 0
    for less in (0, 0, 2 * SAVED):
        limits = hetmem.Budget(device=needed - less if needed else "8MiB", device_chunks="2MiB", host="16MiB")
        plain, managed = deep(tmp_path, limits=limits, activations="auto", chunk_bytes=None, sanitize=False)
        optimizers = harness.adamws(plain, managed)
        for _ in range(2):
            before = testing.of(managed).link_bytes()["device_to_host"]
            train_both(plain, managed, INPUTS[:1], harness.Recipe(steps=1), optimizers=optimizers)
            moved = testing.of(managed).link_bytes()["device_to_host"] - before
            assert less <= moved <= less + 2 * SAVED * bool(less)
        needed = needed or peak(managed)
        assert peak(managed) <= needed - less


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", ["as written", "checkpointed", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "convolutions", "lstm"])
def test_families_train_with_the_bits_of_torch_where_some_leave(name: str, way: str, tmp_path: Path) -> None:
    build, batches, loss = family(name)
    of_hugging_face = hasattr(build(), "gradient_checkpointing_enable")
    if way == "checkpointed" and not of_hugging_face:
        pytest.skip("it checkpoints nothing by itself")
    if (name, way) == ("lstm", "autocast"):
        pytest.skip("oneDNN has no such LSTM on each processor")

    def made() -> torch.nn.Module:
        model = build()
        if way == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def cast(module: Any, *batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if way == "autocast" else nullcontext():
            return loss(module, *batch).float()

    parameters = sum(p.numel() * 4 for p in build().parameters())
    chunks = max(parameters // 2, 320 * KIB)

    def trained(device_bytes: int) -> tuple[int, int]:
        limits = hetmem.Budget(device=device_bytes, device_chunks=chunks, host="64MiB")
        plain, managed = pair(made, limits, tmp_path, activations="auto", chunk_bytes=16 * KIB, sanitize=False)
        train_both(plain, managed, batches, harness.Recipe(steps=4), loss=cast)
        tier = hetmem.report(managed).to_dict()["tiers"]["device"]
        assert tier["peak_bytes"] <= device_bytes
        saved = hetmem.report(managed).to_dict()["activations"]
        return tier["non_model_peak_bytes"], saved["bytes"]["device_to_host"]

    most, moved = trained(16 << 20)
    assert moved == 0
    for part in (0.9, 0.8, 0.7, 0.6, 0.5):
        _, moved = trained(chunks + int(most * part))
        if moved:
            break
    assert moved or way != "as written", "of the others the most is needed where a layer is computed again, or casts"


class Chain(torch.nn.Module):
    """A block of six layers, whose weights it uses at once where it is compiled, or a model of four such blocks."""

    def __init__(
        self, part: Callable[[], torch.nn.Module] = lambda: torch.nn.Linear(64, 64, False), count: int = 6
    ) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(part() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["offload", "auto"])
def test_what_blocks_save_that_inductor_compiles_leaves_too(how: str, tmp_path: Path) -> None:
    """The bits of torch's compiled run; a block has the room for its weights that activations would come to earlier."""
    limits, device = hetmem.Budget(device="1MiB", host="32MiB"), UnwatchedDevice(896 * KIB)
    options = {"activations": how, "chunk_bytes": 16 * KIB, "device": device, "sanitize": False}
    plain, managed = pair(lambda: Chain(Chain, 4), limits, tmp_path, **options)
    for module in (plain, managed):
        for block in module.blocks:
            block.compile(fullgraph=True)
    train_both(plain, managed, INPUTS[:1], harness.Recipe(steps=3))
    gradients = 3 * sum(p.numel() * 4 for p in plain.parameters())
    moved = testing.of(managed).link_bytes()["device_to_host"] - gradients
    assert moved > 3 * SAVED or how == "auto"
    assert peak(managed) <= 1 << 20
    assert testing.of(managed).memory().activation_bytes == 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_block_that_has_no_room_is_explained(tmp_path: Path) -> None:
    """On a device that nobody watches. What is rehearsed for the message is no code of the block, so not compiled."""
    device = UnwatchedDevice(940 * KIB)
    _, managed = deep(tmp_path, limits=budget(device=1 << 20), activations="auto", device=device, sanitize=False)
    for block in managed.blocks:
        block.compile(backend="aot_eager", fullgraph=True)

    def train() -> None:
        for _ in range(4):
            managed(*INPUTS[0]).sum().backward()

    with pytest.raises(DeviceOutOfMemoryError, match="No room for compiled Block"):
        train()
