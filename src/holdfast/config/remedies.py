"""What to write instead of a mistake, as YAML that can be copied into the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from holdfast.config.base import PATH, OneOrSeveral, kinds_of
from holdfast.config.tree import KeyType, all_keys, section_at
from holdfast.config.yaml12 import KeyPath, to_flow

_LONGEST = 200
"""Characters of a line that is shown; a longer section is named alone."""


def example(path: KeyPath, values: Any, root: type[BaseModel]) -> str:
    """Return `; for example KEY: ...` of a required key that its section gives an example of; else ""."""
    section = section_at(root, path[:-1], values)[0]
    field = None if section is None else section.model_fields.get(str(path[-1]))
    if field is None or not field.is_required() or not field.examples:
        return ""
    return f"; for example {to_flow({str(path[-1]): field.examples[0]})}"


def written_as_section(path: KeyPath, value: Any, values: Any, root: type[BaseModel]) -> str:
    """Return what a text in the place of a section may have meant: a kind of one of its keys, or its path; else ""."""
    section = section_at(root, path, values)[0]
    if section is None or not isinstance(value, str):
        return ""
    kinds = (name for name, shape in _unions(section) if shape.of_kind(value).sections)
    key = next(kinds, PATH if PATH in section.model_fields else None)
    return "" if key is None else f"; write {to_flow({str(path[-1]): {key: value}})}"


def path_of_default(path: KeyPath, values: Any, root: type[BaseModel]) -> str:
    """Return how a path is written where it stands in the place of a kind; "" where it is none, or takes none."""
    choice = section_at(root, path, values)[1]
    value = _at(path, values)
    default = choice.of_kind(choice.default_kind).section
    if not isinstance(value, str) or "/" not in value or default is None or PATH not in default.model_fields:
        return ""
    return f". A path is written {to_flow({str(path[-1]): {PATH: value}})}"


def belongs_to_sibling(path: KeyPath, values: Any, root: type[BaseModel]) -> str:
    """Say of an unknown key that it belongs to an alternative that is chosen beside it; "" if it does not.

    `{loss: dpo, beta: 0.1}` becomes `loss: {kind: dpo, beta: 0.1}`, with all other keys that belong there.
    """
    name, section = str(path[-1]), section_at(root, path[:-1], values)[0]
    written = _at(path[:-1], values)
    if section is None or not isinstance(written, Mapping):
        return ""
    strangers = {key: value for key, value in written.items() if key not in section.model_fields}
    written_unions = [(key, shape) for key, shape in _unions(section) if key in written]
    # The default of a list has no dotted name that could be written.
    absent = [
        (key, shape)
        for key, shape in _unions(section)
        if key not in written and shape.default_kind != PATH and _takes_one_or_several(section, key)
    ]
    for key, shape in [*written_unions, *absent]:
        form = _with_strangers(shape, written.get(key), strangers, name)
        if form is not None:
            line = to_flow({key: form})
            return f"unknown key here; it belongs to {key}: write {line if len(line) <= _LONGEST else 'it inside'}"
    return _of_kind_not_chosen(path, written_unions, written, root)


def _of_kind_not_chosen(
    path: KeyPath, written_unions: list[tuple[str, KeyType]], written: Mapping[str, Any], root: type[BaseModel]
) -> str:
    """Say that another kind of a section beside the key has it, where no other section of the tree does."""
    name, above = str(path[-1]), [str(step) for step in path[:-1]]
    elsewhere = [dotted.split(".") for dotted in all_keys(root) if dotted.split(".")[-1] == name]
    for key, shape in written_unions:
        if isinstance(written[key], list) or any(dotted[: len(above) + 1] != [*above, key] for dotted in elsewhere):
            continue
        kinds = [kinds_of(member)[0] for member in shape.sections if name in member.model_fields]
        if kinds:
            kind = shape.long_form(written[key]).get("kind", shape.default_kind)
            return f"unknown key here, and {key} of kind {kind} has none; it belongs to kind {' and '.join(kinds)}"
    return ""


def _unions(section: type[BaseModel]) -> Iterator[tuple[str, KeyType]]:
    """Yield the keys of a section that hold alternatives, one or several."""
    for key in section.model_fields:
        shape = KeyType((section,)).below(key)
        if shape.default_kind is not None:
            yield key, shape


def _takes_one_or_several(section: type[BaseModel], key: str) -> bool:
    return any(isinstance(mark, OneOrSeveral) for mark in section.model_fields[key].metadata)


def _with_strangers(shape: KeyType, value: Any, strangers: Mapping[str, Any], name: str) -> Any:
    """Return a value with the keys that belong into it; None where `name` is not one of them."""
    items = value if isinstance(value, list) else [value]
    for index, item in enumerate(items):
        long = {"kind": shape.default_kind} if item is None else shape.long_form(item)
        if not isinstance(long, Mapping):
            continue
        member = shape.of_kind(str(long.get("kind", shape.default_kind))).section
        if member is not None and name in member.model_fields and name not in long:
            form = {**long, **{key: stranger for key, stranger in strangers.items() if key in member.model_fields}}
            return [*items[:index], form, *items[index + 1 :]] if isinstance(value, list) else form
    return None


def _at(path: KeyPath, values: Any) -> Any:
    for key in path:
        values = values[key]
    return values
