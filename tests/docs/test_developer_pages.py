"""Pages for developers name files and functions that are there, have their headings, and keep to their size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "holdfast"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs" / "developers").glob("*.md"))]
NAMED = re.compile(r"`([\w/]+\.py): (\w+)`")
"""A file and what is defined in it: `training/step.py: train_step`."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def defines(path: Path, name: str) -> bool:
    """Return whether a file defines a function, a class or a value, at the top or in a class."""
    pattern = rf"^\s*(?:def|class) {name}\b|^{name}\b(?:: [^=\n]+)? = "
    return path.exists() and re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_defined_there(page: Path) -> None:
    named = NAMED.findall(page.read_text(encoding="utf-8"))

    assert [
        f"{file}: {name}"
        for file, name in named
        if not any(defines(folder / file, name) for folder in (PACKAGE, ROOT, page.parent))
    ] == []


def test_the_walks_name_enough() -> None:
    """The test above would pass on pages that name nothing."""
    page = (ROOT / "docs" / "developers" / "architecture.md").read_text(encoding="utf-8")

    assert len(NAMED.findall(page)) >= 40


def test_a_name_that_is_not_there_is_found_out() -> None:
    assert defines(PACKAGE / "training" / "step.py", "train_step")
    assert not defines(PACKAGE / "training" / "step.py", "train_steps")
    assert not defines(PACKAGE / "training" / "gone.py", "train_step")


def test_contributing_stays_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

    assert len(FENCED.sub("", text).split()) <= 900
