"""The pages that take one machine from the plan to the report: what they print is printed, what they run runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hetmem import cli
from tests.scripts import ROOT, load_script
from tests.test_docs_code import commands, snippets

transformers = pytest.importorskip("transformers")

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
CONFIGS: dict[str, dict[str, Any]] = {
    "docs/llama-8b-on-24gb.md": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "docs/llama-70b-on-80gb.md": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "docs/quantised.md": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "docs/long-context.md": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "docs/laptop.md": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "tie_word_embeddings": True,
    },
}
SMALL = {"--batch": "1", "--sequence": "64", "--device-memory": "8MiB", "--host-memory": "40MiB"}


@pytest.mark.nightly
@pytest.mark.parametrize("page", CONFIGS)
def test_plans_say_what_the_page_prints(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIGS[page]))
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"```sh\n(hetmem plan .*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found
    for command, printed in found:
        assert cli.main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
        said = capsys.readouterr().out.splitlines()
        for line in filter(None, printed.splitlines()):
            assert line in said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--host-memory 60GiB --nvme 200GiB", "paste (8.79 s a step"),
        ("--host-memory 60GiB --moments 8bit --overlap backward", "paste (5.84 s a step"),
        ("--host-memory 28GiB --lora 16", "paste (5.32 s a step"),
    ],
)
def test_the_table_of_less_host_memory(
    more: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "docs/llama-8b-on-24gb.md"
    Path("config.json").write_text(json.dumps(CONFIGS[page]))
    assert cli.main([*shlex.split(commands(page)[0])[1:], *shlex.split(more)]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "page", [page for page in CONFIGS if page not in ("docs/long-context.md", "docs/quantised.md")]
)
def test_the_example_trains_as_the_page_calls_it(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model in the place of the page's, on small tiers. The page on long contexts has a loop of its own."""
    monkeypatch.chdir(tmp_path)
    example = load_script("examples/03_finetune_transformers.py")
    (command,) = [line for block in snippets(page, "sh") for line in [block] if line.startswith("python")]
    words = shlex.split(command.replace("\\\n", " "))[2:]
    for option, value in SMALL.items():
        words[words.index(option) + 1] = value
    example.tiny_model(Path(words[words.index("--model") + 1]))
    Path("notes.txt").write_text(example.TEXT)
    assert example.main([*words, "--steps", "2"]) == 0
    assert Path("run.html").exists()
    assert Path("tuned/model.safetensors").exists()
