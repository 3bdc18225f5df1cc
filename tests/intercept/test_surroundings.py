"""What users put around a model: selective checkpoints, tracers, wrappers. Bits stay, or they are told at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hetmem
from hetmem.errors import ManageError
from tests.engine.harness import (
    BATCHES,
    WIDTH,
    Block,
    Recipe,
    adamws,
    assert_same,
    assert_same_weights,
    everywhere,
    manage,
    mlp,
    pair,
    streamed,
    train_both,
    vector_batches,
)
from tests.optim.stories import Twins, adamw, one, overlaps

ATEN = torch.ops.aten
KEPT: dict[str, Container[Any]] = {
    "nothing": (),
    "products": (ATEN.addmm.default, ATEN.mm.default),
    "copies": (ATEN.addmm.default, ATEN.copy_.default, ATEN._to_copy.default, ATEN.clone.default),
}
"""What a selective checkpoint keeps; nothing of hetmem's own may be among that."""


class Selective(nn.Module):
    """Blocks that are computed again but for what operators `kept` have given."""

    def __init__(self, kept: Container[Any]) -> None:
        super().__init__()
        self.kept = kept
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def policy(self, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in self.kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


@pytest.mark.each
@streamed
@overlaps
@pytest.mark.parametrize("kept", KEPT)
def test_a_selective_checkpoint_keeps_nothing_of_hetmem_s_own(
    kept: str, overlap: str, placement: str, tmp_path: Path
) -> None:
    """Copies and updates run in the middle of what is computed again."""
    plain, managed = modules = pair(lambda: Selective(KEPT[kept]), placement, tmp_path)
    both = Twins(plain, managed, *adamws(*modules, overlap=overlap))
    for batch in BATCHES:
        both.train([batch])
        both.assert_same()


@pytest.mark.each
@streamed
@pytest.mark.parametrize("kept", KEPT)
def test_a_selective_checkpoint_in_mixed_precision(kept: str, placement: str, tmp_path: Path) -> None:
    modules = pair(lambda: Selective(KEPT[kept]), placement, tmp_path, mixed_precision=torch.bfloat16)
    batches = vector_batches(3, 4, WIDTH, dtype=torch.bfloat16)
    train_both(*modules, batches, Recipe(steps=3, mixed=torch.bfloat16))


@everywhere
def test_a_model_that_was_managed_and_loaded_in_inference_mode_trains(placement: str, tmp_path: Path) -> None:
    plain, managed = mlp(), mlp()
    managed.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        manage(managed, placement, tmp_path)
    left, right = adamws(plain, managed)
    for batch in BATCHES:
        one(plain, batch, left)
        one(managed, batch, right)
        states = copy.deepcopy(left.state_dict())
        with torch.inference_mode():
            right.load_state_dict(states)
    assert_same_weights(plain, managed)


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_over_a_turned_batch_has_the_bits_of_torch_in_inference_mode(
    mode: Callable[[], AbstractContextManager[None]], placement: str, tmp_path: Path
) -> None:
    """torch orders the sums of its product by whether it knows that the view of the weight is one of a parameter."""
    plain, managed = pair(mlp, placement, tmp_path)
    for batch in vector_batches(4, 3, WIDTH, 6):
        x = batch[0].transpose(1, 2)
        with mode():
            assert_same(plain(x), managed(x), "output")


class Parts(nn.Module):
    """Cuts what it gets, a weight and a buffer, as rotary embeddings and fused projections do."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)
        self.register_buffer("turns", torch.randn(2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.layer(x).chunk(2, -1)
        up, down = self.layer.weight.chunk(2)
        sine, cosine = self.turns.chunk(2)
        out = (left + x @ up) * sine + (right + x @ down.narrow(0, 0, WIDTH)) * cosine
        return torch.matmul(out, out.narrow(1, 0, WIDTH).t(), out=torch.empty(len(x), len(x)))


@pytest.mark.each
@everywhere
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parts_of_weights_and_buffers_are_those_of_torch_in_inference_mode(
    mode: Callable[[], AbstractContextManager[None]], placement: str, tmp_path: Path
) -> None:
    """torch has said of these what they are views of before a mode gets them; said again, it raises."""
    plain, managed = pair(Parts, placement, tmp_path)
    for batch in BATCHES:
        with mode():
            assert_same(plain(*batch), managed(*batch), "output")


def test_weights_that_were_made_in_inference_mode_are_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        module = mlp()
    with pytest.raises(ManageError, match=r"0\.weight was made under torch\.inference_mode.*outside"):
        manage(module, "host", tmp_path)


TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "export": lambda module, x: torch.export.export(module, (x,)),
    "jit": torch.jit.trace,
}


@pytest.mark.each
@everywhere
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("tracer", TRACERS)
def test_who_traces_a_model_is_told_to_take_a_copy(tracer: str, placement: str, tmp_path: Path) -> None:
    plain, managed = pair(mlp, placement, tmp_path)
    train_both(plain, managed, BATCHES, Recipe(steps=2))
    with pytest.raises(ManageError, match=r"copy.deepcopy\(model\)"):
        TRACERS[tracer](managed, BATCHES[0][0])
    train_both(plain, managed, BATCHES, Recipe(steps=2))
    traced = TRACERS[tracer](copy.deepcopy(managed), BATCHES[0][0])
    call = traced.module() if tracer == "export" else traced
    assert_same(plain(*BATCHES[1]), call(*BATCHES[1]), "output")


@everywhere
def test_a_symbolic_trace_is_refused_and_a_copy_is_traced(placement: str, tmp_path: Path) -> None:
    plain, managed = pair(lambda: Doubled(mlp()), placement, tmp_path)
    with pytest.raises(ManageError, match=r"cannot be exported or traced: do that with copy.deepcopy\(model\)"):
        torch.fx.symbolic_trace(managed)
    train_both(plain, managed, BATCHES, Recipe(steps=2))
    traced = torch.fx.symbolic_trace(copy.deepcopy(managed))
    assert_same(plain(*BATCHES[1]), traced(*BATCHES[1]), "output")


class Doubled(nn.Module):
    """Its modules are not torch's alone, which a symbolic trace does not look into."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"layers": Called(inner)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["layers"](x)  # type: ignore[no-any-return]


class Called(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build of torch without it")
@everywhere
def test_data_parallel_wrappers_are_refused_where_they_would_read_gradients_too_early(
    placement: str, tmp_path: Path
) -> None:
    """Its hooks are autograd's own, behind those of tensors; what they found of NVMe was of the step before."""
    plain, managed = pair(mlp, placement, tmp_path)
    wrapped = DistributedDataParallel(managed)
    left, right = adamw(plain.parameters()), hetmem.AdamW(managed.parameters(), lr=1e-2)
    for batch in BATCHES:
        if placement == "resident":
            one(plain, batch, left)
            one(wrapped, batch, right)
        else:
            with pytest.raises(ManageError, match="DistributedDataParallel, which reads each gradient before"):
                wrapped(*batch)
    assert_same_weights(plain, managed)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_managed_model_is_not_scripted_and_a_released_one_is() -> None:
    managed = hetmem.manage(nn.Sequential(nn.Linear(64, 64)), hetmem.Budget(device="1MiB", host="8MiB"), device="sim")
    with pytest.raises(ManageError, match=r"cannot be scripted by torch\.jit: call hetmem\.release\(model\) first"):
        torch.jit.script(managed)
    expected = managed(torch.ones(2, 64))
    hetmem.release(managed)
    assert torch.equal(torch.jit.script(managed)(torch.ones(2, 64)), expected)
