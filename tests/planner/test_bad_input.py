"""What cannot be planned is refused in words that say what to do; nothing is filled or run before."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetmem
from hetmem.cli import main
from tests.planner.tested import planner
from tests.test_planning import BATCH, GPT, plan_alone


class Looks(nn.Module):
    """Its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if x.abs().sum().item() > 0:
            x = self.layer(x)
        return self.layer(x[x[:, 0] > 0]).sum() + x.sum()


def pours(size: int, count: int = 1, device: str = "cpu") -> nn.Module:
    """Layers that somebody has put on `device`."""
    return nn.Sequential(*(nn.Linear(size, size, bias=False, device=device) for _ in range(count)))


def ones() -> nn.Module:
    """More than there is, so that only a refusal before the operator says what is wrong."""
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(1 << 22, 1 << 22, device="cpu"))
    return model


BUDGET = hetmem.Budget(device="1MiB", host="64MiB")


@pytest.mark.parametrize(
    "build", [lambda: pours(40000), lambda: pours(8192, 6), ones], ids=["at once", "bit by bit", "filled"]
)
def test_a_builder_that_takes_real_memory_is_stopped_and_told_why(build: Any) -> None:
    with pytest.raises(planner.PlanError, match=r"takes real memory: with aten\.\w+.* [GT]iB .*Leave device=… out"):
        planner.plan(build, torch.zeros(1, 40000), BUDGET)


def test_small_real_tensors_are_no_reason_to_refuse() -> None:
    assert planner.plan(lambda: pours(64), torch.zeros(1, 64), BUDGET, loss=lambda output: output.sum()).fits


def test_memory_that_is_given_back_does_not_count() -> None:
    def build() -> nn.Module:
        for _ in range(40):
            torch.empty(1 << 23, device="cpu")  # 32 MiB each, and gone before the next one
        return GPT(1)

    assert planner.plan(build, BATCH, hetmem.Budget(device="64MiB", host="16MiB")).fits


def test_the_operator_and_the_line_that_look_at_values_are_named_with_a_way_out() -> None:
    with pytest.raises(planner.PlanError) as caught:
        planner.plan(Looks, torch.ones(4, 64), BUDGET)
    message = str(caught.value)
    assert "aten._local_scalar_dense" in message
    line = Path(__file__).read_text().split("if x.abs().sum().item() > 0:")[0].count("\n") + 1
    assert f"test_bad_input.py, line {line}" in message
    assert "real=True (--real)" in message


def test_a_model_without_anything_to_train_is_told_apart_from_one_without_a_loss() -> None:
    """It once was told to pass a loss, which it has."""
    with pytest.raises(
        planner.PlanError, match=r"does not depend on any parameter .*frozen \(requires_grad_\(False\)\)"
    ):
        planner.plan(lambda: GPT(1).requires_grad_(False), BATCH, BUDGET)


@pytest.mark.parametrize("made", [None, torch.zeros(3), 0.5])
def test_a_loss_that_is_none_is_told_apart_from_a_batch_that_is_refused(made: Any) -> None:
    with pytest.raises(planner.PlanError, match=r"expected a scalar loss, .* got (NoneType|a tensor of shape|float)"):
        planner.plan(lambda: GPT(1), BATCH, BUDGET, loss=lambda output: made)


def test_more_tokens_than_a_tensor_may_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    with pytest.raises(planner.PlanError, match="there is no tensor of 1000000000000000000 sequences of 1000"):
        planner.hugging_face_call(tmp_path / "config.json", 10**18, 1000, None)


@pytest.mark.parametrize("kind", [UserDict, MappingProxyType])
def test_a_batch_is_any_mapping_as_tokenizers_return_one(kind: Any) -> None:
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    build, budget = lambda: GPT(1), hetmem.Budget(device="8MiB", host="16MiB")
    plan = plan_alone(build, kind({"x": tokens}), budget)
    assert (plan.rows, plan.tokens) == (4, 128)
    assert plan == plan_alone(build, {"x": tokens}, budget)


def test_a_class_that_is_decorated_is_planned_as_it_was_written() -> None:
    """As who has written the decorator that a plan printed, and plans again. Then it is managed as before."""
    budget = hetmem.Budget(device="8MiB", host="16MiB")

    @hetmem.managed(budget, device="sim")
    class Decorated(GPT):
        pass

    plan = plan_alone(lambda: Decorated(1), BATCH, budget)
    assert plan.step_seconds == plan_alone(lambda: GPT(1), BATCH, budget).step_seconds
    assert plan_alone(lambda: Decorated(1), BATCH, budget, real=True).fits
    hetmem.release(Decorated(1))  # raises for what is not managed


def test_one_real_step_is_the_way_out() -> None:
    plan = planner.plan(Looks, torch.randn(4, 64), BUDGET, real=True)
    assert plan.fits
    assert plan.parameters == 64 * 64 + 3 * 64
    uses = planner.trace(planner.TracedCall(Looks, torch.randn(4, 64)), real=True).events
    assert sum(event.operator == "linear" for event in uses) == 2


