"""The assistant's tokens under the chat templates of many families."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.data import TextConfig
from holdfast.data.content.formats import Conversation
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.data.tokens.chat_template import ChatTemplate
from holdfast.errors import DataError
from holdfast.types import Example

Templated = Callable[[str], Any]

TALK = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "Four."},
]
THOUGHTFUL = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHi there."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\nFour."},
]

CHATML = (
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHi there.<|im_end|>\n"
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
)
CHATML_TRAINED = ["Hi there.<|im_end|>", "Four.<|im_end|>"]

WHOLE_CONVERSATIONS: Mapping[str, tuple[str, list[str]]] = {
    "chatml_marked": (CHATML, CHATML_TRAINED),
    "chatml_content_marked": (CHATML, CHATML_TRAINED),
    "chatml_last_marked": (CHATML, CHATML_TRAINED),
    "chatml_all_marked": (CHATML, CHATML_TRAINED),
    "chatml": (CHATML, CHATML_TRAINED),
    "chatml_headless": (CHATML, CHATML_TRAINED),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi there.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>",
        ["Hi there.<|eot_id|>", "Four.<|eot_id|>"],
    ),
    "mistral": (
        "<s>[INST] Hello! [/INST] Hi there.</s>[INST] What is 2+2? [/INST] Four.</s>",
        [" Hi there.</s>", " Four.</s>"],
    ),
    "gemma": (
        "<s><start_of_turn>user\nHello!<end_of_turn>\n<start_of_turn>model\nHi there.<end_of_turn>\n"
        "<start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\nFour.<end_of_turn>\n",
        ["Hi there.<end_of_turn>", "Four.<end_of_turn>"],
    ),
    "zephyr": (
        "<|user|>\nHello!</s>\n<|assistant|>\nHi there.</s>\n<|user|>\nWhat is 2+2?</s>\n<|assistant|>\nFour.</s>\n",
        ["Hi there.</s>", "Four.</s>"],
    ),
    "deepseek": (
        "<s><|User|>Hello!<|Assistant|>Hi there.</s><|User|>What is 2+2?<|Assistant|>Four.</s>",
        ["Hi there.</s>", "Four.</s>"],
    ),
}


@pytest.mark.parametrize("shape", WHOLE_CONVERSATIONS)
def test_a_conversation_is_one_sequence_with_every_answer_and_its_end_trained(
    shape: str, with_template: Templated
) -> None:
    text, answers = WHOLE_CONVERSATIONS[shape]
    tokenizer = with_template(shape)

    (example,) = tokenise(tokenizer, TALK).examples

    assert tokenizer.decode(example.tokens) == text
    assert trained_texts(example, tokenizer) == answers


@pytest.mark.parametrize("shape", WHOLE_CONVERSATIONS)
def test_last_turn_trains_the_last_answer_alone(shape: str, with_template: Templated) -> None:
    tokenizer = with_template(shape)

    (example,) = tokenise(tokenizer, TALK, train_on="last_turn").examples

    assert trained_texts(example, tokenizer) == WHOLE_CONVERSATIONS[shape][1][-1:]


def test_a_template_that_drops_earlier_reasoning_gives_one_sequence_per_answer(with_template: Templated) -> None:
    tokenizer = with_template("qwen3")

    result = tokenise(tokenizer, THOUGHTFUL)

    first, second = result.examples
    question = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first.tokens) == (
        question + "<think>\nA greeting.\n</think>\n\nHi there.<|im_end|>\n"
    )  # fmt: skip
    assert tokenizer.decode(second.tokens) == (
        question + "Hi there.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\nA sum.\n</think>\n\nFour.<|im_end|>\n"
    )
    assert trained_texts(first, tokenizer) == ["<think>\nA greeting.\n</think>\n\nHi there.<|im_end|>"]
    assert trained_texts(second, tokenizer) == ["<think>\nA sum.\n</think>\n\nFour.<|im_end|>"]
    assert (first.prompt_id, second.prompt_id) == (5, 5)
    assert result.counts == {"split_by_turn": 1}


def test_reasoning_in_a_field_of_its_own_is_trained_in_every_turn(with_template: Templated) -> None:
    tokenizer = with_template("qwen3")
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hi there."},
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "reasoning_content": "A sum.", "content": "Four."},
    ]

    examples = tokenise(tokenizer, messages).examples

    assert [trained_texts(example, tokenizer) for example in examples] == [
        ["<think>\nA greeting.\n</think>\n\nHi there.<|im_end|>"],
        ["<think>\nA sum.\n</think>\n\nFour.<|im_end|>"],
    ]


def test_one_answer_with_reasoning_stays_one_sequence(with_template: Templated) -> None:
    tokenizer = with_template("qwen3")

    result = tokenise(tokenizer, THOUGHTFUL, train_on="last_turn")

    assert [trained_texts(example, tokenizer) for example in result.examples] == [
        ["<think>\nA sum.\n</think>\n\nFour.<|im_end|>"]
    ]
    assert result.counts == {}


def test_what_the_generation_prompt_writes_is_not_trained(with_template: Templated) -> None:
    tokenizer = with_template("qwen3")

    (example,) = tokenise(tokenizer, TALK[:2], template_kwargs={"enable_thinking": False}).examples

    assert tokenizer.decode(example.tokens).endswith("assistant\n<think>\n\n</think>\n\nHi there.<|im_end|>\n")
    assert trained_texts(example, tokenizer) == ["Hi there.<|im_end|>"]


def test_a_template_that_closes_every_rendering_trains_the_end_of_turn_and_not_the_close(
    with_template: Templated,
) -> None:
    tokenizer = with_template("phi")

    first, second = tokenise(tokenizer, TALK).examples

    assert tokenizer.decode(second.tokens).endswith("<|assistant|>\nFour.<|end|>\n</s>")
    assert trained_texts(first, tokenizer) == ["Hi there.<|end|>"]
    assert trained_texts(second, tokenizer) == ["Four.<|end|>"]


def test_reasoning_that_the_template_never_writes_is_left_out_and_counted(with_template: Templated) -> None:
    tokenizer = with_template("llama3")
    messages = [TALK[0], {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hi there."}]

    result = tokenise(tokenizer, messages)

    assert trained_texts(result.examples[0], tokenizer) == ["Hi there.<|eot_id|>"]
    assert result.counts == {"reasoning_dropped": 1}


def test_tool_calls_are_trained_and_tools_and_tool_results_are_not(with_template: Templated) -> None:
    tokenizer = with_template("chatml")
    schema = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny, 21"},
        {"role": "assistant", "content": "It is sunny, and 21 degrees."},
    ]

    (example,) = tokenise(tokenizer, messages, tools=[schema]).examples

    assert tokenizer.decode(example.tokens).startswith('<|im_start|>system\nTools: {"type": "function", "function"')
    assert trained_texts(example, tokenizer) == [
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "It is sunny, and 21 degrees.<|im_end|>",
    ]


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RECORDED = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "2"}}}],
     "weight": 0},
    {"role": "tool", "content": "no b"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "What?", "weight": 0},
]  # fmt: skip
"""A trajectory whose first call failed, and whose last answer nobody should learn."""
MASKED_BY_HAND = {
    "chatml": (
        '<|im_start|>system\nTools: {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
        "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nno b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        '[[\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[Four.<|im_end|>]]\n"
    ),
    "qwen3": (
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
        '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nno b<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nFour.<|im_end|>]]\n"
    ),
    "written_arguments": (
        '<|user|>What is 2+2?</s>\n<|assistant|><tool_call>add:{"a": "2"}<|end|></s>\n<|tool|>no b</s>\n'
        '<|assistant|>[[<tool_call>add:{"a": 2, "b": 2}<|end|></s>]]\n<|tool|>4</s>\n<|assistant|>[[Four.</s>]]\n'
    ),
}
"""What is trained stands in double brackets."""


@pytest.mark.parametrize("shape", MASKED_BY_HAND)
def test_a_recorded_trajectory_trains_its_calls_and_answers_but_those_of_weight_0(
    shape: str, with_template: Templated
) -> None:
    tokenizer = with_template(shape)

    (example,) = tokenise(tokenizer, RECORDED, tools=[SCHEMA]).examples

    assert bracketed(example, tokenizer) == MASKED_BY_HAND[shape]
    (last,) = tokenise(tokenizer, RECORDED, tools=[SCHEMA], train_on="last_turn").examples
    assert trained_texts(last, tokenizer) == trained_texts(example, tokenizer)[-1:]


@pytest.mark.parametrize(("role", "weight"), [("user", 0), ("assistant", 0.5), ("assistant", "0")])
def test_a_weight_that_says_something_else_is_refused(role: str, weight: Any, with_template: Templated) -> None:
    messages = [*TALK, {"role": role, "content": "Hi", "weight": weight}]

    with pytest.raises(DataError, match=f"message 4: weight is 1 or 0, whether .* but this is {weight!r} of a message"):
        tokenise(with_template("chatml"), messages)


def test_reasoning_between_tool_calls_of_one_question_stays_in_one_sequence(with_template: Templated) -> None:
    tokenizer = with_template("qwen3")
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "<think>\nGood.\n</think>\n\nIt is sunny."},
    ]

    (example,) = tokenise(tokenizer, messages).examples

    assert trained_texts(example, tokenizer) == [
        '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>',
        "<think>\nGood.\n</think>\n\nIt is sunny.<|im_end|>",
    ]


def test_a_template_that_puts_arguments_into_the_text_gets_them_written_as_json(with_template: Templated) -> None:
    tokenizer = with_template("written_arguments")
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]

    (example,) = tokenise(tokenizer, messages).examples

    assert trained_texts(example, tokenizer) == ['<tool_call>weather:{"city": "Zürich"}<|end|></s>']


def test_a_template_that_wants_parts_gets_text_as_one(with_template: Templated) -> None:
    tokenizer = with_template("parts")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]

    (example,) = tokenise(tokenizer, [{"role": "user", "content": parts}, *TALK[1:]]).examples

    assert tokenizer.decode(example.tokens) == (
        "<|user|>Hello!</s><|assistant|>Hi there.</s><|user|>What is 2+2?</s><|assistant|>Four.</s>"
    )
    assert trained_texts(example, tokenizer) == ["Hi there.</s>", "Four.</s>"]


@pytest.mark.parametrize("written", ["message['content'][:5]", "message['content'][:5] | tojson"])
def test_a_template_that_writes_a_list_as_it_is_gets_text(bpe: Any, written: str) -> None:
    source = "{% for message in messages %}{{ " + written + " }}{% endfor %}"
    template = ChatTemplate(bpe, source, {}, "it")

    text = template.text(Conversation([{"role": "user", "content": "What is 2+2?"}]))

    assert text.strip('"') == "What "


def test_reasoning_that_the_generation_prompt_opens_is_trained_behind_its_opening(with_template: Templated) -> None:
    tokenizer = with_template("thinker")

    (example,) = tokenise(tokenizer, THOUGHTFUL).examples

    assert trained_texts(example, tokenizer) == [
        "A greeting.\n</think>\n\nHi there.<|im_end|>",
        "A sum.\n</think>\n\nFour.<|im_end|>",
    ]


def test_answers_without_reasoning_need_a_template_that_knows(with_template: Templated) -> None:
    tokenizer = with_template("thinker")

    with pytest.raises(DataError, match=r"It opens answers with .*<think>': data\.template_kwargs=\{enable_thinking"):
        tokenise(tokenizer, TALK)
    (example,) = tokenise(tokenizer, TALK, template_kwargs={"enable_thinking": False}).examples

    assert trained_texts(example, tokenizer) == ["Hi there.<|im_end|>", "Four.<|im_end|>"]


def test_a_header_that_is_written_with_one_answer_alone_is_not_trained(with_template: Templated) -> None:
    tokenizer = with_template("late_header")
    messages = [*TALK[:2], {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "It is sunny."}]

    (example,) = tokenise(tokenizer, messages).examples

    assert trained_texts(example, tokenizer) == ["Hi there.<|im_end|>", "It is sunny.<|im_end|>"]
    tokenizer.chat_template = tokenizer.chat_template.replace("im_", "start_of_turn_im_")
    with pytest.raises(DataError, match="the assistant's header of message 3 would be trained"):
        tokenise(tokenizer, messages)


@pytest.mark.parametrize("shape", ["gemma", "llama3", "zephyr"])
def test_of_a_template_that_ignores_the_generation_prompt_no_header_is_trained(
    shape: str, with_template: Templated
) -> None:
    tokenizer = with_template(shape)
    tokenizer.chat_template = tokenizer.chat_template.partition("{%- if add_generation_prompt")[0]

    (example,) = tokenise(tokenizer, TALK).examples

    assert tokenizer.decode(example.tokens) == WHOLE_CONVERSATIONS[shape][0]
    assert trained_texts(example, tokenizer) == WHOLE_CONVERSATIONS[shape][1]


@pytest.mark.parametrize("shape", ["chatml", "chatml_headless", "llama3"])
def test_an_answer_before_any_question_is_trained_behind_its_header(shape: str, with_template: Templated) -> None:
    tokenizer = with_template(shape)

    (example,) = tokenise(tokenizer, [TALK[1], TALK[2], TALK[3]]).examples

    assert trained_texts(example, tokenizer) == WHOLE_CONVERSATIONS[shape][1]


@pytest.mark.parametrize("words", ["<|im_start|>assistant\nI am", "assistant\nI am"])
def test_a_header_in_an_answer_s_own_words_is_refused_and_not_cut(words: str, with_template: Templated) -> None:
    tokenizer = with_template("chatml")
    messages = [TALK[0], {"role": "assistant", "content": words}]

    if words.startswith("<|"):
        with pytest.raises(DataError, match="the assistant's header of message 1 would be trained"):
            tokenise(tokenizer, messages)
        return
    assert trained_texts(tokenise(tokenizer, messages).examples[0], tokenizer) == [f"{words}<|im_end|>"]


def test_a_generation_block_masks_what_prefixes_cannot(with_template: Templated) -> None:
    tokenizer = with_template("transcript_marked")

    (example,) = tokenise(tokenizer, TALK).examples

    assert trained_texts(example, tokenizer) == ["Hi there.<|end|>", "Four.<|end|>"]


def test_an_end_of_turn_inside_the_block_is_the_only_one_trained(with_template: Templated) -> None:
    tokenizer = with_template("transcript_marked")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% endgeneration %}", "<|end|>{% endgeneration %}"
    ).replace("{% endif %}<|end|></s>", "{% endif %}</s>")

    (example,) = tokenise(tokenizer, TALK).examples

    assert trained_texts(example, tokenizer) == ["Hi there.<|end|>", "Four.<|end|>"]


def test_tool_calls_that_the_template_drops_are_an_error(with_template: Templated) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]

    with pytest.raises(DataError, match="of message 1 it leaves out 'weather'"):
        tokenise(with_template("llama3"), messages)


@pytest.mark.parametrize("answer", ["Hi there.", "assistant"])
def test_answers_that_the_template_drops_are_an_error(answer: str, with_template: Templated) -> None:
    with pytest.raises(DataError, match=f"of message 1 it leaves out '{answer}'"):
        tokenise(with_template("mute"), [TALK[0], {"role": "assistant", "content": answer}])


def test_white_space_that_the_template_trims_is_no_disagreement(with_template: Templated) -> None:
    tokenizer = with_template("llama3")
    messages = [{"role": "user", "content": "\nHello!  "}, {"role": "assistant", "content": " Hi  there.\n\n"}]

    (example,) = tokenise(tokenizer, messages).examples

    assert trained_texts(example, tokenizer) == ["Hi  there.<|eot_id|>"]


def test_messages_behind_the_last_answer_are_left_out(with_template: Templated) -> None:
    tokenizer = with_template("chatml")

    (example,) = tokenise(tokenizer, TALK[:3]).examples

    assert tokenizer.decode(example.tokens) == (
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHi there.<|im_end|>\n"
    )  # fmt: skip


def test_a_conversation_without_an_answer_is_dropped_and_counted(with_template: Templated) -> None:
    result = tokenise(with_template("chatml"), TALK[:1])

    assert result.examples == ()
    assert result.counts == {"untrained": 1}


@pytest.mark.parametrize("shape", ["transcript", "deepseek_r1"])
def test_a_template_that_cannot_be_masked_is_refused_with_the_reason(shape: str, with_template: Templated) -> None:
    tokenizer = with_template(shape)

    with pytest.raises(DataError) as caught:
        tokenise(tokenizer, TALK)

    assert str(caught.value).startswith("Row 5 of talk: the chat template of the tokenizer does not let us tell")
    assert "Turn by turn: the prompt for message 1 is no prefix of the prompt with its answer" in str(caught.value)
    assert "Set data.chat_template to a template with {% generation %}" in str(caught.value)


def test_a_template_that_drops_part_of_the_answer_is_refused(with_template: Templated) -> None:
    tokenizer = with_template("deepseek_r1")
    tokenizer.chat_template = tokenizer.chat_template.replace("<think>{{ '\\n' }}", "")

    with pytest.raises(
        DataError, match=re.escape("of message 1 it leaves out '<think> A greeting. </think> Hi there.'")
    ):
        tokenise(tokenizer, THOUGHTFUL)


def test_a_template_that_drops_the_system_message_is_refused(with_template: Templated) -> None:
    with pytest.raises(DataError, match="leaves out messages of the role system, so the model would never see them"):
        tokenise(with_template("deaf"), TALK, system="Be brief.")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [("gemma", "System role not supported"), ("mistral", "Conversation roles must alternate")],
)
def test_a_conversation_the_template_refuses_is_an_error_with_its_reason(
    shape: str, reason: str, with_template: Templated
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *TALK]

    with pytest.raises(DataError, match=f"Row 5 of talk: the chat template .* cannot write this .*: {reason}"):
        tokenise(with_template(shape), messages)


def test_the_users_template_replaces_the_tokenizers(with_template: Templated, tmp_path: Path) -> None:
    tokenizer = with_template("transcript")
    (tmp_path / "mine.jinja").write_text((Path(__file__).parent / "templates" / "zephyr.jinja").read_text())
    text = TextConfig(chat_template="mine.jinja")

    (example,) = RowTokeniser(tokenizer, text, tmp_path).examples({"messages": TALK}, 5, "talk").examples

    assert trained_texts(example, tokenizer) == ["Hi there.</s>", "Four.</s>"]


def tokenise(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **text: Any
) -> Tokenised:
    row = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
    return RowTokeniser(tokenizer, TextConfig(**text), Path()).examples(row, 5, "talk")


def bracketed(example: Example, tokenizer: Any) -> str:
    """Return a sequence's text with what is trained in double brackets."""
    edges = np.flatnonzero(np.diff(example.loss_mask.astype(int))) + 1
    pieces = np.split(example.tokens, edges)
    texts = [tokenizer.decode(piece, clean_up_tokenization_spaces=False) for piece in pieces]
    return "".join(f"[[{text}]]" if number % 2 else text for number, text in enumerate(texts))


