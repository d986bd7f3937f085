"""Read YAML the way people write it: YAML 1.2 scalars, and the line of every key.

YAML 1.1 reads `1e-5` as text and `off` as False. Here `1e-5` is a number and `off` is a word; only true, false and
null are special. Duplicate keys are errors, since the first of two learning rates would be lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import ConfigError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Document:
    """A parsed file: plain values, and the line of every key."""

    file: str
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Return `file:line` of a key, or of the nearest key above it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return self.file


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document) -> Any:
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node))
            line = key_node.start_mark.line + 1
            if key in result:
                raise ConfigError(
                    f"{document.file}:{line}: {key} is set twice (first on line {document.lines[(*path, key)]}). "
                    "Keep one of them."
                )
            document.lines[(*path, key)] = line
            result[key] = _build(loader, value_node, (*path, key), document)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            document.lines[(*path, index)] = item.start_mark.line + 1
            items.append(_build(loader, item, (*path, index), document))
        return items
    return loader.construct_object(node)


def parse_text(text: str, file: str) -> Document:
    """Parse YAML text.

    Raises:
        ConfigError: The text is not YAML, holds a key twice, or is not a mapping.
    """
    loader = _Loader(text)
    document = Document(file, {})
    try:
        node = loader.get_single_node()
        values = _build(loader, node, (), document) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{file}{line}: not YAML: {problem}.") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file}: the file must hold keys and values, as in `steps: 100`, not a {type(values).__name__}."
        )
    document.values.update(values)
    return document


def parse_file(path: Path) -> Document:
    """Parse a YAML file.

    Raises:
        ConfigError: The file cannot be read or parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"There is no file {path}. Give the path of a run's YAML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    return parse_text(text, str(path))


def parse_scalar(text: str) -> Any:
    """Parse the right side of an override, such as `2e-6`, `[a, b]` or `{kind: linear}`."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, (), Document("command line", {}))
    except yaml.YAMLError:
        return text
    finally:
        loader.dispose()
