"""What `hetmem plan` leaves: a program that runs, a plan that is known the next time, and word of what takes long."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem.cli import main
from tests.planner.tested import MOST_LINES, config, plan_cache, planner, stages

transformers = pytest.importorskip("transformers")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
SMALL = "--batch 2 --sequence 32 --device-memory 4MiB --host-memory 16MiB"
GPT = "tests.test_planning:GPT --input 2x32 --device-memory 2MiB --host-memory 16MiB"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The arguments that name a tiny configuration, without weights, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY))
    return "--hf-config config.json"


def plan(arguments: str) -> int:
    return main(["plan", *shlex.split(arguments)])


def with_weights() -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(".")


@pytest.mark.parametrize(
    "options",
    [
        "--checkpointing --overlap backward",
        pytest.param("--micro-batches 2 --max-grad-norm 1", marks=pytest.mark.nightly),
        pytest.param("--moments 8bit --overlap backward", marks=pytest.mark.nightly),
        pytest.param("--device-memory 3MiB --activations auto", marks=pytest.mark.nightly),
        pytest.param("--stochastic-rounding", marks=pytest.mark.nightly),
        pytest.param("--loss chunked", marks=pytest.mark.nightly),
        pytest.param("--lora 2", marks=pytest.mark.nightly),
        pytest.param("--inference", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("filled", [True, False], ids=["weights", "none"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_a_written_program_trains_within_the_plan(
    options: str, filled: bool, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if filled:
        with_weights()
    assert plan(f"{model} {SMALL} {options} -o plan.json --write train.py") == 0
    said = capsys.readouterr().err
    assert f"train.py {'runs' if 'inference' in options else 'trains'} this: python train.py" in said
    assert 'plan.json has this plan: model = hetmem.manage(model, plan="plan.json")' in said
    program = Path("train.py").read_text()
    assert len(list(filter(None, program.splitlines()))) <= MOST_LINES
    assert max(map(len, program.replace(str(Path.cwd()), "").splitlines())) <= 120
    ran = runpy.run_path("train.py")
    planned = planner.Plan.load("plan.json")
    seen = json.loads(_saved(ran["model"]))["tiers"]
    assert all(seen[tier]["peak_bytes"] <= planned.budget_bytes[tier] for tier in seen)
    assert Path("report.html").is_file()
    if "inference" not in options:
        assert len(capsys.readouterr().out.splitlines()) == 10
        assert hetmem.load("checkpoint.safetensors", ran["model"], ran["optimizer"]) is None
    hetmem.release(ran["model"])


def _saved(trained: Any) -> str:
    hetmem.report(trained).save("report.json")
    return Path("report.json").read_text()


def test_weights_beside_the_configuration_are_what_is_trained(model: str) -> None:
    with_weights()
    plan(f"{model} {SMALL} --write train.py")
    program = Path("train.py").read_text()
    before = program[: program.index("optimizer = ")]
    trained = _run(before)["model"]
    assert torch.equal(
        trained.lm_head.weight, transformers.LlamaForCausalLM.from_pretrained(".", dtype=torch.float32).lm_head.weight
    )
    hetmem.release(trained)


def _run(program: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec(program, made)
    return made


def test_a_program_is_written_for_a_function_that_builds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(f"{GPT} --checkpointing --write train.py") == 0
    ran = runpy.run_path("train.py")
    assert Path("checkpoint.safetensors").is_file()
    hetmem.release(ran["model"])


def test_no_name_of_a_profile_becomes_code(model: str) -> None:
    hostile = replace(planner.load_profile("h100"), name='"""\nraise SystemExit\n"""')
    Path("machine.json").write_text(hostile.to_json())
    plan(f"{model} {SMALL} --hardware machine.json --write train.py")
    tree = ast.parse(Path("train.py").read_text())
    assert hostile.name in (ast.get_docstring(tree, clean=False) or "")
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("--device-memory 100KiB --host-memory 1MiB", 2, "no program is written, as the model does not fit"),
        ("--device-memory 2MiB --host-memory 700KiB --nvme 1GiB", 2, "say where with --nvme-dir"),
    ],
)
def test_where_no_program_would_run_none_is_written(
    options: str, status: int, said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{model} {SMALL} {options} --write train.py") == status
    assert said in capsys.readouterr().err
    assert not Path("train.py").exists()


# ---- what is kept ------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans that are kept; the model has one layer, as only whether it is planned counts."""
    Path("config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    folder = tmp_path / "cache" / "hetmem" / "plans"
    monkeypatch.setattr(config, "plan_cache_directory", lambda: folder)
    return folder


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are planned, and not taken from what was kept."""
    made, real = [], planner.plan_within

    def seen(*of: Any, **how: Any) -> planner.Plan:
        found = real(*of, **how)
        made.append(found.model)
        return found

    monkeypatch.setattr(planner, "plan_within", seen)
    return made


def test_the_same_configuration_is_planned_once(
    model: str, kept: Path, planned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for folder in ("one", "other"):  # the name of the file is none of its content
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(Path("config.json").read_text())
        assert plan(f"--hf-config {folder}/config.json {SMALL}") == 0
        said.append(capsys.readouterr().out)
    assert len(planned) == 1
    assert said[0] == said[1]
    assert len(list(kept.iterdir())) == 1
    Path("config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 2}))
    plan(f"{model} {SMALL}")
    plan(f"{model} {SMALL} --batch 1")
    plan(f"{model} {SMALL} --hardware l4")
    assert len(planned) == 4


@pytest.mark.parametrize("content", ["", "{}", "\x00", None], ids=["empty", "other", "binary", "one digit"])
def test_a_damaged_plan_is_made_anew(content: str | None, model: str, kept: Path, planned: list[str]) -> None:
    plan(f"{model} {SMALL}")
    (file,) = kept.iterdir()
    good = file.read_text()
    file.write_text(good.replace("2", "3", 1) if content is None else content)
    plan(f"{model} {SMALL}")
    assert len(planned) == 2
    assert file.read_text() == good
    plan(f"{model} {SMALL}")
    assert len(planned) == 2


def test_what_others_may_write_is_not_used(model: str, kept: Path, planned: list[str]) -> None:
    plan(f"{model} {SMALL}")
    assert kept.stat().st_mode & 0o777 == 0o700
    kept.chmod(0o770)
    plan(f"{model} {SMALL}")
    assert len(planned) == 2


def test_a_bounded_number_is_kept_those_that_were_used_last(
    model: str, kept: Path, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    for batch in (1, 2):
        plan(f"{model} {SMALL} --batch {batch}")
        for file in kept.iterdir():
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
    plan(f"{model} {SMALL} --batch 1")  # is used again
    plan(f"{model} {SMALL} --batch 4")
    assert len(list(kept.iterdir())) == 2
    plan(f"{model} {SMALL} --batch 1")
    assert len(planned) == 3


# ---- what takes long ---------------------------------------------------------------------------------------------


def test_what_takes_long_says_what_it_is_doing(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "LONG_SECONDS", 0.0)
    plan(f"{model} {SMALL}")
    said = capsys.readouterr().err
    assert "hetmem plan: searching for the fastest way to run it …\n" in said
    monkeypatch.setattr(stages, "LONG_SECONDS", 300.0)
    plan(f"{model} {SMALL}")
    assert capsys.readouterr().err == ""
