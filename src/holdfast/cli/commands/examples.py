"""`holdfast examples`: copies the configurations that come with the package, so that their commands work here."""

# As cli/main.py, without `from __future__ import annotations`.
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import UserError
from holdfast.files import RegularFile, read_text

FOLDER = Path("examples")
"""Where their headers expect them."""
_NAMED = re.compile(r"examples/([\w./-]+\.\w+)")
"""A file that another one names by its place here."""
_BESIDE = re.compile(r"([\w./-]+\.(?:py|jinja|jsonl|txt))\b")
"""A file that a configuration names by its place beside it."""
_COMMAND = re.compile(r"^#   ((?:holdfast|python) .+)$", re.MULTILINE)


def lay_down(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One of them, as grpo_sort, with the files it needs.")
    ] = None,
) -> None:
    """Copy the examples, or one with what it needs, to ./examples, and print the commands that run it.

    A run is named after its file: examples/grpo_sort.yaml trains into runs/grpo_sort.
    """
    source = source_directory()
    configurations = {path.relative_to(source).with_suffix("").as_posix(): path for path in source.rglob("*.yaml")}
    if name is None:
        copied = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        _copy(copied, source)
        for each in sorted(configurations):
            typer.echo(f"{each:<22} {_description(configurations[each]).partition('. ')[0].rstrip('.')}")
        typer.echo(f"{len(copied)} files are in {FOLDER}; the first lines of each say what to run and what to expect.")
        return
    path = _named(name, configurations)
    _copy(needed_by(path, source), source)
    typer.echo(f"{_description(path)}\n\nTo run it:\n")
    for command in _COMMAND.findall(_header(path)):
        typer.echo(f"    {command}")


def source_directory() -> Path:
    """Return the directory of the examples: in the package, or in the checkout that it is imported from."""
    package = Path(str(files("holdfast")))
    installed = package / "examples"
    return installed if installed.is_dir() else package.parents[1] / "examples"


def needed_by(path: Path, source: Path) -> set[Path]:
    """Return a file of the examples and every other one that it names, or that they name."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        each = waiting.pop()
        if each in found or not each.is_file():
            continue
        found.add(each)
        text = read_text(each)
        waiting += [source / name for name in _NAMED.findall(text)]
        waiting += [each.parent / name for name in _BESIDE.findall(text)]
    return found


def _named(name: str, configurations: dict[str, Path]) -> Path:
    path = configurations.get(name.removeprefix("examples/").removesuffix(".yaml"))
    if path is None:
        meant = get_close_matches(name, configurations, 1)
        raise UserError(
            f"There is no example {name}{f'; did you mean {meant[0]}?' if meant else '.'} `holdfast examples` copies "
            "all of them here and lists them."
        )
    return path


def _copy(chosen: Iterable[Path], source: Path) -> None:
    """Write files to `FOLDER`; nothing is written where another file would be replaced.

    Raises:
        UserError: A file stands there that differs, or one cannot be written.
    """
    targets = {path: FOLDER / path.relative_to(source) for path in sorted(chosen)}
    try:
        new = [path for path, target in targets.items() if not _is_same(target, path)]
        for path in new:
            targets[path].parent.mkdir(parents=True, exist_ok=True)
            targets[path].write_bytes(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{error.filename or FOLDER} cannot be written: {error.strerror or error}. Run the command in another "
            "directory."
        ) from error


def _is_same(target: Path, path: Path) -> bool:
    if not target.exists():
        return False
    with RegularFile(target) as file:
        if file.readall() != path.read_bytes():
            raise UserError(
                f"{target} is there already and differs from this version's. Nothing was written. Move it away, or run "
                "the command in another directory."
            )
    return True


def _header(path: Path) -> str:
    """Return the comments that a file begins with."""
    return "\n".join(takewhile(lambda line: line.startswith("#"), read_text(path).splitlines()))


def _description(path: Path) -> str:
    """Return its header as one paragraph without the commands."""
    return " ".join(_COMMAND.sub("", _header(path)).replace("#", "").split())
