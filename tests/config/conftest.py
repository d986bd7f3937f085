"""Real files: a run's YAML, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError

WHOLE = "steps: 3\nmodel: {path: some-model}\ndata: {path: rows.jsonl}\n"
"""The least a run must say, on three lines."""

Load = Callable[..., SFTConfig]
Mistakes = Callable[..., list[str]]


@pytest.fixture
def read(tmp_path: Path) -> Load:
    """Return a function (text, overrides) -> checked tree."""

    def from_text(text: str, *overrides: str, name: str = "run.yaml") -> SFTConfig:
        path = tmp_path / name
        path.write_text(text)
        return load_config(path, overrides, SFTConfig).config

    return from_text


@pytest.fixture
def mistakes(read: Load, tmp_path: Path) -> Mistakes:
    """Return a function (text, overrides) -> the lines of the error, without the directory of the file."""

    def of_text(text: str, *overrides: str, name: str = "run.yaml") -> list[str]:
        with pytest.raises(ConfigError) as raised:
            read(text, *overrides, name=name)
        return str(raised.value).replace(f"{tmp_path}/", "").splitlines()

    return of_text
