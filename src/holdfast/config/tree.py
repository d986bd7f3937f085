"""The shape of the tree: which sections a key can hold, and which key a path of pydantic's means."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from holdfast.config.base import PATH, ByKind, TextOrSection, keys_of, kinds_of, section_of
from holdfast.config.yaml12 import KeyPath


@dataclass(frozen=True)
class KeyType:
    """What one key can hold."""

    sections: tuple[type[BaseModel], ...] = ()
    """None: a plain value. One: a section. Several: the members of a tagged union."""
    several: bool = False
    """Whether it holds a list or mapping of them."""
    is_list: bool = False
    """Whether it holds a list of them; one section may then stand for a list of one, where the tree takes that."""
    default_kind: str | None = None
    """Of a tagged union: kind of a section that names none."""
    text_key: str | None = None
    """Of a section for which a text may stand: the key that the text is of."""

    @property
    def is_union(self) -> bool:
        """Whether a kind chooses among sections."""
        return self.default_kind is not None and not self.several

    @property
    def section(self) -> type[BaseModel] | None:
        """The section that stands here, if it can only be one."""
        return self.sections[0] if len(self.sections) == 1 and not self.several else None

    def of_kind(self, kind: object) -> KeyType:
        """Return the member of a tagged union by its kind; a plain value if there is none."""
        return KeyType(tuple(section for section in self.sections if kind in kinds_of(section)))

    def long_form(self, value: Any) -> Any:
        """Return the section that a text stands for; any other value as it is."""
        if isinstance(value, str) and self.text_key is not None:
            return {self.text_key: value}
        if not isinstance(value, str) or self.default_kind is None:
            return value
        return section_of(value, takes_functions=any(PATH in kinds_of(section) for section in self.sections))

    def spelt_out(self, value: Any) -> Any:
        """Return the section that a text stands for, where the key holds one section; any other value as it is."""
        return value if self.several else self.long_form(value)

    def chosen(self, value: Any) -> KeyType:
        """Return the member of a tagged union that a value of the file stands for."""
        value = self.long_form(value)
        return self.of_kind(
            str(value.get("kind", self.default_kind)) if isinstance(value, Mapping) else self.default_kind
        )

    def below(self, key: int | str) -> KeyType:
        """Return what a key of this section, or an item of this list or mapping, can hold."""
        if self.several:
            return KeyType(self.sections, default_kind=self.default_kind)
        field = None if self.section is None else keys_of(self.section).get(str(key))
        if field is None:
            return KeyType()
        tag = next((item for item in marks_of(field) if isinstance(item, ByKind)), None)
        origin = typing.get_origin(field.annotation)
        sections = tuple(_sections_in(field.annotation))
        text = next((item.key for item in marks_of(field) if isinstance(item, TextOrSection)), None)
        return KeyType(sections, origin in {list, dict}, origin is list, None if tag is None else tag.default, text)

    def alone(self, value: Any) -> KeyType:
        """Return what an item can hold, if one item stands for the list here; else itself."""
        return self.below(0) if self.is_list and value is not None and not isinstance(value, list) else self


def marks_of(field: FieldInfo) -> Iterator[Any]:
    """Yield what is attached to a key, to the items of its list or mapping, or to the members of its union."""
    yield from field.metadata
    for argument in typing.get_args(field.annotation):
        yield from getattr(argument, "__metadata__", ())


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)


def all_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key of the tree, sections included; `*` stands for a name or number."""
    for key in keys_of(root):
        shape = KeyType((root,)).below(key)
        yield f"{prefix}{key}"
        for section in shape.sections:
            yield from all_keys(section, f"{prefix}{key}.{'*.' if shape.several else ''}")


def dotted(path: KeyPath) -> str:
    """Return a path as it is written on the command line."""
    return ".".join(map(str, path))


def section_at(root: type[BaseModel], path: KeyPath, values: Any) -> tuple[type[BaseModel] | None, KeyType]:
    """Return the section that a path of the file leads to, and what could stand there instead."""
    shape = choice = KeyType((root,))
    for key in path:
        values = _below(values, key)
        choice = shape.below(key).alone(values)
        shape = choice.chosen(values) if choice.is_union else choice
    return shape.section, choice


def takes_null(root: type[BaseModel], path: KeyPath, values: Any) -> bool:
    """Return whether null can stand where a path leads: always for a plain value, whose own rule speaks of it."""
    above, at = section_at(root, path[:-1], values)[0], section_at(root, path, values)[1]
    if not at.sections:
        return True
    field = None if above is None else keys_of(above).get(str(path[-1]))
    return field is not None and type(None) in typing.get_args(field.annotation)


def key_path(root: type[BaseModel], location: Sequence[int | str], values: Any) -> KeyPath:
    """Return the keys of the file that a location of pydantic's means: without the kinds of unions and other marks."""
    path: list[int | str] = []
    shape = KeyType((root,))
    for step in location:
        if shape.is_union:
            shape = shape.of_kind(step)
        elif shape.alone(values) is not shape:
            shape = shape.below(step)
        elif shape.section is not None or shape.several or _has(values, step):
            path.append(step)
            values = _below(values, step)
            shape = shape.below(step)
    return tuple(path)


def _has(values: Any, step: int | str) -> bool:
    if isinstance(values, Mapping):
        return step in values
    return isinstance(values, list) and isinstance(step, int) and step < len(values)


def _below(values: Any, step: int | str) -> Any:
    return values[step] if _has(values, step) else None
