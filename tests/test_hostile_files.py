"""Files that were changed so that they still parse: each is taken whole, or refused with the name of a key, before
anything changes; and no name in one reaches a terminal as more than text."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hetmem
from hetmem import planner
from hetmem.cli import main
from hetmem.errors import HetmemError, printable
from hetmem.planner.plan_shape import digest_of
from hetmem.report import files, live
from tests.planner.test_damaged_files import fitting
from tests.report.sample import EMPTY_TIMELINE, SAMPLE

ODD: list[Any] = [None, True, -1, 0, 1, 0.5, -2.5, 10**17, 10**30, 1e308, "", "words", "a\0b", "\x1b[2J", "\ud800"]
ODD += [[], [[]], [None], [-1, 2], {}, {"device": None}, {"": ""}]
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")

Path_ = tuple[Any, ...]


def places(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*above, key)
        yield from places(part, (*above, key))


def mutated(data: Any, place: Path_, odd: Any) -> Any:
    """`data` with `odd` at `place`; for `odd` that are functions, what they leave of the object or list there."""
    changed = copy.deepcopy(data)
    around = changed
    for key in place[:-1]:
        around = around[key]
    if callable(odd):
        odd(around, place[-1])
    else:
        around[place[-1]] = copy.deepcopy(odd)
    return changed


def drop(around: Any, key: Any) -> None:
    del around[key]


def add(around: Any, key: Any) -> None:
    if isinstance(around, dict):
        around["unheard of"] = 1
    else:
        around.append(around[key])


def named(place: Path_) -> str:
    return next(key for key in reversed(place) if isinstance(key, str))


# ---- the kinds of files -------------------------------------------------------------------------------------------


@cache
def plans() -> list[dict[str, Any]]:
    fits = fitting()
    none: dict[str, Any] = dict.fromkeys(("step_seconds", "stall_seconds", "binding", "compute_bound_rows"))
    choice = {"choice": "auto", "step_seconds": None, "moved_bytes": 5, "kept_bytes": 7, "nvme_bytes": 0}
    more: dict[str, Any] = {
        "activations": "auto",
        "activation_choices": (choice | {"times": 1.5, "rows": 3, "sequence": 48},),
        "approximations": ({"advice": "small states", "step_seconds": 0.5},),
        "layers": {"of": "list(model.h)", "count": 4, "recomputed": 2, "moved_bytes": 5, "kept_bytes": 7},
        "optimizer": {"overlap": "backward", "moments": "8bit", "stochastic_rounding": True},
        "setup": ("model = model.bfloat16()",),
    }
    not_at_all = replace(fits, fits=False, missing_bytes={"host": 5}, reasons=("so",), advice=("more",), **none)
    combined = replace(fits, combined=replace(fits, **more).to_dict(), **more)
    return [fits.to_dict(), not_at_all.to_dict(), combined.to_dict()]


def sealed(plan: Any) -> Any:
    """`plan` with the digest of what it says, as one who changes it for the worse computes it."""
    if isinstance(plan, dict):
        plan.pop("digest", None)
        sealed(plan.get("combined"))
        plan["digest"] = digest_of(plan)
    return plan


MODEL = torch.nn.Linear(4, 4)


def use_plan(path: Path) -> None:
    """Run and show a plan; `manage` takes the file, and leaves the model as it was if it refuses it."""
    was = [(type(each), each.data_ptr(), each.tolist()) for each in MODEL.parameters()]
    try:
        hetmem.manage(MODEL, plan=path, device="sim")
    except HetmemError:
        assert [(type(each), each.data_ptr(), each.tolist()) for each in MODEL.parameters()] == was
        with pytest.raises(hetmem.errors.ManageError):
            hetmem.release(MODEL)
    else:
        hetmem.release(MODEL)
    plan = planner.Plan.load(path)
    assert all((str(plan), repr(plan), plan.code(), plan.best.prediction))


def reports() -> list[dict[str, Any]]:
    span = {"from_us": [0, 5], "until_us": [4, 9]}
    block = {"chunk": 0, "role": "param", "home": "host", "bytes": 8, "parameters": ["w"], "fetched_bytes": 8}
    timeline = EMPTY_TIMELINE | {
        "segments": [["forward", 0, 9]],
        "operators": ["linear"],
        "moments": {"at_us": [1, 6], "operator": [0, 0], "blocks": [[0], []]},
        "memory": {"device": {"at_us": [0, 3], "bytes": {"param": [0, 8]}}},
        "blocks": [block | {"stall_seconds": 0.5}],
        "copies": {"block": [0, 0], "tier": [0, 1], "valid_us": [2, 7], **span},
        "transfers": {"link": [0, 3], "block": [0, -1], "bytes": [8, 8], **span},
        "stalls": {"block": [0, -1], **span},
        "faults": {"block": [0], "at_us": [1]},
        "updates": {"what": ["chunk 0", "norm"], **span},
    }
    figures = {"hardware": "h100", "rows": 4, "micro_batches": 1, "step_seconds": 2.0, "terms": {"compute": 1.0}}
    planned = figures | {"peak_bytes": {"device": 50, "host": 50, "nvme": 0}}
    tensors = [{"operator": "aten.mm", "module": "a.b", "held": "saved", "count": 2, "bytes": 8}]
    beside = {"bytes": 9, "segment": "forward", "step": 1, "tensors": tensors, "other_bytes": 1, "sentence": "So."}
    optimizers = {"optimizers": [{"class": "AdamW", "overlap": "off", "max_grad_norm": 1.0}]}
    more = {"planned": planned, "beside_chunks": beside, "updates": {"host": 5, "resident": 2}, "timeline": timeline}
    whole = SAMPLE | more | {"options": SAMPLE["options"] | optimizers, "missing": ["Much."]}
    return [SAMPLE, whole]


def use_report(path: Path) -> None:
    files.show(path)
    files.compare(path, path)
    for ending in ("json", "html", "trace.json"):
        files.render(path, path.with_name(f"out.{ending}"))


def use_profile(path: Path) -> None:
    planner.load_profile(path).to_json()


STATUS = {
    "process": 4000000,
    "model": "GPT",
    "steps": 3,
    "step_seconds": 1.5,
    "tokens_per_second": 18000.0,
    "stall_share": 0.25,
    "tiers": {tier: [5, 10] for tier in ("device", "host", "nvme")},
    "links": {"host_to_device": 5.0, "nvme_read": 0.0},
    "history": [1.0, 2.0],
}


def use_status(path: Path) -> None:
    path.replace(path.with_name(f"{os.getpid()}-1.json"))
    said = live.top()
    assert not CONTROL.search(said)
    assert max(map(len, said.splitlines())) <= 79
    if "is no status" in said:
        raise ValueError(" ".join(said.split()))


Use = Callable[[Path], None]
KINDS: dict[str, tuple[Callable[[], list[dict[str, Any]]], Use]] = {
    "plan": (plans, use_plan),
    "report": (reports, use_report),
    "profile": (lambda: [planner.load_profile("l4").to_dict()], use_profile),
    "status": (lambda: [STATUS], use_status),
}
FREE = {"report": {"unheard of", "options"}}
"""Keys of which a file may have any."""


def check(kind: str, place: Path_, data: Any, path: Path) -> bool:
    """Use the file; return whether it was refused, which is in one line and with the name of a key."""
    text = json.dumps(sealed(data) if kind == "plan" else data)
    path.write_text(text)
    try:
        KINDS[kind][1](path)
    except (HetmemError, ValueError) as error:
        refusal = error
    else:
        return False
    said = str(refusal)
    keys = {str(key) for place in places(KINDS[kind][0]()[-1]) for key in place} | {"unheard of"}
    assert any(key in said for key in keys), (place, said)
    assert "\n" not in said and not CONTROL.search(said)
    return True


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_taken_whole_or_refused_with_the_name_of_a_key(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "status_directory", lambda: tmp_path)
    chance, refused = random.Random(count), 0
    for _ in range(count):
        data = chance.choice(KINDS[kind][0]())
        place = chance.choice(list(places(data)))
        data = mutated(data, place, chance.choice([*ODD, drop, add]))
        refused += check(kind, place, data, tmp_path / "changed.json")
    assert refused > count // 4


# ---- what is printed ----------------------------------------------------------------------------------------------


def with_names(data: Any) -> Any:
    """`data` with an escape sequence behind each text that may be any."""
    if isinstance(data, dict):
        return {key: with_names(value) for key, value in data.items()}
    if isinstance(data, list):
        return [with_names(value) for value in data]
    return f"{data}{ESCAPE}\ud800" if isinstance(data, str) else data


NAMED = ("model", "hardware", "device", "sentence", "missing", "operators", "parameters", "what", "advice", "reasons")
NAMED += ("class", "role", "module", "operator", "name", "sources", "setup", "of", "peak_operator", "nvme_directories")


def renamed(data: Any) -> Any:
    """`data` with an escape sequence in every name."""
    if isinstance(data, list):
        return [renamed(value) for value in data]
    if not isinstance(data, dict):
        return data
    words = ("step", "forward")
    return {
        key: with_names(value) if key in NAMED and value not in words else renamed(value) for key, value in data.items()
    }


def test_no_name_in_a_file_reaches_a_terminal_as_an_escape_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could clear the screen, set its title, or type for the user."""
    monkeypatch.setattr(live, "status_directory", lambda: tmp_path / "status")
    (tmp_path / "status").mkdir()
    plan, report, profile = (tmp_path / f"{ESCAPE}{kind}.json" for kind in ("plan", "report", "profile"))
    plan.write_text(json.dumps(sealed(renamed(plans()[2]))))
    report.write_text(json.dumps(renamed(reports()[1])))
    profile.write_text(json.dumps(renamed(planner.load_profile("l4").to_dict())))
    (tmp_path / "status" / f"{os.getpid()}-1.json").write_text(json.dumps(renamed(STATUS)))
    (tmp_path / "status" / f"{os.getpid()}-{ESCAPE}2.json").write_text(json.dumps(with_names(STATUS)))
    found = planner.Plan.load(plan)
    print(found, repr(found), repr(found.best))
    words = ["--input", "2x32", "--hardware", str(profile), "--device-memory", "900GiB"]
    for command, status in {
        ("report", str(report)): 0,
        ("report", str(report), str(report)): 0,
        ("top", "--once"): 0,
        ("plan", f"tests.test_planning:{ESCAPE}", *words): 2,
        ("report", str(plan)): 2,
        ("plan", "tests.test_planning:GPT", "--input", "2x32", "--hardware", str(report)): 2,
    }.items():
        assert main(command) == status
    said = capsys.readouterr()
    assert (said.out + said.err).count("␛[2J") > 20
    assert not CONTROL.search(said.out + said.err)
    said.out.encode()


def test_an_error_shows_names_as_text() -> None:
    error = hetmem.errors.StoreError(2, f"no tensor {ESCAPE}", f"a\n{ESCAPE}")
    assert str(hetmem.errors.CheckpointError(f"a\tb\n{ESCAPE}")) == "a\tb\n␛]0;owned␇␛[2J�31m�"
    assert not CONTROL.search(str(error))
    assert printable("ä → 日本\n\t") == "ä → 日本\n\t"