def test_the_command_line_offers_and_does_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tests.planner.test_bad_input:Looks", "--input", "4x64:float32"]
    command += ["--device-memory", "1MiB", "--host-memory", "64MiB"]
    assert main(command) == 2
    assert "--real" in capsys.readouterr().err
    assert main([*command, "--real"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("host_to_device.bytes_per_second", 25, "expected bytes a second, 10000 to 1e+15, got 25"),
        ("device.matrix_flops.bfloat16", 989, "floating-point operations a second, 1e+06 to 1e+19, got 989"),
        ("nvme_read.latency_seconds", 100, "nvme_read.latency_seconds: expected seconds, 0 to 10, got 100"),
        ("device.memory_bytes", 80, "device.memory_bytes: expected bytes, 1.04858e+06 to 1e+15, got 80"),
        ("device.allocator_share", 1.5, "device.allocator_share: expected a share, 0 to 0.9, got 1.5"),
    ],
)
def test_figures_in_another_unit_are_absurd_and_named(
    path: str, value: float, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = planner.load_profile("l4").to_dict()
    *groups, last = path.split(".")
    place = data
    for group in groups:
        place = place[group]
    place[last] = value
    (tmp_path / "mine.json").write_text(json.dumps(data))
    command = ["plan", "tests.test_planning:GPT", "--input", "2x32", "--hardware", str(tmp_path / "mine.json")]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "mine.json" in message
    assert expected in message


def test_a_mixture_of_experts_is_planned_with_those_that_are_chosen_in_every_dtype(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    traced = planner.trace(planner.hugging_face_call(tmp_path / "config.json", 2, 64, torch.bfloat16))
    chosen = 3 * 2 * 64 * 128 * 2 * 128 * 2  # three products, two experts of each of 128 tokens, two layers
    dense = 2 * 128 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 64 * 8) + 64 * 512)
    attention = 2 * 2 * 2 * (2 * 64 * 64 * 64)
    assert 0.95 * 3 * (chosen + dense) < traced.flops <= 3.5 * (chosen + dense + attention)
    weights_of_every_token = 128 * 2 * 3 * 64 * 128 * 2
    assert traced.peak_live_bytes < weights_of_every_token / 2
    wide = planner.trace(planner.hugging_face_call(tmp_path / "config.json", 2, 64, None))
    assert wide.flops == traced.flops


@pytest.mark.parametrize("kind", ["vit", "whisper", "clip"])
def test_a_configuration_of_no_language_model_is_refused_in_one_line_with_a_way_out(kind: str, tmp_path: Path) -> None:
    """It once listed every class that transformers has."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(planner.PlanError) as caught:
        planner.hugging_face_call(tmp_path / "config.json", 1, 8, None)
    message = str(caught.value)
    assert f"{kind} is no language model and the file names no `architectures`" in message
    assert "hetmem plan MODULE:FUNCTION --input" in message
    assert len(message) < 400


def test_a_sequence_beyond_the_positions_that_a_model_has_is_refused(tmp_path: Path) -> None:
    """On `meta` it is traced as any other, and on the device it fails."""
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(small))
    with pytest.raises(planner.PlanError, match=r"32 positions \(transformer.wpe\).*got 33: --sequence 32"):
        planner.trace(planner.hugging_face_call(tmp_path / "config.json", 1, 33, None))
    assert planner.trace(planner.hugging_face_call(tmp_path / "config.json", 1, 32, None)).tokens == 32


def test_an_encoder_and_decoder_need_no_token_to_start_with(tmp_path: Path) -> None:
    small = {"model_type": "t5", "is_encoder_decoder": True, "vocab_size": 64, "num_layers": 1, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**small, "d_model": 32, "d_kv": 8, "d_ff": 64}))
    assert planner.trace(planner.hugging_face_call(tmp_path / "config.json", 2, 16, None)).rows == 2


def test_of_a_message_of_many_lines_the_first_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(planner.PlanError, match=r"is no Hugging Face configuration: .*nonesuch") as caught:
        planner.hugging_face_call(tmp_path / "config.json", 1, 8, None)
    assert "\n" not in str(caught.value)


class Gates(nn.Module):
    """Layers of parameters without elements, around one that has some, or none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.ParameterDict({"gate": nn.Parameter(torch.ones(0, 8))}) for _ in range(4)])
        self.layer = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + sum(part["gate"].sum() for part in self.gates)


# torch's remark on the initialisation of a layer of no elements
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("device", ["1MiB", "4KiB"])
@pytest.mark.parametrize("width", [0, 8])
def test_parameters_without_elements_are_planned_like_others(width: int, device: str) -> None:
    """No more of them makes a model larger: what was divided by that was nothing."""
    budget = hetmem.Budget(device=device, host="1MiB")
    found = hetmem.plan(lambda: Gates(width), (torch.ones(2, 8, device="meta"),), budget)
    assert (found.parameters, found.fits) == (9 * width, device == "1MiB")  # the other has no room for a chunk
    assert not found.fits or (found.largest_parameters > 0) == (width > 0)
