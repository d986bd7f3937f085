"""Recognise the format of rows by their columns, and normalise them to one of three forms.

The forms are a conversation, a prompt with a completion, and plain text. A row whose columns fit two formats is
refused, since training would silently ignore one of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.config.sections.data import RowFormat
from holdfast.data.rows.rows import Row
from holdfast.errors import DataError
from holdfast.text.numbers import number_as_text
from holdfast.text.shortening import shortened

Shape = Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"]

NEEDED: Mapping[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
"""Columns that a row of each shape must have."""

_TEXTS = ("text", "prompt", "completion", "instruction", "input", "output", "chosen", "rejected")


@dataclass(frozen=True)
class Conversation:
    """Messages in turn; assistant turns from `first_trained` on may be trained."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    first_trained: int = 0
    """Index of the first message that belongs to a completion."""
    images: tuple[Any, ...] = ()
    """What to open for each image part, in the order of the parts."""

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages that may be trained: of those, the ones without `weight: 0`."""
        turns = range(self.first_trained, len(self.messages))
        return [
            turn
            for turn in turns
            if self.messages[turn]["role"] == "assistant" and self.messages[turn].get("weight") != 0
        ]


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and what follows it, both as plain text."""

    prompt: str
    completion: str
    images: tuple[Any, ...] = ()
    """What to open for each placeholder in the text."""


@dataclass(frozen=True)
class PlainText:
    """Text that is trained as a whole."""

    text: str
    images: tuple[Any, ...] = ()
    """What to open for each placeholder in the text."""


def row_shape(columns: Collection[str], row_format: RowFormat = "auto", *, prompt_is_rendered: bool = False) -> Shape:
    """Return the shape of rows with these columns.

    Args:
        columns: Of a row, under our names.
        row_format: `auto`, or the one shape the columns are checked against.
        prompt_is_rendered: `data.format` writes the prompt, so no column has to hold it.

    Raises:
        DataError: The columns fit no shape, or two, or not the one asked for.
    """
    needed = dict(NEEDED)
    if prompt_is_rendered:
        needed |= {"prompt_completion": ("completion",), "alpaca": ("output",)}
    fitting = [shape for shape, names in needed.items() if set(names) <= set(columns)]
    listed = ", ".join(columns)
    if row_format != "auto":
        if row_format in fitting:
            return row_format
        missing = [name for name in needed[row_format] if name not in columns]
        raise DataError(
            f"data.rows={row_format} needs the column {' and '.join(missing)}, but the rows have: {listed}. "
            f"Name the file's column, as in data.columns={{{missing[0]}: {next(iter(columns), 'its_column')}}}."
        )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError(
            f"The rows have the columns {listed}, which fit {' and '.join(fitting)}. "
            f"Set data.rows to the one you mean, as in data.rows={fitting[0]}."
        )
    if {"chosen", "rejected"} <= set(columns):
        raise DataError(
            f"The rows have the columns {listed}. Pairs of answers are for `holdfast dpo` and `holdfast reward` (other "
            "commands know a file for them by its section preference); to train on the chosen ones alone, name them by "
            "data.columns, as in data.columns={completion: chosen}."
        )
    shapes = "; ".join(f"{shape} ({', '.join(names)})" for shape, names in needed.items())
    raise DataError(
        f"The rows have the columns {listed}, which fit no shape we know: {shapes}. "
        "Name the file's columns by data.columns, as in data.columns={prompt: question, completion: answer}."
    )


def with_texts(row: Row) -> Row:
    """Return a row whose numbers are texts, in the columns where texts are meant."""
    texts = {column: number_as_text(row[column]) for column in _TEXTS if column in row}
    return {**row, **texts}


def normalise(row: Row, shape: Shape, row_name: str) -> Conversation | PromptCompletion | PlainText:
    """Bring a row into one of the three forms.

    Raises:
        DataError: A column is missing, empty (null) or malformed; row and columns are named.
    """
    row = with_texts(row)
    for column in NEEDED[shape]:
        _require(row, column, row_name)
    match shape:
        case "messages":
            return Conversation(parse_messages(row["messages"], row_name), parse_tools(row, row_name))
        case "sharegpt":
            listed = parse_list(row["conversations"], "conversations", row_name)
            turns = [from_sharegpt(turn, row_name) for turn in listed]
            return Conversation(_with_system(row, parse_messages(turns, row_name)), parse_tools(row, row_name))
        case "alpaca":
            return Conversation(_from_alpaca(row, row_name))
        case "prompt_completion":
            return _prompt_completion(row, row_name)
        case "text":
            return PlainText(_text(row["text"], "text", row_name))


