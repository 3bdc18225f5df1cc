"""Configuration files of Hugging Face models come from anywhere: what one says is checked before a part of its model is
built, and planning it asks nothing, fetches nothing and runs no code but transformers'."""

from __future__ import annotations

import builtins
import json
import os
import random
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

pytest.importorskip("transformers")

from hetmem.cli import main
from hetmem.planner import model
from hetmem.planner.hugging_face.sizes import check_file
from tests.planner.tested import planner

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "rope_theta": 1_000_000_000.0,
    "eos_token_id": [5, 10**9],
    "time_step_limit": [0.0, float("inf")],
}


def built(path: Path, config: Any) -> nn.Module:
    path.write_text(json.dumps(config))
    call = planner.hugging_face_call(path, 1, 8, None)
    with torch.device("meta"):
        made: nn.Module = call.build_model()
        return made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": [5]}, r"architectures\[0\]: expected text of at most 200 characters, got 5"),
        ({"architectures": ["__loader__"]}, "has no model class '__loader__', which it names"),
        ({"architectures": ["AutoModel"]}, "has no model class 'AutoModel', which it names"),
        ({"architectures": "Llama"}, "architectures: expected a list, got 'Llama'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected a number of layers, 0 to 10000, got 1000000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected a number of layers, 0 to 10000, got -1"),
        ({"n_layer": 1e9}, "n_layer: expected a number of layers"),
        (
            {"vision": [{"depths": [2, 10**9]}]},
            "vision.depths: expected a number of layers, 0 to 10000, got 1000000000",
        ),
        ({"text_config": {"num_layers": 10_001}}, "text_config.num_layers: expected a number of layers"),
        ({"num_labels": 10**7}, "num_labels: expected a number, 0 to 1e[+]06"),
        ({"num_local_experts": -1}, "num_local_experts: expected a number, 0 to 1e[+]06"),
        ({"d_anything": 10**9}, "d_anything: expected a size"),
        ({"hidden_size": float("nan")}, "hidden_size: expected a size, .* got nan"),
        ({"hidden_size": 10**8}, "hidden_size 100,000,000 with 2 layers .* makes at least 2e[+]16 parameters"),
        ({"vocab_size": 10**8, "hidden_size": 10**6}, "vocab_size of 100,000,000 makes at least 1e[+]14 parameters"),
        ({"attn_implementation": "org/kernel"}, "^[^:]*: attn_implementation: expected .* got 'org/kernel'"),
        ({"a": {"_attn_implementation": {"b": "org/kernel@1"}}}, "a._attn_implementation.* got 'org/kernel@1'"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "evil--repo.C"}}, "the code in auto_map is not run: name a"),
        ({"num_hidden_layers": "3"}, "is no Hugging Face configuration: .*num_hidden_layers.*expected int"),
        ({"dtype": "load"}, "is no Hugging Face configuration: "),
    ],
)
def test_what_no_model_has_is_refused_in_one_sentence_before_a_part_of_it_is_built(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda *text: asked.append("?") or "yes")
    hook = register_module_parameter_registration_hook(lambda module, name, value: made.append(name))
    try:
        with pytest.raises(planner.PlanError, match=said) as caught:
            built(tmp_path / "config.json", SMALL | change)
    finally:
        hook.remove()
    assert made == asked == []
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_what_is_no_configuration_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    for text in ("[3]", "{", "[" * 10**5, "\xff", "[]" * 10):
        path.write_text(text, encoding="latin-1")
        assert main(["plan", "--hf-config", str(path)]) == 2
        assert "config.json is no Hugging Face configuration: " in capsys.readouterr().err
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        planner.PlanError, match=r"config\.json is no Hugging Face configuration: it is no regular file"
    ):
        planner.hugging_face_call(path, 1, 8, None)


