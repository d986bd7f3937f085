"""Counts variables whose name says that something happened, and not what they are, and public names of two modules.

`names.txt` lists the words; too many of them fail. A participle such as `found` fits every value; a noun tells the
reader which one it is.

A public name stands in one module, so that whoever reads or searches for it finds one thing. Aside are functions of the
command line, which have the name of their verb in `cli` and `api.py`, `main` of programs, type variables, and the file
that runs in another system's process and imports nothing of ours.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 40
ALONE = {"features/vllm/extension.py"}
"""Files that another system's process loads by themselves."""


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


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module defines for others: functions, classes and constants, but type variables."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def twice(package: Path) -> dict[str, list[str]]:
    """Return the public names that more than one module of a package defines, with the modules."""
    paths = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items() if name not in ALONE}
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        is_of_verbs = path.startswith("cli/") or path == "api.py"
        for name in set(public_names(tree)):
            if not name.startswith("_") and name != "main" and not (is_of_verbs and name.islower()):
                modules[name].append(path)
    return {name: places for name, places in sorted(modules.items()) if len(places) > 1}


def main() -> int:
    """Print the counts, and where most are if there are too many."""
    public = twice(ROOT / "src" / "holdfast")
    print(f"public names: {len(public)} stand in two modules")
    for name, places in public.items():
        print(f"  {name}: {', '.join(places)}")
    words = set((ROOT / "tools" / "names.txt").read_text(encoding="utf-8").split())
    by_file = counts(ROOT / "src", words)
    total = sum(sum(each.values()) for each in by_file.values())
    print(f"names: {total} of at most {MOST} assignments to {', '.join(sorted(words))}")
    if total <= MOST:
        return 1 if public else 0
    for path, each in sorted(by_file.items(), key=lambda item: -sum(item[1].values()))[:20]:
        print(f"  {path.relative_to(ROOT)}: {', '.join(f'{word} {count}' for word, count in each.most_common())}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
