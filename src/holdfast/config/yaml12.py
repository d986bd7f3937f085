"""Read YAML the way people write it: YAML 1.2 scalars, and the line of every key. Write it so that it reads back.

YAML 1.1 reads `1e-5` as text, `off` as False and `010` as 8. Here `1e-5` is a number, `off` is a word and `010` is ten;
only true, false and null are special. A key that stands twice is a mistake, since one of two learning rates is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import ConfigError
from holdfast.files import read_text
from holdfast.text.shortening import shortened

KeyPath = tuple[str | int, ...]


MOST_NODES = 10_000
"""Keys, values and lists of a document, an alias counted with all it stands for; runs have some hundreds."""
MOST_LEVELS = 100
"""Lists and mappings inside each other."""
_MOST_BYTES = 2**21


class TooMuch(ConfigError):  # noqa: N818 - the name says what is wrong
    """A document that would take more time or memory than any configuration."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2, and `_` between digits.

    It stops at a node too many and at a level too deep while it reads, since both cost time and memory from there on.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes, self.levels = 0, 0
        self.open: set[int] = set()
        """Of the nodes that are being built, those that hold this one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and what is below it."""
        line: int = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]  # the stubs lack it
        self.count(line)
        self.levels += 1
        if self.levels > MOST_LEVELS:
            raise TooMuch(
                f":{line}: lists and mappings are nested more than {MOST_LEVELS} deep. Look for brackets that nobody "
                "closes."
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def count(self, line: int) -> None:
        """Count a node.

        Raises:
            TooMuch: It is one too many.
        """
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise TooMuch(
                f":{line}: this is more than {MOST_NODES:,} keys and values, each alias (*name) counted with all it "
                "stands for. Write the values out, or move a long list into a file of its own."
            )


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what is a number or a word in YAML 1.1 or in 1.2: a revision may be called 7e10."""


_MOST_DIGITS = 1_000


def _whole_number(text: str) -> int:
    digits = text.replace("_", "")
    if (
        len(digits) > _MOST_DIGITS
    ):  # Python reads no more than 4,300 decimal ones, and would not print a hexadecimal one
        raise ValueError(f"a whole number of {len(digits):,} digits")
    for prefix, base in (("0o", 8), ("0x", 16)):
        if digits.startswith(prefix):
            return int(digits[2:], base)
    return int(digits)


def _number(text: str) -> float:
    return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_TAG = "tag:yaml.org,2002:"
_PATTERNS = {
    "null": (r"~|null|Null|NULL|", ["", "~", "n", "N"]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
"""Of plain scalars, and the characters they can start with; an empty one is null."""
_MEANINGS: dict[str, Callable[[str], Any]] = {
    f"{_TAG}null": lambda _: None,
    f"{_TAG}bool": lambda text: text.lower() == "true",
    f"{_TAG}int": _whole_number,
    f"{_TAG}float": lambda text: _number(text.lower()),
}

_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _PATTERNS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"(?:{_pattern})$"), _first)

_ADVICE = {"mapping values": " Quote a value that holds ': '.", "'\\t'": " Indent with spaces, not tabs."}
"""By a part of PyYAML's message."""


@dataclass(frozen=True)
class Document:
    """A parsed file: plain values, the line of every key, and keys that stand twice.

    Several files that were merged are one document too.
    """

    file: str
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    twice: list[tuple[str, int, str]] = field(default_factory=list)
    """File, line and message of each."""
    later_files: list[str] = field(default_factory=list)
    """Those that were merged into it, in order."""
    later_keys: dict[KeyPath, str] = field(default_factory=dict)
    """File of each key that comes from one of them."""

    def line(self, path: KeyPath) -> int:
        """Return the line of a key, or of the nearest key above it; 0 if there is none."""
        return self.lines.get(self._written(path), 0)

    def where(self, path: KeyPath) -> str:
        """Return `file:line` of a key, or of the nearest key above it."""
        line = self.line(path)
        return f"{self.file_of(path)}:{line}" if line else self.file

    def file_of(self, path: KeyPath) -> str:
        """Return the file of a key, or of the nearest key above it."""
        return self.later_keys.get(self._written(path), self.file)

    def order(self, file: str, line: float) -> tuple[int, float]:
        """Return what lines of all files are sorted by."""
        return self.later_files.index(file) + 1 if file in self.later_files else 0, line

    @property
    def files(self) -> str:
        """The names of all files."""
        return " and ".join([self.file, *self.later_files])

    def _written(self, path: KeyPath) -> KeyPath:
        """Return a key, or the nearest key above it, that a file holds; () if there is none."""
        return next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), ())


