"""Reports of models that ran: what every one has, what is missing and said, and how they are saved and compared."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from tests.engine.harness import PLACEMENTS, STREAMED, manage
from tests.report.logs import fill
from tests.report.models import network, trained
from tests.report.sample import EMPTY_TIMELINE, LINKS, SAMPLE
from tests.report.tested import (
    Log,
    MomentSeen,
    comparison,
    format_seconds,
    format_size,
    registry,
    trace_text,
)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, (int, float)):
        yield value


def assert_complete(data: dict[str, Any]) -> None:
    """What every report has, whatever ran."""
    for tier in ("device", "host", "nvme"):
        assert 0 <= data["tiers"][tier]["peak_bytes"] <= data["tiers"][tier]["capacity_bytes"]
    assert data["tiers"]["device"]["chunk_peak_bytes"] <= data["tiers"]["device"]["peak_bytes"]
    assert {link: set(use) for link, use in data["links"].items()} == {link: {"bytes", "seconds"} for link in LINKS}
    for key in ("fetches", "evictions", "faults", "stall_seconds", "steps", "chunk_bytes", "chunk_waste"):
        assert data[key] >= 0
    assert data["bytes_per_parameter"] >= 4
    assert all(math.isfinite(number) and number >= -1 for number in numbers(data))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_report_of_a_trained_model_has_a_step_that_adds_up(placement: str, tmp_path: Path) -> None:
    model = trained(placement, tmp_path)
    data = hetmem.report(model).to_dict()
    assert_complete(data)
    step = data["step"]
    assert set(step["terms"]) == {"compute", "host_optimizer", *LINKS}
    assert step["terms"][step["binding"]] == max(step["terms"].values())
    assert 0 < step["overlap"] <= 1
    assert all(seconds <= step["seconds"] for seconds in step["terms"].values())
    assert step["terms"]["compute"] > 0
    assert step["terms"]["host_optimizer"] > 0
    device = data["tiers"]["device"]
    assert device["peak_bytes"] > device["chunk_peak_bytes"] > 0  # activations are beside them
    assert data["timeline"]["covers"] == "step"
    ran = [name for name, _, _ in data["timeline"]["segments"]]
    assert ran == (["forward", "backward", "step"] if placement in STREAMED else ["forward", "step"])
    hetmem.release(model)


@pytest.mark.parametrize("placement", STREAMED)
def test_the_timeline_tells_of_every_byte_that_came_to_the_device(placement: str, tmp_path: Path) -> None:
    model = trained(placement, tmp_path)
    data = hetmem.report(model).to_dict()
    moved, step = data["timeline"]["transfers"], data["step"]
    began = [start > 0 for start in moved["from_us"]]  # the others did before the step
    for number, link in enumerate(LINKS):
        entries = zip(moved["bytes"], moved["link"], began, strict=True)
        assert sum(b for b, of, here in entries if of == number and here) == step["bytes"][link]
    assert step["bytes"]["host_to_device"] > 0
    assert data["timeline"]["moments"]["at_us"] == sorted(data["timeline"]["moments"]["at_us"])
    assert step["moments"] == len(data["timeline"]["moments"]["at_us"]) > 0
    hetmem.release(model)


def test_copies_of_the_timeline_end_as_the_memory_is_now(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    data = hetmem.report(model).to_dict()
    device = data["timeline"]["memory"]["device"]["bytes"]["param"]
    capacity = data["tiers"]["device"]["capacity_bytes"]
    assert 0 < max(device) <= capacity
    staged = [sum(values) for values in zip(*data["timeline"]["memory"]["host"]["bytes"].values(), strict=True)]
    assert 0 < max(staged) <= data["tiers"]["host"]["staging_bytes"]
    hetmem.release(model)


def test_every_backward_is_compute_and_what_comes_before_the_step_is_not(tmp_path: Path) -> None:
    model = manage(network(), "host", tmp_path)
    optimizer = hetmem.AdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(8, 64)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        time.sleep(0.01)  # what a user does with gradients
        optimizer.step()
    segments = hetmem.report(model).to_dict()["timeline"]["segments"]
    assert [what for what, _, _ in segments] == ["forward", "backward", "backward", "step"]
    assert all(before[2] <= after[1] for before, after in pairwise(segments))
    assert segments[3][1] - segments[2][2] >= 10_000
    hetmem.release(model)


def test_gradients_that_are_written_to_staging_unread_are_there_from_then_on(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path, steps=1)
    timeline = hetmem.report(model).to_dict()["timeline"]
    _, began, ended = timeline["segments"][1]
    copies = timeline["copies"]
    gradients = [index for index, block in enumerate(copies["block"]) if timeline["blocks"][block]["role"] == "grad"]
    came = {copies["block"][index] for index in gradients if began <= copies["from_us"][index] < ended}
    read = {block for block, link in zip(*map(timeline["transfers"].get, ("block", "link")), strict=True) if link == 2}
    assert came
    assert came - read
    hetmem.release(model)


def test_homes_by_role_are_what_the_tier_holds(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    tiers = hetmem.report(model).to_dict()["tiers"]
    assert sum(tiers["nvme"]["homes"].values()) == tiers["nvme"]["used_bytes"] > 0
    assert sum(tiers["host"]["homes"].values()) + tiers["host"]["staging_bytes"] == tiers["host"]["used_bytes"]
    hetmem.release(model)


def test_a_model_that_never_ran_says_so(tmp_path: Path) -> None:
    model = manage(network(), "host", tmp_path)
    report = hetmem.report(model)
    data = report.to_dict()
    assert_complete(data)
    assert (data["step"], data["timeline"]) == (None, None)
    assert data["missing"] == ["Nothing ran yet: call the model, then ask again."]
    assert "Nothing ran yet" in str(report)
    for ending in ("json", "html", "trace.json"):
        report.save(tmp_path / f"r.{ending}")
    hetmem.release(model)


def test_a_model_that_only_infers_shows_its_last_forward_with_terms_and_tokens(tmp_path: Path) -> None:
    model = manage(nn.Sequential(nn.Embedding(32, 64), network()), "host", tmp_path)
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(4, 8, dtype=torch.long))
            time.sleep(0.01)  # what a user does with the result
    report = hetmem.report(model)
    data = report.to_dict()
    assert_complete(data)
    step, text = data["step"], str(report)
    assert (data["steps"], data["timeline"]["covers"], step["of"], data["missing"]) == (0, "forward", "forward", [])
    assert len(data["timeline"]["segments"]) == 1
    assert (step["tokens"], data["history"]["of"], data["history"]["tokens"]) == (32, "forward", [32, 32])
    assert step["tokens_per_second"] == pytest.approx(32 / step["seconds"])
    assert min(data["history"]["seconds"]) >= 0.01 + step["terms"]["compute"] / 10
    assert step["terms"]["compute"] + step["stall_seconds"] == pytest.approx(step["seconds"])
    assert f"of a forward of {format_seconds(step['seconds'])}" in text
    assert "Host optimizer" not in text
    assert repr(report).endswith(f"binds; peak: {text_of_peaks(data)}>")
    report.save(tmp_path / "r.html")
    hetmem.release(model)


def text_of_peaks(data: dict[str, Any]) -> str:
    peaks = {name: tier["peak_bytes"] for name, tier in data["tiers"].items()}
    return ", ".join(f"{name} {format_size(peak)}" for name, peak in peaks.items() if peak)


def test_a_forward_that_a_backward_may_follow_is_no_inference(tmp_path: Path) -> None:
    model = manage(network(), "host", tmp_path)
    model(torch.ones(8, 64))
    data = hetmem.report(model).to_dict()
    assert (data["step"], data["timeline"]["covers"]) == (None, "forward")
    assert "No whole training step was seen" in data["missing"][0]
    hetmem.release(model)


def test_the_head_says_what_the_run_was_made_with(tmp_path: Path) -> None:
    device = hetmem.SimDevice(host_to_device="1GiB")
    model = manage(network(), "host", tmp_path, device=device, mixed_precision=torch.bfloat16, sanitize=False)
    optimizer = hetmem.AdamW(model.parameters(), overlap="backward")
    report = hetmem.report(model)
    data = report.to_dict()
    assert data["device"] == "simulated device, 1.00 GiB/s to it"
    assert data["options"]["mixed_precision"] == "bfloat16"
    assert [each["overlap"] for each in data["options"]["optimizers"]] == ["backward"]
    assert data["versions"]["torch"] == torch.__version__
    said = " ".join(str(report).split())
    assert f"{data['device']}, mixed_precision=bfloat16, AdamW(overlap=backward), hetmem {hetmem.__version__}" in said
    del optimizer
    hetmem.release(model)


def test_the_history_has_each_step_with_its_stalls_and_tokens(tmp_path: Path) -> None:
    model = trained("host", tmp_path, steps=5)
    data = hetmem.report(model).to_dict()
    past = data["history"]
    assert [len(past[key]) for key in ("seconds", "stall_seconds", "tokens")] == [4, 4, 4]
    assert past["seconds"][-1] == data["step"]["seconds"]
    assert past["stall_seconds"][-1] == pytest.approx(data["step"]["stall_seconds"])
    assert "4 steps: " in str(hetmem.report(model))
    hetmem.release(model)


KIB = 1 << 10


def beside_chunks(model: nn.Module) -> tuple[dict[tuple[str, str, str], tuple[int, int]], dict[str, Any]]:
    """Tensors and bytes of what was beside chunks, by operator, module and what holds it; and the section."""
    report = hetmem.report(model)
    section = report.to_dict()["beside_chunks"]
    rows = section["tensors"]
    assert sum(row["bytes"] for row in rows) + section["other_bytes"] == section["bytes"]
    text = str(report)
    assert section["sentence"] in " ".join(text.split())
    assert all(row["operator"] in text and row["module"] in text for row in rows)
    return {(row["operator"], row["module"], row["held"]): (row["count"], row["bytes"]) for row in rows}, section


class Summed(nn.Module):
    """Two equal blocks and a loss: 512 rows of 64 float32 are 128 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@pytest.mark.parametrize("placement", ["resident", "host"])
