"""The code of docs/integrations.md runs as it is printed, with the real frameworks."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem.errors import ManageError
from hetmem.integrations import for_trainer, layer_by_layer
from tests.test_docs_code import given, llama, run, snippets

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

TRAINER, TRL, GRPO, ACCELERATE, LIGHTNING, LOGGERS = snippets("docs/integrations.md")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())


def names_for(*modules: str) -> dict[str, Any]:
    """What the page leaves open: a model, its batches, and the frameworks under their names."""
    names = given(managed=False)
    data = torch.utils.data.TensorDataset(torch.randn(12, 64), torch.randn(12, 64))
    names["loader"] = torch.utils.data.DataLoader(data, batch_size=4)
    return names | {name: pytest.importorskip(name) for name in modules}


BUDGET = hetmem.Budget(device="1MiB", device_chunks="256KiB", host="8MiB")


def with_little_room() -> torch.nn.Module:
    """A model for `BUDGET`, which has room for 128 rows of 64 numbers and not for 256."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def logged(code: str) -> str:
    """With a log that a test can read."""
    assert code.count("max_steps=3)") == 1
    return code.replace("max_steps=3)", "max_steps=3, report_to=['tensorboard'])")


def test_the_trainer() -> None:
    names = names_for("transformers", "accelerate", "tensorboard") | {"model": llama("model")}
    tokens = torch.randint(3, 32, (8,))
    names["data"] = [{"input_ids": tokens, "labels": tokens}] * 8
    run(logged(TRAINER), names)
    assert hetmem.report(names["model"]).to_dict()["steps"] == 3
    assert Path("run.html").exists()
    assert [*Path("out/runs/hetmem").glob("events*")]


def test_a_trainer_of_trl() -> None:
    names = names_for("transformers", "trl", "datasets") | {"model": llama("model")}
    names["budget"] = hetmem.Budget(device="16MiB", device_chunks="128KiB", host="8MiB")  # its loss takes 6 MiB
    names["tokenizer"] = words()
    names["data"] = names["datasets"].Dataset.from_dict({"text": ["a b a b b a"] * 24})
    run(TRL, names)
    assert hetmem.report(names["model"]).to_dict()["steps"] == 3
    assert Path("run.html").exists()


class Engine:
    """Generates by a model of transformers of its own, while the other one is parked."""

    def __init__(self, model: Any, trained: Any, tokenizer: Any) -> None:
        self._model, self._trained, self._tokenizer = model.to(torch.bfloat16).eval(), trained, tokenizer
        self._weights = dict(model.named_parameters())
        self.awake, self.loaded, self.rollouts = False, 0, 0

    def wake_up(self) -> None:
        self.awake = True

    def sleep(self) -> None:
        self.awake = False

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor) -> None:
        self._weights[name].copy_(tensor)
        self.loaded += 1

    def generate(self, prompts: list[str]) -> dict[str, list[Any]]:
        assert self.awake
        with pytest.raises(ManageError, match="parked"):
            self._trained(torch.ones(1, 1, dtype=torch.long))
        self.rollouts += 1
        given = [self._tokenizer(prompt)["input_ids"] for prompt in prompts]
        made = [self._model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=True)[0] for ids in given]
        completions = [found[len(ids) :].tolist() for ids, found in zip(given, made, strict=True)]
        told = [[0.0] * len(each) for each in completions]
        return {"prompt_ids": given, "completion_ids": completions, "logprobs": told}


def test_grpo_of_trl_on_one_gpu() -> None:
    names = names_for("transformers", "trl", "datasets") | {"model": llama("model")}
    names["budget"] = hetmem.Budget(device="16MiB", device_chunks="128KiB", host="8MiB")
    names["tokenizer"] = words()
    names["data"] = names["datasets"].Dataset.from_dict({"prompt": ["a b a b b a"] * 24})
    names["reward"] = lambda completions, **_: [float(len(each)) + at for at, each in enumerate(completions)]
    engine = names["engine"] = Engine(copy.deepcopy(names["model"]), names["model"], names["tokenizer"])
    run(GRPO, names)
    assert hetmem.report(names["model"]).to_dict()["steps"] == 2
    assert engine.rollouts == hetmem.report(names["model"]).to_dict()["between_steps"]["parks"] > 0
    assert engine.loaded == engine.rollouts * len([*names["model"].parameters()])


def test_accelerate() -> None:
    names = names_for("accelerate", "tensorboard")
    run(ACCELERATE, names)
    assert hetmem.report(names["model"]).to_dict()["steps"] == 3
    assert [*Path("out/run").glob("events*")]


