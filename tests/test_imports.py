"""What is imported by a name in a text, or late, is there; what must start fast imports no heavy library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import holdfast
from holdfast import registry
from holdfast.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
HEAVY = {"torch", "transformers", "datasets", "numpy", "safetensors", "tokenizers", "peft"}
STARTERS = [
    "holdfast.cli.entry",
    "holdfast.cli.main",
    "holdfast.config.verbs.roots",
    "holdfast.launch.start",
    "holdfast.launch.agent",
    "holdfast.features.report.commands",
    "holdfast.features.rescue.systems.table",
    "holdfast.features.rescue.configuration.convert",
    "holdfast.features.cluster.submission",
]
"""Modules that a launcher or a command imports before it knows what it is asked."""
OTHERS = {"holdfast.processes.worker", "holdfast.rewards.work", "holdfast.environments.work"}
"""Modules of processes that run a user's files without torch."""


def named() -> Iterator[str]:
    """Yield every `module:attribute` of the registry and of the list of commands."""
    for value in vars(registry).values():
        values = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in values if isinstance(each, str) and re.fullmatch(r"[\w.]+:\w+", each))
    yield from (entry.path for entry in COMMANDS.values())


def imported_late() -> Iterator[tuple[str, str, str]]:
    """Yield (place, module, name) of every import of ours inside a function or for the type checker."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node not in tree.body and str(node.module).startswith("holdfast"):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield from ((place, str(node.module), alias.name) for alias in node.names)


def shown() -> set[str]:
    """Return the names of the package that docs/python.md shows, dotted."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    found = set(re.findall(r"\bholdfast\.[A-Za-z_][\w.]*\w", text))
    for module, names in re.findall(r"^from (holdfast[\w.]*) import \(?([\w, ]+)", text, re.MULTILINE):
        found |= {f"{module}.{name.strip()}" for name in names.split(",")}
    return found


def is_there(module: str, name: str) -> bool:
    """Return whether a module has an attribute, or is a package with a module of that name."""
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("holdfast")  # of an extra that is not installed


def test_every_import_path_of_the_registry_and_of_commands_names_something() -> None:
    paths = [path.partition(":") for path in named()]

    assert len(paths) > 30
    assert [path for path in paths if not is_there(path[0], path[2])] == []


def test_every_late_import_finds_its_name() -> None:
    late = list(imported_late())

    assert len(late) > 100
    assert [place for place, module, name in late if not is_there(module, name)] == []


def test_every_name_that_the_page_on_python_shows_is_public() -> None:
    names = [name.rpartition(".") for name in sorted(shown())]

    assert len(names) > 10
    assert [".".join(name) for name in names if not is_there(name[0], name[2])] == []
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)


@pytest.mark.parametrize("modules", [STARTERS, sorted(OTHERS)], ids=["starters", "workers"])
def test_what_must_start_fast_imports_no_heavy_library(modules: list[str]) -> None:
    program = f"import sys\n{''.join(f'import {module}; ' for module in modules)}\nprint(*sys.modules, sep='\\n')"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert {name.partition(".")[0] for name in done.stdout.splitlines()} & HEAVY == set()
