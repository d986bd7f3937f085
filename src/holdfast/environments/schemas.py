"""Types of Python as JSON schemas, equal to those of transformers' `get_json_schema`.

That function imports torch for every basic type, which a worker has no other use for, and refuses a parameter without
a description.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

_NAMES: Mapping[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array", tuple: "array",
    dict: "object",
}  # fmt: skip


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
