"""From a YAML file and overrides to a checked tree; every mistake is reported at once, with file and line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast.config.explain import explain
from holdfast.config.yaml12 import Document, KeyPath, parse_file, parse_scalar
from holdfast.errors import ConfigError

Root = TypeVar("Root", bound=BaseModel)


@dataclass(frozen=True)
class Loaded(Generic[Root]):
    """A checked tree, and the directory in which relative user files are looked up."""

    config: Root
    base: Path


def load(path: Path, overrides: Sequence[str], root: type[Root]) -> Loaded[Root]:
    """Read a run's YAML, apply `a.b=value` overrides and check the tree.

    `run.name` defaults to the file's stem.

    Raises:
        ConfigError: The file, an override or the tree is wrong; the message lists every mistake.
    """
    document = parse_file(path)
    origins = apply_overrides(document, overrides)
    run = document.values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return Loaded(check(document, root, origins), path.resolve().parent)


def from_mapping(values: Mapping[str, Any], root: type[Root], source: str = "config") -> Root:
    """Check a tree given as nested mappings.

    Raises:
        ConfigError: As `load`.
    """
    return check(Document(source, dict(values)), root, {})


def check(document: Document, root: type[Root], origins: Mapping[KeyPath, str]) -> Root:
    """Validate a document against a root.

    Args:
        document: Values and their lines.
        root: The tree's root model.
        origins: Key paths set by overrides, with the text of the override.

    Raises:
        ConfigError: One line for each mistake.
    """
    try:
        return root.model_validate(document.values)
    except ValidationError as error:
        lines = explain(error, document, root, origins)
        heading = f"{document.file} has {len(lines)} mistakes:\n" if len(lines) > 1 else ""
        raise ConfigError(heading + "\n".join(lines)) from None


def apply_overrides(document: Document, overrides: Sequence[str]) -> dict[KeyPath, str]:
    """Set dotted keys in place and return where each came from.

    Raises:
        ConfigError: An override is not of the form a.b=value, or descends into something that is no section.
    """
    origins: dict[KeyPath, str] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            raise ConfigError(f"{override!r} is not an override. Write section.key=value, for example optim.lr=2e-6.")
        _set(document.values, keys, parse_scalar(text), override)
        path: KeyPath = tuple(int(key) if key.isdigit() else key for key in keys)
        origins[path] = override
    return origins


def _set(values: dict[str, Any], keys: tuple[str, ...], value: Any, override: str) -> None:
    place: Any = values
    for depth, key in enumerate(keys[:-1]):
        if isinstance(place, list):
            place = place[_index(place, key, override)]
        elif isinstance(place, dict):
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        if not isinstance(place, dict | list):
            raise ConfigError(
                f"{override!r}: {'.'.join(keys[: depth + 1])} is the value {place!r}, not a section. "
                "Name one of its own keys, or replace it whole."
            )
    if isinstance(place, list):
        place[_index(place, keys[-1], override)] = value
    else:
        place[keys[-1]] = value


def _index(items: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"{override!r}: {key!r} is not an index of a list with {len(items)} items.")
    return int(key)
