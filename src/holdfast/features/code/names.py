"""Decide which names in a row's tests must come from the judged code, by reading the tests alone.

A test uses names that it does not define. Some are the functions that the code must provide; others belong to the
judge. If a test forgets `import numpy as np`, for example, a completion could define `np` itself and thereby decide
whether the test passes. The decision is made from the tests only, which are the same for all completions.

Built-in functions and modules of the standard library belong to the judge. A name that is called, or passed to a call,
is expected from the code. If there is such a name, other names that are only used as a module or a number are not
expected from the code; the row then lacks an import.
"""

from __future__ import annotations

import ast
import builtins
import collections
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_CLASSES = dict.fromkeys(collections.__all__, "collections") | {
    "Fraction": "fractions", "Decimal": "decimal", "datetime": "datetime", "timedelta": "datetime",
}  # fmt: skip
"""Classes of the standard library whose objects a test compares answers with."""
_TRANSPARENT = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.NamedExpr)
_OPERANDS = (ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Subscript)


@dataclass(frozen=True)
class TestNames:
    """The sources of the names that tests use without defining them."""

    subjects: frozenset[str]
    """From the code."""
    supplied: Mapping[str, tuple[str, str | None]]
    """From the standard library, though no test imports them: the module, and the class in it."""


@dataclass
class _NameUses:
    """How the tests of a row use a name."""

    as_module: int = 0
    """As `name.attribute`."""
    as_operand: int = 0
    """Neither called nor passed to a call, but compared or computed with."""
    as_expected: int = 0
    """Called, and what it returns is compared with what another name returns."""
    elsewhere: int = 0

    @property
    def is_subject(self) -> bool:
        return bool(self.as_expected or self.elsewhere)


@dataclass
class _ParsedTest:
    """A test's syntax tree with the parent of each node."""

    tree: ast.Module
    free: frozenset[str]
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            self.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))

    def names(self, below: ast.AST) -> Iterator[ast.Name]:
        for node in ast.walk(below):
            if isinstance(node, ast.Name) and node.id in self.free:
                yield node


def names_in_tests(tests: Sequence[str]) -> TestNames:
    """Return where the names of a row's tests come from.

    Raises:
        ValueError: The tests leave open what judges the code; the message says what to write into them.
    """
    readings = list(_read(tests))
    uses: dict[str, _NameUses] = {}
    for reading in readings:
        for name in reading.names(reading.tree):
            _note(name, reading, uses.setdefault(name.id, _NameUses()))
    supplied = {name: source for name, use in uses.items() if (source := _source(name, use)) is not None}
    undefined = {name: use for name, use in uses.items() if name not in supplied and not hasattr(builtins, name)}
    subjects = frozenset(name for name, use in undefined.items() if use.is_subject)
    instruments = sorted(undefined.keys() - subjects)
    if subjects and instruments:
        raise ValueError(
            f"the tests use {instruments[0]} without importing or defining it. Do so there; if the code is to define "
            "it, add a line with the name alone"
        )
    for reading in readings:
        _check_verdicts(reading, subjects)
    if undefined:
        return TestNames(subjects or frozenset(undefined), supplied)
    return _of_python_alone(readings, supplied)


def _of_python_alone(readings: Sequence[_ParsedTest], supplied: Mapping[str, tuple[str, str | None]]) -> TestNames:
    """Decide where all names have a source: a task may ask for a function called `sum`."""
    used = [names for reading in readings if (names := {name.id for name in reading.names(reading.tree)})]
    common = set.intersection(*used) if used else set[str]()
    if used and len(common) != 1:
        listed = ", ".join(sorted(common or set.union(*used))[:3])
        raise ValueError(
            f"the tests use nothing but names of Python ({listed}), and do not say which one the code is to define. "
            "Write builtins.NAME for the others"
        )
    return TestNames(frozenset(common), {name: source for name, source in supplied.items() if name not in common})


