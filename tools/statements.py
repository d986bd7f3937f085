"""Count the lines and statements of `src`, of all and without features, and what its history took out of it.

    python tools/statements.py [COMMIT]

With a commit: by how many each later commit made the count larger or smaller, summed apart. Features make it larger; a
commit that makes it smaller says the same in less, or takes a feature out. Merges are left aside, as their parents are
counted.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_FILE = "0" * 40


def count(text: str) -> int:
    """Return the statements of a module, at every depth."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def code_lines(text: str) -> int:
    """Return the lines of a module without empty ones, comments and docstrings."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    documented = {number for node in strings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(number not in documented and line.strip()[:1] not in {"", "#"} for number, line in lines)


def main() -> None:
    """Print the count now and, with a commit, then, and both sums with the ten largest of the smaller ones."""
    files = sorted((ROOT / "src").rglob("*.py"))
    core = [file for file in files if "features" not in file.parts]
    for name, paths in (("src", files), ("its core", core)):
        texts = [path.read_text(encoding="utf-8") for path in paths]
        print(
            f"{name}: {len(texts)} files, {sum(text.count(chr(10)) for text in texts):,} lines, "
            f"{sum(map(code_lines, texts)):,} without comments and docstrings, {sum(map(count, texts)):,} statements"
        )
    if len(sys.argv) == 1:
        return
    start = sys.argv[1]
    commits = _git("rev-list", "--no-merges", f"{start}..HEAD").split()
    changes = {commit: _change_of(commit) for commit in commits}
    less = {commit: -change for commit, change in changes.items() if change < 0}
    more = [change for change in changes.values() if change > 0]
    print(f"{_count_at(start):,} at {start}; of {len(commits)} commits since then")
    print(f"  {len(more)} added {sum(more):,}")
    print(f"  {len(less)} took out {sum(less.values()):,}; the largest:")
    for commit in sorted(less, key=lambda commit: less[commit], reverse=True)[:10]:
        print(f"  {less[commit]:6,}  {_git('log', '-1', '--format=%h %s', commit).strip()}")


def _change_of(commit: str) -> int:
    """Return how many statements a commit added to `src`; below 0 where it took some out."""
    lines = _git("diff-tree", "-r", "--no-renames", "--no-commit-id", commit, "--", "src").splitlines()
    changes = [line.split(maxsplit=4) for line in lines if line.endswith(".py")]
    return sum(_count_of(after) - _count_of(before) for _, _, before, after, _ in changes)


def _count_at(commit: str) -> int:
    lines = _git("ls-tree", "-r", commit, "--", "src").splitlines()
    return sum(_count_of(line.split()[2]) for line in lines if line.endswith(".py"))


@cache
def _count_of(blob: str) -> int:
    return 0 if blob == NO_FILE else count(_git("cat-file", "-p", blob))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {arguments[0]}: {done.stderr.strip()}. Give a commit that a clone of the whole history has.")
    return done.stdout


if __name__ == "__main__":
    main()
