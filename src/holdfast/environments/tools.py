"""Typed functions as tools: their schema from signature and docstring, and calls of them."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from holdfast.environments.base import ToolCall
from holdfast.rewards.base import CannotStart

_NAMES: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_PYTHON_TYPES: Mapping[str, tuple[Any, Any]] = {
    "boolean": (bool, ()),
    "integer": (int, bool),
    "number": ((int, float), bool),
    "string": (str, ()),
    "array": (list, ()),
    "object": (dict, ()),
}
"""Type of JSON -> what its values are in Python, and what of these they are not."""
_ARGUMENT = re.compile(r"^\s*(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    function: Callable[..., Any]
    """Its first parameter is the environment where it is a method."""
    schema: Mapping[str, Any]
    is_method: bool = False


class CallMistake(ValueError):
    """A call cannot be made; the message is for the policy."""


def tool_of(function: Callable[..., Any], subject: str, *, is_method: bool = False) -> Tool:
    """Return a function as a tool.

    Raises:
        CannotStart: A parameter has no type, or one that JSON has no words for.
    """
    name = getattr(function, "__name__", "")
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise CannotStart(f"{subject}: the types of tool {name} cannot be read: {error}. Correct them.") from error
    summary, described = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise CannotStart(
                f"{subject}: tool {name} takes {parameter}, and a tool is called by the names of its parameters. Write "
                "each of them out."
            )
        if parameter.name not in hints:
            raise CannotStart(
                f"{subject}: parameter {parameter.name} of tool {name} has no type, and the model would not be told "
                f"what to write there. Write one, as in {parameter.name}: int."
            )
        schema = _schema_of(hints[parameter.name])
        if schema is None:
            raise CannotStart(
                f"{subject}: parameter {parameter.name} of tool {name} is {hints[parameter.name]}, which JSON has no "
                "words for. Use int, float, str, bool, list, dict, Literal, or a union with None."
            )
        description = described.get(parameter.name)
        properties[parameter.name] = schema | ({"description": description} if description else {})
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    parameters_schema = {"type": "object", "properties": properties, "required": required}
    written = {"name": name, "description": summary, "parameters": parameters_schema}
    return Tool(name, function, {"type": "function", "function": written}, is_method)


def _schema_of(annotation: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a type; None where JSON has no words for it."""
    if annotation in _NAMES:
        return {"type": _NAMES[annotation]}
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Literal:
        return {"type": "string" if all(isinstance(item, str) for item in arguments) else "number",
                "enum": list(arguments)}  # fmt: skip
    if origin in (Union, types.UnionType):
        return _schema_of_union(arguments)
    if origin in (list, tuple):
        items = _schema_of(arguments[0]) if arguments else {}
        return None if items is None else {"type": "array", **({"items": items} if items else {})}
    return {"type": "object"} if origin is dict else None


def _schema_of_union(members: tuple[Any, ...]) -> dict[str, Any] | None:
    rest = [member for member in members if member is not type(None)]
    schemas = [_schema_of(member) for member in rest]
    if None in schemas:
        return None
    known = [schema for schema in schemas if schema is not None]
    union = known[0] if len(known) == 1 else {"anyOf": known}
    return union if len(rest) == len(members) else {**union, "nullable": True}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the summary of a docstring in Google's form, and what it says of each parameter."""
    summary, _, rest = text.partition("Args:")
    described: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if line.strip().rstrip(":") in {"Returns", "Raises", "Yields"}:
            break
        match = _ARGUMENT.match(line)
        if match is not None:
            last = match.group(1)
            described[last] = match.group(2).strip()
        elif last and line.strip():
            described[last] += " " + line.strip()
    return " ".join(re.split(r"\n\s*(?:Returns|Raises):", summary)[0].split()), described


def arguments_of(tool: Tool, call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as the tool takes them.

    Raises:
        CallMistake: One is missing, unknown, or of another type.
    """
    parameters: Mapping[str, Any] = tool.schema["function"]["parameters"]
    properties, arguments = parameters["properties"], dict(call.arguments)
    unknown = [name for name in arguments if name not in properties]
    missing = [name for name in parameters["required"] if name not in arguments]
    takes = ", ".join(properties) or "nothing"
    if unknown:
        raise CallMistake(f"{tool.name} has no parameter {unknown[0]}; it takes {takes}")
    if missing:
        raise CallMistake(f"{tool.name} needs {missing[0]}; it takes {takes}")
    for name, value in arguments.items():
        if not _fits(value, properties[name]):
            raise CallMistake(f"{name} of {tool.name} should be {_words(properties[name])}, not {value!r}")
        if properties[name].get("type") == "number":
            arguments[name] = value if value is None else float(value)
    return arguments


def _words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    return str(schema.get("type", "of another type"))


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None:
        return bool(schema.get("nullable")) or schema.get("type") == "null"
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(_fits(value, member) for member in schema["anyOf"])
    python_types, excluded = _PYTHON_TYPES.get(str(schema.get("type")), (object, ()))
    if not isinstance(value, python_types) or isinstance(value, excluded):
        return False
    return not isinstance(value, list) or all(_fits(item, schema.get("items", {})) for item in value)
