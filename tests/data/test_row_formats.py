"""Shapes of rows: recognised by columns, brought into three forms."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from holdfast.data.content.formats import (
    Conversation,
    PlainText,
    PromptCompletion,
    normalise,
    prompt_of,
    row_shape,
)
from holdfast.errors import DataError

QUESTION = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        (["messages", "tools", "id"], "messages"),
        (["prompt", "completion", "answer"], "prompt_completion"),
        (["text"], "text"),
        (["instruction", "input", "output"], "alpaca"),
        (["conversations", "system"], "sharegpt"),
    ],
)
def test_a_shape_is_recognised_by_its_columns(columns: list[str], shape: str) -> None:
    assert row_shape(columns) == shape


def test_columns_that_fit_two_shapes_are_refused_until_one_is_named() -> None:
    with pytest.raises(DataError, match=r"columns text, messages, which fit messages and text\. Set data\.rows"):
        row_shape(["text", "messages"])

    assert row_shape(["text", "messages"], "text") == "text"


def test_columns_that_fit_no_shape_are_listed_with_the_shapes_we_know() -> None:
    with pytest.raises(
        DataError, match=re.escape("columns question, answer, which fit no shape we know: messages (mes")
    ):
        row_shape(["question", "answer"])


def test_a_named_shape_whose_column_is_missing_is_refused() -> None:
    with pytest.raises(DataError, match="data.rows=prompt_completion needs the column completion, .* prompt, answer"):
        row_shape(["prompt", "answer"], "prompt_completion")


def test_a_rendered_prompt_needs_no_column() -> None:
    assert row_shape(["question", "completion"], prompt_is_rendered=True) == "prompt_completion"
    assert row_shape(["topic", "output"], prompt_is_rendered=True) == "alpaca"


def test_text_and_plain_prompts_stay_text() -> None:
    assert normalise({"text": "abc"}, "text", "Row 0") == PlainText("abc")
    assert normalise({"prompt": "a", "completion": "b"}, "prompt_completion", "Row 0") == PromptCompletion("a", "b")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (42, "42"),
        (42.0, "42"),
        (0, "0"),
        (-0.5, "-0.5"),
        (2**63, "9223372036854775808"),
        (1e22, "1e+22"),
        (np.float64(7.0), "7"),
        (np.int32(7), "7"),
    ],
)
def test_a_number_is_its_text(number: Any, text: str) -> None:
    pair = {"prompt": "6*7=", "completion": number}
    asked = {"instruction": "Double it.", "input": number, "output": number}
    user, assistant = normalise(asked, "alpaca", "Row 0").messages

    assert normalise(pair, "prompt_completion", "Row 0") == PromptCompletion("6*7=", text)
    assert normalise({**pair, "prompt": [QUESTION]}, "prompt_completion", "Row 0").messages[-1]["content"] == text
    assert normalise({"text": number}, "text", "Row 0") == PlainText(text)
    assert (user["content"], assistant["content"]) == (f"Double it.\n\n{text}", text)
    assert prompt_of({"prompt": number}, "Row 0") == text


@pytest.mark.parametrize("value", [True, float("nan"), float("inf")])
def test_what_is_no_number_has_no_text(value: float) -> None:
    with pytest.raises(DataError, match="Row 0: column 'text' must be text, not a"):
        normalise({"text": value}, "text", "Row 0")


def test_messages_keep_their_extras_and_tools() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    message = {**ANSWER, "reasoning_content": "sum", "name": "bot"}

    found = normalise({"messages": [QUESTION, message], "tools": [tool]}, "messages", "Row 0")

    assert found == Conversation([QUESTION, message], [tool])
    assert isinstance(found, Conversation)
    assert found.assistant_turns == [1]


def test_tools_may_be_a_json_string() -> None:
    found = normalise({"messages": [QUESTION], "tools": '[{"name": "add"}]'}, "messages", "Row 0")

    assert isinstance(found, Conversation)
    assert found.tools == [{"name": "add"}]


def test_tool_call_arguments_written_as_json_become_objects() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": [1, null]}'}}

    found = normalise({"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}, "messages", "Row 0")

    assert isinstance(found, Conversation)
    assert found.messages[1]["tool_calls"] == [{"id": "1", "function": {"name": "add", "arguments": {"a": [1, None]}}}]


def test_only_the_completion_of_a_conversational_prompt_may_be_trained() -> None:
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}

    found = normalise(row, "prompt_completion", "Row 0")

    assert found == Conversation([QUESTION, ANSWER, QUESTION, ANSWER], [], first_trained=3)
    assert isinstance(found, Conversation)
    assert found.assistant_turns == [3]


def test_a_text_prompt_with_a_conversational_completion_is_a_conversation() -> None:
    found = normalise({"prompt": "2+2?", "completion": [ANSWER]}, "prompt_completion", "Row 0")

    assert found == Conversation([QUESTION, ANSWER], [], first_trained=1)


def test_alpaca_rows_join_instruction_and_input() -> None:
    row = {"instruction": "Add.", "input": "2 and 2", "output": "4", "system": "Be brief."}

    assert normalise(row, "alpaca", "Row 0") == Conversation(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add.\n\n2 and 2"},
            ANSWER,
        ]
    )
    assert normalise({"instruction": "2+2?", "input": "", "output": "4"}, "alpaca", "Row 0") == Conversation(
        [QUESTION, ANSWER]
    )


def test_sharegpt_turns_become_messages() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]

    found = normalise({"conversations": turns}, "sharegpt", "Row 0")

    assert found == Conversation(
        [
            {"role": "system", "content": "Be brief."},
            QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
            },
            {"role": "tool", "content": "4"},
            ANSWER,
        ],
        [],
    )


@pytest.mark.parametrize(
    ("row", "shape", "message"),
    [
        ({"prompt": "a", "id": 1}, "prompt_completion", "Row 3 of x has no column 'completion'. Its columns are: prom"),
        ({"text": None, "id": 1}, "text", "Row 3 of x has an empty (null) column 'text'. Its columns are: text, id"),
        ({"text": True}, "text", "Row 3 of x: column 'text' must be text, not a bool"),
        ({"messages": []}, "messages", "Row 3 of x: column 'messages' must be a list of messages, not an empty list"),
        ({"messages": "hi"}, "messages", "Row 3 of x: column 'messages' must be a list of messages, not a str"),
        ({"messages": [QUESTION, {"content": "4"}]}, "messages", "Row 3 of x, message 1: a message needs `role`"),
        ({"messages": [{"role": "user"}]}, "messages", "message 0: a message of role 'user' has neither content nor"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "message 0: content must be text, or a list of p"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages", "'text', 'text': ...}, but it is [5]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages",
            "message 0: a tool call needs a function name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{a"}]}]},
            "messages",
            "message 0: tool-call arguments are not valid JSON",
        ),
        ({"messages": [QUESTION], "tools": {"name": "f"}}, "messages", "column 'tools' must be a list of JSON schemas"),
        ({"conversations": [{"from": "ghost", "value": "x"}]}, "sharegpt", "a turn is from 'ghost'; we know human"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "sharegpt", "role 'assistant' has neither content"),
        ({"prompt": {}, "completion": "x"}, "prompt_completion", "column 'prompt' must be a list of messages, not a"),
        ({"instruction": "x", "output": None}, "alpaca", "an empty (null) column 'output'"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named_with_its_number(row: dict[str, Any], shape: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        normalise(row, shape, "Row 3 of x")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2+2?", "answer": "4"}, "2+2?"),
        ({"prompt": [QUESTION]}, Conversation([QUESTION], [])),
        ({"messages": [QUESTION, ANSWER]}, Conversation([QUESTION], [])),
        ({"instruction": "2+2?", "answer": "4"}, Conversation([QUESTION])),
        ({"conversations": [{"from": "human", "value": "2+2?"}, ANSWER]}, Conversation([QUESTION], [])),
    ],
)  # fmt: skip
def test_a_prompt_is_what_stands_before_the_answer(row: dict[str, Any], prompt: Any) -> None:
    assert prompt_of(row, "Row 0") == prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2?"}, "Row 3 of x has no column 'prompt'. Its columns are: question"),
        ({"prompt": None}, "Row 3 of x has an empty (null) column 'prompt'"),
        ({"prompt": [QUESTION, ANSWER]}, "the prompt ends with the assistant's own words"),
        ({"messages": [ANSWER]}, "says nothing before the assistant's answer"),
    ],
)
def test_a_row_without_a_prompt_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        prompt_of(row, "Row 3 of x")


def test_pairs_are_sent_to_the_commands_that_train_on_pairs() -> None:
    with pytest.raises(DataError, match="columns prompt, chosen, rejected. Pairs of answers are for `holdfast dpo`"):
        row_shape(["prompt", "chosen", "rejected"])
