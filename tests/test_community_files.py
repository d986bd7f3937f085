"""The forms, the citation and the images that a code host and a user of containers read are valid."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
SCHEMAS = {
    "bug.yml": "vendor.github-issue-forms",
    "feature.yml": "vendor.github-issue-forms",
    "config.yml": "vendor.github-issue-config",
}


def checked(schema: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_form_is_what_its_schema_says(name: str) -> None:
    done = checked(SCHEMAS[name], FORMS / name)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_a_form_asks_for_the_environment(name: str) -> None:
    assert "holdfast env" in (FORMS / name).read_text(encoding="utf-8")


def test_the_citation_has_the_version_and_the_address_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    done = checked("vendor.citation-file-format", ROOT / "CITATION.cff")
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^version: (.+)$", cited, re.MULTILINE) == [project["version"]]
    assert re.findall(r'^repository-code: "(.+)"$', cited, re.MULTILINE) == [project["urls"]["Repository"]]


def test_an_image_copies_what_the_repository_has() -> None:
    images = [ROOT / "Dockerfile", *(ROOT / "docker").glob("*.Dockerfile")]

    copied = [name for image in images for line in re.findall(r"^COPY (.+) \S+$", image.read_text(), re.MULTILINE)
              for name in line.split()]  # fmt: skip

    assert len(images) == 3
    assert len(copied) > 8
    assert [name for name in copied if not (ROOT / name).exists()] == []
