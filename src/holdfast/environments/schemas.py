"""Types of Python as JSON schemas, as transformers' `get_json_schema` writes them, and values that are of one."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

_NAMES: Mapping[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array", tuple: "array",
    dict: "object",
}  # fmt: skip
_PYTHON_TYPES: Mapping[str, tuple[Any, Any]] = {
    "boolean": (bool, ()),
    "integer": (int, bool),
    "number": ((int, float), bool),
    "string": (str, ()),
    "array": (list, ()),
    "object": (dict, ()),
    "null": (type(None), ()),
}
"""Type of JSON -> what its values are in Python, and what of these they are not."""


def schema_of(annotation: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a type, as transformers' `get_json_schema` writes it; None where there is none."""
    if annotation is Any or annotation in _NAMES:
        return {} if annotation is Any else {"type": _NAMES[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _schema_of_values([member.value for member in annotation])
    return _schema_of_parts(get_origin(annotation), get_args(annotation))


def _schema_of_parts(origin: Any, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    if origin is Literal:
        return _schema_of_values(arguments)
    if origin in (Union, types.UnionType):
        return _schema_of_union(arguments)
    parts = [schema_of(argument) for argument in arguments if argument is not ...]
    if None in parts or len(parts) < len(arguments):
        return None
    if not parts:
        return {"type": _NAMES[origin]} if origin in _NAMES else None
    if origin is list:
        return {"type": "array", "items": parts[0]}
    if origin is tuple:
        return {"type": "array", "prefixItems": parts}
    return {"type": "object", "additionalProperties": parts[-1]} if origin is dict else None


def _schema_of_values(values: Sequence[Any]) -> dict[str, Any] | None:
    names = list(dict.fromkeys(_NAMES.get(type(value), "object") for value in values))
    if not names or {"array", "object"} & set(names):
        return None
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _schema_of_union(members: tuple[Any, ...]) -> dict[str, Any] | None:
    schemas = [schema_of(member) for member in members if member is not type(None)]
    written = [schema for schema in schemas if schema is not None]
    if len(written) < len(schemas):
        return None
    if len(written) == 1:
        union = dict(written[0])
    elif all(schema.keys() == {"type"} for schema in written):
        names = sorted({str(schema["type"]) for schema in written})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": written}
    return {**union, "nullable": True} if type(None) in members else union


def words_for(schema: Mapping[str, Any]) -> str:
    """Return what a value of a schema is called."""
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    names = schema.get("type", "of another type")
    return names if isinstance(names, str) else " or ".join(names)


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value of JSON is of a schema."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, member) for member in schema["anyOf"])
    names = schema.get("type")
    if names is not None and not any(_is(value, name) for name in ([names] if isinstance(names, str) else names)):
        return False
    return _parts_fit(value, schema)


def _parts_fit(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        parts = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        return len(parts) == len(value) and all(map(fits, value, parts))
    return not isinstance(value, dict) or all(
        fits(item, schema.get("additionalProperties", {})) for item in value.values()
    )


def _is(value: Any, name: str) -> bool:
    python_types, excluded = _PYTHON_TYPES[name]
    return isinstance(value, python_types) and not isinstance(value, excluded)
