"""Training goes on from a checkpoint with the bits that it would have had without the break."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.checkpoint.models import OptimizerOf, Run, start
from tests.engine.harness import PLACEMENTS, assert_same, assert_same_states, assert_same_weights, manage, mlp
from tests.forked import Forks
from tests.pairs import case, mostly

BREAK, END = 3, 5
BF16 = torch.bfloat16


def adamw(**options: Any) -> OptimizerOf:
    return lambda module: hetmem.AdamW(module.parameters(), **{"lr": 1e-2, **options})


def offloaded(kind: type[torch.optim.Optimizer], **options: Any) -> OptimizerOf:
    return lambda module: hetmem.optim.offload(kind, module.parameters(), lr=1e-2, **options)


def groups(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, without the frozen parameter; the learning rate of one is a tensor."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = [p for p in trained.values() if p.dim() > 1]
    vectors = {name: p for name, p in trained.items() if p.dim() < 2}
    return hetmem.AdamW(
        [{"params": vectors.items(), "lr": torch.tensor(3e-3)}, {"params": list(zip("abcdefghi", matrices))}],  # noqa: B905
        weight_decay=0.3,
    )


def fp16(module: nn.Module) -> torch.optim.Optimizer:
    scale = hetmem.optim.LossScale(2.0**40, growth_interval=2)  # too great at first: skips steps, and comes down
    return hetmem.AdamW(module.parameters(), lr=1e-2, loss_scale=scale)


@dataclass(frozen=True)
class Case:
    optimizer_of: OptimizerOf
    resumed_of: OptimizerOf | None = None
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    placements: tuple[str, str] = ("host", "nvme")


CASES = {
    "host to resident": Case(adamw(), placements=("host", "resident")),
    "nvme to host": Case(adamw(), placements=("nvme", "host")),
    "groups": Case(groups),
    "bf16 copies at home": Case(adamw(), options={"mixed_precision": BF16, "home_copies": True}),
    "fp16": Case(fp16, adamw(loss_scale="dynamic"), options={"mixed_precision": torch.float16}),
    "bf16 moments": Case(adamw(moments=BF16, seed=5), adamw(moments=BF16)),
    "8-bit moments": Case(adamw(moments="8bit", seed=5), adamw(moments="8bit"), placements=("nvme", "host")),
    "stochastic": Case(adamw(stochastic_rounding=True, seed=5), adamw(stochastic_rounding=True), dtype=BF16),
    "backward": Case(adamw(overlap="backward"), adamw(overlap="forward"), placements=("nvme", "host")),
    "streamed": Case(adamw(overlap="forward"), placements=("nvme", "nvme")),
    "SGD": Case(offloaded(torch.optim.SGD, momentum=0.9)),
    "torch's AdamW": Case(lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2), placements=("nvme", "host")),
    "plain to managed": Case(
        lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True),
        adamw(),
        placements=("plain", "nvme"),
    ),
    "managed to plain": Case(
        adamw(), lambda module: torch.optim.AdamW(module.parameters(), fused=True), placements=("nvme", "plain")
    ),
}
MORE = {
    **{f"{a} to {b}": Case(adamw(), placements=(a, b)) for a in PLACEMENTS for b in PLACEMENTS},
    "forward": Case(adamw(overlap="forward"), placements=("nvme", "nvme")),
    "SGD without states": Case(offloaded(torch.optim.SGD)),
    "amsgrad": Case(offloaded(torch.optim.Adam, amsgrad=True), placements=("host", "host")),
    "plain": Case(lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2), placements=("plain", "plain")),
    "bf16 compute": Case(adamw(), options={"mixed_precision": BF16}),
    "clipped": Case(adamw(max_grad_norm=0.1), placements=("nvme", "host")),
    "NAdam": Case(offloaded(torch.optim.NAdam), placements=("nvme", "resident")),
    "torch's SGD": Case(lambda module: torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)),
}
"""With `--all-cases`."""


def assert_same_run(left: Run, right: Run) -> None:
    assert_same_weights(left.module, right.module)
    assert_same_states(left.optimizer, right.optimizer)
    for mine, theirs in zip(left.optimizer.param_groups, right.optimizer.param_groups, strict=True):
        assert float(mine["lr"]) == float(theirs["lr"])
        assert mine["weight_decay"] == theirs["weight_decay"]
    assert left.scheduler.state_dict() == right.scheduler.state_dict()
    scales = [getattr(run.optimizer, "loss_scale", None) for run in (left, right)]
    if all(scales):
        assert scales[0].state_dict() == scales[1].state_dict()


@pytest.mark.parametrize("name", [*CASES, *(case(name, nightly=True) for name in MORE if name not in CASES)])
def test_training_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    run = (CASES | MORE)[name]
    path = tmp_path / "run.safetensors"
    options = [run.options if place != "plain" else {} for place in run.placements]
    left = start(tmp_path, run.placements[0], run.optimizer_of, dtype=run.dtype, **options[0])
    left.steps(0, BREAK)
    left.save(path)
    expected = left.steps(BREAK, END)

    fresh = run.resumed_of or run.optimizer_of
    right = start(tmp_path, run.placements[1], fresh, seed=1, dtype=run.dtype, chunks=2, **options[1])
    right.load(path)
    assert right.steps(BREAK, END) == expected
    assert_same_run(left, right)


def test_a_run_goes_back_to_its_own_checkpoint(tmp_path: Path) -> None:
    """Everything that was used since is superseded: copies on the device, staged states, 16-bit copies, the seed."""
    options = {"mixed_precision": BF16, "home_copies": True}
    run = start(tmp_path, "nvme", adamw(overlap="forward"), **options)
    run.steps(0, BREAK)
    run.save(tmp_path / "c")
    first = run.steps(BREAK, END)
    for _ in range(2):  # versions of new views of homes are counted anew, and must not look like those of the last
        run.load(tmp_path / "c")
        assert run.steps(BREAK, END) == first


def test_a_checkpoint_before_the_first_step_takes_states_away(tmp_path: Path) -> None:
    run = start(tmp_path, "nvme")
    run.save(tmp_path / "c")
    first = run.steps(0, END)
    run.load(tmp_path / "c")
    assert run.optimizer.state_dict()["state"] == {}
    assert run.steps(0, END) == first


def test_a_load_after_an_overlapped_backward_gives_that_step_up(tmp_path: Path) -> None:
    run = start(tmp_path, "host", adamw(overlap="backward"))
    run.steps(0, BREAK)
    run.save(tmp_path / "c")
    first = run.steps(BREAK, END)
    run.load(tmp_path / "c")
    run.module(*[torch.zeros(2, 8, dtype=torch.int64)] * 2).backward()
    with pytest.raises(hetmem.errors.CheckpointError, match=r"save after optimizer\.step"):
        run.save(tmp_path / "c")
    run.load(tmp_path / "c")
    run.optimizer.zero_grad()
    assert run.steps(BREAK, END) == first


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_forward_that_is_broken_off_leaves_something_to_save(error: type[BaseException], tmp_path: Path) -> None:
    """Within it parameters are no more than stand-ins; an interrupt (Ctrl-C) runs none of torch's hooks."""
    run = start(tmp_path, "host", mixed_precision=BF16)
    run.steps(0, 2)
    refusals: list[Exception] = []

    def break_off(module: nn.Module, args: object, output: object) -> None:
        try:
            run.save(tmp_path / "c")
        except hetmem.errors.CheckpointError as refusal:
            refusals.append(refusal)
        raise error

    handle = run.module.blocks[1].register_forward_hook(break_off)
    with pytest.raises(error):
        run.steps(2, 3)
    handle.remove()
    assert "save and load it after forward and backward" in str(refusals[0])
    run.save(tmp_path / "c")
    other = start(tmp_path, "plain", lambda module: torch.optim.AdamW(module.parameters()), seed=1)
    other.load(tmp_path / "c")
    assert_same_weights(run.module, other.module)
    assert not any(parameter.isnan().any() for parameter in other.module.parameters())


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "Rprop", "ASGD", "Adagrad", "SGD", "RMSprop", "AdamW"])
def test_optimizers_of_torch_go_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Lists of tensors, states in other shapes than their parameters, none at all."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = mlp()
        return module, getattr(torch.optim, kind)(module.named_parameters())

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(inputs).square().mean()
            loss.backward()
            return loss.detach()

        return optimizer.step(closure)

    inputs, left, right = torch.randn(4, 64), build(), build()
    step(*left)
    hetmem.save(tmp_path / "c", *left)
    expected = [step(*left) for _ in range(3)]
    hetmem.load(tmp_path / "c", *right)
    assert [step(*right) for _ in range(3)] == expected
    assert_same_weights(left[0], right[0])


