"""Debian's chromium, driven by playwright, for tests that look at a page.

A page fails its test if it logs an error to the console or raises one. `make install` brings
playwright; chromium is Debian's (`apt-get install chromium`). Without one of them the test is
skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_PATIENCE_MS = 120_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, which goes with it."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make install")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Look:
    """A page, and what went wrong on it. expected: parts of messages that are no error."""

    page: Page
    errors: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises AssertionError if something went wrong."""
        wrong = [e for e in self.errors if not any(part in e for part in self.expected)]
        assert wrong == []


@contextmanager
def look(browser: Browser, url: str, **options: Any) -> Iterator[Look]:
    """Open a page, and check at the end that nothing went wrong on it.

    options: of playwright's `new_context`, e.g. `color_scheme`."""
    options.setdefault("viewport", {"width": 1280, "height": 900})
    context = browser.new_context(**options)
    context.set_default_timeout(_PATIENCE_MS)
    found = Look(context.new_page())
    page = found.page
    page.on("console", lambda m: found.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("requestfailed", lambda r: found.errors.append(f"{r.url} failed: {r.failure}"))
    try:
        page.goto(url)
        yield found
        found.check()
    finally:
        context.close()
