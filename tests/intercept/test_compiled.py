"""`torch.compile`: a compiled module is one region, with its weights on the device; bits are those of plain torch.

torch compiles nothing where a dispatch mode sees operators, so most of this is on a device that nobody watches, as a
GPU is. Its slots are poisoned when they are freed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import hetmem
from hetmem import testing
from tests.engine.harness import (
    CHUNK,
    Recipe,
    assert_same,
    assert_same_weights,
    loss_of,
    manage,
    pair,
    train_both,
    vector_batches,
)
from tests.engine.lazy_device import UnwatchedDevice
from tests.engine.test_writes_within_steps import KINDS, WritesInForward
from tests.intercept import compiling
from tests.intercept.compiling import (
    AS_A_WHOLE,
    BATCH,
    BLOCKS,
    BY_BLOCK,
    STEPS,
    WIDTH,
    Backend,
    Block,
    Chain,
    Stack,
    each_block,
    each_forward,
    limits,
    managed_and_plain,
    train,
    whole,
)
from tests.pairs import some

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, but not as an error


@pytest.fixture(autouse=True)
def forgetful() -> Any:
    """What was compiled for one test is nothing to the next; nothing is left of torch's state."""
    torch._dynamo.reset()
    before = _get_current_function_mode_stack()
    yield
    torch._dynamo.reset()  # compiled code may hold models
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert set(_get_current_function_mode_stack()) <= set(before)


@pytest.mark.parametrize("compiled", BY_BLOCK)
def test_code_of_one_block_is_good_for_all_of_them(compiled: Any, tmp_path: Path) -> None:
    plain, managed, call, call_managed, backend = managed_and_plain(Stack, compiled, tmp_path)
    train(plain, managed, call, call_managed)
    assert backend.graphs == [5], "one graph, with every operator of a block in it"
    assert backend.calls == STEPS * BLOCKS, "and every forward ran it"
    assert hetmem.report(managed).to_dict()["beside_chunks"] is None, "operators were not all seen"


@pytest.mark.parametrize("compiled", AS_A_WHOLE)
def test_of_a_model_compiled_as_a_whole_the_parts_that_have_room_are(compiled: Any, tmp_path: Path) -> None:
    plain, managed, call, call_managed, backend = managed_and_plain(Stack, compiled, tmp_path)
    train(plain, managed, call, call_managed)
    assert backend.graphs == [5] and backend.calls == STEPS * BLOCKS


@pytest.mark.parametrize("compiled", some(AS_A_WHOLE, 3))
def test_a_model_that_has_room_is_one_graph(compiled: Any, tmp_path: Path) -> None:
    plain, managed, call, call_managed, backend = managed_and_plain(Stack, compiled, tmp_path, slots=600)
    train(plain, managed, call, call_managed)
    assert backend.graphs == [5 * BLOCKS + 1] and backend.calls == STEPS


@pytest.mark.each
@pytest.mark.parametrize("compiled", AS_A_WHOLE)
@pytest.mark.parametrize("watched", [True, False])
def test_a_part_has_room_only_where_chunks_may_have_that_much_of_the_device(
    watched: bool, compiled: Any, tmp_path: Path
) -> None:
    """Blocks of five chunks, thirty in all: a quarter of the device has room for them, what chunks may have has not."""
    torch.manual_seed(0)
    plain = Stack()
    budget = limits(600, tmp_path, device_chunks=24 * CHUNK)
    managed = manage(copy.deepcopy(plain), budget, tmp_path, **{} if watched else {"device": UnwatchedDevice(0)})
    backend = Backend()
    train(plain, managed, compiled(plain, Backend()), compiled(managed, backend))
    assert watched or (backend.graphs == [5] and backend.calls == STEPS * BLOCKS)


@pytest.mark.each
@pytest.mark.parametrize("compiled", [each_block, each_forward, whole])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_regions_again_when_they_are_computed_again(
    reentrant: bool, compiled: Any, tmp_path: Path
) -> None:
    plain, managed, call, call_managed, backend = managed_and_plain(lambda: Stack(reentrant), compiled, tmp_path)
    train(plain, managed, call, call_managed)
    assert backend.calls == 2 * STEPS * BLOCKS


@pytest.mark.parametrize("compiled", some([*BY_BLOCK, *AS_A_WHOLE], 2))
def test_nothing_meets_home_memory_where_operators_are_watched(compiled: Any, tmp_path: Path) -> None:
    """Nothing is compiled there; the weights of a region are bound all the same."""
    torch.manual_seed(0)
    plain = Stack()
    managed = manage(copy.deepcopy(plain), limits(24, tmp_path, device="1MiB", device_chunks=24 * CHUNK), tmp_path)
    train(plain, managed, compiled(plain, Backend()), compiled(managed, Backend()))
    assert "compiled Block" in testing.of(managed).operators()


