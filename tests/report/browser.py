"""Pages in a real browser: the system's Chromium, headless, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

# Root has no sandbox, test machines have no GPU, and nothing may go out.
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Where the system's Chromium is; the test fails where there is none."""
    for name in _NAMES:
        found = shutil.which(name)
        if found:
            return found
    return pytest.fail("no Chromium to test the page with: run scripts/debian.sh chromium")


@contextmanager
def start_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page that is open, and what it said and asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def state(self, expression: str) -> Any:
        """A value of the page's state: `app` is its handle."""
        return self.page.evaluate(f"(() => {{ const app = window.undertowPage; {expression} }})()")

    def settle(self) -> None:
        """Wait until it has stopped gliding and drawn what changed."""
        self.page.wait_for_function(
            "() => !window.undertowPage.view.glide && !window.undertowPage.isDue"
        )

    def place(self, task: str, track: int = 0) -> tuple[float, float]:
        """Where a task is in the window."""
        x, y = self.page.evaluate(
            """([task, number]) => {
                const app = window.undertowPage;
                const track = app.data.tracks[number];
                const row = app.namesOf(track).get(task);
                const box = app.views[number].canvas.getBoundingClientRect();
                const place = app.views[number].laneRow(row);
                const middle = (track.begin[row] + track.end[row]) / 2;
                return [box.left + app.view.x(middle), box.top + place.top + place.height / 2];
            }""",
            [task, track],
        )
        return x, y

    def hover(self, task: str, track: int = 0) -> str:
        """What the card says when the pointer is on a task."""
        self.page.mouse.move(*self.place(task, track))
        return self.card()

    def card(self) -> str:
        self.page.wait_for_selector("#card:not([hidden])")
        return self.page.inner_text("#card")


def open_page(browser: Browser, path: Path, **settings: Any) -> Opened:
    settings = {"viewport": {"width": 1280, "height": 900}} | settings
    page = browser.new_context(**settings).new_page()
    opened = Opened(page)
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("() => window.undertowPage")
    return opened
