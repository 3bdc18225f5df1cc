"""Hooks of mkdocs: the README is the first page, and links to files outside of `docs/` lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the index, with links as seen from `docs/`, and put every decision into the navigation."""
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    content = _LINK.sub(
        lambda link: link[1].removeprefix("docs/") if link[1].startswith("docs/") else f"../{link[1]}", readme
    )
    files.append(File.generated(config, "index.md", content=content))
    decisions = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri.startswith("adr/"))
    config.nav[-1]["Why it is so"] += [{"Decisions": decisions}]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that leave `docs/` into links to the repository."""
    at = Path(config.docs_dir, page.file.src_uri).parent

    def outside(link: re.Match[str]) -> str:
        name, _, anchor = link[1].partition("#")
        target = (at / name).resolve()
        if name == "../README.md":
            return f"index.md#{anchor}"
        if target.is_relative_to(config.docs_dir) and target.is_file():
            return link[1]
        return f"{config.repo_url}/blob/main/{target.relative_to(_ROOT)}{'#' + anchor if anchor else ''}"

    return _LINK.sub(outside, markdown)
