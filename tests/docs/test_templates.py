"""Every page has the parts of its template, and every page has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TRAINERS = ("sft", "dpo", "reward_models", "grpo", "ppo", "distillation")
MIGRATIONS = ("from_easyr1", "from_trl", "from_verl")
SECTIONS = {
    "trainer": ("Example", "Data", "Metrics", "Keys", "Losses", "Pitfalls"),
    "migration": ("Convert your file", "Continue your checkpoint", "Metrics", "What is different", "See also"),
    "guide": ("See also",),
    "developers": ("Code",),
    "start": (),
}
"""Template to the headings that a page of it has, in this order."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def template(page: Path) -> str:
    """Return the template of a page, by its name and folder."""
    if page.parent.name == "developers":
        return "developers"
    if page.stem in TRAINERS:
        return "trainer"
    if page.stem in MIGRATIONS:
        return "migration"
    return "start" if page.stem == "index" else "guide"


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "reference"]


def faults(page: Path, kind: str) -> list[str]:
    """Return what a page lacks of its template."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    title, _, rest = text.partition("\n")
    opening = rest.strip().partition("\n\n")[0]
    headings = re.findall(r"^## (.+?) *$", text, re.MULTILINE)
    needed = [heading for heading in headings if heading in SECTIONS[kind]]
    return [
        *([] if re.fullmatch(r"# .+", title) else ["a title"]),
        *([] if re.match(r"[A-Z`*\[]", opening) else ["a first paragraph"]),
        *(f"## {name}" for name in SECTIONS[kind] if name not in headings),
        *([] if needed == [name for name in SECTIONS[kind] if name in headings] else ["its sections in their order"]),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_has_the_parts_of_its_template(page: Path) -> None:
    assert faults(page, template(page)) == []


def test_a_page_without_a_part_of_its_template_is_named_with_it(tmp_path: Path) -> None:
    page = tmp_path / "dpo.md"
    page.write_text("# DPO\n\nDPO trains.\n\n## Example\n\n```text\n## Data\n```\n\n## Keys\n\n## Metrics\n")

    assert faults(page, "trainer") == ["## Data", "## Losses", "## Pitfalls", "its sections in their order"]
    page.write_text("")
    assert faults(page, "guide") == ["a title", "a first paragraph", "## See also"]


def test_the_menu_has_every_page_once() -> None:
    class Loader(yaml.SafeLoader):
        """YAML whose tags of the site's own are left unread."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    menu = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]  # noqa: S506  (safe)
    listed = re.findall(r"[\w/]+\.md", str(menu))

    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
