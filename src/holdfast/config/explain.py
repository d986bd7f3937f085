"""Turn pydantic's errors into lines a person can act on: where, what, and the key that was probably meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from holdfast.config.yaml12 import Document, KeyPath


def explain(
    error: ValidationError, document: Document, root: type[BaseModel], origins: Mapping[KeyPath, str]
) -> list[str]:
    """Return one line per mistake, in file order: `file:line: a.b: what is wrong; what to write`."""
    grouped: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_raw_path(item["loc"], item["type"], document.values), []).append(item)
    lines = []
    for path, items in grouped.items():
        dotted = ".".join(str(part) for part in path)
        text = _describe(path, items, document, root)
        origin = next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), None)
        where = f"command line ({origin})" if origin is not None else document.where(path)
        line = document.lines.get(path, 0)
        lines.append((line, f"{where}: {dotted + ': ' if dotted else ''}{text}"))
    return [text for _, text in sorted(lines, key=lambda pair: pair[0])]


def _raw_path(location: tuple[int | str, ...], kind: str, values: Any) -> KeyPath:
    """Drop pydantic's union tags from a location: keep the parts that are keys of the file."""
    path: list[int | str] = []
    place = values
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(place, Mapping) and part in place:
            path.append(part)
            place = place[str(part)]
        elif isinstance(place, list) and isinstance(part, int) and part < len(place):
            path.append(part)
            place = place[part]
        elif last and kind == "missing":
            path.append(part)
    return tuple(path)


def _describe(path: KeyPath, items: list[Any], document: Document, root: type[BaseModel]) -> str:
    first = items[0]
    match first["type"]:
        case "extra_forbidden":
            return _unknown_key(path, document, root)
        case "missing":
            return "required, and missing"
        case "union_tag_invalid":
            tag = first["ctx"]["tag"]
            known = [name.strip().strip("'") for name in first["ctx"]["expected_tags"].split(",")]
            return f"there is no kind {tag!r}; " + _suggest(tag, known, f"kinds: {', '.join(known)}")
        case "value_error" | "assertion_error":
            return str(first["msg"]).split(", ", 1)[-1]
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"this is a section with keys of its own, not the value {_short(first['input'])}"
    wanted = " or ".join(dict.fromkeys(str(item["msg"]).removeprefix("Input should be ") for item in items))
    return f"{_short(first['input'])} should be {wanted}"


def _unknown_key(path: KeyPath, document: Document, root: type[BaseModel]) -> str:
    name = str(path[-1])
    section = _section_at(root, path[:-1], document.values)
    siblings = list(section.model_fields) if section is not None else []
    everywhere = sorted(set(all_paths(root)))
    elsewhere = [dotted for dotted in everywhere if dotted.split(".")[-1] == name]
    if elsewhere and not difflib.get_close_matches(name, siblings, n=1, cutoff=0.85):
        return f"unknown key here; it belongs elsewhere: did you mean {' or '.join(elsewhere[:3])}?"
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    leaves = {dotted.split(".")[-1]: dotted for dotted in everywhere}
    close = difflib.get_close_matches(name, list(leaves), n=1, cutoff=0.75)
    if close:
        return f"unknown key; did you mean {leaves[close[0]]}?"
    return f"unknown key; this section has {', '.join(siblings)}"


def _suggest(word: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}? ({otherwise})" if close else otherwise


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections an annotation can hold, through unions, lists, mappings and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _section_at(root: type[BaseModel], path: KeyPath, values: Any) -> type[BaseModel] | None:
    """Return the section a path leads to; of a tagged union, the member the file's `kind` names."""
    section: type[BaseModel] | None = root
    place = values
    for part in path:
        place = place[part]
        if isinstance(part, int) or section is None or str(part) not in section.model_fields:
            continue
        field = section.model_fields[str(part)]
        choices = list(_models_in(field.annotation))
        if not choices:
            return None
        default = getattr(field.default, "kind", None)
        kind = place.get("kind", default) if isinstance(place, Mapping) else default
        section = next((model for model in choices if _kind(model) == kind), choices[0])
    return section


def _kind(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("kind")
    return field.default if field is not None else None


def all_paths(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key of the tree."""
    for name, field in root.model_fields.items():
        dotted = f"{prefix}{name}"
        models = list(_models_in(field.annotation))
        if not models:
            yield dotted
        is_list = typing.get_origin(field.annotation) in {list, dict}
        for model in models:
            yield from all_paths(model, f"{dotted}.{'*.' if is_list else ''}")
