"""The code on the pages runs as it is printed; what a page leaves open (a model, its batch) is given here."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import cli

ROOT = Path(__file__).parent.parent
WIDTH = 64
BUDGET = hetmem.Budget(device="4MiB", device_chunks="128KiB", host="8MiB")


def snippets(page: str, language: str = "python") -> list[str]:
    """The blocks of code in `language` on `page`, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


class Regression(nn.Module):
    """What `model(x, y)` of the pages is: a loss, where there is a target."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def given(*, managed: bool = True) -> dict[str, Any]:
    """The names that pages use and do not make: a model that was trained for two steps, or one of nobody's."""
    torch.manual_seed(0)
    model = Regression()
    names: dict[str, Any] = {"hetmem": hetmem, "torch": torch, "budget": BUDGET, "model": model, "step": 2}
    names |= {"x": torch.randn(4, WIDTH), "y": torch.randn(4, WIDTH), "config": None}
    if managed:
        hetmem.manage(model, BUDGET, device="sim")
        optimizer = names["optimizer"] = hetmem.AdamW(model.parameters(), lr=1e-3)
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            model(names["x"], names["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return names


def run(code: str, names: dict[str, Any]) -> str:
    """Run a block; what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- README ----------------------------------------------------------------------------------------------------------


def test_the_first_page_trains_and_resumes(tmp_path: Path) -> None:
    """Its sizes are those of a large machine, and its class has no layers: both are replaced."""
    use, resume = snippets("README.md")
    sizes = 'device="20GiB", host="100GiB", nvme="1TiB", nvme_dir="/mnt/nvme"'
    for printed, here in (
        (sizes, f"device='4MiB', host='8MiB', nvme='8MiB', nvme_dir={str(tmp_path)!r}"),
        ("class GPT(torch.nn.Module): ...", "class GPT(Regression): pass"),
    ):
        assert use.count(printed) == 1
        use = use.replace(printed, here)
    names = {**given(managed=False), "Regression": Regression}
    before = names["model"]
    run(use, names)
    assert names["model"] is not before
    assert hetmem.report(names["model"]).to_dict()["steps"] == 1
    assert Path("run.html").exists()
    scheduler = names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 1)
    run(resume, names)
    assert names["extra"] == {"scheduler": scheduler.state_dict()}


# ---- when losses differ ----------------------------------------------------------------------------------------------


def test_the_comparison_with_plain_torch_runs_and_finds_no_difference() -> None:
    (code,) = snippets("docs/debugging.md")
    assert run(code, {}) == "None\n"


# ---- coming from another library -------------------------------------------------------------------------------------


def test_the_lines_for_those_who_come_from_elsewhere_train() -> None:
    (code,) = snippets("docs/coming-from.md")
    names = given(managed=False)
    run(code.replace('device="20GiB", host="100GiB"', 'device="4MiB", host="8MiB"'), names)
    names["model"](names["x"].bfloat16(), names["y"].bfloat16()).backward()
    names["optimizer"].step()
    assert names["optimizer"].grad_norm > 0


def test_what_they_are_told_to_write_exists() -> None:
    """The last column of each table: our names, their keywords, and options of commands."""
    rows = [
        line for line in (ROOT / "docs/coming-from.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "
    ]
    assert len(rows) > 50
    code = " ".join(re.findall(r"`([^`]+)`", " ".join(row.split(" | ", 1)[1] for row in rows)))
    calls = re.findall(r"(hetmem\.\w+|Budget)\(([^()]*)\)", code)
    assert {name for name, _ in calls} >= {"hetmem.AdamW", "hetmem.manage", "Budget"}
    for name, given_to in calls:
        keywords = re.findall(r"(\w+)=", given_to)
        known = inspect.signature(getattr(hetmem, name.removeprefix("hetmem."))).parameters
        assert set(keywords) <= set(known), (name, given_to)
    for name in set(re.findall(r"hetmem\.(\w+)", code)):
        assert hasattr(hetmem, name), name


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_the_recipes_run_one_below_the_other() -> None:
    names: dict[str, Any] = {"__name__": "recipes"}
    printed = "".join(run(code, names) for code in snippets("docs/recipes.md"))
    assert printed.count("norm") >= 2
    for name in ("run.safetensors", "weights.safetensors", "weights.pt", "run.html"):
        assert Path(name).exists()
    kept = torch.load("weights.pt")
    plain = names["build"]()
    plain.load_state_dict(kept)
    safetensors = pytest.importorskip("safetensors.torch")
    assert safetensors.load_model(names["build"](), "weights.safetensors") == (set(), [])
    assert all(torch.equal(value, kept[name]) for name, value in safetensors.load_file("weights.safetensors").items())
    assert names["extra"]["step"] == 2


# ---- optimizers, checkpoints, the report -----------------------------------------------------------------------------


def test_the_page_of_optimizers_makes_them() -> None:
    made, scaled, unmanaged = snippets("docs/optimizer.md")
    for line in made.splitlines():
        names = given()
        run(line, names)
        names["model"](names["x"], names["y"]).backward()
        names["optimizer"].step()
    names = given()
    run(scaled, names)
    assert names["optimizer"].loss_scale.value == 65536
    names = given(managed=False)
    run(unmanaged.replace("/mnt/nvme", ".").replace("100GiB", "8MiB").replace("1TiB", "8MiB"), names)
    names["model"](names["x"], names["y"]).backward()
    names["optimizer"].step()
    assert sum(names["optimizer"].memory_bytes().values()) > 0


def test_the_page_of_checkpoints_saves_and_loads(tmp_path: Path) -> None:
    resumed, behind, _, exported = snippets("docs/checkpoints.md")
    names = given()
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    run(resumed, names)
    assert names["extra"]["step"] == 2
    assert all(map(torch.equal, before, names["model"].parameters()))
    run(behind, names | {"folder": tmp_path, "train_step": lambda: names["model"](names["x"], names["y"])})
    assert (tmp_path / "run-2.safetensors").exists()
    loaded: list[str] = []
    names["engine"] = Namespace(load=lambda name, tensor: loaded.append(name))
    run(exported, names)
    assert loaded == [*names["model"].state_dict()]


def test_the_page_of_the_report_saves_it_in_three_ways() -> None:
    (code,) = snippets("docs/report.md")
    assert "host_to_device" in run(code, given())
    assert {path.name for path in Path().iterdir()} == {"run.html", "run.json", "run.trace.json"}


# ---- models of Hugging Face ------------------------------------------------------------------------------------------


def llama(directory: str) -> Any:
    """A tiny one, saved to `directory`."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.initialization")  # since 5
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(("page", "index"), [("docs/checkpoints.md", 2), ("docs/transformers.md", 0)])
def test_a_pretrained_model_is_loaded_as_the_pages_say(page: str, index: int) -> None:
    transformers = pytest.importorskip("transformers")
    directory = "llama-3-70b"
    model = llama(directory)
    names = {**given(managed=False), "transformers": transformers, "config": model.config, "directory": directory}
    run(snippets(page)[index], names)
    loaded = names["model"]
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    hetmem.report(loaded)  # it is managed


def test_the_trainer_trains_as_the_page_says() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    _, trains = snippets("docs/transformers.md")
    tokens = torch.randint(3, 32, (8,), generator=torch.Generator().manual_seed(1))
    names = {**given(managed=False), "transformers": transformers, "model": llama("model")}
    names["data"] = [{"input_ids": tokens, "labels": tokens}] * 2
    printed = 'TrainingArguments("out")'
    assert trains.count(printed) == 1
    quiet = 'TrainingArguments("out", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)'
    run(trains.replace(printed, quiet), names)
    assert hetmem.report(names["model"]).to_dict()["steps"] == 2


# ---- commands --------------------------------------------------------------------------------------------------------


def commands(page: str) -> list[str]:
    """The lines that call hetmem."""
    joined = "".join(snippets(page, "sh")).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.startswith("hetmem ")]


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("README.md", 2),
        ("docs/optimizer.md", 1),
        ("docs/recipes.md", 5),
        ("docs/laptop.md", 2),
        ("docs/long-context.md", 1),
    ],
    ids=str,
)
def test_every_command_on_the_pages_is_one(page: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes all of its words; what they do is in other tests."""
    called: list[Namespace] = []

    def note(options: Namespace) -> int:
        called.append(options)
        return 0

    monkeypatch.setattr(cli, "SUBCOMMANDS", tuple(replace(each, run=note) for each in cli.SUBCOMMANDS))
    found = commands(page)
    assert [cli.main(shlex.split(line, comments=True)[1:]) for line in found] == [0] * count
    assert len(called) == count


# ---- what the page of optimizers says of a step that is left out -----------------------------------------------------

LEFT_OUT: dict[str, tuple[dict[str, Any], bool]] = {
    "off": ({}, False),
    "norm": ({"overlap": "backward", "max_grad_norm": 1.0}, False),
    "norm, forward": ({"overlap": "forward", "max_grad_norm": 1.0}, False),
    "scale": ({"overlap": "backward", "loss_scale": 4.0}, False),
    "backward": ({"overlap": "backward"}, True),
}


@pytest.mark.parametrize(("options", "updated"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_step_that_is_left_out_updates_what_the_page_says(options: dict[str, Any], updated: bool) -> None:
    names = given(managed=False)
    model = hetmem.manage(names["model"], BUDGET, device="sim", chunk_bytes="16KiB")
    optimizer = hetmem.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.scale(model(names["x"], names["y"])).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.scale(model(names["x"], names["y"])).backward()
    if updated:
        optimizer.forget_step()
    optimizer.zero_grad()
    assert all(map(torch.equal, before, model.parameters())) is not updated
    optimizer.scale(model(names["x"], names["y"])).backward()  # and the next one goes on
    optimizer.step()
