"""Read YAML the way people write it: YAML 1.2 scalars, and the line of every key. Write it so that it reads back.

YAML 1.1 reads `1e-5` as text, `off` as False and `010` as 8. Here `1e-5` is a number, `off` is a word and `010` is ten;
only true, false and null are special. A key that stands twice is a mistake, since one of two learning rates is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from holdfast.errors import ConfigError
from holdfast.files import read_text
from holdfast.text.shortening import shortened

KeyPath = tuple[str | int, ...]

MOST_NODES = 10_000
"""Keys and items of a document, an alias counted with all it stands for; runs have some hundreds."""
MOST_LEVELS = 100
"""Lists and mappings inside each other."""
_MOST_BYTES = 2**21
_MOST_DIGITS = 1_000


_TOO_MANY = (
    f"this is more than {MOST_NODES:,} keys and values, each alias (*name) counted with all it stands for. Write the "
    "values out, or move a long list into a file of its own"
)
_TOO_DEEP = (
    f"lists and mappings are nested more than {MOST_LEVELS} deep. Look for brackets that nobody closes, or for an "
    "anchor (&name) that holds itself (*name)"
)


class _TooMuch(yaml.MarkedYAMLError):
    """A document that would take more time or memory than any configuration."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2, and `_` between digits."""

    levels = nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and what is below it; the time per bracket grows with the brackets that are open."""
        self.levels, self.nodes = self.levels + 1, self.nodes + 1
        if self.nodes > 2 * MOST_NODES:
            raise _TooMuch(problem=_TOO_MANY, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]  # the stubs lack it
        if self.levels > MOST_LEVELS:
            raise _TooMuch(problem=_TOO_DEEP, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]  # the stubs lack it
        node: yaml.Node | None = super().compose_node(parent, index)
        self.levels -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what is a number or a word in YAML 1.1 or in 1.2: a revision may be called 7e10."""


def _whole_number(text: str) -> int:
    digits = text.replace("_", "")
    # Python reads no more than 4,300 decimal ones, and would not print a hexadecimal one.
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    base = {"0o": 8, "0x": 16}.get(digits[:2], 10)
    return int(digits if base == 10 else digits[2:], base)  # noqa: PLR2004


def _number(text: str) -> float:
    return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_TAG = "tag:yaml.org,2002:"
_SCALARS: Mapping[str, tuple[re.Pattern[str], list[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["", "~", "n", "N"], lambda _: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"), lambda text: text.lower() == "true"),
    "int": (
        re.compile(r"(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789"), _whole_number,
    ),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"), _number,
    ),
}  # fmt: skip
"""Pattern of a plain scalar, the characters it can start with ("" is an empty one), and what it means."""


def _constructor(meaning: Callable[[str], Any]) -> Callable[[yaml.Loader, yaml.ScalarNode], Any]:
    return lambda _, node: meaning(node.value)


_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first, _meaning) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", _pattern, _first)
    _Loader.add_constructor(f"{_TAG}{_name}", _constructor(_meaning))

_ADVICE = {"mapping values": " Quote a value that holds ': '.", "'\\t'": " Indent with spaces, not tabs."}
"""By a part of PyYAML's message."""


class Place(NamedTuple):
    """Where a key comes from; places sort in the order of files and lines, the command line last."""

    file: int
    """Number of the file among those that were merged."""
    line: int
    """0: no line of a file."""
    text: str
    """`run.yaml:3`, or `command line (steps=3)`."""


