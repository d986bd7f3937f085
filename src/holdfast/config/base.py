"""What every section of the configuration shares: frozen, closed to unknown keys, documented field by field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field


class Section(BaseModel):
    """One section of the tree. Validators check and never assign: the file says what the run does."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        strict=False,
    )


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def _check_function_path(path: str) -> str:
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{path!r} must name a function in a file, as in my_file.py:my_function")
    return path


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression, searched (not anchored) in canonical parameter or module names."""

FunctionPath = Annotated[str, AfterValidator(_check_function_path)]
"""`file.py:function`; a relative file is looked up beside the YAML."""

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def kind_or(default: str) -> Discriminator:
    """Choose a member of a tagged union by its `kind`; a section without one is of the default kind."""

    def kind_of(value: Any) -> str:
        found = value.get("kind", default) if isinstance(value, Mapping) else getattr(value, "kind", default)
        return str(found)

    return Discriminator(kind_of)


def _kind_alone(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


KindAlone = BeforeValidator(_kind_alone)
"""Lets a tagged union be written as its kind alone: `recompute: full`."""
