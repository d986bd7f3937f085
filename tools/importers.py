"""Counts modules of src that exactly one other module imports: a trend.

    python tools/importers.py [--list] [FOLDER]

Where two files are one thought, one file reads better. Not counted are entry points, which have one importer by their
nature: the verbs of the command line, what a package's `__init__` hands on, and what another layer alone imports, with
which it cannot be joined. Neither are the kinds that `importers.txt` lists: a builder chooses one of several by its
name, and a new one is one file.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = 40
"""When the counting began."""


def modules_of(package: Path) -> dict[str, Path]:
    """Return the files of a package by the names they are imported by."""
    paths = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imported(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of a package that a file imports, inside functions too."""
    parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            relative = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*relative, *filter(None, [node.module])])
            for alias in node.names:
                module = f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
                if module in modules:
                    yield module


def single_importers(package: Path) -> dict[str, str]:
    """Return the modules that one other module alone imports, with the name of that one."""
    modules = modules_of(package)
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for module in imported(name, path, modules):
            importers[module].add(name)
    return {
        name: next(iter(importers[name]))
        for name, path in sorted(modules.items())
        if len(importers[name]) == 1 and path.name != "__init__.py"
    }


def is_entry_point(name: str, importer: str, modules: dict[str, Path]) -> bool:
    """Return whether a module is a verb of the command line, or what a package or another layer takes from its own."""
    layer = name.split(".")[1]
    return layer == "cli" or modules[importer].name == "__init__.py" or importer.split(".")[1] != layer


def main() -> int:
    """Print the count, and which they are if `--list` asks."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--list"]
    package = Path(arguments[0]) if arguments else ROOT / "src" / "holdfast"
    kinds = set((ROOT / "tools" / "importers.txt").read_text(encoding="utf-8").split())
    modules, single = modules_of(package), single_importers(package)
    entries = {name for name, importer in single.items() if is_entry_point(name, importer, modules)}
    counted = {name: importer for name, importer in single.items() if name not in entries | kinds}
    besides = f"{len(entries)} entry points and {len(single) - len(entries) - len(counted)} kinds besides"
    print(f"importers: {len(counted)} modules have one importer ({START} at the start); {besides}")
    if "--list" in sys.argv:
        print(*(f"  {name} <- {importer}" for name, importer in counted.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
