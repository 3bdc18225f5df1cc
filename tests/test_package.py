"""The package as PyPI would show it and as a fresh environment would install it."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomllib

import hetmem

ROOT = Path(__file__).parent.parent


def test_the_project_says_where_it_lives_and_what_changed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(project["urls"])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([^\]]+)\]", changes, re.MULTILINE)[0] == hetmem.__version__
    assert read(ROOT / "CITATION.cff")["version"] == hetmem.__version__


def read(path: Path) -> dict[Any, Any]:
    """A YAML file."""
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


def test_every_change_is_checked_and_only_a_tag_that_passes_is_published_without_a_token() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "ci.yml")
    check, package, publish = (workflow["jobs"][name] for name in ("check", "package", "publish"))
    assert {"push", "pull_request"} == workflow[True].keys(), "YAML reads `on` as true"
    commands = [step["run"] for step in check["steps"] if "run" in step]
    assert commands == [".ci/run"] and os.access(ROOT / commands[0], os.X_OK)
    assert publish["if"] == "github.ref_type == 'tag'" and publish["needs"] == ["check", "package"]
    assert (workflow["permissions"], publish["permissions"]) == ({"contents": "read"}, {"id-token": "write"})
    assert "secrets." not in str(workflow) and "password" not in str(workflow)

    (compare,) = (step["run"] for step in package["steps"] if "tag" in step.get("name", ""))
    for tag, is_version in ((f"v{hetmem.__version__}", True), ("v9.9.9", False)):
        done = subprocess.run(
            ["bash", "-c", compare], cwd=ROOT, env={"PATH": os.environ["PATH"], "GITHUB_REF_NAME": tag}
        )
        assert (done.returncode == 0) is is_version, tag


def test_a_bug_is_reported_with_what_it_takes_to_find_it() -> None:
    forms = {path.stem: read(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.keys() == {"bug", "question", "config"}
    fields = {field["id"]: field for field in forms["bug"]["body"]}
    asked = {name: f"{field['attributes']}" for name, field in fields.items()}
    assert "hetmem doctor" in asked["doctor"] and "report.json" in asked["report"]
    assert {name for name, field in fields.items() if field.get("validations")} == {"program", "happened", "doctor"}
    # A form that GitHub cannot read is not shown: each has a name, a description and fields of a known kind.
    for form in (forms["bug"], forms["question"]):
        assert form["name"] and form["description"]
        assert {field["type"] for field in form["body"]} == {"textarea"}
        assert all(field["id"] and field["attributes"]["label"] for field in form["body"])


@pytest.mark.nightly
def test_wheel_and_source_pass_the_checks_of_pypi_and_install_into_a_fresh_environment(tmp_path: Path) -> None:
    built = tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "build", "--outdir", built, ROOT], check=True, capture_output=True)
    [wheel], [source] = built.glob("*.whl"), built.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, source], check=True, capture_output=True)

    with zipfile.ZipFile(wheel) as files:
        [metadata] = [name for name in files.namelist() if name.endswith("/METADATA")]
        described = email.message_from_bytes(files.read(metadata)).get_payload()
        assert any(name.endswith(".cu") for name in files.namelist())
        assert "hetmem/py.typed" in files.namelist()
        assert {name.partition("/")[0] for name in files.namelist()} == {
            "hetmem",
            f"hetmem-{hetmem.__version__}.dist-info",
        }
    with tarfile.open(source) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    for name in ("tests/conftest.py", ".ci/run", "Makefile", "constraints.txt", "CHANGELOG.md", "CITATION.cff"):
        assert name in held, f"the source cannot be tested, or cited, without {name}"
    links = re.findall(r"\]\(([^)\s]+)\)", described)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []

    # A fresh environment, with what hetmem depends on taken from this one: only hetmem itself is installed.
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    for package in (wheel, source):
        command = [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", package]
        subprocess.run(command, check=True, capture_output=True)
        shown = subprocess.run([python, "-m", "pip", "show", "hetmem"], check=True, capture_output=True, text=True)
        assert f"Version: {hetmem.__version__}" in shown.stdout
    [packages] = {path for path in map(Path, sys.path) if (path / "torch").is_dir()}
    code = f"import sys; sys.path.append({str(packages)!r}); from hetmem.cli import main; main(['--version'])"
    shown = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert hetmem.__version__ in shown.stdout, shown.stderr
