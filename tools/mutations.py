"""Change the package in seeded places, one at a time, and say which test notices: a measure of the lanes of tests.

    python tools/mutations.py list --seed 17 --count 40
    python tools/mutations.py run  --seed 17 --count 40 --results runs/mutations.jsonl
    python tools/mutations.py run  --seed 17 --only 3 8 --lane "deep and not slow and not gpu" --tests tests/cli
    python tools/mutations.py run  --seed 17 --count 40 --by-map --seconds 160

A mutant meets the tests of its part that are in the lane, those of its own module first, until one fails or the seconds
are over; a mutant that hangs is noticed too. `--tests` names others. With `--by-map` it first meets the tests of every
lane that enter its file by the recorded map (tools/record_map.py), those that enter the fewest files first, and where
these pass those of its part; each result says whether a landing that changes the file runs the test that
noticed. The script writes to `src` of this checkout and refuses one that has changes: use a worktree with a `.venv` of
its own. On a busy machine tests fail for other reasons, so look at the first line of each failure.

A place is drawn uniformly from the statements that can be changed, then one of its changes. A change swaps an operator,
alters a number or a truth value, or drops a statement. Annotations, decorators, assertions, texts and what is logged
stay as they are; so do plain assignments, whose loss any test would notice by a name that is missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.selection import stays, why_all  # noqa: E402 - found by the path above
from tools.record_map import EnteredMap, function_of, read_map  # noqa: E402

PACKAGE = ROOT / "src" / "holdfast"
LANE = "not slow and not gpu and not deep and not devices"
ALL_LANES = "not slow and not gpu and not devices"
SLOWER = 8
"""How much longer than the map says tests may take before a mutant counts as one that hangs."""
MOST_TESTS = 60
"""Test functions that a mutant meets by the map; to collect more takes longer than most of them run."""

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: (r"\*\*", "*"),
}  # fmt: skip
BOOLEAN = {ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and")}
HEAVY = ("torch", "transformers", "torch.distributed.fsdp", "torch.distributed.checkpoint", "datasets", "peft")
"""What most tests import and no mutant changes; imported once."""

REWRITTEN = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""One of them brings plugins of pytest, which then cannot rewrite their assertions."""

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
SILENT = {"annotation", "returns", "decorator_list", "type_params", *BLOCKS}
"""Fields of a statement that are no expression of its own, or do nothing when it runs."""

LOGS = re.compile(r"\b(log|logger|logging|echo|warn|warnings|print|say|note|console)\b")
MESSAGE_WORDS = {"strict", "ensure_ascii", "stacklevel"}
"""Keywords whose values guard against our own bugs, or change texts alone."""


@dataclass(frozen=True)
class Mutant:
    """One change: bytes `start` to `end` of a file become `text`."""

    path: Path
    line: int
    kind: str
    start: int
    end: int
    text: str

    def changed(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        source = self.path.read_bytes()
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path.relative_to(ROOT / 'src')}:{self.line} {self.kind}: `{before}` -> `{self.text}`"


