"""The documentation says what is: the reference comes from the code, links lead somewhere, formulas give its bytes."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("docs", "examples", "benchmarks", "tests", "hetmem")
PAGES = sorted([*ROOT.glob("*.md"), *(page for source in SOURCES for page in (ROOT / source).rglob("*.md"))])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(rf"`((?:{'|'.join(SOURCES)})/[\w./-]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def load(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build_api = load(ROOT / "docs" / "build_api.py")


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
        assert [member for member in members if member not in vars(things[name])] == []


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
