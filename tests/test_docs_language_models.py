"""The code of the pages for language models runs as it is printed, on the simulated device."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import hetmem
from tests.test_docs_code import run, snippets

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # its names of activation checkpointing


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_long_sequence_needs_checkpoints_moves_and_chunks() -> None:
    (code,) = snippets("docs/long-context.md")
    names: dict[str, Any] = {}
    assert "chunked loss: chunks of 1024 tokens" in run(code, names)
    report = hetmem.report(names["model"]).to_dict()
    assert report["steps"] == 2
    assert report["tiers"]["device"]["peak_bytes"] <= 44 << 20
    assert report["activations"]["bytes"]["device_to_host"] > 0, "nothing had to move"


class Plain:
    """`hetmem` of a program that trains in plain torch."""

    Budget, chunked_loss = hetmem.Budget, staticmethod(hetmem.chunked_loss)

    @staticmethod
    def manage(model: Any, *_: Any, mixed_precision: Any = None, **__: Any) -> Any:
        return model

    @staticmethod
    def load_weights(directory: str, model: Any) -> None:
        model.load_state_dict(type(model).from_pretrained(directory, dtype=torch.float32).state_dict())

    @staticmethod
    def AdamW(parameters: Any, **options: Any) -> torch.optim.AdamW:  # noqa: N802 - as hetmem's
        return torch.optim.AdamW(parameters, fused=True, **options)


def test_recipes_print_what_they_print_in_plain_torch() -> None:
    pytest.importorskip("peft")
    code = "\n".join(snippets("docs/language-models.md"))
    names: dict[str, Any] = {}
    printed = run(code, names)
    said = [line.split()[0] for line in printed.splitlines()]
    kinds = ["pretraining", "evaluation", "generation", "chat", "adapters", "preferences"]
    assert list(dict.fromkeys(said)) == kinds
    assert run(code.replace("import hetmem\n", ""), {"hetmem": Plain}) == printed
    fetches = {
        name: hetmem.report(names[name]).to_dict()["fetches"] for name in ("model", "lora", "reference", "policy")
    }
    assert fetches["model"] and fetches["policy"], fetches


def test_packed_conversations_have_the_loss_that_each_has_alone() -> None:
    first, *_, chat = snippets("docs/language-models.md")[:4]
    names: dict[str, Any] = {"torch": torch, "hetmem": Plain, "optimizer": MagicMock()}
    run(first.replace("import hetmem\n", ""), names)
    names["model"] = model = transformers.LlamaForCausalLM(names["config"])
    run(chat, names)
    alone = [
        model(input_ids=torch.cat(pair)[None], labels=torch.cat((torch.full_like(pair[0], -100), pair[1]))[None]).loss
        for pair in names["conversations"]
    ]
    torch.testing.assert_close(names["loss"], torch.stack(alone).mean())
