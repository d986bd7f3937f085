"""Rows as token sequences: prompts and completions, text, lengths, prompts for rollouts, previews."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.data import TextConfig
from holdfast.data.tokens.chat import RowTokeniser, Tokenised, describe_template
from holdfast.errors import DataError

PAIR = {"prompt": "What is 2+2?", "completion": " Four."}
TALK = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "Four."},
]


def tokenise(tokenizer: Any, row: dict[str, Any], **text: Any) -> Tokenised:
    return RowTokeniser(tokenizer, TextConfig(**text), Path()).examples(row, 11, "sums")


def with_bos(tokenizer: Any) -> Any:
    """Return a copy that opens every text with <s> and closes it with </s>, as some tokenizers do."""
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    copy = deepcopy(tokenizer)
    specials = [(token, copy.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    copy.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=specials)
    return copy


def test_a_completion_and_its_end_are_trained_and_the_prompt_is_not(bpe: Any) -> None:
    prompt, completion = bpe("What is 2+2?")["input_ids"], bpe(" Four.")["input_ids"]

    (example,) = tokenise(bpe, PAIR).examples

    assert example.tokens.tolist() == [*prompt, *completion, bpe.eos_token_id]
    assert example.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(completion) + 1)
    assert example.tokens.dtype == np.int64
    assert example.loss_mask.dtype == np.bool_
    assert (example.sample_id, example.prompt_id, example.source) == (11, 11, "sums")


def test_the_end_is_left_out_on_request_and_never_doubled(bpe: Any) -> None:
    (bare,) = tokenise(bpe, PAIR, append_eos=False).examples
    (closed,) = tokenise(bpe, {**PAIR, "completion": " Four.</s>"}).examples

    assert bpe.decode(bare.tokens) == "What is 2+2? Four."
    assert bpe.decode(closed.tokens) == "What is 2+2? Four.</s>"


def test_the_prompt_is_trained_on_request_except_for_its_first_token(bpe: Any) -> None:
    (example,) = tokenise(bpe, PAIR, train_on_prompt=True).examples

    assert example.loss_mask.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_special_tokens_open_the_sequence_and_none_stands_between_prompt_and_completion(bpe: Any) -> None:
    tokenizer = with_bos(bpe)

    (pair,) = tokenise(tokenizer, PAIR).examples
    (text,) = tokenise(tokenizer, {"text": "Hello!"}).examples

    assert tokenizer.decode(pair.tokens) == "<s>What is 2+2? Four.</s>"
    assert tokenizer.decode(text.tokens) == "<s>Hello!</s>"


def test_text_is_trained_as_a_whole_except_for_its_first_token(bpe: Any) -> None:
    (example,) = tokenise(bpe, {"text": "Hello! Hi there."}).examples

    assert bpe.decode(example.tokens) == "Hello! Hi there.</s>"
    assert example.loss_mask.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_a_tokenizer_without_an_end_token_needs_append_eos_off(bpe: Any) -> None:
    from copy import deepcopy

    tokenizer = deepcopy(bpe)
    tokenizer.eos_token = None

    with pytest.raises(DataError, match="no end-of-sequence token to append. Set data.append_eos=false"):
        tokenise(tokenizer, PAIR)
    assert len(tokenise(tokenizer, PAIR, append_eos=False).examples) == 1


def test_a_conversational_completion_is_trained_and_earlier_answers_are_not(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template("chatml")
    row = {"prompt": [*TALK, TALK[0]], "completion": [{"role": "assistant", "content": "Still four."}]}

    (example,) = tokenise(tokenizer, row).examples
    (everything,) = tokenise(tokenizer, row, train_on_prompt=True).examples

    assert tokenizer.decode(example.tokens[example.loss_mask]) == "Still four.<|im_end|>"
    assert tokenizer.decode(everything.tokens[everything.loss_mask]) == (
        "user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nStill four.<|im_end|>"
    )


def test_a_system_message_does_not_make_the_prompts_last_answer_a_completion(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template("chatml")
    row = {"prompt": TALK, "completion": [TALK[0], {"role": "assistant", "content": "Still four."}]}

    (example,) = tokenise(tokenizer, row, system="Be brief.").examples

    assert tokenizer.decode(example.tokens[example.loss_mask]) == "Still four.<|im_end|>"


def test_train_on_prompt_leaves_rows_of_messages_alone(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("chatml")

    (example,) = tokenise(tokenizer, {"messages": TALK}, train_on_prompt=True).examples

    assert tokenizer.decode(example.tokens[example.loss_mask]) == "Four.<|im_end|>"


def test_a_system_message_is_added_where_there_is_none(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("chatml")
    own = [{"role": "system", "content": "Be kind."}, *TALK]

    (added,) = tokenise(tokenizer, {"messages": TALK}, system="Be brief.").examples
    (kept,) = tokenise(tokenizer, {"messages": own}, system="Be brief.").examples

    assert tokenizer.decode(added.tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert tokenizer.decode(kept.tokens).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")


def test_a_system_message_makes_a_conversation_of_a_plain_prompt(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("chatml")

    (example,) = tokenise(tokenizer, {"prompt": "2+2?", "completion": "Four."}, system="Be brief.").examples

    assert tokenizer.decode(example.tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\nFour.<|im_end|>\n"
    )
    assert tokenizer.decode(example.tokens[example.loss_mask]) == "Four.<|im_end|>"


def test_messages_without_any_template_say_what_to_set(bpe: Any) -> None:
    with pytest.raises(DataError, match=r"Row 11 of sums is a conversation, .* Set data.chat_template to a jinja file"):
        tokenise(bpe, {"messages": TALK})


def test_a_template_can_be_written_in_the_configuration(bpe: Any) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}" + (
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )

    (example,) = tokenise(bpe, {"messages": TALK}, chat_template=template).examples

    assert bpe.decode(example.tokens) == "[user]What is 2+2?</s>[assistant]Four.</s>"
    assert bpe.decode(example.tokens[example.loss_mask]) == "Four.</s>"


def test_missing_and_broken_template_files_are_named(bpe: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.chat_template=no.jinja: no such file. Tried .*no.jinja and .*no.jinja"):
        RowTokeniser(bpe, TextConfig(chat_template="no.jinja"), tmp_path)
    with pytest.raises(DataError, match="data.format=no.jinja: no such file"):
        RowTokeniser(bpe, TextConfig(format="no.jinja"), tmp_path)
    (tmp_path / "latin.jinja").write_bytes("Frage: \xfc{{ question }}".encode("latin-1"))
    with pytest.raises(DataError, match=r"data.format=latin.jinja: .*latin.jinja cannot be read as UTF-8 text \("):
        RowTokeniser(bpe, TextConfig(format="latin.jinja"), tmp_path)
    (tmp_path / "bad.jinja").write_text("fine\n{% if %}")
    with pytest.raises(DataError, match="data.format=bad.jinja, line 2: "):
        RowTokeniser(bpe, TextConfig(format="bad.jinja"), tmp_path)


@pytest.mark.parametrize("written", ["in a file", "in place"])
def test_content_is_the_prompt_of_the_row_as_jinja_itself_renders_it(bpe: Any, tmp_path: Path, written: str) -> None:
    """The oracle is EasyR1's own rule: jinja2's Template of the file, rendered with content alone."""
    import jinja2

    template = "{{ content | trim }} You FIRST think. Question again: {{ content }}"
    (tmp_path / "math.jinja").write_text(template)
    expected = jinja2.Template(template).render(content=" 2+2? ")
    value = template if written == "in place" else "math.jinja"
    rows = RowTokeniser(bpe, TextConfig(format=value), tmp_path)

    opening = rows.opening({"prompt": " 2+2? ", "answer": "4"}, "row 0")
    chat = rows.opening({"prompt": " 2+2? ", "content": "own"}, "row 1")

    assert bpe.decode(opening.written) == expected
    assert bpe.decode(chat.written) == jinja2.Template(template).render(content="own")


def test_content_of_a_prompt_of_messages_is_no_variable(bpe: Any, tmp_path: Path) -> None:
    rows = RowTokeniser(bpe, TextConfig(format="{{ content }}"), tmp_path)

    with pytest.raises(DataError, match="row 0: data.format cannot be rendered: 'content' is undefined"):
        rows.opening({"prompt": TALK[:1]}, "row 0")


def test_template_variables_may_not_take_the_place_of_arguments(bpe: Any) -> None:
    with pytest.raises(DataError, match="data.template_kwargs: 'tokenize' is an argument that Holdfast sets"):
        tokenise(bpe, {"messages": TALK}, template_kwargs={"tokenize": False})


def test_a_format_renders_the_columns_into_the_prompt(bpe: Any, tmp_path: Path) -> None:
    (tmp_path / "ask.jinja").write_text("Question: {{ question | upper }}\nAnswer:\n")
    tokeniser = RowTokeniser(bpe, TextConfig(format="ask.jinja"), tmp_path)

    (example,) = tokeniser.examples({"question": "2+2?", "completion": " 4"}, 0, "sums").examples

    assert bpe.decode(example.tokens[~example.loss_mask]) == "Question: 2+2?\nAnswer:"
    assert bpe.decode(example.tokens[example.loss_mask]) == " 4</s>"
    assert bpe.decode(tokeniser.opening({"question": "2+2?"}, "Row 0").written) == "Question: 2+2?\nAnswer:"


def test_a_format_writes_the_users_message_of_alpaca_rows(with_template: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "ask.jinja").write_text("{{ instruction }} ({{ level }})")
    tokenizer = with_template("zephyr")
    tokeniser = RowTokeniser(tokenizer, TextConfig(format="ask.jinja"), tmp_path)
    row = {"instruction": "2+2?", "input": "", "level": 3, "output": "4"}

    (example,) = tokeniser.examples(row, 0, "sums").examples

    assert tokenizer.decode(example.tokens) == "<|user|>\n2+2? (3)</s>\n<|assistant|>\n4</s>\n"
    assert tokenizer.decode(tokeniser.opening(row, "Row 0").written) == "<|user|>\n2+2? (3)</s>\n<|assistant|>\n"


def test_a_format_that_names_a_missing_column_lists_the_columns(bpe: Any, tmp_path: Path) -> None:
    (tmp_path / "ask.jinja").write_text("{{ problem }}")
    tokeniser = RowTokeniser(bpe, TextConfig(format="ask.jinja"), tmp_path)

    with pytest.raises(
        DataError, match="Row 4 of sums: .* 'problem' is undefined. The row's columns are: question, com"
    ):
        tokeniser.examples({"question": "2+2?", "completion": "4"}, 4, "sums")
    with pytest.raises(DataError, match="data.format writes the prompt of .* but this is a text row"):
        tokeniser.examples({"text": "abc"}, 4, "sums")


def test_a_format_cannot_reach_python(bpe: Any, tmp_path: Path) -> None:
    (tmp_path / "evil.jinja").write_text("{{ question.__class__.__mro__ }}")
    tokeniser = RowTokeniser(bpe, TextConfig(format="evil.jinja"), tmp_path)

    with pytest.raises(DataError, match="access to attribute '__class__' of 'str' object is unsafe"):
        tokeniser.examples({"question": "2+2?", "completion": "4"}, 4, "sums")


LONG = {"text": "abcdefghij"}
"""Ten tokens under `letters`, eleven with the end."""


@pytest.fixture(scope="module")
def letters() -> Any:
    from holdfast.data.tasks.synthetic import character_tokenizer

    return character_tokenizer()


def test_a_longer_row_is_truncated_on_the_right_and_counted(letters: Any) -> None:
    result = tokenise(letters, LONG, max_length=4)

    assert [letters.decode(example.tokens) for example in result.examples] == ["abcd"]
    assert result.counts == {"truncated": 1}


def test_a_longer_row_is_split_into_pieces_that_share_its_ids(letters: Any) -> None:
    result = tokenise(letters, LONG, max_length=4, overlong="split")

    assert [letters.decode(example.tokens) for example in result.examples] == ["abcd", "efgh", "ij<eos>"]
    assert [example.loss_mask.tolist() for example in result.examples] == [
        [False, True, True, True],
        [False, True, True, True],
        [False, True, True],
    ]
    assert {(example.sample_id, example.prompt_id) for example in result.examples} == {(11, 11)}
    assert result.counts == {"split": 1}


def test_a_piece_that_trains_nothing_is_left_out_and_counted(letters: Any) -> None:
    row = {"prompt": "abcdefgh", "completion": "ij"}

    split = tokenise(letters, row, max_length=4, overlong="split")
    truncated = tokenise(letters, row, max_length=4)
    alone = tokenise(letters, LONG, max_length=5, overlong="split")

    assert [letters.decode(example.tokens) for example in split.examples] == ["ij<eos>"]
    assert split.counts == {"split": 1, "untrained": 2}
    assert truncated.examples == ()
    assert truncated.counts == {"truncated": 1, "untrained": 1}
    assert [letters.decode(example.tokens) for example in alone.examples] == ["abcde", "fghij"]
    assert alone.counts == {"split": 1, "untrained": 1}


def test_a_longer_row_is_dropped_and_counted(letters: Any) -> None:
    result = tokenise(letters, LONG, max_length=10, overlong="drop")

    assert result.examples == ()
    assert result.counts == {"overlong_dropped": 1}


def test_a_longer_row_is_refused_with_its_number_and_length(letters: Any) -> None:
    with pytest.raises(DataError, match=re.escape("Row 11 of sums has 11 tokens, more than data.max_length=10.")):
        tokenise(letters, LONG, max_length=10, overlong="refuse")


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop", "refuse"])
def test_a_row_of_exactly_the_limit_is_left_alone(overlong: str, letters: Any) -> None:
    result = tokenise(letters, LONG, max_length=11, overlong=overlong)

    assert [letters.decode(example.tokens) for example in result.examples] == ["abcdefghij<eos>"]
    assert result.counts == {}


def test_a_row_with_nothing_to_train_is_dropped_and_counted(letters: Any) -> None:
    assert tokenise(letters, {"text": ""}, append_eos=False).counts == {"untrained": 1}
    assert tokenise(letters, {"prompt": "ab", "completion": ""}, append_eos=False).counts == {"untrained": 1}


def test_a_template_without_an_end_of_turn_is_counted(bpe: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )

    result = tokenise(bpe, {"messages": TALK}, chat_template=template)

    assert bpe.decode(result.examples[0].tokens[result.examples[0].loss_mask]) == " Four.\n"
    assert result.counts == {"no_end_of_turn": 1}


def test_prompt_tokens_open_the_answer_of_a_conversation_and_leave_text_alone(
    with_template: Callable[[str], Any],
) -> None:
    tokenizer = with_template("zephyr")
    plain = RowTokeniser(tokenizer, TextConfig(), Path())
    with_system = RowTokeniser(tokenizer, TextConfig(system="Be brief."), Path())

    asked = "<|user|>\nWhat is 2+2?</s>\n<|assistant|>\n"
    assert tokenizer.decode(plain.opening({"prompt": "What is 2+2?"}, "Row 0").written) == "What is 2+2?"
    assert tokenizer.decode(plain.opening({"messages": TALK}, "Row 0").written) == asked
    assert tokenizer.decode(with_system.opening({"prompt": "What is 2+2?"}, "Row 0").written) == (
        "<|system|>\nBe brief.</s>\n" + asked
    )


def test_text_that_goes_past_a_chat_template_is_told(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("zephyr")
    tokenizer.name_or_path = "models/zephyr"

    def skips(row: dict[str, Any], **text: Any) -> bool:
        counts = RowTokeniser(tokenizer, TextConfig(**text), Path()).opening(row, "Row 0").counts
        return counts == {"without_chat_template": 1}

    assert skips({"prompt": "What is 2+2?"})
    assert not skips({"messages": TALK})
    assert not skips({"instruction": "What is 2+2?"})
    assert not skips({"prompt": "What is 2+2?"}, system="Be brief.")
    tokenizer.name_or_path = ""
    assert not skips({"prompt": "What is 2+2?"})


def test_prompt_and_completion_tokens_are_those_a_policy_meets(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("llama3")
    tokeniser = RowTokeniser(tokenizer, TextConfig(), Path())

    for row in (PAIR, {"messages": TALK}):
        (example,) = tokeniser.examples(row, 0, "sums").examples
        prompt = tokeniser.opening(row, "Row 0").written
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert example.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(example.tokens) - len(prompt))


def test_a_prompt_the_template_refuses_is_named(with_template: Callable[[str], Any]) -> None:
    tokeniser = RowTokeniser(with_template("gemma"), TextConfig(system="Be brief."), Path())

    with pytest.raises(DataError, match="Row 3 of sums: .* cannot write the prompt: System role not supported"):
        tokeniser.opening({"prompt": "2+2?"}, "Row 3 of sums")


def test_a_row_of_no_known_shape_is_named(bpe: Any) -> None:
    with pytest.raises(
        DataError, match="Row 11 of sums: The rows have the columns question, answer, which fit no shape"
    ):
        tokenise(bpe, {"question": "2+2?", "answer": "4"})


def test_the_row_is_called_by_the_name_the_caller_gives(bpe: Any) -> None:
    tokeniser = RowTokeniser(bpe, TextConfig(), Path(), formats={"sums": "text"})

    with pytest.raises(DataError, match="^sums row 3 has an empty"):
        tokeniser.examples({"text": None}, 900, "sums", "sums row 3")


def test_described_tokens_join_to_the_text_with_their_marks(bpe: Any) -> None:
    row = {"prompt": "Grüße an 数学!", "completion": " Ωmega 数."}
    (example,) = tokenise(bpe, row).examples

    described = describe_template(example, bpe)

    assert len(described) == len(example.tokens)
    assert "".join(text for text, _ in described) == "Grüße an 数学! Ωmega 数.</s>"
    assert "".join(text for text, trained in described if trained) == " Ωmega 数.</s>"
    assert [trained for _, trained in described] == example.loss_mask.tolist()
    assert described[-1] == ("</s>", True)


def test_the_fingerprint_follows_options_and_templates(with_template: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "ask.jinja").write_text("{{ question }}")
    text = TextConfig(format="ask.jinja")
    original = RowTokeniser(with_template("chatml"), text, tmp_path).fingerprint

    again = RowTokeniser(with_template("chatml"), text, tmp_path).fingerprint
    other_template = RowTokeniser(with_template("zephyr"), text, tmp_path).fingerprint
    other_option = RowTokeniser(
        with_template("chatml"), text.model_copy(update={"max_length": 9}), tmp_path
    ).fingerprint
    (tmp_path / "ask.jinja").write_text("{{ question }}!")
    other_file = RowTokeniser(with_template("chatml"), text, tmp_path).fingerprint

    assert again == original
    assert len({original, other_template, other_option, other_file}) == 4
