"""What of a configuration may leave its run or its machine, as its sections declare it (`config.base.Declared`)."""

from __future__ import annotations

import hashlib
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from holdfast.config.base import LEFT_OUT, Declared, is_left_out, keys_of
from holdfast.config.earlier import todays_form
from holdfast.config.tree import KeyType
from holdfast.config.verbs.roots import ROOTS, verb_of
from holdfast.text.escaping import escaped

_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*://)([^/\s?#]*@)?([^\s?#;]*)([?#;]\S+)?")
_NO_PORT = r":(?!\d*(?:[/?#;\s]|$))"
_PASSWORD = re.compile(rf"[^\s?#]*?{_NO_PORT}\S*@|[^\s/?#:]*{_NO_PORT}[^@]*@")
"""What may be a user and a password with characters that no address has there, behind `://` or a user part."""
_HASH = "sha256 "
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""At least two words: a key pasted in the place of a variable's name has no underscores."""
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Form:
    """How public texts are shown, and what stands in the place of all that is not public."""

    text: Callable[[str], str | None]
    """None for a text that is not public after all."""
    mark: Callable[[Any], str]


def public_configuration(values: Any, form: Form | None = None) -> Any:
    """Return a run's resolved configuration without what could be secret.

    Numbers, truth values, members of a `Literal` and texts that their section declares public are there. Keys that no
    section has, such as those of another version, are not public.

    Args:
        values: The tree.
        form: Default: NAMES.
    """
    if not isinstance(values, Mapping):
        return {}
    return public_section(ROOTS[verb_of(values)], todays_form(values), form)


def public_section(section: type[BaseModel], values: Any, form: Form | None = None) -> Any:
    """Return the values of one section, as `public_configuration` does for a tree."""
    return _below(KeyType((section,)), values, form or NAMES)


def _below(at: KeyType, value: Any, form: Form) -> Any:
    """Return what stands where the tree has sections."""
    at = at.alone(value)
    if at.several and isinstance(value, list):
        return [_below(at.below(0), item, form) for item in value]
    chosen = at.chosen(value) if at.is_union else at
    value = at.long_form(value)
    if chosen.section is None or not isinstance(value, Mapping):
        return value if value is None or isinstance(value, bool) else _marked(value, form)
    return {str(key): _of_key(chosen, chosen.section, key, item, form) for key, item in value.items()}


def _of_key(at: KeyType, section: type[BaseModel], key: str, value: Any, form: Form) -> Any:
    field = keys_of(section).get(key)
    if field is None:
        return _marked(value, form)
    below = at.below(key)
    if not below.sections:
        return _leaf(field.annotation, field.metadata, value, form)
    if below.several and not below.is_list and isinstance(value, Mapping):
        names = typing.get_args(field.annotation)[0]
        return {_name(names, name, form): _below(below.below(name), item, form) for name, item in value.items()}
    return _below(below, value, form)


def _leaf(annotation: Any, declared: Sequence[Any], value: Any, form: Form) -> Any:
    """Return a value without sections below it; its mark where its type does not make it public."""
    public = _public(annotation, declared, value, form)
    return _marked(value, form) if public is None and value is not None else public


def _name(annotation: Any, name: Any, form: Form) -> Any:
    """Return the key of a mapping; JSON writes numbers as texts."""
    return name if str(name).isdecimal() else _leaf(annotation, (), name, form)


def _public(annotation: Any, declared: Sequence[Any], value: Any, form: Form) -> Any:
    """Return a value as far as its type makes it public; None where it does not."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Annotated:
            return _public(arguments[0], arguments[1:], value, form)
        case typing.Union | types.UnionType:
            shown = (_public(each, (), value, form) for each in arguments)
            return next((each for each in shown if each is not None), None)
        case typing.Literal:
            return value if value in arguments else None
        case None:
            return _scalar(annotation, declared, value, form)
    return _items(arguments, value, form)


def _items(types_: Sequence[Any], value: Any, form: Form) -> Any:
    """Return a list or a mapping with the items that are public; None if it has none."""
    if isinstance(value, list | tuple):
        items = [_public(types_[0], (), item, form) for item in value]
        marked = [_marked(item, form) if shown is None else shown for item, shown in zip(value, items, strict=True)]
        return None if all(item is None for item in items) else marked
    if not isinstance(value, Mapping) or len(types_) == 1 or types_[1] is Any:
        return None
    return {_name(types_[0], name, form): _leaf(types_[1], (), item, form) for name, item in value.items()}


def _scalar(type_: Any, declared: Sequence[Any], value: Any, form: Form) -> Any:
    if type_ in {int, float, bool} or Declared.NUMBER in declared:
        return value if isinstance(value, int | float) else None
    if type_ is not str or not isinstance(value, str):
        return None
    if Declared.VARIABLE in declared:
        return value if _VARIABLE.fullmatch(value) else None
    return form.text(value) if Declared.PUBLIC in declared else None


def _marked(value: Any, form: Form) -> Any:
    """Return what stands in the place of a value; nothing has to be hidden of an empty one."""
    is_marked = is_left_out(value) or (isinstance(value, str) and value.startswith(_HASH))
    return value if value in ("", [], {}) or is_marked else form.mark(value)


def _hash(value: Any) -> str:
    return _HASH + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _left_out(_: Any) -> str:
    return LEFT_OUT


def without_password(text: str) -> str | None:
    """Return a text as it is, an address without user, password and query; None for a text around such an address."""
    addresses = [*_ADDRESS.finditer(text)]
    if any(map(_may_show_password, addresses)):
        return None
    if len(addresses) == 1 and addresses[0][0] == text:
        return f"{addresses[0][1]}{addresses[0][3]}"
    return None if any(address[2] or address[4] for address in addresses) else text


def _may_show_password(address: re.Match[str]) -> bool:
    has_password = ":" in (address[2] or "") and "@" in f"{address[3]}{address[4] or ''}"
    return has_password or _PASSWORD.match(address.string, address.start(3)) is not None


def public_text(text: str) -> str:
    """Return a public text, reduced to what names something: of a path its last name, of an address its host."""
    if "://" in text:
        if not _ADDRESS.fullmatch(text) or without_password(text) is None:
            return f"(text of {len(text)} characters)"
        try:
            address = urlsplit(text)
            port = f":{address.port}" if address.port else ""
        except ValueError:  # half an address
            return f"(text of {len(text)} characters)"
        return f"{escaped(address.scheme)}://{escaped(address.hostname or '')}{port}"
    if "\n" in text or len(text) > _LONGEST_NAME + 400:
        return f"(text of {len(text)} characters)"
    name = text.rstrip("/\\").replace("\\", "/").rpartition("/")[2].partition("?")[0]
    return escaped(name if len(name) <= _LONGEST_NAME else f"(text of {len(text)} characters)")


def argument_words(kwargs: Mapping[str, Any]) -> str:
    """Return arguments of a user's code for a message, which is no place for secrets: names, and values of numbers."""
    return ", ".join(f"{name}={value!r}" if isinstance(value, int | float) else name for name, value in kwargs.items())


NAMES = Form(public_text, _left_out)
"""For cards, reports, trackers and pushes: paths and addresses become names."""
WHOLE = Form(without_password, _left_out)
"""For exports and checkpoints: whoever has one may have the files of the run as well, so paths stay, and `holdfast
eval` finds rows and functions."""
HASHED = Form(without_password, _hash)
"""For what a resume compares: equal values stay equal."""
