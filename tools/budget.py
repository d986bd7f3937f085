"""Hold the house to its budget: lines per file, lines and branches per function, repeated windows.

    python tools/budget.py [FOLDER ...]

A file has at most 400 lines, a function 80 lines and a cyclomatic complexity of 12; no 8 lines in a row stand twice.
Lengths of functions are printed beside those of 578abc10^, the commit before features had folders.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, FUNCTION_LINES, COMPLEXITY, WINDOW = 400, 80, 12, 8
LONG, START = 40, "5207; 10.1; 47; 60"
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert, ast.match_case)


def complexity(function: ast.AST) -> int:
    branches = sum(isinstance(node, BRANCHES) for node in ast.walk(function))
    return 1 + branches + sum(len(node.values) - 1 for node in ast.walk(function) if isinstance(node, ast.BoolOp))


def over_budget(path: Path, source: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, more than {FILE_LINES}; split it by meaning"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, more than {FUNCTION_LINES}"
        if (branches := complexity(node)) > COMPLEXITY:
            yield f"{path}:{node.lineno}: {node.name} has complexity {branches}, more than {COMPLEXITY}"


def lengths_of_functions(sources: dict[Path, str]) -> str:
    """Return how long functions are, beside those of 578abc10^."""
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    above = sum(length > LONG for length in lengths)
    mean = sum(lengths) / len(lengths)
    return (
        f"functions: {len(lengths)} of {mean:.1f} lines on average, {above} above {LONG}, the longest {max(lengths)} "
        f"({START} at the start)"
    )


def code_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, text) of the lines that say something: no blanks, comments, imports or brackets alone."""
    kept = []
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip()
        if len(text) > 3 and not text.startswith(("#", "import ", "from ", '"""', "@")):
            kept.append((number, text))
    return kept


def repeated(sources: dict[Path, str]) -> Iterator[str]:
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, source in sources.items():
        lines = code_lines(source)
        for start in range(len(lines) - WINDOW + 1):
            window = lines[start : start + WINDOW]
            places[tuple(text for _, text in window)].append((path, window[0][0]))
    seen: set[tuple[Path, Path]] = set()
    for where in places.values():
        if len(where) > 1 and (pair := (where[0][0], where[1][0])) not in seen:
            seen.add(pair)
            yield f"{where[0][0]}:{where[0][1]} and {where[1][0]}:{where[1][1]}: {WINDOW} lines in a row are the same"


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]] or [Path("src"), Path("tools"), Path("benchmarks")]
    sources = {path: path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}
    found = [line for path, source in sources.items() for line in over_budget(path, source)] + list(repeated(sources))
    for line in found:
        print(line)
    if len(sys.argv) == 1:
        print(lengths_of_functions(sources))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
