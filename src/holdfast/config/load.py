"""From a YAML file and overrides to a checked tree; every mistake is reported at once: where, what, and what was meant.

Rules between keys are looked at in sections whose own keys are right, and whose sections below are.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast import registry
from holdfast.config.base import Declared, Section, is_left_out, kinds_of
from holdfast.config.merge import merged
from holdfast.config.remedies import belongs_to_sibling, example, path_of_default, written_as_section
from holdfast.config.tree import all_keys, key_path, marks_of, section_at, takes_null
from holdfast.config.yaml12 import Document, KeyPath, parse_file, parse_value
from holdfast.errors import ConfigError
from holdfast.text.shortening import shortened

_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text; put it in quotes",
    "list_type": "a list, as in [a, b]",
    "tuple_type": "a list, as in [a, b]",
    "too_long": "shorter",
}
"""What a value should have been, by pydantic's name of the error."""


def explain(
    error: ValidationError,
    document: Document,
    root: type[BaseModel],
    origins: Mapping[KeyPath, str],
    missed: Sequence[KeyPath] = (),
) -> list[tuple[tuple[int, float], str]]:
    """Return the place in the files and the text of every mistake: `file:line: a.b: what is wrong; what to do`.

    Mistakes of the command line come after all lines.

    Args:
        error: What pydantic found.
        document: The file.
        root: Its root model.
        origins: Where keys came from that the file does not hold.
        missed: Keys with a mark in the place of their value, which is no mistake of its own.
    """
    grouped: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(key_path(root, item["loc"], document.values), []).append(item)
    return [
        _placed(key, text, document, origins)
        for path, items in grouped.items()
        for key, text in _described(path, items, document, root)
        if not any(key[: len(marked)] == marked for marked in missed)
    ]


def _placed(
    key: KeyPath, text: str, document: Document, origins: Mapping[KeyPath, str]
) -> tuple[tuple[int, float], str]:
    text = f"{'.'.join(map(str, key))}: {text}"
    origin = _origin(key, document, origins)
    if origin is not None:
        return (len(document.later_files), math.inf), f"{origin}: {text}"
    return document.order(document.file_of(key), document.line(key)), f"{document.where(key)}: {text}"


def _origin(key: KeyPath, document: Document, origins: Mapping[KeyPath, str]) -> str | None:
    """Return the override that set a key, or the one that the section came to be with."""
    above = next((origins[key[:end]] for end in range(len(key), 0, -1) if key[:end] in origins), None)
    if above is not None or key in document.lines:
        return above
    return next((origin for path, origin in origins.items() if path[: len(key)] == key), None)


def _described(
    path: KeyPath, items: Sequence[Any], document: Document, root: type[BaseModel]
) -> Iterator[tuple[KeyPath, str]]:
    for item in items:
        if item["type"] == "rules":
            for key, text in item["ctx"]["mistakes"]:
                yield (*path, *(int(step) if step.isdecimal() else step for step in key.split("."))), text
            return
    yield path, _describe(path, items, document, root)


def _describe(path: KeyPath, items: Sequence[Any], document: Document, root: type[BaseModel]) -> str:
    first = items[0]
    match first["type"]:
        case "extra_forbidden":
            return _unknown_key(path, document, root)
        case "missing" if isinstance(first["loc"][-1], int):
            return f"{shortened(repr(first['input']), 60)} has too few values"
        case "missing":
            return f"required, and missing{example(path, document.values, root)}"
        case "union_tag_invalid":
            kinds = first["ctx"]["expected_tags"].split("'")[1::2]  # of pydantic's `'a', 'b' or 'c'`
            return _no_such_kind(first["ctx"]["tag"], kinds) + path_of_default(path, document.values, root)
        case "value_error":
            return str(first["ctx"]["error"])
        case "too_short":
            return "this list is empty; name at least one"
        case "model_type" | "dict_type" if first["input"] is None:
            remedy = example(path, document.values, root) or "; remove it, or give it keys"
            return f"this section is empty{remedy} ({{}} is a section with its defaults)"
        case "none_required":
            return f"{shortened(repr(first['input']), 60)} has no use for this command; remove it, or write null"
        case "model_type" | "dict_type":
            text = f"this is a section with keys of its own, not the value {shortened(repr(first['input']), 60)}"
            return text + written_as_section(path, first["input"], document.values, root)
    expected = [_WANTED.get(item["type"], str(item["msg"]).removeprefix("Input should be ")) for item in items]
    return f"{shortened(repr(items[0]['input']), 60)} should be {' or '.join(dict.fromkeys(expected))}"