def test_what_a_region_writes_to_weights_is_kept(tmp_path: Path) -> None:
    """Also where no version counts it: nobody sees what compiled code calls."""
    ways = [*KINDS, "foreach", "held view"]
    plain, managed, call, call_managed, backend = managed_and_plain(
        lambda: Chain(*(WritesInForward(way) for way in ways)), each_block, tmp_path, sanitize=False
    )
    train(plain, managed, call, call_managed)
    assert backend.calls


def test_mixed_precision_is_compiled_in_sixteen_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Stack()
    managed = manage(
        copy.deepcopy(plain),
        limits(24, tmp_path),
        tmp_path,
        device=UnwatchedDevice(0),
        mixed_precision=torch.bfloat16,
    )
    backend = Backend()
    each_block(managed, backend)
    batches = [(BATCH[0].bfloat16(),)]
    train_both(plain, managed, batches, Recipe(steps=3, mixed=torch.bfloat16))
    assert backend.graphs == [5] and backend.calls == 3 * BLOCKS


def test_code_is_made_anew_while_gradients_are_added_up(tmp_path: Path) -> None:
    """Weights are the device's copies then, and who compiles on a GPU takes no gradient at home beside such a one."""
    torch.manual_seed(0)
    plain, device = Stack(), UnwatchedDevice(0)
    managed: Any = manage(
        copy.deepcopy(plain), limits(24, tmp_path), tmp_path, device=device, mixed_precision=torch.bfloat16
    )
    weights, met = list(managed.blocks[0].parameters()), []

    class Looks(Backend):
        def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            met.append([weight.grad for weight in weights])
            return super().__call__(graph, inputs)

    managed.blocks[0].compile(backend=Looks())
    batches = [(torch.randn(rows, WIDTH).bfloat16(),) for rows in (3, 5)]
    train_both(plain, managed, batches, Recipe(steps=2, accumulation=2, mixed=torch.bfloat16))
    assert met == [[None] * len(weights)] * 2


def test_with_autograd_of_its_own_a_region_saves_where_weights_are(tmp_path: Path) -> None:
    """Code of forward and backward, made ahead of time, keeps weights in between."""
    torch.manual_seed(0)
    plain = Stack()
    managed = manage(copy.deepcopy(plain), limits(24, tmp_path), tmp_path, device=UnwatchedDevice(0))
    each_block(plain, "aot_eager")
    each_block(managed, "aot_eager")
    train_both(plain, managed, [BATCH], Recipe(steps=4))


class Borrows(nn.Module):
    """A block that computes with a weight of another one."""

    def __init__(self, lender: Block) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.lenders = [lender]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.own(x), self.lenders[0].up.weight)


@pytest.mark.parametrize("backend", [Backend(), "aot_eager"], ids=["eager", "aot"])
def test_a_weight_that_is_none_of_the_region_s_is_brought_where_it_is_used(backend: Any, tmp_path: Path) -> None:
    """The graph ends there."""
    block = Block()
    model = Chain(block, Borrows(block))
    managed: Any = manage(
        model, limits(24, tmp_path), tmp_path, device=UnwatchedDevice(0), mixed_precision=torch.bfloat16
    )
    x = BATCH[0].bfloat16()
    expected = managed(x)
    managed.blocks[1].compile(backend=backend)
    assert_same(expected, managed(x), "output")


def test_what_has_no_room_is_not_compiled_and_says_so(tmp_path: Path) -> None:
    plain, managed, _, _, backend = managed_and_plain(Stack, lambda model, _: model, tmp_path, slots=8)
    each_block(managed, backend)
    with pytest.warns(UserWarning, match="Block is not compiled"):
        managed(*BATCH)
    train(plain, managed, plain, managed)
    assert not backend.graphs


def test_a_forward_that_has_no_room_is_not_compiled_by_itself(tmp_path: Path) -> None:
    plain, managed, _, _, backend = managed_and_plain(Stack, lambda model, _: model, tmp_path, slots=8)
    each_forward(managed, backend)
    with pytest.warns(UserWarning, match="Block is not compiled"):
        managed(*BATCH)
    train(plain, managed, plain, managed)
    assert not backend.graphs


