"""Final answers of completions: where they are marked, and which of them are one plain number.

Everything else about an answer is math-verify's. Alone it scores right numbers 0 with a full stop, currency, separators
or words beside them, in bold type and in most percentages, and two numbers take it 2 to 35 ms. No function here is slow
or can hang.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ANSWER_IS = re.compile(r"[^0-9]*\banswer\b[\s:=*]*(?:(?:is|equals)\b[\s:=*]*)?(?=\S)", re.IGNORECASE)
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

_SPACE = r"(?:\s|\\[,;:\ ])"
_UNIT = r"(?:[A-Za-z][A-Za-z'’]+|[ghms]\b)(?:\s*\^\s*\{?[23]\}?)?"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*
    (?:
        (?P<digits>(?:[0-9]{{1,3}}(?:(?:,|{_SPACE})[0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
        (?:(?:[eE]|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*\{{?\s*)(?P<power>[+-]?[0-9]{{1,3}})(?:\s*\}})?)?
    |
        (?:(?P<integer>[0-9]+)(?:\s+|(?=\\)))?
        (?:\\[dtc]?frac\s*\{{)?(?P<above>[0-9]+)(?:\}}\s*\{{|\s*/\s*)(?P<below>[0-9]+)\}}?
    )
    (?:\s*\^\s*\{{?\\circ\}}?)?\s*
    (?P<percent>\\%|per\s?cent\b)?
    (?P<behind>(?:{_SPACE}+|\s*/\s*|(?=[ckm]?[gm]\b))\(?{_UNIT}(?:[\s().,/-]+(?:{_UNIT}|[A-Za-z]\b))*[).]*)?""",
    re.VERBOSE,
)
_BEFORE = re.compile(r"(?:[A-Za-z][A-Za-z'’-]*[\s:,]+)+")
_IS = re.compile(r"\b(?:is|are|equals)\b|=", re.IGNORECASE)
_CHANGES = re.compile(
    r"(?<!\\)\b(?:and|between|billion|cubed|divided|double|dozen|factorial|half|hundred|million|minus|mod|negative|neither"
    r"|no|nor|not|or|over|pi|plus|quarters?|sqrt|squared|than|thirds?|thousand|times|trillion|twice)\b",
    re.IGNORECASE,
)
"""Words that make another number of the one beside them, or of the two around them."""
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


class PlainNumber(NamedTuple):
    """A number, without the unit or the words behind it."""

    value: Fraction
    latex: str
    """For math-verify."""
    is_percentage: bool
    is_fraction: bool
    """Whether it is written as one."""


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
    for pattern, replacement in _REPLACED:
        answer = pattern.sub(replacement, answer)
    answer = answer.strip()
    while (shorter := _unwrapped(answer)) != answer:
        answer = shorter
    prefix = _ANSWER_IS.match(answer)
    return answer if prefix is None else answer[prefix.end() :]


def told(sentence: str) -> str:
    """Return what a sentence after #### says behind its last "is" and without words in front; all of it where one of
    these words changes what stands beside it.
    """
    side = _IS.split(sentence)[-1].strip().rstrip("!")
    before = _BEFORE.match(side)
    return sentence if _CHANGES.search(side) else side if before is None else side[before.end() :]


def plain_number(text: str) -> PlainNumber | None:
    """Return the number that a plain answer is; None where a word behind changes it, and for all that is no number."""
    text = _IN_WORDS.sub(r" \1 ", text[: _LONGEST + 1]).strip()
    number = None if len(text) > _LONGEST else _NUMBER.fullmatch(text)
    if number is None or _CHANGES.search(number["behind"] or ""):
        return None
    is_fraction = number["below"] is not None
    if is_fraction:
        if int(number["below"]) == 0:
            return None
        value = int(number["integer"] or 0) + Fraction(int(number["above"]), int(number["below"]))
        latex = rf"{number['integer'] or ''}\frac{{{number['above']}}}{{{number['below']}}}"
    else:
        digits, power = re.sub(r"[^0-9.]", "", number["digits"]).rstrip("."), number["power"]
        value = Fraction(digits) * Fraction(10) ** int(power or 0)
        latex = digits if power is None else rf"{digits}\times 10^{{{power}}}"
    sign, percent = number["sign"].replace("+", ""), r"\%" if number["percent"] else ""
    return PlainNumber(-value if sign else value, f"{sign}{latex}{percent}", bool(percent), is_fraction)


def same_number(gold: PlainNumber, answer: PlainNumber) -> bool | None:
    """Say whether two numbers are equal; None for a fraction beside a decimal, whose digits are math-verify's to count.

    Whole numbers are compared exactly, decimals up to the noise of a float. With one per cent sign among the two, the
    bare numbers may be equal or the values.
    """
    factor = Fraction(100) ** (gold.is_percentage - answer.is_percentage)
    if _close(gold.value, answer.value) or _close(gold.value, answer.value * factor):
        return True
    return False if gold.is_fraction == answer.is_fraction else None


def _close(gold: Fraction, answer: Fraction) -> bool:
    if gold.denominator == answer.denominator == 1:
        return gold == answer
    return abs(gold - answer) <= _NOISE * abs(gold)


def _unwrapped(answer: str) -> str:
    for opening, closing in _PAIRS:
        inner = answer[len(opening) : -len(closing)]
        if answer.startswith(opening) and answer.endswith(closing) and inner and closing not in inner:
            return inner.strip()
    return answer[:-1].strip() if answer.endswith(".") and not answer.endswith(("..", r"\.")) else answer


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
