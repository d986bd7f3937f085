"""A text stands for the section of a checkpoint to begin with, in files, on the command line and in the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError

BASE = ["steps=1", "model.path=m", "data.path=d", "data.max_length=8"]


def taken(tmp_path: Path, text: str, *overrides: str) -> tuple[str, str]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    section = load_config(path, [*BASE, *overrides], SFTConfig).config.checkpoint.init_from
    assert section is not None
    return section.path, section.take


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("checkpoint: {init_from: a/step-1}", (), ("a/step-1", "weights")),
        ("checkpoint: {init_from: {path: a, take: weights+moments}}", (), ("a", "weights+moments")),
        ("checkpoint: {init_from: a}", ("checkpoint.init_from.take=weights+moments",), ("a", "weights+moments")),
        ("{}", ("checkpoint.init_from=b", "checkpoint.init_from.take=weights+moments"), ("b", "weights+moments")),
        ("checkpoint: {init_from: {path: a, take: weights+moments}}", ("checkpoint.init_from=b",), ("b", "weights")),
    ],
)
def test_a_text_is_the_path_of_the_section(
    tmp_path: Path, text: str, overrides: tuple[str, ...], expected: tuple[str, str]
) -> None:
    assert taken(tmp_path, text, *overrides) == expected


def test_a_later_file_adds_what_is_taken(tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("checkpoint: {init_from: {take: weights+moments+schedule}}")

    assert taken(tmp_path, "checkpoint: {init_from: a}", str(later)) == ("a", "weights+moments+schedule")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("checkpoint:\n  init_from:\n    path: a\n    take: moments\n", "run.yaml:4"),
        ("checkpoint:\n  init_from:\n    take: weights\n", "run.yaml:2"),
        ("checkpoint:\n  init_from: [a]\n", "run.yaml:2"),
    ],
)
def test_what_is_no_such_section_is_named_with_its_line(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=r"init_from") as refused:
        taken(tmp_path, text)

    assert place in str(refused.value)
