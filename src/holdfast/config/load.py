"""From YAML files and overrides to a checked tree; every mistake is reported at once: where, what, and what was meant.

Several files are one document: a later file wins key by key, and every key keeps its file and line. An override is the
last of them. Lists are replaced whole, and so is a section whose kind a later file changes, since the keys of one
kind say nothing of another. Null takes back what an earlier file says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast.config.base import Declared, is_left_out, keys_of
from holdfast.config.earlier import todays_form
from holdfast.config.mistakes import explain
from holdfast.config.tree import KeyType, dotted, marks_of, section_at, takes_null
from holdfast.config.yaml12 import Document, KeyPath, Place, parse_file, parse_value
from holdfast.errors import ConfigError

EXPORTED_CONFIG = "holdfast.yaml"
"""The run's resolved configuration in an export, so that `holdfast eval EXPORT` needs nothing else."""

Root = TypeVar("Root", bound=BaseModel)

_COMMAND_LINE = "command line"
_AFTER_ALL_FILES = 1_000_000
_UNKNOWN = (
    "its value was left out, since it may be secret; write the value, or evaluate with the file of the run: `holdfast "
    "eval RUN.yaml model.path=EXPORT`"
)


@dataclass(frozen=True)
class LoadedConfig(Generic[Root]):
    """A checked tree, and the directory in which relative user files are looked up."""

    config: Root
    base: Path


@dataclass
class Draft:
    """A tree before it is checked: a document, and what is wrong with the command line."""

    document: Document
    mistakes: list[str] = field(default_factory=list)


def load_config(path: Path, overrides: Sequence[str], root: type[Root]) -> LoadedConfig[Root]:
    """Read a run's YAML, merge further files, apply `a.b=value` overrides and check the tree.

    `run.name` defaults to the stem of the file, or the stems of all files, and relative user files are looked up in the
    directory of the first one.

    Raises:
        ConfigError: The file, an override or the tree is wrong; the message lists every mistake.
    """
    return LoadedConfig(check_draft(read_draft(path, overrides, root), root), path.resolve().parent)


def read_draft(path: Path, overrides: Sequence[str], root: type[BaseModel]) -> Draft:
    """Read a run's YAML, merge further files and apply overrides, without checking the tree.

    Raises:
        ConfigError: A file cannot be read.
    """
    more_files, values = split_overrides(overrides)
    files = (path, *more_files)
    document, *later_documents = [parse_file(file) for file in files]
    document.files = [document.file]
    for later in later_documents:
        _merge(document, later, root)
    draft = Draft(document)
    _override(draft, values, root)
    run = document.values.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = "-".join(file.stem for file in files)
        source = f"the name of {' and '.join(file.name for file in files)}"
        document.places["run", "name"] = Place(_AFTER_ALL_FILES, 0, source)
    return draft


