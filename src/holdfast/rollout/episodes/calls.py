"""Calls of tools in what a policy says: by the tokenizer's own parser, or by a family's syntax."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.environments.base import MOST_LEVELS, ToolCall, extent_of
from holdfast.files import parse_json

Parse = Callable[[str], tuple[ToolCall, ...]]
"""From what a turn says, its end token left out, to its calls; one that cannot be read is a call with a mistake."""

UNKNOWN = "unknown"
"""Name of a tool in a call that names none."""
_SHOWN = 120


class Family(NamedTuple):
    """How models of a family write a call: a JSON object with the name and the arguments of a function."""

    begin: str
    """"" where the whole turn is the object."""
    end: str = ""


FAMILIES: Mapping[str, Family] = {
    "hermes": Family("<tool_call>", "</tool_call>"),
    "phi4": Family("<|tool_call|>", "<|/tool_call|>"),
    "mistral": Family("[TOOL_CALLS]"),
    "json": Family(""),
}
"""Hermes and Qwen, Phi 4, Mistral, and Llama 3 (a turn that is nothing but JSON); tried in this order."""
_ARGUMENTS = ("arguments", "parameters")


def parser_of_family(family: Family) -> Parse:
    """Return what reads the calls of a family."""

    def parse(text: str) -> tuple[ToolCall, ...]:
        return tuple(call for written in _written(text, family) for call in _calls(written))

    return parse


def parser_of_tokenizer(tokenizer: Any, tools: Sequence[Mapping[str, Any]], prefix: str, end: str) -> Parse | None:
    """Return transformers' own parser of answers; None where the tokenizer says nothing of their form.

    Args:
        tokenizer: Whose `response_template` it is.
        tools: Schemas, by which arguments are cast.
        prefix: A prompt with the opening of an answer, which may be the first part of what is parsed.
        end: The end token of a call, by which the template may know where it ends.
    """
    if not getattr(tokenizer, "response_template", None):
        return None

    def parse(text: str) -> tuple[ToolCall, ...]:
        try:
            message = tokenizer.parse_response(text + end, prefix=prefix, tools=list(tools))
            return tuple(_call(call.get("function", call)) for call in message.get("tool_calls") or ())
        except Exception as error:  # noqa: BLE001 - a pattern of somebody else's over what a model wrote
            return (ToolCall(UNKNOWN, {}, f"the answer cannot be read: {str(error)[:_SHOWN]}"),)

    return parse


def _written(text: str, family: Family) -> list[str]:
    """Return the texts that should be JSON."""
    if not family.begin:
        stripped = text.strip()
        return [stripped] if stripped.startswith("{") and '"name"' in stripped else []
    end = re.escape(family.end) + r"|\Z" if family.end else r"\Z"
    return re.findall(f"{re.escape(family.begin)}(.*?)(?:{end})", text, re.DOTALL)


def _calls(written: str) -> list[ToolCall]:
    try:
        value = parse_json(written)
    except ValueError as error:
        return [ToolCall(UNKNOWN, {}, f"the call is no JSON ({str(error)[:_SHOWN]}): {written.strip()[:_SHOWN]}")]
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        return ToolCall(UNKNOWN, {}, f"the call names no function: {json.dumps(value, default=str)[:_SHOWN]}")
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # told below: it is no object
            arguments = parse_json(arguments)
    if not isinstance(arguments, Mapping):
        return ToolCall(
            name, {}, f"the arguments of {name} are no object: {json.dumps(arguments, default=str)[:_SHOWN]}"
        )
    if extent_of(arguments).levels > MOST_LEVELS:
        return ToolCall(name, {}, f"the arguments of {name} are nested in more than {MOST_LEVELS} levels")
    return ToolCall(name, dict(arguments))
