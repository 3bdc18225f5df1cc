"""What `hetmem plan` says, as a user types it: what is pasted runs within what was planned, and nothing is advised that
the machine has not."""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

import hetmem
from hetmem.base.hardware import HardwareProfile, ThreadCosts
from hetmem.base.units import MIB, parse_size
from hetmem.cli import main
from hetmem.planner import Plan, PlanError, TracedCall, hugging_face_call, known_profiles, load_profile, with_adapters
from hetmem.planner.plan import KEPT, LOANED
from tests.pairs import case

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 128}
SHAPES: dict[str, Any] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(vocab_size=512, num_key_value_heads=2, **SMALL),
    "BertForSequenceClassification": lambda: transformers.BertConfig(
        vocab_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL
    ),
    "ViTForImageClassification": lambda: transformers.ViTConfig(image_size=32, patch_size=8, **SMALL),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        vocab_size=512, d_model=64, d_ff=128, num_layers=3, num_heads=2, d_kv=32, decoder_start_token_id=0,
        dropout_rate=0.0,  # whose noise takes more on a processor than on the GPU that is planned
    ),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(
        vocab_size=512, num_key_value_heads=2, num_local_experts=4, **SMALL
    ),
    "WhisperForConditionalGeneration": lambda: transformers.WhisperConfig(
        d_model=64, vocab_size=512, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=1500,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
}  # fmt: skip


def config_file(name: str, directory: Path) -> Path:
    config = SHAPES[name]()
    config.architectures = [name]
    config.save_pretrained(directory)
    return directory / "config.json"


