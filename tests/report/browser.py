"""A Chromium to open pages in. Tests that need one skip without it, unless HETMEM_BROWSER says "required"."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing(what: str) -> None:
    if os.environ.get("HETMEM_BROWSER") == "required":
        pytest.fail(f"HETMEM_BROWSER=required, but {what}")
    pytest.skip(what)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium (a `Browser` of playwright's), closed in the end."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        _missing("there is no Chromium: install one (Debian, Ubuntu: apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed: pip install playwright (it need not download browsers)")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=as_root)
        yield browser
        browser.close()