def trained_texts(example: Example, tokenizer: Any) -> list[str]:
    """Return the text of each unbroken stretch of trained tokens."""
    texts: list[list[int]] = [[]]
    for token, trained in zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True):
        if trained:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return [tokenizer.decode(text) for text in texts if text]


WITHOUT_SYSTEM = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_roles_that_a_template_leaves_out_are_refused_counted_and_named(bpe: Any) -> None:
    tokeniser = RowTokeniser(bpe, TextConfig(chat_template=WITHOUT_SYSTEM), Path())
    system = [{"role": "system", "content": "Be brief."}, *TALK]
    tool = [TALK[0], {"role": "tool", "content": "Four."}, {"role": "critic", "content": "No."}, TALK[1]]

    with pytest.raises(DataError, match="leaves out messages of the role system, so the model would never see them"):
        tokeniser.examples({"messages": system}, 0, "rows")

    assert dict(tokeniser.examples({"messages": tool}, 0, "rows").counts) == {"tool_dropped": 1, "role_dropped": 1}
    assert dict(tokeniser.opening({"prompt": system[:2]}, "row").counts) == {"system_dropped": 1}
    assert dict(tokeniser.examples({"messages": TALK}, 0, "rows").counts) == {}
    assert dict(tokeniser.opening({"prompt": TALK[:1]}, "row").counts) == {}
