"""A release collects all entries below one heading. Unreadable files and lost public names stop it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tools.release import main, public_names

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


PUBLIC = {
    "src/holdfast/__init__.py": '__all__ = ["checkpoint", "sft"]\n',
    "src/holdfast/checkpoint/__init__.py": '__all__ = ["load", "save"]\n',
    "src/holdfast/checkpoint/errors.py": "class SaveFailed(Exception): ...\n",
    "docs/reference/cli.md": (
        "# Commands\n\nExit codes: 0 done; 1 a check says no.\n\n## holdfast sft\n\n```text\n"
        "Options:\n  --data <str>  Rows.\n```\n\n## holdfast push\n\n```text\n  -o, --output FILE  A file.\n```\n"
    ),
    "docs/reference/config.md": (
        "## Top level\n\n| key | type | default | meaning |\n|---|---|---|---|\n| `steps` | number | | Updates. |\n\n"
        "### optim.groups.*\n\n| key | type | default | meaning |\n|---|---|---|---|\n| `lr` | number | | A rate. |\n\n"
        "## optim, kind: adamw\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        "| `foreach` | `auto`, `off` | `auto` | How. |\n"
    ),
    "docs/training.md": "## Metrics\n\n| name | meaning |\n|---|---|\n| `loss`, `eval/<set>/loss` | nats |\n",
}


@pytest.fixture
def tagged(project: Path) -> Path:
    """A repository whose release 0.1.0 has a tag."""
    for name, text in PUBLIC.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    for command in ("init --quiet", "add .", "commit --quiet -m release", "tag v0.1.0"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *command.split()], cwd=project, check=True)
    return project


def replace(project: Path, name: str, old: str, new: str) -> None:
    text = (project / name).read_text()
    assert old in text
    (project / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "gone"),
    [
        ("src/holdfast/__init__.py", ', "sft"', "", "name holdfast.sft"),
        ("src/holdfast/checkpoint/__init__.py", '"load", ', "", "name holdfast.checkpoint.load"),
        ("src/holdfast/checkpoint/errors.py", "SaveFailed", "Failed", "name holdfast.checkpoint.errors.SaveFailed"),
        ("docs/reference/cli.md", "## holdfast sft", "## holdfast tune", "command holdfast sft"),
        ("docs/reference/cli.md", "--output FILE", "--out FILE", "command holdfast push --output"),
        ("docs/reference/cli.md", "; 1 a check says no", "", "exit code 1"),
        ("docs/reference/config.md", "`steps`", "`updates`", "key steps"),
        ("docs/reference/config.md", "`lr`", "`rate`", "key optim.groups.*.lr"),
        ("docs/reference/config.md", ", `off`", "", "key optim.foreach: off"),
        ("docs/training.md", "eval/<set>/loss", "eval/<set>/nll", "metric eval/*/loss"),
    ],
)
def test_a_public_name_that_is_gone_stops_a_release(
    tagged: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, gone: str
) -> None:
    replace(tagged, file, old, new)
    before = (tagged / "CHANGELOG.md").read_bytes()

    assert main(["0.2.0", "--root", str(tagged)]) == 1

    assert f"{gone}, public at v0.1.0, is gone: not deprecated\n" in capsys.readouterr().out
    assert (tagged / "CHANGELOG.md").read_bytes() == before


@pytest.mark.parametrize(
    ("release", "entry", "code"),
    [
        ("0.1.0", "- `steps`: use `updates`.", 0),
        ("0.1.0", "- `stepsize`: use `updates`.", 1),
        ("0.2.0", "- `steps`: use `updates`.", 1),
    ],
)
def test_what_an_earlier_minor_release_deprecated_may_go(
    tagged: Path, capsys: pytest.CaptureFixture[str], release: str, entry: str, code: int
) -> None:
    replace(tagged, "docs/reference/config.md", "`steps`", "`updates`")
    replace(tagged, "CHANGELOG.md", "## [0.1.0] -", f"## [{release}] -")
    replace(tagged, "CHANGELOG.md", "- Zero.\n", f"- Zero.\n\n### Deprecated\n\n{entry}\n")

    assert main(["0.2.1", "--root", str(tagged)]) == code

    words = {0: "deprecated before", 1: "not deprecated"}[code]
    assert f"key steps, public at v0.1.0, is gone: {words}\n" in capsys.readouterr().out


def test_a_section_that_was_deprecated_may_go_with_all_below_it(tagged: Path) -> None:
    replace(tagged, "docs/reference/config.md", "`lr`", "`rate`")
    replace(tagged, "CHANGELOG.md", "- Zero.\n", "- Zero.\n\n### Deprecated\n\n- `optim.groups`.\n")

    assert main(["0.2.0", "--root", str(tagged)]) == 0


def test_more_public_names_and_moved_metrics_stop_nothing(tagged: Path) -> None:
    replace(tagged, "src/holdfast/__init__.py", '"sft"', '"sft", "dpo"')
    (tagged / "docs" / "training.md").rename(tagged / "docs" / "sft.md")
    replace(tagged, "docs/sft.md", "<set>", "SET")

    assert main(["0.2.0", "--root", str(tagged)]) == 0


def test_a_page_that_cannot_be_read_stops_a_release(tagged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tagged / "docs" / "reference" / "config.md").unlink()

    assert main(["0.2.0", "--root", str(tagged)]) == 2

    assert "of these kinds: key" in capsys.readouterr().err


def test_the_lists_of_this_checkout_are_read() -> None:
    names = public_names(Path(__file__).parents[1])

    assert {"holdfast.sft", "holdfast.checkpoint.load", "holdfast.checkpoint.errors.SaveFailed"} <= names["name"]
    assert {"holdfast grpo", "holdfast checkpoint verify --level"} <= names["command"]
    assert names["exit code"] == {"0", "1", "2", "3"}
    assert {"steps", "optim.lr", "optim: muon", "checkpoint.keep.best.*.metric", "rollout.engine.url"} <= names["key"]
    assert {"loss", "grad_norm"} <= names["metric"]
