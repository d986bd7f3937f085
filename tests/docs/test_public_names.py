"""Every public name that docs/reference/api.md lists can be imported and explains its parameters, result and errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from typing_extensions import get_protocol_members, is_protocol

import holdfast
from holdfast import checkpoint, errors

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^::: (holdfast[\w.]+)$", PAGE, re.MULTILINE)
SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:(?: .*)?\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    ([*\w]+(?:, [*\w]+)*): \S", re.MULTILINE)


def entries(section: str) -> set[str]:
    """Return the names that a section of a docstring explains; one line may explain several."""
    return {name.lstrip("*") for names in ENTRY.findall(section) for name in names.split(", ")}


@cache
def members_of_protocols() -> frozenset[str]:
    """Return the names of all members that the listed protocols explain."""
    members = set[str]()
    for name in NAMES:
        with suppress(ImportError, AttributeError):  # a name that is not there fails its own test
            listed = resolve_name(name)
            members |= get_protocol_members(listed) if is_protocol(listed) else set()
    return frozenset(members)


def functions_of(listed: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function itself, or the public methods of a class, but for those that a protocol explains."""
    if inspect.isfunction(listed):
        yield listed
    if inspect.isclass(listed):
        elsewhere = frozenset() if is_protocol(listed) else members_of_protocols()
        for name, member in vars(listed).items():
            if inspect.isfunction(member) and not name.startswith("_") and name not in elsewhere:
                yield member


def unexplained_parts(function: Callable[..., Any]) -> list[str]:
    """Return what a docstring lacks or has too much: parameters, the result, the errors."""
    documentation, signature = inspect.getdoc(function) or "", inspect.signature(function)
    explained = dict(SECTION.findall(documentation + "\n"))
    parts = sorted(entries(explained.get("Args", "")) ^ ({*signature.parameters} - {"self"}))
    if signature.return_annotation != "None" and "Returns" not in explained and not documentation.startswith("Return "):
        parts.append("the result")
    body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    if any(isinstance(node, ast.Raise) for node in ast.walk(body)) and not entries(explained.get("Raises", "")):
        parts.append("the errors")
    return [f"{function.__qualname__}: {part}" for part in parts]


def unexplained_fields(record: type) -> list[str]:
    """Return the fields that a class declares without a docstring behind them."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(tree, ast.ClassDef)
    return [
        f"{record.__name__}.{ast.unparse(statement.target)}"
        for statement, behind in zip(tree.body, [*tree.body[1:], None], strict=True)
        if isinstance(statement, ast.AnnAssign)
        and not (isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant))
    ]


def test_the_page_lists_what_packages_export_and_their_errors() -> None:
    exported = {f"holdfast.{name}" for name in holdfast.__all__} - {"holdfast.__version__", "holdfast.checkpoint"}
    exported |= {f"holdfast.checkpoint.{name}" for name in checkpoint.__all__}
    exported |= {
        f"{module.__name__}.{name}"
        for module in (errors, checkpoint.errors)
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }

    assert exported - {*NAMES} == set()
    assert len(exported) > 20
    assert len(NAMES) == len({*NAMES})


@pytest.mark.xdist_group("public_names")  # they import most of the package
@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_explains_what_it_takes_returns_and_raises(name: str) -> None:
    listed = resolve_name(name)

    assert inspect.getdoc(listed)
    assert [part for function in functions_of(listed) for part in unexplained_parts(function)] == []
    assert not inspect.isclass(listed) or unexplained_fields(listed) == []


def test_what_a_docstring_leaves_out_is_named() -> None:
    def silent(first: int, second: int) -> int:
        """Add.

        Args:
            first: A number.
            third: A number.
        """
        raise ValueError(first, second)

    found = [part.partition(": ")[2] for part in unexplained_parts(silent)]

    assert found == ["second", "third", "the result", "the errors"]
