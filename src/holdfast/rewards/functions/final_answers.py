"""Extract the final answer of a completion, and recognise numbers in their many notations.

Answers that are not a number are left to math-verify. No function here is slow or can hang.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ANSWER_IS = re.compile(r"[^0-9]*\banswer\b[\s:=*]*(?:(?:is|equals)\b[\s:=*]*)?", re.IGNORECASE)
_PAIRS = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"))
_REPLACED = (
    (re.compile(r"\\text\s*\{\s*\\?\$\s*\}|\\?\$|[€£¥₹]"), ""),  # an amount is a number
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"[\u00a0\u202f]|~(?!=)"), " "),
    (re.compile("\u2212"), "-"),
    (re.compile("°"), r"^\\circ"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"(?<!\\)%"), r"\\%"),
)
_IN_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textnormal)\s*\{([^{}]*)\}")

_GROUP = r"(?:,|\s|\\[,;: ])"
_WHOLE = rf"(?:[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+(?![0-9])|[0-9]+)"
_SMALL = r"\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))"
_FRACTION = rf"(?:([0-9]+)\s*/\s*([0-9]+)|\\[dtc]?frac{_SMALL}{_SMALL})"
_MIXED = re.compile(rf"(?:([0-9]+)(?:\s+(?=[0-9])|\s*(?=\\)))?{_FRACTION}")
_DECIMAL = re.compile(
    rf"({_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE]([+-]?[0-9]{1,3})|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([0-9])))?"
)
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_PERCENT = re.compile(r"\s*(?:\\%|per\s?cent(?:age)?\b|pct\b)")
_METRIC = re.compile(
    r"(mm|cm|dm|km|m|mg|kg|g|ml|mL)(?:\s*\^\s*\{?([23])\}?)?(?:\s*(/)\s*(s|min|h|hr)(?:\s*\^\s*\{?(2)\}?)?)?"
)
_RATE = re.compile(r"/\s*(?=[A-Za-z]{3})")
_WORDS = re.compile(r"[A-Za-z][A-Za-z]+[\sA-Za-z'’().,/-]*|\([\sA-Za-z'’.,/-]*\)")
_BEFORE = re.compile(r"(?:[A-Za-z][A-Za-z'’-]*[\s:,=]+)+")
_CHANGES = re.compile(
    r"\b(?:and|between|billion|choose|cos|cubed|divided|double|dozen|exp|factorial|fifths?|half|halves|hundred|inf"
    r"|infinity|ln|log|million|minus|mod|negative|neither|no|nor|not|or|over|pi|plus|quarters?|remainder|sin|sqrt|squared"
    r"|tan|than|thirds?|thousand|times|trillion|twice)\b",
    re.IGNORECASE,
)
"""Words that make another number of the one beside them, or of the two around them."""
_IS = re.compile(r"\b(?:is|are|equals)\b|=", re.IGNORECASE)
_LONGEST = 300
_DEEPEST = 12
"""Braces inside braces; what reads LaTeX takes twice as long for every few of them."""
_NOISE = Fraction(1, 10**9)


@dataclass(frozen=True)
class MarkedAnswer:
    """A final answer as a completion marks it."""

    text: str
    is_prose: bool
    """Whether it stands in a text, as after ####, and not in a box, where everything is the answer."""


class Quantity(NamedTuple):
    """A number, and what stands behind it."""

    value: Fraction
    is_percentage: bool = False
    unit: str = ""
    """In lower case; of metric units the symbol."""
    is_metric: bool = False

    @property
    def latex(self) -> str:
        """The number for math-verify."""
        above, below = self.value.numerator, self.value.denominator
        if _terminates(self.value):
            # As a decimal, which math-verify compares by rounding, and not as the fraction that it compares exactly.
            digits = max(below.bit_length(), 1)
            number = (
                str(above) if below == 1 else f"{Decimal(above * 10**digits // below).scaleb(-digits):f}".rstrip("0")
            )
        else:
            number = rf"{'-' * (above < 0)}\frac{{{abs(above)}}}{{{below}}}"
        return number + (r"\%" if self.is_percentage else "")


def marked_answer(text: str) -> MarkedAnswer | None:
    r"""Return what stands in the last \boxed{}, else in the last <answer>, else after the last ####, if anything."""
    if boxed := _last_boxed(text):
        return MarkedAnswer(boxed, is_prose=False)
    tagged = [tag_text.strip() for tag_text in _TAG.findall(text)]
    if tagged and tagged[-1]:
        return MarkedAnswer(tagged[-1], is_prose=True)
    _, hashes, tail = text.rpartition("####")
    line = tail.strip().split("\n", 1)[0].strip() if hashes else ""
    return MarkedAnswer(line, is_prose=True) if line else None


def last_side(text: str) -> str:
    """Return what stands behind the last equals sign of a text, or behind the last word that means one."""
    return _IS.split(text)[-1].strip()


def is_too_deep(text: str) -> bool:
    """Say whether braces stand in braces as no answer has them, so that reading it could take hours."""
    depth = deepest = 0
    for sign in text:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        deepest = max(deepest, depth)
    return deepest > _DEEPEST