def test_what_is_beside_chunks_at_the_peak_is_told_by_operator_and_module(placement: str, tmp_path: Path) -> None:
    model = manage(Summed(), placement, tmp_path, sanitize=False, activations="keep")
    optimizer = hetmem.AdamW(model.parameters())
    assert hetmem.report(model).to_dict()["beside_chunks"] is None
    for _ in range(2):
        model(torch.ones(512, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, section = beside_chunks(model)
    assert (section["segment"], section["step"]) == ("backward", 1)
    assert section["bytes"] == hetmem.report(model).to_dict()["tiers"]["device"]["non_model_peak_bytes"]
    assert found[("inputs", "Summed", "input")] == (1, 128 * KIB)
    assert found[("relu", "blocks.*.1", "saved")] == (2, 512 * KIB)
    assert ("addmm", "blocks.*.2", "saved") in found
    assert {module for _, module, held in found if held == "temporary"} == {""}
    model(torch.ones(900, 64)).backward()  # not watched, as it is not twice as large
    if placement == "host":
        assert "Larger inputs since" in hetmem.report(model).to_dict()["beside_chunks"]["sentence"]
    hetmem.release(model)


def test_without_a_backward_nothing_beside_chunks_is_saved(tmp_path: Path) -> None:
    model = manage(nn.Linear(64, 256), "host", tmp_path, sanitize=False)
    with torch.no_grad():
        result = model(torch.ones(512, 64))
    assert result.nbytes == 512 * KIB
    found, section = beside_chunks(model)
    assert section["sentence"].endswith("in a forward.")
    assert {held for _, _, held in found} == {"input", "temporary"}
    hetmem.release(model)


def test_a_tier_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    model = trained("host", tmp_path)
    assert "nvme" not in str(hetmem.report(model)).lower()
    hetmem.release(model)


def test_a_step_and_a_forward_are_not_compared() -> None:
    other = {**SAMPLE, "step": {**SAMPLE["step"], "of": "forward", "seconds": 1.0}}
    assert "a covers a step and b a forward." in comparison("a", SAMPLE, "b", other).splitlines()


def test_one_step_is_not_yet_a_whole_one(tmp_path: Path) -> None:
    model = trained("host", tmp_path, steps=1)
    data = hetmem.report(model).to_dict()
    assert data["step"] is None
    assert "one optimizer step was taken" in data["missing"][0]
    assert [name for name, _, _ in data["timeline"]["segments"]] == ["forward", "backward", "step"]
    assert max(data["timeline"]["stalls"]["block"]) >= 0, "nothing is fetched ahead yet: each chunk is waited for"
    hetmem.release(model)


def test_a_resident_model_says_that_nothing_moves(tmp_path: Path) -> None:
    model = trained("resident", tmp_path)
    data = hetmem.report(model).to_dict()
    assert data["missing"] == ["Every chunk has its home on the device: nothing moves, and no moments are recorded."]
    assert data["timeline"]["moments"]["at_us"] == []
    hetmem.release(model)


def test_a_log_that_forgot_the_step_says_which_part(tmp_path: Path) -> None:
    model = trained("host", tmp_path)
    events = registry.of_module(model).runtime.events
    few, events.moments = events.moments, Log(MomentSeen, 2)
    fill(events.moments, *few)
    assert hetmem.report(model).to_dict()["missing"] == ["The log has forgotten the beginning of the window: moments."]
    hetmem.release(model)


def test_updates_that_several_threads_make_at_once_have_tracks_of_their_own() -> None:
    updates = {"what": ["a", "b", "c", "d"], "from_us": [0, 10, 20, 40], "until_us": [20, 30, 40, 50]}
    sample = {**SAMPLE, "timeline": {**EMPTY_TIMELINE, "updates": updates}}
    events = json.loads(trace_text(sample))["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    where = {event["name"]: tracks[event["tid"]] for event in events if event["ph"] == "X"}
    assert where == {"a": "Host optimizer 1", "b": "Host optimizer 2", "c": "Host optimizer 1", "d": "Host optimizer 1"}


def test_the_trace_has_a_track_per_link_and_its_events_nest(tmp_path: Path) -> None:
    model = trained("nvme", tmp_path)
    hetmem.report(model).save(tmp_path / "r.trace.json")
    events = json.loads((tmp_path / "r.trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"Training thread", "Host optimizer 1", "Host to device 1", "NVMe read 1", "NVMe write 1"} <= set(
        tracks.values()
    )
    for track in tracks:
        spans = [e for e in events if e["ph"] == "X" and e["tid"] == track]
        open_until: list[int] = []
        for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{event} of {tracks[track]} does not nest"
            open_until.append(end)
    assert any(event["ph"] == "C" for event in events)
    hetmem.release(model)


def test_a_notebook_shows_the_page_and_a_prompt_one_line(tmp_path: Path) -> None:
    model = trained("host", tmp_path)
    report = hetmem.report(model)
    hetmem.release(model)
    assert repr(report).startswith("<MemoryReport of Sequential: 3 steps, ")
    assert "binds; peak: device " in repr(report)
    assert "\n" not in repr(report)
    frame = report._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert frame.count('"') == 6, "the page ends its attribute"
