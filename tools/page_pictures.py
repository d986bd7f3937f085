"""Take the pictures of docs/images anew from a demo's run, and look at them afterwards.

holdfast demo --dir /tmp/demo && python -m tools.page_pictures /tmp/demo/grpo
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.driver import Browser, driving  # noqa: E402

from holdfast.features.report.page import write_page  # noqa: E402 - the driver is among the tests

IMAGES = ROOT / "docs" / "images"


def take(browser: Browser, name: str, page: Path, width: int, height: int, theme: str, script: str) -> None:
    browser.size(width, height)
    browser.prefer(theme)
    browser.open(page)
    browser.draw_all()
    browser.run(script)
    browser.draw_all()
    browser.picture(IMAGES / name)


def main() -> None:
    page = write_page([Path(sys.argv[1])], None)
    IMAGES.mkdir(exist_ok=True)
    to_samples = (
        "document.getElementById('search').value = '6'; showSamples();"
        "document.querySelectorAll('#list details')[0].open = true;"
        "document.getElementById('samples').scrollIntoView();"
    )
    with driving() as browser:
        take(browser, "report.png", page, 1200, 1000, "light", "scrollTo(0, 0)")
        take(browser, "report-samples.png", page, 1200, 800, "dark", to_samples)
        take(browser, "report-phone.png", page, 380, 820, "light", "document.getElementById('curves').scrollIntoView()")


if __name__ == "__main__":
    main()