def _composed(loader: _Loader) -> yaml.Node | None:
    """Return the document's node; what is built of it is counted anew, since aliases multiply only then."""
    node: yaml.Node | None = loader.get_single_node()
    loader.nodes = 0
    return node


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document) -> Any:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in {f"{_TAG}map", f"{_TAG}seq"}:
        raise yaml.constructor.ConstructorError(None, None, f"there is no tag {node.tag!r} here", node.start_mark)
    line = document.line(path[:1]) or node.start_mark.line + 1  # that of an alias is where its anchor stands
    loader.count(line)
    if id(node) in loader.open:
        raise TooMuch(f":{line}: an anchor (&name) holds itself (*name). Write the value out.")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node)
    loader.open.add(id(node))
    try:
        return _build_inside(loader, node, path, document)
    finally:
        loader.open.discard(id(node))


def _build_inside(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document) -> Any:
    """Return what a mapping or a list holds."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _key(key_node)
            here, line = (*path, key), key_node.start_mark.line + 1
            if key in result:
                first = document.lines[here]
                message = f"{'.'.join(map(str, here))}: set twice, first on line {first}; keep one of them"
                document.twice.append((document.file, line, message))
                continue
            document.lines[here] = line
            result[key] = _build(loader, value_node, here, document)
        return result
    items = []
    for index, item in enumerate(node.value):
        document.lines[(*path, index)] = item.start_mark.line + 1
        items.append(_build(loader, item, (*path, index), document))
    return items


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    try:
        return _MEANINGS[node.tag](node.value) if node.tag in _MEANINGS else loader.construct_object(node)
    except ValueError as error:  # `!!int x`
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def _key(node: yaml.Node) -> str:
    """Return a key as it is written: a batch size schedule has numbers for keys, and a model may be called `null`."""
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key must be a word or a number", node.start_mark)
    return str(node.value)


def parse_text(text: str, file: str) -> Document:
    """Parse YAML text.

    Raises:
        ConfigError: The text is not YAML, or is not a mapping.
    """
    document = Document(file, {})
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # control characters
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}.") from error
    try:
        node = _composed(loader)
        values = _build(loader, node, (), document) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        advice = next((text for pattern, text in _ADVICE.items() if pattern in problem), "")
        raise ConfigError(f"{file}{line}: not YAML: {problem}.{advice}") from error
    except TooMuch as error:
        raise TooMuch(f"{file}{error}") from None
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
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"There is no file {path}. Give the path of a run's YAML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    return parse_text(text, str(path))


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


def parse_value(text: str) -> Any:
    """Parse the right side of an override: `[a, b]`, `{kind: linear}`, a quoted text, or a scalar such as `2e-6`.

    Whatever else it is stands for itself, with every character, so that templates and odd paths need no quotes.

    Raises:
        ConfigError: A key stands twice in it, or a number has digits without end.
    """
    document = Document("", {})
    try:
        loader = _Loader(text if text.startswith(("[", "{", "'", '"')) else "")
    except yaml.YAMLError:
        return text
    try:
        node = _composed(loader)
        if node is None:
            tag = loader.resolve(yaml.ScalarNode, text.strip(), (True, False))  # type: ignore[no-untyped-call]  # the stubs lack it
            return _MEANINGS[tag](text.strip()) if tag in _MEANINGS else text
        value = _build(loader, node, (), document)
    except TooMuch as error:
        raise ConfigError(str(error).partition(": ")[2]) from None
    except yaml.YAMLError:
        return text
    except ValueError as error:
        raise ConfigError(f"{shortened(text, 23)} is {error}, and no key takes one.") from None
    finally:
        loader.dispose()
    if document.twice:
        raise ConfigError(document.twice[0][2])
    return value
