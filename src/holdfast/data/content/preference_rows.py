"""The shapes of rows with preferences, each brought to prompt and completion.

A pair has `prompt`, `chosen` and `rejected`, each text or messages. Without a prompt, or where both answers are whole
conversations, the messages that both begin with are the prompt. A labelled row has `prompt`, `completion`, `label`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast.data.content.messages import Message, as_messages, parse_messages
from holdfast.data.rows.rows import Row
from holdfast.errors import DataError

SIDES = ("chosen", "rejected")


def answer_rows(
    row: Row, name: str, *, prompt_is_rendered: bool
) -> tuple[dict[str, Row], Literal["prompt_completion", "text"]]:
    """Return a row per side, and the shape both have.

    Args:
        row: Under our column names.
        name: What an error calls it.
        prompt_is_rendered: `data.format` writes the prompt, so no column has to hold it.

    Raises:
        DataError: A column is missing or malformed, or the two sides do not begin alike.
    """
    answers = {side: _required(row, side, name) for side in SIDES}
    whole = [side for side, value in answers.items() if _is_whole_conversation(value)]
    if len(whole) == len(SIDES):
        return _from_conversations(row, answers, name), "prompt_completion"
    if row.get("prompt") is not None or prompt_is_rendered:
        if whole:
            raise DataError(
                f"{name}: its {whole[0]} answer is a whole conversation and the other one is not. Let both begin with "
                "the assistant's message, or both with the prompt's."
            )
        return {
            side: {**row, "completion": value} for side, value in _alike(answers, name).items()
        }, "prompt_completion"
    if _are_texts(answers):
        return {side: {**row, "text": value} for side, value in answers.items()}, "text"
    raise DataError(
        f"{name} has no column 'prompt', and its answers are neither two texts nor two whole conversations that begin "
        f"with one. Its columns are: {', '.join(row)}."
    )


def _are_texts(answers: Mapping[str, Any]) -> bool:
    return all(isinstance(value, str) for value in answers.values())


def _alike(answers: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return both answers as text or both as messages, or one of the two would go through the template alone."""
    if _are_texts(answers):
        return answers
    return {side: as_messages(value, "assistant", side, name) for side, value in answers.items()}


def labelled_row(row: Row, name: str) -> Row:
    """Return a labelled row as a prompt and its completion.

    Raises:
        DataError: A column is missing.
    """
    return {**row, "completion": _required(row, "completion", name)}


def label_of(row: Row, name: str) -> bool:
    """Return whether a row's completion is desirable.

    Raises:
        DataError: There is no label, or it is neither true nor false.
    """
    label = _required(row, "label", name)
    if label in (True, False):  # 0 and 1 too
        return bool(label)
    raise DataError(f"{name}: its label is {label!r}; write true where the completion is desirable, else false.")


def _required(row: Row, column: str, name: str) -> Any:
    value = row.get(column)
    if value is not None:
        return value
    if column in row:
        raise DataError(f"{name} has an empty (null) column {column!r}. Its columns are: {', '.join(row)}.")
    kind = "a pair has prompt, chosen and rejected" if column in SIDES else "kto takes prompt, completion and label"
    other = ""
    if column in SIDES and "label" in row:
        other = " Rows with completion and label are for preference.loss: kto."
    if column not in SIDES and set(SIDES) <= set(row):
        other = " Rows with chosen and rejected are for the losses of pairs, such as preference.loss: dpo."
    raise DataError(
        f"{name} has no column {column!r}: {kind}. Its columns are: {', '.join(row)}. Name the file's column, as in "
        f"data.columns={{{column}: its_column}}.{other}"
    )


def _is_whole_conversation(value: Any) -> bool:
    """Return whether messages begin with somebody else's than the assistant's."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return False
    first = value[0]
    return isinstance(first, Mapping) and first.get("role") not in ("assistant", None)


def _from_conversations(row: Row, conversations: Mapping[str, Any], name: str) -> dict[str, Row]:
    messages = {side: parse_messages(value, name, side) for side, value in conversations.items()}
    common = _common(*messages.values())
    if common == 0:
        raise DataError(f"{name}: its chosen and rejected conversations begin differently, so they share no prompt.")
    answers = {side: turns[common:] for side, turns in messages.items()}
    for side, turns in answers.items():
        if turns and turns[0]["role"] != "assistant":
            raise DataError(
                f"{name}: its two conversations part at a message of the {turns[0]['role']}'s in {side}. A pair is two "
                "answers to one prompt; what the user says must be the same up to there."
            )
    prompt = messages["chosen"][:common]
    return {side: {**row, "prompt": prompt, "completion": turns} for side, turns in answers.items()}


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many messages both begin with."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
