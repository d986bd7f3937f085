"""Typed functions as tools: their schema from signature and docstring, and calls of them."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from holdfast.environments.base import ToolCall
from holdfast.environments.schemas import schema_of, words_for
from holdfast.processes.user_code import CannotStart
from holdfast.text.escaping import with_whole_characters

_ARGUMENT = re.compile(r"^(\s*)(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_SECTIONS = re.compile(r"^[ \t]*(Args|Returns|Raises|Yields):[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    """Name of the function."""
    function: Callable[..., Any]
    """The function itself; the first parameter of a method is its environment."""
    schema: Mapping[str, Any]
    """JSON schema of the function, in the form of transformers' `get_json_schema`."""
    types: Mapping[str, TypeAdapter[Any]]
    """Validator of each parameter by its name; strict, so that "3" is no 3."""
    is_method: bool = False
    """Whether the function is a method of an environment."""
    mistake_of: Callable[[Mapping[str, Any]], str] | None = None
    """What is wrong with arguments, "" if nothing; in the place of `types` where the schema is another program's."""


class CallMistake(ValueError):
    """A call cannot be made; the message is for the policy."""


class UnknownTool(CallMistake):
    """A call names a tool that is not there."""

    def __init__(self, name: str, tools: Sequence[str]) -> None:
        super().__init__(f"there is no tool {name}; there is {', '.join(tools) or 'none'}")
        self.name = name


def tool_of(function: Callable[..., Any], subject: str, *, is_method: bool = False) -> Tool:
    """Make a tool of a function, with a schema from its signature and its docstring in Google's form.

    Args:
        function: A function or coroutine with a type for every parameter.
        subject: Name of the function's file or section, the first words of an error.
        is_method: Whether the first parameter is an environment, which the schema leaves out. Default: False.

    Returns:
        The tool.

    Raises:
        CannotStart: A parameter has no type, a type without a JSON schema, or no name of its own, as `*args`; or the
            function is a generator.
    """
    name = getattr(function, "__name__", "")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise CannotStart(
            f"{subject}: tool {name} is a generator, and what a policy reads is returned, not yielded. Return a list."
        )
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise CannotStart(f"{subject}: the types of tool {name} cannot be read: {error}. Correct them.") from error
    document = _document(inspect.getdoc(function) or "")
    properties = {
        parameter.name: _schema_of_parameter(parameter, hints, subject, name)
        | _described(document.parameters.get(parameter.name))
        for parameter in parameters
    }
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    parameters_schema = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    written: dict[str, Any] = {"name": name, "description": document.summary, "parameters": parameters_schema}
    if (returned := schema_of(hints["return"]) if "return" in hints else None) is not None:
        written["return"] = returned | ({"description": document.returns} if document.returns else {})
    types = {parameter.name: TypeAdapter(hints[parameter.name], config=_STRICT) for parameter in parameters}
    return Tool(name, function, {"type": "function", "function": written}, types, is_method)


def _schema_of_parameter(
    parameter: inspect.Parameter, hints: Mapping[str, Any], subject: str, tool: str
) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise CannotStart(
            f"{subject}: tool {tool} takes {parameter}, and a tool is called by the names of its parameters. Write "
            "each of them out."
        )
    if parameter.name not in hints:
        raise CannotStart(
            f"{subject}: parameter {parameter.name} of tool {tool} has no type, and the model would not be told what "
            f"to write there. Write one, as in {parameter.name}: int."
        )
    schema = schema_of(hints[parameter.name])
    if schema is None:
        raise CannotStart(
            f"{subject}: parameter {parameter.name} of tool {tool} is {hints[parameter.name]}, which JSON has no words "
            "for. Use int, float, str, bool, list, dict, Literal, or a union with None."
        )
    return schema


class _Document(NamedTuple):
    """What a docstring in Google's form says."""

    summary: str
    parameters: Mapping[str, str]
    returns: str


def _document(text: str) -> _Document:
    summary, *rest = _SECTIONS.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    described: dict[str, str] = {}
    last, indent = "", math.inf
    for line in sections.get("Args", "").splitlines():
        match = _ARGUMENT.match(line)
        if match is not None and len(match.group(1)) <= indent:
            indent, last = len(match.group(1)), match.group(2)
            described[last] = match.group(3).strip()
        elif last and line.strip():
            described[last] += " " + line.strip()
    return _Document(summary.strip(), described, sections.get("Returns", "").strip())


def _described(description: str | None) -> dict[str, Any]:
    """Return a parameter's description, and the values that it lists as `(choices: ["a", "b"])`."""
    if not description:
        return {}
    choices = _CHOICES.search(description)
    if choices is None:
        return {"description": description}
    with contextlib.suppress(ValueError):
        return {"enum": json.loads(choices.group(1)), "description": description[: choices.start()].strip()}
    return {"description": description}


def arguments_of(tool: Tool, call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as the tool takes them.

    Raises:
        CallMistake: One is missing, unknown, or of another type.
    """
    if tool.mistake_of is not None:
        if mistake := tool.mistake_of(call.arguments):
            raise CallMistake(f"{tool.name}: {mistake}")
        return dict(call.arguments)
    parameters: Mapping[str, Any] = tool.schema["function"]["parameters"]
    properties, arguments = parameters["properties"], dict(call.arguments)
    unknown = [name for name in arguments if name not in properties]
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    takes = ", ".join(properties) or "nothing"
    if unknown:
        raise CallMistake(f"{tool.name} has no parameter {unknown[0]}; it takes {takes}")
    if missing:
        raise CallMistake(f"{tool.name} needs {missing[0]}; it takes {takes}")
    return {name: _checked(tool, name, value, properties[name]) for name, value in arguments.items()}


def _checked(tool: Tool, name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Return an argument as a value of its parameter's type."""
    is_choice = value is not None and value in schema.get("enum", ())
    try:
        if value is None or is_choice or "enum" not in schema:
            # As JSON: in it a list may be a tuple, and a value a member of an enumeration.
            return tool.types[name].validate_json(with_whole_characters(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):  # a `ValidationError` is a ValueError
        if is_choice:  # a docstring lists choices of another type than the parameter's
            return value
    raise CallMistake(f"{name} of {tool.name} should be {words_for(schema)}, not {value!r}")
