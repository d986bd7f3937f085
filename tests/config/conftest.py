"""Real files: a run's YAML, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from tests.messages import Mistake, Said, mistakes_of

WHOLE = "steps: 3\nmodel: {path: some-model}\ndata: {path: rows.jsonl}\n"
"""The least a run must say, on three lines."""

Load = Callable[..., SFTConfig]
Mistakes = Callable[..., list[Mistake]]


@pytest.fixture
def read(tmp_path: Path) -> Load:
    """Return a function (text, overrides) -> checked tree."""

    def from_text(text: str, *overrides: str, name: str = "run.yaml") -> SFTConfig:
        path = tmp_path / name
        path.write_text(text)
        return load_config(path, overrides, SFTConfig).config

    return from_text


@pytest.fixture
def mistakes(read: Load, tmp_path: Path, said: Said) -> Mistakes:
    """Return a function (text, overrides) -> the mistakes of the error, which is the one in the snapshot."""

    def of_text(text: str, *overrides: str, name: str = "run.yaml") -> list[Mistake]:
        with pytest.raises(ConfigError) as raised:
            read(text, *overrides, name=name)
        said(str(raised.value))
        return mistakes_of(raised.value, tmp_path)

    return of_text
