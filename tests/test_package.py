"""The package as PyPI would show it and as a fresh environment would install it."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

import hetmem

ROOT = Path(__file__).parent.parent


def test_the_project_says_where_it_lives_and_what_changed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(project["urls"])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([^\]]+)\]", changes, re.MULTILINE)[0] == hetmem.__version__


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
