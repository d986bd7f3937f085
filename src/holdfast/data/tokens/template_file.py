"""Jinja files of the user: where they are found, and how a row's columns are rendered. Templates run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.data.rows.files import places
from holdfast.errors import DataError
from holdfast.files import read_text

RENDERING_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template can raise: jinja's own errors, and those of the Python operations it performs on its values."""


class PromptFormat:
    """The template of `data.format`: a row's columns in, the user's prompt out."""

    def __init__(self, path: str, base: Path) -> None:
        """Load the template.

        Raises:
            DataError: There is no such file, or it is not a jinja template.
        """
        self._path = path
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self.source = read_template(path, base, "data.format")
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"data.format={path}, line {error.lineno}: {error.message}.") from None

    def render(self, row: Mapping[str, Any], row_name: str) -> str:
        """Return the prompt.

        Raises:
            DataError: The template names a column that the row lacks, or fails on its values.
        """
        try:
            return self._template.render(dict(row))
        except RENDERING_ERRORS as error:
            raise DataError(
                f"{row_name}: data.format={self._path} cannot be rendered: {error}. "
                f"The row's columns are: {', '.join(row)}."
            ) from None


def read_template(path: str, base: Path, key: str) -> str:
    """Return the text of a template file, looked up from the current directory, then beside the YAML.

    Raises:
        DataError: There is no such file; `key` says which option named it.
    """
    tried = places(path, base)
    for place in tried:
        if place.is_file():
            try:
                return read_text(place)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{key}={path}: {place} cannot be read as UTF-8 text ({error}).") from None
    raise DataError(f"{key}={path}: no such file. Tried {' and '.join(map(str, tried))}.")


def template_text(value: str, base: Path, key: str) -> str:
    """Return a template that is written in the configuration itself, or read the file it names."""
    return value if "{{" in value or "{%" in value else read_template(value, base, key)
