"""The command line: what it prints, what it saves, and one line for whatever is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

import hetmem
from hetmem import planner
from hetmem.base.hardware import HardwareProfile
from hetmem.cli import SUBCOMMANDS, main
from tests.forked import Forks

MODEL = "tests.test_planning:GPT"
SMALL = ["plan", MODEL, "--input", "2x32", "--device-memory", "2MiB", "--host-memory", "16MiB"]


def test_plan_prints_the_plan_and_saves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "-o", str(tmp_path / "plan.json")]) == 0
    plan = planner.Plan.load(tmp_path / "plan.json")
    assert plan.fits
    assert plan.constructor in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--input", "2x32", "--device-memory", "1MiB", "--host-memory", "1MiB"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hetmem {hetmem.__version__}\n"


def test_the_help_names_every_shipped_profile(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"({', '.join(planner.known_profiles())})" in text
    assert f"default: {planner.DEFAULT_HARDWARE} " in text


def scores() -> torch.nn.Module:
    return torch.nn.Linear(64, 8)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_a_model_without_a_loss_is_planned_with_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tests.test_cli:scores", "--input", "2x64:float32", "--loss", "tests.test_cli:mean"]
    assert main(command) == 0
    assert "Linear: 520 parameters" in capsys.readouterr().out


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hetmem.tools.probe.probe", lambda *_, **__: pytest.fail("measured"))
    assert main(["probe", "-o", "no/such/machine.json"]) == 2
    assert "there is no directory no/such" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only way to end `hetmem top`."""

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    assert main(["top"]) == 130
    assert capsys.readouterr().err == ""


def test_top_takes_the_place_of_what_it_showed_in_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    main(["top"])
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    main(["top"])
    assert re.fullmatch(r"\x1b\[H([^\x1b]*\x1b\[K\n)+\x1b\[J\n", capsys.readouterr().out)


