"""Tokenise rows with preferences: pairs of answers, or single answers with a label; only answers are trained.

Two answers to a prompt become two sequences with equal first tokens, which stay in one forward pass. Templates, masks
and special tokens are those of supervised rows: an answer is tokenised as the completion of its prompt.

A pair has `prompt`, `chosen` and `rejected`, each text or messages. Without a prompt, or if both answers are complete
conversations, their common first messages are the prompt. A labelled row has `prompt`, `completion` and `label`. An
`instruction` instead of the prompt is a user's message, as in supervised rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any, Literal

import numpy as np

from holdfast.config.verbs.dpo import PairDataConfig
from holdfast.data.content.formats import Message, as_messages, instruction_of, parse_messages, with_texts
from holdfast.data.content.lengths import ImageSpan, Stretch, cut_to
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.errors import DataError
from holdfast.types import Example

TokeniseRow = Callable[[Row, int, str, str], Tokenised[Example]]
"""(row, sample id, source name, the row's name for messages) -> its sequences"""


_ALIKE = "its chosen and its rejected answer are the same"


class _Unusable(Exception):  # noqa: N818 - it says what a row is
    """A row whose answers cannot be compared; the arguments are what it is counted as, and a sentence."""


@dataclass(frozen=True)
class PairTokeniser:
    """Turns a row into its chosen and its rejected sequence."""

    rows: RowTokeniser
    """Renders and tokenises prompts and completions."""
    config: PairDataConfig

    def __call__(self, row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        """Tokenise a row; all or nothing of it is left out.

        Raises:
            DataError: A column is missing or malformed, or the row is unusable and that is refused.
        """
        counts: Counter[str] = Counter()
        try:
            full_sides = self._sides(row, name, counts)
            sides = self._cut(full_sides, name, counts)
        except _Unusable as unusable:
            return _left_out(unusable, self.config, name)
        examples = tuple(self.rows.example(side, sample_id, source) for side in sides)
        return Tokenised(examples, dict(counts), _common_head(sides) if sides else 0, _lengths(full_sides))

    def _sides(self, row: Row, name: str, counts: Counter[str]) -> list[Stretch]:
        answers, shape = answer_rows(row, name, prompt_is_rendered=self.config.format is not None)
        if row["chosen"] == row["rejected"]:
            raise _Unusable("alike_dropped", _ALIKE)
        for side, answer in answers.items():
            _refuse_empty(answer, side)
        sides = [
            _alone(self.rows.stretches(answer, shape, name, counts), side, name) for side, answer in answers.items()
        ]
        if shape == "text":
            sides = _with_common_prompt(sides, name)
        _refuse_no_prompt(sides[0], name)
        return sides

    def _cut(self, sides: list[Stretch], name: str, counts: Counter[str]) -> list[Stretch]:
        cut = _fitted(sides, self.config, name, counts)
        if cut and cut[0].tokens == cut[1].tokens:
            raise _Unusable("alike_dropped", f"{_ALIKE} within data.max_length={self.config.max_length}")
        return cut


@dataclass(frozen=True)
class LabelTokeniser:
    """Turns a row with one answer and a label into a sequence that carries `desirable`."""

    rows: RowTokeniser
    config: PairDataConfig

    def __call__(self, row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        """Tokenise a row.

        Raises:
            DataError: As `PairTokeniser`.
        """
        counts: Counter[str] = Counter()
        desirable = label_of(row, name)
        answer = with_texts({**row, "completion": _required(row, "completion", name)})
        answer = _asked(answer, ["completion"], name)
        try:
            _refuse_empty(answer, "completion")
        except _Unusable as unusable:
            return _left_out(unusable, self.config, name)
        side = _alone(self.rows.stretches(answer, "prompt_completion", name, counts), "completion", name)
        _refuse_no_prompt(side, name)
        _refuse_image_in_answer(side, name)
        examples = [self.rows.example(cut, sample_id, source) for cut in _fitted([side], self.config, name, counts)]
        carried = [
            replace(example, per_token={"desirable": np.full(example.tokens.size, desirable)}) for example in examples
        ]
        return Tokenised(tuple(carried), dict(counts), lengths=_lengths([side]))


def _lengths(sides: Sequence[Stretch]) -> tuple[int, ...]:
    return tuple(len(side.tokens) for side in sides)


def preferred_only(tokenise: TokeniseRow) -> TokeniseRow:
    """Return the function that gives what a model should say: the chosen answer, or a desirable one."""

    def preferred(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        tokenised = tokenise(row, sample_id, source, name)
        first = tokenised.examples[:1]
        return replace(
            tokenised, examples=tuple(example for example in first if example.per_token.get("desirable", [True])[0])
        )

    return preferred


def last_token_alone(tokenise: TokeniseRow) -> TokeniseRow:
    """Return the function whose sequences have one trained token, their last: a reward model's score stands there."""

    def at_its_end(example: Example) -> Example:
        return replace(example, loss_mask=np.arange(example.tokens.size) == example.tokens.size - 1)

    def scored(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        tokenised = tokenise(row, sample_id, source, name)
        return replace(tokenised, examples=tuple(at_its_end(example) for example in tokenised.examples))

    return scored


def _left_out(unusable: _Unusable, config: PairDataConfig, name: str) -> Tokenised[Example]:
    counted, sentence = unusable.args
    if config.unusable == "refuse":
        raise DataError(
            f"{name}: {sentence}, so there is nothing to prefer. Remove the row, or set data.unusable: drop."
        ) from None
    return Tokenised((), {counted: 1})


def _refuse_empty(row: Row, side: str) -> None:
    answer = row.get("completion", row.get("text"))
    messages: Sequence[Mapping[str, Any]] = [{"content": answer}] if isinstance(answer, str) else answer or []
    if not any(message.get("tool_calls") or str(message.get("content") or "").strip() for message in messages):
        raise _Unusable("empty_dropped", f"its {side} answer is empty")


def _refuse_no_prompt(side: Stretch, name: str) -> None:
    if side.trained[0]:
        raise DataError(f"{name}: its prompt is empty, and nothing predicts the first token of an answer. Write one.")


def _refuse_image_in_answer(side: Stretch, name: str) -> None:
    """Kto's divergence puts a row's answer behind the prompt of another row, and tokens alone go there."""
    if any(span.end > side.trained.index(True) for span in side.images):
        raise DataError(
            f"{name}: its answer holds an image, and kto compares answers of text alone. Move the image to the prompt, "
            "or remove the row."
        )


def _alone(stretches: Sequence[Stretch], side: str, name: str) -> Stretch:
    """Return an answer's one sequence."""
    if len(stretches) == 1:
        return stretches[0]
    if not stretches:
        raise DataError(f"{name}: its {side} answer has no message of the assistant's, so nothing of it is compared.")
    raise DataError(
        f"{name}: the chat template writes its {side} answer as {len(stretches)} sequences, one per turn, and a "
        "comparison needs one. Set data.train_on: last_turn, or split the row."
    )


def _with_common_prompt(sides: Sequence[Stretch], name: str) -> list[Stretch]:
    """Take the tokens that two texts begin with as their prompt."""
    shortest = min(len(side.tokens) for side in sides)
    common = min(_first_difference(sides), shortest - 1)
    if common < 1:
        raise DataError(
            f"{name} has no prompt, and its chosen and rejected texts begin differently. Add a column prompt, or begin "
            "both texts with it."
        )
    return [
        replace(side, trained=[trained and index >= common for index, trained in enumerate(side.trained)])
        for side in sides
    ]


def _common_head(sides: Sequence[Stretch]) -> int:
    """Return how many tokens the sequences begin with alike, none of them trained; 0 where images say otherwise."""
    head = min(_first_difference(sides), *(side.trained.index(True) for side in sides))
    first = sides[0].images
    for side in sides:
        if len(side.images) != len(first) or any(span.end > head for span in side.images):
            return 0
        if not all(starmap(_same_image, zip(side.images, first, strict=True))):
            return 0
    return head


def _same_image(first: ImageSpan, second: ImageSpan) -> bool:
    same = all(np.array_equal(values, second.inputs[name]) for name, values in first.inputs.items())
    return first is second or (same and first.grids == second.grids)


def _first_difference(sides: Sequence[Stretch]) -> int:
    first, second = (side.tokens for side in sides)
    differ = (
        index
        for index, (first_token, second_token) in enumerate(zip(first, second, strict=False))
        if first_token != second_token
    )
    return next(differ, min(len(first), len(second)))


def _fitted(sides: list[Stretch], config: PairDataConfig, name: str, counts: Counter[str]) -> list[Stretch]:
    """Bring the sequences of a row to at most `max_length` tokens, or leave all of them out.

    Raises:
        DataError: A sequence is longer and `data.overlong` is `refuse`.
    """
    limit = config.max_length
    longest = max(len(side.tokens) for side in sides)
    if longest <= limit:
        return sides
    if config.overlong == "refuse":
        raise DataError(
            f"{name} has {longest} tokens, more than data.max_length={limit}. Raise data.max_length to {longest}, or "
            "set data.overlong to truncate or drop."
        )
    cut = [cut_to(side, limit) for side in sides]
    if config.overlong == "drop" or any(side.trains_nothing for side in cut):
        counts["overlong_dropped"] += 1
        return []
    counts["truncated"] += 1
    return cut


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
    row = with_texts({**row, **{side: _required(row, side, name) for side in SIDES}})
    row = _asked(row, SIDES, name)
    answers = {side: row[side] for side in SIDES}
    conversations = [side for side, value in answers.items() if _is_whole_conversation(value)]
    if len(conversations) == len(SIDES):
        return _from_conversations(row, answers, name), "prompt_completion"
    if row.get("prompt") is not None or prompt_is_rendered:
        if conversations:
            raise DataError(
                f"{name}: its {conversations[0]} answer is a whole conversation and the other one is not. Let both "
                "begin with the assistant's message, or both with the prompt's."
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


def _asked(row: Row, answers: Sequence[str], name: str) -> Row:
    """Turn an `instruction` into a prompt that is a user's message, and its answers into the assistant's."""
    if row.get("prompt") is not None or row.get("instruction") is None:
        return row
    turns = {answer: as_messages(row[answer], "assistant", answer, name) for answer in answers}
    return {**row, "prompt": instruction_of(row, name), **turns}


def _are_texts(answers: Mapping[str, Any]) -> bool:
    return all(isinstance(value, str) for value in answers.values())


def _alike(answers: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return both answers as text or both as messages, or one of the two would go through the template alone."""
    if _are_texts(answers):
        return answers
    return {side: as_messages(value, "assistant", side, name) for side, value in answers.items()}


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
    hint = ""
    if column in SIDES and "label" in row:
        hint = " Rows with completion and label are for preference.loss: kto."
    if column not in SIDES and set(SIDES) <= set(row):
        hint = " Rows with chosen and rejected are for the losses of pairs, such as preference.loss: dpo."
    raise DataError(
        f"{name} has no column {column!r}: {kind}. Its columns are: {', '.join(row)}. Name the file's column, as in "
        f"data.columns={{{column}: its_column}}.{hint}"
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
    return next(
        (index for index, (chosen_message, rejected_message) in pairs if chosen_message != rejected_message),
        min(len(chosen), len(rejected)),
    )