@dataclass
class Document:
    """Plain values, the place of every key, and keys that stand twice.

    Several files that were merged are one document too.
    """

    file: str
    values: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)
    twice: list[tuple[Place, str]] = field(default_factory=list)
    """Place and message of each."""
    files: list[str] = field(default_factory=list)
    """Names of the files that were merged into it, in order."""

    def place(self, path: KeyPath) -> Place:
        """Return the place of a key, or of the nearest key above it; that of the file if there is none."""
        above = (self.places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.places)
        return next(above, Place(0, 0, self.file))


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document) -> Any:
    """Return the plain value of a node, and note the places of what is below it."""
    match node:
        case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
            values: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = _key(key_node)
                if key in values:
                    document.twice.append(_twice((*path, key), key_node, document))
                else:
                    _note((*path, key), key_node, document)
                    values[key] = _build(loader, value_node, (*path, key), document)
            return values
        case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
            items = []
            for index, item in enumerate(node.value):
                _note((*path, index), item, document)
                items.append(_build(loader, item, (*path, index), document))
            return items
        case yaml.ScalarNode() if node.tag.removeprefix(_TAG) in {*_SCALARS, "str"}:
            try:
                return loader.construct_object(node)
            except ValueError as error:  # `!!int x`
                raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
    raise yaml.constructor.ConstructorError(None, None, f"there is no tag {node.tag!r} here", node.start_mark)


def _note(path: KeyPath, node: yaml.Node, document: Document) -> None:
    line = node.start_mark.line + 1
    document.places[path] = Place(0, line, f"{document.file}:{line}")
    if len(path) > MOST_LEVELS:
        raise _TooMuch(None, None, _TOO_DEEP, node.start_mark)
    if len(document.places) > MOST_NODES:
        raise _TooMuch(None, None, _TOO_MANY, node.start_mark)


def _twice(path: KeyPath, node: yaml.Node, document: Document) -> tuple[Place, str]:
    line = node.start_mark.line + 1
    first = document.places[path].line
    message = f"{'.'.join(map(str, path))}: set twice, first on line {first}; keep one of them"
    return Place(0, line, f"{document.file}:{line}"), message


def _key(node: yaml.Node) -> str:
    """Return a key as it is written: a batch size schedule has numbers for keys, and a model may be called `null`."""
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key must be a word or a number", node.start_mark)
    return str(node.value)


def _parsed(text: str, document: Document) -> Any:
    """Return the value of a text, and note places in a document.

    Raises:
        yaml.YAMLError: The text is not YAML, or is too large.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return {} if node is None else _build(loader, node, (), document)
    finally:
        loader.dispose()


def parse_text(text: str, file: str) -> Document:
    """Parse YAML text.

    Raises:
        ConfigError: The text is not YAML, or is not a mapping.
    """
    document = Document(file, {})
    try:
        values = _parsed(text, document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())  # control characters have no mark
        advice = next((text for pattern, text in _ADVICE.items() if pattern in problem), "")
        kind = "" if isinstance(error, _TooMuch) else "not YAML: "
        raise ConfigError(f"{file}{line}: {kind}{problem}.{advice}") from error
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
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"There is no file {path}. Give the path of a run's YAML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}. Give the path of a run's YAML file.") from error
    return parse_text(text, str(path))


def parse_value(text: str) -> Any:
    """Parse the right side of an override: `[a, b]`, `{kind: linear}`, a quoted text, or a scalar such as `2e-6`.

    Any other text stands for itself, with every character, so that templates and odd paths need no quotes.

    Raises:
        ConfigError: A key stands twice in it, or a number has digits without end.
    """
    document = Document("", {})
    try:
        if text.startswith(("[", "{", "'", '"')):
            value = _parsed(text, document)
        else:
            plain = text.strip()
            value = next((meaning(plain) for pattern, _, meaning in _SCALARS.values() if pattern.match(plain)), text)
    except _TooMuch as error:
        raise ConfigError(f"{error.problem}.") from None
    except yaml.YAMLError:
        return text
    except ValueError as error:
        raise ConfigError(f"{shortened(text, 23)} is {error}, and no key takes one.") from None
    if document.twice:
        raise ConfigError(document.twice[0][1])
    return value


def to_yaml(values: Mapping[str, Any]) -> str:
    """Write plain values as YAML that `parse_text` reads as the same values."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def to_flow(values: Mapping[str, Any]) -> str:
    """Write plain values on one line, without the braces around them, as in `loss: {kind: dpo, beta: 0.1}`."""
    text: str = yaml.dump(
        dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=2**31
    )
    return text.strip()[1:-1]
