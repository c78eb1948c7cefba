"""Take the picture of a report that stands in the README: the top of the page, down to the last finding.

    assay examine builtin:smollm2 --quick --out out/demo
    python scripts/take_screenshot.py out/demo/report.html

Needs Chromium and nothing of the network.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "report.png"
WIDTH = 1200
TALLEST = 1100
MARGIN = 24


def take(report: Path, picture: Path, chromium: str) -> int:
    """Open the report without a network, write the picture and return its size in bytes."""
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": WIDTH, "height": TALLEST}, color_scheme="light", offline=True)
        page = context.new_page()
        page.goto(report.resolve().as_uri())
        box = page.locator(".findings").bounding_box()
        assert box is not None
        height = min(TALLEST, box["y"] + box["height"] + MARGIN)
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        browser.close()
    return picture.stat().st_size


def main() -> int:
    """Take the picture and say how large it is."""
    parser = argparse.ArgumentParser(description="Write docs/images/report.png from a report.")
    parser.add_argument("report", type=Path, help="the report.html of an examination")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("no Chromium on this machine: install one and run this again", file=sys.stderr)
        return 2
    print(f"{options.out}: {take(options.report, options.out, chromium):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