def typed(*words: object) -> int:
    """Plan; a profile among the words is put into a file, whose path it becomes."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        for profile in (word for word in words if isinstance(word, HardwareProfile)):
            file.write(profile.to_json())
            file.flush()
        return main(["plan", *(file.name if isinstance(word, HardwareProfile) else str(word) for word in words)])


def with_memory(profile: HardwareProfile, device: int, host: int | None = None) -> HardwareProfile:
    return replace(
        profile,
        device=replace(profile.device, memory_bytes=device),
        host=replace(profile.host, memory_bytes=host or profile.host.memory_bytes),
    )


def pasted(out: str) -> str:
    return textwrap.dedent(out[out.index("):\n", out.index("paste (")) + 3 :])


SMALL_HOST = ["--device-memory", "3MiB", "--host-memory", "64MiB"]
H100 = load_profile("h100")
FREE_THREAD = replace(H100, thread=ThreadCosts())  # or the thread that launches binds, as models are tiny
SLOW = replace(FREE_THREAD, device=replace(H100.device, matrix_flops={**H100.device.matrix_flops, "bfloat16": 1e10}))
MOVED = ["--activations", "auto", "--hardware", SLOW]
"""Activations move, as computing them again would take longer."""
NVME = ["--device-memory", "1MiB", "--nvme", "64MiB", "--chunk-bytes", "16KiB"]
ALL = pytest.mark.nightly


@pytest.mark.filterwarnings("default::FutureWarning")  # of peft, and of older names in transformers
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LlamaForCausalLM", ["--device-memory", "2MiB", "--host-memory", "64MiB", "--precision", "float32"]),
        ("LlamaForCausalLM", ["--overlap", "backward", *SMALL_HOST]),
        ("LlamaForCausalLM", ["--lora", 4, *SMALL_HOST]),
        ("ViTForImageClassification", []),
        pytest.param("BertForSequenceClassification", SMALL_HOST, marks=ALL),
        pytest.param("T5ForConditionalGeneration", SMALL_HOST, marks=ALL),
        pytest.param("MixtralForCausalLM", [*SMALL_HOST, "--precision", "float32"], marks=ALL),
        pytest.param("WhisperForConditionalGeneration", ["--device-memory", "24MiB"], marks=ALL),
        pytest.param("LlamaForCausalLM", ["--moments", "8bit", *SMALL_HOST], marks=ALL),
        pytest.param("LlamaForCausalLM", ["--stochastic-rounding", *SMALL_HOST], marks=ALL),
        pytest.param("LlamaForCausalLM", ["--micro-batches", 2, *SMALL_HOST], marks=ALL),
        # of 70 B on 80 and 512 GiB: the device holds a fourteenth of 16 bytes a parameter, host memory half of it
        pytest.param("LlamaForCausalLM", [*NVME, "--host-memory", "1280KiB"], marks=ALL),
        pytest.param("LlamaForCausalLM", [*NVME, "--host-memory", "1MiB", "--moments", "8bit"], marks=ALL),
        pytest.param("LlamaForCausalLM", [*MOVED, *NVME, "--host-memory", "2MiB"], marks=ALL),
        pytest.param("BertForSequenceClassification", [*MOVED, "--device-memory", "600KiB"], marks=ALL),
        pytest.param("T5ForConditionalGeneration", [*MOVED, "--device-memory", "700KiB"], marks=ALL),
        pytest.param("WhisperForConditionalGeneration", [*MOVED, "--device-memory", "12MiB"], marks=ALL),
    ],
)
def test_what_is_pasted_runs_within_the_planned_peaks(
    name: str, words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the budget is what is needed, not all that the machine has."""
    saved, file = tmp_path / "plan.json", config_file(name, tmp_path)
    asked = ["--batch", 2, "--sequence", 32, "--nvme-dir", tmp_path, *words, "-o", saved]
    typed("--hf-config", file, *asked)
    out = capsys.readouterr().out
    plan = Plan.load(saved)
    for tier, share in (("host", 1.05), ("nvme", 1.05), ("device", 1 / (1 - 0.05 - 1 / 16 - 0.03))):
        before = "moments" in plan.optimizer and tier != "device"  # `manage` makes room for larger ones and for copies
        if (peak := plan.peak_bytes[tier]) and not before:
            spare = 1 * MIB if tier == "nvme" else 0  # too little for a chunk, which may not fill the other tier
            assert plan.budget_bytes[tier] <= share * peak + MIB + spare, tier
    assert ("mixed_precision=torch.bfloat16" in out) == (plan.mixed_precision is not None)
    code = pasted(out).replace(f"{name}(...)", f"{name}(config)")
    config = SHAPES[name]()
    scope: dict[str, Any] = {"hetmem": hetmem, "torch": torch, "config": config, name: getattr(transformers, name)}
    if plan.setup:
        scope["model"] = scope[name](config)
    if "--lora" in words:
        scope |= {"peft": pytest.importorskip("peft"), "model": scope["model"].bfloat16()}
    exec(code, scope)
    model, optimizer = scope["model"], scope["optimizer"]
    batch = {
        key: torch.ones(tensor.shape, dtype=tensor.dtype)
        for key, tensor in hugging_face_call(file, 2, 32, None).batch.items()
    }
    for _ in range(3):
        for _ in range(plan.micro_batches):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tiers = hetmem.report(model).to_dict()["tiers"]
    for tier in ("host", "nvme"):
        lent = "activations" in plan.role_bytes[tier]  # in pages, with gaps between them
        assert tiers[tier]["peak_bytes"] <= plan.peak_bytes[tier] + lent * 16 * 4096, tier
        assert tiers[tier]["peak_bytes"] <= plan.budget_bytes[tier], tier
        shared = {"staging", "activations"} | (
            {"grad", LOANED} if "overlap" in plan.optimizer else set()
        )  # no chunk's own
        roles = {role: nbytes for role, nbytes in plan.role_bytes[tier].items() if role not in shared}
        assert KEPT in roles or tiers[tier]["homes"] == roles, tier
    assert tiers["device"]["peak_bytes"] <= plan.budget_bytes["device"]
    hetmem.release(model)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        pytest.param("T5ForConditionalGeneration", [], "T5ForConditionalGeneration: ", marks=pytest.mark.nightly),
        ("MixtralForCausalLM", ["--precision", "float32"], "as its weights are"),
        pytest.param(
            "WhisperForConditionalGeneration",
            ["--input", "input_features=1x80x3000:float32"],
            "fits",
            marks=pytest.mark.nightly,
        ),
        ("LlamaForCausalLM", ["--lora", 4], 'peft.LoraConfig(r=4, target_modules="all-linear")'),
        ("LlamaForCausalLM", ["--inference"], "model.eval().requires_grad_(False)"),
        ("LlamaForCausalLM", ["--moments", "8bit", "--device-memory", "2MiB"], 'moments="8bit"'),
        ("LlamaForCausalLM", ["--stochastic-rounding", "--device-memory", "2MiB"], "model = model.bfloat16()"),
        ("LlamaForCausalLM", ["--stochastic-rounding", "--device-memory", "2MiB"], "stochastic_rounding=True"),
    ],
)
def test_what_a_configuration_names_is_planned(
    name: str, words: list[Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("--hf-config", config_file(name, tmp_path), "--sequence", 32, *words) == 0
    assert said in capsys.readouterr().out


def test_a_missing_file_is_told_of_before_anything_is_imported_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--hf-config", "nowhere.json") == 2
    assert "no such file: nowhere.json" in capsys.readouterr().err


def test_logits_that_fill_the_device_are_named_with_what_avoids_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.LlamaConfig(vocab_size=32768, num_key_value_heads=2, **SMALL)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)

    def said(*words: object) -> str:
        typed("--hf-config", *words)
        return " ".join(capsys.readouterr().out.split())

    file, advice = tmp_path / "config.json", "hetmem.chunked_loss(model) in place of the model's own loss avoids them"
    out = said(file, "--sequence", 64)
    assert "64x32768" in out and advice in out
    out = said(config_file("ViTForImageClassification", tmp_path / "vit"))
    assert "logits and their gradients" not in out and "changes the mathematics" not in out
    assert advice not in said(file, "--sequence", 64, "--inference")  # which has no loss
    out = said(file, "--sequence", 64, "--loss", "chunked")
    assert advice not in out and "loss_of = hetmem.chunked_loss(model)" in out


def test_a_chunked_loss_is_planned_and_is_the_way_out_where_logits_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=2048, num_key_value_heads=2, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    words = ["--hf-config", tmp_path / "config.json", "--sequence", 4096, "--precision", "float32"]
    words += ["--device-memory", "80MiB", "--host-memory", "64MiB"]
    assert typed(*words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "cheapest: take hetmem.chunked_loss(model), equal but for rounding (--loss chunked): then it fits" in said
    assert typed(*words, "--loss", "chunked", "-o", tmp_path / "plan.json") == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.loss == "chunked" and plan.activation_bytes["as written"] < 80 << 20
    torch.manual_seed(0)
    model = hetmem.manage(transformers.LlamaForCausalLM(config), plan=plan, device="sim")
    optimizer, loss_of = hetmem.AdamW(model.parameters()), hetmem.chunked_loss(model)
    tokens = torch.randint(2048, (1, 4096))
    for _ in range(2):
        loss_of(input_ids=tokens, labels=tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = hetmem.report(model).to_dict()
    assert 0.9 < report["tiers"]["device"]["peak_bytes"] / plan.peak_bytes["device"] <= 1.0
    assert report["loss"] == "chunks of 1024 tokens, by torch's operators"


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.zeros(1, 8, dtype=torch.long),), "takes a batch that is a dict of keywords, with labels"),
        ({"input": torch.zeros(1, 8)}, "chunked_loss knows the loss of causal language models"),
    ],
)
def test_a_chunked_loss_of_another_model_is_not_planned(batch: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        hetmem.plan(lambda: torch.nn.Linear(8, 8), batch, loss="chunked")


def test_nothing_is_advised_that_the_machine_has_not_and_smaller_states_are_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file("LlamaForCausalLM", tmp_path)
    machine = ["--hardware", with_memory(H100, MIB, MIB), "--chunk-bytes", "64KiB"]
    assert typed("--hf-config", file, "--sequence", 32, "--precision", "float32", *machine) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "raise Budget(" not in out
    states = re.search(r"the states take (\S+ \S+) beside", out)
    assert states and out.count(f"states {states[1]}") == 1  # in the table, the same number
    room = ["--host-memory", "1600KiB", "--device-memory", "1MiB", "--chunk-bytes", "16KiB"]
    assert typed("--hf-config", file, "--sequence", 32, *room) == 1
    out = capsys.readouterr().out
    choices = out[out.index("changes the mathematics:") :]
    assert 'hetmem.AdamW(stochastic_rounding=True, overlap="backward")' in " ".join(choices.split())


@pytest.mark.nightly
@pytest.mark.parametrize("machine", known_profiles())
@pytest.mark.parametrize("name", SHAPES)
def test_no_advice_names_memory_that_the_machine_has_not(
    name: str, machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with more or less memory than the model needs, of which less than the half is asked for."""
    file, asked = config_file(name, tmp_path), ["--batch", 2, "--sequence", 32]
    typed("--hf-config", file, *asked, "--hardware", machine, "--device-memory", "1GiB", "-o", tmp_path / "plan.json")
    peaks, told = Plan.load(tmp_path / "plan.json").activation_bytes, 0
    states = 16 * Plan.load(tmp_path / "plan.json").parameters
    capsys.readouterr()
    for there, part in product((0.5, 1.5), repeat=2):
        has = {"device": max(MIB, int(there * max(peaks.values()))), "host": max(MIB, int(part * states))}
        scaled = ["--hardware", with_memory(load_profile(machine), has["device"], has["host"])]
        given = {tier: int(0.45 * nbytes) for tier, nbytes in has.items()}
        sizes = [word for tier, nbytes in given.items() for word in (f"--{tier}-memory", nbytes)]
        typed("--hf-config", file, *asked, *scaled, *sizes)
        out = " ".join(capsys.readouterr().out.split())
        raised = re.findall(r"Budget\((device|host)=…\) by (\S+ \w+)", out)
        named = [(tier, given[tier] + parse_size(more)) for tier, more in raised]
        for budget in re.findall(r"Budget\(([^)]*)\)", out):
            sizes_of = re.findall(r'(device|host|device_chunks)="?(\d+(?:[KMGT]iB)?)', budget)
            named += [(tier.removesuffix("_chunks"), parse_size(size)) for tier, size in sizes_of]
        for tier, nbytes in named:
            assert nbytes <= 1.01 * has[tier], (tier, out)  # what is asked for is rounded up
        told += len(named)
    assert told


def test_the_life_of_a_drive_is_said_in_days(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file("LlamaForCausalLM", tmp_path)
    room = ["--device-memory", "1MiB", "--host-memory", "1MiB", "--nvme", "64MiB", "--chunk-bytes", "32KiB"]
    assert typed("--hf-config", file, "--sequence", 16, "--precision", "float32", *room, "--hardware", FREE_THREAD) == 0
    out = " ".join(capsys.readouterr().out.split())
    said = re.search(r"(\S+) (\S+) written a step, .* rated for 600 full writes lasts (\S+) days", out)
    took = re.search(r" step: (\S+) ms, ", out)
    assert said and took and said[2] == "MiB"
    writes = float(said[1]) * 86_400 / (float(took[1]) / 1000)
    assert float(said[3]) == pytest.approx(600 * 64 / writes, rel=0.05, abs=0.06)
    pasted_ms = re.search(r"paste \((\S+) ms a step, a drive lasts (\S+) days", out)
    assert pasted_ms and float(pasted_ms[2]) <= float(said[3])  # gradients are streamed: fewer writes, shorter steps
    choices = re.findall(r"\(--[^)]*\): (\S+) (\S+) a step", out)
    assert choices and pasted_ms
    assert all(unit == "µs" or float(number) < float(pasted_ms[1]) for number, unit in choices)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--device-memory", "1664KiB", "--host-memory", "3000KiB"], ['overlap="backward"']),
        (["--device-memory", "1664KiB", "--host-memory", "3000KiB", "--nvme", "1GiB"], ['overlap="backward"']),
        (["--device-memory", "3MiB", "--host-memory", "64MiB", "--nvme", "1GiB"], []),
        (["--device-memory", "2MiB", "--host-memory", "64MiB", "--batch", 4], ["every layer checkpointed"]),
    ],
)
def test_what_fits_with_options_of_the_same_bits_fits_and_needs_no_drive(
    words: list[Any], changes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the headline and by the exit code. A drive came first, and a model that fitted beside a block to paste
    did not fit."""
    file, saved = config_file("LlamaForCausalLM", tmp_path), tmp_path / "plan.json"
    asked = ["--sequence", 64, "--precision", "float32", "--chunk-bytes", "32KiB", "--hardware", FREE_THREAD]
    assert typed("--hf-config", file, *asked, *words, "-o", saved) == 0
    out = capsys.readouterr().out
    plan = Plan.load(saved)
    assert plan.fits and not plan.peak_bytes["nvme"]
    said = " ".join(out.split())
    assert (f"fits, with the same bits, with {' and '.join(changes)}" in said) == bool(changes)
    assert ("as asked, " in said) == bool(changes)
    assert ("must not call clip_grad_norm_ or read p.grad" in said) == ('overlap="backward"' in pasted(out))
    assert all(len(line) <= 80 for line in out[: out.index("paste (")].splitlines())


REPLAYED = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 42, "vocab_size": 256000,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "words", "host"),
    [
        ("gemma2", ["--hardware", "rtx4090", "--host-memory", "120GiB", "--nvme", "1TiB"], 120),
        ("mixtral", ["--hardware", "h200"], 512),
    ],
)
def test_models_that_were_given_a_drive_fit_without(
    name: str, words: list[Any], host: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma-2 of 9 B got one that "lasts 2.3 days", and Mixtral was told of 227 GiB on one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **REPLAYED[name]}))
    assert typed("--hf-config", tmp_path / "config.json", *words, "-o", tmp_path / "plan.json") == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert 'overlap="backward"' in plan.changes
    assert not plan.peak_bytes["nvme"] and plan.peak_bytes["host"] < host << 30
    assert plan.step_seconds and plan.step_seconds < 6.1
    out = capsys.readouterr().out
    assert "NVMe directory" not in out and "a drive" not in out  # that saves go at "the drive's rate" is said of any


