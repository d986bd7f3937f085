"""Mark every function of holdfast that a process enters, in a file that all processes of a test worker share.

Python imports a module of this name at its start when its folder is on PYTHONPATH; `make record-map` puts it there.
Each function gets one statement more, `marks[n] = 1`, so that recording costs little, also in ranks and rewards.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import json
import marshal
import mmap
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

FOLDER = os.environ.get("HOLDFAST_RECORD")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MARKS = "__holdfast_marks__"


def functions(source: str | bytes) -> tuple[ast.Module, list[Any]]:
    """Return a module's tree, and its functions in the order of their numbers."""
    tree = ast.parse(source)
    return tree, [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def marked(source: bytes, path: str, offset: int) -> CodeType:
    """Compile a module whose functions mark that they were entered, from `offset` on."""
    tree, nodes = functions(source)
    for number, node in enumerate(nodes, start=offset):
        has_docstring = ast.get_docstring(node, clean=False) is not None
        mark = ast.parse(f"{MARKS}[{number}] = 1").body[0]
        for inner in ast.walk(mark):
            ast.copy_location(inner, node.body[0])
        node.body.insert(int(has_docstring), mark)
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with marks; compiled ones are kept beside the marks."""

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the signature is importlib's
        """Return the code of the module, from this folder's cache where the source has not changed."""
        source = Path(self.path).read_bytes()
        digest = hashlib.sha256(self.path.encode() + source).hexdigest()[:24]
        cached = Path(str(FOLDER)) / "code" / digest
        try:
            code: CodeType = marshal.loads(cached.read_bytes())  # noqa: S302 - our own, written below
        except (OSError, ValueError, EOFError):
            code = marked(source, self.path, OFFSETS[self.path])
            fresh = cached.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(marshal.dumps(code))
            fresh.replace(cached)
        return code


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules of holdfast as Python does, and has them loaded with marks."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Return Python's own finding with another loader; None for what is not in the index."""
        if name.partition(".")[0] != "holdfast":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in OFFSETS:
            spec.loader = Loader(name, spec.origin)
        return spec


if FOLDER:
    OFFSETS: dict[str, int] = json.loads((Path(FOLDER) / "offsets.json").read_text())
    file = os.environ.get("HOLDFAST_ENTERED") or str(Path(FOLDER) / f"marks-{os.getpid()}")
    with open(file, "a+b") as opened:  # noqa: PTH123 - mmap wants a descriptor
        opened.truncate(OFFSETS["count"])
        setattr(builtins, MARKS, mmap.mmap(opened.fileno(), OFFSETS["count"]))
    builtins.__holdfast_marks_file__ = file  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Finder())
