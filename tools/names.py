"""Counts variables whose name says that something happened, and not what they are; fails above the number allowed.

`names.txt` lists the words. A participle such as `found` fits every value; a noun tells the reader which one it is.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 40


def assigned(tree: ast.AST) -> Iterator[str]:
    """Yield the name of every assignment, loops and comprehensions included, and of every parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def counts(root: Path, words: set[str]) -> dict[Path, Counter[str]]:
    """Return how often each file assigns to each of the words."""
    files = sorted(root.rglob("*.py"))
    names = {path: Counter(assigned(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    return {path: Counter({word: each[word] for word in words if each[word]}) for path, each in names.items()}


def main() -> int:
    """Print the count, and where most are if there are too many."""
    words = set((ROOT / "tools" / "names.txt").read_text(encoding="utf-8").split())
    by_file = counts(ROOT / "src", words)
    total = sum(sum(each.values()) for each in by_file.values())
    print(f"names: {total} of at most {MOST} assignments to {', '.join(sorted(words))}")
    if total <= MOST:
        return 0
    for path, each in sorted(by_file.items(), key=lambda item: -sum(item[1].values()))[:20]:
        print(f"  {path.relative_to(ROOT)}: {', '.join(f'{word} {count}' for word, count in each.most_common())}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
