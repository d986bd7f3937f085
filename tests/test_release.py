"""A release moves every entry below one heading, and refuses what it cannot read before it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.release import main

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- One.

## [0.1.0] - 2026-01-01

### Added

- Zero.
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").write_text("About fragments.\n")
    (tmp_path / "changelog.d" / "1.md").write_text("### Fixed\n\n- Three, [so](../docs/a.md).\n")
    (tmp_path / "changelog.d" / "2.md").write_text("### Added\n\n- Two,\n  on two lines.\n\n### Fixed\n\n- Four.\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    return tmp_path


def test_entries_move_kind_by_kind(project: Path) -> None:
    assert main(["0.2.0", "--root", str(project)]) == 0

    head, _, rest = (project / "CHANGELOG.md").read_text().partition("## [0.2.0] - ")
    assert head == "# Changelog\n\n## [Unreleased]\n\n"
    assert rest[10:] == (
        "\n\n### Added\n\n- One.\n- Two,\n  on two lines.\n\n### Fixed\n\n- Three, [so](docs/a.md).\n- Four.\n"
        "\n## [0.1.0] - 2026-01-01\n\n### Added\n\n- Zero.\n"
    )
    assert 'version = "0.2.0"' in (project / "pyproject.toml").read_text()
    assert [path.name for path in (project / "changelog.d").iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("version", "fragment", "words"),
    [
        ("0.1.0", "### Fixed\n\n- A.\n", "has a release 0.1.0 already"),
        ("0.2", "### Fixed\n\n- A.\n", "0.2 is no version"),
        ("0.2.0", "### Mended\n\n- A.\n", "changelog.d/1.md has entries of kind 'Mended'"),
        ("0.2.0", "A.\n", "changelog.d/1.md begins with 'A.'"),
    ],
)
def test_what_cannot_be_released_changes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], version: str, fragment: str, words: str
) -> None:
    (project / "changelog.d" / "1.md").write_text(fragment)
    before = {path: path.read_bytes() for path in project.rglob("*.*") if path.is_file()}

    assert main([version, "--root", str(project)]) == 2

    assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in project.rglob("*.*") if path.is_file()} == before
