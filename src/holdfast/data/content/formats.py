"""The shapes of rows people keep, and the three forms they all come down to.

A row is recognised by its columns. One that fits two shapes is refused, since training would silently ignore the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.config.sections.data import RowFormat
from holdfast.data.content.messages import (
    Message,
    as_messages,
    from_sharegpt,
    parse_list,
    parse_messages,
    parse_tools,
)
from holdfast.data.rows.rows import Row
from holdfast.errors import DataError

Shape = Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"]

NEEDED: Mapping[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
"""Columns that a row of each shape must have."""


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
        """Indices of the assistant's messages that may be trained."""
        turns = range(self.first_trained, len(self.messages))
        return [turn for turn in turns if self.messages[turn]["role"] == "assistant"]


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


def recognise(columns: Collection[str], row_format: RowFormat = "auto", *, prompt_is_rendered: bool = False) -> Shape:
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
    shapes = "; ".join(f"{shape} ({', '.join(names)})" for shape, names in needed.items())
    raise DataError(
        f"The rows have the columns {listed}, which fit no shape we know: {shapes}. "
        "Name the file's columns by data.columns, as in data.columns={prompt: question, completion: answer}."
    )


def normalise(row: Row, shape: Shape, row_name: str) -> Conversation | PromptCompletion | PlainText:
    """Bring a row into one of the three forms.

    Raises:
        DataError: A column is missing, empty (null) or malformed; row and columns are named.
    """
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
            return Conversation(_with_system(row, _from_alpaca(row, row_name)))
        case "prompt_completion":
            return _prompt_completion(row, row_name)
        case "text":
            return PlainText(_text(row["text"], "text", row_name))


def prompt_of(row: Row, row_name: str) -> str | Conversation:
    """Return what a completion would follow: the row's `prompt`, or what its conversation says before the last answer.

    Raises:
        DataError: The row has no prompt, or a malformed one.
    """
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
        what = f"an empty (null) column {column!r}" if column in row else f"no column {column!r}"
        raise DataError(f"{row_name} has {what}. Its columns are: {', '.join(row)}.")
    return value


def _text(value: Any, column: str, row_name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{row_name}: column {column!r} must be text, not a {type(value).__name__}.")
    return value


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    if row.get("system") and messages[0]["role"] != "system":
        return [{"role": "system", "content": row["system"]}, *messages]
    return messages


def _from_alpaca(row: Row, row_name: str) -> list[Message]:
    question = _text(row["instruction"], "instruction", row_name)
    if row.get("input"):
        question += "\n\n" + _text(row["input"], "input", row_name)
    answer = _text(row["output"], "output", row_name)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _prompt_completion(row: Row, row_name: str) -> Conversation | PromptCompletion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(prompt, completion)
    asked = as_messages(prompt, "user", "prompt", row_name)
    answered = as_messages(completion, "assistant", "completion", row_name)
    return Conversation([*asked, *answered], parse_tools(row, row_name), first_trained=len(asked))
