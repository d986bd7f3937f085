"""Read the JSON responses of servers field by field: of engines, references, teachers and judges.

A server that another version, a proxy or a mistake stands behind answers 200 with whatever it has. Nothing is converted
on the way: `"3"` is no token, `true` is no number, and a refused value is named by its route and its path.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, NoReturn

from holdfast.http import EndpointMistaken
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

LARGEST_VOCABULARY = 2**31
_NO_NUMBER = -9999.0
"""The value that vLLM writes for minus infinity, which JSON cannot represent."""
_ROUNDING = 1e-4
"""Largest positive log-probability that is accepted as rounding of 0."""
_MOST_BITS = 1023
"""Bits of a whole number that a float64 holds for certain."""
_SHOWN = 60
_ABSENT = object()
"""The value of a field that its object lacks."""


class Field(NamedTuple):
    """A value in a response, with its path. Its methods raise EndpointMistaken for a value of another type."""

    route: str
    value: Any
    path: tuple[str | int, ...] = ()

    def refuse(self, needed: str) -> NoReturn:
        """Refuse the response for this value.

        Raises:
            EndpointMistaken: Always.
        """
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).lstrip(".")
        subject = f"{shortened(escaped(steps), _SHOWN)} {_shown(self.value)}".lstrip()
        raise EndpointMistaken(f"answers {self.route} with {subject}, where {needed} is needed")

    @property
    def is_absent(self) -> bool:
        """Whether there is no value, or null in its place."""
        return self.value is None or self.value is _ABSENT

    def key(self, name: str) -> Field:
        """Return a value of an object; a missing value is refused by the method that reads it."""
        if not isinstance(self.value, dict):
            self.refuse(f"an object with {name}")
        return Field(self.route, self.value.get(name, _ABSENT), (*self.path, name))

    def names(self) -> list[str]:
        """Return the names of an object's values."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return list(self.value)

    def items(self, least: int = 0) -> list[Field]:
        """Return the values of a list."""
        if not isinstance(self.value, list) or len(self.value) < least:
            self.refuse(f"a list of at least {least}" if least else "a list")
        return [Field(self.route, member, (*self.path, number)) for number, member in enumerate(self.value)]

    def whole(self, least: int, most: int) -> int:
        """Return a whole number."""
        if type(self.value) is not int or not least <= self.value <= most:
            self.refuse(f"a whole number from {least} to {most}")
        return self.value

    def positive(self) -> int:
        """Return a whole number from 1."""
        return self.whole(1, LARGEST_VOCABULARY)

    def token(self, vocabulary: int = LARGEST_VOCABULARY) -> int:
        """Return the id of a token, a whole number."""
        return self.whole(0, vocabulary - 1)

    def written_token(self, vocabulary: int = LARGEST_VOCABULARY) -> int:
        """Return the id of a token that is written as text, such as the name of a value."""
        text = self.value
        if not text.isascii() or not text.isdecimal() or len(text) > len(str(vocabulary)) or int(text) >= vocabulary:
            self.refuse(f"the id of a token below {vocabulary}")
        return int(text)

    def size(self) -> float:
        """Return a number that is not negative; infinity and NaN are what sizes of spoilt tensors are."""
        value = self.value
        # Python's reader of JSON takes whole numbers of any length, which floats do not hold.
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or _is_endless(value):
            self.refuse("a number from 0")
        return float(value)

    def text(self) -> str:
        """Return a text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            self.refuse("a text")
        return self.value

    def text_or_empty(self) -> str:
        """Return a text."""
        return "" if self.value == "" else self.text()

    def text_or_none(self) -> str | None:
        """Return a text, or None for null."""
        return None if self.value is None else self.text()

    def file_name(self) -> str:
        """Return a text that may be a part of a file's name."""
        text = self.text()
        if not text.isascii() or not text.replace("-", "").isalnum():
            self.refuse("letters, digits and dashes")
        return text

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def logprob(self) -> float:
        """Return the logarithm of a probability, a finite number."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _NO_NUMBER < value <= _ROUNDING:  # NaN is in no range
            self.refuse("the logarithm of a probability, a number up to 0")
        return float(value)

    def logprob_or_nan(self) -> float:
        """Return the logarithm of a probability, NaN where there is none: of near certain tokens vLLM may tell none."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return math.nan if value is None or (is_number and not value > _NO_NUMBER) else self.logprob()

    def prompt_rows(
        self, length: int | None, least: int = 1, vocabulary: int = LARGEST_VOCABULARY
    ) -> list[dict[int, float]]:
        """Return the rows of vLLM's `prompt_logprobs`, but for the first: nothing predicts a prompt's first token.

        Args:
            length: Number of tokens of the prompt; None where it is not known.
            least: Smallest number of tokens in a row.
            vocabulary: Number of tokens that there are.

        Returns:
            Log-probabilities by token, in the order of the response.
        """
        rows = self.items(1)
        if length is not None and len(rows) != length:
            self.refuse(f"a list of {length}")
        return [row._token_row(least, vocabulary) for row in rows[1:]]

    def _token_row(self, least: int, vocabulary: int) -> dict[int, float]:
        names = [Field(self.route, name, (*self.path, "key")) for name in self.names()]
        row = {name.written_token(vocabulary): self.key(name.value).key("logprob").logprob() for name in names}
        if len(row) < least:
            self.refuse(f"an object of at least {least} tokens")
        return row


def _is_endless(value: float) -> bool:
    return isinstance(value, int) and value.bit_length() > _MOST_BITS


def first_choice(route: str, response: Any) -> Field:
    """Return the first completion of a response."""
    return Field(route, response).key("choices").items(1)[0]


def _shown(value: Any) -> str:
    """Return a value in few words, whatever is in it."""
    if value is _ABSENT:
        return "missing"
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return shortened(json.dumps(value), _SHOWN)