def split_overrides(overrides: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the further files of a run, which stand among its overrides, and the overrides."""
    are_files = [Path(text).suffix in {".yaml", ".yml"} and "=" not in text for text in overrides]
    files = [Path(text) for text, is_file in zip(overrides, are_files, strict=True) if is_file]
    return files, [text for text, is_file in zip(overrides, are_files, strict=True) if not is_file]


def from_mapping(
    values: Mapping[str, Any], root: type[Root], source: str = "config", overrides: Sequence[str] = ()
) -> Root:
    """Check a tree given as nested mappings, after applying `a.b=value` overrides.

    Raises:
        ConfigError: As `load_config`.
    """
    draft = Draft(Document(source, dict(values)))
    _override(draft, overrides, root)
    return check_draft(draft, root)


def check_draft(draft: Draft, root: type[Root]) -> Root:
    """Validate a draft against a root.

    Raises:
        ConfigError: One line for each mistake.
    """
    document = draft.document
    document.values = todays_form(document.values)
    missed = [*_missed(document, root)]
    mistakes = [*document.twice, *((document.place(path), f"{dotted(path)}: {_UNKNOWN}") for path in missed)]
    config: Root | None = None
    try:
        config = root.model_validate(document.values)
    except ValidationError as error:
        mistakes += explain(error, document, root, missed)
    mistakes.sort(key=lambda mistake: mistake[0][:2])
    lines = [f"{place.text}: {text}" for place, text in mistakes] + draft.mistakes
    if config is not None and not lines:
        return config
    raise ConfigError(_listed(lines, document))


def _listed(lines: Sequence[str], document: Document) -> str:
    of_command_line = all(text.startswith(_COMMAND_LINE) for text in lines)
    source = f"The {_COMMAND_LINE} has" if of_command_line else f"{document.file} has"
    if len(document.files) > 1 and not of_command_line:
        source = f"{' and '.join(document.files)} have"
    return (f"{source} {len(lines)} mistakes:\n" if len(lines) > 1 else "") + "\n".join(lines)


def _missed(document: Document, root: type[BaseModel]) -> Iterator[KeyPath]:
    """Yield the keys that an export left out; a key that an export can do without is removed instead."""
    for path in [*_left_out(document.values)]:
        section = section_at(root, path[:-1], document.values)[0]
        key = None if section is None else keys_of(section).get(str(path[-1]))
        if Path(document.file).name == EXPORTED_CONFIG and key is not None and Declared.SPARED in marks_of(key):
            container: Any = document.values
            for step in path[:-1]:
                container = container[step]
            del container[path[-1]]
        else:
            yield path


def _left_out(values: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every value in whose place the mark of one that was left out stands."""
    if is_left_out(values):
        yield path
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        yield from _left_out(value, (*path, key))


def _override(draft: Draft, overrides: Sequence[str], root: type[BaseModel]) -> None:
    """Set the keys that overrides name, or note what is wrong with an override."""
    document = draft.document
    for number, override in enumerate(overrides):
        name, equals, text = override.partition("=")
        keys, source = name.strip().split("."), f"{_COMMAND_LINE} ({override})"
        if not equals or not all(keys):
            wrong = "this is no override; write section.key=value, for example optim.lr=2e-6"
            draft.mistakes.append(f"{source}: {wrong}")
            continue
        try:
            path = _set(document.values, keys, parse_value(text), root)
        except ConfigError as error:
            draft.mistakes.append(f"{source}: {error}")
            continue
        place = Place(_AFTER_ALL_FILES, number, source)
        for end in range(1, len(path)):
            document.places.setdefault(path[:end], place)  # of sections that came to be on the way
        _take_places(document, path, {path: place})


def _set(values: dict[str, Any], keys: Sequence[str], value: Any, root: type[BaseModel]) -> KeyPath:
    """Set a key below nested mappings and lists, making sections on the way; return its path."""
    container: Any = values
    path: KeyPath = ()
    for key in keys[:-1]:
        path = (*path, _step(container, key))
        choice = section_at(root, path, values)[1]
        below = container.get(key) if isinstance(container, dict) else container[path[-1]]
        below = {} if below is None else choice.spelt_out(below)
        if not isinstance(below, dict | list):
            raise ConfigError(
                f"{dotted(path)} is the value {below!r}, not a section; name one of its own keys, or replace it whole"
            )
        container[path[-1]] = container = below
    path = (*path, _step(container, keys[-1]))
    _put(container, path, value, values, root)
    return path


def _step(container: dict[str, Any] | list[Any], key: str) -> str | int:
    """Return a key as its container takes it."""
    if isinstance(container, dict):
        return key
    if not key.isdecimal() or int(key) >= len(container):
        raise ConfigError(f"{key!r} is not an index of a list with {len(container)} items")
    return int(key)


def _put(container: Any, path: KeyPath, value: Any, values: Any, root: type[BaseModel]) -> None:
    """Set the last key of a path; null removes a key that has no meaning for it."""
    if value is None and isinstance(container, dict) and not takes_null(root, path, values):
        container.pop(path[-1], None)
    else:
        container[path[-1]] = value


def _merge(document: Document, later: Document, root: type[BaseModel]) -> None:
    """Merge a later file into a document."""
    number = len(document.files)
    document.files.append(later.file)
    places = {path: place._replace(file=number) for path, place in later.places.items()}
    document.twice += [(place._replace(file=number), message) for place, message in later.twice]

    def mappings(values: dict[str, Any], later_values: Mapping[str, Any], path: KeyPath) -> None:
        for key, value in later_values.items():
            here = (*path, key)
            shape = section_at(root, here, document.values)[1]
            before: Any = shape.spelt_out(values.get(key))
            after: Any = shape.spelt_out(value)
            if _are_one_section(shape, before, after):
                values[key] = before
                mappings(before, after, here)
            else:
                _put(values, here, value, document.values, root)
                _take_places(document, here, places)

    mappings(document.values, later.values, ())


def _are_one_section(shape: KeyType, before: Any, after: Any) -> bool:
    """Return whether two values are mappings that can be merged: of one kind, where they have kinds."""
    if not isinstance(before, dict) or not isinstance(after, Mapping):
        return False
    kind = before.get("kind", shape.default_kind)
    return not shape.is_union or bool(after.get("kind", kind) == kind)


def _take_places(document: Document, path: KeyPath, later: Mapping[KeyPath, Place]) -> None:
    """Replace the places of a key and of all keys below it."""
    size = len(path)
    kept = {key: place for key, place in document.places.items() if key[:size] != path}
    document.places = kept | {key: place for key, place in later.items() if key[:size] == path}
