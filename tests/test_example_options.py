"""The second example: it trains as plain torch does where it says so, and its table says what the options do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.scripts import load_script

STEPS = 4


example = load_script("examples/02_optimizer_options.py")
PLAIN, CLIPPED, SMALL = example.VARIANTS


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Each variant, trained for `STEPS` steps."""
    return {name: example.train(options, STEPS) for name, options in example.VARIANTS.items()}


def plain_losses(max_norm: float | None = None) -> tuple[list[float], list[float]]:
    """The losses of the same training in plain torch, and the norms of its gradients."""
    model = example.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    teacher, losses, norms = example.Teacher(), [], []
    for _ in range(STEPS):
        x, y = teacher.batch()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def test_without_options_the_losses_are_those_of_plain_torch(results: dict[str, Any]) -> None:
    assert results[PLAIN].losses == plain_losses()[0]
    assert results[PLAIN].losses[-1] < results[PLAIN].losses[0]


def test_gradients_are_clipped_as_torch_clips_them(results: dict[str, Any]) -> None:
    limit = example.VARIANTS[CLIPPED]["max_grad_norm"]
    losses, norms = plain_losses(limit)
    assert max(norms) > limit, "nothing was clipped"
    assert results[CLIPPED].largest_norm == pytest.approx(max(norms), rel=1e-5)
    assert results[CLIPPED].losses == pytest.approx(losses, rel=1e-6)
    assert plain_losses()[0] != pytest.approx(losses, rel=1e-6), "clipping would not be seen"


def test_smaller_moments_and_streamed_gradients_take_fewer_bytes_and_other_losses(results: dict[str, Any]) -> None:
    nbytes = {name: result.report["bytes_per_parameter"] for name, result in results.items()}
    assert 16 <= nbytes[PLAIN] == nbytes[CLIPPED] < 16.5
    assert 6 <= nbytes[SMALL] < 7.5
    assert results[SMALL].losses != results[PLAIN].losses
    assert results[SMALL].losses == pytest.approx(results[PLAIN].losses, rel=1e-2)


def test_overlap_begins_within_the_backward_and_nothing_else_does(results: dict[str, Any]) -> None:
    early = {name: example.early_passes(result.report)[0] for name, result in results.items()}
    assert early[PLAIN] == 0
    assert early[CLIPPED] == 0, "the norm is summed on the device, and updates wait for it"
    assert early[SMALL] > 0


def test_the_table_has_a_row_for_each_variant(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "train", lambda options, steps: results[_name(options)])
    assert example.main([]) == 0
    printed = capsys.readouterr().out
    for result in results.values():
        assert f"{result.losses[0]:.4f} → {result.losses[-1]:.4f}" in printed
        assert f"{result.report['bytes_per_parameter']:.1f}" in printed


def _name(options: dict[str, Any]) -> str:
    return next(name for name, wanted in example.VARIANTS.items() if wanted is options)


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--steps", "1"])
    assert stopped.value.code == 2
    assert "at least 2" in capsys.readouterr().err


def test_the_budget_is_the_examples_point() -> None:
    """The device holds a part of the weights only, so that something streams."""
    weights = sum(parameter.numel() * 4 for parameter in example.build().parameters())
    limits = example.BUDGET.limits()
    assert isinstance(example.BUDGET, hetmem.Budget)
    assert weights / 6 < limits.device_chunk_bytes < weights / 4


def test_on_a_gpu_the_limit_is_of_the_model_s_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS takes more of it than the whole budget of the simulated device, and nothing would run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    limits = load_script("examples/02_optimizer_options.py").BUDGET.limits()
    assert (limits.device_bytes, limits.device_chunk_bytes) == (None, example.BUDGET.limits().device_chunk_bytes)