def test_a_card_is_never_given_more_than_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 24 GB programs get 23.5 GiB, and who says 24GiB means all of it."""
    file = config_file("LlamaForCausalLM", tmp_path)
    all_of_it = ["--hardware", with_memory(load_profile("rtx4090"), 3 * MIB), "--host-memory", "64MiB"]
    typed("--hf-config", file, "--sequence", 32, *all_of_it)
    usual = capsys.readouterr()
    typed("--hf-config", file, "--sequence", 32, *all_of_it, "--device-memory", "4MiB")
    asked = capsys.readouterr()
    assert asked.out == usual.out
    assert "has 3.00 MiB for programs: planned with that, not 4.00 MiB" in asked.err


@pytest.mark.parametrize("name", [case("T5ForConditionalGeneration", nightly=True), "LlamaForCausalLM"])
def test_what_the_device_is_missing_is_no_more_than_it_needs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With so much it fits, and with a tenth less it does not: it was once what keeps the whole model there."""
    file = config_file(name, tmp_path)

    def missing(mib: float) -> float:
        words = ["--hardware", with_memory(H100, int(mib * MIB)), "--batch", 4, "--precision", "float32"]
        typed("--hf-config", file, "--sequence", 64, *words)
        found = re.search(r"missing: (\S+) (MiB|KiB) on device", " ".join(capsys.readouterr().out.split()))
        return float(found[1]) / (1 if found[2] == "MiB" else 1024) if found else 0.0

    more = missing(2)
    assert more
    assert not missing(2 + more + 0.01)
    assert missing(0.9 * (2 + more))


