"""The math reward: math-verify, called where it can be killed.

Its own time-outs are alarms, which raise off the main thread; other systems then score every completion 0. They are
off here: the keeper ends what takes too long.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from holdfast.rewards.base import CannotStart, Sample
from holdfast.rewards.outcome import describe
from holdfast.rewards.rules import cell

_PLAIN_NUMBER = re.compile(r"-?[0-9]+")
_SIGNS_OF_LATEX = ("$", "\\(", "\\[", "\\boxed")
_GOLDS_KEPT = 1024


@dataclass(frozen=True)
class MathReward:
    """1 where the final answer of a completion equals the gold one, 0 where it does not; None for a gold that cannot
    be read, since no completion could be right.
    """

    column: str
    parse: Callable[..., list[Any]]
    verify: Callable[..., bool]
    read_gold: Callable[[str], list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        """Keep the golds read: a group shares one."""
        object.__setattr__(self, "read_gold", lru_cache(_GOLDS_KEPT)(self._read_gold))

    @classmethod
    def checked(cls, column: str, name: str) -> MathReward:
        """Return the reward if math-verify is here and works.

        Raises:
            CannotStart: It is not installed, or a half is not 0.5 to it.
        """
        try:
            library: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise CannotStart(
                f"reward {name}: kind math needs math-verify, and importing it raises {describe(error)}. Install it: "
                "pip install 'holdfast[math]'."
            ) from error
        reward = cls(column, library.parse, library.verify)
        try:
            works = reward.equal(r"\frac{1}{2}", r"so \boxed{0.5}")
        except Exception as error:
            raise CannotStart(
                f"reward {name}: math-verify raises {describe(error)}. It needs antlr4-python3-runtime 4.13; "
                "hydra-core and OmegaConf 2.3 pin 4.9 and cannot share its environment."
            ) from error
        if not works:
            raise CannotStart(
                f"reward {name}: math-verify says that a half is not 0.5, so it would score right answers 0. Install "
                "it anew: pip install --force-reinstall 'holdfast[math]'."
            )
        return reward

    def __call__(self, sample: Sample) -> float | None:
        """Score one sample."""
        same = self.equal(final_answer(str(cell(sample, self.column))), sample.completion)
        return None if same is None else float(same)

    def equal(self, gold: str, completion: str) -> bool | None:
        """Say whether the final answer of a text equals a gold one; None if the gold one cannot be read."""
        answer = marked_answer(completion)
        # The common case of a whole number, without 7 ms of symbolic algebra. Whole: 1.0 and 1 differ as text.
        if answer is not None and _PLAIN_NUMBER.fullmatch(gold) and gold == plain(answer):
            return True
        expected = self.read_gold(gold)
        if not expected:
            return None
        found = self.parse(completion if answer is None else _as_latex(answer), parsing_timeout=None)
        return bool(self.verify(expected, found, timeout_seconds=None))

    def _read_gold(self, gold: str) -> list[Any]:
        return self.parse(_as_latex(gold), parsing_timeout=None)


def final_answer(text: str) -> str:
    """Return the answer of a gold text: what is marked in it, or all of it."""
    return plain(marked_answer(text) or text)


def marked_answer(text: str) -> str | None:
    r"""Return what stands in the last \boxed{}, or else after the last ####; None where neither is."""
    return _last_boxed(text) or _after_hashes(text)


def plain(answer: str) -> str:
    """Return an answer without blanks around it, currency signs, and commas between thousands."""
    answer = answer.strip().strip("$").strip()
    return re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", answer)


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len(r"\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : place].strip() or None
    return None


def _after_hashes(text: str) -> str | None:
    _, hashes, rest = text.rpartition("####")
    answer = rest.strip().split("\n", 1)[0].strip() if hashes else ""
    return answer or None


def _as_latex(answer: str) -> str:
    return answer if any(sign in answer for sign in _SIGNS_OF_LATEX) else rf"\boxed{{{answer}}}"