def test_lightning() -> None:
    names = names_for("lightning")
    printed = "lightning.Trainer("
    assert LIGHTNING.count(printed) == 1
    run(LIGHTNING.replace(printed, f"{printed}accelerator='cpu', "), names)
    assert hetmem.report(names["training"].model).to_dict()["steps"] == 3
    assert Path("run.html").exists()
    written = b"".join(path.read_bytes() for path in Path("lightning_logs").rglob("*") if path.is_file())
    assert b"hetmem/device_peak_bytes" in written


def test_lightning_layer_by_layer() -> None:
    """With the weights of a loop over plain torch."""
    names = names_for("lightning") | {"m": 2, "rows": 2, "collate": torch.utils.data.default_collate}
    plain = copy.deepcopy(names["model"])
    x, y = torch.randn(2, 12, 64)
    names["data"] = torch.utils.data.TensorDataset(x, y)
    code, printed = snippets("docs/large-steps.md")[2], "lightning.Trainer("
    assert code.count(printed) == 1
    run(code.replace(printed, f"{printed}accelerator='cpu', "), names)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for batches in torch.arange(12).view(3, 2, 2):
        for batch in batches:
            (plain(x[batch], y[batch]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    managed = names["training"].model
    assert hetmem.report(managed).to_dict()["steps"] == 3
    for one, other in zip(plain.parameters(), managed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trainer_of_trl_layer_by_layer() -> None:
    """With the bits of the same one without."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": [[1 + at % 7, *range(2, 3 + at % 5)] for at in range(24)]})
    trained = []
    for kind in (trl.SFTTrainer, layer_by_layer(trl.SFTTrainer)):
        torch.manual_seed(0)
        model = hetmem.manage(llama("model"), hetmem.Budget(device="32MiB", device_chunks="128KiB", host="8MiB"))
        asked: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
        asked |= {"bf16": False, "use_cpu": True, "report_to": "none", "logging_steps": 1, "shuffle_dataset": False}
        arguments = trl.SFTConfig(f"out{len(trained)}", **asked)
        trainer = kind(model, arguments, train_dataset=data, processing_class=words(), **for_trainer(arguments))
        trainer.train()
        logs = [{name: each.get(name) for name in ("loss", "grad_norm")} for each in trainer.state.log_history]
        trained.append((logs, [parameter.detach().clone() for parameter in model.parameters()]))
        hetmem.release(model)
    (logs, weights), (ours, managed) = trained
    assert logs == ours
    assert all(map(torch.equal, weights, managed))


def words() -> Any:
    """A tokenizer of four words."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>")


def test_every_logger_gets_the_numbers() -> None:
    names = names_for("tensorboard", "wandb", "mlflow") | given()
    importlib.import_module("torch.utils.tensorboard")
    with names["wandb"].init(dir=".", mode="offline"), names["mlflow"].start_run() as run_of_mlflow:
        assert run(LOGGERS, names).startswith("2 ")
        assert names["wandb"].run.step == 2
    kept = names["mlflow"].get_run(run_of_mlflow.info.run_id).data.metrics
    assert kept["hetmem/device_peak_bytes"] > 0
    assert [*Path("out").glob("events*")]


def test_the_batch_size_finder_of_accelerate() -> None:
    utilities = pytest.importorskip("accelerate.utils")
    model, tried = hetmem.manage(with_little_room(), BUDGET, device="sim"), list[int]()
    optimizer = hetmem.AdamW(model.parameters())

    @utilities.find_executable_batch_size(starting_batch_size=2048)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        for _ in range(2):
            model(torch.ones(batch_size, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    assert 200 < train() < tried[-2] < 300


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_finder_of_lightning(mode: str) -> None:
    lightning = pytest.importorskip("lightning")
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64))

    class Training(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model = hetmem.manage(with_little_room(), BUDGET, device="sim")

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(*batch).square().mean()

        def configure_optimizers(self) -> Any:
            return hetmem.AdamW(self.model.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    training = Training()
    before = {name: value.clone() for name, value in training.state_dict().items()}
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    tuner = lightning.pytorch.tuner.Tuner(trainer)
    found = tuner.scale_batch_size(training, mode=mode, steps_per_trial=2, init_val=64)
    assert found == training.batch_size == 128 if mode == "power" else 200 < found < 256
    assert all(torch.equal(value, before[name]) for name, value in training.state_dict().items())
    trainer.fit(training)
    assert hetmem.report(training.model).to_dict()["steps"] > 2
