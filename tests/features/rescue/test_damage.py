"""Damage is named, what is whole raises no alarm, and nothing that a checkpoint brings is run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.recognise import open_foreign
from holdfast.features.rescue.reading.record import UnreadableForeign
from tests.features.rescue.damages import DAMAGES, HOSTILE, Damage, nested, rank_file
from tests.features.rescue.reading import hash_of, place_of
from tests.features.rescue.test_readers import WHOSE


def copied(fixtures: Path, name: str, folder: Path) -> Path:
    """Return a copy of a fixture's checkpoint."""
    source = place_of(fixtures / name)
    target = folder / "copy" / source.name
    target.parent.mkdir()
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return target


def said_of(path: Path) -> str:
    """Return all damage that is named, or why the path is refused."""
    try:
        checkpoint = open_foreign(path)
    except UnreadableForeign as error:
        return str(error)
    examine(checkpoint)
    return "\n".join(finding.text for finding in checkpoint.of_kind("damage"))


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(fixtures: Path, name: str, tmp_path: Path) -> None:
    damage: Damage = DAMAGES[name]
    path = copied(fixtures, damage.fixture, tmp_path)
    damage.do(path)

    said = said_of(path)

    assert re.search(damage.named, said), said


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_checkpoint_brings_is_run(fixtures: Path, name: str, tmp_path: Path) -> None:
    damage: Damage = HOSTILE[name]
    path = copied(fixtures, damage.fixture, tmp_path)
    damage.do(path)
    before = hash_of(path.parent) if "pipe" not in name else ""

    said = said_of(path)

    assert re.search(damage.named, said), said
    assert not list(tmp_path.rglob("owned"))
    assert before == (hash_of(path.parent) if before else "")


def test_settings_that_are_nested_without_end_do_not_hang_a_check(fixtures: Path, tmp_path: Path) -> None:
    path = copied(fixtures, "verl-fsdp2", tmp_path)
    nested(rank_file(path, "optim", 0))

    checkpoint = open_foreign(path)

    assert any("more memory or time than goes" in damage.text for damage in checkpoint.of_kind("damage"))
    assert checkpoint.weights


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", WHOSE)
def test_what_is_whole_raises_no_alarm(fixtures: Path, name: str) -> None:
    assert said_of(place_of(fixtures / name)) == ""
