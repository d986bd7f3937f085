"""The share of assigned names that say nothing of a value, the names that are assigned most, and public names twice.

`names.txt` lists the words; their plurals count too. A participle such as `found` fits every value; a noun tells the
reader which one it is. The twenty most frequent names are printed as well, so that synonyms of a listed word show.

A public name stands in one module, so that whoever reads or searches for it finds one thing. Aside are functions of the
command line, which have the name of their verb, `main` of programs, type variables, and the file that runs in another
system's process and imports nothing of ours. Nothing here fails: these are trends.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = 8.7
"""Percent, when the counting began."""
ANCHORS = "prime-rl 0.3, nanochat 0.2, TRL 0.2, torchtitan 0.1"
"""Percent in trees that are easy to read, by the same list, on 2026-11-27."""
SHOWN = 20
ALONE = {"features/vllm/extension.py"}
"""Files that another system's process loads by themselves."""


def assigned(tree: ast.AST) -> Iterator[str]:
    """Yield the name of every assignment, loops and comprehensions included, and of every parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def names_in(root: Path) -> dict[Path, Counter[str]]:
    """Return how often each file assigns to each name."""
    files = sorted(root.rglob("*.py"))
    return {path: Counter(assigned(ast.parse(path.read_text(encoding="utf-8")))) for path in files}


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
        is_of_verbs = path.startswith("cli/") or path.endswith(("api.py", "/commands.py"))
        for name in set(public_names(tree)):
            if not name.startswith("_") and name != "main" and not (is_of_verbs and name.islower()):
                modules[name].append(path)
    return {name: places for name, places in sorted(modules.items()) if len(places) > 1}


def main() -> int:
    """Print the counts, and the files that assign most of the words."""
    public = twice(ROOT / "src" / "holdfast")
    print(f"public names: {len(public)} stand in two modules")
    for name, modules in public.items():
        print(f"  {name}: {', '.join(modules)}")
    listed = set((ROOT / "tools" / "names.txt").read_text(encoding="utf-8").split())
    vague = listed | {f"{word}s" for word in listed}
    by_file = names_in(ROOT / "src")
    total = sum(by_file.values(), Counter())
    count = sum(total[word] for word in vague)
    share = 100 * count / total.total()
    print(f"names: {share:.1f} % of {total.total()} assignments are vague ({START} at the start; {ANCHORS})")
    print(f"most assigned: {', '.join(f'{name} {number}' for name, number in total.most_common(SHOWN))}")
    if "--list" in sys.argv:
        of_file = {
            path: Counter({word: names[word] for word in vague if names[word]}) for path, names in by_file.items()
        }
        for path, words in sorted(of_file.items(), key=lambda item: -item[1].total())[:40]:
            print(
                f"  {path.relative_to(ROOT)}: {', '.join(f'{word} {number}' for word, number in words.most_common())}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