FRESH = """
import sys, torch
from pathlib import Path
from tests.checkpoint.models import start
torch.set_num_threads(int(sys.argv[3]))
run = start(Path(sys.argv[1]), "nvme", seed=1, chunks=2)
run.load(Path(sys.argv[2]))
print([loss.hex() for loss in run.steps(3, 5)])
"""


def test_another_process_goes_on_with_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    run = start(tmp_path)
    run.steps(0, BREAK)
    run.save(tmp_path / "c")
    expected = [loss.hex() for loss in run.steps(BREAK, END)]
    done = forks.run(FRESH, str(tmp_path), str(tmp_path / "c"), str(torch.get_num_threads()))
    assert (done.returncode, done.stdout.strip()) == (0, str(expected)), done.stderr


def test_saving_disturbs_nothing(tmp_path: Path) -> None:
    left, right = start(tmp_path, "nvme"), start(tmp_path, "nvme")
    state = torch.get_rng_state()
    for step in range(3):
        torch.set_rng_state(state)
        left.steps(step, step + 1)
        torch.set_rng_state(state)
        right.steps(step, step + 1)
        right.save(tmp_path / "c")
    assert_same_run(left, right)


def test_what_is_saved_is_what_the_model_says(tmp_path: Path) -> None:
    run = start(tmp_path, "nvme")
    run.steps(0, 2)
    run.save(tmp_path / "c")
    other = start(tmp_path, "resident", seed=1)
    other.load(tmp_path / "c")
    for name, value in run.module.state_dict().items():
        assert_same(value, other.module.state_dict()[name], name)
    assert other.module.embedding.weight is other.module.head.weight
    assert other.module.scratch.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("placement", "mixed"), mostly(PLACEMENTS, [BF16, None]))
def test_a_load_of_one_other_element_reaches_the_next_forward(
    placement: str, mixed: torch.dtype | None, tmp_path: Path
) -> None:
    """Copies of weights are superseded also where samples of their elements say nothing."""
    module = manage(mlp(), placement, tmp_path, mixed_precision=mixed)
    ones, outputs = torch.ones(1, 64), []
    for number in range(2):
        with torch.no_grad():
            module[0].weight[-1, -1] += 8 * number
        hetmem.save(tmp_path / f"{number}", module)
        outputs.append(module(ones))
    assert not torch.equal(*outputs)
    for number in (0, 1, 0):
        hetmem.load(tmp_path / f"{number}", module)
        assert torch.equal(module(ones), outputs[number])
