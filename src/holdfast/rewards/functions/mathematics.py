"""The math reward: math-verify, called in a worker that can be killed.

The time-outs of math-verify use SIGALRM, which fails outside of the main thread, so that every completion would score
0. They are switched off here; the fork server kills a worker that takes too long.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from holdfast.processes.user_code import CannotStart, describe_error
from holdfast.rewards.base import Sample
from holdfast.rewards.functions.final_answers import (
    MarkedAnswer,
    PlainNumber,
    final_answer,
    is_too_deep,
    marked_answer,
    plain_answer,
    plain_number,
    same_number,
    told,
)
from holdfast.rewards.functions.rules import cell
from holdfast.text.numbers import number_as_text

_PIECE_OF_LATEX = re.compile(r"\$[^$\n]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_GOLDS_KEPT = 1024
MATH_RULES = "2"
"""Version of what counts as the same answer, in the fingerprint of a run."""


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
        text = plain_answer(gold)
        right = plain_number(text)
        if right is None and not self.read_gold(text)[0]:
            return None
        number, latex = _number_or_latex(marked_answer(completion), completion)
        same = None if right is None or number is None else same_number(right, number)
        if same is not None:
            return same
        readings = self._parse(latex)
        expressions, places = self.read_gold(text if right is None else right.latex)
        return bool(readings and self.verify(expressions, readings, float_rounding=places, timeout_seconds=None))

    def _read_gold(self, text: str) -> tuple[list[Any], int]:
        """Return what math-verify reads in a gold answer, and the decimal places to compare."""
        expressions = self._parse(_as_latex(text)) if text else []
        return expressions, _places_of(expressions)

    def _parse(self, text: str) -> list[Any]:
        return [] if is_too_deep(text) else self.parse(text, parsing_timeout=None)


def _number_or_latex(answer: MarkedAnswer | None, completion: str) -> tuple[PlainNumber | None, str]:
    """Return the plain number that an answer is, and what math-verify reads."""
    if answer is None:
        return None, completion
    text = plain_answer(answer.text)
    if answer.is_prose:
        text = told(text)
    number = plain_number(text)
    if number is None and answer.is_prose and _PIECE_OF_LATEX.search(answer.text):
        return None, answer.text
    return number, _as_latex(text if number is None else number.latex)


def _places_of(expressions: list[Any]) -> int:
    """Return the decimal places to compare: six significant digits of the smallest number in a gold answer."""
    places = 6
    for expression in expressions:
        for term in (expression, *getattr(expression, "args", ())):
            if getattr(term, "is_number", False):
                with contextlib.suppress(TypeError, ValueError, OverflowError):  # a complex one, zero, or a huge one
                    places = max(places, 5 - math.floor(math.log10(abs(float(term.evalf())))))
    return places


def _as_latex(answer: str) -> str:
    return rf"\boxed{{{answer}}}"
