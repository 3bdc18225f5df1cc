"""The documentation says what is: the reference comes from the code, links lead somewhere, formulas give its bytes."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem.planner.step_program import UPDATE_BYTES
from hetmem.schedule.placement import COPY_BYTES
from tests.engine.harness import CHUNK_ELEMENTS
from tests.pairs import case
from tests.scripts import ROOT, load_script

SOURCES = ("docs", "examples", "benchmarks", "tests", "hetmem")
PAGES = sorted([*ROOT.glob("*.md"), *(page for source in SOURCES for page in (ROOT / source).rglob("*.md"))])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(rf"`((?:{'|'.join(SOURCES)})/[\w./-]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


build_api = load_script("docs/build_api.py")


def entries() -> Iterator[tuple[str, str]]:
    """Names of the reference and their docstrings."""
    for _, found in build_api.sections():
        for entry in found:
            yield entry.name, entry.doc


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_what_the_docstrings_say_now() -> None:
    written = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert written == build_api.render(), "docs/api.md is out of date: make docs"


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    assert [name for name, doc in entries() if not doc] == []


@pytest.mark.parametrize("package", build_api.PACKAGES)
def test_no_public_name_is_left_out_of_the_reference(package: str) -> None:
    module = importlib.import_module(package)
    documented = {name.rpartition(".")[2] for name, _ in entries()}
    assert build_api.public_names(module)
    assert set(build_api.public_names(module)) <= documented


def test_what_is_kept_from_the_reference_is_there() -> None:
    """A name that is gone must not hide one that comes."""
    things = {
        entry.thing.__name__: entry.thing for _, found in build_api.sections() for entry in found if not entry.depth
    }
    for name, members in build_api.FOR_HETMEM.items():
        assert [member for member in members if not hasattr(things[name], member)] == []


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The headings of `page`, as links name them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {build_api.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text.replace("`", ""), re.MULTILINE)}


def dead_links(page: Path) -> list[str]:
    """The targets in `page` that are not there: files, headings, and files named as code."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    dead = [name for name in NAMED_FILE.findall(text) if not (ROOT / name).exists()]
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (heading and heading not in anchors(file)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A Heading: `one`\n[a](#a-heading-one) [b](page.md#a-heading-one) [c](https://example.org)\n")
    assert dead_links(page) == []
    page.write_text("# One\n[a](#two) [b](other.md) `docs/nowhere.md`\n")
    assert dead_links(page) == ["docs/nowhere.md", "#two", "other.md"]


# ---- formulas --------------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16
WIDTH = 64  # of a layer: one chunk
LAYERS = 48
RESIDENT = 0.25  # share of them that the device holds


def run_snippets(page: str) -> tuple[dict[str, Any], str]:
    """The names that the Python code on `page` makes, and what it prints."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(snippet, names)
    return names, printed.getvalue()


FORMULAS_PAGE = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
FORMULAS, PRINTED = run_snippets(FORMULAS_PAGE)


def test_the_example_prints_what_the_page_shows() -> None:
    assert re.findall(r"```text\n(.*?)```", FORMULAS_PAGE, re.DOTALL) == [PRINTED]


def test_the_update_moves_what_the_plan_counts() -> None:
    update_bytes = FORMULAS["update_bytes"]
    assert update_bytes(4, 4, 8) == UPDATE_BYTES
    assert (update_bytes(4, 4, 4), round(update_bytes(4, 4, 2.03), 1)) == (20, 16.1)  # as the page says
    assert update_bytes(4, 4, 8, copy=2) == UPDATE_BYTES + COPY_BYTES == 30


class Trained:
    """A model that was trained: bytes of homes and of links, for each parameter and step.

    `host`: the chunks that host memory has room for; without it, all of them. `copies`: `Budget(home_copies=…)`.
    """

    def __init__(
        self,
        tmp_path: Path,
        *,
        m: int = 1,
        dtype: Any = torch.float32,
        mixed: Any = None,
        layers: int = LAYERS,
        host: int = 0,
        copies: bool | None = None,
        **options: Any,
    ) -> None:
        chunk = CHUNK_ELEMENTS * dtype.itemsize
        slot = CHUNK_ELEMENTS * (mixed or dtype).itemsize
        budget = hetmem.Budget(
            device="64MiB",
            device_chunks=int(RESIDENT * layers) * slot,
            host=host * chunk if host else "64MiB",
            nvme="64MiB" if host else None,
            nvme_dir=tmp_path if host else None,
            home_copies=copies,
        )
        # With a link of a stated speed weights cross it, as on a GPU; else the update writes 16-bit copies itself.
        device = hetmem.SimDevice(host_to_device="100GB")
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(dtype)
        parameters = layers * CHUNK_ELEMENTS
        hetmem.manage(model, budget, chunk_bytes=chunk, mixed_precision=mixed, device=device)
        self.optimizer = hetmem.AdamW(model.parameters(), **options)

        def steps(count: int) -> dict[str, int]:
            for _ in range(count):
                for _ in range(m):
                    model(torch.ones(2, WIDTH, dtype=mixed or dtype)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.optimizer.synchronize()
            return {name: link["bytes"] for name, link in hetmem.report(model).to_dict()["links"].items()}

        before, after = steps(2), steps(3)
        self.moved = {name: (after[name] - before[name]) / 3 / parameters for name in after}
        report = hetmem.report(model).to_dict()
        self.bytes_per_parameter = report["bytes_per_parameter"]
        on_nvme = {role: nbytes / parameters for role, nbytes in report["tiers"]["nvme"]["homes"].items()}
        self.copies_on_nvme = on_nvme.pop("compute", 0.0)
        self.on_nvme = (on_nvme.pop("param", 0.0), on_nvme.pop("grad", 0.0), sum(on_nvme.values()))
        hetmem.release(model)


@pytest.mark.each
@pytest.mark.parametrize(
    ("dtype", "options", "nbytes"),
    [
        (torch.float32, {}, 16),
        (torch.float32, {"moments": BF16}, 12),
        (torch.float32, {"moments": "8bit"}, 10.03),
        (BF16, {"stochastic_rounding": True}, 8),
        (BF16, {"stochastic_rounding": True, "moments": "8bit"}, 6.03),
    ],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["visible", "streamed"])
def test_homes_take_what_the_page_says(
    dtype: torch.dtype, options: dict[str, Any], nbytes: float, streamed: bool, tmp_path: Path
) -> None:
    """Scales take whole pages here, which large chunks do not notice: one page for each 8-bit moment of a chunk."""
    assert f" {nbytes} | {nbytes - dtype.itemsize:g} |" in FORMULAS_PAGE
    if streamed:
        options = {**options, "overlap": "backward"}
        nbytes -= dtype.itemsize * (1 - 6 / LAYERS)
    trained = Trained(tmp_path, dtype=dtype, **options)
    if "8bit" in options.values():
        nbytes += 2 * 4096 / CHUNK_ELEMENTS - 0.03
    assert trained.bytes_per_parameter == pytest.approx(nbytes, abs=1e-9)


@pytest.mark.each
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "mixed", "copies"),
    [(torch.float32, None, None), (torch.float32, BF16, False), (torch.float32, BF16, None), (BF16, None, None)],
)
def test_links_move_what_the_page_says(
    m: int, dtype: torch.dtype, mixed: torch.dtype | None, copies: bool | None, tmp_path: Path
) -> None:
    options = {} if dtype is torch.float32 else {"stochastic_rounding": True}
    trained = Trained(tmp_path, m=m, dtype=dtype, mixed=mixed, copies=copies, **options)
    copy = 2 if mixed and copies is None else 0
    expected = FORMULAS["link_bytes"](dtype.itemsize, dtype.itemsize, m, RESIDENT, copy)
    assert trained.bytes_per_parameter == pytest.approx(4 * dtype.itemsize + copy, abs=1e-9)
    assert trained.moved["device_to_host"] == expected["device_to_host"]
    assert trained.moved["host_to_device"] == pytest.approx(expected["host_to_device"], rel=0.05)
    assert trained.on_nvme == (0.0, 0.0, 0.0)


@pytest.mark.in_turn
@pytest.mark.parametrize(("m", "layers", "host"), [case(1, 48, 100, nightly=True), (2, 48, 100), (1, 96, 48)])
def test_nvme_moves_what_the_page_says(m: int, layers: int, host: int, tmp_path: Path) -> None:
    """Host memory has room for parameters and some gradients beside the staging ring, or for some of the parameters."""
    trained = Trained(tmp_path, m=m, layers=layers, host=host)
    assert trained.on_nvme[2] == 8
    assert (trained.on_nvme[0] > 2) == (host < layers)
    expected = FORMULAS["nvme_bytes"](*trained.on_nvme, m, RESIDENT)
    assert trained.moved["nvme_write"] == pytest.approx(expected["nvme_write"], abs=1e-9)
    assert trained.moved["nvme_read"] == pytest.approx(expected["nvme_read"], rel=0.1)


def test_each_guarantee_names_the_test_that_holds_it() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| (?!-|promise|when|program)", line)]
    assert len(rows) > 30
    assert [row for row in rows if not NAMED_FILE.findall(row.rstrip(" |").rsplit("|", 1)[-1])] == []