def test_a_hugging_face_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["plan", "--hf-config", str(tmp_path / "config.json"), "--batch", "2", "--sequence", "32"]
    assert main([*command, "--device-memory", "1GiB", "--host-memory", "1GiB", "--hardware", "l4"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "64 tokens a batch, L4, PCIe 4" in " ".join(out.split())


def test_a_machine_is_planned_for_by_the_figures_of_a_file(tmp_path: Path) -> None:
    h100 = planner.load_profile("h100")
    slow = replace(
        h100,
        host=replace(h100.host, update_bytes_per_second=1e6),
        thread=replace(h100.thread, update_seconds=0.0, chunk_seconds=0.0, queue_seconds=0.0),
    )
    (tmp_path / "mine.json").write_text(slow.to_json())
    main([*SMALL, "-o", str(tmp_path / "slow.json"), "--hardware", str(tmp_path / "mine.json")])
    plan = planner.Plan.load(tmp_path / "slow.json")
    assert plan.binding == "update"
    assert not plan.checkpointing  # which would be no tenth faster
    assert plan.terms["update"] == pytest.approx((1 - plan.device_update_share) * plan.parameters * 28 / 1e6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*SMALL, "--hardware", "nonesuch"], "no hardware profile 'nonesuch'"),
        ([*SMALL, "--micro-batches", "0"], "micro_batches must be an int, at least 1, got 0"),
        ([*SMALL, "-o", "no/such/plan.json"], "cannot write no/such/plan.json: there is no directory no/such"),
        (["plan", "tests.test_cli:scores", "--input", "2x64:float32"], "(--loss MODULE:FUNCTION)"),
        ([*SMALL, "--loss", "tests.test_cli:nothing"], "cannot find tests.test_cli:nothing"),
        ([*SMALL, "--loss", "tests.test_cli:MODEL"], "tests.test_cli:MODEL is no function"),
        (["plan", MODEL, "--input", f"{10**18}x{10**18}"], "there is no tensor of '1000"),
        (["plan", MODEL, "--input", f"{10**30}"], "there is no tensor of '1000"),
        (["plan", MODEL], "say what the model is called with"),
        (["plan", "tests.test_planning", "--input", "2"], "expected MODULE:FUNCTION"),
        (["plan", "tests.test_planning:Nothing", "--input", "2"], "cannot find tests.test_planning:Nothing"),
        (["plan", MODEL, "--input", "2y3"], "got '2y3'"),
        (["plan", MODEL, "--input", "2x3:int65"], "got '2x3:int65'"),
        (["plan", "--hf-config", "some/Model-7B"], "no such file: some/Model-7B; expected the config.json of a model"),
        (["plan", "--hf-config", __file__, "--input", "2x3"], "with --hf-config an input has a name"),
        ([*SMALL, "--input", "x=2x3"], "give all inputs a name, or none"),
        ([*SMALL, "--batch", "8"], "--batch and --sequence go with --hf-config"),
        ([*SMALL, "--sequence", "8"], "with MODULE:FUNCTION: --input 4x2048"),
        ([*SMALL, "-o", "tests"], "cannot write tests: it is a directory, name a file in it"),
        (["plan", "my_model.py:build", "--input", "2"], "my_model:build for the function build in my_model.py here"),
        ([*SMALL, "--nvme", "much"], "--nvme 'much' is not a size"),
    ],
)
def test_bad_input_is_one_line_and_status_two(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hetmem plan: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_bench_measures_each_way_in_which_bytes_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfers", "--quick", "--nvme-dir", str(tmp_path)]) == 0
    rates = {line[:15].strip(): float(line[15:].split()[0]) for line in capsys.readouterr().out.splitlines()}
    assert {"host to device", "device to host", "NVMe read", "NVMe write"} < set(rates)
    assert min(rates.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_probe_writes_a_profile_that_plan_takes(tmp_path: Path) -> None:
    target = tmp_path / "here.json"
    assert main(["probe", "--quick", "--nvme-dir", str(tmp_path), "-o", str(target)]) == 0
    assert HardwareProfile.from_json(target.read_text()).nvme_read.bytes_per_second > 0
    assert main([*SMALL, "--hardware", str(target)]) == 0


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for subcommand in SUBCOMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([subcommand.name, "--help"])
        assert subcommand.help.split()[0] in capsys.readouterr().out


def test_the_module_runs(forks: Forks) -> None:
    done = forks.run("import runpy, sys; sys.argv = ['hetmem', '--help']; runpy.run_module('hetmem', {}, '__main__')")
    assert "plan" in done.stdout
    assert "probe" in done.stdout


def test_output_that_nobody_reads_to_the_end_is_no_error(forks: Forks) -> None:
    """As in `hetmem doctor | head -1`."""
    closed = "import os, runpy, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); "
    done = forks.run(closed + "sys.argv = ['hetmem', 'top', '--once']; runpy.run_module('hetmem', {}, '__main__')")
    assert (done.returncode, done.stderr) == (141, "")


def saved_report(path: Path) -> None:
    model = hetmem.manage(torch.nn.Linear(64, 64), hetmem.Budget(device="1MiB", host="4MiB", device_chunks="64KiB"))
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hetmem.report(model).save(path)


def test_a_saved_report_is_shown_rendered_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_report(tmp_path / "a.json")
    saved_report(tmp_path / "b.json")
    assert main(["report", str(tmp_path / "a.json")]) == 0
    assert "3 steps" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "a.html")]) == 0
    assert "<html" in (tmp_path / "a.html").read_text()
    twice = json.loads((tmp_path / "b.json").read_text())
    once = json.loads((tmp_path / "a.json").read_text())["step"]
    twice["step"] = once | {"seconds": 2 * once["seconds"], "stall_seconds": once["stall_seconds"] + once["seconds"]}
    (tmp_path / "b.json").write_text(json.dumps(twice))
    assert main(["report", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert re.search(r"Step time .* \+100\.0%", capsys.readouterr().out)
    (tmp_path / "broken.json").write_text("{}")
    assert main(["report", str(tmp_path / "broken.json")]) == 2
    assert "broken.json" in capsys.readouterr().err


def test_the_doctor_says_what_works_and_how_to_mend_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--nvme-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for what in ("versions", "host update", "host", "shared memory", "drive"):
        assert f"ok   {what} " in said
    for what in ("GPU", "GPU kernels"):
        assert f"{'ok  ' if torch.cuda.is_available() else '--  '} {what} " in said
    assert max(map(len, said.splitlines())) <= 79
    assert list(tmp_path.iterdir()) == [], "nothing is left on the drive"
    assert main(["doctor", "--nvme-dir", str(tmp_path / "missing")]) == 1
    assert "FAIL drive" in capsys.readouterr().out
    if Path("/dev/shm").is_mount():
        assert main(["doctor", "--nvme-dir", "/dev/shm"]) == 1
        assert "tmpfs" in capsys.readouterr().out


def test_the_doctor_says_where_ranks_cannot_share_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(process: int, descriptor: int) -> int:
        raise PermissionError(13, "Permission denied", f"/proc/{process}/fd/{descriptor}")

    monkeypatch.setattr("hetmem.tools.doctor.open_file", refused)
    assert main(["doctor"]) == 0
    assert "--   shared memory" in (said := capsys.readouterr().out)
    assert "several ranks cannot share a model here" in " ".join(said.split())


@pytest.mark.parametrize(("generation", "lanes", "rate"), [(5, 16, 63), (4, 16, 32), (5, 8, 32)])
def test_the_doctor_knows_a_slot_that_slows_a_gpu_down(
    generation: int, lanes: int, rate: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert main(["doctor"]) == 0
        return " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1"))
    assert "PCIe link unknown: " in said(), "NVML finds no driver here"
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    for name, answer in {
        "HandleByUUID": "GPU-1",
        "MaxPcieLinkGeneration": generation,
        "CurrPcieLinkWidth": lanes,
        "GpuMaxPcieLinkGeneration": 5,
        "MaxPcieLinkWidth": 16,
    }.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lambda gpu, answer=answer: answer)
    assert f"generation {generation}, {lanes} lanes: at most {rate} GB/s" in said()
    assert ("try another slot" in said()) is ((generation, lanes) != (5, 16))


