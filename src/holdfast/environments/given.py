"""Environments, tools and agents that a Python caller passes as objects: the import path by which a worker finds them.

Each episode runs in a process of its own, which imports a file. An object is not sent there: it is named.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.errors import ConfigError

_OF_AGENTS = {"base_url", "api_key"}
"""Parameters by which an agent is known."""
REPLACED = ("kind", "path", "tools", "run", "command")
"""Keys of the section that an object stands for."""


def section_of(value: object, base: Path) -> dict[str, Any]:
    """Return the keys of the section `environment` that name an object.

    Args:
        value: A class or a function that makes an environment; a list of functions, which are tools; or an agent, a
            function of `(row, base_url, api_key)`.
        base: Files below it are named from there.

    Raises:
        ConfigError: A worker cannot import it.
    """
    if isinstance(value, list | tuple):
        return {"tools": [_import_path(tool, base) for tool in value]}
    path = _import_path(value, base)
    if inspect.isfunction(value) and inspect.signature(value).parameters.keys() >= _OF_AGENTS:
        return {"kind": "endpoint", "run": path}
    return {"path": path}


def _import_path(value: object, base: Path) -> str:
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if why := _why_not(value, name, module):
        raise ConfigError(
            f"environment: {name or repr(value)[:80]} {why}. Each episode has a process of its own, which imports what "
            "it needs: write a class or a function at the top of a file, such as world.py, import it from there, and "
            "pass it; a dictionary of environments is named as {'path': 'world.py:WORLDS'} in config."
        )
    assert module is not None
    assert module.__file__ is not None
    place, root = Path(module.__file__).resolve(), base.resolve()
    is_in_package = "." in module.__name__ or place.name == "__init__.py"
    if is_in_package and _is_found(module.__name__, place, root):
        return f"{module.__name__}:{name}"
    return f"{place.relative_to(root) if place.is_relative_to(root) else place}:{name}"


_SAY_WHERE = """
import importlib.util, sys
sys.path += sys.argv[2:]
spec = importlib.util.find_spec(sys.argv[1])
print(*(spec and spec.submodule_search_locations or ()), sep="\\n", end="")
"""


def _is_found(module: str, place: Path, base: Path) -> bool:
    """Return whether a worker imports a module from its place: this process may have a path of its own, as a script's.

    Args:
        module: Of a package.
        place: Its file.
        base: Where workers look besides.
    """
    command = [sys.executable, "-P", "-c", _SAY_WHERE, module.partition(".")[0], str(base), str(Path.cwd())]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return any(place.is_relative_to(Path(folder).resolve()) for folder in found.splitlines())


def _why_not(value: object, name: str, module: ModuleType | None) -> str:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"is a {type(value).__name__}, and no class or function"
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return "was typed into a session, and is in no file"
    if module.__name__ == "__main__":
        return f"is defined in {file}, the script that runs, which a worker would run again"
    if getattr(module, name, None) is not value:
        return f"does not stand by the name {name} at the top of {file}"
    return ""
