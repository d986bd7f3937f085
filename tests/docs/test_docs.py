"""What the pages show works: whole runs load, scripts run, links lead somewhere, the reference is the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.errors import ConfigError
from tests.cli.warm import WarmPython

ROOT = Path(__file__).parents[2]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WHOLE_RUN = re.compile(r"# (\w+)\.yaml(?: \((\w+)\))?\n")
"""First line of a YAML block that is a whole run: its file, and behind it a verb other than sft: `# run.yaml (dpo)`."""
RUNNABLE = re.compile(r"# runnable: (\w+\.py)\n")
"""First line of a Python block that is run, under the name that other blocks import it by."""


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from (text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language)


PAGE_BASE = {
    "sft": ("epochs=1",),
    "dpo": ("epochs=1", "preference=dpo"),
    "reward": ("epochs=1", "preference=bradley_terry"),
    "grpo": ("steps=1", "reward=exact"),
    "distill": ("epochs=1", "teacher.path=t"),
}
"""What each verb needs beside a part of a run, where the part does not say it."""


RUNS = [
    pytest.param(text, match[1], match[2] or "sft", id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "yaml"))
    if (match := WHOLE_RUN.match(text))
]
PRESETS: dict[str, str] = dict(
    re.findall(r"^\| ([^|]+) \| `(\{.+\})` \|$", (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8"), re.MULTILINE)
)
"""Name to YAML, of the table of presets."""
SCRIPTS = {match[1]: text for text in blocks(ROOT / "docs" / "python.md", "python") if (match := RUNNABLE.match(text))}


@pytest.mark.parametrize(("text", "name", "verb"), RUNS)
def test_a_whole_run_in_the_pages_loads(tmp_path: Path, text: str, name: str, verb: str) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)

    assert load_config(path, [], ROOTS[verb]).config.run.name == name


PARTS = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "yaml"))
    if not WHOLE_RUN.match(text)
]


def refusal_of(path: Path, keys: list[str], verb: str) -> str | None:
    try:
        load_config(path, keys, ROOTS[verb])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("text", PARTS)
def test_a_part_of_a_run_in_the_pages_loads_as_one_of_some_verb(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    refusals = dict[str, str]()

    for verb, needed in PAGE_BASE.items():
        keys = {"model.path=m", "data.path=d", "data.max_length=256", *needed}
        # A part that names a section may say where its model or rows come from, or leave that out.
        own = [key for key in keys if not re.search(rf"^{re.split('[.=]', key)[0]}:", text, re.MULTILINE)]
        refused = [refusal for added in (own, keys) if (refusal := refusal_of(path, sorted(added), verb)) is not None]
        if len(refused) == 2:
            refusals[verb] = "\n".join(refused)

    assert len(refusals) < len(PAGE_BASE), "\n\n".join(refusals.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_the_pages_show_whole_runs_and_scripts() -> None:
    """The two tests around this one would pass on pages that show none."""
    assert len(RUNS) >= 4
    assert {"train.py", "my_loss.py", "live_loss.py", "policy.py"} <= set(SCRIPTS)
    assert len(PRESETS) >= 8


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_a_preset_of_the_grpo_page_loads(tmp_path: Path, preset: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(preset)

    load_config(path, ["steps=1", "model.path=m", "data.path=d", "reward=exact", "data.max_length=256"], GRPOConfig)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.cases(1)
def test_a_script_of_the_python_page_runs(warm: WarmPython, tmp_path: Path, name: str) -> None:
    for script, text in SCRIPTS.items():
        (tmp_path / script).write_text(text)

    done = warm.run(name, cwd=tmp_path, timeout_seconds=300)

    assert done.code == 0, done.err[-2000:]


def tool(name: str, *arguments: str, cwd: Path = ROOT) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


def test_a_link_that_leads_nowhere_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# First *thing*: `x.y`\n\n[good](b.md#two-1) [self](#first-thing-xy) [web](https://example.org/x)\n"
        "`[code](gone.md)`\n\n```text\n[fenced](gone.md)\n```\n[gone](gone.md)\n[lost](b.md#three)\n"
    )
    (tmp_path / "b.md").write_text("## Two\n\n## Two\n")

    code, said = tool("links.py", str(tmp_path))

    assert code == 1
    assert said.splitlines() == [
        "a.md:9: gone.md: there is no gone.md here",
        "a.md:10: b.md#three: b.md has no heading #three",
    ]


def test_links_that_lead_somewhere_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("[b](b.md#x)\n")
    (tmp_path / "b.md").write_text("# X\n")

    assert tool("links.py", str(tmp_path)) == (0, "")


@pytest.mark.slow
def test_a_reference_page_that_differs_from_the_code_is_refused(tmp_path: Path) -> None:
    written = tool("reference.py", cwd=tmp_path)
    same = tool("reference.py", "--check", cwd=tmp_path)
    page = tmp_path / "docs" / "reference" / "config.md"
    page.write_text(page.read_text().replace("Peak learning rate.", "A rate."))
    other = tool("reference.py", "--check", cwd=tmp_path)

    assert written[0] == 0
    assert same == (0, "")
    assert other == (1, "docs/reference/config.md: not what the code says; run python tools/reference.py\n")
