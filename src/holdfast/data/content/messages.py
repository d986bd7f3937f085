"""Messages of a conversation, checked: roles and contents, tool calls, tool schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import DataError

Message = Mapping[str, Any]
"""`role` and `content`, and where they apply `tool_calls`, `reasoning_content`, `name`."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def parse_list(value: Any, column: str, row_name: str) -> list[Any]:
    """Check that a column holds a list with something in it."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        kind = "an empty list" if isinstance(value, Sequence) and not value else f"a {type(value).__name__}"
        raise DataError(f"{row_name}: column {column!r} must be a list of messages, not {kind}.")
    return list(value)


def parse_messages(value: Any, row_name: str, column: str = "messages") -> list[Message]:
    """Check a column of messages.

    Raises:
        DataError: It is no list, or a message lacks a role, or both content and tool calls; the message is named.
    """
    messages = []
    for number, message in enumerate(parse_list(value, column, row_name)):
        where = f"{row_name}, message {number}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: a message needs `role` and `content`, but this is {_shortened(message)}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{where}: a message of role {message['role']!r} has neither content nor tool_calls.")
        _check_content(message, where)
        messages.append(_with_parsed_arguments(message, where))
    return messages


def _check_content(message: Message, where: str) -> None:
    """Refuse what no template can write: neither text nor a list of parts, nor the object that a tool returned."""
    content = message.get("content")
    is_parts = isinstance(content, list | tuple) and all(isinstance(part, str | Mapping) for part in content)
    is_result = message["role"] == "tool" and isinstance(content, Mapping)
    if not (content is None or isinstance(content, str) or is_parts or is_result):
        raise DataError(
            f"{where}: content must be text, or a list of parts such as {{'type': 'text', 'text': ...}}, but it is "
            f"{_shortened(content)}."
        )


def _with_parsed_arguments(message: Message, where: str) -> Message:
    """Turn tool-call arguments written as a JSON string (the OpenAI form) into the object that templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call needs a function name, but this is {_shortened(call)}.")
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": _from_json(function["arguments"], "tool-call arguments", where)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _from_json(text: str, what: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: {what} are not valid JSON ({error}): {_shortened(text)}.") from None


def parse_tools(row: Mapping[str, Any], row_name: str) -> list[Mapping[str, Any]]:
    """Return the row's tool schemas: a list, or a JSON string of one.

    Raises:
        DataError: The column is something else.
    """
    tools = row.get("tools")
    if not tools:
        return []
    if isinstance(tools, str):
        tools = _from_json(tools, "tools", row_name)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{row_name}: column 'tools' must be a list of JSON schemas, not {_shortened(tools)}.")
    return list(tools)


def from_sharegpt(turn: Any, row_name: str) -> Any:
    """Turn `from` and `value` into `role` and `content`; what is written as a message already is left alone.

    Raises:
        DataError: The turn is from someone we do not know.
    """
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    role = _SHAREGPT_ROLES.get(turn["from"])
    if role is None:
        names = ", ".join(_SHAREGPT_ROLES)
        raise DataError(f"{row_name}: a turn is from {turn['from']!r}; we know {names}.")
    if turn["from"] != "function_call":
        return {"role": role, "content": turn.get("value")}
    calls = _from_json(turn.get("value") or "", "function calls", row_name)
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def as_messages(value: Any, role: str, column: str, row_name: str) -> list[Message]:
    """Return messages as they are, and text as one message of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else parse_messages(value, row_name, column)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
