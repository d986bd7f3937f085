"""Checking an arithmetic expression without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from fractions import Fraction

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
