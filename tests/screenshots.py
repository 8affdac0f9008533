"""Makes the pictures of the live page in docs/images: `make screenshots`.

The cluster on them is scripted (tests/support/live_script.py), so a picture shows what a page of a
busy cluster looks like, and no measurement. Wants Debian's chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.support.browser import FLAGS
from tests.support.live_script import serving

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = 128
MAX_BYTES = 150_000


def main() -> int:
    """Write the pictures. Return 1 if there is no chromium, or a picture is too large."""
    path = shutil.which("chromium")
    if path is None:
        print("error: no chromium: apt-get install chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with serving(evil=False) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        for scheme in ("light", "dark"):
            options: dict[str, Any] = {"color_scheme": scheme, "reduced_motion": "reduce"}
            context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
            page = context.new_page()
            page.goto(f"{url}/pullfill/ui")
            page.locator("#ended tbody tr").first.wait_for()
            page.wait_for_timeout(2500)
            if scheme == "dark":
                page.locator("#ended button").first.click()
                page.locator("dialog svg.fall").wait_for()
            name = {"light": "live-page", "dark": "live-request"}[scheme]
            page.screenshot(path=IMAGES / f"{name}.png")
            context.close()
        browser.close()
    return int(not all([_small(file) for file in sorted(IMAGES.glob("live-*.png"))]))


def _small(file: Path) -> bool:
    """Reduce the colours of a picture. Return whether it is small enough."""
    with Image.open(file) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(file, optimize=True)
    size = file.stat().st_size
    print(f"{file}: {size} bytes" + (f", more than {MAX_BYTES}" if size > MAX_BYTES else ""))
    return size <= MAX_BYTES


if __name__ == "__main__":
    sys.exit(main())
