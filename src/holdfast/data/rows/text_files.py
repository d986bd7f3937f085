"""Tables of text (csv, tsv), read by Python's csv module.

Every value is text, as the file writes it: `007` stays `007`, and `NA` is not a missing value.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Generator
from pathlib import Path
from typing import IO

from holdfast.errors import DataError

_LONGEST_FIELD = 2**28
"""Characters. A quotation mark that is never closed takes the rest of the file into one field."""


def table_rows(opened: IO[bytes], path: Path, delimiter: str) -> Generator[dict[str, str]]:
    """Yield the rows of a table; its first line names the columns, and empty lines are left out.

    Raises:
        DataError: A row has more or fewer fields than there are columns, or is not written as csv; with its last line.
    """
    csv.field_size_limit(_LONGEST_FIELD)  # of the whole process; nobody else here reads csv
    text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    columns: list[str] = []
    try:
        for fields in lines:
            if not fields:
                continue
            if not columns:
                columns = _columns(fields, path)
                continue
            if len(fields) != len(columns):
                separator = "tab" if delimiter == "\t" else "comma"
                raise DataError(
                    f"{path}, line {lines.line_num}: the row has {len(fields)} fields, and the first line names "
                    f"{len(columns)} columns. A field with a {separator}, a quotation mark or a line "
                    "break in it stands in quotation marks."
                )
            yield dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: cannot be read as a table ({error}).") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}).") from None
    finally:
        text.detach()


def _columns(fields: list[str], path: Path) -> list[str]:
    twice = next((name for name in fields if fields.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: the first line names the columns, and two of them are called {twice!r}.")
    return fields
