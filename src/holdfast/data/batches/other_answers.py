"""Prompts with answers that belong to other rows, on which KTO measures how far the policy is from its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.batches.candidates import Tokenise, broken_text_named
from holdfast.data.rows.reading import RowReader
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import Tokenised
from holdfast.data.tokens.vision import going_on
from holdfast.errors import DataError
from holdfast.types import Example

ROWS_LOOKED_AT = 1_000
"""So many rows may ask the same, or give no sequence, before a row is refused: every row looks for itself, so without a
bound, rows that nearly all ask the same would be read as often as there are pairs of them."""


class Answer(NamedTuple):
    """What follows a prompt."""

    tokens: NDArray[np.int64]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""


def answer_of(example: Example) -> Answer:
    """Return a sequence from its first trained token on."""
    start = _answer_start(example)
    return Answer(example.tokens[start:], example.loss_mask[start:])


def with_answer(asked: Example, answer: Answer, max_length: int) -> Example:
    """Return the prompt of a sequence, its images included, with another answer; cut where it becomes longer."""
    start = _answer_start(asked)
    tokens = np.concatenate([asked.tokens[:start], answer.tokens])[:max_length]
    loss_mask = np.concatenate([np.zeros(start, np.bool_), answer.loss_mask])[:max_length]
    positions = None if asked.positions is None else going_on(asked.positions[:, :start], tokens.size - start)
    return replace(asked, tokens=tokens, loss_mask=loss_mask, positions=positions, per_token={})


@dataclass(frozen=True)
class OtherAnswerTokeniser:
    """Turns a row into its sequence, and its prompt with the answer of another row.

    Whose answer that is depends on the rows of the source alone, and on nothing that orders or batches them: of the
    rows that `RowReader.others` yields first, `ROWS_LOOKED_AT` at most, it is the first that is taken, gives a sequence
    and asks something else.
    """

    tokenise: Tokenise[Example]
    """Gives one sequence of a row, or none."""
    reader: RowReader
    """The same rows in the same order as the reader whose rows are tokenised: a sample id is a draw of it, and decides
    whose answer it is. All sources have an index."""
    accept: Callable[[Row], bool] | None
    """Row filter; None takes every row."""
    max_length: int

    def __call__(self, row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        """Tokenise a row.

        Args:
            row: What `reader` reads at this draw.
            sample_id: The draw.
            source: The name of the row's source.
            name: The row's name for messages.

        Raises:
            DataError: It is malformed, or a row that is looked at for its answer; or none of those has another prompt.
        """
        tokenised = self.tokenise(row, sample_id, source, name)
        if not tokenised.examples:
            return tokenised
        (own,) = tokenised.examples
        other = with_answer(own, self._other_answer(own, sample_id, name), self.max_length)
        # Sequences of one pack carry the same columns; nothing reads these.
        blank = {
            column: np.zeros((other.tokens.size, *values.shape[1:]), values.dtype)
            for column, values in own.per_token.items()
        }
        return replace(tokenised, examples=(own, replace(other, per_token=blank)))

    def _other_answer(self, own: Example, sample_id: int, name: str) -> Answer:
        looked_at = 0
        for source, other_name, row in islice(self.reader.others(sample_id), ROWS_LOOKED_AT):
            looked_at += 1
            if self.accept is not None and not self.accept(row):
                continue
            with broken_text_named(row, other_name):
                others = self.tokenise(row, sample_id, source.name, other_name).examples
            if others and not _same_prompt(own, others[0]):
                return answer_of(others[0])
        raise DataError(
            f"{name}: with reference.precompute, kto puts the answer of another row of {own.source} behind this row's "
            f"prompt, and none of the {looked_at:,} rows that were looked at has another prompt and can be used. Add "
            "such rows, or leave reference.precompute out."
        )


def _answer_start(example: Example) -> int:
    return int(example.loss_mask.argmax())


def _same_prompt(one: Example, other: Example) -> bool:
    prompt, other_prompt = (each.tokens[: _answer_start(each)] for each in (one, other))
    if not np.array_equal(prompt, other_prompt) or one.model_inputs.keys() != other.model_inputs.keys():
        return False
    return all(np.array_equal(values, other.model_inputs[name]) for name, values in one.model_inputs.items())
