"""A real Chromium for the tests of pages, without a network and without anything of playwright's own to download."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE = 60  # seconds, on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def unavailable(reason: str) -> None:
    """Skip, and fail where the checks decide over a change."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; under CI=true the pages are tested")
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser that Debian's package `chromium` installs, or Google Chrome."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        unavailable("no Chromium on this machine: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("no playwright in this environment: pip install playwright")
    # Chromium's sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def until(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true; playwright's own `wait_for_function` breaks on the page's policy."""
    last = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        if time.monotonic() > last:
            pytest.fail(f"not within {PATIENCE} s: {expression}")
        page.wait_for_timeout(20)


@dataclass
class Visit:
    """A page, what it complained of, and what it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(1000 * PATIENCE)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"a script spoke: {dialog.message}")
        dialog.dismiss()

    def go(self, file: Path, address: str = "") -> Page:
        """Open a file, and wait until its script has run."""
        self.page.goto("about:blank")
        self.page.goto(file.as_uri() + address)
        self.page.wait_for_selector("html[data-ready]")
        return self.page


@contextmanager
def visit(browser: Browser, **options: Any) -> Iterator[Visit]:
    """A fresh window without memory; options are those of playwright's `new_context`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        yield Visit(context.new_page())
    finally:
        context.close()
