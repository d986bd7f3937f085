"""What an export says of itself is read as a stranger's file: whole and of the right types, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.export.about import ABOUT_FILE, Exported, read_about
from holdfast.errors import ModelError

FILES = {"model.safetensors": {"size": 1, "xxh3_128": "ab"}}


def write(directory: Path, **changes: Any) -> None:
    values = json.loads(Exported("id", "run", 3, files=FILES).text())
    (directory / ABOUT_FILE).write_text(json.dumps(values | changes))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path)

    assert read_about(tmp_path) == Exported("id", "run", 3, steps=[], files=FILES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 99),
        ("run_id", 3),
        ("step", True),
        ("step", "3"),
        ("steps", 3),
        ("steps", "ab"),
        ("parent", [1]),
        ("weights", []),
        ("files", {"model.safetensors": {"size": 1, "xxh3_128": 5}}),
        ("files", {"model.safetensors": {"size": 1}}),
        ("files", {"../model.safetensors": {"size": 1, "xxh3_128": "ab"}}),
        ("files", {"a" * 5000: {"size": 1, "xxh3_128": "ab"}}),
        ("more", 1),
    ],
)
def test_odd_values_are_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path, **{field: value})

    with pytest.raises(ModelError, match=f"{ABOUT_FILE} is not what Holdfast writes"):
        read_about(tmp_path)