def test_the_plan_that_is_saved_is_the_one_that_is_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, saved = config_file("LlamaForCausalLM", tmp_path), tmp_path / "plan.json"
    room = ["--device-memory", "3MiB", "--host-memory", "16MiB", "--precision", "float32", "--sequence", 32]
    machine = replace(FREE_THREAD, host=replace(H100.host, update_bytes_per_second=2e8))
    typed("--hf-config", file, *room, "--hardware", machine, "-o", saved)
    out = capsys.readouterr().out
    plan = Plan.load(saved)
    assert plan.combined is None
    assert "all with the same bits" in out
    assert pasted(out).strip() == plan.code().strip()
    assert plan.constructor in pasted(out)


@pytest.mark.each
@pytest.mark.parametrize(
    ("name", "host"), [("LlamaForCausalLM", "768KiB"), ("LlamaForCausalLM", "1MiB"), ("MixtralForCausalLM", "1MiB")]
)
def test_of_a_large_drive_no_more_is_told_than_is_needed(
    name: str, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The experts of a layer are one tensor in transformers: staging of its four roles takes 1 MiB."""
    room = ["--device-memory", "1MiB", "--host-memory", host, "--nvme", "1TB", "--precision", "float32"]
    assert typed("--hf-config", config_file(name, tmp_path), "--sequence", 16, *room) == 0
    told = re.search(r' nvme="(\d+)MiB"', capsys.readouterr().out)
    assert told and int(told[1]) < 16


def test_inference_counts_no_loss_no_states_and_nothing_for_a_backward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, found = config_file("BertForSequenceClassification", tmp_path), []
    for words in ([], ["--inference"]):
        typed("--hf-config", file, "--batch", 8, "--sequence", 64, *SMALL_HOST, *words, "-o", tmp_path / "plan.json")
        found.append((Plan.load(tmp_path / "plan.json"), capsys.readouterr().out))
    (trained, _), (plan, out) = found
    assert "log_softmax" not in out
    assert "model = model.bfloat16()" in out
    assert plan.peak_bytes["host"] < 0.6 * trained.role_bytes["host"]["param"]
    assert "dropout" not in out
    assert 2 * plan.activation_bytes["as written"] < trained.activation_bytes["as written"]
    assert set(plan.role_bytes["host"]) <= {"param", "compute", "staging"}


@pytest.mark.filterwarnings("default::FutureWarning")
def test_adapters_are_those_that_peft_makes() -> None:
    peft = pytest.importorskip("peft")

    def build() -> torch.nn.Module:
        model: torch.nn.Module = transformers.LlamaForCausalLM(SHAPES["LlamaForCausalLM"]())
        return model

    def sizes(model: torch.nn.Module) -> list[tuple[bool, tuple[int, ...]]]:
        return sorted((parameter.requires_grad, tuple(parameter.shape)) for parameter in model.parameters())

    theirs = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules="all-linear"))
    assert sizes(with_adapters(TracedCall(build, None), 4).build_model()) == sizes(theirs)


def test_a_model_that_leaves_no_room_for_activations_is_streamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its states alone take less than half of the device."""
    file = config_file("WhisperForConditionalGeneration", tmp_path)
    assert typed("--hf-config", file, "--device-memory", "17MiB", "--batch", 2, "--sequence", 32) == 0
    assert "device_chunks=" in pasted(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "advice"), [([], "adapters of rank 16"), (["--lora", 4], ""), (["--stochastic-rounding"], "")]
)
def test_adapters_are_a_choice_where_the_states_have_no_room(
    words: list[Any], advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = ["--host-memory", "1200KiB" if not words else "300KiB", "--device-memory", "1MiB", "--chunk-bytes", "16KiB"]
    assert typed("--hf-config", config_file("LlamaForCausalLM", tmp_path), "--sequence", 32, *room, *words) == 1
    out = capsys.readouterr().out
    assert advice in out
    assert advice or "adapters of rank" not in out
