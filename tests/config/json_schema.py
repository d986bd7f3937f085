"""The part of JSON Schema (draft 2020-12) that our schema uses: enough to ask it what it accepts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "null": (type(None),), "boolean": (bool,),
    "integer": (int,), "number": (int, float),
}  # fmt: skip
_WORDS = {"title", "description", "default", "examples", "$defs", "properties"}
_OF_ANY: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda wanted, value: (
        isinstance(value, _TYPES[wanted]) and isinstance(value, bool) <= (wanted == "boolean")
    ),
    "enum": lambda wanted, value: value in wanted,
    "const": lambda wanted, value: value == wanted,
}
_OF_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda wanted, value: value >= wanted,
    "maximum": lambda wanted, value: value <= wanted,
    "exclusiveMinimum": lambda wanted, value: value > wanted,
    "exclusiveMaximum": lambda wanted, value: value < wanted,
}
_OF_LISTS: dict[str, Callable[[Any, Any], bool]] = {
    "minItems": lambda wanted, value: len(value) >= wanted,
    "maxItems": lambda wanted, value: len(value) <= wanted,
}


def accepts(schema: Mapping[str, Any], value: Any, root: Mapping[str, Any] | None = None) -> bool:
    """Say whether a schema accepts a value; fail on a keyword that is not known here."""
    root = root or schema
    return all(_keyword(name, wanted, schema, value, root) for name, wanted in schema.items() if name not in _WORDS)


def _keyword(name: str, wanted: Any, schema: Mapping[str, Any], value: Any, root: Mapping[str, Any]) -> bool:
    if name in _OF_ANY:
        return _OF_ANY[name](wanted, value)
    if name in _OF_NUMBERS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return not is_number or _OF_NUMBERS[name](wanted, value)
    if name in _OF_LISTS:
        return not isinstance(value, list) or _OF_LISTS[name](wanted, value)
    match name:
        case "minLength":
            return not isinstance(value, str) or len(value) >= wanted
        case "pattern":
            return not isinstance(value, str) or re.search(wanted, value) is not None
        case "$ref":
            return accepts(root["$defs"][wanted.removeprefix("#/$defs/")], value, root)
        case "anyOf" | "oneOf":
            fitting = sum(accepts(option, value, root) for option in wanted)
            return fitting == 1 if name == "oneOf" else fitting > 0
        case "items" | "prefixItems":
            parts = wanted if name == "prefixItems" else [wanted] * len(value if isinstance(value, list) else [])
            return not isinstance(value, list) or all(map(lambda part, item: accepts(part, item, root), parts, value))
        case "required" | "additionalProperties":
            return not isinstance(value, dict) or _keys(name, wanted, schema, value, root)
    raise AssertionError(f"{name} is no keyword of JSON Schema that is known here")


def _keys(name: str, wanted: Any, schema: Mapping[str, Any], value: dict[str, Any], root: Mapping[str, Any]) -> bool:
    if name == "required":
        return set(wanted) <= set(value)
    known = schema.get("properties", {})
    others = wanted if isinstance(wanted, dict) else {} if wanted else None
    parts = {key: known.get(key, others) for key in value}
    return all(part is not None and accepts(part, value[key], root) for key, part in parts.items())