def test_top_without_a_training_process_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    assert capsys.readouterr().out.strip()


def keys(data: dict[str, object], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in data.items():
        found.append((*before, key))
        if isinstance(value, dict) and key != "timeline":
            found += keys(value, (*before, key))
    return found


def test_a_damaged_report_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], all_cases: bool
) -> None:
    """Each tier has the same figures, and so has each link: every other of one of them is enough."""
    whole, path = tmp_path / "whole.json", tmp_path / "cut.json"
    saved_report(whole)
    text = whole.read_text()
    found = keys(json.loads(text))
    some = list({(name[0], name[-1]): name for name in found}.values())[::2]
    for at, name in enumerate(found if all_cases else some):
        for value in (None, "words") if all_cases else ((None, "words")[at % 2],):
            data = json.loads(text)
            place = data
            for key in name[:-1]:
                place = place[key]
            place[name[-1]] = value
            path.write_text(json.dumps(data))
            status = main(["report", str(whole), str(path)])
            said = capsys.readouterr().err
            assert status == 0 or (status == 2 and "cut.json" in said and said.count("\n") == 1), (name, value, said)
    for size in (0, 1, 100, len(text) - 3):
        path.write_text(text[:size])
        assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 2
        assert "cut.json is not a saved report" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_trace_for_perfetto_is_told_from_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_report(tmp_path / "a.json")
    assert main(["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "a.trace.json")]) == 0
    assert main(["report", str(tmp_path / "a.trace.json")]) == 2
    assert "is not a saved report: save one with" in capsys.readouterr().err