class Source:
    """A file, its tree, and where in its bytes each node lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = path.read_bytes()
        self.tree = ast.parse(self.bytes)
        self.lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def start(self, node: Any) -> int:
        """Return where a node begins."""
        return int(self.lines[node.lineno - 1] + node.col_offset)

    def end(self, node: Any) -> int:
        """Return where a node ends."""
        return int(self.lines[node.end_lineno - 1] + node.end_col_offset)

    def statements(self, node: ast.AST | None = None) -> Iterator[ast.stmt]:
        """Yield the statements in order, without those that only a type checker reads."""
        for field in BLOCKS:
            for child in getattr(node or self.tree, field, []):
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
                if isinstance(child, ast.stmt):
                    yield child
                yield from self.statements(child)

    def operator(self, left: ast.AST, right: ast.AST, swap: tuple[str, str]) -> tuple[int, int, str] | None:
        """Return the change of the operator between two operands; None where a comment may be taken for it."""
        begin = self.end(left)
        gap = self.bytes[begin : self.start(right)].decode()
        match = re.search(swap[0], gap)
        return (begin + match.start(), begin + match.end(), swap[1]) if match and "#" not in gap else None


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def expressions(node: ast.AST, fields: Iterable[str]) -> Iterator[ast.AST]:
    """Yield what a statement computes itself, without texts and annotations."""
    for field in fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or is_text(child):
                continue
            if isinstance(child, ast.keyword) and child.arg in MESSAGE_WORDS:
                continue
            yield child
            yield from expressions(child, [name for name in child._fields if name not in SILENT - {"body", "orelse"}])


def number_instead(value: object) -> str | None:
    match value:
        case bool():
            return str(not value)
        case int():
            return str(value + 1)
        case float():
            return repr(value * 2 if value else 1.0)
    return None


def changes_of(source: Source, node: ast.AST) -> Iterator[tuple[str, tuple[int, int, str] | None]]:
    """Yield (kind, change) for an expression."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for operand, operator, other in zip([left, *others], ops, others, strict=False):
                yield "comparison", source.operator(operand, other, COMPARISONS[type(operator)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            if not is_text(left) and not is_text(right):
                yield "arithmetic", source.operator(left, right, ARITHMETIC[type(op)])
        case ast.BoolOp(op=op, values=values):
            for left, right in zip(values, values[1:], strict=False):
                yield "boolean", source.operator(left, right, BOOLEAN[type(op)])
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", (source.start(node), source.start(node) + len("not "), "")
        case ast.Constant(value=value) if (text := number_instead(value)) is not None:
            yield "constant", (source.start(node), source.end(node), text)


def can_be_dropped(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.YieldFrom()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            return True
        case ast.Assign(targets=[target]):
            return isinstance(target, ast.Attribute | ast.Subscript)
        case ast.Continue() | ast.Break() | ast.Return(value=None):
            return True
    return False


def mutants_of(source: Source) -> Iterator[list[Mutant]]:
    """Yield the changes of each statement that has any."""
    for statement in source.statements():
        if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom):
            continue
        if isinstance(statement, ast.Expr) and LOGS.search(ast.unparse(statement).partition("(")[0]):
            continue
        own = [] if isinstance(statement, ast.Raise) else [name for name in statement._fields if name not in SILENT]
        changes = [
            Mutant(source.path, statement.lineno, kind, start, end, text)
            for node in expressions(statement, own)
            for kind, change in changes_of(source, node)
            if change is not None
            for start, end, text in [change]
        ]
        if can_be_dropped(statement):
            start, end = source.start(statement), source.end(statement)
            changes.append(Mutant(source.path, statement.lineno, "drop", start, end, "pass"))
        if changes:
            yield changes


def draw(seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants; the same for the same source, seed and count, and of a larger count the first ones."""
    statements = [each for path in sorted(PACKAGE.rglob("*.py")) for each in mutants_of(Source(path))]
    dice = random.Random(seed)
    mutants = []
    for place in dice.sample(range(len(statements)), len(statements))[:count]:
        kinds = sorted({each.kind for each in statements[place]})
        kind = dice.choice(kinds)
        mutants.append(dice.choice([each for each in statements[place] if each.kind == kind]))
    return mutants


def tests_of(path: Path) -> list[str]:
    """Return the files of tests for a module: of its name, then those that import it, then of its folder.

    Where there is none of them, it is the folder of the part that it belongs to.
    """
    module, folder = path.relative_to(PACKAGE).with_suffix(""), ROOT / "tests"
    importing = re.compile(
        rf"holdfast\.{'.'.join(module.parts)}\b|holdfast\.{'.'.join(module.parts[:-1])} import .*\b{module.name}\b"
    )
    ranks: dict[str, tuple[bool, bool, int]] = {}
    for test in sorted(folder.rglob("test_*.py")):
        named = module.name in test.stem and test.parent.relative_to(folder).parts[:1] == module.parts[:1]
        imports = importing.search(test.read_text()) is not None
        beside = test.parent == folder / module.parent
        if named or imports or beside:
            ranks[str(test.relative_to(ROOT))] = (not named, not imports, test.stat().st_size)
    part = next(place for place in (folder / module).parents if place.is_dir())
    return sorted(ranks, key=lambda name: ranks[name]) or [str(part.relative_to(ROOT))]


def entering(path: Path, entered: EnteredMap, seconds: float) -> list[str]:
    """Return the test functions that enter a module by the recorded map, as many as take so long.

    A test that enters few files says most about each of them, so these come first.
    """
    names = entered.entering([str(path.relative_to(PACKAGE))])
    tests, total = [], 0.0
    for name in sorted(names, key=lambda name: (len(entered.files[name]), entered.seconds[name])):
        if total + entered.seconds[name] <= seconds and (ROOT / name.partition("::")[0]).exists():
            tests.append(name)
            total += entered.seconds[name]
    return tests[:MOST_TESTS]


def pytest_in_child(arguments: list[str], output: Path) -> None:
    """Run pytest in this process, which has imported the heavy libraries and nothing of ours, and end."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    status = 3
    try:
        status = int(pytest.main(arguments))
    finally:  # whatever it raises, the rest of this script is the other process's
        sys.stdout.flush()
        os._exit(status)


def outcome(arguments: list[str], output: Path, seconds: float) -> int | None:
    """Return the exit status of pytest; None: it ran out of time."""
    child = os.fork()
    if child == 0:
        pytest_in_child(arguments, output)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.2)
        return None
    finally:  # ranks and workers that it started end with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def put(path: Path, source: bytes) -> None:
    """Write a module without the byte code that Python would take for current within the same second."""
    path.write_bytes(source)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()


def tried(mutant: Mutant, lane: str, tests: list[str], seconds: float) -> dict[str, object]:
    """Return what became of a mutant; the source is as it was afterwards."""
    output = Path(tempfile.gettempdir()) / f"mutation-{os.getpid()}.txt"
    arguments = ["-q", "-x", "-p", "no:xdist", "--no-header", "--tb=short", *REWRITTEN, "-m", lane, *tests]
    source = mutant.path.read_bytes()
    begin = time.monotonic()
    put(mutant.path, mutant.changed(source))
    try:
        status = outcome(arguments, output, seconds)
    finally:
        put(mutant.path, source)
    printed = output.read_text(errors="replace")
    killer = re.search(r"^(?:FAILED|ERROR) (.*)$", printed, re.MULTILINE)
    ends = {0: "survived", None: "hung", 5: "no test"}
    return {
        "place": str(mutant),
        "end": "killed" if killer else ends.get(status, f"exit status {status}"),
        "by": killer[1] if killer else "",
        "seconds": round(time.monotonic() - begin),
        "said": "" if status == 0 else printed[-3000:],
    }


def tried_by_map(mutant: Mutant, entered: EnteredMap, seconds: float) -> dict[str, object]:
    """Return what became of a mutant among the tests that enter its file, and then among those of its part."""
    tests = entering(mutant.path, entered, seconds / SLOWER)
    result = tried(mutant, ALL_LANES, tests, seconds) if tests else {"end": "no test"}
    if result["end"] in {"no test", "survived"}:  # tests that are newer than the map do not stand in it
        result = tried(mutant, ALL_LANES, tests_of(mutant.path), seconds)
    test = function_of(str(result["by"]).partition(" - ")[0])
    changed = [str(mutant.path.relative_to(ROOT))]
    # A landing runs all tests where the map knows none that enters the file.
    runs = bool(why_all(entered, changed)) or stays(test, entered, changed, quarter=-1)
    return {**result, "entering": len(tests), "landing": bool(test) and runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("list", "run"))
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the list")
    parser.add_argument("--lane", default=LANE, help="which marks the tests have")
    parser.add_argument("--tests", nargs="*", help="instead of those of the module")
    parser.add_argument("--by-map", action="store_true", help="tests that enter the file, of all lanes")
    parser.add_argument("--seconds", type=float, default=240, help="for one mutant")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutations.jsonl")
    options = parser.parse_args()
    mutants = dict(enumerate(draw(options.seed, options.count), start=1))
    chosen = options.only or list(mutants)
    entered = read_map() if options.by_map else None
    if options.act == "run":
        if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT, check=False).returncode:
            sys.exit("src has changes; commit them, or use another worktree")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the source is put back
        os.chdir(ROOT)
        for library in HEAVY:
            importlib.import_module(library)
    for number in chosen:
        if options.act == "list":
            print(f"{number}. {mutants[number]}")
            continue
        mutant = mutants[number]
        if entered is not None:
            result = tried_by_map(mutant, entered, options.seconds)
        else:
            result = tried(mutant, options.lane, options.tests or tests_of(mutant.path), options.seconds)
        result["number"] = number
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(number, result["end"], result["seconds"], result["place"], result["by"], flush=True)


if __name__ == "__main__":
    main()
