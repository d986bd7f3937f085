"""Completions as parquet, a file for each step that has some.

A step that is made again after a resume writes its file again, and files of steps that a resume went back behind are
removed, when the run is opened, so the files there are those of the effective run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.files import RegularFile, again, write_all

SAMPLE_FOLDER = "samples"

_NAME = re.compile(r"\.?step-(\d+)\.parquet")
_WHOLE = {"step", "sample_id"}
_PARTS = "rewards"
"""The field whose values become columns of their own, `rewards/NAME`."""


class SampleFiles:
    """The folder of a run's completions."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Make the folder; in one that is there, remove what is torn or of later steps than `first_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for file in list(folder.iterdir()):
            match = _NAME.fullmatch(file.name)
            if match is not None and (file.name.startswith(".") or int(match[1]) > first_step):
                file.unlink()

    def write(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the completions of a step, whole or not at all.

        Raises:
            OSError: The disk is full or in trouble; the file is named.
        """
        data = _as_parquet(samples)
        place = self._folder / f"step-{samples[0]['step']:08d}.parquet"
        again(lambda: _replace(place, data))


def _replace(place: Path, data: bytes) -> None:
    unfinished = place.with_name(f".{place.name}")
    with RegularFile(unfinished, "wb") as file:
        write_all(file, data)
        file.sync()
    unfinished.replace(place)


def _as_parquet(samples: Sequence[Mapping[str, Any]]) -> bytes:
    from pyarrow import Table, schema  # type: ignore[import-untyped]  # has no stubs
    from pyarrow.parquet import write_table  # type: ignore[import-untyped]  # has no stubs

    rows = [_flat(sample) for sample in samples]
    columns = dict.fromkeys(name for row in rows for name in row)
    types = [(name, _type(name, [row.get(name) for row in rows])) for name in columns]
    table = Table.from_pylist([{name: row.get(name) for name in columns} for row in rows], schema=schema(types))
    buffer = io.BytesIO()
    write_table(table, buffer)
    return buffer.getvalue()


def _flat(sample: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in sample.items():
        if name == _PARTS:
            row |= {f"{_PARTS}/{part}": number for part, number in value.items()}
        else:
            # Half an emoji, which a prompt may hold, has no form in UTF-8.
            row[name] = value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
    return row


def _type(name: str, values: Sequence[Any]) -> str:
    """Return Arrow's name of a column's type; a column of nulls alone has numbers."""
    if name in _WHOLE:
        return "int64"
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {float, int}:
        return "float64"
    return "bool" if kinds == {bool} else "string"