def prompt_of(row: Row, row_name: str) -> str | Conversation:
    """Return what a completion would follow: the row's `prompt`, or what its conversation says before the last answer.

    Raises:
        DataError: The row has no prompt, or a malformed one.
    """
    row = with_texts(row)
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    if "prompt" in row:
        messages = parse_messages(_require(row, "prompt", row_name), row_name, "prompt")
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{row_name}: the prompt ends with the assistant's own words; it must end with a question.")
        return Conversation(messages, parse_tools(row, row_name))
    shapes: tuple[Shape, ...] = ("messages", "sharegpt", "alpaca")
    shape = next((shape for shape in shapes if NEEDED[shape][0] in row), None)
    if shape is None:
        _require(row, "prompt", row_name)
    else:
        content = normalise({"output": "", **row}, shape, row_name)
        if isinstance(content, Conversation):
            messages = list(content.messages)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if messages:
                return replace(content, messages=messages)
    raise DataError(f"{row_name} says nothing before the assistant's answer, so there is no prompt.")


def _require(row: Row, column: str, row_name: str) -> Any:
    value = row.get(column)
    if value is None:
        problem = f"an empty (null) column {column!r}" if column in row else f"no column {column!r}"
        raise DataError(f"{row_name} has {problem}. Its columns are: {', '.join(row)}.")
    return value


def _text(value: Any, column: str, row_name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{row_name}: column {column!r} must be text, not a {type(value).__name__}.")
    return value


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    if row.get("system") and messages[0]["role"] != "system":
        return [{"role": "system", "content": row["system"]}, *messages]
    return messages


def instruction_of(row: Row, row_name: str) -> list[Message]:
    """Return the messages that ask what a row's `instruction` and `input` say, behind its `system` message.

    Raises:
        DataError: One of them is no text.
    """
    question = _text(row["instruction"], "instruction", row_name)
    if row.get("input"):
        question += "\n\n" + _text(row["input"], "input", row_name)
    return _with_system(row, [{"role": "user", "content": question}])


def _from_alpaca(row: Row, row_name: str) -> list[Message]:
    answer = _text(row["output"], "output", row_name)
    return [*instruction_of(row, row_name), {"role": "assistant", "content": answer}]


def _prompt_completion(row: Row, row_name: str) -> Conversation | PromptCompletion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(prompt, completion)
    prompt_messages = as_messages(prompt, "user", "prompt", row_name)
    answered = as_messages(completion, "assistant", "completion", row_name)
    return Conversation([*prompt_messages, *answered], parse_tools(row, row_name), first_trained=len(prompt_messages))


Message = Mapping[str, Any]
"""`role` and `content`, and where they apply `tool_calls`, `reasoning_content`, `name`, `weight`."""

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
        DataError: It is not a list, or a message lacks a role, or both content and tool calls; the message is named.
    """
    messages = []
    for number, message in enumerate(parse_list(value, column, row_name)):
        message_name = f"{row_name}, message {number}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{message_name}: a message needs `role` and `content`, but this is {_shown(message)}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(
                f"{message_name}: a message of role {message['role']!r} has neither content nor tool_calls."
            )
        _check_content(message, message_name)
        _check_weight(message, message_name)
        messages.append(_with_parsed_arguments(message, message_name))
    return messages


def _check_content(message: Message, message_name: str) -> None:
    """Refuse what no template can write: neither text nor a list of parts, nor the object that a tool returned."""
    content = message.get("content")
    is_parts = isinstance(content, list | tuple) and all(
        isinstance(content_part, str | Mapping) for content_part in content
    )
    is_result = message["role"] == "tool" and isinstance(content, Mapping)
    if not (content is None or isinstance(content, str) or is_parts or is_result):
        raise DataError(
            f"{message_name}: content must be text, or a list of parts such as {{'type': 'text', 'text': ...}}, but it "
            f"is {_shown(content)}."
        )


def _check_weight(message: Message, message_name: str) -> None:
    weight = message.get("weight")
    if weight is None or (message["role"] == "assistant" and weight in (0, 1)):
        return
    raise DataError(
        f"{message_name}: weight is 1 or 0, whether a message of role assistant is trained, but this is "
        f"{_shown(weight)} of a message of role {message['role']!r}. Correct it, or leave it out."
    )


def _with_parsed_arguments(message: Message, message_name: str) -> Message:
    """Turn tool-call arguments written as a JSON string (the OpenAI form) into the object that templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{message_name}: a tool call needs a function name, but this is {_shown(call)}.")
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": _from_json(function["arguments"], "tool-call arguments", message_name)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _from_json(text: str, field: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{name}: {field} are not valid JSON ({error}): {_shown(text)}.") from None


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
        raise DataError(f"{row_name}: column 'tools' must be a list of JSON schemas, not {_shown(tools)}.")
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
        raise DataError(f"{row_name}: a turn is from {turn['from']!r}; we know {names}. Rename the role.")
    weight = {"weight": turn["weight"]} if "weight" in turn else {}
    if turn["from"] != "function_call":
        return {"role": role, "content": turn.get("value"), **weight}
    calls = _from_json(turn.get("value") or "", "function calls", row_name)
    calls = calls if isinstance(calls, list) else [calls]
    written = [{"type": "function", "function": call} for call in calls]
    return {"role": role, "content": "", "tool_calls": written, **weight}


def as_messages(value: Any, role: str, column: str, row_name: str) -> list[Message]:
    """Return messages as they are, and text as one message of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else parse_messages(value, row_name, column)


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)
