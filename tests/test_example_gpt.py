"""The first example: its model, its data, its training loop and the judgement of --check, on a model of 8 K parameters.

`hetmem` itself is replaced by plain torch here, so that these tests say whether the example is right, not the library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetmem
from hetmem.base.units import parse_size
from hetmem.errors import BudgetError, DeviceOutOfMemoryError, StateError
from tests.scripts import load_script

example = load_script("examples/01_train_gpt.py")
TINY = example.GPTConfig(layers=2, heads=2, width=16, context=12, vocabulary=256)
read_corpus = example.read_corpus
CORPUS, VOCABULARY = read_corpus(TINY.vocabulary, 10_000)


class MixedModel(nn.Module):
    """What mixed precision of a managed model computes: a bfloat16 copy forward, fp32 gradients on the masters."""

    def __init__(self, masters: nn.Module) -> None:
        super().__init__()
        self.masters: Any = masters

    def forward(self, *inputs: Tensor) -> Tensor:
        masters = dict(self.masters.named_parameters())
        copies = {name: parameter.bfloat16() for name, parameter in masters.items()}
        output: Tensor = torch.func.functional_call(self.masters, copies, inputs)
        return output

    def named_parameters(self, *args: Any, **keywords: Any) -> Any:
        return self.masters.named_parameters(*args, **keywords)

    def generate(self, *args: Any) -> Any:
        return self.masters.generate(*args)


class FakeHetmem:
    """Plain torch under the public names of hetmem; records what the example asked of them."""

    def __init__(self) -> None:
        self.reports_read = 0
        self.released: list[nn.Module] = []
        self.budget: dict[str, Any] = {}
        self.device: Any = None

    def Budget(self, **sizes: Any) -> SimpleNamespace:  # noqa: N802  the public name is a class
        self.budget = sizes
        return SimpleNamespace(**sizes)

    def manage(self, model: nn.Module, budget: Any, device: Any, mixed_precision: Any, chunk_bytes: str) -> nn.Module:
        self.device = device
        return model if mixed_precision is None else MixedModel(model)

    def AdamW(self, parameters: Any, **options: Any) -> torch.optim.Optimizer:  # noqa: N802
        return torch.optim.AdamW(parameters, fused=True, **options)

    def report(self, model: nn.Module) -> FakeHetmem:
        return self

    def release(self, model: nn.Module) -> None:
        self.released.append(model)

    def to_dict(self) -> dict[str, Any]:
        self.reports_read += 1
        tiers = {name: {"used_bytes": 1 << 20} for name in ("device", "host", "nvme")}
        return {"tiers": tiers, "stall_seconds": 0.0}

    def __str__(self) -> str:
        return "the memory report"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operators of this size take microseconds; waking a second thread on a busy machine takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHetmem:
    fake = FakeHetmem()
    monkeypatch.setattr(example, "hetmem", fake)
    monkeypatch.setattr(example, "read_corpus", lambda _: (CORPUS, VOCABULARY))  # the whole one takes seconds
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return fake


def tiny_model() -> Any:
    torch.manual_seed(0)
    return example.GPT(TINY)


def first_batch() -> Any:
    return next(example.random_batches(CORPUS, TINY.context, "cpu"))


def test_default_states_are_at_least_eight_device_budgets_and_more_than_device_and_host() -> None:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in example.GPT(example.GPTConfig()).parameters())
    states_bytes = parameters * example.STATE_BYTES_PER_PARAMETER
    options = example.parse_options([])
    device_bytes, host_bytes = (parse_size(size) for size in (options.device_memory, options.host_memory))
    assert states_bytes >= 8 * device_bytes
    assert states_bytes > device_bytes + host_bytes


def test_at_most_a_fiftieth_of_its_chunks_is_unused(tmp_path: Path) -> None:
    options = example.parse_options([])
    budget = hetmem.Budget(options.device_memory, options.host_memory, example.NVME_MEMORY, tmp_path)
    model = hetmem.manage(example.GPT(example.GPTConfig()), budget, device="sim", chunk_bytes=example.CHUNK_BYTES)
    assert hetmem.report(model).to_dict()["chunk_waste"] <= 0.02


def test_an_untrained_model_is_no_better_than_chance() -> None:
    assert abs(tiny_model()(*first_batch()).item() - math.log(256)) < 1.0


def test_a_token_is_predicted_from_earlier_ones_only() -> None:
    model, (x, _) = tiny_model(), first_batch()
    changed = x.clone()
    changed[:, 7:] = 255 - changed[:, 7:]
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert before.shape == (example.BATCH_SIZE, TINY.context, 256)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


def test_the_head_is_the_embedding_and_counts_once() -> None:
    model = tiny_model()
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_recomputation_gives_the_gradients_of_an_ordinary_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointed, ordinary = tiny_model(), tiny_model()
    checkpointed(*first_batch()).backward()
    monkeypatch.setattr(example, "checkpoint", lambda block, hidden, use_reentrant: block(hidden))
    ordinary(*first_batch()).backward()
    for left, right in zip(checkpointed.parameters(), ordinary.parameters(), strict=True):
        assert example.count_different(left.grad, right.grad) == 0


def test_the_target_of_a_token_is_the_next_one_and_batches_repeat() -> None:
    batches = [list(islice(example.random_batches(CORPUS, TINY.context, "cpu"), 3)) for _ in range(2)]
    for (x, y), (x_again, y_again) in zip(*batches, strict=True):
        assert x.shape == y.shape == (example.BATCH_SIZE, TINY.context)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)


def test_generation_keeps_the_prompt_passes_the_context_and_repeats() -> None:
    model = tiny_model()
    prompt = VOCABULARY.encode("\n\ndef")
    tokens = model.generate(prompt, 20)
    assert tokens[: len(prompt)] == prompt
    assert len(tokens) == len(prompt) + 20 > TINY.context
    assert 0 not in tokens[len(prompt) :]
    assert tokens == model.generate(prompt, 20)


def test_text_comes_back_from_its_tokens_but_for_rare_names() -> None:
    code = "\n\ndef set(self):\n    return self"
    assert VOCABULARY.decode(VOCABULARY.encode(code)).replace(example.RARE, " set") == code
    assert len(VOCABULARY.pieces) == len(set(VOCABULARY.pieces)) == TINY.vocabulary
    assert VOCABULARY.decode(VOCABULARY.encode("def never_seen_before")) == "def" + example.RARE


def test_the_rate_warms_up_then_falls_to_a_tenth_and_no_steps_divide_nothing() -> None:
    def rates(steps: int) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = example.warmup_then_cosine(optimizer, steps)
        seen = [scheduler.get_last_lr()[0]]
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.get_last_lr()[0])
        return seen

    assert rates(0) == [pytest.approx(0.1)]
    assert rates(100)[0] == pytest.approx(0.1)
    assert max(rates(100)) == rates(100)[example.WARMUP_STEPS - 1]
    assert rates(100)[-1] == pytest.approx(0.1)


def test_training_lowers_the_loss_by_a_fifth() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = example.random_batches(CORPUS, TINY.context, "cpu")
    losses: list[float] = []
    example.train(model, optimizer, batches, 60, lambda batch, loss: losses.append(loss.item()))
    assert len(losses) == 60
    assert sum(losses[-10:]) / 10 < 0.8 * losses[0]


def test_a_difference_is_counted_in_bits_not_in_values() -> None:
    left, right = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([-0.0, math.nan, 1.0])
    assert example.count_different(left, left) == 0
    assert example.count_different(left, right) == 1


def test_check_accepts_the_same_training(
    fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "read_corpus", read_corpus)
    assert example.main(["--check", "--steps", "12"], TINY) == 0
    output = capsys.readouterr().out
    assert "Same bits as plain torch: 12 losses" in output
    assert "step   10/12" in output
    assert "step   12/12" in output
    assert output.count("tokens/s") == 2
    assert "the memory report" in output
    assert "\ndef " in output
    assert len(fake.released) == 1


def test_check_of_mixed_precision_accepts_a_bfloat16_copy_of_fp32_masters(
    fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The copies of `functional_call` are gone when backward recomputes, so keep what recomputation would give.
    monkeypatch.setattr(example, "checkpoint", lambda block, hidden, use_reentrant: block(hidden))
    assert example.main(["--check", "--steps", "4", "--mixed"], TINY) == 0


def test_check_of_mixed_precision_refuses_computing_in_fp32(fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "manage", lambda model, *_, **__: model)
    assert example.main(["--check", "--steps", "1", "--mixed"], TINY) == 1


def test_check_without_steps_takes_few() -> None:
    assert example.parse_options(["--check"]).steps == example.CHECK_STEPS
    assert example.parse_options([]).steps == example.STEPS
    assert example.parse_options(["--check", "--steps", "3"]).steps == 3


def test_check_refuses_a_wrong_update_at_the_next_loss(
    fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_decay(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True, **{**options, "weight_decay": 0.2})

    monkeypatch.setattr(fake, "AdamW", other_decay)
    assert example.main(["--check", "--steps", "3"], TINY) == 1
    assert "NOT the same bits: the loss of step" in capsys.readouterr().err


def test_check_refuses_one_wrong_bit_in_the_weights_and_names_the_parameter(
    fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip_last_bit(model: Any) -> FakeHetmem:
        if fake.reports_read == 1:  # the last step is done: this is the table, not the bar
            model.blocks[1].mlp_up.weight.data.view(torch.int32)[3, 3] ^= 1
        return fake

    monkeypatch.setattr(fake, "report", flip_last_bit)
    assert example.main(["--check", "--steps", "2"], TINY) == 1
    assert "1 of 1,024 elements of blocks.1.mlp_up.weight differ" in capsys.readouterr().err


def test_the_report_is_read_once_in_ten_steps(fake: FakeHetmem) -> None:
    assert example.main(["--steps", "25"], TINY) == 0
    assert fake.reports_read == 3


def test_no_steps_still_report_and_generate(fake: FakeHetmem, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--check", "--steps", "0"], TINY) == 0
    assert "the memory report" in capsys.readouterr().out


def test_the_options_reach_the_budget_and_the_device_is_simulated(fake: FakeHetmem, tmp_path: Path) -> None:
    sizes = ["--device-memory", "1MiB", "--host-memory", "2MiB"]
    assert example.main(["--steps", "0", *sizes, "--nvme-dir", str(tmp_path)], TINY) == 0
    assert fake.budget == {"device": "1MiB", "host": "2MiB", "nvme": example.NVME_MEMORY, "nvme_dir": str(tmp_path)}
    assert fake.device == "sim"
    assert tmp_path.exists()


def test_on_a_gpu_the_limit_is_of_the_model_s_part(fake: FakeHetmem) -> None:
    """cuBLAS takes more of it than the whole budget of the simulated device, and nothing would run."""
    example.budget_of(example.parse_options(["--device-memory", "1MiB"]), "cuda", "there")
    assert fake.budget == {"device_chunks": "1MiB", "host": "96MiB", "nvme": example.NVME_MEMORY, "nvme_dir": "there"}


def test_the_temporary_directory_is_removed(fake: FakeHetmem) -> None:
    assert example.main(["--steps", "0"], TINY) == 0
    assert not Path(fake.budget["nvme_dir"]).exists()


@pytest.mark.parametrize("error", [BudgetError, DeviceOutOfMemoryError])
def test_what_cannot_do_exits_with_the_message_and_code_2(
    fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    def refuse(*args: Any, **keywords: Any) -> None:
        raise error("the device needs 3 MiB more")

    monkeypatch.setattr(fake, "manage", refuse)
    assert example.main(["--steps", "0"], TINY) == 2
    assert capsys.readouterr().err == "the device needs 3 MiB more\n"


def test_a_bug_keeps_its_traceback(fake: FakeHetmem, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*args: Any, **keywords: Any) -> None:
        raise StateError("illegal transition")

    monkeypatch.setattr(fake, "manage", break_down)
    with pytest.raises(StateError):
        example.main(["--steps", "0"], TINY)


@pytest.mark.parametrize("arguments", [["--steps", "-1"], ["--steps", "many"], ["--unknown"]])
def test_a_wrong_command_line_exits_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        example.main(arguments, TINY)
    assert exit_info.value.code == 2
