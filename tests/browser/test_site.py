"""The documentation opened as files, without a server: its search finds pages, and nothing is asked of a network."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser.driver import Browser, driving, missing

ROOT = Path(__file__).parents[2]
REASON = missing() or ("" if find_spec("mkdocstrings") else "mkdocstrings is not installed: make docs")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON or "-")]
SECONDS = 30
TYPE = """
const query = document.querySelector("[data-md-component=search-query]");
document.querySelector("[data-md-toggle=search]").click();
query.focus(); query.value = arguments[0];
query.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true})); query.dispatchEvent(new Event("input"));
"""
RESULTS = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"


def searched(browser: Browser, words: str) -> list[str]:
    """Return the pages that the site's search names for some words."""
    browser.run(TYPE, words)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if links := browser.run(RESULTS):
            return [str(link) for link in links]
        time.sleep(0.1)
    return []


OWN = ("file:", "data:", "about:", "chrome:")
"""What no other machine is asked for; pictures of its own controls, such as a search field's cross, are `chrome:`."""


@pytest.mark.parametrize("page", ["index.html", "reference/cli.html"])
def test_the_search_of_a_site_that_is_opened_as_files_finds_pages(tmp_path: Path, page: str) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    with driving() as browser:
        browser.open(tmp_path / "site" / page)
        links = searched(browser, "adamw_bf16")
        requests = [address for address in browser.requests() if not address.startswith(OWN)]

    assert any("optimizers.html" in link for link in links), links
    assert requests == []