def _unknown_key(path: KeyPath, document: Document, root: type[BaseModel]) -> str:
    """Say which key was meant: of another kind, in another place, or spelled otherwise."""
    name = str(path[-1])
    section, choice = section_at(root, path[:-1], document.values)
    assert section is not None, "pydantic finds unknown keys in sections only"
    if issubclass(section, Section) and name in section.removed:
        return f"there is no such key: {section.removed[name]}"
    if belonging := belongs_to_sibling(path, document.values, root):
        return belonging
    kinds = [kinds_of(member)[0] for member in choice.sections if name in member.model_fields]
    if kinds:
        kind = " or ".join(kinds_of(section))
        # `reward` and `rewards` are two sections, and a key of one is easily written into the other.
        plural = f"{path[0]}s.{name}"
        meant = f"; did you mean {plural}?" if plural in all_keys(root) else ""
        return f"kind {kind} has no such key; it belongs to kind {' and '.join(kinds)}{meant}"
    return _misplaced_or_misspelt(name, list(section.model_fields), sorted(set(all_keys(root))))


def _misplaced_or_misspelt(name: str, siblings: Sequence[str], everywhere: Sequence[str]) -> str:
    above, dot, last = name.rpartition(".")
    if dot and name in everywhere:
        return f"dots are for the command line; in a file write {last} inside {above}"
    elsewhere = _with_last_word(name, everywhere)
    if explanation := _of_other_system(name, elsewhere, everywhere):
        return f"unknown key; {explanation}"
    begun = [sibling for sibling in siblings if sibling.startswith(f"{name}_")]
    if begun:
        return f"unknown key; did you mean {' or '.join(begun[:3])}?"
    if elsewhere and not _close(name, siblings, 0.85):
        return f"unknown key here; it belongs elsewhere: did you mean {' or '.join(elsewhere[:3])}?"
    by_last_word = {dotted.split(".")[-1]: dotted for dotted in sorted(everywhere, key=lambda key: "*" not in key)}
    close = _close(name, siblings, 0.6) or by_last_word.get(_close(name, list(by_last_word), 0.8) or "")
    return f"unknown key; did you mean {close}?" if close else f"unknown key; this section has {', '.join(siblings)}"


def _of_other_system(name: str, elsewhere: Sequence[str], everywhere: Sequence[str]) -> str:
    """Say what a key of another system is here, and what differs; "" for one of ours, and where no system has it."""
    return "" if elsewhere else str(registry.load(registry.KEY_HINT)(name, everywhere))


def _with_last_word(name: str, everywhere: Sequence[str]) -> list[str]:
    """Return the keys that end so; those under names of the user's (`*`) only if there is no other."""
    matches = [dotted for dotted in everywhere if dotted.split(".")[-1] == name]
    return [dotted for dotted in matches if "*" not in dotted] or matches


def _no_such_kind(kind: str, kinds: Sequence[str]) -> str:
    close = _close(kind, kinds, 0.6)
    meant = f" Did you mean {close}?" if close else ""
    return f"there is no kind {kind!r}.{meant} Kinds: {', '.join(kinds)}"


