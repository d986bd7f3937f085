"""What is said to a user: every message stands in `__snapshots__` beside its test, for a person to read.

`pytest -n 0 FILE --snapshot-update` writes a file's messages anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from syrupy.assertion import SnapshotAssertion

from holdfast.errors import ConfigError

Said = Callable[[str], None]


class Mistake(NamedTuple):
    """A line of an error of a configuration: `run.yaml:4: optim.lr: 'fast' should be a number`."""

    at: str
    key: str
    message: str


MISTAKE = re.compile(r"(command line \(.*?\)|the name of .*?|\S*?\.yaml(?::\d+)?): (?:([\w.]+): )?(.*)", re.DOTALL)


def mistakes_of(error: ConfigError, directory: Path) -> list[Mistake]:
    """Return the mistakes that an error names, their files relative to a directory."""
    lines = str(error).replace(f"{directory}/", "").splitlines()
    return [Mistake(*(part or "" for part in found.groups())) for found in map(MISTAKE.fullmatch, lines) if found]


def places(mistakes: list[Mistake]) -> list[str]:
    """Return where each mistake is: `run.yaml:4: optim.lr`."""
    return [f"{mistake.at}: {mistake.key}".removesuffix(": ") for mistake in mistakes]


def lacks(text: str, named: str) -> list[str]:
    """Return the words that a text does not hold of those that it must name."""
    return [word for word in named.split() if word not in text]


def assert_only(mistakes: list[Mistake], at: str, named: str) -> None:
    """Assert that there is one mistake, that it is at a place, and that its message names each of the words."""
    assert places(mistakes) == [at.removesuffix(": ")]
    assert lacks(mistakes[0].message, named) == []


def assert_refused(message: str, named: str) -> None:
    """Assert that a tree is refused at a key, the first of the words, and that the message names the others."""
    assert f"config: {named.split(maxsplit=1)[0]}: " in message
    assert lacks(message, named) == []


@pytest.fixture
def said(snapshot: SnapshotAssertion, tmp_path: Path) -> Said:
    """Return a function that asserts that a message is the one in the snapshot, DIR for the directory of the test."""

    def is_said(message: str) -> None:
        assert message.replace(str(tmp_path), "DIR") == snapshot

    return is_said