def test_numbers_that_size_nothing_may_be_large(tmp_path: Path) -> None:
    assert sum(each.numel() for each in built(tmp_path / "config.json", SMALL).parameters()) > 1 << 16


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_defaults_of_no_family_are_refused(tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    count = 0
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except Exception:
            continue  # one that is made of others, or needs a package
        (tmp_path / "config.json").write_text(json.dumps(config, default=str))
        check_file(tmp_path / "config.json")
        count += 1
    assert count > 100


def test_more_parameters_than_any_model_has_are_refused_with_the_first_that_is_too_much() -> None:
    def build() -> nn.Module:
        return nn.ParameterList([torch.empty(3 << 20, 3 << 20, device="meta") for _ in range(3)])

    with pytest.raises(planner.PlanError, match=r"more than 1e\+13 parameters, .* with 1 of ParameterList, of shape"):
        planner.trace(planner.TracedCall(build, torch.zeros(1)))


def test_more_modules_than_any_model_has_are_refused_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MOST_MODULES", 1000)
    made = []

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(made.append(1) or nn.Identity()) for _ in range(10**9)))

    with pytest.raises(planner.PlanError, match="more than 1,000 modules"):
        planner.trace(planner.TracedCall(build, torch.zeros(1)))
    assert len(made) == 1001


# ---- nothing beyond the file --------------------------------------------------------------------------------------


def test_a_pretrained_part_of_a_model_is_not_looked_up(tmp_path: Path) -> None:
    detr = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "use_timm_backbone": False}
    detr |= {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True, "backbone_config": None}
    with pytest.raises(planner.PlanError, match=r"config\.json: ") as caught:
        built(tmp_path / "config.json", detr)
    assert "looks up a network address while it is made" in str(caught.value)


def test_within_offline_the_network_and_questions_are_refused_on_this_thread_alone(tmp_path: Path) -> None:
    found: list[Any] = []

    def look_up() -> None:
        found.append(socket.getaddrinfo("127.0.0.1", 80))

    with planner.Offline(tmp_path):
        for ask in (look_up, input, lambda: socket.create_connection(("127.0.0.1", 1))):
            with pytest.raises(planner.PlanError, match="a plan is made of the file alone"):
                ask()
        thread = threading.Thread(target=look_up)
        thread.start()
        thread.join()
    look_up()
    assert len(found) == 2


def test_an_error_for_want_of_the_network_says_so_and_others_stay(tmp_path: Path) -> None:
    def connect() -> None:
        try:
            socket.gethostbyname("127.0.0.1")
        except ValueError as error:
            raise OSError("we could not connect to the hub") from error

    with pytest.raises(planner.PlanError, match="looks up a network address"), planner.Offline(tmp_path):
        connect()
    with pytest.raises(OSError, match="of its own"), planner.Offline(tmp_path):
        raise OSError("of its own")


# ---- changed files ------------------------------------------------------------------------------------------------

ODD: list[Any] = [None, True, -1, 0, 1, 0.5, 3, 10**5, 10**7, 10**9, 10**30, 1e308, float("nan"), "", "words", "a/b"]
ODD += ["\x1b[2J", "\ud800", [], [[]], [None], {}, {"": ""}, {"num_hidden_layers": 10**9}]
FAMILIES: list[dict[str, Any]] = [
    SMALL,
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 32},
    {**SMALL, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 64, "d_model": 32,
        "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4,
    },
    {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8,
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 5,
    },
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch's and transformers', of sizes of nothing
@pytest.mark.parametrize("count", [30, pytest.param(1500, marks=pytest.mark.nightly)])
def test_a_changed_configuration_is_built_or_refused(count: int, tmp_path: Path) -> None:
    chance, refused = random.Random(count), 0
    for _ in range(count):
        config = dict(chance.choice(FAMILIES))
        key = chance.choice([*config, "pad_token_id", "head_dim", "hidden_act", "text_config", "id2label"])
        config[key] = chance.choice(ODD)
        with suppress(planner.PlanError):
            built(tmp_path / "config.json", config)
            continue
        refused += 1
    assert refused > count // 4