def _read(tests: Sequence[str]) -> Iterator[_ParsedTest]:
    """Parse the tests, of which each sees what those before it define; one that is not Python fails by itself."""
    defined: set[str] = set()
    for test in tests:
        try:
            tree, table = ast.parse(test), symtable.symtable(test, "<test>", "exec")
        except (SyntaxError, ValueError, RecursionError):
            continue
        defined |= {symbol.get_name() for symbol in table.get_symbols() if _is_defined(symbol)}
        defined |= {symbol.get_name() for inner in _inner(table) for symbol in inner.get_symbols() if
                    symbol.is_declared_global() and symbol.is_assigned()}  # fmt: skip
        free = {
            symbol.get_name()
            for scope in (table, *_inner(table))
            for symbol in scope.get_symbols()
            if symbol.is_referenced() and (scope is table or symbol.is_global())
        }
        yield _ParsedTest(tree, frozenset(name for name in free - defined if not name.startswith("__")))


def _is_defined(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)


def _note(name: ast.Name, reading: _ParsedTest, use: _NameUses) -> None:
    parent = reading.parents[name]
    match parent:
        case ast.Attribute():
            use.as_module += 1
        case ast.Call(func=func) if func is name and _is_expected(name, reading.parents[parent], reading):
            use.as_expected += 1
        case _ if isinstance(parent, _OPERANDS) and getattr(parent, "slice", None) is not name:
            use.as_operand += 1
        case _:
            use.elsewhere += 1


def _is_expected(name: ast.Name, compared: ast.AST, reading: _ParsedTest) -> bool:
    names = reading.names(compared) if isinstance(compared, ast.Compare) else ()
    return any(candidate.id != name.id and not hasattr(builtins, candidate.id) for candidate in names)


def _source(name: str, use: _NameUses) -> tuple[str, str | None] | None:
    """Return where the standard library has what a name stands for, judging by its use."""
    if use.as_module and not use.is_subject and not use.as_operand and name in sys.stdlib_module_names:
        return name, None
    if use.as_expected and not (use.as_module or use.as_operand or use.elsewhere) and name in _CLASSES:
        return _CLASSES[name], name
    return None


def _check_verdicts(reading: _ParsedTest, subjects: frozenset[str]) -> None:
    """Refuse tests in which one function of the code decides about what another one returns.

    Raises:
        ValueError: There is such a call.
    """
    for node in ast.walk(reading.tree):
        if isinstance(node, ast.Call) and (judging := _root(node.func)) in subjects:
            passed = [name.id for value in (*node.args, *node.keywords) for name in reading.names(value)]
            # By convention a name in capitals is a class, and its objects are arguments.
            judged = [name for name in passed if name in subjects and name != judging and not name[0].isupper()]
            if judged and _is_verdict(node, reading):
                raise ValueError(
                    f"in the tests {judging} judges {judged[0]}, and both are the code's. Import or define {judging} "
                    "there"
                )


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_verdict(node: ast.AST, reading: _ParsedTest) -> bool:
    """Return whether a test passes or fails by the value of an expression itself, not by what it is equal to."""
    parent = reading.parents[node]
    while isinstance(parent, _TRANSPARENT) or (isinstance(parent, ast.Call) and hasattr(builtins, _root(parent.func))):
        node, parent = parent, reading.parents[parent]
    match parent:
        case ast.Assert(test=test):
            return test is node
        case ast.Expr():
            return not any(isinstance(child, ast.Assert) for child in ast.walk(reading.tree))
        case ast.Compare():
            return _decides(node, parent)
    return False


def _decides(node: ast.AST, comparison: ast.Compare) -> bool:
    """Return whether a comparison only asks whether a value is true, or how large it is."""
    compared = [operand for operand in (comparison.left, *comparison.comparators) if operand is not node]
    is_ordered = all(isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for operator in comparison.ops)
    return is_ordered or all(
        isinstance(operand, ast.Constant) and isinstance(operand.value, bool) for operand in compared
    )