def _close(typed: str, candidates: Sequence[str], cutoff: float) -> str | None:
    """Return the candidate that a mistake of the hand explains.

    One letter in three is wrong at most, or one; or letters are left out, no more than half of them.
    """
    near = difflib.get_close_matches(typed, candidates, n=3, cutoff=cutoff)
    return next(
        (name for name in near if _edits(typed, name) <= max(1, len(typed) // 3) or _shortens(typed, name)), None
    )


def _shortens(typed: str, name: str) -> bool:
    letters = iter(name)
    return 2 * len(typed) >= len(name) and all(letter in letters for letter in typed)


def _edits(typed: str, name: str) -> int:
    """Return how many letters were inserted, left out, replaced or exchanged with the next."""
    before: list[int] = []
    above = list(range(len(name) + 1))
    for row, letter in enumerate(typed, 1):
        line = [row]
        for column, name_letter in enumerate(name, 1):
            least = min(above[column] + 1, line[-1] + 1, above[column - 1] + (letter != name_letter))
            if row > 1 and column > 1 and letter == name[column - 2] and typed[row - 2] == name_letter:
                least = min(least, before[column - 2] + 1)
            line.append(least)
        before, above = above, line
    return above[-1]


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
    files, values = split_overrides(overrides)
    draft = Draft(merged([parse_file(file) for file in (path, *files)], root))
    for override in values:
        _apply(draft, override, root)
    run = draft.document.values.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = "-".join(file.stem for file in (path, *files))
        draft.origins["run", "name"] = f"the name of {' and '.join(file.name for file in (path, *files))}"
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
    for override in overrides:
        _apply(draft, override, root)
    return check_draft(draft, root)


def check_draft(draft: Draft, root: type[Root]) -> Root:
    """Validate a draft against a root.

    Raises:
        ConfigError: One line for each mistake.
    """
    document = draft.document
    mistakes = [(document.order(file, line), f"{file}:{line}: {message}") for file, line, message in document.twice]
    missed = [*_missed(document, root)]
    mistakes += [_placed(path, _UNKNOWN, document, draft.origins) for path in missed]
    config: Root | None = None
    try:
        config = root.model_validate(document.values)
    except ValidationError as error:
        mistakes += explain(error, document, root, draft.origins, missed)
    lines = [text for _, text in sorted(mistakes, key=lambda pair: pair[0])] + draft.mistakes
    if config is not None and not lines:
        return config
    raise ConfigError(_listed(lines, document))


def _listed(lines: Sequence[str], document: Document) -> str:
    of_command_line = all(text.startswith(_COMMAND_LINE) for text in lines)
    has = "have" if document.later_files and not of_command_line else "has"
    heading = f"{f'The {_COMMAND_LINE}' if of_command_line else document.files} {has} {len(lines)} mistakes:\n"
    return (heading if len(lines) > 1 else "") + "\n".join(lines)


_COMMAND_LINE = "command line"
_UNKNOWN = (
    "its value was left out, since it may be secret; write the value, or evaluate with the file of the run: `holdfast "
    "eval RUN.yaml model.path=EXPORT`"
)


def _missed(document: Document, root: type[BaseModel]) -> Iterator[KeyPath]:
    """Yield the keys that an export left out, but those that it can do without, which are removed."""
    for path in [*_left_out(document.values)]:
        section = section_at(root, path[:-1], document.values)[0]
        field = None if section is None else section.model_fields.get(str(path[-1]))
        if Path(document.file).name == EXPORTED_CONFIG and field is not None and Declared.SPARED in marks_of(field):
            container: Any = document.values
            for key in path[:-1]:
                container = container[key]
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


def _apply(draft: Draft, override: str, root: type[BaseModel]) -> None:
    """Set the key an override names, or note what is wrong with the override."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        draft.mistakes.append(
            f"{_COMMAND_LINE} ({override}): this is no override; write section.key=value, for example optim.lr=2e-6"
        )
        return
    try:
        path = _set(draft.document.values, keys, parse_value(text), root)
        draft.origins[path] = f"{_COMMAND_LINE} ({override})"
    except ConfigError as error:
        draft.mistakes.append(f"{_COMMAND_LINE} ({override}): {error}")


def _set(values: dict[str, Any], keys: Sequence[str], value: Any, root: type[BaseModel]) -> KeyPath:
    """Set a key below nested mappings and lists, making sections on the way; return its path."""
    container: Any = values
    path: KeyPath = ()
    for key in keys[:-1]:
        path = (*path, _step(container, key))
        below = container.get(key) if isinstance(container, dict) else container[path[-1]]
        if below is None:
            below = {}
        elif section_at(root, path, values)[1].is_union:
            below = section_at(root, path, values)[1].long_form(below)
        if not isinstance(below, dict | list):
            raise ConfigError(
                f"{'.'.join(map(str, path))} is the value {below!r}, not a section; name one of its own keys, or "
                "replace it whole"
            )
        container[path[-1]] = below
        container = below
    path = (*path, _step(container, keys[-1]))
    if value is None and isinstance(container, dict) and not takes_null(root, path, values):
        container.pop(path[-1], None)  # what a file says there is switched off; defaults are in its place
    else:
        container[path[-1]] = value
    return path


def _step(container: dict[str, Any] | list[Any], key: str) -> str | int:
    """Return a key as its container takes it."""
    if isinstance(container, dict):
        return key
    if not key.isdecimal() or int(key) >= len(container):
        raise ConfigError(f"{key!r} is not an index of a list with {len(container)} items")
    return int(key)
