"""Rows with preferences as sequences: their shapes, what is trained, what is cut, and what is refused or counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import SyntheticConfig
from holdfast.config.verbs.dpo import PairDataConfig
from holdfast.data.tasks.synthetic import SyntheticSource, character_tokenizer, check_answer
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.data.tokens.preferences import LabelTokeniser, PairTokeniser, preferred_only
from holdfast.errors import DataError
from holdfast.types import Example


def pairs(**options: Any) -> PairTokeniser:
    config = PairDataConfig(path="rows", **({"max_length": 64} | options))
    return PairTokeniser(RowTokeniser(character_tokenizer(), config, Path.cwd()), config)


def labels(**options: Any) -> LabelTokeniser:
    config = PairDataConfig(path="rows", **({"max_length": 64} | options))
    return LabelTokeniser(RowTokeniser(character_tokenizer(), config, Path.cwd()), config)


def told(found: Tokenised[Example]) -> list[tuple[str, str]]:
    """Return what comes before the trained tokens of each sequence, and those."""
    tokenizer = character_tokenizer()
    result = []
    for example in found.examples:
        before = example.tokens[: int(example.loss_mask.argmax())]
        result.append(tuple(tokenizer.decode(part.tolist()) for part in (before, example.tokens[example.loss_mask])))
    return result


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_both_answers_follow_the_prompt_and_end() -> None:
    found = pairs()({"prompt": "2+2=", "chosen": "4", "rejected": "22"}, 7, "rows", "rows row 7")

    assert told(found) == [("2+2=", "4<eos>"), ("2+2=", "22<eos>")]
    assert [example.sample_id for example in found.examples] == [7, 7]
    assert found.head == 4


def test_answers_that_are_numbers_are_their_texts() -> None:
    pair = pairs()({"prompt": "2+2=", "chosen": 4, "rejected": 22.0}, 7, "rows", "rows row 7")
    labelled = labels()({"prompt": "2-2=", "completion": 0, "label": True}, 7, "rows", "rows row 7")

    assert told(pair) == [("2+2=", "4<eos>"), ("2+2=", "22<eos>")]
    assert told(labelled) == [("2-2=", "0<eos>")]


CONVERSATIONS = [
    {"prompt": "hi", "chosen": [say("assistant", "yes")], "rejected": "no"},
    {"prompt": [say("user", "hi")], "chosen": [say("assistant", "yes")], "rejected": [say("assistant", "no")]},
    {"chosen": [say("user", "hi"), say("assistant", "yes")], "rejected": [say("user", "hi"), say("assistant", "no")]},
    {
        "prompt": "hi",  # as in UltraFeedback: the prompt once more
        "chosen": [say("user", "hi"), say("assistant", "yes")],
        "rejected": [say("user", "hi"), say("assistant", "no")],
    },
]


@pytest.mark.parametrize("row", CONVERSATIONS)
def test_conversations_go_through_the_template_whatever_their_form(row: dict[str, Any]) -> None:
    found = pairs()(row, 0, "rows", "row")

    assert told(found) == [("<user>hi<assistant>", "yes<eos>"), ("<user>hi<assistant>", "no<eos>")]
    assert found.head == 4


def test_only_what_the_assistant_says_after_the_prompt_is_trained() -> None:
    begin = [say("user", "a"), say("assistant", "b")]
    row = {"chosen": [*begin, say("assistant", "c")], "rejected": [*begin, say("assistant", "d")]}

    found = pairs()(row, 0, "rows", "row")

    assert [trained for _, trained in told(found)] == ["c<eos>", "d<eos>"]


def test_texts_without_a_prompt_share_the_tokens_they_begin_with() -> None:
    row = {"chosen": "ask: x answer: good", "rejected": "ask: x answer: gone"}

    found = pairs(append_eos=False)(row, 0, "rows", "row")

    assert told(found) == [("ask: x answer: go", "od"), ("ask: x answer: go", "ne")]
    assert found.head == len("ask: x answer: go")


def test_a_long_pair_is_cut_alike_or_dropped_or_refused() -> None:
    row = {"prompt": "abc=", "chosen": "0123456789", "rejected": "9876"}

    cut = pairs(max_length=8)(row, 0, "rows", "row")
    dropped = pairs(max_length=8, overlong="drop")(row, 0, "rows", "row")

    assert [trained for _, trained in told(cut)] == ["0123", "9876"]
    assert cut.counts == {"truncated": 1}
    assert (dropped.examples, dropped.counts) == ((), {"overlong_dropped": 1})
    with pytest.raises(DataError, match=r"row has 15 tokens, more than data.max_length=8. Raise data.max_length to 15"):
        pairs(max_length=8, overlong="refuse")(row, 0, "rows", "row")


def test_a_prompt_that_fills_the_sequence_leaves_nothing_to_compare() -> None:
    row = {"prompt": "0123456789=", "chosen": "a", "rejected": "b"}

    found = pairs(max_length=8)(row, 0, "rows", "row")

    assert (found.examples, found.counts) == ((), {"overlong_dropped": 1})


UNUSABLE = [
    (
        {"prompt": "a=", "chosen": "b", "rejected": "b"},
        "alike_dropped",
        "its chosen and its rejected answer are the same",
    ),
    ({"prompt": "a=", "chosen": "b", "rejected": " "}, "empty_dropped", "its rejected answer is empty"),
    (
        {"prompt": "a=", "chosen": [say("assistant", "")], "rejected": "b"},
        "empty_dropped",
        "its chosen answer is empty",
    ),
    (
        {"chosen": [say("user", "q"), say("assistant", "b")], "rejected": [say("user", "q")]},
        "empty_dropped",
        "its rejected answer is empty",
    ),
    (
        {"prompt": "a=", "chosen": "0123456789x", "rejected": "0123456789y"},
        "alike_dropped",
        "its chosen and its rejected answer are the same within data.max_length=12",
    ),
]


@pytest.mark.parametrize(("row", "counted", "words"), UNUSABLE)
def test_a_row_without_a_preference_is_refused_or_counted(row: dict[str, Any], counted: str, words: str) -> None:
    found = pairs(max_length=12, unusable="drop", chat_template=None)(row, 0, "rows", "row")

    assert (found.examples, dict(found.counts)) == ((), {counted: 1})
    with pytest.raises(DataError) as caught:
        pairs(max_length=12)(row, 0, "rows", "row")
    assert str(caught.value) == (
        f"row: {words}, so there is nothing to prefer. Remove the row, or set data.unusable: drop."
    )


REFUSED = [
    (
        {"prompt": "a", "chosen": "b"},
        "row has no column 'rejected': a pair has prompt, chosen and rejected. Its columns",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "row has an empty (null) column 'rejected'."),
    (
        {"prompt": "a", "completion": "b", "label": True},
        "Rows with completion and label are for preference.loss: kto.",
    ),
    ({"chosen": "ab", "rejected": "cd"}, "row has no prompt, and its chosen and rejected texts begin differently."),
    ({"prompt": "", "chosen": "ab", "rejected": "cd"}, "row: its prompt is empty"),
    (
        {"chosen": "ab", "rejected": [say("assistant", "c")]},
        "row has no column 'prompt', and its answers are neither two texts nor two whole conversations",
    ),
    (
        {"prompt": "x", "chosen": [say("user", "x"), say("assistant", "b")], "rejected": "c"},
        "row: its chosen answer is a whole conversation and the other one is not.",
    ),
    (
        {
            "chosen": [say("user", "a"), say("user", "b"), say("assistant", "x")],
            "rejected": [say("user", "a"), say("user", "c"), say("assistant", "y")],
        },
        "row: its two conversations part at a message of the user's in chosen.",
    ),
    (
        {"chosen": [say("user", "a"), say("assistant", "x")], "rejected": [say("user", "b"), say("assistant", "y")]},
        "row: its chosen and rejected conversations begin differently",
    ),
]


@pytest.mark.parametrize(("row", "words"), REFUSED)
def test_a_malformed_pair_is_refused_by_what_is_wrong(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        pairs()(row, 0, "rows", "row")

    assert words in str(caught.value)


def test_a_labelled_row_carries_its_label() -> None:
    for label in (True, False, 1, 0):
        found = labels()({"prompt": "a=", "completion": "b", "label": label}, 3, "rows", "row")

        (example,) = found.examples
        assert example.per_token["desirable"].tolist() == [bool(label)] * example.tokens.size


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a=", "completion": "b"}, "row has no column 'label': kto takes prompt, completion and label."),
        ({"prompt": "a=", "completion": "b", "label": "good"}, "row: its label is 'good'; write true where"),
        ({"prompt": "a=", "chosen": "b", "rejected": "c", "label": True}, "such as preference.loss: dpo."),
        ({"prompt": "a=", "completion": "", "label": True}, "row: its completion answer is empty"),
    ],
)
def test_a_malformed_labelled_row_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        labels()(row, 0, "rows", "row")

    assert words in str(caught.value)


def test_what_a_model_should_say_is_the_chosen_or_the_desirable_answer() -> None:
    pair = preferred_only(pairs())({"prompt": "a=", "chosen": "b", "rejected": "c"}, 0, "rows", "row")
    good, bad = (
        preferred_only(labels())({"prompt": "a=", "completion": "b", "label": label}, 0, "rows", "row")
        for label in (True, False)
    )

    assert [text for _, text in told(pair)] == [text for _, text in told(good)]
    assert bad.examples == ()


def test_a_generated_task_has_pairs_and_labels() -> None:
    config = SyntheticConfig(task="sort", rows=400, noise=0.25)
    source, labelled = SyntheticSource(config, "pairs"), SyntheticSource(config, "labels")
    answers = SyntheticSource(config)

    right = [check_answer(answers.row(index), source.row(index)["chosen"]) for index in range(400)]
    swapped = [check_answer(answers.row(index), source.row(index)["rejected"]) for index in range(400)]
    agree = [
        check_answer(labelled.row(index), row["completion"]) == row["label"]
        for index, row in enumerate(labelled.scan(0))
    ]

    assert 0.65 < sum(right) / 400 < 0.85
    assert [not one for one in right] == swapped
    assert all(agree)
    assert len({each.fingerprint for each in (source, labelled, answers)}) == 3
    assert (
        150
        < sum(row["label"] for row in SyntheticSource(SyntheticConfig(task="sort", rows=400), "labels").scan(0))
        < 250
    )


def test_an_instruction_is_a_users_message_and_its_answers_are_the_assistants() -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    row = {"instruction": "2+2", "input": "now", "system": "add"}
    asked = "system add<eos>user 2+2\n\nnow<eos>assistant "

    found = pairs(chat_template=template, max_length=99)(
        {**row, "chosen": "4", "rejected": "5"}, 0, "rows", "rows row 0"
    )
    labelled = labels(chat_template=template, max_length=99)({**row, "completion": "4", "label": 1}, 0, "rows", "row 0")

    assert told(found) == [(asked, "4<eos>"), (asked, "5<eos>")]
    assert told(labelled) == [(asked, "4<eos>")]
