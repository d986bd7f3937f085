"""From a YAML file and overrides to a checked tree; every mistake is reported at once, with file and line.

Rules between keys are looked at in sections whose own keys are right, and whose sections below are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast.config.base import EXPORTED
from holdfast.config.explain import explain
from holdfast.config.tree import section_at
from holdfast.config.yaml12 import Document, KeyPath, parse_file, parse_value
from holdfast.errors import ConfigError

EXPORTED_CONFIG = "holdfast.yaml"
"""The run's resolved configuration in an export, so that `holdfast eval EXPORT` needs nothing else."""

Root = TypeVar("Root", bound=BaseModel)


@dataclass(frozen=True)
class LoadedConfig(Generic[Root]):
    """A checked tree, and the directory in which relative user files are looked up."""

    config: Root
    base: Path


@dataclass
class Draft:
    """A tree before it is checked: a document, what the command line changed in it, and what went wrong so far."""

    document: Document
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Key paths set by overrides, with the text of the override."""
    mistakes: list[str] = field(default_factory=list)


def load_config(path: Path, overrides: Sequence[str], root: type[Root]) -> LoadedConfig[Root]:
    """Read a run's YAML, apply `a.b=value` overrides and check the tree.

    `run.name` defaults to the file's stem.

    Raises:
        ConfigError: The file, an override or the tree is wrong; the message lists every mistake.
    """
    return LoadedConfig(check(read_config(path, overrides, root), root), path.resolve().parent)


def read_config(path: Path, overrides: Sequence[str], root: type[BaseModel]) -> Draft:
    """Read a run's YAML and apply overrides, without checking the tree.

    Raises:
        ConfigError: The file cannot be read.
    """
    draft = Draft(parse_file(path))
    for override in overrides:
        _apply(draft, override, root)
    run = draft.document.values.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = path.stem
        draft.origins["run", "name"] = f"the name of {path.name}"
    return draft


def from_mapping(
    values: Mapping[str, Any], root: type[Root], source: str = "config", overrides: Sequence[str] = ()
) -> Root:
    """Check a tree given as nested mappings, after applying `a.b=value` overrides.

    Raises:
        ConfigError: As `load_config`.
    """
    draft = Draft(Document(source, dict(values)))
    for override in overrides:
        _apply(draft, override, root)
    return check(draft, root)


def check(draft: Draft, root: type[Root]) -> Root:
    """Validate a draft against a root.

    Raises:
        ConfigError: One line for each mistake.
    """
    document = draft.document
    mistakes: list[tuple[float, str]] = [
        (line, f"{document.file}:{line}: {message}") for line, message in document.twice
    ]
    config: Root | None = None
    try:
        exported = Path(document.file).name == EXPORTED_CONFIG
        config = root.model_validate(document.values, context=EXPORTED if exported else None)
    except ValidationError as error:
        mistakes += explain(error, document, root, draft.origins)
    lines = [text for _, text in sorted(mistakes, key=lambda pair: pair[0])] + draft.mistakes
    if config is not None and not lines:
        return config
    heading = f"{document.file} has {len(lines)} mistakes:\n" if len(lines) > 1 else ""
    raise ConfigError(heading + "\n".join(lines))


def _apply(draft: Draft, override: str, root: type[BaseModel]) -> None:
    """Set the key an override names, or note what is wrong with the override."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        draft.mistakes.append(
            f"command line ({override}): this is no override; write section.key=value, for example optim.lr=2e-6"
        )
        return
    try:
        path = _set(draft.document.values, keys, parse_value(text), root)
        draft.origins[path] = f"command line ({override})"
    except ConfigError as error:
        draft.mistakes.append(f"command line ({override}): {error}")


def _set(values: dict[str, Any], keys: Sequence[str], value: Any, root: type[BaseModel]) -> KeyPath:
    """Set a key below nested mappings and lists, making sections on the way; return its path."""
    place: Any = values
    path: KeyPath = ()
    for key in keys[:-1]:
        path = (*path, _step(place, key))
        below = place.get(key) if isinstance(place, dict) else place[path[-1]]
        if below is None:
            below = {}
        elif isinstance(below, str) and section_at(root, path, values)[1].is_union:
            below = {"kind": below}
        if not isinstance(below, dict | list):
            raise ConfigError(
                f"{'.'.join(map(str, path))} is the value {below!r}, not a section; name one of its own keys, or "
                "replace it whole"
            )
        place[path[-1]] = below
        place = below
    path = (*path, _step(place, keys[-1]))
    place[path[-1]] = value
    return path


def _step(place: dict[str, Any] | list[Any], key: str) -> str | int:
    """Return a key as its container takes it."""
    if isinstance(place, dict):
        return key
    if not key.isdecimal() or int(key) >= len(place):
        raise ConfigError(f"{key!r} is not an index of a list with {len(place)} items")
    return int(key)
