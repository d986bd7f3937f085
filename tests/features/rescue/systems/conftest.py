"""Files of other systems, converted, written, and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import parse_text
from holdfast.features.rescue.config_import import run_yaml
from holdfast.features.rescue.configuration.convert import ConvertedConfig, convert

Case = tuple[str, dict[str, Any]]
"""A file of another system, and dotted keys here with what they are."""
Convert = Callable[..., ConvertedConfig]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Return a function (text, system, ranks, verb) -> the conversion, whose text reads back as the same tree."""

    def of_text(text: str, system: str, ranks: int = 1, verb: str | None = None) -> ConvertedConfig:
        conversion = convert(parse_text(text, "theirs.yaml"), system, verb, ranks)
        ours = run_yaml(conversion, "theirs.yaml")
        assert parse_text(ours, "ours.yaml").values == conversion.values(), ours
        return conversion

    return of_text


@pytest.fixture
def loads(tmp_path: Path) -> Callable[[ConvertedConfig], Any]:
    """Return a function conversion -> the checked tree of the written file."""

    def of_conversion(conversion: ConvertedConfig) -> Any:
        path = tmp_path / "ours.yaml"
        path.write_text(run_yaml(conversion, "theirs.yaml"))
        return load_config(path, [], ROOTS[conversion.verb]).config

    return of_conversion


def check(
    case: Case, system: str, ranks: int, converted: Convert, loads: Callable[[ConvertedConfig], Any]
) -> ConvertedConfig:
    """Compare every expected key; None is a key that is not written."""
    text, expected = case
    conversion = converted(text, system, ranks)
    assert {key: conversion.settings.get(key) for key in expected} == expected
    loads(conversion)
    return conversion
