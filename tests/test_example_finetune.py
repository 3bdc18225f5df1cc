"""The third example: a pretrained model trains in plain torch's bits and saves what `from_pretrained` reads."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import hetmem
from tests.engine.harness import Mixed, assert_same, assert_same_weights
from tests.scripts import load_script

transformers = pytest.importorskip("transformers")

STEPS = 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/03_finetune_transformers.py")


def test_it_trains_as_plain_torch_does_and_saves_what_others_read(example: ModuleType, tmp_path: Path) -> None:
    example.tiny_model(tmp_path / "tiny")
    budget = hetmem.Budget(device="8MiB", host="24MiB", nvme="64MiB", nvme_dir=tmp_path)
    managed = example.managed_model(tmp_path / "tiny", budget)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).train()
    assert_same_weights(plain, managed, "loaded")
    rows = example.batches(tmp_path / "tiny", example.TEXT, 1, example.SEQUENCE)
    losses = example.train(managed, rows, STEPS)

    reference, optimizer = Mixed(plain, torch.bfloat16), torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    for step, loss in enumerate(losses):
        row = rows[step]
        expected = reference.backward(lambda module, row=row: module(input_ids=row, labels=row).loss)
        assert expected.item() == loss
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(plain, managed, "trained")

    example.save(managed, tmp_path / "tuned")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    for (name, expected), got in zip(plain.named_parameters(), read.parameters(), strict=True):
        assert_same(expected, got, name)


def test_it_says_what_is_missing(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device-memory", "64KiB"]) == 2
    assert "DeviceOutOfMemoryError" in capsys.readouterr().err
    (tmp_path / "short").write_text("short")
    assert example.main(["--text", str(tmp_path / "short")]) == 2
    assert "the text has 5 tokens, expected at least 64: a batch of 1x64" in capsys.readouterr().err
    assert example.main(["--model", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_on_a_gpu_the_limit_is_of_the_model_s_part(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS takes more of it than the whole budget of the simulated device, and nothing would run."""
    options = example.parse_arguments([])
    on = lambda: example.budget_of(options, "there").limits()  # noqa: E731
    assert (on().device_bytes, on().device_chunk_bytes) == (8 << 20, None)
    monkeypatch.setattr(example, "DEVICE", "cuda")
    assert (on().device_bytes, on().device_chunk_bytes) == (None, 8 << 20)