def final_answer(text: str) -> str:
    """Return the answer of a gold text, plain: what is marked in it, or all of it."""
    marked = marked_answer(text)
    return plain_answer(text if marked is None else marked.text)


def plain_answer(answer: str) -> str:
    """Return an answer without what says nothing about it: signs of currency and of mathematics, a full stop, bold
    type, the words "the answer is".
    """
    answer = answer.strip()
    for pattern, replacement in _REPLACED:
        answer = pattern.sub(replacement, answer)
    while (shorter := _unwrapped(answer)) != answer:
        answer = shorter
    prefix = _ANSWER_IS.match(answer)
    remainder = "" if prefix is None else answer[prefix.end() :].strip()
    return remainder or answer


def quantity(text: str, *, is_prose: bool = False) -> Quantity | None:
    """Return the number that a plain answer is, with a unit or words behind it; in prose also with words before it.

    None where a word changes the number, and for anything that is not one number.
    """
    text = _IN_WORDS.sub(r" \1 ", text)[: _LONGEST + 1].strip()
    if len(text) > _LONGEST:
        return None
    if is_prose and (before := _BEFORE.match(text)) and _CHANGES.search(before[0]) is None:
        text = text[before.end() :]
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if text[:1] in {"+", "-"} else text
    number = _number(text)
    if number is None:
        return None
    value, suffix = number
    if degrees := _DEGREES.match(suffix):
        suffix = suffix[degrees.end() :]
    percentage = _PERCENT.match(suffix)
    suffix = suffix if percentage is None else suffix[percentage.end() :]
    unit = _unit(suffix)
    return None if unit is None else Quantity(sign * value, percentage is not None, *unit)


def same_number(gold: Quantity, answer: Quantity) -> bool | None:
    """Say whether two quantities are equal; None where words behind them differ, of which nothing is known here.

    Whole numbers are compared exactly, decimals up to the noise of a float, and a fraction with a decimal to six
    significant digits of the gold answer, never less than six places. Between a number with and one without a per cent
    sign, the bare numbers may be equal or the values.
    """
    if gold.is_metric and answer.is_metric and gold.unit != answer.unit:
        return False
    if gold.unit and answer.unit and gold.unit.rstrip("s") != answer.unit.rstrip("s"):
        return None
    if _close(gold.value, answer.value):
        return True
    if gold.is_percentage == answer.is_percentage:
        return False
    return _close(gold.value / 100 if gold.is_percentage else gold.value * 100, answer.value)


def decimal_places(value: float | Fraction) -> int:
    """Return to how many decimal places a number is compared: six significant digits, never less than six places."""
    size = abs(Fraction(value))
    if not 0 < size < 1 or not float(size):
        return 6
    return max(6, 5 - math.floor(math.log10(float(size))))


def _close(gold: Fraction, answer: Fraction) -> bool:
    if gold == answer:
        return True
    if gold.denominator == answer.denominator == 1:
        return False
    if _terminates(gold) and _terminates(answer):
        return abs(gold - answer) <= _NOISE * abs(gold)
    if not _terminates(gold) and not _terminates(answer):
        return False
    digits = decimal_places(gold)
    return round(gold, digits) == round(answer, digits)


def _terminates(value: Fraction) -> bool:
    """Say whether a number can be written as a decimal."""
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _last_boxed(text: str) -> str | None:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    depth, start = 1, boxes[-1].end()
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index].strip() or None
    return None


def _unwrapped(answer: str) -> str:
    answer = answer.strip()
    for opening, closing in _PAIRS:
        inner = answer[len(opening) : -len(closing)]
        if answer.startswith(opening) and answer.endswith(closing) and inner and closing not in inner:
            return inner.strip()
    if answer.endswith(".") and not answer.endswith(("..", r"\.")):
        return answer[:-1].strip()
    return answer


def _number(text: str) -> tuple[Fraction, str] | None:
    """Return the number at the start of a text, without its sign, and what follows."""
    if mixed := _MIXED.match(text):
        integer, *fraction_groups = mixed.groups()
        above, below = (int(group) for group in fraction_groups if group is not None)
        return None if below == 0 else (int(integer or 0) + Fraction(above, below), text[mixed.end() :])
    decimal = _DECIMAL.match(text)
    if decimal is None:
        return None
    digits, *exponents = decimal.groups()
    power = next((int(exponent) for exponent in exponents if exponent is not None), 0)
    return Fraction(re.sub(r"[^0-9.]", "", digits).rstrip(".") or "0") * Fraction(10) ** power, text[decimal.end() :]


def _unit(suffix: str) -> tuple[str, bool] | None:
    """Return what stands behind a number, and whether it is a metric unit; None if that is not a unit and no words."""
    suffix = _RATE.sub(" per ", suffix)
    spaces = len(suffix) - len(suffix.lstrip(" \t\n\\,;"))
    behind = suffix[spaces:].strip()
    if not behind:
        return "", False
    if metric := _METRIC.fullmatch(behind):
        return "".join(filter(None, metric.groups())), True
    if not spaces or _WORDS.fullmatch(behind) is None or _CHANGES.search(behind):
        return None
    return " ".join(behind.lower().replace(".", "").split()), False
