"""The math reward: math-verify, called in a worker that can be killed.

The time-outs of math-verify use SIGALRM, which fails outside of the main thread, so that every completion would score
0. They are switched off here; the supervisor kills a worker that takes too long.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.rewards.base import CannotStart, Sample, describe_error
from holdfast.rewards.functions.final_answers import (
    MarkedAnswer,
    Quantity,
    decimal_places,
    final_answer,
    is_too_deep,
    last_side,
    marked_answer,
    plain_answer,
    quantity,
    same_number,
)
from holdfast.rewards.functions.rules import cell
from holdfast.text.numbers import number_as_text

_PIECE_OF_LATEX = re.compile(r"\$[^$\n]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_NUMERAL = re.compile(r"([0-9A-Za-z]+)(?:_\{?([0-9]+)\}?)?")
_GOLDS_KEPT = 1024


class Gold(NamedTuple):
    """What a gold answer says."""

    text: str
    number: Quantity | None
    expressions: list[Any]
    """As math-verify reads it; nothing for a number, which few answers are compared with by algebra."""
    decimals: int
    """Decimal places that are compared where a side is a decimal number."""


class MathReward:
    """1 where the final answer of a completion equals the gold one, 0 where it does not; None for a gold that cannot
    be read, since no completion could be right.
    """

    def __init__(self, column: str, parse: Callable[..., list[Any]], verify: Callable[..., bool]) -> None:
        self.column, self.parse, self.verify = column, parse, verify
        self.read_gold = lru_cache(_GOLDS_KEPT)(self._read_gold)  # a group shares one

    @classmethod
    def checked(cls, column: str, name: str) -> MathReward:
        """Return the reward if math-verify is here and works.

        Raises:
            CannotStart: It is not installed, or half of x is not 0.5x to it.
        """
        try:
            library: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise CannotStart(
                f"reward {name}: kind math needs math-verify, and importing it raises {describe_error(error)}. "
                "Install it: pip install 'holdfast[math]'."
            ) from error
        reward = cls(column, library.parse, library.verify)
        try:
            works = reward.equal(r"\frac{x}{2}", r"so \boxed{0.5x}")
        except Exception as error:
            raise CannotStart(
                f"reward {name}: math-verify raises {describe_error(error)}. It needs antlr4-python3-runtime 4.13; "
                "hydra-core and OmegaConf 2.3 pin 4.9 and cannot share its environment."
            ) from error
        if not works:
            raise CannotStart(
                f"reward {name}: math-verify says that half of x is not 0.5x, so it would score right answers 0. "
                "Install it anew: pip install --force-reinstall 'holdfast[math]'."
            )
        return reward

    def __call__(self, sample: Sample) -> float | None:
        """Score one sample."""
        gold = cell(sample, self.column)
        same = None if gold is None else self.equal(final_answer(str(number_as_text(gold))), sample.completion)
        return None if same is None else float(same)

    def equal(self, gold: str, completion: str) -> bool | None:
        """Say whether the final answer of a text equals a gold one; None if the gold one cannot be read."""
        right = self.read_gold(gold)
        if right is None:
            return None
        answer = marked_answer(completion)
        if answer is None:
            return self._verify(right, self._parse(completion))
        same = _same_text(right, answer)
        return same if same is not None else self._verify(right, self._expressions(answer))

    def _read_gold(self, gold: str) -> Gold | None:
        text = plain_answer(gold)
        number = quantity(text)
        if number is not None:
            return Gold(text, number, [], decimal_places(number.value))
        expressions = self._parse(_as_latex(text)) if text else []
        return Gold(text, None, expressions, _places_of(expressions)) if expressions else None

    def _expressions(self, answer: MarkedAnswer) -> list[Any]:
        """Return what math-verify reads in an answer: LaTeX, or in prose the last piece of LaTeX or number."""
        text = plain_answer(answer.text)
        number = quantity(text)
        if number is not None:
            text = number.latex
        elif answer.is_prose and _PIECE_OF_LATEX.search(answer.text):
            return self._parse(answer.text)
        expressions = self._parse(_as_latex(text)) if text else []
        if answer.is_prose and all(isinstance(expression, str) for expression in expressions):
            expressions += self._parse(answer.text)
        return expressions

    def _verify(self, gold: Gold, readings: list[Any]) -> bool:
        if not readings:
            return False
        expressions = gold.expressions
        if gold.number is not None:
            expressions = self._parse(_as_latex(gold.number.latex))
        return bool(self.verify(expressions, readings, float_rounding=gold.decimals, timeout_seconds=None))

    def _parse(self, text: str) -> list[Any]:
        return [] if is_too_deep(text) else self.parse(text, parsing_timeout=None)


def _same_text(gold: Gold, answer: MarkedAnswer) -> bool | None:
    """Compare what needs no algebra: two numbers, and numerals with a base; None where it is needed."""
    text = plain_answer(answer.text)
    if gold.number is not None:
        return _same_number(gold.number, text, is_prose=answer.is_prose)
    numeral, answer_numeral = _NUMERAL.fullmatch(gold.text), _NUMERAL.fullmatch(text)
    if numeral is None or answer_numeral is None or numeral[2] is None:
        return None
    # math-verify drops the base. An answer without one may be that of another base.
    return numeral.groups() == answer_numeral.groups()


def _same_number(gold: Quantity, text: str, *, is_prose: bool) -> bool | None:
    number = quantity(text)
    if number is not None or not is_prose:
        return None if number is None else same_number(gold, number)
    number = quantity(text, is_prose=True) or quantity(last_side(text), is_prose=True)
    if number is not None:
        return same_number(gold, number)
    # Either 18 with an exclamation mark, or a factorial, which is left to algebra.
    number = quantity(text.rstrip("!"), is_prose=True) if text.endswith("!") else None
    return True if number is not None and same_number(gold, number) else None


def _places_of(expressions: list[Any]) -> int:
    """Return the decimal places to compare, by the smallest number that a gold answer consists of."""
    sizes = [6]
    for expression in expressions:
        for term in (expression, *getattr(expression, "args", ())):
            if getattr(term, "is_number", False):
                with contextlib.suppress(TypeError, ValueError, OverflowError):  # a complex one, or a huge one
                    sizes.append(decimal_places(float(term.evalf())))
    return max(sizes)


def _as_latex(answer: str) -> str:
    return rf"\boxed{{{answer}}}"
