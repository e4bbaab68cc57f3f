"""Draws the README's picture of the page: `make picture`, or `python -m scripts.page_picture`.

Llama-3-8B with FSDP and tensor parallel on 64 H100s, planned, shown in the system's Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.report.browser import open_page, start_browser
from undertow.cli.pages import write_plan_page
from undertow.planner import plan

PICTURE = Path(__file__).parents[1] / "docs" / "page.png"
_WIDTH = 1280


def main() -> None:
    step = plan("llama3-8b", "8xh100x8", "fsdp+tp")
    with tempfile.TemporaryDirectory() as folder, start_browser() as browser:
        path = Path(folder) / "page.html"
        write_plan_page(path, step)
        viewport = {"width": _WIDTH, "height": 900}
        opened = open_page(browser, path, viewport=viewport, color_scheme="light")
        opened.settle()
        end = opened.page.locator("#chart").bounding_box()
        assert end is not None
        clip = {"x": 0, "y": 0, "width": _WIDTH, "height": end["y"] + end["height"] + 14}
        opened.page.screenshot(path=PICTURE, clip=clip)
    sys.stdout.write(f"wrote {PICTURE}\n")


if __name__ == "__main__":
    main()
