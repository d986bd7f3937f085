"""Built-in rewards that are computed from the completion and the row by a formula."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from holdfast.rewards.base import Sample
from holdfast.rewards.functions.signatures import One
from holdfast.text.numbers import number_as_text

FIELD = re.compile(r"\{(\w+)\}")
"""What a judge's prompt replaces."""
OF_A_SAMPLE = ("prompt", "completion")
"""Fields that are not columns."""


def rule(section: Mapping[str, Any]) -> One:
    """Return the formula of a section."""
    match section:
        case {"kind": "exact", "column": column}:
            return lambda sample: float(sample.completion.strip() == str(number_as_text(cell(sample, column))).strip())
        case {"kind": "countdown", "numbers": numbers, "target": target}:
            return lambda sample: float(reaches(sample.completion, cell(sample, numbers), cell(sample, target)))
        case {"kind": "format", "regex": regex, "mode": mode}:
            pattern = re.compile(regex, re.DOTALL)
            matches = pattern.fullmatch if mode == "fullmatch" else pattern.search
            return lambda sample: float(matches(sample.completion) is not None)
        case {"kind": "length", "target": target, "min": low, "max": high}:
            return lambda sample: length_fit(len(sample.completion_tokens), target, low, high)
        case {"kind": "repetition", "ngram": size, "penalty": penalty}:
            return lambda sample: 0.0 - penalty * repeated_share(sample.completion_tokens, size)
        case {"kind": "overlong", "max_length": longest, "cache": cache}:
            return lambda sample: overlong_punishment(len(sample.completion_tokens), longest, cache)
        case {"kind": "environment"}:
            return lambda sample: sample.environment_reward
    raise AssertionError(section)


def template_columns(section: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that a reward of ours looks at."""
    match section:
        case {"kind": "exact" | "math" | "code", "column": column}:
            return (column,)
        case {"kind": "countdown", "numbers": numbers, "target": target}:
            return numbers, target
        case {"kind": "judge", "prompt": prompt}:
            return tuple(name for name in dict.fromkeys(FIELD.findall(prompt)) if name not in OF_A_SAMPLE)
        case _:
            return ()


def cell(sample: Sample, column: str) -> Any:
    """Return a value of the row.

    Raises:
        LookupError: The row has no such column.
    """
    if column not in sample.row:
        raise LookupError(f"the row has no column {column}; it has {', '.join(map(str, sample.row)) or 'none'}")
    return sample.row[column]


def length_fit(length: int, target: int | None, low: int | None, high: int | None) -> float:
    """Return 1 at the target, less in a straight line around it; without a target, whether low <= length <= high."""
    if target is not None:
        return max(0.0, 1.0 - abs(length - target) / target)
    return float((low is None or low <= length) and (high is None or length <= high))


def repeated_share(tokens: Sequence[int], size: int) -> float:
    """Return the share of n-grams that occurred before; 0 where there are fewer than two."""
    grams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def overlong_punishment(length: int, longest: int, cache: int) -> float:
    """Return 0 up to `longest - cache` tokens, then a straight line to -1 at `longest`, then -1.

    Yu et al. (2025), DAPO, arXiv:2503.14476, eq. 13.
    """
    return max(-1.0, min(0.0, (longest - cache - length) / cache))


_LONGEST = 200
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Say whether an expression of + - * / and parentheses uses each of the numbers once and equals the target."""
    text = expression.strip()
    if len(text) > _LONGEST or _ALLOWED.fullmatch(text) is None:
        return False
    try:
        # Python has no numbers that start with 0.
        tree = ast.parse(re.sub(r"\b0+(?=[0-9])", "", text), mode="eval")
        used: list[int] = []
        value = _value(tree.body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return sorted(used) == sorted(map(int, numbers)) and value == int(target)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=operator, right=right):
            first, second = _value(left, used), _value(right, used)
            match operator:
                case ast.Add():
                    return first + second
                case ast.Sub():
                    return first - second
                case ast.Mult():
                    return first * second
                case ast.Div():
                    return first / second
    raise ValueError(f"{ast.unparse(node)} is no sum, difference, product or quotient")