@pytest.mark.each
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("compiled", [each_block, each_forward, whole])
@pytest.mark.parametrize("reentrant", [None, False])
def test_a_region_that_is_broken_off_leaves_nothing_behind(
    reentrant: bool | None, compiled: Any, error: type[BaseException], tmp_path: Path
) -> None:
    plain, managed, call, call_managed, _ = managed_and_plain(lambda: Stack(reentrant), compiled, tmp_path)
    train(plain, managed, call, call_managed, steps=2)

    compiling.raised, managed.blocks[3].fails = error, True
    with pytest.raises(error):
        call_managed(*BATCH)
    managed.blocks[3].fails = False
    assert_same_weights(plain, managed)  # which interrupts are noticed by
    inside = testing.of(managed)
    assert not any(inside.place_of(parameter) == "device" for parameter in managed.parameters())
    train(plain, managed, call, call_managed, steps=2)


class Kept(Stack):
    """What autograd saves is kept by hooks of the user's, as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda kept: kept):
            for block in self.blocks:
                x = block(x)
        return x * self.scale


def test_whoever_keeps_what_a_region_saves_keeps_weights_of_the_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Kept()
    options = {"device": UnwatchedDevice(0), "mixed_precision": torch.bfloat16}
    managed = manage(copy.deepcopy(plain), limits(48, tmp_path), tmp_path, **options)
    backend = Backend()
    each_block(managed, backend)
    train_both(plain, managed, [(BATCH[0].bfloat16(),)], Recipe(steps=2, mixed=torch.bfloat16))
    assert backend.calls == 2 * BLOCKS


class Stubborn(Stack):
    """Goes on after an interrupt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except KeyboardInterrupt:  # noqa: PERF203 - that is what it is about
                continue
        return x.mul(self.scale)


def test_a_forward_that_goes_on_after_an_interrupt_is_watched_again(tmp_path: Path) -> None:
    _, managed, _, call_managed, backend = managed_and_plain(Stubborn, each_block, tmp_path)
    compiling.raised, managed.blocks[2].fails = KeyboardInterrupt, True
    call_managed(*BATCH)
    assert testing.of(managed).operators().count("compiled Block") == BLOCKS
    assert backend.calls == BLOCKS - 1


@pytest.mark.parametrize("compiled", [each_block, each_forward, whole])
def test_code_that_is_there_runs_where_none_is_to_be_made(compiled: Any, tmp_path: Path) -> None:
    _, _, _, call_managed, backend = managed_and_plain(Stack, compiled, tmp_path)
    expected = [call_managed(*BATCH) for _ in range(2)][1]
    with torch.compiler.set_stance("eager_on_recompile"):
        assert_same(expected, call_managed(*BATCH), "output")
    assert backend.graphs == [5] and backend.calls == 3 * BLOCKS


def test_a_released_model_is_compiled_as_plain_torch_does(tmp_path: Path) -> None:
    plain, managed, call, call_managed, backend = managed_and_plain(Stack, each_block, tmp_path)
    train(plain, managed, call, call_managed, steps=2)
    hetmem.release(managed)
    backend.managed = lambda: None
    assert_same(plain(*BATCH), managed(*BATCH), "output")
    assert backend.calls == 3 * BLOCKS


def test_a_compiled_training_step_trains_the_same(tmp_path: Path) -> None:
    """Backward and step are hetmem's, and are not compiled."""
    plain, managed, _, _, backend = managed_and_plain(Stack, lambda model, _: model, tmp_path)
    left = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    right = hetmem.AdamW(managed.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend=backend)
    for (batch,) in vector_batches(3):
        assert_same(step(plain, left, batch), compiled(managed, right, batch), "loss")
        assert_same_weights(plain, managed)


class Uses(nn.Module):
    """It uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.relu(self.layer(x)))


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_under_autocast_compiled_code_casts_at_each_use_also_where_it_is_measured(
    placement: str, tmp_path: Path
) -> None:
    """Else torch keeps one cast, in which gradients are added in 16 bits."""

    def blocks() -> nn.Module:
        block, other = Uses(), Uses()
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, other, block, other)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(module, batch)

    modules = pair(blocks, placement, tmp_path)
    for module in modules:
        for block in (module[1], module[2]):
            block.compile(backend="aot_eager")
    train_both(*modules, vector_batches(2, 8, WIDTH), loss=loss)


def test_a_backward_that_a_compiler_records_is_of_no_managed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a model that had computed before were recorded into the code of another one."""
    told: list[object] = []
    begins = "hetmem.intercept.backward.begin_for"
    _, managed = pair(Uses, "host", tmp_path)
    managed(torch.ones(2, WIDTH)).sum()
    monkeypatch.setattr(begins, lambda self, **_: told.append(self))
    monkeypatch.setattr(begins.replace("begin", "end"), lambda self: None)
    other = nn.Linear(WIDTH, WIDTH)
    compiled = torch.compile(lambda x: other(x).square().sum(), backend="aot_eager")
    loss = compiled(torch.ones(2, WIDTH))
    assert not told
    loss.backward()
    assert told
